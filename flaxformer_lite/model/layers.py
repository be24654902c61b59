"""One encoder layer and one decoder layer: attention and feed-forward sublayers, each in a residual. Section 3.1."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.attention import KVCache, MultiHeadAttention
from flaxformer_lite.model.dense import PRODUCT, Dense
from flaxformer_lite.model.devices import keep_rows
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.masks import AttentionMask
from flaxformer_lite.model.positions import ScoreBias

ACTIVATIONS = {
    "relu": nn.relu,
    "gelu": functools.partial(nn.gelu, approximate=False),  # x times the normal distribution function of x
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),  # its approximation by a tanh, as GPT-2 has it
    "silu": nn.silu,
}
# What the backward pass finds of a layer besides its input, by `remat`; the rest it computes again.
KEPT = {
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),  # products with parameters, not with each other
    "full": jax.checkpoint_policies.nothing_saveable,
}
GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def make_norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    """LayerNorm, or RMSNorm which leaves out mean and bias; over D, with learned scale, statistics in float32."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)
    return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=config.dtype, use_bias=config.use_bias, name=name)


def run(layer: nn.Module, x_BTD: jax.Array, *rest: Any, **mode) -> jax.Array:
    """`layer(x_BTD, *rest, **mode)`, in training with as much memory as the layer's `remat` allows. Chen 2016, 4."""
    remat = layer.config.remat
    if remat == "none":
        return layer(x_BTD, *rest, **mode)
    return nn.remat(lambda layer, x_BTD: layer(x_BTD, *rest, **mode), policy=KEPT[remat])(layer, x_BTD)


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2 at every position; equation 2 of section 3.3, where the activation is max(0, x).

    Gated (Shazeer 2020, equation 5): (activation(x V + c) * (x W1 + b1)) W2 + b2.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        hidden_BTF = Dense(c, (c.d_ff,), name="inner")(x_BTD)
        if c.activation in GATES:
            gate_BTF = Dense(c, (c.d_ff,), name="gate")(x_BTD)
            hidden_BTF = ACTIVATIONS[GATES[c.activation]](gate_BTF) * hidden_BTF
        else:
            hidden_BTF = ACTIVATIONS[c.activation](hidden_BTF)
        return Dense(c, (c.d_model,), name="outer")(hidden_BTF)


class Residual(nn.Module):
    """A sublayer with its residual connection, dropout and norm; sections 3.1 and 5.4.

    Post-LN (the paper): norm(x + Dropout(sublayer(x))). Pre-LN: x + Dropout(sublayer(norm(x))).
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
        norm = make_norm(self.config, name="norm")
        drop = Dropout(self.config.dropout)
        if self.config.norm_placement == "pre":
            x_BTD += drop(sublayer(norm(x_BTD)), deterministic=deterministic, row_B=row_B)
        else:
            x_BTD = norm(x_BTD + drop(sublayer(x_BTD), deterministic=deterministic, row_B=row_B))
        return keep_rows(x_BTD)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: ModelConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, is_self_attention=True)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(self, x_BSD: jax.Array, mask: AttentionMask, bias: ScoreBias | None = None, **mode) -> jax.Array:
        """(B, S, D) to (B, S, D); `bias`: what positions add to the scores."""
        attend = lambda x: self.self_attention(x, x, mask, bias, **mode)  # noqa: E731
        x_BSD = self.self_attention_residual(x_BSD, attend, **mode)
        return self.feed_forward_residual(x_BSD, self.feed_forward, **mode)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output (if there is an encoder), then feed-forward."""

    config: ModelConfig
    has_encoder: bool = True

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, is_self_attention=True)
        self.self_attention_residual = Residual(self.config)
        if self.has_encoder:
            self.cross_attention = MultiHeadAttention(self.config)
            self.cross_attention_residual = Residual(self.config)
        self.feed_forward = FeedForward(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self,
        x_BTD: jax.Array,
        mask: AttentionMask,
        bias: ScoreBias | None = None,
        memory: jax.Array | KVCache | None = None,
        cross_pattern: AttentionMask | None = None,
        **mode,
    ) -> jax.Array:
        """(B, T, D) to (B, T, D).

        Args:
          bias: what positions add to the scores of self-attention.
          memory: the encoder's output (B, S, D), or the keys and values that were made of it before.
        """
        attend = lambda x: self.self_attention(x, x, mask, bias, **mode)  # noqa: E731

        def cross(x_BTD: jax.Array) -> jax.Array:
            read = self.cross_attention.attend if isinstance(memory, KVCache) else self.cross_attention
            return read(x_BTD, memory, cross_pattern, **mode)

        x_BTD = self.self_attention_residual(x_BTD, attend, **mode)
        if self.has_encoder:
            x_BTD = self.cross_attention_residual(x_BTD, cross, **mode)
        return self.feed_forward_residual(x_BTD, self.feed_forward, **mode)

    def step(
        self,
        x_BWD: jax.Array,
        cache: tuple[KVCache, KVCache | None],
        index: jax.Array,
        masks: tuple[AttentionMask, AttentionMask | None],
        bias: ScoreBias | None,
    ) -> tuple[jax.Array, KVCache]:
        """The same for the one position `index` of W texts a row; W = 1 without beams.

        Args:
          cache: keys and values of the tokens so far, L W entries, and of the encoder's output, S entries.
          patterns: of self-attention over the cache, and of attention to the encoder's output.

        Returns:
          (B, W, D), and the cache of self-attention with one more position.
        """
        own, memory = cache

        def attend(x_BWD: jax.Array) -> jax.Array:
            nonlocal own
            own = own.write(self.self_attention.keys_values(x_BWD, masks[0].query), index)
            return self.self_attention.attend(x_BWD, own, masks[0], bias)

        x_BWD = self.self_attention_residual(x_BWD, attend)
        if self.has_encoder:
            cross = lambda x: self.cross_attention.attend(x, memory, masks[1])  # noqa: E731
            x_BWD = self.cross_attention_residual(x_BWD, cross)
        return self.feed_forward_residual(x_BWD, self.feed_forward), own
