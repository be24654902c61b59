"""The one parser: flags and a config file in; one line on standard error and exit code 2 for whatever is wrong."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from absl import flags
from ml_collections import config_dict, config_flags

from flaxformer_lite import config as config_lib
from flaxformer_lite import workdir as workdir_lib
from flaxformer_lite.config import did_you_mean

PACKAGE = Path(__file__).parent


def fail(message: str) -> NoReturn:
    """One message on standard error, and the end of the process with exit code 2."""
    complain(message)
    raise SystemExit(2)


def complain(message: str) -> None:
    """One message on standard error."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for threads, which may be inside XLA for long."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def shipped_configs() -> dict[str, Path]:
    """Name to file of the configs that come with the package: in a wheel inside it, in a checkout beside it."""
    folders = [folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.py")) if file.stem != "__init__"}


def find_config(name: str) -> Path:
    """The file that `--config=name` means: a path, or a shipped config by its name.

    Raises:
      ValueError: neither.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs()
    if name not in shipped:
        raise ValueError(f"--config={name}: no such file and no shipped config{did_you_mean(name, shipped)}")
    return shipped[name]


def load_config(file: Path) -> config_dict.ConfigDict:
    """What `get_config()` of a config file returns.

    Raises:
      ValueError: the file fails, has no `get_config`, or that returns no ConfigDict.
    """
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    if spec is None:
        raise ValueError(f"{file}: expected a Python file that defines get_config().")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # whatever a user's file may raise
        line = _line_in(error, file)
        raise ValueError(f"{file}{line}: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ValueError(f"{file}: get_config() returned {type(config).__name__}, expected a ConfigDict.")
    return config


def parse(
    arguments: Sequence[str],
    define: Callable[[flags.FlagValues], None],
    *,
    usage: str,
    words: list[str] | None = None,
) -> flags.FlagValues:
    """The flags that `define` defines, parsed from `arguments` (without the program's name).

    What is no flag is added to `words`, or refused if there is no such list.

    Prints `usage` and ends with 0 for --help; ends with 2 and one line for a flag that is unknown or malformed.
    """
    values = flags.FlagValues()
    define(values)
    if {"--help", "-h", "-help", "-?"} & set(arguments):
        print(f"{usage}\n\nFlags:{values.get_help()}")
        raise SystemExit(0)
    try:
        rest = values(["program", *arguments], known_only=False)[1:]
    except flags.Error as error:
        fail(f"{_first_line(error).removeprefix('FATAL Flags parsing error: ')} (--help lists the flags)")
    if words is not None:
        words += rest
    elif rest:
        fail(f"{rest[0]!r}: expected only flags, --name=value (--help lists them)")
    return values


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(`--config.section.field=value` arguments, all others); 'field value' in two arguments is joined."""
    overrides, others, waiting = [], [], iter(arguments)
    for argument in waiting:
        if argument.startswith(("--config.", "-config.")):
            overrides.append(argument if "=" in argument else f"{argument}={next(waiting, '')}")
        else:
            others.append(argument)
    return overrides, others


def override(config: config_dict.ConfigDict, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Sets each `--config.section.field=value` in `config`, and returns it.

    Raises:
      ValueError: there is no such field, or the value is not of its type.
    """
    for argument in overrides:
        name, value = argument.lstrip("-").split("=", 1)
        _check_field(config, name)
        try:
            _set_field(config, argument)
        except (flags.Error, ValueError, TypeError) as error:
            raise ValueError(f"{name}: expected {_field_type(config, name)}, got {value!r}.") from error
    return config


def _set_field(config: config_dict.ConfigDict, argument: str) -> None:
    """Lets config_flags parse one override; it looks for the overrides of a config in `sys.argv` alone."""
    values, given = flags.FlagValues(), sys.argv
    try:
        sys.argv = ["program", argument]
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values(sys.argv)
    finally:
        sys.argv = given


def _check_field(config: config_dict.ConfigDict, name: str) -> None:
    node, path = config, "config"
    for part in name.split(".")[1:]:
        if not isinstance(node, config_dict.ConfigDict):
            raise ValueError(f"{path}.{part}: there is no such field; {path} has none, its value is {node!r}.")
        if part not in node:
            raise ValueError(f"{path}.{part}: there is no such field{did_you_mean(part, node.keys())}")
        node, path = node[part], f"{path}.{part}"


def _field_type(config: config_dict.ConfigDict, name: str) -> str:
    *sections, field = name.split(".")[1:]
    for section in sections:
        config = config[section]
    return config.get_type(field).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _line_in(error: BaseException, file: Path) -> str:
    """':12' for the last line of `file` that led to `error`."""
    if isinstance(error, SyntaxError) and error.filename == str(file.absolute()):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file.absolute())]
    return f":{lines[-1]}" if lines else ""


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


class TextRequest(NamedTuple):
    """What `translate` or `classify` was asked to do; no path means standard input or output."""

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

    overrides, others = split_overrides(arguments)
    usage = "usage: train [--config=X] [--workdir=W] [--config.section.field=value ...]"
    values = parse(others, define, usage=usage)
    name = "default"
    if values.config is None and values.workdir and (Path(values.workdir) / "config.json").exists():
        user_config = config_lib.to_config_dict(workdir_lib.read_config(Path(values.workdir)))
    else:
        file = find_config(values.config or name)
        name, user_config = file.stem, load_config(file)
    config = config_lib.resolve(override(user_config, overrides))
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

    values = parse(arguments, define, usage="usage: evaluate --workdir=W [--split=test]")
    return EvaluateRequest(_required_workdir(values), values.split)


def parse_text(arguments: Sequence[str], command: str) -> TextRequest:
    """Flags of `translate` and `classify`."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("input", None, "UTF-8 text, one a line; default: standard input", flag_values=values)
        flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)

    values = parse(arguments, define, usage=f"usage: {command} --workdir=W [--input=F] [--output=F]")
    paths = [Path(path) if path else None for path in (values.input, values.output)]
    return TextRequest(_required_workdir(values), *paths)


def parse_generate(arguments: Sequence[str]) -> GenerateRequest:
    """Flags of `generate`; a field of `decode` that is not given stays as the run has it."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("prompt", "", "what each text begins with; no space at its end", flag_values=values)
        flags.DEFINE_integer("count", 1, "how many texts to write", lower_bound=1, flag_values=values)
        flags.DEFINE_string("output", None, "where to write; default: standard output", flag_values=values)
        flags.DEFINE_string("method", None, "greedy or sample", flag_values=values)
        flags.DEFINE_float("temperature", None, "sample: what logits are divided by", flag_values=values)
        flags.DEFINE_integer("top_k", None, "sample: only the k likeliest tokens", flag_values=values)
        flags.DEFINE_float("top_p", None, "sample: only the likeliest tokens of this share", flag_values=values)
        flags.DEFINE_integer("seed", None, "sample: of the draws", flag_values=values)
        flags.DEFINE_integer("max_extra_length", None, "most tokens after the prompt", flag_values=values)

    usage = "usage: generate --workdir=W [--prompt=TEXT] [--count=N] [--method=sample --temperature=0.8 --seed=1 ...]"
    values = parse(arguments, define, usage=usage)
    fields = ("method", "temperature", "top_k", "top_p", "seed", "max_extra_length")
    decode = {name: values[name].value for name in fields if values[name].value is not None}
    output = Path(values.output) if values.output else None
    _check_utf8("--prompt", values.prompt)
    return GenerateRequest(_required_workdir(values), values.prompt, values.count, decode, output)


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
    values = parse(rest, define, usage=usage, words=words)
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


def read_lines(path: Path | None) -> list[str]:
    """The lines of a UTF-8 file, or of standard input, without their line ends (LF or CRLF).

    Raises:
      ValueError: the file cannot be read, or a line is not UTF-8; it is named.
    """
    name = path or "standard input"
    try:
        raw = path.read_bytes() if path else sys.stdin.buffer.read()
    except OSError as error:
        raise ValueError(f"--input={path}: cannot be read: {error.strerror}.") from error
    lines = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else [], start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}, line {number}: expected UTF-8, got byte 0x{line[error.start]:02x} at column "
                f"{error.start + 1}; convert it, for example with iconv -t UTF-8."
            ) from error
    return lines


def write_lines(path: Path | None, lines: Sequence[str]) -> None:
    """Writes one line each, to a file that appears whole or to standard output; a line end within one is a space.

    Raises:
      ValueError: the file cannot be written.
    """
    text = "".join(line.replace("\n", " ") + "\n" for line in lines)
    if path is None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
        return
    try:
        workdir_lib.write_whole(path, text)
    except OSError as error:
        raise ValueError(f"--output={path}: cannot be written: {error.strerror}.") from error
