"""The progress of a training, on a terminal or in a log file."""

import sys
import time

import tqdm


class Progress:
    """A progress bar from `first` to `last`; in a log file, a line every `seconds`."""

    def __init__(self, first: int, last: int, *, enabled: bool = True, seconds: float = 10.0):
        self._last, self._seconds = last, seconds
        self._started = self._shown = time.monotonic()
        self._first = first
        self._enabled = enabled
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=last, initial=first, unit="step", dynamic_ncols=True, smoothing=0.05
            )

    def update(self, step: int, values: dict[str, float]) -> None:
        """Shows `step` of the total and `values`, such as loss and tokens per second."""
        text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._enabled and time.monotonic() - self._shown >= self._seconds:
            self._shown = time.monotonic()
            left = (self._shown - self._started) / max(1, step - self._first) * (self._last - step)
            print(
                f"step {step}/{self._last}  {text}  {_clock(left)} left",
                file=sys.stderr,
                flush=True,
            )

    def note(self, text: str) -> None:
        """Prints a line of text above the bar."""
        if self._enabled:
            tqdm.tqdm.write(text, file=sys.stderr)
            sys.stderr.flush()

    def close(self) -> None:
        """Closes the bar, and leaves it on the screen."""
        if self._bar is not None:
            self._bar.close()


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )
