"""Text in files of one's own, read and checked a line at a time: a corpus need not fit into memory.

Files are plain, or gzip where their names end in .gz, and only LF ends a line. What is found in them is one of these:

    cleaned   CRLF at the end of a line becomes LF, a byte order mark at the start of a file is left out, and the last
              line may lack its LF; white space around a label does not belong to it. Nobody is told.
    a fault   one of SORTS. `data.faults` says whether the dataset is refused or the example dropped. A line has at most
              one fault, the first of that order; an example of two files may have one in each.
    refused   in any case: a file that is missing or cannot be read, gzip that is cut off or damaged, files of a pair
              with unequal numbers of lines, a split without an example that is left. Nothing there could be dropped.
"""

import codecs
import dataclasses
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import UNREADABLE, open_bytes, why_unreadable

SORTS = (
    "too long",
    "not UTF-8",
    "wrong columns",
    "no JSON object",
    "no such key",
    "no text",
    "control character",
    "line separator",
    "unknown label",
)
TOO_LONG, NOT_UTF8, COLUMNS, NOT_JSON, NO_KEY, NO_TEXT, CONTROL, SEPARATOR, UNKNOWN_LABEL = SORTS
# What no text may hold: control characters but the tab; what `str.splitlines` takes for the end of a line, though only
# LF is one; and halves of surrogate pairs, which JSON can escape and UTF-8 cannot write.
UNWANTED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
SEPARATORS = "\n\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029"
LABEL = "label"
CHUNK = 1 << 20  # bytes that are read at a time
SHARD_CHARACTERS = 1 << 26  # of text in one file of the dataset, about
SHOWN, NAMED = 3, 100  # faults of a sort in a split that a message explains, and of which it names file and line


class Fault(NamedTuple):
    """What is wrong with a line."""

    sort: str  # one of SORTS
    where: str  # 'train.en:17'
    what: str


class Example(NamedTuple):
    """The texts of one example, or why it has none."""

    texts: tuple[str, ...] | None
    faults: Sequence[Fault] = ()


class Faulty(Exception):
    """Raised with a sort and what is wrong where a line is read; it never leaves this module."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files of one split, which give its examples when they are iterated over.

    Attributes:
      rows: files in their order: each row is one, or the two whose lines belong together.
      form: 'lines', a text each; 'tsv', the texts of an example with tabs between; 'jsonl', objects with the fields.
      fields: the names of the texts of an example; LABEL is the name of a class.
      longest_line: in bytes, without the line end.
      labels: the names of all classes, in their order; None: any will do.
    """

    rows: tuple[tuple[str, ...], ...]
    form: str
    fields: tuple[str, ...]
    longest_line: int
    labels: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[Example]:
        """All examples in their order, faulty ones too; raises InputError for what is refused in any case."""
        per_file = 1 if self.form == "lines" else len(self.fields)
        for paths in self.rows:
            for number, lines in enumerate(_side_by_side(paths, longest=self.longest_line), start=1):
                texts, faults = [], []
                for i, (path, line) in enumerate(zip(paths, lines, strict=True)):
                    try:
                        texts += self._texts(line, self.fields[i : i + per_file])
                    except Faulty as error:
                        sort, what = error.args
                        faults.append(Fault(sort, f"{path}:{number}", what))
                yield Example(None, faults) if faults else Example(tuple(texts))

    def _texts(self, line: bytes, fields: Sequence[str]) -> Sequence[str]:
        """The texts of these fields in one line; raises Faulty."""
        if len(line) > self.longest_line:
            raise Faulty(TOO_LONG, f"over {self.longest_line:,} bytes")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise Faulty(NOT_UTF8, f"byte 0x{line[error.start]:02x} at byte {error.start + 1}") from error
        texts = {"lines": _whole, "tsv": _columns, "jsonl": _values}[self.form](text, fields)
        texts = [text.strip() if field == LABEL else text for field, text in zip(fields, texts, strict=True)]
        for field, text in zip(fields, texts, strict=True):
            _check_text(text)
            if field == LABEL and self.numbers is not None and text not in self.numbers:
                raise Faulty(UNKNOWN_LABEL, repr(text[:40]))
        return texts

    @functools.cached_property
    def numbers(self) -> dict[str, int] | None:
        """The number of each class."""
        return None if self.labels is None else {label: number for number, label in enumerate(self.labels)}


def _whole(text: str, fields: Sequence[str]) -> Sequence[str]:
    return (text,)


def _columns(text: str, fields: Sequence[str]) -> Sequence[str]:
    columns = text.split("\t")
    if len(columns) != len(fields):
        raise Faulty(COLUMNS, f"{len(columns)}, expected {len(fields)}: {', '.join(fields)}")
    return columns


def _values(text: str, fields: Sequence[str]) -> Sequence[str]:
    values = json_object(text)
    for field in fields:
        if field not in values:
            raise Faulty(NO_KEY, f"{field!r}")
        if field == LABEL and type(values[field]) is int:
            values[field] = str(values[field])
        if not isinstance(values[field], str):
            raise Faulty(NO_KEY, f"{field!r} with a text, it has {json.dumps(values[field])[:20]}")
    return [values[field] for field in fields]


