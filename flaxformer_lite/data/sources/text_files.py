"""Custom text files, read and checked line by line, so a corpus need not fit into memory.

Files may be compressed, see `system.compressed`. Only LF ends a line. There are three cases:

    cleaned     silently: CRLF becomes LF, a byte order mark at the start of a line is removed (cat
                leaves those of its files), the last line may lack its LF, white space around a
                label is stripped.
    malformed   a line with a fault, one of SORTS. `data.faults` chooses between an error and
                dropping the example. A line has at most one fault, the first in the order of SORTS;
                an example of two files can have one in each.
    refused     always: a missing or unreadable file, truncated or damaged gzip, files of a pair
                with different numbers of lines, a split with no example left.
"""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from flaxformer_lite.data.sources import tables
from flaxformer_lite.scores.word_links import ALIGNMENT, fault_of
from flaxformer_lite.system.compressed import (
    CONVERT,
    UNREADABLE,
    UTF16,
    open_bytes,
    why_unreadable,
)
from flaxformer_lite.system.errors import InputError

LINE_SORTS = (
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
TOO_LONG, NOT_UTF8, COLUMNS, NOT_JSON, NO_KEY, NO_TEXT, CONTROL, SEPARATOR, UNKNOWN = LINE_SORTS
SORTS = (*LINE_SORTS, ALIGNMENT)
# Characters that no text may contain: control characters except the tab; the line separators of
# `str.splitlines`; and surrogates, which JSON can escape but UTF-8 cannot encode.
UNWANTED = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
SEPARATORS = "\n\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029"
LABEL = "label"
CHUNK = 1 << 20  # bytes in one read
SHARD_CHARACTERS = 1 << 26  # approximate characters of text in one file of the dataset
# For each split and sort, a message explains the first SHOWN faults and locates the first NAMED.
SHOWN, NAMED = 3, 100


class Fault(NamedTuple):
    """The reason why a line is malformed."""

    sort: str  # one of SORTS
    where: str  # 'train.en:17'
    what: str


class Example(NamedTuple):
    """The texts of one example; None, and the faults, if a line of it is malformed."""

    texts: tuple[str, ...] | None
    faults: Sequence[Fault] = ()


class MalformedLine(Exception):
    """Raised with (sort, detail) for a malformed line; never leaves the package's data sources."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The files of one split; iterating over it yields the examples.

    Attributes:
      rows: files in order: each row has one file, or two files that are aligned line by line.
      form: 'lines', one text a line; 'tsv' and 'csv', the texts of an example separated by tabs or
        commas; 'jsonl', JSON objects with the fields as keys.
      fields: the names of the texts of an example; LABEL is the class.
      longest_line: the limit in bytes, without the line end.
      labels: the names of all classes, in order; None: every label is valid.
      header: of a table, whether the first line of a file names its columns.
      quoted: of a table, whether fields may be quoted (RFC 4180).
      columns: the names of the fields in the header; empty: those of the fields.
    """

    rows: tuple[tuple[str, ...], ...]
    form: str
    fields: tuple[str, ...]
    longest_line: int
    labels: tuple[str, ...] | None = None
    header: bool = False
    quoted: bool = False
    columns: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Example]:
        """Yields all examples in order, malformed ones too.

        Raises:
          InputError: a file cannot be read, the files of a row differ in their number of lines, or
            a header lacks a column.
        """
        of_row = self._of_table if self.form in tables.DELIMITERS else self._of_lines
        return itertools.chain.from_iterable(map(of_row, self.rows))

    def _of_lines(self, paths: Sequence[str]) -> Iterator[Example]:
        """Yields the examples of aligned files. Each file has some of the fields."""
        per_file = 1 if self.form == "lines" else len(self.fields)
        aligned = _aligned_lines(paths, longest=self.longest_line)
        for number, lines in enumerate(aligned, start=1):
            texts: list[str] = []
            faults: list[Fault] = []
            for i, (path, line) in enumerate(zip(paths, lines, strict=True)):
                try:
                    texts += self._texts(line, self.fields[i : i + per_file])
                    if self.fields[i] == ALIGNMENT and not faults and (what := fault_of(*texts)):
                        faults.append(Fault(ALIGNMENT, f"{path}:{number}", what))
                except MalformedLine as error:
                    sort, what = error.args
                    faults.append(Fault(sort, f"{path}:{number}", what))
            yield Example(None, faults) if faults else Example(tuple(texts))

    def _of_table(self, paths: Sequence[str]) -> Iterator[Example]:
        """Yields the examples of a file of columns."""
        (path,) = paths
        records = tables.records(
            lines(path, longest=self.longest_line),
            self.form,
            quoted=self.quoted,
            longest=self.longest_line,
        )
        names, wanted = self.fields, self.columns or self.fields
        if self.header:
            names = tables.header(path, next(records, None))
            tables.check_header(path, names, wanted)
        places = [names.index(name) for name in wanted]
        for record in records:
            try:
                columns = self._columns(record, names)
                example = Example(
                    tuple(self._checked([columns[place] for place in places], self.fields))
                )
            except MalformedLine as error:
                sort, what = error.args
                example = Example(None, [Fault(sort, f"{path}:{record.number}", what)])
            yield example

    def _texts(self, line: bytes, fields: Sequence[str]) -> Sequence[str]:
        """Returns the texts of these fields in one line; raises MalformedLine."""
        text = self._decoded(line)
        return self._checked([text] if self.form == "lines" else _values(text, fields), fields)

    def _columns(self, record: tables.Record, names: Sequence[str]) -> Sequence[str]:
        """Returns the columns of a record; raises MalformedLine."""
        self._decoded(record.line)
        if isinstance(record.columns, str):
            if b"\r" in record.line:  # Python's reader takes it for the end of a line
                raise MalformedLine(SEPARATOR, "U+000D")
            raise MalformedLine(COLUMNS, record.columns)
        if len(record.columns) != len(names):
            detail = f"{len(record.columns)}, expected {len(names)}: {', '.join(names)}"
            raise MalformedLine(COLUMNS, detail)
        return record.columns

    def _decoded(self, line: bytes) -> str:
        if len(line) > self.longest_line:
            raise MalformedLine(TOO_LONG, f"over {self.longest_line:,} bytes")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            detail = f"byte 0x{line[error.start]:02x} at byte {error.start + 1}"
            raise MalformedLine(NOT_UTF8, detail) from error

    def _checked(self, texts: Sequence[str], fields: Sequence[str]) -> Sequence[str]:
        """Returns the texts, labels without white space around them; raises MalformedLine."""
        named = list(zip(fields, texts, strict=True))
        texts = [text.strip() if field == LABEL else text for field, text in named]
        for field, text in zip(fields, texts, strict=True):
            if field != ALIGNMENT:  # which may be empty
                _check_text(text)
            if field == LABEL and self.numbers is not None and text not in self.numbers:
                raise MalformedLine(UNKNOWN, repr(text[:40]))
        return texts

    @functools.cached_property
    def numbers(self) -> dict[str, int] | None:
        """The number of each class; None if every label is valid."""
        if self.labels is None:
            return None
        return {label: number for number, label in enumerate(self.labels)}


