"""Greedy decoding and sampling: one token after another, the most probable one or a random one.

This module does not depend on a model.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.topk import topk
from flaxformer_lite.fields import BOS, EOS, PAD

# (tokens (B,), cache, index) -> (logits of the next token (B, V), the cache with `tokens` added).
StepFn = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]]
# (logits (B, V), ids (B, T), index) -> tokens (B,); the first `index` of `ids` are the text so far.
PickFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def generate(
    step_fn: StepFn,
    start_cache: Callable[[int], Any],
    pick: PickFn,
    limit_B: jax.Array,
    *,
    capacities: Sequence[int],
) -> jax.Array:
    """Returns the generated ids (B, T) of each row, with its end symbol, then padding.

    Args:
      start_cache: returns an empty cache for a given number of positions.
      pick: chooses the next token of each row.
      limit_B: tokens after which a row ends without an end symbol; 0: an unused row.
      capacities: numbers of positions of the cache, increasing; the last is T. Each step reads the
        whole cache, so the cache is extended only when a row needs it.
    """

    def one_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, token_B, ended_B, ids_BT, cache = state
        logits_BV, cache = step_fn(token_B, cache, index)
        token_B = jnp.where(ended_B, PAD, pick(logits_BV, ids_BT, index))
        ids_BT = jax.lax.dynamic_update_slice_in_dim(ids_BT, token_B[:, None], index, axis=1)
        ended_B = ended_B | (token_B == EOS) | (index + 1 >= limit_B)
        return index + 1, token_B, ended_B, ids_BT, cache

    start_B = jnp.full(limit_B.shape, BOS, jnp.int32)
    empty_BT = jnp.full((len(start_B), capacities[-1]), PAD, jnp.int32)
    state = jnp.int32(0), start_B, limit_B <= 0, empty_BT, start_cache(capacities[0])
    for capacity in capacities:
        *rest, cache = state
        unfinished = functools.partial(_unfinished, capacity=capacity)
        state = jax.lax.while_loop(unfinished, one_token, (*rest, cache.extended(capacity)))
    return state[3]


def _unfinished(state: tuple[Any, ...], *, capacity: int) -> jax.Array:
    index, _, ended_B, _, _ = state
    return (index < capacity) & ~ended_B.all()


def greedy(logits_BV: jax.Array) -> jax.Array:
    """Returns the most probable token of each row, (B,) int32; of equal ones the first."""
    return topk(logits_BV, 1)[1][:, 0]


def sample(
    logits_BV: jax.Array,
    key: jax.Array,
    row_B: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    epsilon: float = 0.0,
) -> jax.Array:
    """Returns one token for each row, (B,) int32, sampled by softmax(logits / temperature).

    `top_k`, then `top_p`, and then `epsilon` restrict the tokens. The sample of row b is a function
    of (key, row_B[b]), so it does not depend on the other rows.
    """
    # The highest logit becomes 0: a low temperature makes no logit +inf.
    logits_BV = (logits_BV - logits_BV.max(axis=-1, keepdims=True)) / temperature
    if top_k is not None:
        logits_BV = keep_top_k(logits_BV, top_k)
    if top_p is not None and top_p < 1:
        logits_BV = keep_top_p(logits_BV, top_p)
    if epsilon:
        logits_BV = keep_epsilon(logits_BV, epsilon)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def keep_epsilon(logits_BV: jax.Array, epsilon: float) -> jax.Array:
    """Returns `logits_BV` with -inf for tokens with a probability below epsilon. Hewitt 2022.

    The most probable token of a row is kept, and those with the same logit.
    """
    log_prob_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    lowest_B1 = jnp.minimum(jnp.log(epsilon), log_prob_BV.max(axis=-1, keepdims=True))
    return jnp.where(log_prob_BV < lowest_B1, -jnp.inf, logits_BV)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """Returns `logits_BV` with -inf for all tokens except the k most probable of a row. Fan 2018.

    Tokens with the same logit as the k-th are kept too.
    """
    lowest_B1 = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Returns `logits_BV` with -inf for all tokens outside the nucleus of a row. Holtzman 2020.

    The nucleus is the fewest most probable tokens whose probabilities add up to p or more. Tokens
    with the same logit as the last of them are kept too.
    """
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    share_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # the sum over more probable tokens
    lowest_B1 = jnp.where(before_BV < p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