def json_object(text: str) -> dict:
    """What a line of JSON Lines says; raises Faulty."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Faulty(NOT_JSON, str(error)) from error
    if not isinstance(values, dict):
        raise Faulty(NOT_JSON, f"but {type(values).__name__}")
    return values


def _check_text(text: str) -> None:
    if not text or text.isspace():
        raise Faulty(NO_TEXT, "only white space" if text else "empty")
    if found := UNWANTED.search(text):
        character = found[0]
        sort = SEPARATOR if character in SEPARATORS else NOT_UTF8 if character >= "\ud800" else CONTROL
        raise Faulty(sort, f"U+{ord(character):04X} at character {found.start() + 1}")


def _side_by_side(paths: Sequence[str], *, longest: int) -> Iterator[tuple[bytes, ...]]:
    """Line n of each file together; raises InputError if one has fewer than another."""
    sides = [lines(path, longest=longest) for path in paths]
    for number, together in enumerate(itertools.zip_longest(*sides)):
        if None in together:
            rest = zip(paths, together, sides, strict=True)
            counts = [(path, number + (line is not None) + sum(1 for _ in side)) for path, line, side in rest]
            raise InputError(
                f"{' and '.join(f'{path} has {count:,}' for path, count in counts)} lines: which of them belong "
                "together is not known; give files that are aligned line by line."
            )
        yield together


def lines(path: str, *, longest: int) -> Iterator[bytes]:
    """The lines of a file without their ends; of one of more than `longest` bytes only a beginning of more.

    Raises:
      InputError: the file cannot be read to its end.
    """
    limit, number = longest + len(codecs.BOM_UTF8 + b"\r\n") + 1, 0
    try:
        with open_bytes(path) as file:
            while line := file.readline(limit):
                end = line
                while end and not end.endswith(b"\n"):
                    end = file.readline(CHUNK)
                if number == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
                number += 1
    except UNREADABLE as error:
        raise InputError(
            f"{path}, after line {number:,}: cannot be read ({why_unreadable(error)}); put a whole file there."
        ) from error


@dataclasses.dataclass
class Found:
    """What a look at all examples of a corpus found.

    Attributes:
      shards: how many of those without a fault go into each file of the dataset.
      faults: how many there are of each sort.
      first: the first NAMED of each sort.
    """

    examples: int = 0
    shards: list[int] = dataclasses.field(default_factory=list)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, list[Fault]] = dataclasses.field(default_factory=dict)
    room: int = 0  # characters that the last shard may still take

    @property
    def faulty(self) -> int:
        """Examples with a fault."""
        return self.examples - sum(self.shards)

    def add(self, example: Example) -> None:
        """Counts one more."""
        self.examples += 1
        for fault in example.faults:
            self.faults[fault.sort] += 1
            if self.faults[fault.sort] <= NAMED:
                self.first.setdefault(fault.sort, []).append(fault)
        if example.texts is not None:
            if self.room <= 0:
                self.shards.append(0)
                self.room = SHARD_CHARACTERS
            self.shards[-1] += 1
            self.room -= sum(map(len, example.texts))

    def counts(self) -> str:
        """'13 of 1,300 examples have a fault: 9 not UTF-8, 5 no text'."""
        sorts = ", ".join(f"{self.faults[sort]:,} {sort}" for sort in SORTS if self.faults[sort])
        return f"{self.faulty:,} of {self.examples:,} examples have a fault{sorts and ': '}{sorts}"

    def where(self) -> str:
        """'not UTF-8 at train.en:3 (byte 0xe9 at byte 5), ..., train.en:29,41,42, 7 elsewhere; no text at ...'."""
        told = []
        for sort in filter(self.first.get, SORTS):
            first, lines = self.first[sort], {}
            for fault in first[SHOWN:]:
                path, line = fault.where.rsplit(":", 1)
                lines.setdefault(path, []).append(line)
            places = [f"{fault.where} ({fault.what})" for fault in first[:SHOWN]]
            places += [f"{path}:{','.join(numbers)}" for path, numbers in lines.items()]
            more = f", {self.faults[sort] - NAMED:,} elsewhere" if self.faults[sort] > NAMED else ""
            told.append(f"{sort} at {', '.join(places)}{more}")
        return "; ".join(told)


def check(corpora: Mapping[str, Corpus], listing: TextIO | None) -> dict[str, Found]:
    """Reads all of every split once, and says what is in each.

    Args:
      listing: takes a line for each fault, and counts at its end; None: faults are refused.

    Raises:
      InputError: there is a fault and no listing, or what is refused in any case.
    """
    found = {split: Found() for split in corpora}
    for split, corpus in corpora.items():
        for example in corpus:
            found[split].add(example)
            if listing is not None:
                listing.writelines("\t".join((fault.where, fault.sort, fault.what)) + "\n" for fault in example.faults)
    if listing is not None:
        listing.writelines(f"{split}: {counted.counts()}\n" for split, counted in found.items())
    elif any(counted.faulty for counted in found.values()):
        told = [f"{split}: {counted.counts()}. They are: {counted.where()}" for split, counted in found.items()]
        raise InputError(
            f"{'. '.join(text for text, counted in zip(told, found.values(), strict=True) if counted.faulty)}. "
            "Mend them, or list all of them and leave these examples out with data.faults=drop."
        )
    for split, counted in found.items():
        if not counted.shards:
            raise InputError(f"{corpora[split].rows[0][0]}: no example for the {split} split, {counted.counts()}.")
    return found
