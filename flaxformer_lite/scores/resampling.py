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
    # of the difference from the baseline, None for the baseline itself
    p: float | None  # by approximate randomisation
    bootstrap_p: float | None  # by the paired bootstrap


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
        signatures, sampled = test(named, test_type="bs")()
        swapped = test(named, test_type="ar")()[1] if len(named) > 1 else sampled
    ((title, signature),) = signatures.items()
    if len(named) > 1:
        signature.update("ar", bootstrap)
    # sacreBLEU's type of a table includes the names of systems
    rows: list[Any] = list(zip(sampled[title], swapped[title], strict=True))
    base = rows[0][0].score
    lowest = [_lowest_p(systems[0], each) for each in systems]
    return [
        Resampled(
            name,
            float(one.score),
            (float(one.mean), float(one.ci)),
            _p(other.p_value, one.score, base, least),
            _p(one.p_value, one.score, base),
        )
        for (one, other), least in zip(rows, lowest, strict=True)
    ], str(signature)


def _lowest_p(base: Texts, system: Texts) -> float:
    """Returns the lowest p that approximate randomisation can have: 1/2 if 2 sentences differ.

    If n sentences differ, 2 of the 2^n ways to swap them leave the whole difference: none of them,
    and all. sacreBLEU counts neither of the 2, so its p is too low if few sentences differ.
    """
    differ = sum(mine != its for mine, its in zip(base, system, strict=True))
    return min(1.0, 2.0 ** (1 - differ))


def _p(p: float | None, value: float, base: float, lowest: float = 0.0) -> float | None:
    """Returns p, or `lowest`; 1 for equal scores, for which sacreBLEU returns the lowest p."""
    return p if p is None else 1.0 if value == base else max(lowest, float(p))


def resample_ratio(
    name: str, systems: Sequence[Ratio], *, bootstrap: int, seed: int
) -> list[Resampled]:
    """Returns a ratio of each system, resampled and tested as sacreBLEU does."""
    rng, count = np.random.default_rng(seed), len(systems[0][0])
    sampled = rng.choice(count, size=(bootstrap, count), replace=True)
    swapped = rng.integers(2, size=(bootstrap, count))  # between a system and the first one
    values = [quotient(above, below) for above, below in systems]
    samples = [
        _quotients(above[sampled].sum(axis=1), below[sampled].sum(axis=1))
        for above, below in systems
    ]
    rows: list[Resampled] = []
    for number, value in enumerate(values):
        p = bootstrap_p = None
        if number:
            difference = abs(value - values[0])
            is_equal = value == values[0]
            after = _differences_after_swaps(systems[0], systems[number], swapped)
            p = 1.0 if is_equal else _share_as_large(after, difference)
            apart = np.abs(samples[number] - samples[0])
            centred = apart - np.nanmean(apart) if np.isfinite(apart).any() else apart
            bootstrap_p = 1.0 if is_equal else _share_as_large(centred, difference)
        mean, half = map(float, estimate_ci(samples[number]))
        rows.append(Resampled(name, value, (mean, half), p, bootstrap_p))
    return rows


def _differences_after_swaps(base: Ratio, system: Ratio, swapped: np.ndarray) -> np.ndarray:
    """Returns the absolute difference of 2 ratios after each trial; `swapped`: (trials, N)."""
    moved, also = (swapped @ (its - bases) for bases, its in zip(base, system, strict=True))
    first = _quotients(base[0].sum() + moved, base[1].sum() + also)
    second = _quotients(system[0].sum() - moved, system[1].sum() - also)
    return np.abs(second - first)


def _share_as_large(differences: np.ndarray, difference: float) -> float:
    """Returns p: the share of differences that are as large or NaN, the observed one included."""
    is_smaller = differences < difference - ROUNDING
    return float(np.sum(~is_smaller) + 1) / (len(differences) + 1)


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
