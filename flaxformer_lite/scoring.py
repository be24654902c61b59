"""Scores of translations: BLEU, chrF and TER by sacreBLEU, exact match, confidence intervals.

`scores/` has the parts: error rates of symbols, such as phones, groups, and resampling.

There are 2 kinds of BLEU, with different names. `bleu` and `chrf` compare raw texts with raw
references; for BLEU sacreBLEU tokenizes both, by a tokenizer that fits the target language, see
`tokenizer_for`. Scores by different tokenizers are not comparable. `bleu_tokenized` compares texts
that are already tokenized, as papers before sacreBLEU did. It depends on the tokenizer of the
references, and is not comparable with `bleu` (Post 2018, "A Call for Clarity in Reporting BLEU
Scores").
"""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import numpy as np
import sacrebleu

from flaxformer_lite.field_rules import BLEU_TOKENIZERS
from flaxformer_lite.scores.groups import GroupScores, members_of_groups, names_of_groups
from flaxformer_lite.scores.resampling import Metric, Ratio, resample_metric, resample_ratio
from flaxformer_lite.scores.symbols import nearest_edits, quotient, rates
from flaxformer_lite.system.errors import InputError

SEED = 12345  # of resampling; sacreBLEU's default
DEFAULT_TOKENIZER = "13a"  # for languages that separate words by spaces
# By language: MeCab's tokenizer and the module that it needs; without it, characters.
MECAB = {"ja": ("ja-mecab", "MeCab"), "ko": ("ko-mecab", "mecab_ko")}
# languages that do not separate words by spaces, and have no tokenizer of their own
UNSPACED = ("th", "km", "lo", "my")

Texts = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts are compared."""

    tokenizer: str = DEFAULT_TOKENIZER  # of BLEU, one of BLEU_TOKENIZERS
    tokenized: bool = False  # whether the texts are already tokenized
    lowercase: bool = False  # whether case is ignored, by all scores but exact match
    ter: bool = False  # whether TER is computed too
    symbols: bool = False  # whether the error rates of symbols are computed too


class SettingsGiven(TypedDict, total=False):
    """Fields of `Settings` as keyword arguments."""

    tokenizer: str
    tokenized: bool
    lowercase: bool
    ter: bool
    symbols: bool


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of translations, by name."""

    # exact_match from 0 to 1; bleu and chrf, or bleu_tokenized, from 0 to 100; error rates in
    # percent, NaN if the references have no symbols
    values: dict[str, float]
    signatures: dict[str, str]  # sacreBLEU's
    # The mean over resamples, and half the width of the 95 % confidence interval.
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    # Of the difference from the baseline: by approximate randomisation, and by the paired
    # bootstrap, whose p is too low.
    p_values: dict[str, float] = dataclasses.field(default_factory=dict)
    bootstrap_p_values: dict[str, float] = dataclasses.field(default_factory=dict)


def exact_matches(hypotheses: Texts, references: Sequence[Texts]) -> np.ndarray:
    """Returns 1.0 for each translation that equals one of its references, else 0.0; (N,)."""
    return np.array(
        [h in r for h, r in zip(hypotheses, zip(*references, strict=True), strict=True)], np.float64
    )


def check_counts(counts: Mapping[str, int]) -> None:
    """Raises InputError unless the numbers of lines, by name, are all the same and positive."""
    (first, expected), *others = counts.items()
    if not expected:
        raise InputError(f"{first}: expected a line for each sentence, got none.")
    for name, count in others:
        if count != expected:
            raise InputError(
                f"{name}: expected {expected} lines, as many as {first} has, got {count}."
            )


def tokenizer_for(language: str | None) -> str:
    """Returns BLEU's tokenizer for a target language such as 'zh' or 'zh_Hans'; None: unknown.

    Prints to standard error, once a process, that a language's MeCab is not installed.
    """
    primary = re.split("[-_]", language or "")[0].lower()
    if primary in MECAB:
        name, module = MECAB[primary]
        if importlib.util.find_spec(module) is not None:
            return name
        _say_without(name)
        return "char"
    if primary in ("zh", "yue"):
        return "zh"
    return "char" if primary in UNSPACED else DEFAULT_TOKENIZER


@functools.cache
def _say_without(name: str) -> None:
    print(
        f"warning: BLEU counts characters (tok:char), as its tokenizer {name!r} is not installed; "
        "for scores that compare with others: pip install 'flaxformer-lite[mecab]'.",
        file=sys.stderr,
    )


