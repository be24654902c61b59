"""Flags of `score`, and those that `evaluate` shares with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import define_in, listed
from flaxformer_lite.field_rules import BLEU_TOKENIZERS
from flaxformer_lite.scores.symbols import LENGTH
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

SETTINGS = ("tokenized", "lowercase", "ter", "symbols")  # flags that are fields of the scores


class ScoreRequest(NamedTuple):
    """Arguments of `score`."""

    hypotheses: list[Path]  # one of each system
    references: list[Path]
    tokenizer: str | None  # of BLEU; None: by the language
    language: str | None  # of the texts, if it is given or the files' names end in one
    settings: dict[str, bool]  # those of SETTINGS
    baseline: Path | None
    resampling: dict[str, Any]  # `bootstrap` and `seed`, if they are given
    groups: Path | str | None = None  # a file of names, or 'length'
    segments: Path | None = None  # the file for the scores of each line


class AlignmentRequest(NamedTuple):
    """Arguments of `score` for alignments in place of translations."""

    alignments: Path
    references: Path


def parse_score(arguments: Sequence[str]) -> ScoreRequest | AlignmentRequest:
    """Parses the flags of `score`.

    Raises:
      InputError: a file is not named, or a flag has no effect.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        hypotheses = "file of translations, one per line; H1,H2: of several systems"
        flag.strings("hypotheses", [], hypotheses)
        flag.strings("references", [], "reference files, R1,R2, one line for each translation")
        flag.boolean("tokenized", False, "the files are tokenised: compute BLEU on their tokens")
        language = "language of the texts, such as zh; default: the end of the files' names"
        flag.string("language", None, language)
        tokenize = "sacreBLEU's tokenizer; default: by the language, zh for Chinese, 13a for most"
        flag.enum("tokenize", None, list(BLEU_TOKENIZERS), tokenize)
        flag.boolean("lowercase", False, "ignore case")
        flag.boolean("ter", False, "compute TER too")
        flag.string("baseline", None, "file of another system's translations, to compare with")
        flag.string("segments", None, "file to write the scores of each line to, as JSON Lines")
        define_comparison(values)
        flag.string("alignments", None, "file of word alignments, 0-0 1-2 and so on, one per line")
        reference = "file of reference alignments; 0p1 or 0:1 is a possible link"
        flag.string("reference_alignments", None, reference)

    usage = (
        "usage: score --hypotheses=H1[,H2,...] --references=R1[,R2,...] [--language=zh]\n"
        "       [--tokenize=zh] [--tokenized] [--lowercase] [--ter] [--symbols]\n"
        "       [--groups=F|length] [--segments=F] [--bootstrap=1000 [--baseline=H]]\n"
        "       score --alignments=H --reference_alignments=R"
    )
    values = parser.parse(arguments, define, usage=usage)
    if values.alignments is not None or values.reference_alignments is not None:
        return _alignments_given(values)
    for name, expected in (
        ("hypotheses", "the file of translations"),
        ("references", "the files to compare with"),
    ):
        if values[name].value in ([], [""]):
            raise InputError(f"--{name}: expected {expected}, got nothing; add --{name}=FILE.")
    if values.baseline is not None and values.bootstrap is None:
        raise InputError(
            "--baseline: requires --bootstrap, which tests the significance of the difference; "
            "add --bootstrap=1000."
        )
    if values.tokenized and (values.tokenize or values.language):
        raise InputError(
            f"--{'tokenize' if values.tokenize else 'language'}: chooses BLEU's tokenizer, and "
            "--tokenized texts are not tokenized again; leave one of the two out."
        )
    if values.tokenize and values.language:
        raise InputError("--language: chooses the tokenizer, as --tokenize does; leave one out.")
    hypotheses, references = _files(values, "hypotheses"), references_given(values)
    return ScoreRequest(
        hypotheses=hypotheses,
        references=references,
        tokenizer=values.tokenize,
        language=values.language or _language([*hypotheses, *references]),
        settings={name: bool(values[name].value) for name in SETTINGS},
        baseline=place_or_none(values.baseline),
        resampling=resampling_given(values),
        groups=groups_given(values),
        segments=_segments(values),
    )


