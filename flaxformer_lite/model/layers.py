"""The encoder and the decoder of figure 1, and their layers. Section 3.1."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.attention import MultiHeadAttention
from flaxformer_lite.model.dense import MATMUL, Dense
from flaxformer_lite.model.devices import keep_rows_split
from flaxformer_lite.model.dropout import Dropout, keep_mask
from flaxformer_lite.model.kv_cache import DecoderCache, KVCache
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import PositionBias, ScoreBias
from flaxformer_lite.system.errors import InputError

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
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


def apply_with_remat(
    layer: nn.Module, x_BTD: jax.Array, *args: Any, **dropout_args: Any
) -> jax.Array:
    """Returns `layer(x_BTD, *args, **dropout_args)`, rematerialised by `remat`. Chen 2016, 4."""
    remat = layer.config.remat
    if remat == "none":
        return layer(x_BTD, *args, **dropout_args)
    apply: Callable[..., Any] = lambda layer, x_BTD: layer(x_BTD, *args, **dropout_args)  # noqa: E731
    return nn.remat(apply, policy=REMAT_POLICIES[remat])(layer, x_BTD)


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2 at each position. Section 3.3, equation 2: with a ReLU.

    Gated (Shazeer 2020, equation 5): (activation(x V + c) * (x W1 + b1)) W2 + b2.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, **dropout_args: Any) -> jax.Array:
        c = self.config
        hidden_BTF = Dense(c, (c.d_ff,), name="inner")(x_BTD)
        if c.activation in GATES:
            gate_BTF = Dense(c, (c.d_ff,), name="gate")(x_BTD)
            hidden_BTF = ACTIVATIONS[GATES[c.activation]](gate_BTF) * hidden_BTF
        else:
            hidden_BTF = ACTIVATIONS[c.activation](hidden_BTF)
        hidden_BTF = Dropout(c.feed_forward_dropout)(hidden_BTF, **dropout_args)
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

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, is_self_attention=True)
        self.feed_forward = FeedForward(self.config)
        self.self_attention_residual = Residual(self.config)
        self.feed_forward_residual = Residual(self.config)

    def __call__(
        self,
        x_BSD: jax.Array,
        mask: AttentionMask,
        bias: ScoreBias | None = None,
        **dropout_args: Any,
    ) -> jax.Array:
        """Maps (B, S, D) to (B, S, D); `bias`: added to the scores of self-attention."""
        attend = lambda x: self.self_attention(x, x, mask, bias, **dropout_args)  # noqa: E731
        x_BSD = self.self_attention_residual(x_BSD, attend, **dropout_args)
        feed_forward = functools.partial(self.feed_forward, **dropout_args)
        return self.feed_forward_residual(x_BSD, feed_forward, **dropout_args)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention if the model has an encoder, then feed-forward."""

    config: ModelConfig
    has_encoder: bool = True

    def setup(self) -> None:
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
        **dropout_args: Any,
    ) -> jax.Array:
        """Maps (B, T, D) to (B, T, D).

        Args:
          bias: added to the scores of self-attention.
          memory: the encoder's output (B, S, D), or its projected keys and values.
        """

        def attend(x_BTD: jax.Array) -> jax.Array:
            return self.self_attention(x_BTD, x_BTD, mask, bias, **dropout_args)

        def cross_attend(x_BTD: jax.Array) -> jax.Array:
            assert memory is not None and cross_mask is not None, "the decoder has an encoder"
            if isinstance(memory, KVCache):
                return self.cross_attention.attend(x_BTD, memory, cross_mask, **dropout_args)
            return self.cross_attention(x_BTD, memory, cross_mask, **dropout_args)

        x_BTD = self.self_attention_residual(x_BTD, attend, **dropout_args)
        if self.has_encoder:
            x_BTD = self.cross_attention_residual(x_BTD, cross_attend, **dropout_args)
        feed_forward = functools.partial(self.feed_forward, **dropout_args)
        return self.feed_forward_residual(x_BTD, feed_forward, **dropout_args)

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
        (own, memory), (own_mask, memory_mask) = cache, masks

        def attend(x_BWD: jax.Array) -> jax.Array:
            nonlocal own
            own = own.write(self.self_attention.keys_values(x_BWD, own_mask.query), index)
            return self.self_attention.attend(x_BWD, own, own_mask, bias)

        def cross_attend(x_BWD: jax.Array) -> jax.Array:
            assert memory is not None and memory_mask is not None, "the decoder has an encoder"
            return self.cross_attention.attend(x_BWD, memory, memory_mask)

        x_BWD = self.self_attention_residual(x_BWD, attend)
        if self.has_encoder:
            x_BWD = self.cross_attention_residual(x_BWD, cross_attend)
        return self.feed_forward_residual(x_BWD, self.feed_forward), own