def warn_if_unspaced(texts: Texts) -> None:
    """Warns if texts that 13a would tokenize are in a script without spaces."""
    text = "".join(itertools.islice(texts, 1000))
    letters = [character for character in text if character.isalpha()]
    if sum(map(_is_unspaced, letters)) > len(letters) / 2:
        print(
            "warning: most letters are of a script without spaces between words, and BLEU by 13a "
            "takes a sentence for one word; name the tokenizer, as --tokenize=zh or char.",
            file=sys.stderr,
        )


def _is_unspaced(letter: str) -> bool:
    """Whether a letter is Han, Kana, Thai, Lao, Burmese or Khmer."""
    number = ord(letter)
    blocks = (
        (0x0E00, 0x0EFF),
        (0x1000, 0x109F),
        (0x1780, 0x17FF),
        (0x3040, 0x30FF),
        (0x3400, 0x9FFF),
        (0xF900, 0xFAFF),
        (0x20000, 0x3FFFF),
    )
    return any(first <= number <= last for first, last in blocks)


def score(
    hypotheses: Texts, references: Sequence[Texts], **settings: Unpack[SettingsGiven]
) -> Scores:
    """Returns the scores of translations against 1 or more references each.

    Args:
      references: sequences with a text for every translation.
      settings: fields of `Settings`.

    Raises:
      InputError: there are no translations, or the numbers of translations and references differ;
        or the tokenizer is not installed.
    """
    _check(hypotheses, references)
    ratios = _ratios(hypotheses, references, Settings(**settings))
    values = {name: quotient(*ratio) for name, ratio in ratios.items()}
    signatures = {}
    for name, metric in corpus_metrics(Settings(**settings)).items():
        values[name] = metric.corpus_score(
            list(hypotheses), [list(texts) for texts in references]
        ).score
        signatures[name] = str(metric.get_signature())
    return Scores(values, signatures)


def resample(
    systems: Sequence[Texts],
    references: Sequence[Texts],
    *,
    bootstrap: int,
    seed: int = SEED,
    **settings: Unpack[SettingsGiven],
) -> list[Scores]:
    """Returns the scores of each system with confidence intervals and p-values.

    The intervals are of `bootstrap` resamples of the sentences, the same for every system (Koehn
    2004). The first system is the baseline. The p-values of the others are two-sided, each of one
    system against the baseline, by 2 tests:

    - approximate randomisation: `bootstrap` times, each sentence's translations are swapped at
      random between the 2 systems (Riezler 2005);
    - the paired bootstrap: the same resamples of both systems (Koehn 2004). Its p is too low: for
      equal systems it is under 0.05 in 10 % of all cases.

    All resamples are in memory at once: for chrF 72 bytes for each sentence of each.

    Raises:
      InputError: see `score`; or the seed is not positive.
    """
    for hypotheses in systems:
        _check(hypotheses, references)
    if seed < 1:  # sacreBLEU treats 0 as no seed
        raise InputError(f"the seed of resampling: expected 1 or more, got {seed}.")
    references = [list(texts) for texts in references]
    ratios = [_ratios(each, references, Settings(**settings)) for each in systems]
    found = [
        resample_ratio(name, [each[name] for each in ratios], bootstrap=bootstrap, seed=seed)
        for name in ratios[0]
    ]
    signatures = {}
    for name, metric in corpus_metrics(Settings(**settings)).items():
        rows, signatures[name] = resample_metric(
            name, metric, systems, references=references, bootstrap=bootstrap, seed=seed
        )
        found.append(rows)
    return [
        Scores(
            values={row.name: row.value for row in rows},
            signatures=signatures,
            intervals={row.name: row.interval for row in rows},
            p_values={row.name: row.p for row in rows if row.p is not None},
            bootstrap_p_values={
                row.name: row.bootstrap_p for row in rows if row.bootstrap_p is not None
            },
        )
        for rows in zip(*found, strict=True)
    ]


def scores_by_group(
    hypotheses: Texts,
    references: Sequence[Texts],
    groups: Sequence[str],
    **settings: Unpack[SettingsGiven],
) -> dict[str, GroupScores]:
    """Returns the scores of each group by its name, in the order of the names.

    Numbers in names are ordered by their value, so 5-8 is before 17-32.

    Args:
      groups: the name of each sentence's group, or 'length': ranges of the length of the first
        references, in symbols.
      references, settings: as for `score`.

    Raises:
      InputError: as `score`; or there are not as many names as sentences, or one is empty.
    """
    groups = names_of_groups(references, groups)
    check_counts({"the hypotheses": len(hypotheses), "the groups": len(groups)})
    found = {}
    for name, indices in members_of_groups(groups).items():
        chosen, *others = (
            [texts[index] for index in indices] for texts in (hypotheses, *references)
        )
        found[name] = GroupScores(len(chosen), score(chosen, others, **settings).values)
    return found


