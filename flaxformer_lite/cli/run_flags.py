"""Flags of the commands that use a trained run, and of `score`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import (
    decode_given,
    define_decode,
    define_in,
    define_model,
    define_together,
    listed,
    model_given,
)
from flaxformer_lite.config_files import texts_of
from flaxformer_lite.field_rules import BLEU_TOKENIZERS
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import WINDOW
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place

PLOTS = ("attention", "positions", "schedule", "metrics")


class EvaluateRequest(NamedTuple):
    """Arguments of `evaluate`."""

    workdir: Path
    split: str
    references: list[Path]  # replace those of the split, if there are any
    resampling: dict[str, Any]  # `bootstrap` and `seed`, if they are given
    files: dict[str, tuple[str, ...]]  # where the files of a split are now, if they are given
    output: Path | None  # a folder; None: the samples folder of the run
    model: dict[str, Any]  # `average`, `parameters` and `ensemble`, if they are given
    decode: dict[str, Any]  # fields of DecodeConfig that are given


class ScoreRequest(NamedTuple):
    """Arguments of `score`."""

    hypotheses: Path
    references: list[Path]
    tokenizer: str | None  # of BLEU; None: by the language
    language: str | None  # of the texts, if it is given or the files' names end in one
    settings: dict[str, bool]  # `tokenized`, `lowercase` and `ter`
    baseline: Path | None
    resampling: dict[str, Any]  # `bootstrap` and `seed`, if they are given


class TranslateRequest(NamedTuple):
    """Arguments of `translate`."""

    workdir: Path
    job: LineJob
    lines: dict[str, Any]  # `prefix`, `n_best` and `long`
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
        _define_resampling(values)
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: evaluate --workdir=W [--split=test] [--bootstrap=1000] [--references=R1,R2] "
        "[--method=beam ...]\n"
        "       [--config.data.test_files=A,B: where the files are now]"
    )
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage)
    return EvaluateRequest(
        workdir=_required_workdir(values),
        split=values.split,
        references=_references(values),
        resampling=_resampling(values),
        files=dict(map(_files_of, overrides)),
        output=_place_or_none(values.output),
        model=model_given(values),
        decode=decode_given(values),
    )


def parse_score(arguments: Sequence[str]) -> ScoreRequest:
    """Parses the flags of `score`.

    Raises:
      InputError: a file is not named, or a flag has no effect.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("hypotheses", None, "file of translations, one per line")
        flag.strings("references", [], "reference files, R1,R2, one line for each translation")
        flag.boolean("tokenized", False, "the files are tokenised: compute BLEU on their tokens")
        language = "language of the texts, such as zh; default: the end of the files' names"
        flag.string("language", None, language)
        tokenize = "sacreBLEU's tokenizer; default: by the language, zh for Chinese, 13a for most"
        flag.enum("tokenize", None, list(BLEU_TOKENIZERS), tokenize)
        flag.boolean("lowercase", False, "ignore case")
        flag.boolean("ter", False, "compute TER too")
        flag.string("baseline", None, "file of another system's translations, to compare with")
        _define_resampling(values)

    usage = (
        "usage: score --hypotheses=H --references=R1[,R2,...] [--language=zh] [--tokenize=zh]\n"
        "       [--tokenized] [--lowercase] [--ter] [--bootstrap=1000 [--baseline=H2]]"
    )
    values = parser.parse(arguments, define, usage=usage)
    for name, expected in (
        ("hypotheses", "the file of translations"),
        ("references", "the files to compare with"),
    ):
        if not values[name].value:
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
    references = _references(values)
    return ScoreRequest(
        hypotheses=place(values.hypotheses),
        references=references,
        tokenizer=values.tokenize,
        language=values.language or _language([place(values.hypotheses), *references]),
        settings={name: bool(values[name].value) for name in ("tokenized", "lowercase", "ter")},
        baseline=_place_or_none(values.baseline),
        resampling=_resampling(values),
    )


