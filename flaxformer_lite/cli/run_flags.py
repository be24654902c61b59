"""The flags of the commands that use a trained run, and of `score`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import (
    decode_given,
    define_decode,
    define_model,
    define_together,
    listed,
    model_given,
)
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import WINDOW
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place


class EvaluateRequest(NamedTuple):
    """What `evaluate` was asked to do."""

    workdir: Path
    split: str
    references: list[Path]  # in place of the split's own, if there are any
    resampling: dict[str, int]  # `bootstrap` and `seed`, if they were given
    output: Path | None  # a folder; None: the run's own samples
    model: dict[str, object]  # `average`, `parameters` and `ensemble`, if they were given
    decode: dict[str, object]  # fields of DecodeConfig that were given


class ScoreRequest(NamedTuple):
    """What `score` was asked to do."""

    hypotheses: Path
    references: list[Path]
    tokenized: bool
    baseline: Path | None
    resampling: dict[str, int]  # `bootstrap` and `seed`, if they were given


class TranslateRequest(NamedTuple):
    """What `translate` was asked to do."""

    workdir: Path
    job: LineJob
    lines: dict[str, object]  # `prefix`, `n_best` and `long`: what becomes of each line
    decode: dict[str, object]  # fields of DecodeConfig that were given
    model: dict[str, object]  # `average`, `parameters` and `ensemble`, if they were given

    @property
    def asked(self) -> dict[str, object]:
        """What its answers depend on beside the model and the input."""
        lines = {f"--{name}": value for name, value in self.lines.items()}
        return {"command": "translate", "--window": self.job.window, **lines}


class ClassifyRequest(NamedTuple):
    """What `classify` was asked to do."""

    workdir: Path
    job: LineJob
    model: dict[str, object]  # `average`, `parameters` and `ensemble`, if they were given

    @property
    def asked(self) -> dict[str, object]:
        """What its answers depend on beside the model and the input."""
        return {"command": "classify", "--window": self.job.window}


class GenerateRequest(NamedTuple):
    """What `generate` was asked to do; no path means standard output."""

    workdir: Path
    prompt: str
    count: int
    decode: dict[str, object]  # fields of DecodeConfig that were given
    output: Path | None
    model: dict[str, object]  # `average`, `parameters` and `ensemble`, if they were given


class PlotRequest(NamedTuple):
    """What `plot` was asked to draw, and where to."""

    kind: str
    workdirs: list[Path]
    text: str
    output: Path


def parse_evaluate(arguments: Sequence[str]) -> EvaluateRequest:
    """Flags of `evaluate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("split", "test", "train, validation, test, or a TFDS split", flag_values=values)
        flags.DEFINE_multi_string(
            "references", [], "files to compare with, in place of the split's own", flag_values=values
        )
        flags.DEFINE_string("output", None, "folder to write to; default: W/samples", flag_values=values)
        _define_resampling(values)
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = "usage: evaluate --workdir=W [--split=test] [--bootstrap=1000] [--references=R1,R2] [--method=beam ...]"
    values = parser.parse(arguments, define, usage=usage)
    workdir, references = _required_workdir(values), _references(values)
    output = place(values.output) if values.output else None
    chosen = model_given(values), decode_given(values)
    return EvaluateRequest(workdir, values.split, references, _resampling(values), output, *chosen)


def parse_score(arguments: Sequence[str]) -> ScoreRequest:
    """Flags of `score`.

    Raises:
      InputError: a file is not named, or a flag would be ignored.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("hypotheses", None, "translations, one a line", flag_values=values)
        flags.DEFINE_multi_string("references", [], "files with a line for each translation", flag_values=values)
        flags.DEFINE_boolean("tokenized", False, "the files come cut into tokens", flag_values=values)
        flags.DEFINE_string("baseline", None, "translations of another system, to compare with", flag_values=values)
        _define_resampling(values)

    usage = "usage: score --hypotheses=H --references=R1[,R2,...] [--tokenized] [--bootstrap=1000 [--baseline=H2]]"
    values = parser.parse(arguments, define, usage=usage)
    for name, what in (("hypotheses", "the file of translations"), ("references", "the files to compare with")):
        if not values[name].value:
            raise InputError(f"--{name}: expected {what}, got nothing; add --{name}=FILE.")
    if values.baseline is not None and values.bootstrap is None:
        raise InputError("--baseline: goes with --bootstrap=1000 or so, which tells a difference from chance.")
    references, baseline = _references(values), values.baseline
    files = place(values.hypotheses), references, values.tokenized, place(baseline) if baseline else None
    return ScoreRequest(*files, _resampling(values))


def parse_translate(arguments: Sequence[str]) -> TranslateRequest:
    """Flags of `translate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        _define_job(values)
        flags.DEFINE_string(
            "prefix", None, "what each translation begins with; no space at its end", flag_values=values
        )
        flags.DEFINE_integer(
            "n_best",
            None,
            "so many translations of each line, best first: its number, the score and the translation, a tab between "
            "each; goes with --method=beam",
            lower_bound=1,
            flag_values=values,
        )
        long = "a line that is too long for the model is refused, or split: translated in segments"
        flags.DEFINE_enum("long", "refuse", ["refuse", "split"], long, flag_values=values)
        flags.DEFINE_string("workers", None, "removed: several CPU devices share the lines", flag_values=values)
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = "usage: translate --workdir=W [--input=F] [--output=F] [--long=split] [--method=beam ...]"
    values = parser.parse(arguments, define, usage=usage)
    _check_utf8("--prefix", values.prefix or "")
    if values.workers is not None:
        raise InputError("--workers: removed; set JAX_NUM_CPU_DEVICES=2 instead, so that two devices share the lines.")
    lines = {name: values[name].value for name in ("prefix", "n_best", "long")}
    return TranslateRequest(_required_workdir(values), _job(values), lines, decode_given(values), model_given(values))


