"""Lines of text read some at a time, so that an input of any size, or one without end, takes little memory."""

import codecs
import gzip
import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import UNREADABLE, open_bytes, why_unreadable

# Lines of a window. Enough to fill eight batches of the shortest sentences with sentences of like length; and no more,
# for a job that is killed does one window again, and whoever waits at a pipe waits for one.
WINDOW = 2048
WINDOW_BYTES = 1 << 22  # a window ends early before it is larger, and no line may be: these bounds are that of memory
CHUNK = 1 << 20  # bytes that are skipped at a time


class Window(NamedTuple):
    """Some lines that follow each other."""

    lines: list[str]
    first: int = 0  # how many come before them
    name: str = "text"  # what an error calls one, before its number

    @property
    def numbers(self) -> range:
        """Of its lines, counted from 1."""
        return range(self.first + 1, self.first + len(self.lines) + 1)


class Answer(NamedTuple):
    """What is written for a window, and how many of its lines had to be split."""

    lines: list[str]
    split: int = 0


def decode_line(line: bytes, name: str, number: int) -> str:
    """A line without its end (LF or CRLF), the first without a byte order mark; InputError if it is not UTF-8."""
    line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, line {number}: expected UTF-8, got byte 0x{line[error.start]:02x} at column "
            f"{error.start + 1}; convert it, for example with iconv -t UTF-8."
        ) from error


def as_text(lines: Iterable[str]) -> str:
    """A line each; a line end within one is a space."""
    return "".join(line.replace("\n", " ") + "\n" for line in lines)


class LineReader:
    """Reads a file, or standard input, window by window, and remembers what it has read.

    Attributes:
      name: what errors call it.
      size: bytes that there are in all; None where nobody knows, as of a pipe or before they are unpacked.
      lines, bytes: how many are behind it.
    """

    START: ClassVar = {"lines": 0, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}  # what `done` says at first

    def __init__(self, path: Path | None):
        """Raises InputError if the file cannot be read."""
        self._path, self.name = path, str(path or "standard input")
        try:
            self._file = open_bytes(path) if path else sys.stdin.buffer
        except UNREADABLE as error:
            raise self._unreadable(error) from error
        self.size, self.lines, self.bytes = _size(self._file), 0, 0
        self._digest = hashlib.sha256()
        self._ahead, self._ended = b"", False  # a line that did not fit into the window before

    def __enter__(self) -> "LineReader":
        return self

    def __exit__(self, *_) -> None:
        if self._path:
            self._file.close()

    def skip(self, *, bytes: int, lines: int) -> str:
        """Goes over what an earlier reader has read, and returns the SHA-256 of what is there."""
        while self.bytes < bytes and (chunk := self._read(self._file.read, min(CHUNK, bytes - self.bytes))):
            self._count(chunk)
        self.lines = lines
        return self._digest.hexdigest()

    def done(self) -> dict[str, object]:
        """How many lines and bytes are behind it, and the SHA-256 of these bytes."""
        return {"lines": self.lines, "bytes": self.bytes, "sha256": self._digest.hexdigest()}

    def windows(self, most: int = WINDOW) -> Iterator[Window]:
        """Windows of at most so many lines to the end; where they end is a function of the bytes alone.

        Raises:
          InputError: a line is not UTF-8 or larger than a window; it is named. Or the file cannot be read.
        """
        while raw := self._window(most):
            name, first = self.name, self.lines
            lines = [decode_line(line, name, number) for number, line in enumerate(raw, start=first + 1)]
            for line in raw:
                self._count(line)
            self.lines += len(raw)
            yield Window(lines, first, f"{name}, line")

    def _window(self, most: int) -> Sequence[bytes]:
        lines, room = [], WINDOW_BYTES
        while len(lines) < most and not self._ended:  # whoever types ends the input but once
            line, self._ahead = self._ahead or self._read(self._file.readline, WINDOW_BYTES + 1), b""
            if len(line) > WINDOW_BYTES:
                number = self.lines + len(lines) + 1
                raise InputError(f"{self.name}, line {number}: over {WINDOW_BYTES:,} bytes; cut it into shorter lines.")
            room -= len(line)
            if room < 0:
                self._ahead = line
                break
            self._ended = not line
            lines += [line] if line else []
        return lines

    def _count(self, read: bytes) -> None:
        self._digest.update(read)
        self.bytes += len(read)

    def _read(self, how, size: int) -> bytes:
        try:
            return how(size)
        except UNREADABLE as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"--input={self.name}: cannot be read: {why_unreadable(error)}.")


def _size(file: BinaryIO) -> int | None:
    try:
        if isinstance(getattr(file, "raw", None), gzip.GzipFile):
            return None
        found = os.fstat(file.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
