"""Metrics as {name: (sum, weight)}: add as often as you like, divide once."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

Sums = dict[str, tuple[jax.Array, jax.Array]]


def correct_tokens(logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weighted number of tokens whose label has the highest logit, sum of `weights_BT`)."""
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    hit_BT = label_BT >= logits_BTV.max(axis=-1)  # on a CPU a maximum is several times faster than an argmax
    return (hit_BT * weights_BT).sum(), weights_BT.sum()


def add(first: Sums | None, second: Sums) -> Sums:
    """Sums and weights of both; None counts as nothing."""
    return second if first is None else jax.tree.map(lambda a, b: a + b, first, second)


def divide(sums: Sums) -> dict[str, float]:
    """Each sum over its weight, as Python floats; NaN where the weight is zero."""
    return {name: float(total) / float(weight) if weight else math.nan for name, (total, weight) in sums.items()}


def with_perplexity(values: Mapping[str, float]) -> dict[str, float]:
    """`values` and exp(loss), infinite where that is too large for a float."""
    try:
        return {**values, "perplexity": math.exp(values["loss"])}
    except OverflowError:
        return {**values, "perplexity": math.inf}


def score(values: Mapping[str, float], metric: str) -> float:
    """How good `values` are by `metric`, higher is better: it, or minus the loss; what is not finite is worst."""
    value = values[metric]
    if value is None or not math.isfinite(value):  # None is how a log that is JSON tells it
        return -math.inf
    return -value if metric == "loss" else value
