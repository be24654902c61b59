"""Decoding tasks: the step function of a model for a batch, the prompts and limits of its rows.

A task is independent of the decoding method.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import PAD, DecodeConfig
from flaxformer_lite.model.parameters import Params


class Task(NamedTuple):
    """The rows of a batch, in the form that every decoding method takes."""

    # (tokens (B,) or (B, W), cache, index) -> (logits (..., V), cache)
    step: Callable[..., tuple[jax.Array, Any]]
    start_cache: Callable[..., Any]  # (positions,), or with beams (positions, W)
    prompt_BP: jax.Array  # the first ids of each row's output, then padding
    limit_B: jax.Array  # tokens after which a row ends without an end symbol; 0: an unused row
    row_B: jax.Array  # a number for each row; its random samples depend on it

    def given(self, index: jax.Array) -> jax.Array:
        """Returns the token at `index` of each prompt, (B,); padding after its end."""
        P = self.prompt_BP.shape[1]
        if P == 0:
            return jnp.full(self.limit_B.shape, PAD, jnp.int32)
        token_B = jax.lax.dynamic_index_in_dim(
            self.prompt_BP, jnp.minimum(index, P - 1), axis=1, keepdims=False
        )
        return jnp.where(index < P, token_B, PAD)


def translation(
    model: nn.Module,
    config: DecodeConfig,
    params: Params,
    source_BS: jax.Array,
    row_B: jax.Array,
    prefix_BP: jax.Array | None = None,
) -> Task:
    """Returns the task of an encoder-decoder that translates each source.

    A row ends at most `config.max_extra_length` tokens after the length of its source, or of its
    prefix if that is longer. Section 6.1.

    Args:
      source_BS: ids, the end symbol, then padding. A row of padding has an empty output.
      row_B: a number for each row; its random samples depend on it.
      prefix_BP: the first ids of each translation, then padding.
    """
    apply = functools.partial(model.apply, {"params": params})
    prompt_BP = jnp.zeros((source_BS.shape[0], 0), jnp.int32) if prefix_BP is None else prefix_BP
    source_B, prompt_B = ((ids != PAD).sum(axis=1) for ids in (source_BS, prompt_BP))
    limit_B = jnp.maximum(source_B, prompt_B) + config.max_extra_length
    return Task(
        step=lambda token, cache, index, **beams: apply(
            token, cache, index, source_BS, method="decode_step", **beams
        ),
        start_cache=lambda *size: apply(source_BS, *size, method="start_cache"),
        prompt_BP=prompt_BP,
        limit_B=jnp.where(source_B > 0, limit_B, 0),
        row_B=row_B,
    )


def continuation(
    model: nn.Module,
    config: DecodeConfig,
    params: Params,
    prompt_BP: jax.Array,
    row_B: jax.Array,
    *,
    within_text: bool = False,
) -> Task:
    """Returns the task of a language model that continues each prompt; outputs include the prompt.

    A row ends at most `config.max_extra_length` tokens after its prompt.

    Args:
      prompt_BP: ids, then padding; a row of padding is an empty prompt.
      row_B: a number for each row; its random samples depend on it. -1: an unused row.
      within_text: whether the prompts, all of 1 token or more, are from within texts. The model
        then reads no start symbol in front of them.
    """
    apply = functools.partial(model.apply, {"params": params})

    def step(token: jax.Array, cache: Any, index: jax.Array, **beams: Any) -> Any:
        if within_text:
            # The first token of a prompt overwrites the start symbol in the cache.
            index = jnp.maximum(index - 1, 0)
            beams = {name: jnp.roll(of_index, -1, axis=-1) for name, of_index in beams.items()}
        return apply(token, cache, index, method="decode_step", **beams)

    limit_B = (prompt_BP != PAD).sum(axis=1) + config.max_extra_length
    return Task(
        step=step,
        start_cache=lambda *size: apply(prompt_BP.shape[0], *size, method="start_cache"),
        prompt_BP=prompt_BP,
        limit_B=jnp.where(row_B >= 0, limit_B, 0),
        row_B=row_B,
    )


def with_whole_rows(task: Task, sharding: jax.sharding.Sharding | None) -> Task:
    """Returns `task` with its logits sharded by `sharding`, whole rows on one device; None: as is.

    If devices split the vocabulary, each holds a part of every row. Greedy and beam search find the
    k largest logits of such rows. Samples need a whole row on one device: they may have to sort it.
    """
    if sharding is None:
        return task

    def step(*arguments: Any, **beams: Any) -> tuple[jax.Array, Any]:
        logits, cache = task.step(*arguments, **beams)
        return jax.lax.with_sharding_constraint(logits, sharding), cache

    return task._replace(step=step)
