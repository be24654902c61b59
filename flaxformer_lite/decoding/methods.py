"""The decoding methods by name: each takes a task and a `DecodeConfig`, and returns ids."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_lite.decoding import beam, diverse_beam, sampling, stochastic_beam
from flaxformer_lite.decoding.constraints import Forbidden, constrain, force
from flaxformer_lite.decoding.task import Task
from flaxformer_lite.field_rules import BEAMS
from flaxformer_lite.fields import BOS, EOS, PAD, DecodeConfig


def decode(
    task: Task, config: DecodeConfig, *, capacities: Sequence[int], forbidden: Forbidden = ()
) -> jax.Array:
    """Returns the output ids (B, T) of any method but 'mask_predict', then padding.

    `capacities`: numbers of positions of the cache, increasing; the last is T. `forbidden`: the ids
    of `config.forbidden`.
    """
    if config.method in BEAMS:
        found = beam_search(task, config, n_best=1, capacities=capacities, forbidden=forbidden)
        return found[0][:, 0]
    pick = pick_token(config, task.row_B, forbidden)

    def pick_or_given(logits_BV: jax.Array, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
        given_B = task.given(index)
        return jnp.where(given_B != PAD, given_B, pick(logits_BV, ids_BT, index))

    return sampling.generate(
        task.step, task.start_cache, pick_or_given, task.limit_B, capacities=capacities
    )


def pick_token(
    config: DecodeConfig, row_B: jax.Array, forbidden: Forbidden = ()
) -> sampling.PickFn:
    """Returns the function that picks the next token by 'greedy' or 'sample'.

    A sample is a function of (config.seed, index of the token, row).
    """
    key = jax.random.key(config.seed)

    def pick(logits_BV: jax.Array, ids_BT: jax.Array, index: jax.Array) -> jax.Array:
        logits_BV = constrain(config, logits_BV, ids_BT, index, forbidden)
        if config.method == "greedy":
            return sampling.greedy(logits_BV)
        return sampling.sample(
            logits_BV,
            jax.random.fold_in(key, index),
            row_B,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            epsilon=config.epsilon,
        )

    return pick


def beam_search(
    task: Task,
    config: DecodeConfig,
    *,
    n_best: int,
    capacities: Sequence[int],
    forbidden: Forbidden = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns the best texts of each row: ids (B, N, T), best first, and scores (B, N).

    A score is the log-probability of the whole text, its prompt included, over the length penalty;
    of 'stochastic_beam' the perturbed log-probability, given the prompt. -inf if there are fewer
    than N texts. The hypotheses of a row share the encoder's output.
    """
    search = beam.Search(
        beam_size=config.beam_size,
        n_best=n_best,
        alpha=config.alpha,
        penalty=config.penalty,
        max_length=capacities[-1],
        end=EOS,
    )
    step_fn = _step_of(task, config, forbidden)

    def searched(
        search: beam.Search, step_fn: beam.StepFn, limit_B: jax.Array, choose: beam.ChooseFn
    ) -> beam.Beams:
        state = beam.start(task.start_cache(capacities[0], config.beam_size), limit_B, search)
        for capacity in capacities:
            cache = state.cache.extended(capacity, config.beam_size)
            state = dataclasses.replace(state, cache=cache)
            state = beam.run(step_fn, state, limit_B, search, until=capacity, choose=choose)
        return state

    if config.method == "diverse_beam":
        groups, hypotheses = config.beam_groups, config.beam_size // config.beam_groups
        # Each group finds all its texts: one that ends earlier would change the groups after it.
        search = dataclasses.replace(search, beam_size=hypotheses, n_best=hypotheses)
        state = searched(
            search,
            diverse_beam.step_of_groups(step_fn, groups),
            jnp.repeat(task.limit_B, groups),
            diverse_beam.chooser(groups, config.diversity),
        )
        return diverse_beam.merged(state, n_best, EOS, groups)
    if config.method == "stochastic_beam":
        search = dataclasses.replace(search, alpha=0.0, perturbed=True)
        choose = stochastic_beam.chooser(config.seed, task.row_B)
        state = searched(search, step_fn, task.limit_B, choose)
    else:
        state = searched(search, step_fn, task.limit_B, beam.most_probable)
    return state.done_BNT, state.score_BN


def _step_of(task: Task, config: DecodeConfig, forbidden: Forbidden) -> beam.StepFn:
    """Returns the log-probabilities of the next tokens that the constraints and prompts allow."""

    def step(state: beam.Beams) -> tuple[jax.Array, Any]:
        ids_BWT, index = state.live_BWT, state.index
        last_BW = jax.lax.dynamic_index_in_dim(
            ids_BWT, jnp.maximum(index - 1, 0), axis=2, keepdims=False
        )
        token_BW = jnp.where(index == 0, BOS, last_BW)
        logits_BWV, cache = task.step(token_BW, state.cache, index, ancestor_BWT=state.ancestor_BWT)
        log_prob_BWV = jax.nn.log_softmax(logits_BWV)
        allowed_BWV = constrain(config, log_prob_BWV, ids_BWT, index, forbidden)
        if task.prompt_BP.shape[1]:
            given_B1 = task.given(index)[:, None]
            forced_BWV = force(log_prob_BWV, given_B1)
            allowed_BWV = jnp.where((given_B1 != PAD)[..., None], forced_BWV, allowed_BWV)
        return allowed_BWV, cache

    return step
