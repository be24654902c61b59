"""Flags of the commands that use a trained run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.score_flags import (
    define_comparison,
    groups_given,
    place_or_none,
    references_given,
    resampling_given,
)
from flaxformer_lite.cli.shared_flags import (
    alignments_given,
    decode_given,
    define_alignments,
    define_decode,
    define_in,
    define_model,
    define_together,
    model_given,
)
from flaxformer_lite.config_files import texts_of
from flaxformer_lite.field_rules import EXTERNAL
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import WINDOW
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place

PLOTS = ("attention", "positions", "schedule", "metrics")


class EvaluateRequest(NamedTuple):
    """Arguments of `evaluate`."""

    workdir: Path
    split: str
    references: list[Path]  # replace those of the split, if there are any
    resampling: dict[str, Any]  # `bootstrap` and `seed`, if they are given
    symbols: bool  # whether the error rates of symbols are computed in any case
    groups: Path | str | None  # a file of names, or 'length'
    files: dict[str, tuple[str, ...]]  # where the files of a split are now, if they are given
    output: Path | None  # a folder; None: the samples folder of the run
    model: dict[str, Any]  # `average`, `parameters` and `ensemble`, if they are given
    decode: dict[str, Any]  # fields of DecodeConfig that are given
    program: dict[str, Any]  # `metric_command` and `metric_name`, if they are given


class TranslateRequest(NamedTuple):
    """Arguments of `translate`."""

    workdir: Path
    job: LineJob
    lines: dict[str, Any]  # arguments of `LineTranslator`
    decode: dict[str, Any]  # fields of DecodeConfig that are given
    model: dict[str, Any]  # `average`, `parameters` and `ensemble`, if they are given

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the output, beside the model and the input."""
        lines = {f"--{name}": value for name, value in self.lines.items()}
        return {"command": "translate", "--window": self.job.window, **lines}


