"""Beam search: the most probable texts of a model by keeping the best few hypotheses. Section 6.1.

    W  hypotheses that are kept (the beam size)      N  texts that are wanted      T  most tokens of a text

Each step looks at the best W of all continuations by one token. Those that end are finished texts; the best W that do
not end live on. With a beam as wide as the number of hypotheses that exist, this is exhaustive search.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.topk import topk

PAD = 0  # the token id that fills a row after its last token
NONE = -jnp.inf  # the log-probability and the score of a hypothesis that does not exist
LARGEST = float(jnp.finfo(jnp.float32).max)  # value of a penalty

# What the log-probability of a text of `length` tokens, the end symbol among them, is divided by, before the power.
PENALTIES = {
    "wu": lambda length: (5.0 + length) / 6.0,  # Wu 2016, equation 14
    "power": lambda length: 1.0 * length,  # as Hugging Face and CTranslate2 have it
}

# Beams -> (log-probability of each token as the next of each live hypothesis (B, W, V), float32, -inf for a token that
# may not follow; the new cache).
StepFn = Callable[["Beams"], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched for."""

    beam_size: int  # W
    n_best: int  # N
    alpha: float  # exponent of the length penalty
    penalty: str  # a name of PENALTIES
    max_length: int  # T
    end: int  # the end symbol


@flax.struct.dataclass
class Beams:
    """The state of a search. A row whose texts are final has no live hypotheses any more.

    The cache is never reordered: `ancestor_BWT` says where the past of each hypothesis is stored.
    """

    index: jax.Array  # int32: number of tokens of each live hypothesis
    live_BWT: jax.Array  # int32: their ids, then padding
    ancestor_BWT: jax.Array  # int32: 0 to W - 1: which cache entry of position t is the hypothesis's own, t <= index
    log_prob_BW: jax.Array  # float32: the sum of their tokens' log-probabilities
    done_BNT: jax.Array  # int32: finished texts with their end symbol, best first, then padding
    score_BN: jax.Array  # float32: their log-probabilities over their length penalties
    cache: Any


def length_penalty(length: jax.Array | float, search: Search) -> jax.Array | float:
    """The divisor of the log-probability of a text of `length` tokens, its end symbol included; it never decreases."""
    return PENALTIES[search.penalty](length) ** search.alpha


def beam_search(step_fn: StepFn, cache: Any, limit_B: jax.Array, search: Search) -> tuple[jax.Array, jax.Array]:
    """The N best texts of each row, best first: ids (B, N, T) with their end symbol, and scores (B, N).

    The score of a text is its log-probability over the penalty of its length, the end symbol counted. Hypotheses that
    reach their row's limit without an end symbol are cut there, and come after all texts that ended. Where there are
    fewer than N, the rest is padding with the score -inf.

    Args:
      cache: what `step_fn` keeps between steps; W entries for each position.
      limit_B: most tokens of a row's texts, the end symbol counted; 0: an unused row.

    Raises:
      ValueError: alpha is negative or too high for a text of T tokens, or N is not between 1 and W.
    """
    state = run(step_fn, start(cache, limit_B, search), limit_B, search, until=search.max_length)
    return state.done_BNT, state.score_BN


def start(cache: Any, limit_B: jax.Array, search: Search) -> Beams:
    """The state before the first token: one live hypothesis a row, the empty one. Arguments as of `beam_search`."""
    if not search.alpha >= 0:
        raise ValueError(f"alpha: expected 0 or more, got {search.alpha}; below 0 no bound would end the search.")
    if search.alpha * math.log(PENALTIES[search.penalty](search.max_length)) > math.log(LARGEST):
        raise ValueError(f"alpha: {search.alpha} makes the penalty of {search.max_length} tokens infinite; lower it.")
    if not 1 <= search.n_best <= search.beam_size:
        raise ValueError(f"n_best: expected 1 to {search.beam_size}, the size of the beam, got {search.n_best}.")
    batch, (W, N, T) = limit_B.shape[0], (search.beam_size, search.n_best, search.max_length)
    exists_BW = (jnp.arange(W) == 0)[None] & (limit_B > 0)[:, None]
    return Beams(
        index=jnp.int32(0),
        live_BWT=jnp.full((batch, W, T), PAD, jnp.int32),
        ancestor_BWT=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (batch, W, T)),
        log_prob_BW=jnp.where(exists_BW, jnp.float32(0), NONE),
        done_BNT=jnp.full((batch, N, T), PAD, jnp.int32),
        score_BN=jnp.full((batch, N), NONE, jnp.float32),
        cache=cache,
    )


def run(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search, *, until: int) -> Beams:
    """The state once the texts of every row are final, or hypotheses have `until` tokens."""
    limit_B = jnp.minimum(limit_B, search.max_length)
    return jax.lax.while_loop(
        lambda state: (state.index < until) & (state.log_prob_BW > NONE).any(),
        lambda state: _one_token(step_fn, state, limit_B, search),
        state,
    )


