"""The ids of a split: tokenised once, stored next to the dataset, memory-mapped at later starts.

    <dataset folder>/tokens/<key>/ids          concatenated ids, uint16 if the vocabulary fits,
                                               else uint32
                                 /offsets      int64: row i is ids[offsets[i] : offsets[i + 1]]
                                 /index.json   the sizes, and the SHA-256 of the offsets

There is a folder for each column, such as the texts of one language. The key is a hash of the
dataset's files, the slice of the split, the column's features, and the tokenizer. A folder appears
by a rename when it is complete. The folders may be deleted at any time; they are then made again.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm

from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.token_links import token_links
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.two_vocabularies import tokenizer_of
from flaxformer_lite.scores.word_links import ALIGNMENT
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import locked

FORMAT = 1
READ_AT_ONCE = 8192  # examples in memory as text
ENOUGH_FOR_A_PROCESS = 100_000  # examples; a process takes about 1 s to start
# in the home folder, if the dataset's folder is not writable
CACHE = ".cache/flaxformer_lite/tokens"


def tokenised(
    reader: Reader,
    tokenizer: AnyTokenizer,
    *,
    start: Sequence[int] = (),
    processes: int | None = None,
    show: bool = True,
) -> dict[str, Ragged]:
    """Returns the memory-mapped ids of each column of a split: 'source', 'target' or 'label'.

    Those of 'alignment' are the links of its tokens, see `token_links`. Missing
    columns are written first. Any number of processes may call this at the same time. A label is
    one number a row.

    Args:
      start: ids at the start of every text.
      processes: the number of processes for the work; None: one a core, at most one for each
        ENOUGH_FOR_A_PROCESS examples.
      show: whether to show a progress bar if it takes over 2 s.
    """
    keys = {column: _key(reader, column, tokenizer, start) for column in reader.columns}
    roots = [reader.folder / "tokens", Path.home() / CACHE]
    found = [(column, _find(roots, key)) for column, key in keys.items()]
    stored = {column: ids for column, ids in found if ids is not None}
    if len(stored) == len(found):
        return stored
    if processes is None:
        processes = max(1, min(_cores(), len(reader) // ENOUGH_FOR_A_PROCESS))
    border = tuple(len(reader) * i // processes for i in range(processes + 1))
    work = Work(reader, tokenizer, tuple(start), border)
    for root in roots:
        try:
            with _locked(root):
                missing = {column: key for column, key in keys.items() if _open(root / key) is None}
                if missing:  # no other process has written them while this one waited
                    _write(work, root, missing, show=show)
            return {column: _written(root / key) for column, key in keys.items()}
        except OSError as error:
            split = f"{reader.split} of {reader.name}"
            logging.warning(
                "%s: the ids of %s are not stored there: %s", root, split, error.strerror or error
            )
    with tempfile.TemporaryDirectory() as name:
        _write(work, Path(name), keys, show=show)
        mapped = {column: _written(Path(name) / key) for column, key in keys.items()}
        return {
            column: Ragged(np.array(ids.values), np.array(ids.offsets))
            for column, ids in mapped.items()
        }


def _key(reader: Reader, column: str, tokenizer: AnyTokenizer, start: Sequence[int]) -> str:
    if column == ALIGNMENT:  # its links depend on the tokens of both texts
        both = [_key(reader, side, tokenizer, start) for side in ("source", "target")]
        key = json.dumps([FORMAT, reader.columns[column], both])
        return hashlib.sha256(key.encode()).hexdigest()[:32]
    data = [FORMAT, reader.name, reader.folder.name, reader.files, reader.columns[column]]
    if reader.part is not None:
        data += [reader.part.start, reader.part.stop]
    made_by = None if column == "label" else [tokenizer.made_by(column), *map(int, start)]
    return hashlib.sha256(json.dumps([data, made_by]).encode()).hexdigest()[:32]


def _find(roots: Iterable[Path], key: str) -> Ragged | None:
    return next((ids for root in roots if (ids := _open(root / key)) is not None), None)


def _open(folder: Path) -> Ragged | None:
    """Returns the ids in `folder`; None if it is missing or incomplete."""
    try:
        index = json.loads((folder / "index.json").read_text())
        values = _mapped(folder / "ids", index["dtype"], index["ids"])
        offsets = _mapped(folder / "offsets", "int64", index["rows"] + 1)
        is_unchanged = hashlib.sha256(offsets.data).hexdigest() == index["sha256"]
        is_complete = is_unchanged and int(offsets[-1]) == len(values)
        return Ragged(values, offsets) if is_complete else None
    except (OSError, ValueError, KeyError):
        return None


def _written(folder: Path) -> Ragged:
    ids = _open(folder)
    if ids is None:
        raise OSError(f"{folder}: the ids written there cannot be read back")
    return ids


def _mapped(file: Path, dtype: str, count: int) -> np.ndarray:
    if file.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{file}: expected {count} numbers of type {dtype}.")
    # an empty file cannot be mapped
    return np.asarray(np.memmap(file, dtype, "r")) if count else np.empty(0, dtype)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Holds the lock file in `root`."""
    root.mkdir(parents=root.is_relative_to(Path.home() / CACHE), exist_ok=True)
    with locked(root / ".lock"):
        for left_by_a_killed_process in root.glob(".partial-*"):
            shutil.rmtree(left_by_a_killed_process)
        yield


