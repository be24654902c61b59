"""Beam search: the most probable texts of a model by keeping the best few hypotheses. Section 6.1. Needs no model.

Each step takes the best W (the beam size) of all continuations by one token. Those that end are finished texts; the
best W that do not end stay live. The N best texts of at most T tokens are returned. The score of a text is its
log-probability over the penalty of its length, the end symbol counted. Hypotheses that reach the limit of their row
without an end symbol are cut there, and come after all finished texts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding import length_penalty
from flaxformer_lite.decoding.topk import topk
from flaxformer_lite.fields import PAD
from flaxformer_lite.system.errors import InputError

NONE = -jnp.inf  # log-probability and score of a hypothesis that does not exist

# Beams -> (log-probability of each token as the next of each live hypothesis (B, W, V), float32, -inf for a token that
# may not follow; the new cache).
StepFn = Callable[["Beams"], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Search:
    """The settings of a search."""

    beam_size: int  # W
    n_best: int  # N
    alpha: float  # exponent of the length penalty
    penalty: str  # its kind, see `length_penalty`
    max_length: int  # T
    end: int  # the end symbol

    def penalty_of(self, length: jax.Array) -> jax.Array:
        """The divisor of the log-probability of a text of `length` tokens."""
        return length_penalty.length_penalty(length, alpha=self.alpha, kind=self.penalty)


@flax.struct.dataclass
class Beams:
    """The state of a search. A row whose texts are final has no live hypotheses any more."""

    index: jax.Array  # int32: number of tokens of each live hypothesis
    live_BWT: jax.Array  # int32: their ids, then padding
    ancestor_BWT: jax.Array  # int32: which of the W cache entries of each position is the hypothesis's own past
    log_prob_BW: jax.Array  # float32: the sum of their tokens' log-probabilities
    done_BNT: jax.Array  # int32: finished texts with their end symbol, best first, then padding
    score_BN: jax.Array  # float32: their scores; -inf: there are fewer than N
    cache: Any  # is never reordered, see `ancestor_BWT`


def start(cache: Any, limit_B: jax.Array, search: Search) -> Beams:
    """Returns the state before the first token: one live hypothesis a row, the empty one.

    Args:
      cache: of the step function; W entries for each position.
      limit_B: most tokens of a row's texts, the end symbol counted; 0: an unused row.

    Raises:
      InputError: alpha is negative or too high for a text of T tokens, or N is not between 1 and W.
    """
    W, N, T = search.beam_size, search.n_best, search.max_length
    length_penalty.check(search.alpha, search.penalty, T)
    if not 1 <= N <= W:
        raise InputError(f"n_best: expected 1 to {W}, the size of the beam, got {N}.")
    B, exists_BW = len(limit_B), (jnp.arange(W) == 0)[None] & (limit_B > 0)[:, None]
    return Beams(
        index=jnp.int32(0),
        live_BWT=jnp.full((B, W, T), PAD, jnp.int32),
        ancestor_BWT=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (B, W, T)),
        log_prob_BW=jnp.where(exists_BW, jnp.float32(0), NONE),
        done_BNT=jnp.full((B, N, T), PAD, jnp.int32),
        score_BN=jnp.full((B, N), NONE, jnp.float32),
        cache=cache,
    )


def run(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search, *, until: int) -> Beams:
    """Returns the state once the texts of every row are final, or hypotheses have `until` tokens."""
    limit_B = jnp.minimum(limit_B, search.max_length)
    unfinished = lambda state: (state.index < until) & (state.log_prob_BW > NONE).any()  # noqa: E731
    return jax.lax.while_loop(unfinished, lambda state: _one_token(step_fn, state, limit_B, search), state)


def _one_token(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search) -> Beams:
    """Extends every live hypothesis by one token, or ends it."""
    index, length = state.index, state.index + 1
    log_prob_BWV, cache = step_fn(state)
    end_BW, live_BW, parent_BW, token_BW = _candidates(state.log_prob_BW[..., None] + log_prob_BWV, search)

    at_limit_B1, penalty = (length >= limit_B)[:, None], search.penalty_of(length)
    ended_BWT = _append(state.live_BWT, jnp.full_like(token_BW, search.end), index)
    live_BWT = _append(_take(state.live_BWT, parent_BW), token_BW, index)
    done_BNT, score_BN = _n_best(
        (state.done_BNT, state.score_BN),
        (ended_BWT, end_BW / penalty),
        (live_BWT, jnp.where(at_limit_B1, live_BW / penalty, NONE)),
    )
    # A hypothesis has the past of its parent up to this step; from the next step on it has cache entries of its own.
    past_11T = (jnp.arange(search.max_length) <= index)[None, None]
    ancestor_BWT = jnp.where(past_11T, _take(state.ancestor_BWT, parent_BW), state.ancestor_BWT)

    final_B1 = ~(state.log_prob_BW > NONE).any(axis=1, keepdims=True)
    done_BNT = jnp.where(final_B1[..., None], state.done_BNT, done_BNT)
    score_BN = jnp.where(final_B1, state.score_BN, score_BN)

    # When may a row stop? A log-probability s never rises, and being negative, it is divided by at most the penalty of
    # the row's limit, as for alpha >= 0 longer texts have the larger penalty. So the score of whatever a live
    # hypothesis becomes is at most s / penalty(limit). Once the N-th finished text is no worse than this bound for the
    # best live one, nothing can change. (Stopping at the first N finished texts, or comparing with
    # s / penalty(length so far), is not safe: a longer text may still overtake.)
    bound_B1 = live_BW[:, :1] / search.penalty_of(limit_B)[:, None]
    live_BW = jnp.where(at_limit_B1 | (score_BN[:, -1:] >= bound_B1), NONE, live_BW)
    return Beams(length, live_BWT, ancestor_BWT, live_BW, done_BNT, score_BN, cache)


def _candidates(total_BWV: jax.Array, search: Search) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of continuations that end (-inf: not among the best W of all), and the best W others with
    their parents and tokens; all (B, W)."""
    B, W, V = total_BWV.shape
    end_BW = total_BWV[..., search.end]
    is_end_11V = (jnp.arange(V) == search.end)[None, None]
    best_BWK, token_BWK = topk(jnp.where(is_end_11V, NONE, total_BWV), min(W, V))  # the best W of all are among them
    live_BW, index_BW = jax.lax.top_k(best_BWK.reshape(B, -1), W)
    token_BW = _take(token_BWK.reshape(B, -1), index_BW)
    worst_B1 = jax.lax.top_k(jnp.concatenate([end_BW, live_BW], axis=1), W)[0][:, -1:]
    return jnp.where(end_BW >= worst_B1, end_BW, NONE), live_BW, index_BW // min(W, V), token_BW


def _append(ids_BWT: jax.Array, token_BW: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(ids_BWT, token_BW[..., None].astype(jnp.int32), index, axis=2)


def _take(x_BW: jax.Array, index_BK: jax.Array) -> jax.Array:
    """The entries of x (B, W, ...) at the indices of each row: (B, K, ...)."""
    return jnp.take_along_axis(x_BW, index_BK.reshape(*index_BK.shape, *[1] * (x_BW.ndim - 2)), axis=1, mode="clip")


def _n_best(*groups: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The N best (ids, scores) of the N done texts, those that end now and those that are cut: the cut ones last."""
    ids_BXT, score_BX = (jnp.concatenate(parts, axis=1) for parts in zip(*groups, strict=True))
    sizes = [score.shape[1] for _, score in groups]
    is_cut_1X = (jnp.arange(sum(sizes)) >= sum(sizes[:2]))[None]
    order_BX = jnp.lexsort((-score_BX, jnp.where(score_BX > NONE, is_cut_1X, 2)))
    score_BN = _take(score_BX, order_BX[:, : sizes[0]])
    return jnp.where((score_BN > NONE)[..., None], _take(ids_BXT, order_BX[:, : sizes[0]]), PAD), score_BN
