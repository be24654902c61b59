"""Mask-predict: all tokens of a text in parallel, in a few iterations. Ghazvininejad 2019.

`decode_masked` runs a model with a masked decoder. The rest does not depend on a model. Dimensions:

    C  candidates of a row, texts of different lengths      T  most tokens of a text
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.constraints import IN_NO_TEXT, forbid
from flaxformer_lite.fields import EOS, PAD, UNK, DecodeConfig
from flaxformer_lite.model.parameters import Params

NONE = -jnp.inf  # the score of a candidate that does not exist
FEWEST_POSITIONS = 16  # a size up to this is not halved

# Ids (B, C, T), some masked -> the most probable token of each position, and its log-probability.
Predict = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def decode_masked(
    model: nn.Module, config: DecodeConfig, params: Params, source_BS: jax.Array, *, max_length: int
) -> jax.Array:
    """Returns the translation of each source by mask-predict: ids (B, max_length), then padding.

    A row of padding has an empty output. The encoder runs once for all candidates of a row, texts
    of different lengths. In the decoder each candidate is a row of its own.
    """
    apply: Callable[..., Any] = functools.partial(model.apply, {"params": params})
    memory, logits_BL = apply(source_BS, method="start_filling")
    source_B = (source_BS != PAD).sum(axis=1)
    # One position is for the end symbol.
    limit_B = jnp.minimum(source_B + config.max_extra_length, max_length) - 1
    limit_B = jnp.where(source_B > 0, limit_B, 0)
    count = config.length_candidates
    length_BC, log_prob_BC = most_probable_lengths(
        logits_BL, config.min_length, limit_B, count=count
    )

    B, C = length_BC.shape
    memory, source_RS = jax.tree.map(lambda x: jnp.repeat(x, C, axis=0), (memory, source_BS))

    def predict(ids_BCT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_RTD = apply(ids_BCT.reshape(B * C, -1), memory, source_RS, method="fill")
        x_CBTD = x_RTD.reshape(B, C, *x_RTD.shape[1:]).swapaxes(0, 1)
        # One candidate after another: the logits of all at once would need C times the memory.
        best = jax.lax.map(lambda x_BTD: _most_probable(apply(x_BTD, method="logits")), x_CBTD)
        return jax.tree.map(lambda x_CBT: x_CBT.swapaxes(0, 1), best)

    def decode_within(positions: int, length_BC: jax.Array, log_prob_BC: jax.Array) -> jax.Array:
        options = {"iterations": config.iterations, "mask": UNK, "end": EOS}
        ids_BT, _ = mask_predict(predict, length_BC, log_prob_BC, max_length=positions, **options)
        return jnp.pad(ids_BT, ((0, 0), (0, max_length - positions)))

    # The cost of an iteration grows with the positions, and most texts need few. So this runs the
    # smallest of a few sizes, each half of the next, that holds the longest candidate.
    sizes = [max_length]
    while sizes[0] > FEWEST_POSITIONS:
        sizes.insert(0, -(-sizes[0] // 2))
    number = (length_BC.max() >= jnp.array(sizes[:-1], jnp.int32)).sum()
    branches = [functools.partial(decode_within, size) for size in sizes]
    return jax.lax.switch(number, branches, length_BC, log_prob_BC)


def _most_probable(logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the most probable token of each position, and its log-probability."""
    log_prob_BTV = jax.nn.log_softmax(logits_BTV)
    allowed_BTV = forbid(log_prob_BTV, (*IN_NO_TEXT, EOS))  # the length places EOS
    return jnp.argmax(allowed_BTV, axis=-1).astype(jnp.int32), allowed_BTV.max(axis=-1)


