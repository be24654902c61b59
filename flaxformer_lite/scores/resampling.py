"""Confidence intervals and significance of differences, by resampling sentences.

`scoring.resample` is the function to call; it explains the 2 tests.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import sacrebleu
from sacrebleu.significance import PairedTest, estimate_ci

from flaxformer_lite.scores.symbols import quotient

ROUNDING = 1e-9  # differences of ratios below it are of rounding

Texts = Sequence[str]
Metric = sacrebleu.BLEU | sacrebleu.CHRF | sacrebleu.TER
Ratio = tuple[np.ndarray, np.ndarray]  # of sums: numerator and denominator of each sentence


class Resampled(NamedTuple):
    """A score of a system over resamples."""

    name: str
    value: float  # of the sentences as they are
    interval: tuple[float, float]  # mean and half width
    p: float | None  # by approximate randomisation; None: this is the baseline


def resample_metric(
    name: str,
    metric: Metric,
    systems: Sequence[Texts],
    *,
    references: Sequence[Texts],
    bootstrap: int,
    seed: int,
) -> tuple[list[Resampled], str]:
    """Returns a score of each system by sacreBLEU, and the signature."""
    named: list[tuple[str, Texts]] = [
        (str(number), list(hypotheses)) for number, hypotheses in enumerate(systems)
    ]
    test = functools.partial(
        PairedTest, metrics={name: metric}, references=references, n_samples=bootstrap
    )
    with _seed_of_sacrebleu(seed):
        alone = [test([system], test_type="bs")() for system in named]
        tested = test(named, test_type="ar")()[1] if len(named) > 1 else None
    ((title, signature),) = alone[0][0].items()
    if tested:
        signature.update("ar", bootstrap)
    # sacreBLEU's type of a table includes the names of systems
    rows: list[Any] = [scores[title][0] for _, scores in alone]
    results: list[Any] = list(tested[title]) if tested else []
    p_values = [result.p_value for result in results] or [None]
    return [
        Resampled(name, row.score, (float(row.mean), float(row.ci)), p)
        for row, p in zip(rows, p_values, strict=True)
    ], str(signature)


def resample_ratio(
    name: str, systems: Sequence[Ratio], *, bootstrap: int, seed: int
) -> list[Resampled]:
    """Returns a ratio of each system, resampled and tested as sacreBLEU does."""
    base_above, base_below = systems[0]
    rng, count = np.random.default_rng(seed), len(base_above)
    sampled = rng.choice(count, size=(bootstrap, count), replace=True)
    swapped = rng.integers(2, size=(bootstrap, count))  # between a system and the first one
    rows: list[Resampled] = []
    for above, below in systems:
        value, p = quotient(above, below), None
        if rows:
            moved, also = swapped @ (above - base_above), swapped @ (below - base_below)
            first = _quotients(base_above.sum() + moved, base_below.sum() + also)
            second = _quotients(above.sum() - moved, below.sum() - also)
            is_smaller = np.abs(second - first) < abs(value - rows[0].value) - ROUNDING
            p = (np.sum(~is_smaller) + 1) / (bootstrap + 1)
        samples = _quotients(above[sampled].sum(axis=1), below[sampled].sum(axis=1))
        mean, half = map(float, estimate_ci(samples))
        rows.append(Resampled(name, value, (mean, half), p))
    return rows


def _quotients(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Returns the quotients; NaN if a denominator is 0."""
    quotients = np.full(len(above), np.nan)
    np.divide(above, below, out=quotients, where=below != 0)
    return quotients


@contextlib.contextmanager
def _seed_of_sacrebleu(seed: int) -> Iterator[None]:
    """Sets the environment variable that sacreBLEU reads its seed from."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
