"""Reads and writes whole files of lines."""

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flaxformer_lite.lines.line_windows import (
    as_text,
    decode_line,
    decompressed_input,
    standard_input,
    standard_output,
)
from flaxformer_lite.system.compressed import UNREADABLE, compressor, open_bytes, why_unreadable
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import (
    behind_links,
    in_bucket,
    is_stream,
    why_unwritable,
    write_whole,
)


def read_lines(path: Path | None, *, flag: str = "--input") -> list[str]:
    """Returns the lines of a UTF-8 file, or of standard input, without line ends (LF or CRLF).

    A compressed file is decompressed, see `system.compressed`.

    Args:
      flag: the flag in error messages.

    Raises:
      InputError: the file cannot be read, or a line is not UTF-8.
    """
    try:
        with open_bytes(path) if path else contextlib.nullcontext(standard_input(flag)) as file:
            raw = (file if path else decompressed_input(file)).read()
    except UNREADABLE as error:
        raise InputError(f"{flag}={path}: cannot be read: {why_unreadable(error)}.") from error
    lines = raw.removesuffix(b"\n").split(b"\n") if raw else []
    return [
        decode_line(line, str(path or "standard input"), number)
        for number, line in enumerate(lines, start=1)
    ]


def check_output(path: Path | None, *, flag: str = "--output") -> None:
    """Raises InputError if `write_lines` cannot write to `path`; for a check before the work."""
    if path is None or in_bucket(path) or is_stream(path):
        return
    path = behind_links(path)
    reason = os.strerror(errno.EISDIR) if path.is_dir() else why_unwritable(path.parent)
    if not path.parent.exists():  # folders are not created
        reason = os.strerror(errno.ENOENT)
    if reason is not None:
        raise InputError(f"{flag}={path}: cannot be written: {reason}.")


def write_lines(
    path: Path | None, lines: Sequence[str], *, keep_ends: bool = False, flag: str = "--output"
) -> None:
    """Writes the lines to a file (atomically), a pipe, a device or standard output.

    A line end within a line becomes a space. A file is compressed if its name says so, see
    `system.compressed`.

    Args:
      keep_ends: write texts with their line ends, and a line of --- between two of them.
      flag: the flag in error messages.

    Raises:
      InputError: the file cannot be written.
    """
    text = "\n---\n".join(lines) + "\n" if keep_ends else as_text(lines)
    content = compressor(path)(text.encode())
    if path is None:
        standard_output().write(content)
        standard_output().flush()
        return
    try:
        if is_stream(path):
            path.write_bytes(content)
        else:
            write_whole(path if in_bucket(path) else behind_links(path), content)
    except OSError as error:
        raise InputError(f"{flag}={path}: cannot be written: {error.strerror}.") from error
