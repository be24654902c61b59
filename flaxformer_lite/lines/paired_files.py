"""Two files of lines as one: each line has a source, SEPARATOR and a target."""

import codecs
import io
from pathlib import Path
from typing import BinaryIO

from flaxformer_lite.system.compressed import UNREADABLE, open_bytes, why_unreadable
from flaxformer_lite.system.errors import InputError

SEPARATOR = "\x1f"  # U+001F, the unit separator: texts may have tabs


class PairedFiles(io.RawIOBase):
    """Reads 2 files at once, line by line; the bytes that it returns identify both contents."""

    def __init__(self, source: Path, target: Path):
        """Opens the files; raises InputError if one cannot be read."""
        self._paths = {"--input": source, "--target": target}
        self._files: dict[str, BinaryIO] = {}
        self._lines, self._waiting = 0, b""  # `_waiting`: the rest of a line
        for flag, path in self._paths.items():
            try:
                self._files[flag] = open_bytes(path)
            except UNREADABLE as error:
                raise self._unreadable(flag, error) from error

    def readline(self, size: int | None = -1, /) -> bytes:
        """Returns the rest of a line with its end; at most about 2 x `size` bytes."""
        line, self._waiting = self._waiting or self._next(-1 if size is None else size), b""
        return line

    def read(self, size: int = -1, /) -> bytes:
        """Returns `size` bytes, fewer only at the end."""
        found = bytearray()
        while (size < 0 or len(found) < size) and (line := self.readline()):
            found += line
        if size >= 0:
            self._waiting = bytes(found[size:])
        return bytes(found[:size] if size >= 0 else found)

    def close(self) -> None:
        """Closes both files."""
        for file in self._files.values():
            file.close()
        super().close()

    def _next(self, size: int) -> bytes:
        """Returns the next lines of both files as one; b'' at the end of both."""
        lines = {}
        for flag, file in self._files.items():
            try:
                lines[flag] = file.readline(size)
            except UNREADABLE as error:
                raise self._unreadable(flag, error) from error
        if not any(lines.values()):
            return b""
        for flag, line in lines.items():
            if not line:
                (other,) = self._paths.keys() - {flag}
                raise InputError(
                    f"{flag}={self._paths[flag]}: {self._lines:,} lines, and "
                    f"{other}={self._paths[other]} has more; line n of one belongs to line n of "
                    "the other."
                )
            if SEPARATOR.encode() in line:
                raise InputError(
                    f"{self._paths[flag]}, line {self._lines + 1}: expected text, got the control "
                    "character U+001F; remove it from the file."
                )
        self._lines += 1
        source, target = (
            line.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").removesuffix(b"\r")
            for line in lines.values()
        )
        return source + SEPARATOR.encode() + target + b"\n"

    def _unreadable(self, flag: str, error: Exception) -> InputError:
        return InputError(f"{flag}={self._paths[flag]}: cannot be read: {why_unreadable(error)}.")
