"""Attention masks: bool arrays that broadcast against attention weights (B, H, T, S); True = may attend."""

import functools

import jax
import jax.numpy as jnp

PAD = 0  # the token id that fills a row after its last token


def padding(ids_BS: jax.Array) -> jax.Array:
    """Hides padding keys: (B, 1, 1, S), True where `ids_BS` holds a token. Section 3.2.3."""
    return (ids_BS != PAD)[:, None, None, :]


def causal(length: int) -> jax.Array:
    """Hides the future: (1, 1, T, T), lower triangle True, as in the decoder of section 3.2.3."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]


def up_to(index: jax.Array, length: int) -> jax.Array:
    """One row of the causal mask, for the query at position `index`: (1, 1, 1, length)."""
    return (jnp.arange(length) <= index)[None, None, None, :]


def combine(*masks: jax.Array) -> jax.Array:
    """May attend only where every mask says so."""
    return functools.reduce(jnp.logical_and, masks)