class LayerDrop(nn.Module):
    """Skips a layer for a row with probability `rate`; the identity if deterministic or at rate 0.

    Stochastic depth: Huang 2016, section 3. All layers have one rate, and inference uses all of
    them without scaling: Fan 2020, section 3.2. Each call has its own random bits, a function of
    the key, the number of the call and the row.
    """

    rate: float

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        output_BTD: jax.Array,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns for each row the layer's output, or its input `x_BTD`; `row_B`: see `Dropout`."""
        if deterministic or self.rate == 0:
            return output_BTD
        rows = jnp.arange(x_BTD.shape[0]) if row_B is None else row_B
        keep_B11 = keep_mask(self.make_rng("dropout"), rows, (x_BTD.shape[0], 1, 1), rate=self.rate)
        return jnp.where(keep_B11, output_BTD, x_BTD)


def make_layers(make: Callable[[], nn.Module], count: int, *, tied: bool) -> list[nn.Module]:
    """Returns the layers of a stack; tied ones are the same module, which is applied each time.

    Universal Transformer without its position and time signals: Dehghani 2019, section 2; ALBERT:
    Lan 2020, section 3.1.
    """
    return [make()] * count if tied else [make() for _ in range(count)]


# the output of the encoder (B, S, D), or the keys and values of `Decoder.project_memory`
Memory = jax.Array | tuple[KVCache, ...]


class Encoder(nn.Module):
    """A stack of encoder layers; with pre-LN a final norm follows. Section 3.1."""

    config: ModelConfig

    def setup(self) -> None:
        self.position_bias = PositionBias(self.config, bidirectional=True)
        c = self.config
        self.layers = make_layers(lambda: EncoderLayer(c), c.num_encoder_layers, tied=c.tie_layers)
        self.layer_drop = LayerDrop(c.layer_drop)
        if c.norm_placement == "pre":
            self.final_norm = make_norm(c)

    def __call__(
        self, x_BSD: jax.Array, positions: TokenPositions, **dropout_args: Any
    ) -> jax.Array:
        """Maps (B, S, D) to (B, S, D)."""
        mask = AttentionMask(positions, positions, window=self.config.attention_window)
        bias = self.position_bias()
        for layer in self.layers:
            output_BSD = apply_with_remat(layer, x_BSD, mask, bias, **dropout_args)
            x_BSD = self.layer_drop(x_BSD, output_BSD, **dropout_args)
        return self.final_norm(x_BSD) if self.config.norm_placement == "pre" else x_BSD


