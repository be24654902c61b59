"""The speed of training: throughput, utilization of the devices, and goodput."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax


class Meter:
    """Counts units and FLOPs of steps, and the time they wait for data, since the last log line."""

    def __init__(
        self, unit: str, *, peak: float | None, elapsed: Callable[[], float], useful: float = 0.0
    ):
        """
        Args:
          unit: the counted unit, such as tokens.
          peak: FLOPs a second of all devices; None: unknown.
          elapsed: returns the seconds of all starts of the run.
          useful: the useful seconds of earlier starts, see `useful`.
        """
        self.unit, self._peak, self._elapsed, self._before = unit, peak, elapsed, useful
        self.restart()

    def restart(self) -> None:
        """Resets the counts for the next log line."""
        self._count = self._work = self._waited = 0.0
        self._since = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block, which is not part of a step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - start

    def waiting_for(
        self, items: Iterable[Any], running: Callable[[], Any] = lambda: None
    ) -> Iterator[Any]:
        """Yields `items`, and counts the time until each arrives as waiting if devices are idle.

        Args:
          running: returns arrays of the last step, which may still be computed.
        """
        remaining = iter(items)
        while True:
            start, idle_since = time.monotonic(), _time_when_ready(running())
            try:
                item = next(remaining)
            except StopIteration:
                return
            arrived = time.monotonic()
            idle_from = max(start, self._since, *(idle_since or [arrived]))
            self._waited += max(0.0, arrived - idle_from)
            yield item

    def add(self, count: float, work: float) -> None:
        """Adds `count` units, which took `work` FLOPs."""
        self._count += count
        self._work += work

    def rate(self) -> float:
        """Returns units a second."""
        return self._count / self._seconds()

    @property
    def useful(self) -> float:
        """The seconds of steps in all starts, without steps that had to be repeated."""
        return self._before + self._seconds() - self._waited

    def goodput(self) -> float:
        """Returns the useful share of the time of all starts, up to the last log line."""
        return min(1.0, self._before / max(1e-9, self._elapsed()))

    def line(self) -> dict[str, float]:
        """Returns the values for a log line, and resets the counts; NaN: unknown."""
        values = {
            f"{self.unit}_per_second": self.rate(),
            "data_wait": self._waited / self._seconds(),
        }
        values["mfu"] = self._work / self._seconds() / self._peak if self._peak else math.nan
        self._before = self.useful
        values["goodput"] = self.goodput()
        self.restart()
        return values

    def _seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._since)


def _time_when_ready(arrays: Any) -> list[float]:
    """Returns a list that gets the time when `arrays` are computed."""
    if all(array.is_ready() for array in jax.tree.leaves(arrays)):
        return [time.monotonic()]  # without the 0.4 ms that a thread takes
    ready = []

    def wait() -> None:
        with contextlib.suppress(Exception):  # reading the arrays raises it again
            jax.block_until_ready(arrays)
            ready.append(time.monotonic())

    threading.Thread(target=wait, daemon=True).start()
    return ready
