"""From logits to the next token: what may not follow, and of the rest the most probable token, or a random one.

What may not follow gets the logit -inf. That part takes log-probabilities as well.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.topk import topk


def forbid(logits: jax.Array, tokens: Sequence[int]) -> jax.Array:
    """`logits` (..., V) with -inf for `tokens`."""
    forbidden_V = jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(tokens))
    return jnp.where(jnp.broadcast_to(forbidden_V, logits.shape), -jnp.inf, logits)


def force(logits: jax.Array, token: jax.Array) -> jax.Array:
    """`logits` (..., V) with -inf for all but `token` (...)."""
    return jnp.where(jax.nn.one_hot(token, logits.shape[-1], dtype=bool), logits, -jnp.inf)


def no_early_end(logits: jax.Array, length: jax.Array, *, min_length: int, end: int) -> jax.Array:
    """`logits` (..., V) with -inf for the end symbol after fewer than `min_length` tokens, unless nothing else is left.

    `length`: number of tokens so far.
    """
    others = forbid(logits, [end])
    too_short = (length < min_length) & (others > -jnp.inf).any(axis=-1, keepdims=True)
    return jnp.where(too_short, others, logits)


def no_repeated_ngram(logits: jax.Array, ids: jax.Array, length: jax.Array, *, n: int) -> jax.Array:
    """`logits` (..., V) with -inf for every token that would end an n-gram which the text already has. Paulus 2018.

    `ids` (..., T): the first `length` of them are the text so far.
    """
    starts = ids.shape[-1] - n + 1
    if starts < 1:
        return logits
    remaining = length - jax.lax.broadcasted_iota(jnp.int32, (*ids.shape[:-1], starts), ids.ndim - 1)
    again = remaining >= n  # the n-gram that starts there is in the text,
    for i in range(n - 1):  # and begins with the last n - 1 tokens of the text
        last = jax.lax.dynamic_index_in_dim(ids, length - n + 1 + i, axis=-1)  # any token, in a shorter text
        again &= ids[..., i : i + starts] == last
    V = logits.shape[-1]
    token_XT = jnp.where(again, ids[..., n - 1 :], V).reshape(-1, starts)  # V: none
    row_X1 = jnp.arange(token_XT.shape[0])[:, None]
    return logits.reshape(-1, V).at[row_X1, token_XT].set(-jnp.inf, mode="drop").reshape(logits.shape)


def greedy(logits_BV: jax.Array) -> jax.Array:
    """The most probable token of each row, (B,) int32; of equals the first."""
    return topk(logits_BV, 1)[1][:, 0]


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """`logits_BV` with -inf for all but the k highest of each row (and those equal to the k-th). Fan 2018."""
    lowest_B1 = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """`logits_BV` with -inf for all but the fewest likeliest tokens whose probabilities reach p. Holtzman 2020."""
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    share_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # what the likelier tokens already have
    lowest_B1 = jnp.where(before_BV < p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)


def sample(
    logits_BV: jax.Array,
    key: jax.Array,
    row_B: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> jax.Array:
    """One token a row, (B,) int32, by softmax(logits / temperature) over what `top_k`, then `top_p`, leave.

    Row b draws as a function of (key, row_B[b]), so that it does not depend on its batch.
    """
    logits_BV = (logits_BV - logits_BV.max(axis=-1, keepdims=True)) / temperature  # so that none becomes infinite
    if top_k is not None:
        logits_BV = keep_top_k(logits_BV, top_k)
    if top_p is not None and top_p < 1:
        logits_BV = keep_top_p(logits_BV, top_p)
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(row_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
