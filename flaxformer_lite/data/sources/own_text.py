"""Custom text: the files that the config's paths match, and a fingerprint of their contents."""

import collections
import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxformer_lite.data.sources import tables, text_files, whole_texts
from flaxformer_lite.data.sources.tables import DELIMITERS
from flaxformer_lite.data.sources.text_files import LABEL, Corpus
from flaxformer_lite.scores.word_links import ALIGNMENT
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import expanded

# For each kind of dataset, the allowed forms of (a pair of files, one file).
FORMS = {
    "parallel_text": (("lines",), ("tsv", "csv", "jsonl")),
    "plain_text": ((), ("lines", "csv", "jsonl")),
    "labelled_text": ((), ("tsv", "csv", "jsonl")),
}
TEXT = "text"  # the default name of a text
SIDES = ("source", "target")  # the default names of the two sides of a translation
NAME = re.compile(r"[\w.@-]+")
TAKEN = (LABEL, "kind")  # reserved names of features
FORMAT = 2  # raise it with every change that alters the dataset made from the same files
SETTLED = 2.0  # seconds without a change, after which any later change alters a file's times


@dataclasses.dataclass(frozen=True)
class OwnText:
    """The files of a dataset, as named in the config.

    Attributes:
      kind: a key of FORMS.
      files: for each split, the two paths of a pair, or one path; each may be a glob.
      names: the two sides of a translation, or the texts to read; empty: derived from the files.
      labels: the names of all classes; None: the labels of the training split.
      longest_line: as `data.longest_line`.
      faults: as `data.faults`.
      header, quoted, whole_files: as in `data`.
      alignments: for some splits, a path, which may be a glob, of the pairs' word alignments.
      beside: a folder, usually the workdir of the run; files that are not where they are named are
        looked for below its parents.
    """

    kind: str
    files: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    longest_line: int
    faults: str
    beside: Path | None = None
    header: bool | None = None
    quoted: bool | None = None
    whole_files: bool = False
    alignments: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


class MissingFile(InputError):
    """There is no file where the config names one."""


def corpora(own: OwnText) -> dict[str, Corpus]:
    """Returns the files of each split with the names of their texts, without reading the labels.

    Raises:
      InputError: a file is missing, the sides have different numbers of files, or the files do not
        match the kind.
    """
    found: dict[str, Corpus] = {}
    for split, patterns in own.files.items():
        field = f"config.data.{split}_files"
        if not 1 <= len(patterns) <= (2 if FORMS[own.kind][0] else 1):
            wanted = "a pair of paths, or one" if FORMS[own.kind][0] else "one path"
            raise InputError(
                f"{field}: {own.kind} takes {wanted}, which may be globs; got {patterns}."
            )
        of_words = own.alignments.get(split, ())
        rows = _paired_files(field, (*patterns, *of_words), own.beside)
        pairs = tuple(row[:2] for row in rows)
        if own.whole_files and own.kind == "plain_text":
            names = own.names or (TEXT,)
            found[split] = whole_texts.WholeFiles(rows, whole_texts.FORM, names, own.longest_line)
            continue
        allowed = FORMS[own.kind][2 - len(patterns)]
        corpus = _corpus(own, pairs, _form(field, pairs, allowed, quoted=own.quoted))
        if of_words:
            corpus = dataclasses.replace(corpus, rows=rows, fields=(*corpus.fields, ALIGNMENT))
        found[split] = corpus
    if own.kind == "parallel_text":
        _check_same_languages(found)
    _warn(own, found)
    return found


def _warn(own: OwnText, found: Mapping[str, Corpus]) -> None:
    """Warns once of a header, and once of quotes, that the config does not declare."""
    notices: dict[str, str] = {}
    for corpus in found.values():
        if corpus.form in DELIMITERS and None in (own.header, own.quoted):
            path, pair = corpus.rows[0][0], own.kind == "parallel_text"
            with contextlib.closing(text_files.lines(path, longest=own.longest_line)) as lines:
                head = list(itertools.islice(lines, tables.LOOKED_AT))
            notices = tables.notices(path, head, corpus.form, own.names, languages=pair) | notices
    for field, notice in notices.items():
        if getattr(own, field) is None:
            logging.warning("config.data.%s: %s", field, notice)


def _corpus(own: OwnText, rows: tuple[tuple[str, ...], ...], form: str) -> Corpus:
    """Returns the files of a split."""
    header, quoted = (
        form in DELIMITERS and (form == "csv" if given is None else given)
        for given in (own.header, own.quoted)
    )
    has_keys = header or form == "jsonl"
    keys = text_files.keys(rows[0][0], form, quoted=quoted) if has_keys else None
    fields = _fields(own, rows, form, keys)
    # two columns may have other names than the two languages, as the suffixes of files may
    columns = keys if header and own.kind == "parallel_text" and keys else ()
    if len(columns) != 2 or {*columns} & {*fields}:
        columns = ()
    return Corpus(rows, form, fields, own.longest_line, None, header, quoted, columns)


