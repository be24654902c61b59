"""The log of a run: metrics.jsonl, and the same values for TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorboardX

from flaxformer_lite.system.errors import InputError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl: of several with the same split and step, the last. A torn last line is ignored.

    Raises:
      InputError: another line is no JSON.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}.") from error
        latest.pop((record["split"], record["step"]), None)
        latest[record["split"], record["step"]] = record
    return list(latest.values())


def validation_scores(path: Path, score: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    """Step to `score(record)` of every evaluation on the validation split that `path` tells of."""
    return {r["step"]: score(r) for r in read_metrics(path) if r["split"] == "validation"}


def remove_torn_line(path: Path) -> None:
    """Cuts what follows the last line end: a process that was killed may have left half a line."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def reopen(path: Path) -> None:
    """Makes a log that ends with a test line end with its last validation line, which is written again.

    So what was measured stays, and is not the result of the run any more.
    """
    lines = read_metrics(path)
    others = [line for line in lines if line["split"] == "validation"]
    if others and lines[-1]["split"] == "test":
        remove_torn_line(path)
        with path.open("ab") as file:
            file.write((json.dumps(others[-1]) + "\n").encode())


class MetricsWriter:
    """Appends to `metrics.jsonl` and to TensorBoard's event file in `folder`; does nothing if not `enabled`.

    Each line tells in `seconds` how long the run has taken up to it: all of its starts, without the time in between.
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
          started: when this start of the run began, by `time.monotonic()`; None: now.
          publish: copies the folder to where others read it.
        """
        self._file = self._events = None
        self._publish = publish
        self._begun = time.monotonic() if started is None else started
        if enabled:
            remove_torn_line(folder / "metrics.jsonl")
            self._begun -= max([0.0, *(line.get("seconds", 0.0) for line in read_metrics(folder / "metrics.jsonl"))])
            self._file = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._events = tensorboardX.SummaryWriter(str(folder), flush_secs=10)

    def elapsed(self) -> float:
        """Seconds that the run has taken so far."""
        return time.monotonic() - self._begun

    def write(self, step: int, split: str, values: dict[str, float], *, parameters: str | None = None) -> None:
        """One line, in one write; a value that JSON cannot hold becomes null.

        Args:
          parameters: which ones were measured, if not those of this step as they are; a word of the line.
        """
        if self._file is None:
            return
        words = {"seconds": round(self.elapsed(), 1)}
        words |= {} if parameters is None else {"parameters": parameters}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        os.write(self._file, (json.dumps({"step": step, "split": split, **words, **finite}) + "\n").encode())
        for name, value in finite.items():
            if value is not None:
                self._events.add_scalar(f"{split}/{name}", value, step)

    def flush(self) -> None:
        """Brings TensorBoard's file up to date, which metrics.jsonl always is, and publishes both."""
        if self._events is not None:
            self._events.flush()
            self._publish()

    def close(self) -> None:
        """Flushes and closes both."""
        if self._file is not None:
            os.close(self._file)
            self._events.close()
            self._publish()
