"""Custom text whose files are whole texts, and slices of it by characters.

A file may be larger than a tokenizer takes at once, so a text is stored in pieces: some lines with
their ends, or a part of a long line. A piece is one record of the dataset.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from flaxformer_lite.data.sources.text_files import SEPARATORS, UNWANTED, Corpus, Example
from flaxformer_lite.system.compressed import (
    CONVERT,
    UNREADABLE,
    UTF16,
    open_bytes,
    why_unreadable,
)
from flaxformer_lite.system.errors import InputError

FORM = "whole"
PIECE = 1 << 12  # bytes after which a piece ends with the line
LONGEST = 1 << 16  # bytes of the longest part of a line
SLICE = re.compile(r"(\w+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?")


class WholeFiles(Corpus):
    """The files of one split; iterating over it yields their pieces.

    A byte order mark at the start of a line is removed, as in files of lines. Everything else is
    kept: all line ends, blank lines, white space.
    """

    def __iter__(self) -> Iterator[Example]:
        """Yields the pieces of all files in order.

        Raises:
          InputError: a file cannot be read, has no text, is not UTF-8, or has control characters
            other than tabs and line separators.
        """
        for (path,) in self.rows:
            for text in pieces(path):
                yield Example((text,))


def pieces(path: str) -> Iterator[str]:
    """Yields the pieces of a file: joined, they are its text.

    Raises:
      InputError: see `WholeFiles`.
    """
    line, is_new, has_text = 1, True, False
    waiting: list[str] = []
    size = 0  # bytes of `waiting`
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with open_bytes(path) as file:
            while chunk := file.readline(LONGEST):
                if line == 1 and is_new and chunk.startswith(UTF16):
                    raise InputError(f"{path}: expected UTF-8, got UTF-16; {CONVERT}.")
                text = decoder.decode(chunk.removeprefix(codecs.BOM_UTF8) if is_new else chunk)
                _check(text, f"{path}:{line}")
                is_new = chunk.endswith(b"\n")
                line += is_new
                has_text = has_text or not text.isspace()
                waiting.append(text)
                size += len(chunk)
                if size >= PIECE:
                    yield "".join(waiting)
                    waiting, size = [], 0
            decoder.decode(b"", final=True)
            if text := "".join(waiting):
                yield text
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(
            f"{path}:{line}: expected UTF-8, got the byte 0x{byte:02x}; convert the file."
        ) from error
    except UNREADABLE as error:
        raise InputError(
            f"{path}, in line {line:,}: cannot be read ({why_unreadable(error)}); replace it with "
            "a complete file."
        ) from error
    if not has_text:
        raise InputError(f"{path}: expected a text, got an empty file; leave it out.")


def _check(text: str, where: str) -> None:
    """Raises InputError if the text has control characters that are no line separators."""
    for found in UNWANTED.finditer(text):
        if found[0] not in SEPARATORS:
            raise InputError(
                f"{where}: expected text, got the control character U+{ord(found[0]):04X} at "
                f"character {found.start() + 1}; remove it from the file."
            )


def write_index(corpus: Corpus, folder: Path, split: str) -> None:
    """Writes the last character of each piece, and the first piece of each file, of a split."""
    characters: list[np.ndarray] = []
    first, count = [], 0
    for (path,) in corpus.rows:
        characters.append(np.fromiter(map(len, pieces(path)), np.int64))
        first.append(count)
        count += len(characters[-1])
    ends = np.cumsum(np.concatenate(characters))
    np.savez(_index_file(folder, split), ends=ends, first=np.array(first, np.int64))


def _index_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.pieces.npz"


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of the characters of a split, and the records that contain it.

    Attributes:
      split: the name of the whole split.
      start, stop: the first character of the range in the joined files, and the one after its last.
      records: the first of the records, and the one after the last.
      skipped: characters of the first record that are before the range.
      dropped: characters of the last record that are after the range.
      texts: for each text in the range its first record, from 0 in the range; then the number of
        records.
      continues: whether the range starts inside a text.
    """

    split: str
    start: int
    stop: int
    records: tuple[int, int]
    skipped: int
    dropped: int
    texts: tuple[int, ...]
    continues: bool

    @property
    def of_records(self) -> str:
        """The slice of the records, as TFDS writes it."""
        return f"{self.split}[{self.records[0]}:{self.records[1]}]"

    def overlap(self, other: "Part") -> int:
        """Returns the number of characters in both ranges."""
        if self.split != other.split:
            return 0
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))

    def cut(self, numbers: Iterable[int], texts: Sequence[str]) -> list[str]:
        """Returns the texts of records of the range without the characters outside of it."""
        last = self.records[1] - self.records[0] - 1
        return [
            text[self.skipped if number == 0 else 0 : len(text) - self.dropped]
            if number == last
            else text[self.skipped :]
            if number == 0
            else text
            for number, text in zip(numbers, texts, strict=True)
        ]

    def records_of(self, texts: np.ndarray) -> np.ndarray:
        """Returns the numbers of the records of these texts."""
        border = np.array(self.texts)
        return np.concatenate([np.arange(border[i], border[i + 1]) for i in texts])

    def starts(self, numbers: Iterable[int]) -> list[bool]:
        """Returns, for each record, whether it is the start of a file."""
        first = {*self.texts[self.continues : -1]}
        return [number in first for number in numbers]


def part(name: str, folder: Path) -> Part | None:
    """Returns a split or a slice of one, such as 'train[:90%]', of the dataset in `folder`.

    Slices count the characters of all files of the split, joined. A share is rounded down to a
    character, so that 'train[:90%]' and 'train[90%:]' are all of the split.

    Returns:
      None if there is no such split.

    Raises:
      InputError: the slice is malformed, or has no character.
    """
    found = SLICE.fullmatch(name.replace(" ", ""))
    if not found:
        raise InputError(
            f"config.data: {name!r} is no slice of whole files; use one split, such as 'train', or "
            "one slice of it, such as 'train[:90%]'."
        )
    split, *bounds = found.groups()
    file = _index_file(folder, split)
    if not file.exists():
        return None
    with np.load(file) as index:
        ends, first = index["ends"], index["first"]
    total = int(ends[-1])
    start, stop = (
        default if bound is None else _character(bound, total)
        for bound, default in zip(bounds, (0, total), strict=True)
    )
    if not 0 <= start < stop <= total:
        raise InputError(
            f"config.data: {name!r} is not a part of the {total:,} characters of the files; change "
            "the slice."
        )
    record, last = (int(n) for n in np.searchsorted(ends, [start, stop - 1], side="right"))
    before = int(ends[record - 1]) if record else 0
    starts = first[(first > record) & (first <= last)] - record
    return Part(
        split,
        start,
        stop,
        records=(record, last + 1),
        skipped=start - before,
        dropped=int(ends[last]) - stop,
        texts=(0, *starts.tolist(), last + 1 - record),
        continues=start > before or record not in first,
    )


def _character(bound: str, total: int) -> int:
    """Returns a bound of a slice as the index of a character."""
    value = int(bound.rstrip("%"))
    value = value * total // 100 if bound.endswith("%") else value
    return value + total if bound.startswith("-") else value