def parse_translate(arguments: Sequence[str]) -> TranslateRequest:
    """Parses the flags of `translate`."""

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        _define_job(values)
        flag.string("prefix", None, "start of each translation, without a space at its end")
        n_best = "beam: write the n best translations of a line, each with line number and score"
        flag.integer("n_best", None, n_best, lower_bound=1)
        long = "lines that are too long for the model: refuse, or split into segments"
        flag.enum("long", "refuse", ["refuse", "split"], long)
        flag.string("workers", None, "removed; set JAX_NUM_CPU_DEVICES instead")
        define_decode(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: translate --workdir=W [--input=F] [--output=F] [--long=split] [--method=beam ...]"
    )
    values = parser.parse(arguments, define, usage=usage)
    _check_utf8("--prefix", values.prefix or "")
    if values.workers is not None:
        raise InputError(
            "--workers: removed; set JAX_NUM_CPU_DEVICES=2 instead, so that two devices share "
            "the lines."
        )
    lines = {name: values[name].value for name in ("prefix", "n_best", "long")}
    return TranslateRequest(
        _required_workdir(values), _job(values), lines, decode_given(values), model_given(values)
    )


def parse_classify(arguments: Sequence[str]) -> ClassifyRequest:
    """Parses the flags of `classify`."""

    def define(values: flags.FlagValues) -> None:
        _define_job(values)
        define_model(values)
        define_together(values)

    usage = "usage: classify --workdir=W [--input=F] [--output=F]"
    values = parser.parse(arguments, define, usage=usage)
    return ClassifyRequest(_required_workdir(values), _job(values), model_given(values))


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
        workdir=_required_workdir(values),
        prompt=values.prompt,
        count=values.count,
        decode=decode_given(values),
        output=_place_or_none(values.output),
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
        folders = [*folders, _required_workdir(values)]
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
        kind, folders, values.text, _place_or_none(values.output) or folders[0] / "plots"
    )


def _define_job(values: flags.FlagValues) -> None:
    flag = define_in(values)
    flag.string("workdir", None, "folder of the run")
    flag.string("input", None, "UTF-8 file, one text per line; default: standard input")
    flag.string("output", None, "file to write, one line per text; default: standard output")
    window = "lines processed and saved at a time; a killed job resumes after them"
    flag.integer("window", WINDOW, window, lower_bound=1)
    flag.boolean("restart", False, "start again, and discard the results in OUTPUT.partial")
    progress = "report progress; default: on a terminal, if the job is long"
    flag.boolean("progress", None, progress)


def _job(values: flags.FlagValues) -> LineJob:
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


def _references(values: flags.FlagValues) -> list[Path]:
    names = listed(values.references)
    if not all(names):
        raise InputError(f"--references: expected files, R1,R2 and so on, got {','.join(names)!r}.")
    return [place(name) for name in names]


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


def _language(files: Sequence[Path]) -> str | None:
    """Returns the last part of the names if all files share it, as 'zh' of hyp.zh and ref.zh.gz."""
    endings = {Path(without_suffix(file.name)).suffix[1:] for file in files}
    return (endings.pop() or None) if len(endings) == 1 else None


def _define_resampling(values: flags.FlagValues) -> None:
    flag = define_in(values)
    # A 95 % interval leaves 1 resample in 40 beyond each of its ends.
    bootstrap = "resamples of the sentences for confidence intervals, such as 1000"
    flag.integer("bootstrap", None, bootstrap, lower_bound=40)
    flag.integer("bootstrap_seed", None, "seed of the resamples", lower_bound=0)


def _resampling(values: flags.FlagValues) -> dict[str, int]:
    if values.bootstrap_seed is not None and values.bootstrap is None:
        raise InputError("--bootstrap_seed: requires --bootstrap; add --bootstrap=1000.")
    given = {"bootstrap": values.bootstrap, "seed": values.bootstrap_seed}
    return {name: value for name, value in given.items() if value is not None}


def _check_utf8(flag: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 arrive as lone surrogates
        raise InputError(f"{flag}: expected UTF-8, got {text!r}.") from error


def _place_or_none(path: str | None) -> Path | None:
    return None if path in (None, "", "-") else place(path)


def _required_workdir(values: flags.FlagValues) -> Path:
    if values.workdir is None:
        raise InputError(
            "--workdir: expected the folder of a run, got nothing; add --workdir=FOLDER."
        )
    return place(values.workdir)
