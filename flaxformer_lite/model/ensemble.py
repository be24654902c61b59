"""An ensemble of trained models: the mean of their probabilities. Table 2's ensembles.

Decoding and evaluation use it as any other model. It is not trained: it has no `features`, which a
training step needs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.kv_cache import DecoderCache
from flaxformer_lite.model.transformer import build_model


@flax.struct.dataclass
class EnsembleCache:
    """The decoding state of each member."""

    members: tuple[DecoderCache, ...]

    def extended(self, max_length: int, beam_size: int = 1) -> "EnsembleCache":
        """As `DecoderCache.extended`."""
        return EnsembleCache(tuple(cache.extended(max_length, beam_size) for cache in self.members))


class Ensemble(nn.Module):
    """Models of one architecture and vocabulary; sizes and position schemes may differ.

    Their parameters are under `members_0`, `members_1` and so on.
    """

    configs: tuple[ModelConfig, ...]

    def setup(self) -> None:
        self.members = [build_model(config) for config in self.configs]

    @property
    def config(self) -> ModelConfig:
        """The config of the first member, with the smallest `max_length` of all members."""
        max_length = min(config.max_length for config in self.configs)
        return dataclasses.replace(self.configs[0], max_length=max_length)

    def __call__(self, *inputs: jax.Array, **options: Any) -> jax.Array:
        """Returns the log of the mean probability of tokens or classes; arguments of a member."""
        return log_mean_probability([member(*inputs, **options) for member in self.members])

    def start_cache(self, *arguments: Any) -> EnsembleCache:
        """Returns the cache before the first `decode_step`; arguments of a member."""
        return EnsembleCache(tuple(member.start_cache(*arguments) for member in self.members))

    def decode_step(
        self,
        token: jax.Array,
        cache: EnsembleCache,
        index: jax.Array,
        *source: jax.Array,
        **beams: Any,
    ) -> tuple[jax.Array, EnsembleCache]:
        """Returns the log of the mean probability of the next token, and the updated cache.

        Arguments as of a member's `decode_step`.
        """
        steps = [
            member.decode_step(token, member_cache, index, *source, **beams)
            for member, member_cache in zip(self.members, cache.members, strict=True)
        ]
        logits, caches = zip(*steps, strict=True)
        return log_mean_probability(logits), EnsembleCache(caches)


def log_mean_probability(logits: Sequence[jax.Array]) -> jax.Array:
    """Returns the log of the mean of softmax(logits) over models: (..., V), float32."""
    log_probs = jnp.stack([jax.nn.log_softmax(each.astype(jnp.float32)) for each in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(logits))
