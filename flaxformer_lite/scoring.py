"""Scores of translations: BLEU and chrF by sacreBLEU, exact match, and confidence intervals.

There are 2 kinds of BLEU, with different names. `bleu` and `chrf` compare raw texts with raw
references; sacreBLEU tokenizes both. `bleu_tokenized` compares texts that are already tokenized, as
papers before sacreBLEU did. It depends on the tokenizer of the references, and is not comparable
with `bleu` (Post 2018, "A Call for Clarity in Reporting BLEU Scores").
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest, estimate_ci

from flaxformer_lite.system.errors import InputError

SEED = 12345  # of resampling; sacreBLEU's default

Texts = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of translations, by name."""

    # exact_match from 0 to 1; bleu and chrf, or bleu_tokenized, from 0 to 100
    values: dict[str, float]
    signatures: dict[str, str]  # sacreBLEU's
    # The mean over resamples, and half the width of the 95 % confidence interval.
    intervals: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    p_values: dict[str, float] = dataclasses.field(default_factory=dict)  # against the baseline


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


def score(hypotheses: Texts, references: Sequence[Texts], *, tokenized: bool = False) -> Scores:
    """Returns the scores of translations against 1 or more references each.

    Args:
      references: sequences with a text for every translation.
      tokenized: whether the texts are already tokenized.

    Raises:
      InputError: there are no translations, or the numbers of translations and references differ.
    """
    _check(hypotheses, references)
    values = {"exact_match": float(exact_matches(hypotheses, references).mean())}
    signatures = {}
    for name, metric in corpus_metrics(tokenized).items():
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
    tokenized: bool = False,
) -> list[Scores]:
    """Returns the scores of each system with confidence intervals and p-values.

    The intervals are of `bootstrap` resamples of the sentences, the same for every system (Koehn
    2004). The first system is the baseline. The p-values of the others are two-sided, by
    approximate randomization: `bootstrap` times, each sentence's translations are swapped at random
    between the 2 systems (Riezler 2005). The p of a paired bootstrap is too low: for equal systems
    it is under 0.05 in 10 % of all cases. All resamples are in memory at once: for chrF 72 bytes
    for each sentence of each.

    Raises:
      InputError: see `score`; or the seed is not positive.
    """
    for hypotheses in systems:
        _check(hypotheses, references)
    if seed < 1:  # sacreBLEU treats 0 as no seed
        raise InputError(f"the seed of resampling: expected 1 or more, got {seed}.")
    references = [list(texts) for texts in references]
    found = [_resampled_matches(systems, references, bootstrap=bootstrap, seed=seed)]
    signatures = {}
    for name, metric in corpus_metrics(tokenized).items():
        options = {"references": references, "bootstrap": bootstrap, "seed": seed}
        rows, signatures[name] = _resampled_metric(name, metric, systems, **options)
        found.append(rows)
    systems_found = list(zip(*found, strict=True))
    baseline = {row.name: row.value for row in systems_found[0]}
    return [
        Scores(
            values={row.name: float(row.value) for row in rows},
            signatures=signatures,
            intervals={row.name: tuple(map(float, row.interval)) for row in rows},
            # The p of equal scores is 1. sacreBLEU counts only larger differences, and returns 0.
            p_values={
                row.name: 1.0 if row.value == baseline[row.name] else float(row.p)
                for row in rows
                if row.p is not None
            },
        )
        for rows in systems_found
    ]


class _Resampled(NamedTuple):
    """A score of a system over resamples."""

    name: str
    value: float  # of the sentences as they are
    interval: tuple[float, float]  # mean and half width
    p: float | None  # None: this is the baseline


def _resampled_metric(
    name: str,
    metric: sacrebleu.BLEU | sacrebleu.CHRF,
    systems: Sequence[Texts],
    *,
    references: list[list[str]],
    bootstrap: int,
    seed: int,
) -> tuple[list[_Resampled], str]:
    """Returns a score of each system by sacreBLEU, and the signature."""
    named = [(str(number), list(hypotheses)) for number, hypotheses in enumerate(systems)]
    options = {"metrics": {name: metric}, "references": references, "n_samples": bootstrap}
    with _seed_of_sacrebleu(seed):
        alone = [PairedTest([system], test_type="bs", **options)() for system in named]
        tested = PairedTest(named, test_type="ar", **options)()[1] if len(named) > 1 else None
    ((title, signature),) = alone[0][0].items()
    if tested:
        signature.update("ar", bootstrap)
    rows = [scores[title][0] for _, scores in alone]
    p_values = [row.p_value for row in tested[title]] if tested else [None]
    return [
        _Resampled(name, row.score, (row.mean, row.ci), p)
        for row, p in zip(rows, p_values, strict=True)
    ], str(signature)


def _resampled_matches(
    systems: Sequence[Texts], references: Sequence[Texts], *, bootstrap: int, seed: int
) -> list[_Resampled]:
    """Returns the exact match of each system, resampled and tested as sacreBLEU does."""
    rng, count = np.random.default_rng(seed), len(systems[0])
    sampled = rng.choice(count, size=(bootstrap, count), replace=True)
    sign = 1.0 - 2.0 * rng.integers(2, size=(bootstrap, count))
    rows, baseline = [], None
    for hypotheses in systems:
        hits = exact_matches(hypotheses, references)
        baseline, p = hits if baseline is None else baseline, None
        if rows:
            gained = hits - baseline
            by_chance = np.abs(sign @ gained) >= abs(gained.sum())
            p = (by_chance.sum() + 1) / (bootstrap + 1)
        interval = estimate_ci(hits[sampled].mean(axis=1))
        rows.append(_Resampled("exact_match", hits.mean(), interval, p))
    return rows


def corpus_metrics(tokenized: bool) -> dict[str, sacrebleu.BLEU | sacrebleu.CHRF]:
    """Returns the metrics by name. `force` silences the warning about tokenized text."""
    if tokenized:
        return {"bleu_tokenized": sacrebleu.BLEU(tokenize="none", force=True)}
    return {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF()}


def _check(hypotheses: Texts, references: Sequence[Texts]) -> None:
    if not references:
        raise InputError(
            "the references: expected one text or more for each translation, got none."
        )
    numbered = {
        f"references {number}": len(texts) for number, texts in enumerate(references, start=1)
    }
    check_counts({"the translations": len(hypotheses), **numbered})


@contextlib.contextmanager
def _seed_of_sacrebleu(seed: int) -> Iterator[None]:
    """Sets the environment variable that sacreBLEU reads its seed from."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