def parse_classify(arguments: Sequence[str]) -> ClassifyRequest:
    """Flags of `classify`."""

    def define(values: flags.FlagValues) -> None:
        _define_job(values)
        define_model(values)
        define_together(values)

    values = parser.parse(arguments, define, usage="usage: classify --workdir=W [--input=F] [--output=F]")
    return ClassifyRequest(_required_workdir(values), _job(values), model_given(values))


def _define_job(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_string("input", None, "UTF-8 text, one a line; default: standard input", flag_values=values)
    flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)
    window = "lines that are read, answered and written at a time; a job that was killed goes on after the last of them"
    flags.DEFINE_integer("window", WINDOW, window, lower_bound=1, flag_values=values)
    restart = "begin anew, though OUTPUT.partial holds a part of the answers"
    flags.DEFINE_boolean("restart", False, restart, flag_values=values)
    progress = "tell how far it is on standard error; default: if that is a terminal, and only where it takes long"
    flags.DEFINE_boolean("progress", None, progress, flag_values=values)


def _job(values: flags.FlagValues) -> LineJob:
    """Raises InputError for a flag that would be ignored."""
    if values.restart and not values.output:
        raise InputError("--restart: goes with --output=FILE; of what goes to standard output nothing is kept.")
    for flag in ("input", "output"):
        if in_bucket(values[flag].value or ""):
            raise InputError(f"--{flag}: expected a file on disk, got {values[flag].value}; copy it by hand.")
    paths = (Path(path) if path else None for path in (values.input, values.output))
    return LineJob(*paths, values.window, values.restart, values.progress)


def parse_generate(arguments: Sequence[str]) -> GenerateRequest:
    """Flags of `generate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("prompt", "", "what each text begins with; no space at its end", flag_values=values)
        flags.DEFINE_integer("count", 1, "how many texts to write", lower_bound=1, flag_values=values)
        flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = "usage: generate --workdir=W [--prompt=TEXT] [--count=N] [--method=sample --temperature=0.8 --seed=1 ...]"
    values = parser.parse(arguments, define, usage=usage)
    output = place(values.output) if values.output else None
    _check_utf8("--prompt", values.prompt)
    asked = _required_workdir(values), values.prompt, values.count, decode_given(values), output
    return GenerateRequest(*asked, model_given(values))


PLOTS = ("attention", "positions", "schedule", "metrics")


def parse_plot(arguments: Sequence[str]) -> PlotRequest:
    """`plot KIND` and its flags; `plot metrics` takes any number of folders."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("text", "", "attention: the text to read", flag_values=values)
        flags.DEFINE_string("output", None, "folder to write to; default: W/plots", flag_values=values)

    kind = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    rest = arguments[1:] if kind else arguments
    usage = (
        "usage: plot attention --workdir=W --text=TEXT [--output=D]\n"
        "       plot positions|schedule --workdir=W [--output=D]\n"
        "       plot metrics W1 [W2 ...] [--output=D]"
    )
    words = [] if kind == "metrics" else None
    values = parser.parse(rest, define, usage=usage, words=words)
    folders = [place(word) for word in words or ()]
    if kind not in PLOTS:
        raise InputError(f"plot: expected one of {', '.join(PLOTS)}, got {kind or 'nothing'!r} (--help tells more)")
    if kind != "metrics" or not folders:
        folders = [*folders, _required_workdir(values)]
    elif values.workdir is not None:
        raise InputError("plot metrics: name the folders one after another, or one by --workdir, not both.")
    if (kind == "attention") != bool(values.text):
        raise InputError(
            f"--text: {'expected the text to read' if kind == 'attention' else 'goes with plot attention'}."
        )
    _check_utf8("--text", values.text)
    return PlotRequest(kind, folders, values.text, place(values.output) if values.output else folders[0] / "plots")


def _references(values: flags.FlagValues) -> list[Path]:
    names = listed(values.references)
    if not all(names):
        raise InputError(f"--references: expected files, R1,R2 and so on, got {','.join(names)!r}.")
    return [place(name) for name in names]


def _define_resampling(values: flags.FlagValues) -> None:
    """How sure a score is. Of fewer than 40 resamples none is among the outer 5 % on each side."""
    bootstrap = "resamples of the sentences that tell how sure the scores are, such as 1000"
    flags.DEFINE_integer("bootstrap", None, bootstrap, lower_bound=40, flag_values=values)
    flags.DEFINE_integer("bootstrap_seed", None, "of the resamples", lower_bound=1, flag_values=values)


def _resampling(values: flags.FlagValues) -> dict[str, int]:
    if values.bootstrap_seed is not None and values.bootstrap is None:
        raise InputError("--bootstrap_seed: goes with --bootstrap; add --bootstrap=1000.")
    given = {"bootstrap": values.bootstrap, "seed": values.bootstrap_seed}
    return {name: value for name, value in given.items() if value is not None}


def _check_utf8(flag: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the bytes of an argument that are not UTF-8 come as lone surrogates
        raise InputError(f"{flag}: expected UTF-8, got {text!r}.") from error


def _required_workdir(values: flags.FlagValues) -> Path:
    if values.workdir is None:
        raise InputError("--workdir: expected the folder of a run, got nothing; add --workdir=FOLDER.")
    return place(values.workdir)
