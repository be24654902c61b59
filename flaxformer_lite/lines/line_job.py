"""A model's answers to a file of lines of any size: window by window, in order, and on from where it was stopped.

The answers for F grow in `F.partial`, and `F.partial.json` says after each window how many lines are behind it, of
which bytes, and what was asked of which model. A job that is started again goes over the same bytes, drops what was
written after the record, and goes on; at the end F appears whole. Windows depend on the input alone, so a job that was
killed writes the bytes of one that never was. What follows the lines that are done may change: one that was refused may
be mended. Looking for faults all over the input first would cost a pass over it, and be impossible for a pipe: a fault
stops the job where it comes, and what is done before it is kept.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import tqdm

from flaxformer_lite.lines.line_windows import WINDOW, Answer, LineReader, Window, as_text
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import NO_LOCKS, behind_links, is_stream

QUIET = 3.0  # seconds that a job may take without a word
BAR, COUNTER = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]", "{desc} [{elapsed}]"
PACE = 10.0  # seconds between two lines of progress in a log


class LineJob(NamedTuple):
    """What is asked of a command that answers lines; no path means standard input or output."""

    input: Path | None = None
    output: Path | None = None
    window: int = WINDOW
    restart: bool = False  # do not go on with what is there
    progress: bool | None = None  # None: where standard error is a terminal


def run(job: LineJob, answer: Callable[[Window], Answer], *, asked: Callable[[], Mapping[str, Any]]) -> int:
    """Writes the answers for all windows of a job, and returns how many of its lines were split.

    Args:
      asked: all that the answers depend on beside the input, by the names that users know; JSON can hold it. It is
        called where the output is a file.

    Raises:
      InputError: a file cannot be read or written, or there is a part that something else began; or as `answer`.
    """
    with LineReader(job.input) as reader, _open(job, reader, asked) as output:
        with _Progress(job.progress, reader) as progress:
            for window in reader.windows(job.window):
                output.write(answer(window), reader)
                progress.update()
        output.finish()
        return output.split


def _open(job: LineJob, reader: LineReader, asked: Callable[[], Mapping[str, Any]]) -> "_Stream":
    path = job.output
    if path is None:
        return _Stream(sys.stdout.buffer)
    try:
        if is_stream(path):  # nothing to rename
            return _Stream(path.open("wb"), path)
        return _Kept(job, reader, asked())
    except OSError as error:
        raise _unwritable(path, error) from error


class _Stream:
    """Takes the answers of each window as soon as they are there; what is written is gone."""

    def __init__(self, file: BinaryIO, path: Path | None = None):
        self._file, self._path, self.split = file, path, 0

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._file is not sys.stdout.buffer:
            self._close(kind)

    def _close(self, kind: type[BaseException] | None) -> None:
        """After an error, what could not be written is tried again here, and must not fail in the error's place."""
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self._file.close()

    def write(self, answer: Answer, reader: LineReader) -> None:
        """The answers to the last window of `reader`."""
        try:
            self._file.write(as_text(answer.lines).encode())
            self._file.flush()
        except OSError as error:
            if self._path is None or isinstance(error, BrokenPipeError):
                raise
            raise _unwritable(self._path, error) from error
        self.split += answer.split

    def finish(self) -> None:
        """After the last window."""


