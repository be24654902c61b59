"""From logits to the next token: the likeliest one, or one drawn at random from the likely ones."""

import jax
import jax.numpy as jnp


def greedy(logits_BV: jax.Array) -> jax.Array:
    """The likeliest token of each row: (B,) int32."""
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


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
