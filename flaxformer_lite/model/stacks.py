"""The encoder and the decoder of Figure 1: stacks of layers. Section 3.1."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.kv_cache import DecoderCache, KVCache
from flaxformer_lite.model.layers import DecoderLayer, EncoderLayer, apply_with_remat, make_norm
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import PositionBias
from flaxformer_lite.system.errors import InputError

# the encoder's output (B, S, D), or the keys and values of `project_memory`
Memory = jax.Array | tuple[KVCache, ...]


class Encoder(nn.Module):
    """A stack of encoder layers; with pre-LN a final norm follows. Section 3.1."""

    config: ModelConfig

    def setup(self):
        self.position_bias = PositionBias(self.config, bidirectional=True)
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_encoder_layers)]
        if self.config.norm_placement == "pre":
            self.final_norm = make_norm(self.config)

    def __call__(self, x_BSD: jax.Array, positions: TokenPositions, **dropout_args) -> jax.Array:
        """Maps (B, S, D) to (B, S, D)."""
        mask = AttentionMask(positions, positions, window=self.config.attention_window)
        bias = self.position_bias()
        for layer in self.layers:
            x_BSD = apply_with_remat(layer, x_BSD, mask, bias, **dropout_args)
        return self.final_norm(x_BSD) if self.config.norm_placement == "pre" else x_BSD


class Decoder(nn.Module):
    """A stack of decoder layers, with or without cross-attention to an encoder. Section 3.1."""

    config: ModelConfig
    has_encoder: bool = True

    def setup(self):
        c = self.config
        self.position_bias = PositionBias(c, bidirectional=c.decoder == "masked")
        self.layers = [DecoderLayer(c, self.has_encoder) for _ in range(c.num_decoder_layers)]
        if c.norm_placement == "pre":
            self.final_norm = make_norm(c)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: TokenPositions,
        memory: Memory | None = None,
        memory_positions: TokenPositions | None = None,
        **dropout_args,
    ) -> jax.Array:
        """Maps (B, T, D) to (B, T, D); `memory`: of the encoder, if the model has one."""
        # a masked decoder attends to both sides: Ghazvininejad 2019, section 2.1
        causal, window = self.config.decoder == "causal", self.config.attention_window
        mask = AttentionMask(positions, positions, causal=causal, window=window)
        cross_mask = AttentionMask(positions, memory_positions) if self.has_encoder else None
        bias = self.position_bias()
        memories = memory if isinstance(memory, tuple) else (memory,) * len(self.layers)
        for layer, memory in zip(self.layers, memories, strict=True):
            x_BTD = apply_with_remat(layer, x_BTD, mask, bias, memory, cross_mask, **dropout_args)
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
        memory_mask = AttentionMask(query, memory_positions) if self.has_encoder else None
        masks = self._step_mask(cache, index, num_beams, ancestor_BWT), memory_mask
        updated, bias = [], self.position_bias()
        for layer, *layer_cache in zip(
            self.layers, cache.self_attention, cache.cross_attention, strict=True
        ):
            x_BWD, own = layer.step(x_BWD, layer_cache, index, masks, bias)
            updated.append(own)
        x_BWD = self.final_norm(x_BWD) if self.config.norm_placement == "pre" else x_BWD
        return x_BWD, cache.replace(self_attention=tuple(updated))

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
