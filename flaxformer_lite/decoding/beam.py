"""Beam search: the N best texts of a model, by keeping the W best hypotheses. Section 6.1.

Each step ranks all continuations of the live hypotheses by one token. A continuation by the end
symbol is a finished text if it is among the best W (the beam size). The best W by other tokens stay
live. At the limit of their row they are cut, without an end symbol. The score of a text is its
log-probability over the penalty of its length. Cut texts rank below all finished texts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding.topk import topk
from flaxformer_lite.fields import PAD
from flaxformer_lite.system.errors import InputError

NONE = -jnp.inf  # log-probability and score of a hypothesis that does not exist
LARGEST = float(jnp.finfo(jnp.float32).max)

# Functions of the length of a text, its end symbol included; the power alpha is applied after them.
PENALTIES: dict[str, Callable[[Any], Any]] = {
    "wu": lambda length: (5.0 + length) / 6.0,  # Wu 2016, equation 14
    "power": lambda length: 1.0 * length,  # as in Hugging Face and CTranslate2
}

Length = TypeVar("Length", float, jax.Array)
# Beams -> (float32 log-probabilities of each next token (B, W, V), -inf: forbidden; the new cache).
StepFn = Callable[["Beams"], tuple[jax.Array, Any]]
# (Beams, those log-probabilities, Search) -> which continuations the search keeps.
ChooseFn = Callable[["Beams", jax.Array, "Search"], "Continuations"]


def length_penalty(length: Length, *, alpha: float, kind: str) -> Length:
    """Returns the divisor of the log-probability of a text of `length` tokens.

    It never decreases with the length.
    """
    return PENALTIES[kind](length) ** alpha


def check_alpha(alpha: float, kind: str, max_length: int) -> None:
    """Raises InputError if alpha is negative, or too large for texts of `max_length` tokens."""
    if not alpha >= 0:
        raise InputError(
            f"alpha: expected 0 or more, got {alpha}; below 0 no bound would end the search."
        )
    if alpha * math.log(PENALTIES[kind](max_length)) > math.log(LARGEST):
        raise InputError(
            f"alpha: {alpha} makes the penalty of {max_length} tokens infinite; lower it."
        )


@dataclasses.dataclass(frozen=True)
class Search:
    """The settings of a search."""

    beam_size: int  # W
    n_best: int  # N
    alpha: float  # exponent of the length penalty
    penalty: str  # kind of the length penalty, see `length_penalty`
    max_length: int  # T
    end: int  # the end symbol
    perturbed: bool = False  # stochastic beams: values are perturbed, and cut texts rank by theirs

    def penalty_of(self, length: jax.Array) -> jax.Array:
        """Returns the divisor of the log-probability of a text of `length` tokens."""
        return length_penalty(length, alpha=self.alpha, kind=self.penalty)


@flax.struct.dataclass
class Beams:
    """The state of a search. A row is final once it has no live hypotheses."""

    index: jax.Array  # int32: number of tokens of each live hypothesis
    live_BWT: jax.Array  # int32: ids of the live hypotheses, then padding
    ancestor_BWT: jax.Array  # int32: which of the W cache entries of a position a hypothesis reads
    log_prob_BW: jax.Array  # float32: log-probabilities of the live hypotheses
    done_BNT: jax.Array  # int32: finished and cut texts, best first, then padding
    score_BN: jax.Array  # float32: the scores of these texts; -inf if there are fewer than N
    cache: Any  # of the step function: W entries a position; never reordered, see `ancestor_BWT`
    phi_BW: Any = ()  # the log-probabilities, if those of `log_prob_BW` are perturbed


class Continuations(NamedTuple):
    """The texts that end with this token, and the live ones, best first. -inf: there is none."""

    end_BW: jax.Array  # float32: log-probabilities of the hypotheses with the end symbol
    live_BW: jax.Array  # float32: log-probabilities of the live texts
    parent_BW: jax.Array  # int32: the hypotheses that the live texts continue
    token_BW: jax.Array  # int32: the tokens that they add
    phi_BW: Any = ()  # as of `Beams`


def start(cache: Any, limit_B: jax.Array, search: Search) -> Beams:
    """Returns the state before the first token: one live hypothesis a row, the empty one.

    `limit_B`: most tokens of a row's texts, the end symbol included; 0: an unused row.

    Raises:
      InputError: alpha is negative or too high for a text of T tokens, or N is not between 1 and W.
    """
    B, W, N, T = len(limit_B), search.beam_size, search.n_best, search.max_length
    check_alpha(search.alpha, search.penalty, T)
    if not 1 <= N <= W:
        raise InputError(f"n_best: expected 1 to {W}, the size of the beam, got {N}.")
    exists_BW = (jnp.arange(W) == 0)[None] & (limit_B > 0)[:, None]
    log_prob_BW = jnp.where(exists_BW, jnp.float32(0), NONE)
    return Beams(
        index=jnp.int32(0),
        live_BWT=jnp.full((B, W, T), PAD, jnp.int32),
        ancestor_BWT=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (B, W, T)),
        log_prob_BW=log_prob_BW,
        done_BNT=jnp.full((B, N, T), PAD, jnp.int32),
        score_BN=jnp.full((B, N), NONE, jnp.float32),
        cache=cache,
        phi_BW=log_prob_BW if search.perturbed else (),
    )


def most_probable(state: Beams, log_prob_BWV: jax.Array, search: Search) -> Continuations:
    """Returns the continuations that beam search keeps: those with the highest log-probability."""
    return highest(state.log_prob_BW[..., None] + log_prob_BWV, search)


def run(
    step_fn: StepFn,
    state: Beams,
    limit_B: jax.Array,
    search: Search,
    *,
    until: int,
    choose: ChooseFn = most_probable,
) -> Beams:
    """Returns the state when all rows are final, or when hypotheses have `until` tokens."""
    limit_B = jnp.minimum(limit_B, search.max_length)
    return jax.lax.while_loop(
        lambda state: (state.index < until) & (state.log_prob_BW > NONE).any(),
        lambda state: _extend(step_fn, choose, state, limit_B, search),
        state,
    )


def _extend(
    step_fn: StepFn, choose: ChooseFn, state: Beams, limit_B: jax.Array, search: Search
) -> Beams:
    """Returns the state after one more token."""
    index, length = state.index, state.index + 1
    log_prob_BWV, cache = step_fn(state)
    end_BW, live_BW, parent_BW, token_BW, phi_BW = choose(state, log_prob_BWV, search)

    position_11T = jnp.arange(search.max_length)[None, None]
    ended_BWT = jnp.where(position_11T == index, search.end, state.live_BWT)
    live_BWT = take(state.live_BWT, parent_BW)
    live_BWT = jnp.where(position_11T == index, token_BW[..., None], live_BWT)
    # Up to this token a hypothesis reads its parent's cache entries, and after it its own.
    parents_BWT = take(state.ancestor_BWT, parent_BW)
    ancestor_BWT = jnp.where(position_11T <= index, parents_BWT, state.ancestor_BWT)

    at_limit_B1, penalty = (length >= limit_B)[:, None], search.penalty_of(length)
    cut_BW = jnp.where(at_limit_B1, live_BW / penalty, NONE)
    ids_BXT = jnp.concatenate([state.done_BNT, ended_BWT, live_BWT], axis=1)
    score_BX = jnp.concatenate([state.score_BN, end_BW / penalty, cut_BW], axis=1)
    X, W = score_BX.shape[1], search.beam_size
    is_cut_1X = (jnp.arange(X) >= X - W)[None] & (not search.perturbed)
    done_BNT, score_BN = n_best(ids_BXT, score_BX, is_cut_1X, search.n_best)
    # A row that was final keeps its order; a new one would rank its cut texts as finished.
    was_final_B1 = ~(state.log_prob_BW > NONE).any(axis=1, keepdims=True)
    done_BNT = jnp.where(was_final_B1[..., None], state.done_BNT, done_BNT)
    score_BN = jnp.where(was_final_B1, state.score_BN, score_BN)

    # A row is final once its N-th score reaches s / penalty(limit), where s is the log-probability
    # of its best live hypothesis. No later text scores more: its log-probability is at most s <= 0,
    # and its divisor at most penalty(limit), as alpha >= 0. Two simpler rules are not safe, as a
    # longer text may overtake: to stop at N finished texts, or at s / penalty(length). A perturbed
    # s may be positive, but then alpha is 0.
    bound_B1 = live_BW[:, :1] / search.penalty_of(limit_B)[:, None]
    live_BW = jnp.where(at_limit_B1 | (score_BN[:, -1:] >= bound_B1), NONE, live_BW)
    return Beams(length, live_BWT, ancestor_BWT, live_BW, done_BNT, score_BN, cache, phi_BW)


def highest(value_BWV: jax.Array, search: Search) -> Continuations:
    """Returns the continuations with the highest values, as `Continuations` of these values."""
    B, W, V = value_BWV.shape
    K = min(W, V)  # the best W of a row are among the best K of each hypothesis
    end_BW = value_BWV[..., search.end]
    is_end_11V = (jnp.arange(V) == search.end)[None, None]
    best_BWK, token_BWK = topk(jnp.where(is_end_11V, NONE, value_BWV), K)
    live_BW, index_BW = jax.lax.top_k(best_BWK.reshape(B, -1), W)
    worst_B1 = jax.lax.top_k(jnp.concatenate([end_BW, live_BW], axis=1), W)[0][:, -1:]
    end_BW = jnp.where(end_BW >= worst_B1, end_BW, NONE)
    token_BW = take(token_BWK.reshape(B, -1), index_BW)
    return Continuations(end_BW, live_BW, index_BW // K, token_BW)


def take(x_BW: jax.Array, index_BK: jax.Array) -> jax.Array:
    """Returns the entries of x (B, W, ...) at the indices of each row, (B, K, ...)."""
    index_BK = jnp.expand_dims(index_BK, range(2, x_BW.ndim))
    return jnp.take_along_axis(x_BW, index_BK, axis=1, mode="clip")


def n_best(
    ids_BXT: jax.Array, score_BX: jax.Array, is_cut_BX: jax.Array, N: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the N best texts and their scores; texts with `is_cut_BX` rank below all others."""
    order_BX = jnp.lexsort((-score_BX, jnp.where(score_BX > NONE, is_cut_BX, 2)))
    ids_BNT, score_BN = (take(x_BX, order_BX[:, :N]) for x_BX in (ids_BXT, score_BX))
    return jnp.where((score_BN > NONE)[..., None], ids_BNT, PAD), score_BN
