"""One encoder layer and one decoder layer: attention and feed-forward sublayers, each in a residual. Section 3.1."""

from collections.abc import Callable

import flax.linen as nn
import jax

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.attention import KVCache, MultiHeadAttention
from flaxformer_lite.model.dropout import Dropout


def layer_norm(config: ModelConfig, name: str | None = None) -> nn.LayerNorm:
    """LayerNorm over D with learned scale and bias; mean and variance are taken in float32."""
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 at every position; equation 2 of section 3.3."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        dense = {"dtype": self.config.dtype, "kernel_init": nn.initializers.xavier_uniform()}
        hidden_BTF = nn.relu(nn.Dense(self.config.d_ff, name="inner", **dense)(x_BTD))
        return nn.Dense(self.config.d_model, name="outer", **dense)(hidden_BTF)


class Residual(nn.Module):
    """A sublayer with its residual connection, dropout and LayerNorm; sections 3.1 and 5.4.

    Post-LN (the paper): LayerNorm(x + Dropout(sublayer(x))). Pre-LN: x + Dropout(sublayer(LayerNorm(x))).
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        sublayer: Callable[[jax.Array], jax.Array],
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        norm = layer_norm(self.config, name="norm")
        drop = Dropout(self.config.dropout)
        if self.config.norm_placement == "pre":
            return x_BTD + drop(sublayer(norm(x_BTD)), deterministic=deterministic, row_B=row_B)
        return norm(x_BTD + drop(sublayer(x_BTD), deterministic=deterministic, row_B=row_B))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: ModelConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x_BSD: jax.Array, mask: jax.Array, **mode) -> jax.Array:
        """(B, S, D) to (B, S, D); `mask` broadcasts to (B, H, S, S)."""
        attend = lambda x: self.self_attention(x, x, mask, **mode)  # noqa: E731
        x_BSD = self.self_attention_residual(x_BSD, attend, **mode)
        return self.feed_forward_residual(x_BSD, self.feed_forward, **mode)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention to the encoder's output, then feed-forward."""

    config: ModelConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config)
        self.cross_attention = MultiHeadAttention(self.config)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.cross_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, mask: jax.Array, cross_mask: jax.Array, **mode
    ) -> jax.Array:
        """(B, T, D) to (B, T, D); `mask` broadcasts to (B, H, T, T), `cross_mask` to (B, H, T, S)."""
        attend = lambda x: self.self_attention(x, x, mask, **mode)  # noqa: E731
        cross = lambda x: self.cross_attention(x, memory_BSD, cross_mask, **mode)  # noqa: E731
        x_BTD = self.self_attention_residual(x_BTD, attend, **mode)
        x_BTD = self.cross_attention_residual(x_BTD, cross, **mode)
        return self.feed_forward_residual(x_BTD, self.feed_forward, **mode)

    def step(
        self,
        x_B1D: jax.Array,
        cache: KVCache,
        index: jax.Array,
        memory: KVCache,
        masks: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, KVCache]:
        """The same for the one position `index`, given the `cache` of those before it and a projected `memory`.

        `masks`: for self-attention over the cache and for attention to the encoder's output.
        """
        new_cache = cache

        def attend(x_B1D: jax.Array) -> jax.Array:
            nonlocal new_cache
            new_cache = cache.write(self.self_attention.keys_values(x_B1D), index)
            return self.self_attention.attend(x_B1D, new_cache, masks[0])

        cross = lambda x: self.cross_attention.attend(x, memory, masks[1])  # noqa: E731
        x_B1D = self.self_attention_residual(x_B1D, attend)
        x_B1D = self.cross_attention_residual(x_B1D, cross)
        return self.feed_forward_residual(x_B1D, self.feed_forward), new_cache
