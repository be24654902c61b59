"""Constraints on the next token: the logits, or log-probabilities, of forbidden tokens are -inf."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from flaxformer_lite.fields import (
    BOS,
    EOS,
    PAD,
    UNK,
    DecodeConfig,
)

IN_NO_TEXT = PAD, BOS, UNK  # no method generates these


# Sequences of ids that no text contains.
Forbidden = Sequence[Sequence[int]]


def constrain(
    config: DecodeConfig,
    logits: jax.Array,
    ids: jax.Array,
    index: jax.Array,
    forbidden: Forbidden = (),
) -> jax.Array:
    """Returns `logits` (..., V) with -inf for each token that `config` forbids next.

    `ids` (..., T): the first `index` of them are the text so far. `forbidden`: the ids of
    `config.forbidden`.
    """
    logits = forbid(logits, IN_NO_TEXT)
    if forbidden:
        logits = no_forbidden_sequence(logits, ids, index, forbidden)
    if config.no_repeat_ngram is not None:
        logits = no_repeated_ngram(logits, ids, index, n=config.no_repeat_ngram)
    if config.min_length:
        logits = no_early_end(logits, index, min_length=config.min_length, end=EOS)
    return logits


def forbid(logits: jax.Array, tokens: Sequence[int]) -> jax.Array:
    """Returns `logits` (..., V) with -inf for `tokens`."""
    forbidden_V = jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(tokens))
    return jnp.where(jnp.broadcast_to(forbidden_V, logits.shape), -jnp.inf, logits)


def force(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Returns `logits` (..., V) with -inf for all tokens except `token` (...)."""
    return jnp.where(jax.nn.one_hot(token, logits.shape[-1], dtype=bool), logits, -jnp.inf)


def no_early_end(logits: jax.Array, length: jax.Array, *, min_length: int, end: int) -> jax.Array:
    """Returns `logits` (..., V) with -inf for the end symbol after fewer than `min_length` tokens.

    The end symbol stays if no other token is allowed. `length`: the number of tokens so far.
    """
    others = forbid(logits, [end])
    too_short = (length < min_length) & (others > -jnp.inf).any(axis=-1, keepdims=True)
    return jnp.where(too_short, others, logits)


def no_forbidden_sequence(
    logits: jax.Array, ids: jax.Array, length: jax.Array, sequences: Forbidden
) -> jax.Array:
    """Returns `logits` (..., V) with -inf for each token that would complete one of `sequences`.

    `ids` (..., T): the first `length` of them are the text so far. A sequence of n ids forbids its
    last id after its first n - 1.
    """
    V, T = logits.shape[-1], ids.shape[-1]
    for n in sorted({len(sequence) for sequence in sequences}):
        if n > T + 1:
            continue  # no text is that long
        ids_SN = jnp.array([sequence for sequence in sequences if len(sequence) == n], jnp.int32)
        shape = (*ids.shape[:-1], len(ids_SN))
        complete = jnp.broadcast_to(length >= n - 1, shape)
        for i in range(n - 1):
            last = jax.lax.dynamic_index_in_dim(ids, length - n + 1 + i, axis=-1)
            complete &= last == jnp.broadcast_to(ids_SN[:, i], shape)
        token = jnp.where(complete, jnp.broadcast_to(ids_SN[:, -1], shape), V)  # V: none
        token_XS = token.reshape(-1, len(ids_SN))
        row_X1 = jnp.arange(token_XS.shape[0])[:, None]
        logits_XV = logits.reshape(-1, V).at[row_X1, token_XS].set(-jnp.inf, mode="drop")
        logits = logits_XV.reshape(logits.shape)
    return logits


def no_repeated_ngram(logits: jax.Array, ids: jax.Array, length: jax.Array, *, n: int) -> jax.Array:
    """Returns `logits` (..., V) with -inf for each token that would repeat an n-gram. Paulus 2018.

    `ids` (..., T): the first `length` of them are the text so far.
    """
    starts = ids.shape[-1] - n + 1
    if starts < 1:
        return logits
    start = jax.lax.broadcasted_iota(jnp.int32, (*ids.shape[:-1], starts), ids.ndim - 1)
    # Whether the n-gram from `start` is within the text and its first n - 1 tokens are the last
    # n - 1 of the text. In a text of fewer tokens, no n-gram is within the text.
    repeated = length - start >= n
    for i in range(n - 1):
        last = jax.lax.dynamic_index_in_dim(ids, length - n + 1 + i, axis=-1)
        repeated &= ids[..., i : i + starts] == last
    V = logits.shape[-1]
    token_XT = jnp.where(repeated, ids[..., n - 1 :], V).reshape(-1, starts)  # V: none
    row_X1 = jnp.arange(token_XT.shape[0])[:, None]
    logits_XV = logits.reshape(-1, V).at[row_X1, token_XT].set(-jnp.inf, mode="drop")
    return logits_XV.reshape(logits.shape)
