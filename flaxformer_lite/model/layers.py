"""The encoder layer and the decoder layer: sublayers with residual connections. Section 3.1."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.attention import MultiHeadAttention
from flaxformer_lite.model.dense import MATMUL, Dense
from flaxformer_lite.model.devices import keep_rows_split
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.kv_cache import KVCache
from flaxformer_lite.model.masks import AttentionMask
from flaxformer_lite.model.positions import ScoreBias

ACTIVATIONS = {
    "relu": nn.relu,
    # x times the normal distribution function of x
    "gelu": functools.partial(nn.gelu, approximate=False),
    # the tanh approximation of 'gelu', as in GPT-2
    "gelu_tanh": functools.partial(nn.gelu, approximate=True),
    "silu": nn.silu,
}
GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
# By `remat`, what is stored for the backward pass besides a layer's input; the rest is recomputed.
REMAT_POLICIES = {
    # the outputs of `Dense`, not the products of activations with each other
    "dots": jax.checkpoint_policies.save_only_these_names(MATMUL),
    "full": jax.checkpoint_policies.nothing_saveable,
}


def make_norm(config: ModelConfig, name: str | None = None) -> nn.Module:
    """Returns a LayerNorm or an RMSNorm over D, with statistics in float32."""
    if config.norm == "rms_norm":
        return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=config.dtype, name=name)
    return nn.LayerNorm(
        epsilon=config.norm_epsilon, dtype=config.dtype, use_bias=config.use_bias, name=name
    )


def apply_with_remat(layer: nn.Module, x_BTD: jax.Array, *args: Any, **dropout_args) -> jax.Array:
    """Returns `layer(x_BTD, *args, **dropout_args)`, rematerialised by `remat`. Chen 2016, 4."""
    remat = layer.config.remat
    if remat == "none":
        return layer(x_BTD, *args, **dropout_args)
    apply = lambda layer, x_BTD: layer(x_BTD, *args, **dropout_args)  # noqa: E731
    return nn.remat(apply, policy=REMAT_POLICIES[remat])(layer, x_BTD)


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2 at each position. Section 3.3, equation 2: with a ReLU.

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
    """A sublayer with its residual connection, dropout and norm. Sections 3.1 and 5.4.

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
        return keep_rows_split(x_BTD)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: ModelConfig

    def setup(self):
        self.self_attention = MultiHeadAttention(self.config, is_self_attention=True)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self, x_BSD: jax.Array, mask: AttentionMask, bias: ScoreBias | None = None, **dropout_args
    ) -> jax.Array:
        """Maps (B, S, D) to (B, S, D); `bias`: added to the scores of self-attention."""
        attend = lambda x: self.self_attention(x, x, mask, bias, **dropout_args)  # noqa: E731
        x_BSD = self.self_attention_residual(x_BSD, attend, **dropout_args)
        return self.feed_forward_residual(x_BSD, self.feed_forward, **dropout_args)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention if the model has an encoder, then feed-forward."""

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
        cross_mask: AttentionMask | None = None,
        **dropout_args,
    ) -> jax.Array:
        """Maps (B, T, D) to (B, T, D).

        Args:
          bias: added to the scores of self-attention.
          memory: the encoder's output (B, S, D), or its projected keys and values.
        """

        def attend(x_BTD: jax.Array) -> jax.Array:
            return self.self_attention(x_BTD, x_BTD, mask, bias, **dropout_args)

        def cross_attend(x_BTD: jax.Array) -> jax.Array:
            if isinstance(memory, KVCache):
                return self.cross_attention.attend(x_BTD, memory, cross_mask, **dropout_args)
            return self.cross_attention(x_BTD, memory, cross_mask, **dropout_args)

        x_BTD = self.self_attention_residual(x_BTD, attend, **dropout_args)
        if self.has_encoder:
            x_BTD = self.cross_attention_residual(x_BTD, cross_attend, **dropout_args)
        return self.feed_forward_residual(x_BTD, self.feed_forward, **dropout_args)

    def step(
        self,
        x_BWD: jax.Array,
        cache: tuple[KVCache, KVCache | None],
        index: jax.Array,
        masks: tuple[AttentionMask, AttentionMask | None],
        bias: ScoreBias | None,
    ) -> tuple[jax.Array, KVCache]:
        """Applies the layer at position `index` of the W hypotheses of each row.

        Args:
          cache: keys and values of the previous tokens, L W entries, and of the encoder's output,
            S entries.
          masks: of self-attention to the cache, and of cross-attention.

        Returns:
          The output (B, W, D), and the cache of self-attention with the new position.
        """
        own, memory = cache

        def attend(x_BWD: jax.Array) -> jax.Array:
            nonlocal own
            own = own.write(self.self_attention.keys_values(x_BWD, masks[0].query), index)
            return self.self_attention.attend(x_BWD, own, masks[0], bias)

        x_BWD = self.self_attention_residual(x_BWD, attend)
        if self.has_encoder:
            cross_attend = lambda x: self.cross_attention.attend(x, memory, masks[1])  # noqa: E731
            x_BWD = self.cross_attention_residual(x_BWD, cross_attend)
        return self.feed_forward_residual(x_BWD, self.feed_forward), own
