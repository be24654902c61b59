"""How fast training is, how near to what the devices can, and what share of the run's time went into it."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax


class Meter:
    """Counts what steps do, and clocks what they wait for, since the last line of the log.

    Attributes:
      useful: seconds that steps have taken, of all starts of the run, those left out that had to be done again.
    """

    def __init__(self, unit: str, *, peak: float | None, elapsed: Callable[[], float], useful: float = 0.0):
        """
        Args:
          unit: what is counted, such as target tokens.
          peak: FLOPs a second of all devices together; None: not known.
          elapsed: seconds that the run has taken, all of its starts together.
          useful: see `Meter`, of the starts before.
        """
        self.unit, self._peak, self._elapsed, self._before = unit, peak, elapsed, useful
        self.restart()

    def restart(self) -> None:
        """Begins the next line of the log."""
        self._count = self._work = self._waited = 0.0
        self._since = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time that the block takes: it is no part of a step."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - begun

    def waiting_for(self, items: Iterable[Any], running: Callable[[], Any] = lambda: None) -> Iterator[Any]:
        """`items`; the time until each of them is there counts as waiting, but for that in which devices compute.

        `running` returns arrays of the last step, which may not be computed yet.
        """
        remaining = iter(items)
        while True:
            asked, idle_since = time.monotonic(), _noted_when_ready(running())
            try:
                item = next(remaining)
            except StopIteration:
                return
            here = time.monotonic()
            self._waited += max(0.0, here - max(asked, self._since, *(idle_since or [here])))
            yield item

    def add(self, count: float, work: float) -> None:
        """Counts `count` more of the unit, for which `work` FLOPs were needed."""
        self._count += count
        self._work += work

    def rate(self) -> float:
        """Units a second."""
        return self._count / self._seconds()

    @property
    def useful(self) -> float:
        """Up to now."""
        return self._before + self._seconds() - self._waited

    def goodput(self) -> float:
        """Share of the time of all starts that was useful, up to the last line of the log."""
        return min(1.0, self._before / max(1e-9, self._elapsed()))

    def line(self) -> dict[str, float]:
        """What the log says of the steps since its last line, which ends here; not a number: not known."""
        values = {f"{self.unit}_per_second": self.rate(), "data_wait": self._waited / self._seconds()}
        values["mfu"] = self._work / self._seconds() / self._peak if self._peak else math.nan
        self._before = self.useful
        values["goodput"] = self.goodput()
        self.restart()
        return values

    def _seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._since)


def _noted_when_ready(arrays: Any) -> list[float]:
    """A list that will hold the time at which `arrays` are computed, and is empty before; None: they are."""
    if arrays is None:
        return [time.monotonic()]
    noted = []

    def wait() -> None:
        with contextlib.suppress(Exception):  # which whoever reads the arrays will meet, too
            jax.block_until_ready(arrays)
            noted.append(time.monotonic())

    threading.Thread(target=wait, daemon=True).start()
    return noted
