"""A stand-in for an Optuna trial that enumerates the points of a search space before a sweep."""

import random
from collections.abc import Sequence
from typing import Any

from flaxformer_lite.system.errors import InputError

SCALARS = (bool, int, float, str, type(None))  # types that both Optuna's storage and JSON keep


class Walk:
    """Answers the `suggest_...` calls of one point, and finds the path to the next point.

    `path` holds the index of the option for each parameter, in the order of the calls; later
    parameters get their first option. A continuous range has its two ends as options. With `rng`
    every parameter is sampled at random, from a continuous range too.
    """

    def __init__(self, path: list[int], rng: random.Random | None = None):
        self.params: dict[str, Any] = {}
        self.choices: dict[str, tuple[Any, ...]] = {}  # of each categorical parameter
        self.whole = True  # whether the options are all possible values
        self._path, self._rng = path, rng
        self._counts: list[int] = []

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Returns one of `choices`: strings, numbers, True, False or None."""
        if not choices or not all(isinstance(choice, SCALARS) for choice in choices):
            raise InputError(
                f"{name}: expected strings, numbers, True, False or None to choose "
                f"from, got {choices!r}."
            )
        self.choices[name] = tuple(choices)
        return self._choose(name, list(choices))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Returns an integer from `low` to `high`; `log` has no effect here."""
        _check_range(name, low, high, step if step != 1 else None, log)
        return self._choose(name, range(low, high + 1, step))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Returns a number from `low` to `high`."""
        _check_range(name, low, high, step, log)
        if step is not None:
            count = int((high - low) / step + 1e-9) + 1
            return self._choose(name, [low + i * step for i in range(count)])
        self.whole = self.whole and low == high
        if low == high or self._rng is None:
            return self._choose(name, [low, high][: 1 + (low < high)])
        sample = low * (high / low) ** self._rng.random() if log else self._rng.uniform(low, high)
        return self._choose(name, [sample])

    def next_path(self) -> list[int] | None:
        """Returns the path of the next point, the last parameter fastest; None after the last."""
        path = [*self._path, *[0] * (len(self._counts) - len(self._path))]
        while path and path[-1] + 1 == self._counts[len(path) - 1]:
            path.pop()
        return [*path[:-1], path[-1] + 1] if path else None

    def _choose(self, name: str, options: Sequence[Any]) -> Any:
        if name not in self.params:
            position = len(self._counts)
            self._counts.append(len(options))
            chosen = self._path[position] if position < len(self._path) else 0
            self.params[name] = options[self._rng.randrange(len(options)) if self._rng else chosen]
        return self.params[name]


def _check_range(name: str, low: float, high: float, step: float | None, log: bool) -> None:
    """Raises InputError for a range that Optuna would reject."""
    if low > high or (step is not None and step <= 0):
        raise InputError(
            f"{name}: expected a range from a lower to a higher number, got {low} "
            f"to {high}, step {step}."
        )
    if log and (low <= 0 or step is not None):
        raise InputError(
            f"{name}: log=True requires numbers above 0 and no step; got {low}, step {step}."
        )
