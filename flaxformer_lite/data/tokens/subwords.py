"""Training texts cut anew each epoch: BPE-dropout (Provilkov 2020), or a unigram model's sampling (Kudo 2018).

What is drawn for a text is a function of the seed, the epoch, the example's number and its side, so it is the same
after a resume and for any number of processes. Drawn ids are more than the usual ones; batches are planned with head
room for them, and a row that would not hold its texts as drawn holds their usual ids.
"""

from collections.abc import Callable, Sequence

import numpy as np

from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.segmentation import Segmenter, mixed
from flaxformer_lite.data.tokens.tokenizer import Tokenizer, escape

MEASURED = 1000  # examples, at even distances, that the head room is measured on
CUT_AT_ONCE = 50  # examples, for which the cutting takes some hundred bytes a character
SHARE = 0.9  # of the texts that fit into the head room, each by itself


class Drawing:
    """The ids of examples as they are drawn for an epoch."""

    def __init__(
        self,
        read: Callable[[Sequence[int]], Examples],
        tokenizer: Tokenizer,
        *,
        kind: str,
        strength: float,
        seed: int,
        start: Sequence[int] = (),
    ):
        """
        Args:
          read: the texts of examples by their numbers, as a `Reader` gives them.
          kind: of the tokenizer, 'bpe' or 'unigram'.
          strength: the probability that a merge is left out, or the power of the likelihoods.
          start: ids that every text begins with.
        """
        self._read, self._cut = read, Segmenter(kind, *tokenizer.table())
        self._strength, self._seed, self._start = strength, seed, tuple(start)

    def __call__(self, examples: np.ndarray, epoch: int) -> dict[str, Ragged]:
        """The ids of the sides that the examples have."""
        texts, drawn = self._read(examples), {}
        for number, side in enumerate(("source", "target")):
            given = getattr(texts, side)
            if given is not None:
                keys = mixed(np.asarray(examples).astype(np.uint64), self._seed, epoch, number)
                rows = self._cut([escape(text) for text in given], keys, self._strength)
                drawn[side] = Ragged.of([[*self._start, *row] for row in rows]) if self._start else rows
        return drawn

    def head_room(self, usual: dict[str, Ragged], longest: int) -> dict[str, float]:
        """For each side, how many times as many ids as usual hold most texts as drawn.

        `longest`: ids that the longest row holds; texts of more are never drawn, and not measured either.
        """
        fit_N = np.all([side.lengths() <= longest for side in usual.values()], axis=0)
        fitting = np.flatnonzero(fit_N)
        examples = fitting[np.unique(np.arange(MEASURED) * len(fitting) // MEASURED)] if len(fitting) else fitting
        growth = {side: [] for side in usual}
        for first in range(0, len(examples), CUT_AT_ONCE):
            some = examples[first : first + CUT_AT_ONCE]
            for side, drawn in self(some, 0).items():
                growth[side].append(drawn.lengths() / np.maximum(usual[side].take(some).lengths(), 1))
        return {
            side: max(1.0, float(np.quantile(np.concatenate(parts), SHARE))) if parts else 1.0
            for side, parts in growth.items()
        }


def planned(length_N: np.ndarray, growth: float, longest: int) -> np.ndarray:
    """Lengths to plan with: `growth` times as many ids, but never so many that a text which fits no longer does.

    Args:
      longest: ids that the longest row holds.
    """
    grown_N = np.ceil(length_N * growth).astype(np.int64)
    return np.maximum(length_N, np.minimum(grown_N, longest))
