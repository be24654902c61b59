"""Metrics as {name: (sum, weight)}. They are added over batches, then divided once."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from flaxformer_lite.field_rules import LOWER_IS_BETTER

Sums = dict[str, tuple[jax.Array, jax.Array]]


def correct_tokens(
    logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (sum of the weights of correctly predicted tokens, sum of all weights)."""
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    # on a CPU a maximum is several times faster than an argmax
    hit_BT = label_BT >= logits_BTV.max(axis=-1)
    return (hit_BT * weights_BT).sum(), weights_BT.sum()


def add(first: Sums | None, second: Sums) -> Sums:
    """Returns the sums and weights of both added up; `first` may be None."""
    return second if first is None else jax.tree.map(lambda a, b: a + b, first, second)


def divide(sums: Sums) -> dict[str, float]:
    """Returns each sum divided by its weight, as Python floats; NaN for a weight of 0."""
    return {
        name: float(total) / float(weight) if weight else math.nan
        for name, (total, weight) in sums.items()
    }


def with_perplexity(values: Mapping[str, float]) -> dict[str, float]:
    """Returns `values` and the perplexity exp(loss), infinite if a float overflows."""
    try:
        return {**values, "perplexity": math.exp(values["loss"])}
    except OverflowError:
        return {**values, "perplexity": math.inf}


def score(values: Mapping[str, float], metric: str) -> float:
    """Returns `values[metric]`, negated if lower is better: the loss; -inf if not finite."""
    value = values[metric]
    if value is None or not math.isfinite(value):  # a JSON log has null for NaN and infinity
        return -math.inf
    return -value if metric in LOWER_IS_BETTER else value