def score_segments(
    hypotheses: Texts, references: Sequence[Texts], **settings: Unpack[SettingsGiven]
) -> list[dict[str, float]]:
    """Returns the scores of each translation by name, in order.

    BLEU is sacreBLEU's sentence score: n-grams up to the translation's length (effective order),
    with smoothing. `symbol_edits` and `reference_symbols` are the numerator and the denominator of
    `symbol_error_rate`.

    Args:
      references, settings: as for `score`.

    Raises:
      InputError: as `score`.
    """
    _check(hypotheses, references)
    chosen = Settings(**settings)
    columns: dict[str, Sequence[float]] = {
        "exact_match": exact_matches(hypotheses, references).tolist()
    }
    if chosen.symbols:
        found = nearest_edits(*_cased(hypotheses, references, chosen))
        columns["symbol_edits"] = found.edits_N.tolist()
        columns["reference_symbols"] = found.length_N.tolist()
    for name, metric in corpus_metrics(chosen, sentences=True).items():
        columns[name] = [
            float(metric.sentence_score(hypothesis, texts).score)
            for hypothesis, *texts in zip(hypotheses, *references, strict=True)
        ]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _cased(
    hypotheses: Texts, references: Sequence[Texts], settings: Settings
) -> tuple[Texts, Sequence[Texts]]:
    """Returns the texts, in lower case if the settings say so."""
    if not settings.lowercase:
        return hypotheses, references
    hypotheses, *references = (
        [text.lower() for text in texts] for texts in (hypotheses, *references)
    )
    return hypotheses, references


def _ratios(hypotheses: Texts, references: Sequence[Texts], settings: Settings) -> dict[str, Ratio]:
    """Returns the scores that are ratios of sums over sentences, by name."""
    hits_N = exact_matches(hypotheses, references)
    ratios = {"exact_match": (hits_N, np.ones(len(hits_N)))}
    if settings.symbols:
        ratios |= rates(*_cased(hypotheses, references, settings))
    return ratios


def corpus_metrics(settings: Settings, *, sentences: bool = False) -> dict[str, Metric]:
    """Returns the metrics by name. `force` silences the warning about tokenized text.

    Args:
      sentences: whether BLEU is for single sentences, with effective order.

    Raises:
      InputError: the tokenizer is not installed, or cannot be downloaded.
    """
    lowercase = settings.lowercase
    ter = {"ter": _ter(settings)} if settings.ter else {}
    if settings.tokenized:
        tokens = sacrebleu.BLEU(
            tokenize="none", force=True, lowercase=lowercase, effective_order=sentences
        )
        return {"bleu_tokenized": tokens, **ter}
    chrf = sacrebleu.CHRF(lowercase=lowercase)
    bleu = _bleu(settings.tokenizer, lowercase=lowercase, effective_order=sentences)
    return {"bleu": bleu, "chrf": chrf, **ter}


def _bleu(tokenizer: str, *, lowercase: bool, effective_order: bool) -> sacrebleu.BLEU:
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a missing library or a download
            return sacrebleu.BLEU(
                tokenize=tokenizer, lowercase=lowercase, effective_order=effective_order
            )
    except Exception as error:  # an ImportError, RuntimeError or an error of the network
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = {
            "ja-mecab": "pip install 'flaxformer-lite[mecab]'",
            "ko-mecab": "pip install 'flaxformer-lite[mecab]'",
            "flores200": "it downloads a model, and needs the network once",
            "spm": "it downloads a model, and needs the network once",
        }.get(tokenizer, f"choose one of {', '.join(BLEU_TOKENIZERS)}")
        raise InputError(
            f"the tokenizer {tokenizer!r} of BLEU cannot be used: {reason}; {advice}, or choose "
            "'char'."
        ) from error


def _ter(settings: Settings) -> sacrebleu.TER:
    """Returns TER of words; of characters in Chinese and Japanese, by tercom's rules for Asia."""
    asian = not settings.tokenized and settings.tokenizer in ("zh", "char", "ja-mecab")
    return sacrebleu.TER(
        case_sensitive=not settings.lowercase, normalized=asian, asian_support=asian
    )


def _check(hypotheses: Texts, references: Sequence[Texts]) -> None:
    if not references:
        raise InputError(
            "the references: expected one text or more for each translation, got none."
        )
    numbered = {
        f"references {number}": len(texts) for number, texts in enumerate(references, start=1)
    }
    check_counts({"the translations": len(hypotheses), **numbered})