@dataclasses.dataclass(frozen=True)
class Work:
    """A reader, a tokenizer, and the first and last example of each part; can be pickled."""

    reader: Reader
    tokenizer: AnyTokenizer
    start: tuple[int, ...]
    border: tuple[int, ...]

    def type_of(self, column: str) -> type:
        """Returns the integer type of the stored ids of a column."""
        if column in ("label", ALIGNMENT):
            return np.uint32
        return np.uint16 if tokenizer_of(self.tokenizer, column).vocab_size <= 2**16 else np.uint32

    def do(
        self, part: int, folder: Path, columns: Sequence[str], *, done: Callable[[int], object]
    ) -> None:
        """Writes the ids and lengths of a part; calls `done` with each number of new examples."""
        with contextlib.ExitStack() as files:
            opened = {
                column: [
                    files.enter_context(path.open("wb"))
                    for path in _part_files(folder, column, part)
                ]
                for column in columns
            }
            for first in range(self.border[part], self.border[part + 1], READ_AT_ONCE):
                examples = self.reader(
                    range(first, min(first + READ_AT_ONCE, self.border[part + 1]))
                )
                for column, (ids_file, lengths_file) in opened.items():
                    rows = Ragged.of(self._rows(column, examples, first))
                    rows.values.astype(self.type_of(column)).tofile(ids_file)
                    rows.lengths().astype(np.int32).tofile(lengths_file)
                done(len(examples))

    def _rows(
        self, column: str, examples: Examples, first: int
    ) -> Sequence[Sequence[int] | np.ndarray]:
        """Returns the ids of the texts of a column, the labels, or the links of tokens.

        `first`: number of the first example.
        """
        values: Any = getattr(examples, column)
        if column == ALIGNMENT:
            texts = zip(examples.source or (), examples.target or (), values, strict=True)
            return [token_links(self.tokenizer, *of_example) for of_example in texts]
        if column == "label":
            return values[:, None]
        if self.reader.part is not None:
            starts = self.reader.part.starts(range(first, first + len(values)))
            return encode_pieces(self.tokenizer, values, starts, side=column)
        rows = self.tokenizer.encode(values, side=column, threads=1)
        return [[*self.start, *ids] for ids in rows] if self.start else rows


def encode_pieces(
    tokenizer: AnyTokenizer, texts: Sequence[str], starts: Sequence[bool], *, side: str
) -> list[np.ndarray]:
    """Returns the ids of pieces of texts: joined, they are the ids of each whole text.

    A tokenizer may put a space in front of a text, which does not belong in front of a piece that
    continues one. Such a piece is therefore encoded after a line end, whose ids are then removed.
    That needs tokens that do not span a line end, as those of tokenizers trained on lines. A
    tokenizer that has others, and adds no space, encodes the piece alone.

    Args:
      starts: whether each piece is the start of a text.

    Raises:
      InputError: the tokenizer adds a space, and a token of it spans a line end.
    """
    (line_end,) = tokenizer.encode(["\n"], side=side, threads=1)
    prefixed = [text if start else "\n" + text for text, start in zip(texts, starts, strict=True)]
    rows = tokenizer.encode(prefixed, side=side, threads=1)
    spans = [
        not start and not np.array_equal(row[: len(line_end)], line_end)
        for row, start in zip(rows, starts, strict=True)
    ]
    if any(spans) and len(line_end) > 1:
        raise InputError(
            "config.data.tokenizer_file: expected tokens within lines, got one of a line end and "
            f"the start of {texts[spans.index(True)][:20]!r}; use another tokenizer with "
            "data.whole_files."
        )
    alone = tokenizer.encode(
        [text for text, spanned in zip(texts, spans, strict=True) if spanned], side=side, threads=1
    )
    of_spanned = iter(alone)
    return [
        row if start else next(of_spanned) if spanned else row[len(line_end) :]
        for row, start, spanned in zip(rows, starts, spans, strict=True)
    ]