def _paired_files(
    field: str, patterns: Sequence[str], beside: Path | None
) -> tuple[tuple[str, ...], ...]:
    """Returns rows of corresponding files, one from each pattern, in order."""
    fields = (field, field, field.replace("files", "alignments"))
    sides = [_expanded(name, path, beside) for name, path in zip(fields, patterns, strict=False)]
    if len({len(side) for side in sides}) > 1:
        counts = " and ".join(
            f"{pattern} has {len(side)}" for pattern, side in zip(patterns, sides, strict=True)
        )
        raise InputError(f"{field}: expected the same number of files on both sides, {counts}.")
    if len(sides) == 1:
        return tuple((path,) for path in sides[0])
    by_key = [dict(zip(_distinct_words(side), side, strict=True)) for side in sides]
    for key, path in by_key[0].items():
        if any(key not in files for files in by_key):
            raise InputError(
                f"{field}: expected the same file names on both sides, except for a common prefix "
                f"or suffix of each side; {path} has no counterpart; rename the files, or add the "
                "missing one."
            )
    return tuple(tuple(files[key] for files in by_key) for key in by_key[0])


def _distinct_words(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the words of each path without the common prefix and suffix of all paths.

    A punctuation mark is a word; `.gz` and the like are ignored. 'en/a.1.txt' and 'en/b.1.txt'
    become ('a',) and ('b',).
    """
    rows = [re.findall(r"[^\W_]+|[\W_]", without_suffix(path)) for path in paths]
    for _ in ("prefix", "suffix"):  # each pass reverses the words
        shared = list(
            itertools.takewhile(lambda words: len(set(words)) == 1, zip(*rows, strict=False))
        )
        rows = [row[len(shared) :][::-1] for row in rows]
    return [tuple(row) for row in rows]


def _expanded(field: str, pattern: str, beside: Path | None) -> list[str]:
    """Returns the files of a pattern, where it says or near the folder `beside`."""
    found = next(filter(None, map(matches, _candidates(pattern, beside))), [])
    if not found:
        raise MissingFile(
            f"{field}: there is no file {pattern!r} (relative to {os.getcwd()}); check the path, "
            f"or name its new path with --{field}."
        )
    unpacked: dict[str, str] = {}
    for file in sorted(found):
        if (other := unpacked.setdefault(without_suffix(file), file)) != file:
            raise InputError(
                f"{field}: {pattern!r} matches both {other} and {file}; remove one, or name the "
                "other."
            )
    return found


def matches(path: Path) -> list[str]:
    """Returns the files that a path or a glob names, sorted."""
    if path.is_file():
        return [str(path)]
    return sorted(filter(os.path.isfile, glob.glob(str(path), recursive=True)))


def _candidates(pattern: str, beside: Path | None) -> Iterator[Path]:
    """Yields the path that is named, then, below each parent of `beside`, the ends of the path.

    A run and its corpus may have moved together. The longest ends are first.
    """
    named = expanded(pattern)
    yield named
    parts = named.parts[1:] if named.is_absolute() else named.parts
    for first in range(len(parts)):
        for folder in () if beside is None else (beside, *beside.parents):
            yield folder.joinpath(*parts[first:])


def _form(
    field: str, rows: Sequence[Sequence[str]], allowed: Sequence[str], *, quoted: bool | None
) -> str:
    """Returns the form of the files by their suffixes; a .csv without quotes is plain lines."""
    suffixes = {_suffix(path): path for paths in rows for path in paths}
    known = ("tsv", "jsonl") if quoted is False else ("tsv", "csv", "jsonl")
    # .TSV and .JSONL may be lines where these are allowed, as they always were
    exact = ("tsv", "jsonl") if "lines" in allowed else ()
    names = {suffix if suffix.lower() in exact else suffix.lower() for suffix in suffixes}
    forms = {name if name in known else "lines" for name in names}
    if len(forms) > 1 or not forms <= set(allowed):
        words = {
            "lines": "plain lines (any other name)",
            "tsv": "columns (.tsv)",
            "csv": "a table (.csv)",
            "jsonl": "JSON Lines (.jsonl)",
        }
        what = "a pair of files" if len(rows[0]) == 2 else "one file or glob"
        raise InputError(
            f"{field}: expected {' or '.join(words[form] for form in allowed)} for {what}, all in "
            f"one form, got {', '.join(suffixes.values())}; .gz and the like may follow."
        )
    return forms.pop()


def _suffix(path: str) -> str:
    """Returns 'en' for 'a/train.en.gz'; '' for a name without a suffix."""
    return Path(without_suffix(path)).suffix[1:]


def _fields(
    own: OwnText, rows: Sequence[Sequence[str]], form: str, keys: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Returns the names of the texts of an example, in the order of the files or columns.

    `keys`: those of JSON Lines or of a header; None: nothing in the files names the texts.
    """
    if own.kind == "parallel_text":
        return _sides(own, rows, form, keys)
    names = own.names or (TEXT,)
    if len(names) > 1 and keys is None:
        raise InputError(
            f"config.data.text_features: {rows[0][0]} has one text a line; leave it unset."
        )
    _check_names("text_features", names)
    return (LABEL, *names) if own.kind == "labelled_text" else names


def _sides(
    own: OwnText, rows: Sequence[Sequence[str]], form: str, keys: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Returns the names of source and target: from the config, else from the files, else SIDES."""
    suffixes = {tuple(map(_suffix, paths)) for paths in rows}
    of_files = suffixes.pop() if form == "lines" and len(suffixes) == 1 else ()
    found = of_files if keys is None else keys
    same_names = sorted(found) == sorted(own.names)
    if form == "lines" and not same_names:
        _check_order(own.names, rows[0])
    names = found if not own.names or same_names else own.names
    is_table = form in DELIMITERS
    if keys is not None and not (
        len(names) == len(set(names)) == 2
        and all(NAME.fullmatch(name) if is_table else name for name in names)
    ):
        raise InputError(
            f"the first line of {rows[0][0]} has the {'columns' if is_table else 'keys'} "
            f"{', '.join(found) or 'none'}; name the two to translate between"
            f"{', or set data.header=False if it is an example' if is_table else ''}.",
            where="config.data.languages",
        )
    names = names if len(set(names)) == 2 and all(names) else SIDES
    _check_names("languages", names)
    return names


def _check_order(names: Sequence[str], paths: Sequence[str]) -> None:
    """Raises InputError if the languages are in another order than the files with their suffix."""
    for name, path in zip(names, paths, strict=False):
        if _suffix(path) in names and _suffix(path) != name:
            raise InputError(
                f"{', '.join(names)} would read {path} as {name!r}; name them in the order of "
                "the files.",
                where="config.data.languages",
            )


def _check_names(field: str, names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or name in TAKEN:
            raise InputError(
                f"{name!r} cannot be the name of a text; use letters and digits.",
                where=f"config.data.{field}",
            )


def _check_same_languages(found: Mapping[str, Corpus]) -> None:
    if len({frozenset(corpus.fields) - {ALIGNMENT} for corpus in found.values()}) > 1:
        listed = ", ".join(
            f"{split}_files have {' and '.join(corpus.fields)}" for split, corpus in found.items()
        )
        raise InputError(
            f"{listed}; name the two sides, such as ('en', 'de').", where="config.data.languages"
        )


def digests(found: Mapping[str, Corpus], record: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file, by its path.

    Args:
      record: a cache file of digests, each with the `identity` of its file; it may be missing or
        unwritable.

    Raises:
      InputError: a file cannot be read, or changes while it is read.
    """
    cached = _read_record(record)
    before, result = dict(cached), {}
    for path in (path for corpus in found.values() for paths in corpus.rows for path in paths):
        name = os.path.abspath(path)
        try:
            identity, now = _identity(path), time.time()
            trusted = name in cached and cached[name][0] == identity
            result[path] = cached[name][1] if trusted else file_digest(path)
            if _identity(path) != identity:
                raise InputError(f"{path}: it changes while it is read; wait until it is complete.")
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
        if max(identity[3:]) / 1e9 < now - SETTLED:  # a later change has other times
            cached[name] = [identity, result[path]]
    if cached != before:
        with contextlib.suppress(OSError):
            partial = record.with_name(f"{record.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(cached), encoding="utf-8")
            partial.replace(record)
    return result


def _read_record(record: Path) -> dict[str, list[Any]]:
    """Returns the cached digests; empty if the file is missing or malformed."""
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        return {path: [identity, digest] for path, (identity, digest) in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _identity(path: str) -> list[int]:
    """Returns numbers that change with every write: no program can set the last one, the ctime."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def file_digest(path: str) -> str:
    """Returns the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed(then: Mapping[str, str], now: Mapping[str, str], *, some: bool = False) -> list[str]:
    """Returns the paths of files that differ in their contents; a file may have another path.

    Args:
      then, now: the SHA-256 of each file by its path.
      some: whether `now` may have some of the files only.
    """
    if list(then.values()) == list(now.values()):
        return []
    of_other, gone = _only_in(now, then), _only_in(then, now)
    names = {os.path.basename(path) for path in of_other}
    missing = [] if some else [path for path in gone if os.path.basename(path) not in names]
    reordered = [] if of_other or gone or some else list(now)
    return sorted({*of_other, *missing, *reordered})


def _only_in(files: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Returns the paths of the files that have no counterpart of the same contents in `others`."""
    moved = [path for path, digest in files.items() if others.get(path) != digest]
    left = collections.Counter(
        digest for path, digest in others.items() if files.get(path) != digest
    )
    left.subtract(files[path] for path in moved)
    return [path for path in moved if left[files[path]] < 0]