class ClassifyRequest(NamedTuple):
    """Arguments of `classify`."""

    workdir: Path
    job: LineJob
    model: dict[str, Any]  # `average`, `parameters` and `ensemble`, if they are given

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the output, beside the model and the input."""
        return {"command": "classify", "--window": self.job.window}


class GenerateRequest(NamedTuple):
    """Arguments of `generate`."""

    workdir: Path
    prompt: str
    count: int  # type: ignore[assignment]  # in place of the method of tuples
    decode: dict[str, Any]  # fields of DecodeConfig that are given
    output: Path | None  # None: standard output
    model: dict[str, Any]  # `average`, `parameters` and `ensemble`, if they are given


class PlotRequest(NamedTuple):
    """Arguments of `plot`."""

    kind: str
    workdirs: list[Path]
    text: str
    output: Path


def parse_evaluate(arguments: Sequence[str]) -> EvaluateRequest:
    """Parses the flags of `evaluate`."""

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("workdir", None, "folder of the run")
        flag.string(
            "split",
            "test",
            "split of the data: train, validation, test, or a slice such as test[:100]",
        )
        flag.strings("references", [], "reference files, R1,R2; default: the targets of the split")
        flag.string("output", None, "folder for the results; default: W/samples")
        command = "program that computes a metric, as train.metric_command; own: that of the run"
        flag.string("metric_command", None, command)
        name = "name of its number; default: train.metric_name"
        flag.enum("metric_name", None, list(EXTERNAL), name)
        define_comparison(values)
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: evaluate --workdir=W [--split=test] [--bootstrap=1000] [--references=R1,R2] "
        "[--symbols]\n"
        "       [--groups=F|length] [--metric_command=own] [--method=beam ...]\n"
        "       [--config.data.test_files=A,B: where the files are now]"
    )
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage)
    return EvaluateRequest(
        workdir=required_workdir(values),
        split=values.split,
        references=references_given(values),
        resampling=resampling_given(values),
        symbols=bool(values.symbols),
        groups=groups_given(values),
        files=dict(map(_files_of, overrides)),
        output=place_or_none(values.output),
        model=model_given(values),
        decode=decode_given(values),
        program={
            name: values[name].value
            for name in ("metric_command", "metric_name")
            if values[name].value is not None
        },
    )


def parse_translate(arguments: Sequence[str]) -> TranslateRequest:
    """Parses the flags of `translate`."""

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        define_job(values)
        flag.string("prefix", None, "start of each translation, without a space at its end")
        n_best = "with beams: the n best translations of a line, each with line number and score"
        flag.integer("n_best", None, n_best, lower_bound=1)
        mbr = "of N samples or n best of a line, the translation of minimum Bayes risk"
        flag.integer("mbr", None, mbr, lower_bound=2)
        utility = "mbr: chrf, bleu, or path.py:function; default: chrf"
        flag.string("utility", None, utility)
        long = "lines that are too long for the model: refuse, or split into segments"
        flag.enum("long", "refuse", ["refuse", "split"], long)
        define_alignments(values)
        flag.boolean("scores", False, "write the log-probability of each translation before it")
        flag.boolean("token_scores", False, "as --scores, and write the score of each token")
        flag.string("workers", None, "removed; set JAX_NUM_CPU_DEVICES instead")
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: translate --workdir=W [--input=F] [--output=F] [--long=split] [--method=beam ...]\n"
        "       [--n_best=N] [--mbr=N --method=sample [--utility=chrf]]"
    )
    values = parser.parse(arguments, define, usage=usage)
    _check_utf8("--prefix", values.prefix or "")
    if values.workers is not None:
        raise InputError(
            "--workers: removed; set JAX_NUM_CPU_DEVICES=2 instead, so that two devices share "
            "the lines."
        )
    if values.utility is not None and values.mbr is None:
        raise InputError(
            "--utility: requires --mbr, the number of translations to choose from; add --mbr=16."
        )
    if values.mbr is not None and values.n_best is not None:
        raise InputError(
            "--mbr: writes one translation of a line, and --n_best several; leave one of the two "
            "out."
        )
    lines = {name: values[name].value for name in ("prefix", "n_best", "long")}
    lines |= alignments_given(values)
    # Left out unless given: partial output of earlier versions has a record without them.
    lines |= {name: True for name in ("scores", "token_scores") if values[name].value}
    # Only if given: a job that an earlier version began has settings without them.
    lines |= {
        name: values[name].value for name in ("mbr", "utility") if values[name].value is not None
    }
    return TranslateRequest(
        required_workdir(values),
        job_given(values),
        lines,
        decode_given(values),
        model_given(values),
    )


def parse_classify(arguments: Sequence[str]) -> ClassifyRequest:
    """Parses the flags of `classify`."""

    def define(values: flags.FlagValues) -> None:
        define_job(values)
        define_model(values)
        define_together(values)

    usage = "usage: classify --workdir=W [--input=F] [--output=F]"
    values = parser.parse(arguments, define, usage=usage)
    return ClassifyRequest(required_workdir(values), job_given(values), model_given(values))


def parse_generate(arguments: Sequence[str]) -> GenerateRequest:
    """Parses the flags of `generate`."""

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("workdir", None, "folder of the run")
        flag.string("prompt", "", "start of each text, without a space at its end")
        flag.integer("count", 1, "number of texts to generate", lower_bound=1)
        flag.string("output", None, "file to write, one text per line; default: standard output")
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: generate --workdir=W [--prompt=TEXT] [--count=N] "
        "[--method=sample --temperature=0.8 --seed=1 ...]"
    )
    values = parser.parse(arguments, define, usage=usage)
    _check_utf8("--prompt", values.prompt)
    return GenerateRequest(
        workdir=required_workdir(values),
        prompt=values.prompt,
        count=values.count,
        decode=decode_given(values),
        output=place_or_none(values.output),
        model=model_given(values),
    )


def parse_plot(arguments: Sequence[str]) -> PlotRequest:
    """Parses `plot KIND` and its flags; `plot metrics` takes any number of folders."""

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("workdir", None, "folder of the run")
        flag.string("text", "", "attention: input text of the model")
        flag.string("output", None, "folder for the figures; default: W/plots")

    kind = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    rest = arguments[1:] if kind else arguments
    usage = (
        "usage: plot attention --workdir=W --text=TEXT [--output=D]\n"
        "       plot positions|schedule --workdir=W [--output=D]\n"
        "       plot metrics W1 [W2 ...] [--output=D]"
    )
    words: list[str] | None = [] if kind == "metrics" else None
    values = parser.parse(rest, define, usage=usage, words=words)
    folders = [place(word) for word in words or ()]
    if kind not in PLOTS:
        raise InputError(
            f"plot: expected one of {', '.join(PLOTS)}, got {kind or 'nothing'!r} "
            "(--help lists the flags)"
        )
    if kind != "metrics" or not folders:
        folders = [*folders, required_workdir(values)]
    elif values.workdir is not None:
        raise InputError(
            "plot metrics: name the folders one after another, or one by --workdir, not both."
        )
    if kind == "attention" and not values.text:
        raise InputError("--text: expected the text to read, got nothing; add --text=TEXT.")
    if kind != "attention" and values.text:
        raise InputError("--text: applies only to plot attention; leave it out.")
    _check_utf8("--text", values.text)
    return PlotRequest(
        kind, folders, values.text, place_or_none(values.output) or folders[0] / "plots"
    )


def define_job(values: flags.FlagValues) -> None:
    """Defines the flags of a job over lines."""
    flag = define_in(values)
    flag.string("workdir", None, "folder of the run")
    flag.string("input", None, "UTF-8 file, one text per line; default: standard input")
    flag.string("output", None, "file to write, one line per text; default: standard output")
    window = "lines processed and saved at a time; a killed job resumes after them"
    flag.integer("window", WINDOW, window, lower_bound=1)
    flag.boolean("restart", False, "start again, and discard the results in OUTPUT.partial")
    progress = "report progress; default: on a terminal, if the job is long"
    flag.boolean("progress", None, progress)


def job_given(values: flags.FlagValues) -> LineJob:
    """Returns the job. Raises InputError if a flag has no effect."""
    if values.restart and values.output in (None, "", "-"):
        raise InputError(
            "--restart: requires --output=FILE; a job on standard output leaves nothing to discard."
        )
    for flag in ("input", "output"):
        if in_bucket(values[flag].value or ""):
            raise InputError(
                f"--{flag}: expected a file on disk, got {values[flag].value}; copy it by hand."
            )
    # '-' is the standard stream, as for every Unix tool
    source, target = (
        None if path in (None, "", "-") else place(path) for path in (values.input, values.output)
    )
    return LineJob(source, target, values.window, values.restart, values.progress)


def _files_of(override: str) -> tuple[str, tuple[str, ...]]:
    """Returns ('test', ('A', 'B')) for '--config.data.test_files=A,B'."""
    name, value = override.lstrip("-").split("=", 1)
    role = name.removeprefix("config.data.").removesuffix("_files")
    if name != f"config.data.{role}_files" or role not in ("train", "validation", "test"):
        raise InputError(
            f"{name}: evaluate takes the config of the run, and only where its data.train_files, "
            "data.validation_files and data.test_files are now; leave it out."
        )
    try:
        return role, texts_of(value)
    except (ValueError, SyntaxError) as error:
        raise InputError(f"{name}: expected files, A,B, got {value!r}.") from error


def _check_utf8(flag: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 arrive as lone surrogates
        raise InputError(f"{flag}: expected UTF-8, got {text!r}.") from error


def required_workdir(values: flags.FlagValues) -> Path:
    """Returns --workdir; raises InputError if it is not given."""
    if values.workdir is None:
        raise InputError(
            "--workdir: expected the folder of a run, got nothing; add --workdir=FOLDER."
        )
    return place(values.workdir)
