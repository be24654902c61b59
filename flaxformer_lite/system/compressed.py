"""Compressed files: read by their first bytes, written by the end of their name.

    .gz  gzip    .bz2  bzip2    .xz  xz    .zst  zstd, with Python 3.14 or the package zstandard

Each format allows several compressed parts one after another, so that output can be appended.
"""

import bz2
import gzip
import importlib
import importlib.util
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from flaxformer_lite.system.errors import InputError, is_of_a_disk

CHUNK = 1 << 20  # bytes that are read at once
# the byte order marks at the start of a UTF-16 file, and what to do about them
UTF16, CONVERT = (b"\xff\xfe", b"\xfe\xff"), "convert it with iconv -f UTF-16 -t UTF-8"


class Format(NamedTuple):
    """A compression format."""

    suffix: str
    starts: Callable[[bytes], bool]  # whether the first bytes of a file are those of this format
    reader: Callable[[Any], Any]  # a compressed stream -> the stream of its content
    compress: Callable[[bytes], bytes]


class NoDecompressor(OSError):
    """Raised if a file has a format that this Python cannot decompress; a user's error."""


def _zstd(function: str) -> Callable[[Any], Any]:
    """Returns 'open' or 'compress' of zstd, of Python's library or zstandard, found when called."""

    def call(content: Any) -> Any:
        if importlib.util.find_spec("compression") is not None:  # Python 3.14
            library = importlib.import_module("compression.zstd")
            return (library.open if function == "open" else library.compress)(content)
        if importlib.util.find_spec("zstandard") is not None:
            library = importlib.import_module("zstandard")
            if function == "compress":
                return library.compress(content)
            return library.ZstdDecompressor().stream_reader(content, read_across_frames=True)
        raise NoDecompressor(0, "zstd needs Python 3.14 or the package zstandard; install it")

    return call


FORMATS = (
    Format(
        ".gz",
        lambda head: head.startswith(b"\x1f\x8b"),
        lambda file: gzip.GzipFile(fileobj=file),
        # without the time, so that the same text is the same bytes
        lambda content: gzip.compress(content, compresslevel=6, mtime=0),
    ),
    # a text may start with "BZh"; the last bytes are those of a block or of an empty stream
    Format(
        ".bz2",
        lambda head: (
            head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
        ),
        bz2.BZ2File,
        bz2.compress,
    ),
    Format(".xz", lambda head: head.startswith(b"\xfd7zXZ\0"), lzma.LZMAFile, lzma.compress),
    Format(
        ".zst", lambda head: head.startswith(b"\x28\xb5\x2f\xfd"), _zstd("open"), _zstd("compress")
    ),
)
# raised by reading a file; by a compressed one all of them
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


def open_bytes(path: str | Path) -> BinaryIO:
    """Opens a file for reading bytes, decompressed if its first bytes are of a format of FORMATS.

    Opening and reading raise `UNREADABLE`.
    """
    file = open(path, "rb", CHUNK)  # noqa: SIM115 - the caller closes it
    try:
        return decompressed(file, file.close)
    except BaseException:
        file.close()
        raise


def decompressed(file: BinaryIO, close: Callable[[], None] = lambda: None) -> BinaryIO:
    """Returns `file`, decompressed if its first bytes are of a format of FORMATS.

    Args:
      close: is called when the decompressed stream is closed.
    """
    buffered = cast(
        io.BufferedReader,
        file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file)),
    )
    head = buffered.peek(16)[:16]
    for each in FORMATS:
        if each.starts(head):
            return io.BufferedReader(_Decompressed(each.reader(buffered), close), CHUNK)
    return buffered


class _Decompressed(io.RawIOBase):
    """A decompressed stream."""

    def __init__(self, stream: Any, close: Callable[[], None]):
        self._stream, self._close = stream, close

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._close()
        super().close()


def is_gzip(path: str | Path) -> bool:
    """Whether a file is compressed by gzip."""
    with open(path, "rb") as file:
        return FORMATS[0].starts(file.read(2))


def is_compressed(file: BinaryIO) -> bool:
    """Whether a file of `open_bytes` is decompressed while it is read."""
    return isinstance(getattr(file, "raw", None), _Decompressed)


def compressor(path: Path | None) -> Callable[[bytes], bytes]:
    """Returns the function that compresses content for a file of this name, or leaves it as it is.

    Raises:
      InputError: the format needs a library that is not installed.
    """
    for each in FORMATS:
        if path is not None and path.name.lower().endswith(each.suffix):
            try:
                each.compress(b"")
            except NoDecompressor as error:
                raise InputError(f"{path}: {error.strerror}.") from error
            return each.compress
    return bytes


def without_suffix(name: str) -> str:
    """Returns 'a/train.en' for 'a/train.en.gz'; other names as they are."""
    for each in FORMATS:
        if name.lower().endswith(each.suffix):
            return name[: -len(each.suffix)]
    return name


def why_unreadable(error: Exception) -> str:
    """Returns the message of an error of `UNREADABLE`, and what to do about a disk."""
    reason = getattr(error, "strerror", None) or str(error)
    is_disk = isinstance(error, OSError) and is_of_a_disk(error)
    return f"{reason}; check the disk or the network, and try again" if is_disk else reason
