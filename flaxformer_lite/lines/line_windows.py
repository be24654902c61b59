"""Reads lines in windows, so that an input of any size, or an endless one, takes little memory."""

import codecs
import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, cast

from flaxformer_lite.lines.paired_files import PairedFiles
from flaxformer_lite.system.compressed import (
    CONVERT,
    UNREADABLE,
    UTF16,
    decompressed,
    is_compressed,
    open_bytes,
    why_unreadable,
)
from flaxformer_lite.system.errors import InputError

# Lines of a window: enough for 8 batches of the shortest sentences, sorted by length. A larger one
# would delay the output of a pipe, and cost more work to repeat after a kill.
WINDOW = 2048
# Limit of a window and of a line, which bounds the memory: a window ends early before it.
WINDOW_BYTES = 1 << 22
CHUNK = 1 << 20  # bytes of one read while skipping


class Window(NamedTuple):
    """Consecutive lines of the input."""

    lines: list[str]
    first: int = 0  # number of lines before the window
    name: str = "text"  # prefix of the line number in error messages

    @property
    def numbers(self) -> range:
        """The numbers of its lines, from 1."""
        return range(self.first + 1, self.first + len(self.lines) + 1)


class Answer(NamedTuple):
    """The output lines of a window, and the number of its lines that were split into chunks."""

    lines: list[str]
    split: int = 0


def decode_line(line: bytes, name: str, number: int) -> str:
    """Returns a line without its end (LF or CRLF) and without a byte order mark at its start.

    Raises:
      InputError: the line is not UTF-8.
    """
    if number == 1 and line.startswith(UTF16):
        raise InputError(f"{name}: expected UTF-8, got UTF-16; {CONVERT}.")
    line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, line {number}: expected UTF-8, got byte 0x{line[error.start]:02x} at column "
            f"{error.start + 1}; convert it, for example with iconv -t UTF-8."
        ) from error


def as_text(lines: Iterable[str]) -> str:
    """Returns the lines with line ends; a line end within a line becomes a space."""
    return "".join(line.replace("\n", " ") + "\n" for line in lines)


def standard_input(flag: str = "--input") -> BinaryIO:
    """Returns the bytes of standard input; raises InputError if it is closed."""
    if sys.stdin is None:
        raise InputError(f"{flag}: standard input is closed; name a file with {flag}=FILE.")
    return sys.stdin.buffer


def decompressed_input(file: BinaryIO) -> BinaryIO:
    """Returns standard input, decompressed; waits for its first bytes."""
    # a terminal is not compressed, and its end of input must not be read ahead
    return file if file.isatty() else decompressed(file)


def standard_output() -> BinaryIO:
    """Returns standard output for bytes; raises InputError if it is closed."""
    if sys.stdout is None:
        raise InputError("--output: standard output is closed; name a file with --output=FILE.")
    return sys.stdout.buffer


class LineReader:
    """Reads a file, or standard input, window by window, and hashes the bytes it has read.

    Attributes:
      name: the name in error messages.
      size: total bytes; None if unknown, as of a pipe or a compressed file.
      lines, bytes: the numbers of lines and bytes that are done.
    """

    # the value of `done` before the first window
    START: ClassVar = {"lines": 0, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}

    def __init__(self, path: Path | None, target: Path | None = None):
        """Raises InputError if the file cannot be read.

        `target`: a second file, read together with the first, see `PairedFiles`.
        """
        self._path, self.name = path, str(path or "standard input")
        try:
            if path and target:
                self.name = f"{path} and {target}"
                self._file: BinaryIO = cast(BinaryIO, PairedFiles(path, target))
            else:
                self._file = open_bytes(path) if path else standard_input()
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        self.size, self.lines, self.bytes = _size(self._file), 0, 0
        self._is_open = bool(path)  # False: the compression of standard input is not known yet
        self._digest = hashlib.sha256()
        self._ahead, self._ended = b"", False  # `_ahead`: a line that did not fit into a window

    def __enter__(self) -> "LineReader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._path:
            self._file.close()

    def skip(self, *, bytes: int, lines: int) -> str:
        """Skips the part that an earlier reader has done, and returns its SHA-256."""
        while self.bytes < bytes and (chunk := self._read(min(CHUNK, bytes - self.bytes))):
            self._count(chunk)
        self.lines = lines
        return self._digest.hexdigest()

    def done(self) -> dict[str, object]:
        """Returns the numbers of lines and bytes that are done, and the SHA-256 of these bytes."""
        return {"lines": self.lines, "bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def windows(self, most: int = WINDOW) -> Iterator[Window]:
        """Yields windows of at most `most` lines; their borders depend only on the bytes.

        Raises:
          InputError: a line is not UTF-8, or larger than a window; or the file cannot be read.
        """
        while raw := self._window(most):
            name, first = self.name, self.lines
            lines = [
                decode_line(line, name, number) for number, line in enumerate(raw, start=first + 1)
            ]
            for line in raw:
                self._count(line)
            self.lines += len(raw)
            yield Window(lines, first, f"{name}, line")

    def _window(self, most: int) -> Sequence[bytes]:
        lines: list[bytes] = []
        free = WINDOW_BYTES
        while len(lines) < most and not self._ended:  # a terminal's end of input comes only once
            line = self._ahead or self._read(WINDOW_BYTES + 1, line=True)
            self._ahead = b""
            if len(line) > WINDOW_BYTES:
                number = self.lines + len(lines) + 1
                raise InputError(
                    f"{self.name}, line {number}: over {WINDOW_BYTES:,} bytes; cut it into shorter "
                    "lines."
                )
            free -= len(line)
            if free < 0:
                self._ahead = line
                break
            self._ended = not line
            lines += [line] if line else []
        return lines

    def _count(self, content: bytes) -> None:
        self._digest.update(content)
        self.bytes += len(content)

    def _read(self, size: int, *, line: bool = False) -> bytes:
        """Returns at most `size` bytes, or those of them that belong to the next line."""
        try:
            if not self._is_open:
                self._file, self._is_open = decompressed_input(self._file), True
                self.size = _size(self._file)
            return self._file.readline(size) if line else self._file.read(size)
        except UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"--input={self.name}: cannot be read: {why_unreadable(error)}.")


def _size(file: BinaryIO) -> int | None:
    try:
        if is_compressed(file):
            return None
        found = os.fstat(file.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
