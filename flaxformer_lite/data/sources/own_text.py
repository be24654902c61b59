"""From the paths in the config to the text files that they mean, and to a fingerprint of what is in them."""

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxformer_lite.data.sources import text_files
from flaxformer_lite.data.sources.text_files import LABEL, Corpus
from flaxformer_lite.system.errors import InputError

# Each kind of dataset with the forms of its files: (of a pair of files, of one file).
FORMS = {
    "parallel_text": (("lines",), ("tsv", "jsonl")),
    "plain_text": ((), ("lines", "jsonl")),
    "labelled_text": ((), ("tsv", "jsonl")),
}
TEXT = "text"  # what a text is called where nothing else is said
SIDES = ("source", "target")  # and the two sides of a translation
NAME = re.compile(r"[\w.@-]+")
TAKEN = (LABEL, "kind")  # features that mean something else
FORMAT = 2  # raise it with every change that alters what the same files become
MOST_LABELS = 10_000  # more than that are no labels
SETTLED = 2.0  # seconds without a change after which a file's times give every later one away


@dataclasses.dataclass(frozen=True)
class OwnText:
    """The files that a dataset consists of, as the config names them.

    Attributes:
      kind: one of FORMS.
      files: of each split, the two paths of a pair, or one; each may be a glob.
      names: of the two sides of a translation, else of the texts to read; empty: what the files tell.
      labels: the names of all classes; None: those of the training split.
      longest_line: as `data.longest_line`.
      faults: as `data.faults`.
    """

    kind: str
    files: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]
    labels: tuple[str, ...] | None
    longest_line: int
    faults: str


def corpora(own: OwnText) -> dict[str, Corpus]:
    """The files of each split, and the names of what is in them; labels are not looked for.

    Raises:
      InputError: a file is not there, there are more on one side than on the other, or they do not suit the kind.
    """
    found = {}
    for split, patterns in own.files.items():
        field = f"config.data.{split}_files"
        if not 1 <= len(patterns) <= (2 if FORMS[own.kind][0] else 1):
            wanted = "a pair of paths, or one" if FORMS[own.kind][0] else "one path"
            raise InputError(f"{field}: {own.kind} takes {wanted}, which may be globs; got {patterns}.")
        rows = _side_by_side(field, patterns)
        form = _form(field, rows, FORMS[own.kind][2 - len(rows[0])])
        found[split] = Corpus(rows, form, _fields(own, rows, form), own.longest_line)
    if own.kind == "parallel_text":
        _check_same_languages(found)
    return found


