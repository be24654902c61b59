"""Where numbers go: metrics.jsonl always, TensorBoard beside it, and a progress line for whoever watches."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorboardX
import tqdm


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl: of several with the same split and step, the last. A torn last line is ignored.

    Raises:
      ValueError: another line is no JSON.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}.") from error
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


class Progress:
    """A bar on a terminal; in a log file, a line every `seconds`. Counts from `first` to `last`."""

    def __init__(self, first: int, last: int, *, enabled: bool = True, seconds: float = 10.0):
        self._last, self._seconds = last, seconds
        self._begun = self._shown = time.monotonic()
        self._first = first
        self._enabled = enabled
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=last, initial=first, unit="step", dynamic_ncols=True, smoothing=0.05)

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows `step` of the total and `values`, such as loss and tokens per second."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._enabled and time.monotonic() - self._shown >= self._seconds:
            self._shown = time.monotonic()
            left = (self._shown - self._begun) / max(1, step - self._first) * (self._last - step)
            print(f"step {step}/{self._last}  {text}  {_clock(left)} left", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of text that the bar does not run over."""
        if self._enabled:
            tqdm.tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Leaves the bar where it stands."""
        if self._bar is not None:
            self._bar.close()


def table(rows: list[list[str]]) -> str:
    """Rows of text in columns: the first left, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in rows)


def _aligned(row: list[str], widths: list[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if i else cell.ljust(width)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
