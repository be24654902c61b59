"""The one parser: flags and a config file in; one line on standard error and exit code 2 for whatever is wrong."""

import ast
import contextlib
import errno
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from absl import flags
from ml_collections import config_dict, config_flags

from flaxformer_lite.config import did_you_mean
from flaxformer_lite.data.line_windows import as_text, decode_line
from flaxformer_lite.data.text_files import UNREADABLE, open_bytes, why_unreadable
from flaxformer_lite.places import behind_links, in_bucket, is_stream, why_unwritable, write_whole

PACKAGE = Path(__file__).parent
# Errors of a path that a user named, which need no traceback.
OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)


def fail(message: str) -> NoReturn:
    """One message on standard error, and the end of the process with exit code 2."""
    complain(message)
    raise SystemExit(2)


def complain(message: str) -> None:
    """One message on standard error."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for threads, which may be inside XLA for long.

    What cannot be written any more is told, unless nobody reads it, and the code is 1 then.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        complain(f"standard output: cannot be written: {error.strerror}.")
        code = code or 1
    sys.stderr.flush()
    os._exit(code)


def shipped_configs(kind: str = ".") -> dict[str, Path]:
    """Name to file of the configs that come with the package: in a wheel inside it, in a checkout beside it.

    Args:
      kind: the folder below `configs/`, as 'sweeps'.
    """
    folders = [folder / kind for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir()]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.py")) if file.stem != "__init__"}


def find_config(name: str, *, flag: str = "--config", kind: str = ".") -> Path:
    """The file that `--config=name` means: a path, or a shipped config by its name.

    Raises:
      ValueError: neither.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs(kind)
    if name not in shipped:
        raise ValueError(f"{flag}={name}: no such file and no shipped config{did_you_mean(name, shipped)}")
    return shipped[name]


def load_config(file: Path) -> config_dict.ConfigDict:
    """What `get_config()` of a config file returns.

    Raises:
      ValueError: as `load_module` and `config_of`.
    """
    return config_of(load_module(file), file)


class Uncached(importlib.machinery.SourceFileLoader):
    """Reads a Python file as it is now: no compiled copy is left beside it, and none that is there is taken for it."""

    def get_code(self, fullname: str) -> types.CodeType:
        """The file, compiled."""
        return self.source_to_code(self.get_data(self.path), self.path)


def load_module(file: Path) -> types.ModuleType:
    """The Python file, run. Raises ValueError, with its line, if it fails."""
    if file.suffix != ".py":
        raise ValueError(f"{file}: expected a Python file that defines get_config().")
    name = f"config_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file, loader=Uncached(name, str(file.absolute())))
    module = importlib.util.module_from_spec(spec)
    with blamed_on(file):
        spec.loader.exec_module(module)
    return module


def config_of(module: types.ModuleType, file: Path) -> config_dict.ConfigDict:
    """What `get_config()` of a module returns; ValueError that names `file` if it fails or returns another type."""
    with blamed_on(file):
        config = module.get_config()
    if not isinstance(config, config_dict.ConfigDict):
        raise ValueError(f"{file}: get_config() returned {type(config).__name__}, expected a ConfigDict.")
    return config


@contextlib.contextmanager
def blamed_on(file: Path) -> Iterator[None]:
    """Whatever a user's `file` raises in the block, as a ValueError that names its line."""
    try:
        yield
    except Exception as error:
        line = _line_in(error, file)
        raise ValueError(f"{file}{line}: {type(error).__name__}: {_first_line(error)}") from error


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
    """Sets each `--config.section.field=value` in `config`, and returns it; 'None' is None, and no text.

    Raises:
      ValueError: there is no such field, or the value is not of its type.
    """
    for argument in overrides:
        name, value = argument.lstrip("-").split("=", 1)
        _check_field(config, name)
        try:
            if value == "None":
                _, section, field = name.split(".")
                config[section][field] = None
                continue
            _set_field(config, f"--{name}={_quoted(value)}" if _field_type(config, name) == "tuple" else argument)
        except (flags.Error, ValueError, TypeError) as error:
            raise ValueError(f"{name}: expected {_field_type(config, name)}, got {value!r}.") from error
    return config


def _quoted(value: str) -> str:
    """'a.en,a.de' as "('a.en', 'a.de')", the one way in which config_flags takes several texts; else as it is."""
    try:
        ast.literal_eval(value)
        return value
    except (ValueError, SyntaxError):
        opened = value.lstrip().startswith(("(", "[", "'", '"'))  # and not closed: config_flags will say so
        return value if opened else repr(tuple(part.strip() for part in value.split(",") if part.strip()))


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


def read_lines(path: Path | None, *, flag: str = "--input") -> list[str]:
    """The lines of a UTF-8 file, that `flag` named, or of standard input, without their line ends (LF or CRLF).

    A file whose name ends in .gz is unpacked.

    Raises:
      ValueError: the file cannot be read, or a line is not UTF-8; it is named.
    """
    try:
        with open_bytes(path) if path else contextlib.nullcontext(sys.stdin.buffer) as file:
            raw = file.read()
    except UNREADABLE as error:
        raise ValueError(f"{flag}={path}: cannot be read: {why_unreadable(error)}.") from error
    lines = raw.removesuffix(b"\n").split(b"\n") if raw else []
    return [decode_line(line, str(path or "standard input"), number) for number, line in enumerate(lines, start=1)]


def is_about_input(error: ValueError | OSError) -> bool:
    """Whether this package refused its input, or a path that a user named cannot be reached; else it is a bug."""
    if isinstance(error, OSError):
        return error.errno in OF_A_PATH and error.filename is not None
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return Path(innermost.f_code.co_filename).is_relative_to(PACKAGE)


def check_output(path: Path | None) -> None:
    """Raises ValueError if `write_lines` could not write there, before there is anything to write."""
    if path is None or in_bucket(path) or is_stream(path):
        return
    path = behind_links(path)
    reason = os.strerror(errno.EISDIR) if path.is_dir() else why_unwritable(path.parent)
    if not path.parent.exists():  # none is made for a file
        reason = os.strerror(errno.ENOENT)
    if reason is not None:
        raise ValueError(f"--output={path}: cannot be written: {reason}.")


def write_lines(path: Path | None, lines: Sequence[str]) -> None:
    """Writes one line each, to a file that appears whole, a pipe, a device or standard output.

    A line end within a line is written as a space.

    Raises:
      ValueError: the file cannot be written.
    """
    text = as_text(lines)
    if path is None:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
        return
    try:
        if is_stream(path):
            path.write_bytes(text.encode())
        else:
            write_whole(path if in_bucket(path) else behind_links(path), text)
    except OSError as error:
        raise ValueError(f"--output={path}: cannot be written: {error.strerror}.") from error