def _write(work: Work, root: Path, keys: Mapping[str, str], *, show: bool) -> None:
    """Writes each column of `keys` to the folder `root / key`."""
    folder, parts = Path(tempfile.mkdtemp(prefix=".partial-", dir=root)), len(work.border) - 1
    pace = 0.1 if sys.stderr.isatty() else 10.0  # seconds between two updates
    shown = dict(desc="tokenising", unit=" examples", delay=2, mininterval=pace, disable=not show)
    with tqdm.tqdm(total=work.border[-1], **shown) as bar:
        try:
            if parts < 2 or not _in_processes(work, folder, tuple(keys), done=bar.update):
                bar.n = 0
                for part in range(parts):
                    work.do(part, folder, tuple(keys), done=bar.update)
            for column, key in keys.items():
                _join_parts(folder, column, parts, work.type_of(column))
                shutil.rmtree(root / key, ignore_errors=True)  # an incomplete one, if it exists
                (folder / column).rename(root / key)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _cores() -> int:
    """Returns the number of cores of this process, limited by the CPU quota of its container."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):  # no such file, or 'max'
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _part_files(folder: Path, column: str, part: int) -> tuple[Path, Path]:
    return folder / f"{column}.{part}.ids", folder / f"{column}.{part}.lengths"


def _join_parts(folder: Path, column: str, parts: int, dtype: type) -> None:
    """Joins the parts of a column into its folder, and flushes the folder to disk."""
    target, every = folder / column, [_part_files(folder, column, part) for part in range(parts)]
    target.mkdir()
    with (target / "ids").open("wb") as whole:
        for ids_file, _ in every:
            with ids_file.open("rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)
            ids_file.unlink()
    lengths = np.concatenate([np.fromfile(lengths_file, np.int32) for _, lengths_file in every])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    offsets.tofile(target / "offsets")
    index = {
        "format": FORMAT,
        "rows": len(lengths),
        "ids": int(offsets[-1]),
        "dtype": np.dtype(dtype).name,
    }
    (target / "index.json").write_text(
        json.dumps(index | {"sha256": hashlib.sha256(offsets.data).hexdigest()})
    )
    for file in (*target.iterdir(), target):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# Plain processes, because `multiprocessing` runs the caller's main module again in each child: a
# script may have no main guard, and ours would load JAX.
CHILD = (
    "import sys; from flaxformer_lite.data.tokens import store; "
    "store.do_part(sys.argv[1], int(sys.argv[2]))"
)


def do_part(job: str, part: int) -> None:
    """Does one part of the work pickled in the file `job`; prints the number of examples done."""
    with open(job, "rb") as file:
        work, folder, columns = pickle.load(file)
    # If the parent has died, writing to the pipe fails and ends this process.
    work.do(part, folder, columns, done=lambda count: os.write(1, b"%d\n" % count))


def _in_processes(
    work: Work, folder: Path, columns: Sequence[str], *, done: Callable[[int], object]
) -> bool:
    """Runs each part in a child process; returns False, after a warning, if a child failed."""
    job, processes = folder / "job", len(work.border) - 1
    error_files = [folder / f"errors{part}" for part in range(processes)]
    job.write_bytes(pickle.dumps((work, folder, columns)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    read_end, write_end = os.pipe()
    children = []
    with os.fdopen(read_end) as lines:
        try:
            try:
                for part, error_file in enumerate(error_files):
                    command = [sys.executable, "-c", CHILD, str(job), str(part)]
                    with error_file.open("wb") as stderr:
                        child = subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=write_end,
                            stderr=stderr,
                            env=environment,
                            start_new_session=True,
                        )
                        children.append(child)
            finally:
                os.close(write_end)
            for line in lines:
                done(int(line))
            failed = [part for part, child in enumerate(children) if child.wait()]
        finally:
            for child in children:
                child.kill()
                child.wait()
    if failed:
        errors = error_files[failed[0]].read_text(errors="replace").splitlines()
        reason = errors[-1] if errors else f"exit code {children[failed[0]].returncode}"
        logging.warning(
            "Tokenising in %d processes failed (%s); continuing in this one.", processes, reason
        )
    return not failed
