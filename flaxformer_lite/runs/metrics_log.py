"""The log of a run: metrics.jsonl, and the same values for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorboardX

from flaxformer_lite.system.errors import InputError, NotWritten
from flaxformer_lite.system.storage import free_space, read_whole

KINDS = {"split": str, "step": int, "parameters": str}  # others: a number, or null
REMEDY = "restore the file from a copy, or remove the line."


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics.jsonl; for each split and step the last one.

    An incomplete last line is ignored.

    Raises:
      InputError: the file cannot be read, or another line is not one of a log.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    try:
        content = read_whole(path) if path.exists() else b""
    except IsADirectoryError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
    # Only at LF: with another content of the file, CR would hide the lines after it.
    *lines, _ = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _record(line, f"{path}, line {number}")
        latest.pop((record["split"], record["step"]), None)
        latest[record["split"], record["step"]] = record
    return list(latest.values())


def _record(line: bytes, where: str) -> dict[str, Any]:
    """Returns a line of the log; raises InputError if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise InputError(f"expected a JSON object, got {line[:40]!r}; {REMEDY}", where=where)
    for name, value in {"split": None, "step": None, **record}.items():
        kind = KINDS.get(name, int | float | None)
        if not isinstance(value, kind):
            expected = "a text" if kind is str else "a number"
            raise InputError(
                f"{name}: expected {expected}, got {value!r:.40}; {REMEDY}", where=where
            )
    return record


def validation_scores(path: Path, score: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    """Returns step to `score(record)` for every line of the validation split in `path`.

    Raises:
      InputError: as `read_metrics`, or a line lacks the metric.
    """
    lines = [record for record in read_metrics(path) if record["split"] == "validation"]
    try:
        return {record["step"]: score(record) for record in lines}
    except KeyError as error:
        name = error.args[0]
        raise InputError(f"{path}: a validation line has no {name!r}; {REMEDY}") from error


def remove_torn_line(path: Path) -> None:
    """Removes an incomplete last line, which a killed process may have left."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def reopen(path: Path) -> None:
    """Appends the last validation line again to a log that ends with a test line.

    The test line stays in the log, but is no longer the result of the run.
    """
    lines = read_metrics(path)
    others = [line for line in lines if line["split"] == "validation"]
    if others and lines[-1]["split"] == "test":
        remove_torn_line(path)
        with path.open("ab") as file:
            file.write((json.dumps(others[-1]) + "\n").encode())


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard's event file in `folder`, if `enabled`.

    Each line contains in `seconds` the time of all starts of the run, without the time in between.
    """

    def __init__(
        self,
        folder: Path,
        *,
        started: float | None = None,
        enabled: bool = True,
        publish: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          folder: on disk.
          started: the time of this start, by `time.monotonic()`; None: now.
          publish: copies the folder to the workdir of the run.
        """
        self._file: int | None = None
        self._events: Any = None
        self._publish = publish
        self._started = time.monotonic() if started is None else started
        if enabled:
            self._path = path = folder / "metrics.jsonl"
            remove_torn_line(path)
            before = (line.get("seconds", 0.0) for line in read_metrics(path))
            self._started -= max([0.0, *before])
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._events = tensorboardX.SummaryWriter(str(folder), flush_secs=10)

    def elapsed(self) -> float:
        """Returns the seconds that all starts of the run have taken."""
        return time.monotonic() - self._started

    def write(
        self, step: int, split: str, values: dict[str, float], *, parameters: str | None = None
    ) -> None:
        """Writes a line with a single system call; a value that JSON cannot represent becomes null.

        Args:
          parameters: a note in the line, if these are not the raw parameters of this step.
        """
        if self._file is None:
            return
        words: dict[str, Any] = {"seconds": round(self.elapsed(), 1)}
        words |= {} if parameters is None else {"parameters": parameters}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "split": split, **words, **finite}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            raise NotWritten(
                f"{self._path}: cannot be written: {error.strerror}; {free_space(self._path)}."
            ) from error
        for name, value in finite.items():
            if value is not None:
                self._events.add_scalar(f"{split}/{name}", value, step)

    def flush(self) -> None:
        """Flushes TensorBoard's file, and publishes both; metrics.jsonl is never buffered."""
        if self._events is not None:
            self._events.flush()
            self._publish()

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None:
            os.close(self._file)
            self._events.close()
            self._publish()
