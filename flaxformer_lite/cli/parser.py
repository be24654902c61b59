"""The one parser of flags; one line on standard error and exit code 2 for whatever is wrong."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import flags

from flaxformer_lite.config_files import first_line


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
        fail(f"{first_line(error).removeprefix('FATAL Flags parsing error: ')} (--help lists the flags)")
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
