"""Losses as (sum, weight): added over microbatches and devices, and divided once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOGITS_AT_ONCE = 2**28  # that exist at a time on a device in training: 1 GiB in float32


def cross_entropy(
    logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in nats, with the label smoothing of section 5.4.

    The label has probability 1 - `label_smoothing`, and that much is spread evenly over all V tokens.

    Returns:
      (sum of `weights_BT` times the loss of each token, sum of `weights_BT`), float32 scalars.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    expected_BT = (1 - label_smoothing) * label_BT + label_smoothing * logits_BTV.mean(axis=-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - expected_BT
    return (loss_BT * weights_BT).sum(), weights_BT.sum()


def disagreement(logits_BTV: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """How far two predictions of each token are apart: the sum of its weight times KL(p || q) + KL(q || p), in nats.

    The first half of the T places has the logits of p, the second those of q, and both the same weights. Liang 2021
    (R-Drop), section 2.1. Logits may stand for log p and log q: they differ by a constant, which p's mean of log p -
    log q has in it, and q's mean of log q - log p with the other sign.
    """
    B, T, V = logits_BTV.shape
    logits_B2TV = logits_BTV.astype(jnp.float32).reshape(B, 2, T // 2, V)
    apart_B2TV = logits_B2TV - logits_B2TV[:, ::-1]
    probability_B2TV = jnp.exp(logits_B2TV - jax.nn.logsumexp(logits_B2TV, axis=-1, keepdims=True))
    return ((probability_B2TV * apart_B2TV).sum(axis=-1).reshape(B, T) * weights_BT).sum()


def parts_of(rows: int, logits_of_row: int, *, row_shards: int = 1) -> int:
    """Into how many equal parts to take `rows`, so that the logits of one are not too many for a device at once.

    `row_shards` devices share the rows evenly, and so each part of them.
    """
    mine = rows // row_shards
    fits = lambda n: n == mine or mine // n * logits_of_row <= LOGITS_AT_ONCE  # noqa: E731
    return next(n for n in range(1, mine + 1) if mine % n == 0 and fits(n))


def summed_over_parts(
    function: Callable[..., tuple[jax.Array, Any]],
    x_BTD: jax.Array,
    shared: Any,
    *rows: jax.Array,
    parts: int,
    row_shards: int = 1,
) -> tuple[jax.Array, Any]:
    """The sum of `function(x, shared, *rows)` over `parts` parts of the batch, one after another.

    `function` returns (what is minimised, sums to look at), all linear in the rows. The gradient of a part is computed
    with its value, so that what is large in between, such as logits, is neither kept for later nor computed twice.
    Part m takes every `parts`-th row, so that parts of a batch sharded over devices stay sharded; see `parts_of`.

    Args:
      x_BTD: what is differentiated, a part each.
      shared: what is differentiated too, whole in each part.
      rows: arrays with leading axis B that need no gradient.
      row_shards: how many devices share the rows. Each adds up the gradients of `shared` from its own rows over all
        parts, and holds them whole, so that they are summed over the devices once, and not in every part.
    """
    if parts == 1:
        return function(x_BTD, shared, *rows)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    @jax.custom_vjp
    def total(x_BTD: jax.Array, shared: Any) -> tuple[jax.Array, Any]:
        sums = jax.lax.map(lambda part: function(part[0], shared, *part[1:]), (split(x_BTD), *map(split, rows)))
        return jax.tree.map(lambda sum_M: sum_M.sum(axis=0), sums)

    def with_gradient(x_BTD: jax.Array, shared: Any) -> tuple[tuple[jax.Array, Any], tuple[jax.Array, Any]]:
        gradient = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
        if row_shards > 1:
            gradient = by_shard(gradient)

        def one_part(totals: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
            sums, (x_gradient, shared_gradient) = gradient(part[0], shared, *part[1:])
            return jax.tree.map(jnp.add, totals, (sums, shared_gradient)), x_gradient

        inputs = split(x_BTD), *map(split, rows)
        first = jax.tree.map(lambda x: x[0], inputs)
        sums, (_, shared_gradient) = jax.eval_shape(gradient, first[0], shared, *first[1:])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, shared_gradient))
        totals, x_gradient = jax.lax.scan(one_part, nothing, inputs)
        if row_shards > 1:
            totals = jax.tree.map(lambda total_R: total_R.sum(axis=0), totals)
        return totals[0], (join(x_gradient), totals[1])

    def by_shard(gradient: Callable) -> Callable:
        """Sums and gradients of `shared` for each device's rows, along a new leading axis."""

        def of_rows(x_BTD: jax.Array, shared: Any, *rows: jax.Array) -> tuple[Any, tuple[jax.Array, Any]]:
            x, *others = (x.reshape(row_shards, -1, *x.shape[1:]) for x in (x_BTD, *rows))
            each = jax.vmap(gradient, in_axes=(0, None, *(0 for _ in others)))
            sums, (x_gradient, shared_gradient) = each(x, shared, *others)
            return sums, (x_gradient.reshape(x_BTD.shape), shared_gradient)

        return of_rows

    def scaled(gradients: tuple[jax.Array, Any], cotangents: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)

    total.defvjp(with_gradient, scaled)
    return total(x_BTD, shared)
