"""Several trained models that decide together, by the mean of the probabilities that each gives: Table 2's ensembles.

To what decodes and measures it is a model like any other. None is trained so: it has no features of its own, which a
training step asks for.
"""

import dataclasses
import math
from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.attention import DecoderCache
from flaxformer_lite.model.transformer import build_model


@flax.struct.dataclass
class EnsembleCache:
    """What decoding keeps between steps, for one model after another."""

    members: tuple[DecoderCache, ...]

    def extended(self, max_length: int, beam_size: int = 1) -> "EnsembleCache":
        """As `DecoderCache.extended`."""
        return EnsembleCache(tuple(cache.extended(max_length, beam_size) for cache in self.members))


class Ensemble(nn.Module):
    """Models of one architecture that read and write the same token ids; sizes and positions may differ.

    Their parameters are those of `members_0`, `members_1` and so on.
    """

    configs: tuple[ModelConfig, ...]

    def setup(self):
        self.members = [build_model(config) for config in self.configs]

    @property
    def config(self) -> ModelConfig:
        """That of the first, with the length that all of them take."""
        return dataclasses.replace(self.configs[0], max_length=min(config.max_length for config in self.configs))

    def __call__(self, *inputs: jax.Array, **options) -> jax.Array:
        """The log of the mean probability of each token, or class; arguments as of a member."""
        return log_mean_probability([member(*inputs, **options) for member in self.members])

    def start_cache(self, *arguments: jax.Array | int) -> EnsembleCache:
        """The cache before the first `decode_step`; arguments as of a member."""
        return EnsembleCache(tuple(member.start_cache(*arguments) for member in self.members))

    def decode_step(
        self, token: jax.Array, cache: EnsembleCache, index: jax.Array, *source: jax.Array, **beams
    ) -> tuple[jax.Array, EnsembleCache]:
        """The log of the mean probability of what follows each of `token`, and the grown caches; as of a member."""
        steps = [
            member.decode_step(token, own, index, *source, **beams)
            for member, own in zip(self.members, cache.members, strict=True)
        ]
        logits, caches = zip(*steps, strict=True)
        return log_mean_probability(logits), EnsembleCache(caches)


def log_mean_probability(logits: Sequence[jax.Array]) -> jax.Array:
    """The log of the mean of softmax(logits) over the models: (..., V), float32, whose softmax is that mean again."""
    log_probs = jnp.stack([jax.nn.log_softmax(each.astype(jnp.float32)) for each in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(logits))
