"""Beam search: the likeliest texts of a model by keeping the best few beginnings. Section 6.1; it knows no model.

    W  hypotheses that are kept (the beam)      N  texts that are wanted      T  most tokens of a text

Of all ways to go on by one token, the best W are looked at in each step. Those that end are finished texts; the best W
that do not end live on. With a beam as wide as the number of beginnings that there are, this is exhaustive search.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.highest import entries_at, top_k

PAD = 0  # the token id that fills a row after its last token
NONE = -jnp.inf  # the log-probability and the score of a hypothesis that does not exist
HIGHEST = float(jnp.finfo(jnp.float32).max)  # that a penalty may be

# What the log-probability of a text of `length` tokens, the end symbol among them, is divided by, before the power.
PENALTIES = {
    "wu": lambda length: (5.0 + length) / 6.0,  # Wu 2016, equation 14
    "power": lambda length: 1.0 * length,  # as Hugging Face and CTranslate2 have it
}

# Beams -> (how each live hypothesis may go on, cache). What the function wants to know later of this step it keeps in
# the cache, which has W parts.
StepFn = Callable[["Beams"], tuple["Ways", Any]]


class Ways(NamedTuple):
    """What may follow each live hypothesis; the log-probability of a token is its logit less `log_sum_BW`.

    It is left to the search to subtract that, from the few logits that it looks at. V comes first, as a CPU makes the
    logits of few rows soonest.
    """

    logit_VBW: jax.Array  # float32; -inf for a token that may not follow; the end and `Search.never` may have any
    end_BW: jax.Array  # float32: the logit of the end symbol; -inf where it may not follow
    log_sum_BW: jax.Array  # float32: `log_sum_exp` of the logits of all tokens, also of those that may not follow


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched for."""

    beam_size: int  # W
    n_best: int  # N
    alpha: float  # of the length penalty
    penalty: str  # which one, of PENALTIES
    max_length: int  # T
    end: int  # the end symbol
    never: tuple[int, ...] = ()  # tokens that are in no text


@flax.struct.dataclass
class Beams:
    """Where a search stands. A row whose texts are certain has no live hypotheses any more.

    The cache never moves: `part_BWT` tells where the past of each hypothesis lies. Moving it would read and write all
    of it for each token, a third of all the time that a search takes on a CPU.
    """

    index: jax.Array  # int32: the tokens of each live hypothesis
    live_BWT: jax.Array  # int32: their ids, then padding
    part_BWT: jax.Array  # int32: in whose part of the cache, 0 to W - 1, step t kept what it saw, t <= index
    log_prob_BW: jax.Array  # float32: the sum of their tokens' log-probabilities
    done_BNT: jax.Array  # int32: finished texts with their end symbol, best first, then padding
    score_BN: jax.Array  # float32: their log-probabilities over their length penalties
    cache: Any


def length_penalty(length: jax.Array | float, search: Search) -> jax.Array | float:
    """What the log-probability of so many tokens, the end symbol among them, is divided by; it never falls."""
    return PENALTIES[search.penalty](length) ** search.alpha


def beam_search(step_fn: StepFn, cache: Any, limit_B: jax.Array, search: Search) -> tuple[jax.Array, jax.Array]:
    """The N best texts of each row, best first: ids (B, N, T) with their end symbol, and scores (B, N).

    The score of a text is its log-probability over the penalty of its length, the end symbol counted. Hypotheses that
    reach their row's limit without an end symbol are cut there, and come after all texts that ended. Where there are
    fewer than N, the rest is padding with the score -inf.

    Args:
      cache: what `step_fn` keeps between steps, one part for each of the W hypotheses of a row.
      limit_B: most tokens of a row's texts, the end symbol counted; 0: an unused row.

    Raises:
      ValueError: alpha is negative or too high for a text of T tokens, or more texts are wanted than the beam holds.
    """
    state = run(step_fn, start(cache, limit_B, search), limit_B, search)
    return state.done_BNT, state.score_BN


def start(cache: Any, limit_B: jax.Array, search: Search) -> Beams:
    """One live hypothesis a row, the empty one. Arguments and errors as in `beam_search`."""
    if not search.alpha >= 0:
        raise ValueError(f"alpha: expected 0 or more, got {search.alpha}; below 0 no bound would end the search.")
    if search.alpha * math.log(PENALTIES[search.penalty](search.max_length)) > math.log(HIGHEST):
        raise ValueError(f"alpha: {search.alpha} makes the penalty of {search.max_length} tokens infinite; lower it.")
    if not 1 <= search.n_best <= search.beam_size:
        raise ValueError(f"n_best: expected 1 to {search.beam_size}, the size of the beam, got {search.n_best}.")
    batch, (W, N, T) = limit_B.shape[0], (search.beam_size, search.n_best, search.max_length)
    exists_BW = (jnp.arange(W) == 0)[None] & (limit_B > 0)[:, None]
    return Beams(
        index=jnp.int32(0),
        live_BWT=jnp.full((batch, W, T), PAD, jnp.int32),
        part_BWT=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (batch, W, T)),
        log_prob_BW=jnp.where(exists_BW, jnp.float32(0), NONE),
        done_BNT=jnp.full((batch, N, T), PAD, jnp.int32),
        score_BN=jnp.full((batch, N), NONE, jnp.float32),
        cache=cache,
    )


