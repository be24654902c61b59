"""What a model decodes for a batch: its step function, and the texts that are given. No method of decoding."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.fields import PAD


class Task(NamedTuple):
    """The rows of a batch, as every method of decoding takes them."""

    step: Callable[..., tuple[jax.Array, Any]]  # (tokens (B,) or (B, W), cache, index) -> (logits (..., V), cache)
    start_cache: Callable[..., Any]  # (positions,), or with beams (positions, W)
    prompt_BP: jax.Array  # ids that a row begins with, then padding
    limit_B: jax.Array  # tokens at which a row ends without an end symbol; 0: an unused row
    row_B: jax.Array  # a number for each row, which its random samples depend on

    def given(self, index: jax.Array) -> jax.Array:
        """The token that each prompt has at `index`, (B,); padding after its end."""
        P = self.prompt_BP.shape[1]
        if P == 0:
            return jnp.full(self.limit_B.shape, PAD, jnp.int32)
        token_B = jax.lax.dynamic_index_in_dim(self.prompt_BP, jnp.minimum(index, P - 1), axis=1, keepdims=False)
        return jnp.where(index < P, token_B, PAD)


def translation(
    model: nn.Module,
    config: DecodeConfig,
    params: dict,
    source_BS: jax.Array,
    row_B: jax.Array,
    prefix_BP: jax.Array | None = None,
) -> Task:
    """An encoder-decoder translates each source.

    A row ends at the latest `config.max_extra_length` tokens after its source, or its prefix if that is longer; 6.1.

    Args:
      source_BS: ids that end with the end symbol and then padding. A row of padding alone gives an empty row.
      prefix_BP: ids that a translation begins with, then padding.
    """
    apply = functools.partial(model.apply, {"params": params})
    prompt_BP = jnp.zeros((source_BS.shape[0], 0), jnp.int32) if prefix_BP is None else prefix_BP
    source_B, prompt_B = ((ids != PAD).sum(axis=1) for ids in (source_BS, prompt_BP))
    limit_B = jnp.maximum(source_B, prompt_B) + config.max_extra_length
    return Task(
        step=lambda token, cache, index, **beams: apply(token, cache, index, source_BS, method="decode_step", **beams),
        start_cache=lambda *size: apply(source_BS, *size, method="start_cache"),
        prompt_BP=prompt_BP,
        limit_B=jnp.where(source_B > 0, limit_B, 0),
        row_B=row_B,
    )


def continuation(model: nn.Module, config: DecodeConfig, params: dict, prompt_BP: jax.Array, row_B: jax.Array) -> Task:
    """A language model continues each prompt; the prompt is part of its output.

    A row ends at the latest `config.max_extra_length` tokens after its prompt.

    Args:
      prompt_BP: ids and then padding; a row of padding alone starts from nothing.
      row_B: -1 leaves the row empty.
    """
    apply = functools.partial(model.apply, {"params": params})
    limit_B = (prompt_BP != PAD).sum(axis=1) + config.max_extra_length
    return Task(
        step=lambda token, cache, index, **beams: apply(token, cache, index, method="decode_step", **beams),
        start_cache=lambda *size: apply(prompt_BP.shape[0], *size, method="start_cache"),
        prompt_BP=prompt_BP,
        limit_B=jnp.where(row_B >= 0, limit_B, 0),
        row_B=row_B,
    )


def with_whole_rows(task: Task, sharding: jax.sharding.Sharding | None) -> Task:
    """Returns `task` with its logits sharded as `sharding` says, all of a row on one device; None: as they are.

    Where devices split the vocabulary, each has a part of all rows. Greedy and beam search find the k largest of a row
    in place; to sample, a row may have to be sorted, which needs all of it on one device.
    """
    if sharding is None:
        return task

    def step(*arguments: Any) -> tuple[jax.Array, Any]:
        logits, cache = task.step(*arguments)
        return jax.lax.with_sharding_constraint(logits, sharding), cache

    return task._replace(step=step)
