"""Resumable jobs: a model's output for a file of lines of any size, window by window, in order.

The output for F is appended to `F.partial`, each window compressed if the name of F says so. After
each window, `F.partial.json` records the lines and bytes that are done, the hash of these bytes,
and the settings and model. A restarted job checks the same input bytes, truncates output after the
record, and resumes; at the end F appears by a rename. Windows depend only on the input, so a killed
and restarted job writes the same bytes as an uninterrupted one. Lines after the done ones may
change: a refused line can be fixed. Malformed lines are not searched in advance, because that needs
another pass and is impossible for a pipe: a malformed line stops the job, and the output before it
is kept.
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

from flaxformer_lite.lines.line_windows import (
    WINDOW,
    Answer,
    LineReader,
    Window,
    as_text,
    standard_output,
)
from flaxformer_lite.system.compressed import compressor
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import NO_LOCKS, behind_links, is_stream

QUIET = 3.0  # seconds before progress is shown
BAR, COUNTER = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]", "{desc} [{elapsed}]"
PACE = 10.0  # seconds between two lines of progress in a log


class LineJob(NamedTuple):
    """The settings of a job; a path None is standard input or output."""

    input: Path | None = None
    output: Path | None = None
    window: int = WINDOW
    restart: bool = False  # whether to discard partial output instead of resuming
    progress: bool | None = None  # None: only if standard error is a terminal
    target: Path | None = None  # a second file, whose lines belong to those of `input`


def run(
    job: LineJob, answer: Callable[[Window], Answer], *, asked: Callable[[], Mapping[str, Any]]
) -> int:
    """Writes the output for all windows of a job, and returns the number of lines that were split.

    Args:
      answer: returns the output for a window.
      asked: returns everything that the output depends on besides the input, by names that users
        know, as JSON values. It is called only if the output is a file.

    Raises:
      InputError: a file cannot be read or written, or partial output of another job exists; or as
        `answer`.
    """
    with LineReader(job.input, job.target) as reader, _open(job, reader, asked) as output:
        with _Progress(job.progress, reader) as progress:
            for window in reader.windows(job.window):
                output.write(answer(window), reader)
                progress.update()
        output.finish()
        return output.split


def _open(job: LineJob, reader: LineReader, asked: Callable[[], Mapping[str, Any]]) -> "_Stream":
    path = job.output
    if path is None:
        return _Stream(standard_output())
    try:
        if is_stream(path):  # nothing to rename
            return _Stream(path.open("wb"), path)
        return _ResumableFile(job, path, reader, asked())
    except OSError as error:
        raise _unwritable(path, error) from error


class _Stream:
    """Writes the output of each window at once, to a stream that cannot be resumed."""

    def __init__(self, file: BinaryIO, path: Path | None = None):
        self._file, self._path, self.split = file, path, 0
        self._compress = compressor(path)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._path is not None:
            self._close(kind)

    def _close(self, kind: type[BaseException] | None) -> None:
        """Closes the file; after an error, a second one while flushing is ignored."""
        with contextlib.suppress(OSError) if kind is not None else contextlib.nullcontext():
            self._file.close()

    def write(self, answer: Answer, reader: LineReader) -> None:
        """Writes the output for the last window of `reader`."""
        try:
            self._file.write(self._compress(as_text(answer.lines).encode()))
            self._file.flush()
        except OSError as error:
            if self._path is None or isinstance(error, BrokenPipeError):
                raise
            raise _unwritable(self._path, error) from error
        self.split += answer.split

    def finish(self) -> None:
        """Completes the output after the last window."""


class _ResumableFile(_Stream):
    """A file that is written under a partial name until it is complete, with a progress record."""

    def __init__(self, job: LineJob, output: Path, reader: LineReader, asked: Mapping[str, Any]):
        """Opens the partial file, and skips in `reader` the lines that are done."""
        self._target = path = behind_links(output)
        packed = {} if compressor(path) is bytes else {"--output": path.suffix.lower()}
        self._asked, self._lines = json.loads(json.dumps({**asked, **packed})), 0
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        self._partial = path.with_name(f"{path.name}.partial")
        self._record = path.with_name(f"{path.name}.partial.json")
        super().__init__(
            os.fdopen(os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b"), path
        )
        try:
            self._lock()
            written = 0 if job.restart else self._resume(reader)
            self._file.truncate(written)
            self._file.seek(written)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Locks the partial file until it is closed or the process dies."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._file.fileno()), self._partial.stat()):
                raise BlockingIOError  # another process has completed and renamed it
        except (BlockingIOError, FileNotFoundError) as error:
            raise InputError(
                f"--output={self._path}: another process is writing {self._partial}; wait, or "
                "choose another name."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise

    def _resume(self, reader: LineReader) -> int:
        """Returns the bytes of the partial output to keep, and skips their input in `reader`.

        Raises:
          InputError: the partial output is of other settings or another input.
        """
        size = self._file.seek(0, os.SEEK_END)
        if not size:  # a record without partial output is of a completed job
            return 0
        record = self._read_record()
        for name in sorted(record["asked"].keys() | self._asked.keys()):
            old, new = record["asked"].get(name), self._asked.get(name)
            # with --long=refuse, none of the done lines was too long
            if old != new and (name, old) != ("--long", "refuse"):
                raise InputError(
                    f"{name}: {self._partial} was started with {old!r}, and this start asks for "
                    f"{new!r}; {self._remedy}"
                )
        if size < record["written"]:
            raise InputError(
                f"{self._partial}: expected {record['written']:,} bytes or more, got {size}; "
                f"{self._remedy}"
            )
        if reader.skip(bytes=record["bytes"], lines=record["lines"]) != record["sha256"]:
            raise InputError(
                f"{reader.name}: its first {record['bytes']:,} bytes are not those that "
                f"{self._partial} was made from; {self._remedy}"
            )
        self._lines, self.split = record["lines"], record["split"]
        return record["written"]

    def _read_record(self) -> dict[str, Any]:
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
            if record.keys() != {"asked", "written", "split", *LineReader.START}:
                raise ValueError("unexpected fields")
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(
                f"--output={self._path}: {self._partial} is there, and {self._record.name}, "
                f"which records its source, cannot be read; {self._remedy}"
            ) from error
        return record

    @property
    def _remedy(self) -> str:
        return f"correct it, or start over with --restart, which discards {self._partial.name}."

    def write(self, answer: Answer, reader: LineReader) -> None:
        """Writes the output, then the record: output without a record is discarded on resuming."""
        try:
            if not self._lines:
                self._write_record(LineReader.START, written=0)
            super().write(answer, reader)
            os.fsync(self._file.fileno())
            self._write_record(reader.done(), written=self._file.tell())
        except OSError as error:
            raise _unwritable(self._target, error) from error
        self._lines = reader.lines

    def _write_record(self, done: Mapping[str, Any], *, written: int) -> None:
        record = {"asked": self._asked, **done, "split": self.split, "written": written}
        # a rename, so that a killed process leaves a complete record
        new = self._record.with_name(f"{self._record.name}.new")
        new.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(self._record)

    def finish(self) -> None:
        """Renames the complete file, then removes the record, which is ignored without the file."""
        try:
            if not self._file.tell():
                self._file.write(self._compress(b""))
                self._file.flush()
            self._partial.replace(self._target)
            self._record.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self._target, error) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._lines:
            note = (
                f"note: {self._lines:,} lines are kept in {self._partial}; the same command "
                "resumes after them."
            )
            print(note, file=sys.stderr, flush=True)
        elif kind is not None:
            self._partial.unlink(missing_ok=True)
            self._record.unlink(missing_ok=True)
        self._close(kind)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"--output={path}: cannot be written: {error.strerror}.")


class _Progress:
    """Shows lines, lines a second, and the time left if the size of the input is known.

    On a terminal this is a bar, in a log a line every PACE seconds.
    """

    def __init__(self, wanted: bool | None, reader: LineReader):
        self._reader, self._first = reader, (reader.lines, reader.bytes)
        self._started = time.monotonic()
        terminal = sys.stderr.isatty()
        self._in_log = bool(wanted) and not terminal
        self._shown = self._started + QUIET - PACE
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

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self) -> None:
        """Shows the position of the reader."""
        reader, now = self._reader, time.monotonic()
        lines, read = reader.lines - self._first[0], reader.bytes - self._first[1]
        taken = max(1e-9, now - self._started)
        text = f"{reader.lines:,} lines, {lines / taken:,.0f} lines a second"
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(reader.bytes - self._bar.n)
        if self._in_log and now - self._shown >= PACE:
            self._shown = now
            if reader.size:
                left = taken / read * (reader.size - reader.bytes)
                text += f", {tqdm.tqdm.format_interval(left)} left"
            print(text, file=sys.stderr, flush=True)
