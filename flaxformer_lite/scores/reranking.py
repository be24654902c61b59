"""Reranking: of the translations in an n-best list, the one with the highest sum of scores."""

import math
from collections.abc import Sequence

import numpy as np

from flaxformer_lite.system.errors import InputError


def rerank(
    n_best: Sequence[str],
    scores: Sequence[Sequence[float]] = (),
    weights: Sequence[float] | None = None,
) -> list[str]:
    """Returns the translation of each input line with the highest weighted sum of scores.

    Of equal ones the first is returned.

    Args:
      n_best: lines as `translate --n_best` writes: the number of the input line, the score and the
        translation, with tabs between them. The numbers are 1, 2, 3 and so on.
      scores: more scores, higher is better; each has one for every line of `n_best`.
      weights: of the score in `n_best`, then of each of `scores`; None: all are 1.

    Raises:
      InputError: a line has another form, or the counts differ.
    """
    weights = [1.0] * (1 + len(scores)) if weights is None else list(weights)
    if len(weights) != 1 + len(scores):
        raise InputError(
            f"weights: expected {1 + len(scores)}, for the score of the n-best list and for "
            f"{len(scores)} more, got {len(weights)}."
        )
    for number, values in enumerate(scores, start=1):
        if len(values) != len(n_best):
            raise InputError(
                f"scores {number}: expected {len(n_best):,} numbers, one for each line of the "
                f"n-best list, got {len(values):,}."
            )
    rows = [_parsed(line, number) for number, line in enumerate(n_best, start=1)]
    columns = [[score for _, score, _ in rows], *scores]
    sum_N = np.array(weights, np.float64) @ np.array(columns, np.float64)
    chosen: list[int] = []
    for index, (number, *_) in enumerate(rows):
        if number == len(chosen) + 1:
            chosen.append(index)
        elif number != len(chosen) or not chosen:
            raise InputError(
                f"the n-best list, line {index + 1}: expected a translation of input line "
                f"{len(chosen)} or {len(chosen) + 1}, got one of {number}."
            )
        elif sum_N[index] > sum_N[chosen[-1]]:
            chosen[-1] = index
    return [rows[index][2] for index in chosen]


def _parsed(line: str, number: int) -> tuple[int, float, str]:
    """Returns the input line, the score and the translation of a line of an n-best list."""
    parts = line.split("\t", 2)
    try:
        first, score, text = int(parts[0]), float(parts[1]), parts[2]
    except (ValueError, IndexError):
        first, score, text = 0, math.nan, ""
    if not math.isfinite(score):
        raise InputError(
            f"the n-best list, line {number}: expected the number of an input line, a score and a "
            f"translation, with tabs between them, got {line[:60]!r}."
        )
    return first, score, text
