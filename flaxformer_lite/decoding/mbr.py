"""Minimum Bayes risk: of candidate translations, the one that is most similar to all others.

The candidates are samples of the model, or an n-best list, and also the pseudo-references (Kumar
2004; with samples Eikema 2020). This module does not depend on a model.
"""

from collections.abc import Callable, Sequence

import numpy as np

from flaxformer_lite.field_rules import BEAMS
from flaxformer_lite.scores.utilities import Utility, checked
from flaxformer_lite.system.errors import InputError

# Sample s of the text with number n is sampled with the number n + s * SAMPLE_STRIDE.
SAMPLE_STRIDE, NUMBERS = 7_368_787, 2**31


def expected_utilities(candidates: Sequence[str], utility: Utility) -> np.ndarray:
    """Returns the mean utility of each candidate against all others, (N,) float64.

    A candidate that occurs several times counts as often as it occurs. A single candidate has no
    others, and the mean is NaN.

    Args:
      utility: is called once, with each pair of different texts once.

    Raises:
      InputError: the utility returns other than finite numbers.
    """
    texts = list(dict.fromkeys(candidates))
    index_of = {text: index for index, text in enumerate(texts)}
    index_N = np.array([index_of[text] for text in candidates], np.int64)
    # How often text v is a reference of one candidate with text u: not of itself.
    weight_UU = np.bincount(index_N, minlength=len(texts)) - np.eye(len(texts), dtype=np.int64)
    pairs = np.argwhere(weight_UU)
    value_UU = np.zeros(weight_UU.shape)
    if len(pairs):
        value_UU[tuple(pairs.T)] = checked(
            utility([texts[u] for u, _ in pairs], [texts[v] for _, v in pairs]), len(pairs)
        )
    others = len(candidates) - 1
    mean_U = (weight_UU * value_UU).sum(axis=1) / others if others else np.full(len(texts), np.nan)
    return mean_U[index_N]


def best(candidates: Sequence[str], utility: Utility) -> str:
    """Returns the candidate with the highest expected utility; of equal ones the first.

    Raises:
      InputError: see `expected_utilities`.
    """
    if len(set(candidates)) == 1:
        return candidates[0]
    return candidates[int(expected_utilities(candidates, utility).argmax())]


class MbrRule:
    """Translates arrays of ids by minimum Bayes risk."""

    def __init__(
        self,
        translate: Callable[..., list[str]],
        n_best: Callable[..., list[list[tuple[str, float]]]],
        *,
        method: str,
        candidates: int,
        utility: Utility,
    ):
        """
        Args:
          translate: (sources, prefixes, numbers) -> a translation of each source.
          n_best: (sources, n, prefixes, numbers) -> the n best of each source, with their scores.
          method: `decode.method` of both.
          candidates: their number for each source, 2 or more.

        Raises:
          InputError: the method makes one translation of a source.
        """
        if method not in ("sample", *BEAMS):
            raise InputError(
                "mbr: chooses between several translations of a text, and decode.method="
                f"{method!r} makes one; set it to {' or '.join(map(repr, ('sample', *BEAMS)))}."
            )
        self._translate, self._n_best = translate, n_best
        self._method, self._candidates, self._utility = method, candidates, utility

    def __call__(
        self,
        sources: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[str]:
        """Returns the translation of each source.

        Args:
          numbers: the samples of each source depend on its number; None: 0, 1, 2, ... The first
            sample is the translation without this rule.

        Raises:
          InputError: the beam has fewer hypotheses than there are candidates.
        """
        n = self._candidates
        if self._method in BEAMS:
            found = self._n_best(sources, n, prefixes, numbers)
            return [best([text for text, _ in row], self._utility) for row in found]
        numbers = range(len(sources)) if numbers is None else numbers
        texts = self._translate(
            [ids for ids in sources for _ in range(n)],
            None if prefixes is None else [ids for ids in prefixes for _ in range(n)],
            [(number + s * SAMPLE_STRIDE) % NUMBERS for number in numbers for s in range(n)],
        )
        starts = range(0, len(texts), n)
        return [best(texts[start : start + n], self._utility) for start in starts]