def run(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search, *, until: int | None = None) -> Beams:
    """The search at its end, where every row's texts are certain, or where texts have `until` tokens."""
    limit_B, until = jnp.minimum(limit_B, search.max_length), search.max_length if until is None else until
    return jax.lax.while_loop(
        lambda state: (state.index < until) & unfinished(state),
        lambda state: one_token(step_fn, state, limit_B, search),
        state,
    )


def unfinished(state: Beams) -> jax.Array:
    """Whether the texts of some row are not certain yet."""
    return (state.log_prob_BW > NONE).any()


def one_token(step_fn: StepFn, state: Beams, limit_B: jax.Array, search: Search) -> Beams:
    """Every live hypothesis goes on by one token, or ends."""
    index, length = state.index, state.index + 1
    ways, cache = step_fn(state)
    end_BW, on_BW, parent_BW, token_BW = _candidates(ways, state.log_prob_BW - ways.log_sum_BW, search)

    score_BW = end_BW / length_penalty(length, search)
    ended_BWT = _write(state.live_BWT, jnp.full_like(token_BW, search.end), index)
    done_BNT, score_BN = _best((state.done_BNT, state.score_BN), (ended_BWT, score_BW))

    live_BWT = _write(entries_at(state.live_BWT, parent_BW), token_BW, index)
    # Up to this step a hypothesis has the past of its parent; from the next one on it keeps its own in its own part.
    past_1T = (jnp.arange(search.max_length) <= index)[None, None]
    part_BWT = jnp.where(past_1T, entries_at(state.part_BWT, parent_BW), state.part_BWT)
    at_limit_B1 = (length >= limit_B)[:, None]
    cut_BW = jnp.where(at_limit_B1, on_BW / length_penalty(length, search), NONE)
    done_BNT, score_BN = _fill((done_BNT, score_BN), (live_BWT, cut_BW))
    over_B1 = ~(state.log_prob_BW > NONE).any(axis=1, keepdims=True)
    done_BNT = jnp.where(over_B1[:, :, None], state.done_BNT, done_BNT)
    score_BN = jnp.where(over_B1, state.score_BN, score_BN)

    # When may a row stop? A log-probability never rises, and being negative, it is divided by a penalty that is at most
    # that of the row's limit, as for alpha >= 0 longer texts have the larger penalty. So whatever a live hypothesis of
    # log-probability s becomes, its score is at most s / penalty(limit). Once the N-th finished text is no worse than
    # this bound for the best live one, nothing can change. (Stopping at the first N finished texts, or comparing with
    # s / penalty(length so far), is not safe: a longer text may still overtake.)
    best_B1 = on_BW.max(axis=1, keepdims=True)  # the first; were it cut out, XLA would sort all that `top_k` looks at
    bound_B1 = best_B1 / length_penalty(limit_B, search)[:, None]
    certain_B1 = at_limit_B1 | (score_BN[:, -1:] >= bound_B1)
    on_BW = jnp.where(certain_B1, NONE, on_BW)
    return Beams(length, live_BWT, part_BWT, on_BW, done_BNT, score_BN, cache)


def _candidates(ways: Ways, plus_BW: jax.Array, search: Search) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of the log-probabilities of all ways to go on by a token those that end, and the best W that do not: (B, W) each.

    An end that is not among the best W of all gets -inf: a beam holds W hypotheses, and it would not be one of them.
    The last two tell of each way that does not end which hypothesis it goes on from, and by which token. `plus_BW` and
    a logit make a log-probability.
    """
    W, end_BW = search.beam_size, ways.end_BW + plus_BW
    on_BW, parent_BW, token_BW = top_k(ways.logit_VBW, W, plus_BW, without=(*search.never, search.end))
    worst_B1 = jax.lax.top_k(jnp.concatenate([end_BW, on_BW], axis=1), W)[0][:, -1:]
    return jnp.where(end_BW >= worst_B1, end_BW, NONE), on_BW, parent_BW, token_BW


def _write(ids_BWT: jax.Array, token_BW: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(ids_BWT, token_BW[:, :, None].astype(jnp.int32), index, axis=2)


def _best(done: tuple[jax.Array, jax.Array], new: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The N best of N done texts and some new ones; of equals, those that were there."""
    ids_BXT, score_BX = (jnp.concatenate(parts, axis=1) for parts in zip(done, new, strict=True))
    score_BN, place_BN = jax.lax.top_k(score_BX, done[1].shape[1])
    return entries_at(ids_BXT, place_BN), score_BN


def _fill(done: tuple[jax.Array, jax.Array], cut: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The N done texts, places that are free filled with those that were cut; both best first."""
    ids_BXT, score_BX = (jnp.concatenate(parts, axis=1) for parts in zip(done, cut, strict=True))
    place_BN = jnp.argsort(score_BX == NONE, axis=1, stable=True)[:, : done[1].shape[1]]
    score_BN = entries_at(score_BX, place_BN)
    return jnp.where((score_BN > NONE)[:, :, None], entries_at(ids_BXT, place_BN), PAD), score_BN
