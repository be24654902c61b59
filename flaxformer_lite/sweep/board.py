"""The progress display of a sweep: a live table on a terminal, one line per event in a log."""

import collections
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from flaxformer_lite.sweep.study import COMPLETE, FAILED, PRUNED, RUNNING, WAITING

STATES = (COMPLETE, PRUNED, FAILED, RUNNING, WAITING)
REFRESH_SECONDS = 2.0  # minimum time between two updates of the table


class Board:
    """Writes to standard error."""

    def __init__(self, count: int):
        self._count, self._updated, self._lines = count, -REFRESH_SECONDS, 0
        self._terminal = sys.stderr.isatty()

    def print(self, text: str) -> None:
        """Prints a permanent line, above the table."""
        self._erase()
        print(text, file=sys.stderr, flush=True)

    def show(
        self, active: Sequence[tuple[int, str]], states: Callable[[], dict[int, tuple[str, str]]]
    ) -> None:
        """Updates the table: the number of points in each state and the progress of `active`.

        Does nothing without a terminal, or within `REFRESH_SECONDS` of the last update.
        """
        if not self._terminal or time.monotonic() - self._updated < REFRESH_SECONDS:
            return
        self._updated = time.monotonic()
        counts = collections.Counter(state for state, _ in states().values())
        counts["waiting"] += self._count - counts.total()
        width, height = shutil.get_terminal_size()
        summary = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        lines = [f"{self._count} points: {summary}"]
        lines += [f"{number:>5}  {text}" for number, text in active]
        self._erase()
        shown = [line[: width - 1] for line in lines[: height - 1]]
        print(*shown, sep="\n", file=sys.stderr, flush=True)
        self._lines = len(shown)

    def _erase(self) -> None:
        """Removes the table from the terminal."""
        if self._lines:
            print(f"\x1b[{self._lines}F\x1b[J", end="", file=sys.stderr)
        self._lines = 0
