"""The loss over a large vocabulary, in parts of the rows: all logits may not fit in memory."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# (x_BTD, weights, *rows) -> (objective, sums of metrics). Both are sums over rows.
OfRows = Callable[..., tuple[jax.Array, Any]]


def split_rows(tree: Any, parts: int) -> Any:
    """Returns the arrays split into `parts` parts along a new leading axis.

    Part m has the rows m, m + `parts`, ..., so that the parts of sharded rows stay sharded.
    """
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(x: jax.Array) -> jax.Array:
    """Returns the array that `split_rows` has split."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])


def summed(
    function: OfRows,
    x_BTD: jax.Array,
    weights: Any,
    *rows: jax.Array,
    parts: int,
    row_shards: int = 1,
) -> tuple[jax.Array, Any]:
    """Returns `function(x_BTD, weights, *rows)`, computed in `parts` parts of the rows.

    The gradient of a part is computed together with its value. Therefore large intermediate arrays,
    such as logits, are neither kept for the backward pass nor recomputed.

    Args:
      x_BTD: differentiable; split into parts.
      weights: differentiable; used whole in each part.
      rows: arrays with leading axis B, split into parts; they have no gradient.
      row_shards: how many devices the rows are split over. Each device adds up its gradients of
        `weights` over all parts, so that they are summed over devices once, not once a part.
    """
    if parts == 1:
        return function(x_BTD, weights, *rows)
    return _total(function, parts, row_shards, x_BTD, weights, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _total(
    function: OfRows,
    parts: int,
    row_shards: int,
    x_BTD: jax.Array,
    weights: Any,
    rows: tuple[jax.Array, ...],
) -> tuple[jax.Array, Any]:
    """Returns the value, without gradients."""
    sums = jax.lax.map(
        lambda part: function(part[0], weights, *part[1:]), split_rows((x_BTD, *rows), parts)
    )
    return jax.tree.map(lambda sum_M: sum_M.sum(axis=0), sums)


def _forward(
    function: OfRows,
    parts: int,
    row_shards: int,
    x_BTD: jax.Array,
    weights: Any,
    rows: tuple[jax.Array, ...],
) -> tuple[tuple[jax.Array, Any], tuple[jax.Array, Any]]:
    """Returns the value, and the gradients with respect to `x_BTD` and `weights`."""
    gradient = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
    if row_shards > 1:
        gradient = _by_shard(gradient, row_shards)

    def one_part(totals: Any, part: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        sums, (x_gradient, weights_gradient) = gradient(part[0], weights, *part[1:])
        return jax.tree.map(jnp.add, totals, (sums, weights_gradient)), x_gradient

    inputs = split_rows((x_BTD, *rows), parts)
    first = jax.tree.map(lambda x: x[0], inputs)
    sums, (_, weights_gradient) = jax.eval_shape(gradient, first[0], weights, *first[1:])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (sums, weights_gradient))
    totals, x_gradient = jax.lax.scan(one_part, zeros, inputs)
    if row_shards > 1:
        totals = jax.tree.map(lambda total_R: total_R.sum(axis=0), totals)
    return totals[0], (join_rows(x_gradient), totals[1])


def _by_shard(gradient: Callable[..., Any], row_shards: int) -> Callable[..., Any]:
    """Returns `gradient` with a leading device axis on the sums and the gradients of `weights`."""

    def of_rows(
        x_BTD: jax.Array, weights: Any, *rows: jax.Array
    ) -> tuple[Any, tuple[jax.Array, Any]]:
        x, *others = (x.reshape(row_shards, -1, *x.shape[1:]) for x in (x_BTD, *rows))
        of_shards = jax.vmap(gradient, in_axes=(0, None, *(0 for _ in others)))
        sums, (x_gradient, weights_gradient) = of_shards(x, weights, *others)
        return sums, (x_gradient.reshape(x_BTD.shape), weights_gradient)

    return of_rows


def _backward(
    function: OfRows,
    parts: int,
    row_shards: int,
    gradients: tuple[jax.Array, Any],
    cotangents: tuple[jax.Array, Any],
) -> tuple[jax.Array, Any, None]:
    """Returns the gradients computed by `_forward`, times the cotangent of the objective."""
    x_gradient, weights_gradient = jax.tree.map(
        lambda g: g * cotangents[0].astype(g.dtype), gradients
    )
    return x_gradient, weights_gradient, None


_total.defvjp(_forward, _backward)
