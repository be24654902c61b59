"""What each command may be asked to do: its flags in, a typed request out."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from flaxformer_lite import command_line
from flaxformer_lite import config as config_lib
from flaxformer_lite import workdir as workdir_lib


class TrainRequest(NamedTuple):
    """What `train` was asked to do."""

    config: config_lib.Config
    workdir: Path | None  # None: none was named
    new_workdir: Path  # the folder for a run without a name
    processes: tuple[str | None, int | None, int | None]  # coordinator address, number of processes, own number


class EvaluateRequest(NamedTuple):
    """What `evaluate` was asked to do."""

    workdir: Path
    split: str


class TranslateRequest(NamedTuple):
    """What `translate` was asked to do; no path means standard input or output."""

    workdir: Path
    input: Path | None
    output: Path | None
    prefix: str | None
    n_best: int | None
    decode: dict[str, object]  # fields of DecodeConfig that were given


class ClassifyRequest(NamedTuple):
    """What `classify` was asked to do; no path means standard input or output."""

    workdir: Path
    input: Path | None
    output: Path | None


class GenerateRequest(NamedTuple):
    """What `generate` was asked to do; no path means standard output."""

    workdir: Path
    prompt: str
    count: int
    decode: dict[str, object]  # fields of DecodeConfig that were given
    output: Path | None


class PlotRequest(NamedTuple):
    """What `plot` was asked to draw, and where to."""

    kind: str
    workdirs: list[Path]
    text: str
    output: Path


def parse_train(arguments: Sequence[str]) -> TrainRequest:
    """Flags of `train`: the config is the named one, else that of the run in the workdir, else `default`.

    Raises:
      ValueError: the config or an override is wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("config", None, "a config file, or the name of a shipped one", flag_values=values)
        flags.DEFINE_string("workdir", None, "folder of the run; default: a new one under runs/", flag_values=values)
        flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0", flag_values=values)
        flags.DEFINE_integer("num_processes", None, "processes of this run", flag_values=values)
        flags.DEFINE_integer("process_id", None, "number of this process, from 0", flag_values=values)

    overrides, others = command_line.split_overrides(arguments)
    usage = "usage: train [--config=X] [--workdir=W] [--config.section.field=value ...]"
    values = command_line.parse(others, define, usage=usage)
    name = "default"
    if values.config is None and values.workdir and (Path(values.workdir) / "config.json").exists():
        user_config = config_lib.to_config_dict(workdir_lib.read_config(Path(values.workdir)))
    else:
        file = command_line.find_config(values.config or name)
        name, user_config = file.stem, command_line.load_config(file)
    config = config_lib.resolve(command_line.override(user_config, overrides))
    workdir = Path(values.workdir) if values.workdir else None
    return TrainRequest(
        config,
        workdir,
        workdir_lib.new_path(name),
        (values.coordinator_address, values.num_processes, values.process_id),
    )


def parse_evaluate(arguments: Sequence[str]) -> EvaluateRequest:
    """Flags of `evaluate`."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("split", "test", "train, validation, test, or a TFDS split", flag_values=values)

    values = command_line.parse(arguments, define, usage="usage: evaluate --workdir=W [--split=test]")
    return EvaluateRequest(_required_workdir(values), values.split)


def parse_translate(arguments: Sequence[str]) -> TranslateRequest:
    """Flags of `translate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        _define_paths(values)
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
        _define_decode(values)

    usage = "usage: translate --workdir=W [--input=F] [--output=F] [--method=beam --beam_size=4 --n_best=N ...]"
    values = command_line.parse(arguments, define, usage=usage)
    _check_utf8("--prefix", values.prefix or "")
    return TranslateRequest(*_paths(values), values.prefix, values.n_best, _decode_given(values))


def parse_classify(arguments: Sequence[str]) -> ClassifyRequest:
    """Flags of `classify`."""
    values = command_line.parse(arguments, _define_paths, usage="usage: classify --workdir=W [--input=F] [--output=F]")
    return ClassifyRequest(*_paths(values))


def _define_paths(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_string("input", None, "UTF-8 text, one a line; default: standard input", flag_values=values)
    flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)


def _paths(values: flags.FlagValues) -> tuple[Path, Path | None, Path | None]:
    return _required_workdir(values), *(Path(path) if path else None for path in (values.input, values.output))


def parse_generate(arguments: Sequence[str]) -> GenerateRequest:
    """Flags of `generate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("prompt", "", "what each text begins with; no space at its end", flag_values=values)
        flags.DEFINE_integer("count", 1, "how many texts to write", lower_bound=1, flag_values=values)
        flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)
        _define_decode(values)

    usage = "usage: generate --workdir=W [--prompt=TEXT] [--count=N] [--method=sample --temperature=0.8 --seed=1 ...]"
    values = command_line.parse(arguments, define, usage=usage)
    output = Path(values.output) if values.output else None
    _check_utf8("--prompt", values.prompt)
    return GenerateRequest(_required_workdir(values), values.prompt, values.count, _decode_given(values), output)


DECODE = {  # every field of DecodeConfig: how its flag is defined, and what --help says
    "method": (flags.DEFINE_string, "greedy, sample or beam"),
    "beam_size": (flags.DEFINE_integer, "beam: hypotheses that are kept"),
    "alpha": (flags.DEFINE_float, "beam: of the length penalty; higher: longer texts"),
    "temperature": (flags.DEFINE_float, "sample: what logits are divided by"),
    "top_k": (flags.DEFINE_integer, "sample: only the k likeliest tokens"),
    "top_p": (flags.DEFINE_float, "sample: only the likeliest tokens of this share"),
    "seed": (flags.DEFINE_integer, "sample: of the draws"),
    "max_extra_length": (flags.DEFINE_integer, "most tokens beyond those of the source or prompt"),
    "min_length": (flags.DEFINE_integer, "fewest tokens of a text"),
    "no_repeat_ngram": (flags.DEFINE_integer, "n: no n tokens in a row occur twice in a text"),
}


def _define_decode(values: flags.FlagValues) -> None:
    for name, (define, text) in DECODE.items():
        define(name, None, text, flag_values=values)


def _decode_given(values: flags.FlagValues) -> dict[str, object]:
    return {name: values[name].value for name in DECODE if values[name].value is not None}


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
    values = command_line.parse(rest, define, usage=usage, words=words)
    folders = [Path(word) for word in words or ()]
    if kind not in PLOTS:
        raise ValueError(f"plot: expected one of {', '.join(PLOTS)}, got {kind or 'nothing'!r} (--help tells more)")
    if kind != "metrics" or not folders:
        folders = [*folders, _required_workdir(values)]
    elif values.workdir is not None:
        raise ValueError("plot metrics: name the folders one after another, or one by --workdir, not both.")
    if (kind == "attention") != bool(values.text):
        raise ValueError(
            f"--text: {'expected the text to read' if kind == 'attention' else 'goes with plot attention'}."
        )
    _check_utf8("--text", values.text)
    return PlotRequest(kind, folders, values.text, Path(values.output) if values.output else folders[0] / "plots")


def _check_utf8(flag: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the bytes of an argument that are not UTF-8 come as lone surrogates
        raise ValueError(f"{flag}: expected UTF-8, got {text!r}.") from error


def _required_workdir(values: flags.FlagValues) -> Path:
    if values.workdir is None:
        raise ValueError("--workdir: expected the folder of a run, got nothing; add --workdir=FOLDER.")
    return Path(values.workdir)