def _side_by_side(field: str, patterns: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The files that belong together, one of each pattern, in their order."""
    sides = [_expanded(field, pattern) for pattern in patterns]
    if len({len(side) for side in sides}) > 1:
        counts = " and ".join(f"{pattern} has {len(side)}" for pattern, side in zip(patterns, sides, strict=True))
        raise InputError(f"{field}: expected as many files on both sides, {counts}.")
    if len(sides) == 1:
        return tuple((path,) for path in sides[0])
    of_words = [dict(zip(_own_words(side), side, strict=True)) for side in sides]
    for words, path in of_words[0].items():
        if any(words not in others for others in of_words):
            raise InputError(
                f"{field}: expected files named alike on both sides, but for words that all of a side share at the "
                f"start or the end, and {path} has not one of the same name; rename them, or add what is missing."
            )
    return tuple(tuple(others[words] for others in of_words) for words in of_words[0])


def _own_words(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """What tells each file of a side from the others: its words, but for those that all have at the start or the end.

    A sign counts as a word, and `.gz` as none. So 'en/a.1.txt' and 'en/b.1.txt' have ('a',) and ('b',).
    """
    rows = [re.findall(r"[^\W_]+|[\W_]", path.removesuffix(".gz")) for path in paths]
    for _ in ("start", "end"):  # all are turned around in between, and back
        shared = list(itertools.takewhile(lambda words: len(set(words)) == 1, zip(*rows, strict=False)))
        rows = [row[len(shared) :][::-1] for row in rows]
    return [tuple(row) for row in rows]


def _expanded(field: str, pattern: str) -> list[str]:
    path = os.path.expanduser(pattern)
    found = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not found:
        raise InputError(f"{field}: there is no file {pattern!r}, seen from {os.getcwd()}; check the path.")
    twice = sorted(set(found) & {file.removesuffix(".gz") for file in found if file.endswith(".gz")})
    if twice:
        raise InputError(
            f"{field}: {pattern!r} means both {twice[0]} and {twice[0]}.gz; remove one, or name the other."
        )
    return found


def _form(field: str, rows: Sequence[Sequence[str]], allowed: Sequence[str]) -> str:
    """How the files are written, by their names."""
    suffixes = {_suffix(path): path for paths in rows for path in paths}
    forms = {suffix if suffix in ("tsv", "jsonl") else "lines" for suffix in suffixes}
    if len(forms) > 1 or not forms <= set(allowed):
        words = {"lines": "plain lines (any other name)", "tsv": "columns (.tsv)", "jsonl": "JSON Lines (.jsonl)"}
        what = "a pair of files" if len(rows[0]) == 2 else "one file or glob"
        raise InputError(
            f"{field}: expected {' or '.join(words[form] for form in allowed)} for {what}, all alike, got "
            f"{', '.join(suffixes.values())}; .gz may follow."
        )
    return forms.pop()


def _suffix(path: str) -> str:
    """'en' for 'a/train.en.gz'; '' where there is none."""
    return Path(path.removesuffix(".gz")).suffix[1:]


def _fields(own: OwnText, rows: Sequence[Sequence[str]], form: str) -> tuple[str, ...]:
    """The names of the texts of an example, in the order of the files or columns."""
    if own.kind == "parallel_text":
        return _sides(own, rows, form)
    names = own.names or (TEXT,)
    if len(names) > 1 and form != "jsonl":
        raise InputError(f"config.data.text_features: {rows[0][0]} has one text a line; leave it unset.")
    _check_names("text_features", names)
    return (LABEL, *names) if own.kind == "labelled_text" else names


def _sides(own: OwnText, rows: Sequence[Sequence[str]], form: str) -> tuple[str, ...]:
    """The names of source and target: those of the config, else those that the files have, else `SIDES`."""
    found = _names_in_files(rows, form)
    same_names = set(found) == set(own.names)
    if form == "lines" and not same_names:
        _check_order(own.names, rows[0])
    names = found if not own.names or same_names else own.names
    if form == "jsonl" and len(names) != 2:
        raise InputError(
            f"the first line of {rows[0][0]} has the keys {', '.join(found) or 'none'}; name the "
            "two to translate between.",
            where="config.data.languages",
        )
    names = names if len(set(names)) == 2 and all(names) else SIDES
    _check_names("languages", names)
    return names


def _names_in_files(rows: Sequence[Sequence[str]], form: str) -> tuple[str, ...]:
    """The keys of JSON Lines, or the endings of pairs of files if all pairs have the same; else nothing."""
    if form == "jsonl":
        return _keys(rows[0][0])
    endings = {tuple(map(_suffix, paths)) for paths in rows}
    return endings.pop() if form == "lines" and len(endings) == 1 else ()


def _check_order(names: Sequence[str], paths: Sequence[str]) -> None:
    """Refuses names of languages in another order than the files that end in them."""
    for name, path in zip(names, paths, strict=False):
        if _suffix(path) in names and _suffix(path) != name:
            raise InputError(
                f"{', '.join(names)} would take {path} for {name!r}; name them in the order of the files.",
                where="config.data.languages",
            )


def _keys(path: str) -> tuple[str, ...]:
    """The keys of the first line of JSON Lines; empty if it is none, which a reader will say."""
    with contextlib.closing(text_files.lines(path, longest=1 << 20)) as lines:
        try:
            return tuple(text_files.json_object(next(lines, b"").decode()))
        except (text_files.Faulty, UnicodeDecodeError):
            return ()


def _check_names(field: str, names: Sequence[str]) -> None:
    for name in names:
        if not NAME.fullmatch(name) or name in TAKEN:
            raise InputError(f"config.data.{field}: {name!r} cannot be the name of a text; use letters and digits.")


def _check_same_languages(found: Mapping[str, Corpus]) -> None:
    if len({frozenset(corpus.fields) for corpus in found.values()}) > 1:
        listed = ", ".join(f"{split}_files have {' and '.join(corpus.fields)}" for split, corpus in found.items())
        raise InputError(f"{listed}; name the two sides, as ('en', 'de') does.", where="config.data.languages")


def label_names(found: Mapping[str, Corpus]) -> tuple[str, ...]:
    """The labels of the training split, sorted.

    Raises:
      InputError: there is no such split, or it has less than two, or so many that they must be something else.
    """
    if "train" not in found:
        raise InputError("config.data.train_files: they name the labels of labelled_text, and there are none.")
    labels, faults, path = set(), [], found["train"].rows[0][0]
    for example in found["train"]:
        if example.texts is not None:
            labels.add(example.texts[found["train"].fields.index(LABEL)])
        elif not faults:
            faults += example.faults
        if len(labels) > MOST_LABELS:
            raise InputError(f"{path}: over {MOST_LABELS:,} different labels; expected the label first, then the text.")
    if len(labels) < 2:
        first = [f"; the first fault is {fault.sort} at {fault.where} ({fault.what})" for fault in faults]
        raise InputError(f"{path}: expected two labels or more, got {', '.join(labels) or 'none'}{''.join(first)}.")
    return tuple(sorted(labels))


def digests(found: Mapping[str, Corpus], record: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path.

    Args:
      record: keeps them between runs, each with what tells that its file has not changed since; it may be missing, or
        impossible to write.

    Raises:
      InputError: a file cannot be read, or changes meanwhile.
    """
    known = _read_record(record)
    before, result = dict(known), {}
    for path in (path for corpus in found.values() for paths in corpus.rows for path in paths):
        name = os.path.abspath(path)
        try:
            identity, now = _identity(path), time.time()
            trusted = name in known and known[name][0] == identity
            result[path] = known[name][1] if trusted else _digest(path)
            if _identity(path) != identity:
                raise InputError(f"{path}: it changes while it is read; wait until it is written.")
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
        if max(identity[3:]) / 1e9 < now - SETTLED:  # so a later change cannot bear the same times
            known[name] = [identity, result[path]]
    if known != before:
        with contextlib.suppress(OSError):
            partial = record.with_name(f"{record.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps(known), encoding="utf-8")
            partial.replace(record)
    return result


def _read_record(record: Path) -> dict[str, list]:
    """What `digests` has kept, whatever is in the file."""
    try:
        kept = json.loads(record.read_text(encoding="utf-8"))
        return {path: [identity, digest] for path, (identity, digest) in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _identity(path: str) -> list[int]:
    """Equal as long as nothing is written to the file: a change sets the last number, whatever a program says."""
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Which files differ, of digests by path: other text, one more, or one less."""
    return sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))


def fingerprint(own: OwnText, found: Mapping[str, Corpus], contents: Mapping[str, str]) -> str:
    """20 hexadecimal digits of all that the dataset depends on: what is in the files, and how it is read."""
    files = {
        split: [[(contents[path], path.endswith(".gz")) for path in paths] for paths in corpus.rows]
        for split, corpus in found.items()
    }
    read = {split: (corpus.form, corpus.fields) for split, corpus in found.items()}
    how = (FORMAT, own.kind, own.labels, own.longest_line, own.faults)
    return hashlib.sha256(json.dumps((how, read, files), sort_keys=True).encode()).hexdigest()[:20]
