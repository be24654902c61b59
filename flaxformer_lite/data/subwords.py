"""Texts cut into pieces anew each epoch: BPE-dropout (Provilkov 2020) and the unigram model's sampling (Kudo 2018).

What is drawn for a text is a function of the seed, the epoch, the example's number and its side, so it is the same
after a resume and for any number of processes. Drawn ids are more than the usual ones; batches are planned with head
room for them, and a row that would not hold its texts as drawn holds their usual ids.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flaxformer_lite.data.ragged import Ragged
from flaxformer_lite.data.tokenizer import Tokenizer

MEASURED = 1000  # examples, at even distances, that the head room is measured on
SHARE = 0.9  # of the texts that fit into the head room, each by itself


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How ids of examples are drawn."""

    read: Callable[[Sequence[int]], Any]  # a `datasets.Reader`: examples by their numbers
    tokenizer: Tokenizer
    strength: float  # as in `Tokenizer.draw`
    seed: int
    start: tuple[int, ...] = ()  # ids that every text begins with

    def __call__(self, examples: np.ndarray, epoch: int) -> dict[str, Ragged]:
        """The ids of the sides that the examples have, as drawn for `epoch`."""
        texts, drawn = self.read(examples), {}
        for number, side in enumerate(("source", "target")):
            given = getattr(texts, side)
            if given is not None:
                seeds = mixed(self.seed, 2 * epoch + number, examples)
                rows = self.tokenizer.draw(given, seeds, strength=self.strength)
                drawn[side] = Ragged.of([[*self.start, *row] for row in rows] if self.start else rows)
        return drawn

    def head_room(self, usual: dict[str, Ragged]) -> dict[str, float]:
        """For each side, how many times as many ids as usual hold most texts as drawn."""
        count = len(next(iter(usual.values())))
        examples = np.unique(np.arange(MEASURED) * count // MEASURED)
        growth = {}
        for side, drawn in self(examples, 0).items():
            usual_N = np.maximum(usual[side].take(examples).lengths(), 1)
            growth[side] = max(1.0, float(np.quantile(drawn.lengths() / usual_N, SHARE)))
        return growth


def planned(length_N: np.ndarray, growth: float, longest: int) -> np.ndarray:
    """Lengths to plan with: `growth` times as many ids, but never so many that a text which fits no longer does.

    Args:
      longest: ids that the longest row holds.
    """
    grown_N = np.ceil(length_N * growth).astype(np.int64)
    return np.maximum(length_N, np.minimum(grown_N, longest))


def mixed(seed: int, stream: int, number_N: np.ndarray) -> np.ndarray:
    """A seed for each number, 0 to 2**31 - 1, any two of them unrelated (the finaliser of SplitMix64, Steele 2014)."""
    with np.errstate(over="ignore"):
        x_N = np.asarray(number_N).astype(np.uint64)
        for word in (seed, stream):
            x_N = (x_N + np.uint64(word) * np.uint64(0x9E3779B97F4A7C15)) ^ np.uint64(0x9E3779B97F4A7C15)
            x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x_N ^= x_N >> np.uint64(31)
    return (x_N >> np.uint64(33)).astype(np.int64)