def _one_token(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search) -> Beams:
    """Extends every live hypothesis by one token, or ends it."""
    index, length = state.index, state.index + 1
    log_prob_BWV, cache = step_fn(state)
    end_BW, live_BW, parent_BW, token_BW = _candidates(state.log_prob_BW[..., None] + log_prob_BWV, search)

    ended_BWT = _write(state.live_BWT, jnp.full_like(token_BW, search.end), index)
    done = _best((state.done_BNT, state.score_BN), (ended_BWT, end_BW / length_penalty(length, search)))

    live_BWT = _write(_rows_at(state.live_BWT, parent_BW), token_BW, index)
    # A hypothesis has the past of its parent up to this step; from the next step on it writes entries of its own.
    past_11T = (jnp.arange(search.max_length) <= index)[None, None]
    ancestor_BWT = jnp.where(past_11T, _rows_at(state.ancestor_BWT, parent_BW), state.ancestor_BWT)

    at_limit_B1 = (length >= limit_B)[:, None]
    cut_BW = jnp.where(at_limit_B1, live_BW / length_penalty(length, search), NONE)
    done_BNT, score_BN = _fill(done, (live_BWT, cut_BW))
    final_B1 = ~(state.log_prob_BW > NONE).any(axis=1, keepdims=True)
    done_BNT = jnp.where(final_B1[..., None], state.done_BNT, done_BNT)
    score_BN = jnp.where(final_B1, state.score_BN, score_BN)

    # When may a row stop? A log-probability never rises, and being negative, it is divided by a penalty that is at most
    # that of the row's limit, as for alpha >= 0 longer texts have the larger penalty. So whatever a live hypothesis of
    # log-probability s becomes, its score is at most s / penalty(limit). Once the N-th finished text is no worse than
    # this bound for the best live one, nothing can change. (Stopping at the first N finished texts, or comparing with
    # s / penalty(length so far), is not safe: a longer text may still overtake.)
    bound_B1 = live_BW[:, :1] / length_penalty(limit_B, search)[:, None]
    live_BW = jnp.where(at_limit_B1 | (score_BN[:, -1:] >= bound_B1), NONE, live_BW)
    return Beams(length, live_BWT, ancestor_BWT, live_BW, done_BNT, score_BN, cache)


def _candidates(total_BWV: jax.Array, search: Search) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of the log-probabilities of all continuations those that end, and the best W that do not: (B, W) each.

    An end that is not among the best W of all is -inf: a beam holds W hypotheses, and it would not be one of them.
    The last two are, of each continuation that does not end, the hypothesis that it extends and its token.
    """
    B, W, V = total_BWV.shape
    end_BW = total_BWV[..., search.end]
    is_end_11V = (jnp.arange(V) == search.end)[None, None]
    # The best W of all are among the best W of each hypothesis.
    best_BWK, token_BWK = topk(jnp.where(is_end_11V, NONE, total_BWV), min(W, V))
    live_BW, place_BW = jax.lax.top_k(best_BWK.reshape(B, -1), W)
    token_BW = _rows_at(token_BWK.reshape(B, -1), place_BW)
    worst_B1 = jax.lax.top_k(jnp.concatenate([end_BW, live_BW], axis=1), W)[0][:, -1:]
    return jnp.where(end_BW >= worst_B1, end_BW, NONE), live_BW, place_BW // min(W, V), token_BW


def _write(ids_BWT: jax.Array, token_BW: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(ids_BWT, token_BW[..., None].astype(jnp.int32), index, axis=2)


def _rows_at(x_BW: jax.Array, place_BK: jax.Array) -> jax.Array:
    """The entries of x (B, W, ...) at the places of each row: (B, K, ...)."""
    return jnp.take_along_axis(x_BW, place_BK.reshape(*place_BK.shape, *[1] * (x_BW.ndim - 2)), axis=1, mode="clip")


def _best(done: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The N best of N done texts and some new ones; of equals, the done ones."""
    ids_BXT, score_BX = (jnp.concatenate(parts, axis=1) for parts in zip(done, new, strict=True))
    score_BN, place_BN = jax.lax.top_k(score_BX, done[1].shape[1])
    return _rows_at(ids_BXT, place_BN), score_BN


def _fill(done: tuple[jax.Array, jax.Array], cut: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The N done texts, free places filled with texts that were cut; both best first."""
    ids_BXT, score_BX = (jnp.concatenate(parts, axis=1) for parts in zip(done, cut, strict=True))
    place_BN = jnp.argsort(score_BX == NONE, axis=1, stable=True)[:, : done[1].shape[1]]
    score_BN = _rows_at(score_BX, place_BN)
    return jnp.where((score_BN > NONE)[..., None], _rows_at(ids_BXT, place_BN), PAD), score_BN
