"""Parses flags. A wrong flag ends the process with exit code 2 and one line on standard error."""

import codecs
import importlib.metadata
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from flaxformer_lite.config_files import first_line
from flaxformer_lite.system.errors import NotWritten, is_of_a_disk, is_of_a_path


def fail(message: str) -> NoReturn:
    """Prints one message on standard error, and ends the process with exit code 2."""
    complain(message)
    raise SystemExit(2)


def complain(message: str) -> None:
    """Prints one message on standard error."""
    print(f"error: {message}", file=sys.stderr, flush=True)


def complain_of(error: Exception) -> int:
    """Prints one message about a bad path, a disk or the devices, else the traceback of a bug.

    Returns the exit code.
    """
    if isinstance(error, OSError) and is_of_a_path(error):
        complain(
            f"{error.filename}: cannot be reached: {error.strerror}; check the path and its "
            "permissions."
        )
        return 2
    if isinstance(error, NotWritten):
        complain(str(error))
    elif isinstance(error, OSError) and is_of_a_disk(error):
        where = "a file" if error.filename is None else error.filename
        complain(
            f"{where}: cannot be read or written: {error.strerror}; check the disk or the network, "
            "and start the same command again."
        )
    elif reason := _why_no_devices():
        complain(reason)
        return 2
    else:
        traceback.print_exc()
    return 1


def _why_no_devices() -> str | None:
    """Returns why JAX cannot start, if this command has imported it; None if it can."""
    if "jax" not in sys.modules:
        return None
    from flaxformer_lite.system import runtime

    return runtime.why_no_devices()


def escape_output() -> None:
    """Makes standard output print every text.

    In UTF-8 it prints a path that is not UTF-8 as it is; another encoding escapes what it lacks.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def version() -> str:
    """Returns the version of the installed package."""
    try:
        return importlib.metadata.version("flaxformer_lite")
    except importlib.metadata.PackageNotFoundError:  # a checkout
        return "not installed"


def exit_now(code: int) -> NoReturn:
    """Ends the process without waiting for threads, which may be in a long XLA compilation.

    If standard output cannot be flushed, prints an error and the code is 1; a pipe that its reader
    has closed is no error.
    """
    try:
        if sys.stdout is not None:  # None: it is closed
            sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        complain(f"standard output: cannot be written: {error.strerror}.")
        code = code or 1
    sys.stderr.flush()
    os._exit(code)


def parse(
    arguments: Sequence[str],
    define: Callable[[flags.FlagValues], None],
    *,
    usage: str,
    words: list[str] | None = None,
) -> flags.FlagValues:
    """Returns the flags that `define` defines, parsed from `arguments` without the program's name.

    For --help, prints `usage` and the flags, and ends the process with exit code 0. For an unknown
    or malformed flag, prints one line and ends it with 2.

    Args:
      words: receives the arguments that are not flags; None: they are refused.
    """
    values = flags.FlagValues()
    define(values)
    if {"--help", "-h", "-help", "-?"} & set(arguments):
        print(f"{usage}\n\nFlags:{values.get_help()}")
        raise SystemExit(0)
    try:
        rest = values(["program", *arguments], known_only=False)[1:]
    except flags.Error as error:
        fail(
            f"{first_line(error).removeprefix('FATAL Flags parsing error: ')} (--help lists the "
            "flags)"
        )
    if words is not None:
        words += rest
    elif rest:
        fail(f"{rest[0]!r}: expected only flags, --name=value (--help lists them)")
    return values


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the `--config.section.field=value` arguments, and all others.

    Joins an override that is split in two arguments, `--config.section.field` and `value`.
    """
    overrides, others, remaining = [], [], iter(arguments)
    for argument in remaining:
        if argument.startswith(("--config.", "-config.")):
            overrides.append(argument if "=" in argument else f"{argument}={next(remaining, '')}")
        else:
            others.append(argument)
    return overrides, others