def most_probable_lengths(
    logits_BL: jax.Array, shortest: int, limit_B: jax.Array, *, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the most probable lengths of each row, best first, and their log-probabilities.

    Both are (B, count), with 0 for a length that does not exist. Section 3.3.

    Args:
      logits_BL: of the lengths 0 to L - 1.
      shortest: the minimum length, or `limit_B` if that is less; at least 1.
      limit_B: the maximum length; 0: an unused row.
    """
    length_1L = jnp.arange(logits_BL.shape[1])[None]
    lowest_B1 = jnp.maximum(jnp.minimum(shortest, limit_B), 1)[:, None]
    allowed_BL = (length_1L >= lowest_B1) & (length_1L <= limit_B[:, None])
    log_prob_BL = jnp.where(allowed_BL, jax.nn.log_softmax(logits_BL), NONE)
    log_prob_BC, length_BC = jax.lax.top_k(log_prob_BL, min(count, logits_BL.shape[1]))
    exists_BC = log_prob_BC > NONE
    return jnp.where(exists_BC, length_BC, 0), jnp.where(exists_BC, log_prob_BC, 0)


def masked_count(length: jax.Array, step: jax.Array, iterations: int) -> jax.Array:
    """Returns how many of `length` tokens are masked in iteration `step`, from 0. Section 3.1."""
    return length * (iterations - step) // iterations


def least_probable(log_prob_XT: jax.Array, length_X: jax.Array, count_X: jax.Array) -> jax.Array:
    """Returns a mask, bool (..., T), of the `count_X` lowest of the first `length_X` values.

    Of equal values the first is lower.
    """
    shape, axis = log_prob_XT.shape, log_prob_XT.ndim - 1
    in_text_XT = jax.lax.broadcasted_iota(jnp.int32, shape, axis) < length_X[..., None]
    order_XT = jnp.argsort(jnp.where(in_text_XT, log_prob_XT, jnp.inf), axis=-1)
    rank_XT = jnp.argsort(order_XT, axis=-1)
    return (rank_XT < count_X[..., None]) & in_text_XT


def mask_predict(
    predict: Predict,
    length_BC: jax.Array,
    length_log_prob_BC: jax.Array,
    *,
    iterations: int,
    max_length: int,
    mask: int,
    end: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the best candidate of each row, ids (B, T), and its score (B,). Section 3.

    The first iteration masks and predicts all tokens. Each later one masks the least probable
    tokens and predicts them from the others, which keep their ids and log-probabilities. All masked
    positions are predicted independently.

    The score is the mean log-probability of the tokens and the length, which counts as one token,
    as in the loss. The paper leaves the length out; then a text of a wrong length wins if its
    tokens predict each other with high probability.

    Args:
      length_BC: lengths of the candidates without their end symbols, less than `max_length`; 0: the
        candidate does not exist.
      length_log_prob_BC: the log-probabilities of these lengths.
      mask: the id of a masked token.
      end: the end symbol, which follows each candidate in every iteration.
    """
    shape = (*length_BC.shape, max_length)
    length_BC1 = length_BC[..., None]
    position_BCT = jax.lax.broadcasted_iota(jnp.int32, shape, 2)

    def iterate(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        ids_BCT, log_prob_BCT = state
        count_BC = masked_count(length_BC, step, iterations)
        masked_BCT = least_probable(log_prob_BCT, length_BC, count_BC)
        predicted = predict(jnp.where(masked_BCT, mask, ids_BCT))
        return jax.tree.map(lambda new, old: jnp.where(masked_BCT, new, old), predicted, state)

    ends_BCT = jnp.where((position_BCT == length_BC1) & (length_BC1 > 0), end, PAD)
    ids_BCT, log_prob_BCT = jax.lax.fori_loop(
        0, iterations, iterate, (ends_BCT, jnp.zeros(shape, jnp.float32))
    )
    total_BC = jnp.where(position_BCT < length_BC1, log_prob_BCT, 0).sum(axis=-1)
    score_BC = jnp.where(length_BC > 0, (total_BC + length_log_prob_BC) / (length_BC + 1), NONE)
    best_B = score_BC.argmax(axis=1)  # of equal scores the more probable length
    ids_BT = jnp.take_along_axis(ids_BCT, best_B[:, None, None], axis=1)[:, 0]
    return ids_BT, jnp.take_along_axis(score_BC, best_B[:, None], axis=1)[:, 0]
