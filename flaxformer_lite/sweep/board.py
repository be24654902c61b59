"""What a sweep shows while it runs: a table that is drawn anew on a terminal, or in a log a line for each event."""

import collections
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from flaxformer_lite.sweep.study import COMPLETE, FAILED, PRUNED, RUNNING, WAITING

STATES = (COMPLETE, PRUNED, FAILED, RUNNING, WAITING)
SECONDS = 2.0  # between two drawings


class Board:
    """Writes to standard error."""

    def __init__(self, count: int):
        self._count, self._drawn, self._lines = count, -SECONDS, 0
        self._terminal = sys.stderr.isatty()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._wipe()
        print(text, file=sys.stderr, flush=True)

    def show(self, active: Sequence[tuple[int, str]], states: Callable[[], dict[int, tuple[str, str]]]) -> None:
        """Draws how many points stand how, and how far those are that run here; where there is a terminal."""
        if not self._terminal or time.monotonic() - self._drawn < SECONDS:
            return
        self._drawn = time.monotonic()
        counts = collections.Counter(state for state, _ in states().values())
        counts["waiting"] += self._count - counts.total()
        width, height = shutil.get_terminal_size()
        lines = [f"{self._count} points: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])]
        lines += [f"{number:>5}  {text}" for number, text in active]
        self._wipe()
        shown = [line[: width - 1] for line in lines[: height - 1]]
        print(*shown, sep="\n", file=sys.stderr, flush=True)
        self._lines = len(shown)

    def _wipe(self) -> None:
        """Takes the last drawing away."""
        if self._lines:
            print(f"\x1b[{self._lines}F\x1b[J", end="", file=sys.stderr)
        self._lines = 0