class _Kept(_Stream):
    """A file that grows beside its name until it is whole, with a record of how far it is."""

    def __init__(self, job: LineJob, reader: LineReader, asked: Mapping[str, Any]):
        """Goes over what is done already, in `reader` too."""
        path = behind_links(job.output)
        self._asked, self._lines = json.loads(json.dumps(asked)), 0
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._partial = path.with_name(f"{path.name}.partial")
        self._record = path.with_name(f"{path.name}.partial.json")
        super().__init__(os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b"), path)
        try:
            self._lock()
            written = 0 if job.restart else self._go_on(reader)
            self._file.truncate(written)
            self._file.seek(written)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Until the file is closed, or the process dies."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file.fileno()), self._partial.stat()):
                raise BlockingIOError  # another process has given it its name meanwhile
        except (BlockingIOError, FileNotFoundError) as error:
            raise InputError(
                f"--output={self._path}: another process is writing {self._partial}; wait, or choose another name."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    def _go_on(self, reader: LineReader) -> int:
        """How many bytes of the part are to be kept; `reader` goes over what they are the answers to.

        Raises:
          InputError: the part was not made of what this start asks for.
        """
        size = self._file.seek(0, os.SEEK_END)
        if not size:  # new: a record without a part is of a job that has ended
            return 0
        record = self._read_record()
        for name in sorted(record["asked"].keys() | self._asked.keys()):
            old, new = record["asked"].get(name), self._asked.get(name)
            if old != new and (name, old) != ("--long", "refuse"):  # of what is done, nothing was too long
                raise InputError(
                    f"{name}: {self._partial} was begun with {old!r}, and this start asks for {new!r}; {self._ways}"
                )
        if size < record["written"]:
            raise InputError(f"{self._partial}: expected {record['written']:,} bytes or more, got {size}; {self._ways}")
        if reader.skip(bytes=record["bytes"], lines=record["lines"]) != record["sha256"]:
            raise InputError(
                f"{reader.name}: its first {record['bytes']:,} bytes are not those that {self._partial} was made from; "
                f"{self._ways}"
            )
        self._lines, self.split = record["lines"], record["split"]
        return record["written"]

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            if record.keys() != {"asked", "written", "split", *LineReader.START}:
                raise InputError("these are other fields")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(
                f"--output={self._path}: {self._partial} is there, and {self._record.name}, which tells what it is of, "
                f"cannot be read; {self._ways}"
            ) from error
        return record

    @property
    def _ways(self) -> str:
        return f"put it right, or begin anew with --restart, which drops what is in {self._partial.name}."

    def write(self, answer: Answer, reader: LineReader) -> None:
        """The answers first, then the record of them: what is not recorded does not count."""
        try:
            if not self._lines:
                self._write_record(LineReader.START, written=0)
            super().write(answer, reader)
            os.fsync(self._file.fileno())
            self._write_record(reader.done(), written=self._file.tell())
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self._lines = reader.lines

    def _write_record(self, done: Mapping[str, Any], *, written: int) -> None:
        record = {"asked": self._asked, **done, "split": self.split, "written": written}
        new = self._record.with_name(f"{self._record.name}.new")  # a process that is killed leaves it to the next
        new.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(self._record)

    def finish(self) -> None:
        """The name for the whole file; the record goes last, for it means nothing without the part."""
        try:
            self._partial.replace(self._path)
            self._record.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is not None and self._lines:
            kept = f"note: {self._lines:,} lines are kept in {self._partial}; the same command goes on after them."
            print(kept, file=sys.stderr, flush=True)
        elif kind is not None:
            self._partial.unlink(missing_ok=True)
            self._record.unlink(missing_ok=True)
        self._close(kind)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"--output={path}: cannot be written: {error.strerror}.")


class _Progress:
    """Lines, lines a second and, where the size of the input is known, the time left: a bar, or now and then a line."""

    def __init__(self, wanted: bool | None, reader: LineReader):
        self._reader, self._first, self._begun = reader, (reader.lines, reader.bytes), time.monotonic()
        terminal = sys.stderr.isatty()
        self._in_log = bool(wanted) and not terminal
        self._shown = self._begun + QUIET - PACE
        self._bar = tqdm.tqdm(
            disable=not terminal or wanted is False,
            total=reader.size,
            initial=reader.bytes,
            delay=QUIET,
            dynamic_ncols=True,
            bar_format=BAR if reader.size else COUNTER,
        )

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def update(self) -> None:
        """Shows where the reader is."""
        reader, now = self._reader, time.monotonic()
        lines, read = reader.lines - self._first[0], reader.bytes - self._first[1]
        taken = max(1e-9, now - self._begun)
        text = f"{reader.lines:,} lines, {lines / taken:,.0f} lines a second"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(reader.bytes - self._bar.n)
        if self._in_log and now - self._shown >= PACE:
            self._shown = now
            if reader.size:
                left = taken / read * (reader.size - reader.bytes)
                text += f", {tqdm.tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)