class Decoder(nn.Module):
    """A stack of decoder layers, with or without cross-attention to an encoder. Section 3.1."""

    config: ModelConfig
    has_encoder: bool = True

    def setup(self) -> None:
        c = self.config
        self.position_bias = PositionBias(c, bidirectional=c.decoder == "masked")
        self.layers = make_layers(
            lambda: DecoderLayer(c, self.has_encoder), c.num_decoder_layers, tied=c.tie_layers
        )
        self.layer_drop = LayerDrop(c.layer_drop)
        if c.norm_placement == "pre":
            self.final_norm = make_norm(c)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: TokenPositions,
        memory: Memory | None = None,
        memory_positions: TokenPositions | None = None,
        **dropout_args: Any,
    ) -> jax.Array:
        """Maps (B, T, D) to (B, T, D); `memory`: of the encoder, if the model has one."""
        # a masked decoder attends to both sides: Ghazvininejad 2019, section 2.1
        causal, window = self.config.decoder == "causal", self.config.attention_window
        mask = AttentionMask(positions, positions, causal=causal, window=window)
        cross_mask = (
            None if memory_positions is None else AttentionMask(positions, memory_positions)
        )
        bias = self.position_bias()
        memories = memory if isinstance(memory, tuple) else (memory,) * len(self.layers)
        for layer, each in zip(self.layers, memories, strict=True):
            arguments = (mask, bias, each, cross_mask)
            output_BTD = apply_with_remat(layer, x_BTD, *arguments, **dropout_args)
            x_BTD = self.layer_drop(x_BTD, output_BTD, **dropout_args)
        return self.final_norm(x_BTD) if self.config.norm_placement == "pre" else x_BTD

    def start_cache(self, batch_size: int, max_length: int, beam_size: int) -> tuple[KVCache, ...]:
        """Returns an empty cache of self-attention per layer.

        Each has `max_length` positions for each of `beam_size` hypotheses.

        Raises:
          InputError: `max_length` exceeds the table of learned positions.
        """
        c = self.config
        if c.position == "learned" and max_length > c.max_length:
            raise InputError(
                f"learned positions end at max_length = {c.max_length}, got a cache of "
                f"{max_length} positions; decode less, or use another position scheme."
            )
        d_head, num_kv_heads = c.d_head or c.d_model // c.num_heads, c.num_kv_heads or c.num_heads
        shape = (batch_size, max_length * beam_size, num_kv_heads, d_head)
        return (KVCache.empty(shape, c.dtype),) * c.num_decoder_layers

    def project_memory(
        self, memory_BSD: jax.Array, memory_positions: TokenPositions
    ) -> tuple[KVCache, ...]:
        """Returns the keys and values of cross-attention in every layer."""
        return tuple(
            layer.cross_attention.keys_values(memory_BSD, memory_positions) for layer in self.layers
        )

    def step(
        self,
        x_BWD: jax.Array,
        cache: DecoderCache,
        index: jax.Array,
        *,
        ancestor_BWT: jax.Array | None = None,
        memory_positions: TokenPositions | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """Applies the stack at position `index` of the W hypotheses of each row.

        `ancestor_BWT`: for each position, which of its W cache entries belongs to the hypothesis;
        None: W = 1. T may exceed the positions of the cache.
        """
        num_beams = x_BWD.shape[1]
        query = TokenPositions.at(jnp.reshape(index, (1,)))
        memory_mask = None
        if memory_positions is not None:
            memory_mask = AttentionMask(query, memory_positions)
        masks = self._step_mask(cache, index, num_beams, ancestor_BWT), memory_mask
        updated, bias = [], self.position_bias()
        caches = zip(cache.self_attention, cache.cross_attention, strict=True)
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x_BWD, own = layer.step(x_BWD, layer_cache, index, masks, bias)
            updated.append(own)
        x_BWD = self.final_norm(x_BWD) if self.config.norm_placement == "pre" else x_BWD
        return x_BWD, dataclasses.replace(cache, self_attention=tuple(updated))

    def _step_mask(
        self,
        cache: DecoderCache,
        index: jax.Array,
        num_beams: int,
        ancestor_BWT: jax.Array | None,
    ) -> AttentionMask:
        """Returns the mask of self-attention from position `index` to the cache."""
        L = cache.self_attention[0].entries // num_beams
        position_L, window = jnp.arange(L), self.config.attention_window
        if ancestor_BWT is None:
            query = TokenPositions.at(jnp.reshape(index, (1,)))
            return AttentionMask(query, TokenPositions.at(position_L), causal=True, window=window)
        own_BWLW = ancestor_BWT[:, :, :L, None] == jnp.arange(num_beams)[None, None, None]
        return AttentionMask(
            TokenPositions.at(jnp.broadcast_to(index, (num_beams,))),
            TokenPositions.at(jnp.repeat(position_L, num_beams)),
            causal=True,
            window=window,
            allowed_BTS=own_BWLW.reshape(*own_BWLW.shape[:2], -1),
        )
