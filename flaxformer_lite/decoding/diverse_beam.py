"""Diverse beam search: groups of hypotheses that avoid each other's tokens. Vijayakumar 2018.

Each of the G groups of an input is a beam search of its own, with w of the W = G w hypotheses. At
each step the groups choose one after another. A continuation ranks by its log-probability, minus
the diversity for each hypothesis of an earlier group that chose its token (Hamming diversity).
Scores stay those of beam search. In the search a group is a row, R = B G. In the model all W
hypotheses of an input are one row, so they share the encoder's output.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_lite.decoding import beam


def step_of_groups(step_fn: beam.StepFn, groups: int) -> beam.StepFn:
    """Returns `step_fn`, which has a row for each input, for a state with a row for each group."""

    def step(state: beam.Beams) -> tuple[jax.Array, Any]:
        R, w, T = state.live_BWT.shape
        first_R11 = (jnp.arange(R) % groups * w)[:, None, None]  # of the group, among the W
        shape = R // groups, groups * w
        together = dataclasses.replace(
            state,
            live_BWT=state.live_BWT.reshape(*shape, T),
            ancestor_BWT=(state.ancestor_BWT + first_R11).reshape(*shape, T),
            log_prob_BW=state.log_prob_BW.reshape(shape),
        )
        log_prob_BWV, cache = step_fn(together)
        return log_prob_BWV.reshape(R, w, -1), cache

    return step


def chooser(groups: int, diversity: float) -> beam.ChooseFn:
    """Returns the function that chooses the continuations of all groups."""

    def choose(
        state: beam.Beams, log_prob_RwV: jax.Array, search: beam.Search
    ) -> beam.Continuations:
        total_RwV = state.log_prob_BW[..., None] + log_prob_RwV
        R, w, V = total_RwV.shape

        def choose_one(chosen_BV: jax.Array, total_BwV: jax.Array) -> tuple[jax.Array, Any]:
            """`chosen_BV`: how many hypotheses of earlier groups chose each token."""
            ranked_BwV = total_BwV - diversity * chosen_BV[:, None]
            end_Bw, rank_Bw, parent_Bw, token_Bw, _ = beam.highest(ranked_BwV, search)
            row_B1 = jnp.arange(len(total_BwV))[:, None]
            live_Bw = jnp.where(
                rank_Bw > beam.NONE, total_BwV[row_B1, parent_Bw, token_Bw], beam.NONE
            )
            chosen_BV = chosen_BV.at[row_B1, token_Bw].add(live_Bw > beam.NONE)
            live_Bw, order_Bw = jax.lax.top_k(live_Bw, w)  # by log-probability, for the bound
            parent_Bw, token_Bw = (beam.take(x, order_Bw) for x in (parent_Bw, token_Bw))
            return chosen_BV, beam.Continuations(end_Bw, live_Bw, parent_Bw, token_Bw)

        total_GBwV = total_RwV.reshape(-1, groups, w, V).swapaxes(0, 1)
        _, found = jax.lax.scan(choose_one, jnp.zeros((R // groups, V)), total_GBwV)
        return jax.tree.map(lambda x_GBw: x_GBw.swapaxes(0, 1).reshape(R, w), found)

    return choose


def merged(state: beam.Beams, n: int, end: int, groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns the n best texts of all groups, and their scores; a text of several counts once."""
    R, w, T = state.done_BNT.shape
    ids_BWT = state.done_BNT.reshape(-1, groups * w, T)
    score_BW = state.score_BN.reshape(-1, groups * w)
    is_same_BWW = (ids_BWT[:, :, None] == ids_BWT[:, None]).all(axis=-1)
    is_copy_BW = jnp.tril(is_same_BWW, k=-1).any(axis=-1)  # of a text before it
    is_cut_BW = (ids_BWT != end).all(axis=-1)
    return beam.n_best(ids_BWT, jnp.where(is_copy_BW, beam.NONE, score_BW), is_cut_BW, n)