def _segments(values: flags.FlagValues) -> Path | None:
    """Returns the file of --segments; raises InputError for standard output, as of the table."""
    if values.segments in ("", "-"):
        raise InputError(
            "--segments: expected a file for the scores of each line, got "
            f"{values.segments or 'nothing'!r}; standard output has the table; add --segments=FILE."
        )
    return place_or_none(values.segments)


def _alignments_given(values: flags.FlagValues) -> AlignmentRequest:
    """Returns the arguments for alignments; raises InputError if another flag is given."""
    own = ("alignments", "reference_alignments")
    for name in own:
        if not values[name].value:
            raise InputError(
                f"--{name}: expected a file of links 0-0 1-2, got nothing; add --{name}=FILE."
            )
    for name in values:
        if name not in own and values[name].present:
            raise InputError(
                f"--{name}: applies to translations, not to --alignments; leave one of the two out."
            )
    return AlignmentRequest(place(values.alignments), place(values.reference_alignments))


def define_comparison(values: flags.FlagValues) -> None:
    """Defines the scores that are computed beside the usual ones."""
    flag = define_in(values)
    # A 95 % interval leaves 1 resample in 40 beyond each of its ends.
    bootstrap = "resamples of the sentences for confidence intervals, such as 1000"
    flag.integer("bootstrap", None, bootstrap, lower_bound=40)
    flag.integer("bootstrap_seed", None, "seed of the resamples", lower_bound=0)
    symbols = "add the error rates of symbols, such as phones, with spaces between them"
    flag.boolean("symbols", False, symbols)
    groups = "add a table of groups: a file with a name per line, or length: ranges of symbols"
    flag.string("groups", None, groups)


def resampling_given(values: flags.FlagValues) -> dict[str, int]:
    """Returns `bootstrap` and `seed` if they are given; raises InputError for a seed alone."""
    if values.bootstrap_seed is not None and values.bootstrap is None:
        raise InputError("--bootstrap_seed: requires --bootstrap; add --bootstrap=1000.")
    given = {"bootstrap": values.bootstrap, "seed": values.bootstrap_seed}
    return {name: value for name, value in given.items() if value is not None}


def references_given(values: flags.FlagValues) -> list[Path]:
    """Returns the files of --references; raises InputError for an empty name."""
    return _files(values, "references")


def _files(values: flags.FlagValues, name: str) -> list[Path]:
    """Returns the files of a flag; raises InputError for an empty name."""
    names, letter = listed(values[name].value or []), name[0].upper()
    if not all(names):
        raise InputError(
            f"--{name}: expected files, {letter}1,{letter}2 and so on, got {','.join(names)!r}."
        )
    return [place(each) for each in names]


def groups_given(values: flags.FlagValues) -> Path | str | None:
    """Returns the file of --groups, or 'length'; None if the flag is not given.

    Raises:
      InputError: the name of the file is empty.
    """
    if values.groups == "":
        raise InputError(
            "--groups: expected a file with a name per line, or length, got nothing; add "
            "--groups=FILE, or leave it out."
        )
    return values.groups if values.groups in (None, LENGTH) else place(values.groups)


def _language(files: Sequence[Path]) -> str | None:
    """Returns the last part of the names if all files share it, as 'zh' of hyp.zh and ref.zh.gz."""
    endings = {Path(without_suffix(file.name)).suffix[1:] for file in files}
    return (endings.pop() or None) if len(endings) == 1 else None


def place_or_none(path: str | None) -> Path | None:
    """Returns the place of a path; None for an empty one and for '-'."""
    return None if path in (None, "", "-") else place(path)