def _values(text: str, fields: Sequence[str]) -> Sequence[str]:
    values = json_object(text)
    for field in fields:
        if field not in values:
            raise MalformedLine(NO_KEY, f"{field!r}")
        if field == LABEL and type(values[field]) is int:
            values[field] = str(values[field])
        if not isinstance(values[field], str):
            detail = f"{field!r} with a text, it has {json.dumps(values[field])[:20]}"
            raise MalformedLine(NO_KEY, detail)
    return [values[field] for field in fields]


def json_object(text: str) -> dict[str, Any]:
    """Returns the JSON object of a line; raises MalformedLine.

    The texts of Hugging Face's translations, {"translation": {"en": ..., "de": ...}}, are one level
    below.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedLine(NOT_JSON, str(error)) from error
    if not isinstance(values, dict):
        raise MalformedLine(NOT_JSON, f"but {type(values).__name__}")
    nested = values.get("translation")
    return nested if isinstance(nested, dict) else values


def keys(path: str, form: str, *, quoted: bool) -> tuple[str, ...]:
    """Returns the names in the first line of a table, or of JSON Lines: empty if it is malformed.

    Raises:
      InputError: the file cannot be read, or it is a table and the line does not name its columns.
    """
    with contextlib.closing(lines(path, longest=1 << 20)) as of_file:
        if form in tables.DELIMITERS:
            return tables.header(path, next(tables.records(of_file, form, quoted=quoted), None))
        try:
            return tuple(json_object(next(of_file, b"").decode()))
        except (MalformedLine, UnicodeDecodeError):
            return ()


def _check_text(text: str) -> None:
    if not text or text.isspace():
        raise MalformedLine(NO_TEXT, "only white space" if text else "empty")
    if found := UNWANTED.search(text):
        character = found[0]
        sort = (
            SEPARATOR if character in SEPARATORS else NOT_UTF8 if character >= "\ud800" else CONTROL
        )
        raise MalformedLine(sort, f"U+{ord(character):04X} at character {found.start() + 1}")


def _aligned_lines(paths: Sequence[str], *, longest: int) -> Iterator[tuple[bytes, ...]]:
    """Yields line n of each file together; raises InputError if the numbers of lines differ."""
    sides = [lines(path, longest=longest) for path in paths]
    for number, together in enumerate(itertools.zip_longest(*sides)):
        if None in together:
            rest = zip(paths, together, sides, strict=True)
            counts = [
                (path, number + (line is not None) + sum(1 for _ in side))
                for path, line, side in rest
            ]
            listed = " and ".join(f"{path} has {count:,}" for path, count in counts)
            raise InputError(
                f"{listed} lines: expected the same number in both; use files that are aligned "
                "line by line."
            )
        yield together


def lines(path: str, *, longest: int) -> Generator[bytes, None, None]:
    """Yields the lines of a file without their ends.

    A line over `longest` bytes is truncated to a prefix that is still over `longest` bytes.

    Raises:
      InputError: the file cannot be read to its end.
    """
    limit, number = longest + len(codecs.BOM_UTF8 + b"\r\n") + 1, 0
    try:
        with open_bytes(path) as file:
            while line := file.readline(limit):
                if number == 0 and line.startswith(UTF16):
                    raise InputError(f"{path}: expected UTF-8, got UTF-16; {CONVERT}.")
                end = line
                while end and not end.endswith(b"\n"):
                    end = file.readline(CHUNK)
                line = line.removeprefix(codecs.BOM_UTF8)
                yield line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")
                number += 1
    except UNREADABLE as error:
        raise InputError(
            f"{path}, after line {number:,}: cannot be read ({why_unreadable(error)}); replace it "
            "with a complete file."
        ) from error


@dataclasses.dataclass
class CorpusCounts:
    """Counts of the examples of a corpus.

    Attributes:
      examples: the number of all examples.
      shards: the number of well-formed examples in each file of the dataset.
      faults: the number of faults of each sort.
      first: the first NAMED faults of each sort.
    """

    examples: int = 0
    shards: list[int] = dataclasses.field(default_factory=list)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, list[Fault]] = dataclasses.field(default_factory=dict)
    _free: int = 0  # characters that the last shard can still take

    @property
    def faulty(self) -> int:
        """The number of malformed examples."""
        return self.examples - sum(self.shards)

    def add(self, example: Example) -> None:
        """Counts one more example."""
        self.examples += 1
        for fault in example.faults:
            self.faults[fault.sort] += 1
            if self.faults[fault.sort] <= NAMED:
                self.first.setdefault(fault.sort, []).append(fault)
        if example.texts is not None:
            if self._free <= 0:
                self.shards.append(0)
                self._free = SHARD_CHARACTERS
            self.shards[-1] += 1
            self._free -= sum(map(len, example.texts))

    def counts(self) -> str:
        """Returns '13 of 1,300 examples are malformed: 9 not UTF-8, 5 no text'."""
        sorts = ", ".join(f"{self.faults[sort]:,} {sort}" for sort in SORTS if self.faults[sort])
        return f"{self.faulty:,} of {self.examples:,} examples are malformed{sorts and ': '}{sorts}"

    def where(self) -> str:
        """Returns 'not UTF-8 at train.en:3 (byte 0xe9 at byte 5), train.en:29,41; no text at ...'.

        Of each sort, SHOWN faults have a detail, NAMED a location, and the rest are counted.
        """
        parts = []
        for sort in filter(self.first.get, SORTS):
            first, lines = self.first[sort], dict[str, list[str]]()
            for fault in first[SHOWN:]:
                path, line = fault.where.rsplit(":", 1)
                lines.setdefault(path, []).append(line)
            places = [f"{fault.where} ({fault.what})" for fault in first[:SHOWN]]
            places += [f"{path}:{','.join(numbers)}" for path, numbers in lines.items()]
            more = f", {self.faults[sort] - NAMED:,} elsewhere" if self.faults[sort] > NAMED else ""
            parts.append(f"{sort} at {', '.join(places)}{more}")
        return "; ".join(parts)


def check(corpora: Mapping[str, Corpus], listing: TextIO | None) -> dict[str, CorpusCounts]:
    """Reads every split once and returns its counts.

    Args:
      listing: receives a line for each fault, and the counts at its end; None: a fault is an error.

    Raises:
      InputError: there is a fault and no listing, a file is refused, or no example is left.
    """
    found = {split: CorpusCounts() for split in corpora}
    for split, corpus in corpora.items():
        for example in corpus:
            found[split].add(example)
            if listing is not None:
                listing.writelines(
                    "\t".join((fault.where, fault.sort, fault.what)) + "\n"
                    for fault in example.faults
                )
    if listing is not None:
        listing.writelines(f"{split}: {counted.counts()}\n" for split, counted in found.items())
    elif any(counted.faulty for counted in found.values()):
        listed = ". ".join(
            f"{split}: {counted.counts()}. They are: {counted.where()}"
            for split, counted in found.items()
            if counted.faulty
        )
        raise InputError(
            f"{listed}. Fix these lines, or drop the examples and list them all with "
            "data.faults=drop."
        )
    for split, counted in found.items():
        if not counted.shards:
            raise InputError(
                f"{corpora[split].rows[0][0]}: no example for the {split} split, "
                f"{counted.counts()}."
            )
    return found
