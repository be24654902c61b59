"""The encoder-decoder of "Attention Is All You Need": Figure 1, from token ids to logits."""

import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig, check_model
from flaxformer_lite.model import masks
from flaxformer_lite.model.attention import KVCache
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.layers import DecoderLayer, EncoderLayer, layer_norm
from flaxformer_lite.model.positions import LearnedPositions, sinusoidal


def build_model(config: ModelConfig) -> "EncoderDecoder":
    """The model that `config` describes.

    Raises:
      ValueError: `vocab_size` is not set, or two fields contradict each other.
    """
    if config.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size: expected the number of token ids, got None; a model needs it.")
    check_model(config)
    return EncoderDecoder(config)


def token_embedding(config: ModelConfig) -> nn.Embed:
    """(V, D) table; its standard deviation of d_model^-0.5 gives unit variance after the scaling of section 3.4."""
    init = nn.initializers.normal(config.d_model**-0.5)
    return nn.Embed(config.vocab_size, config.d_model, embedding_init=init, dtype=config.dtype)


class Inputs(nn.Module):
    """Token embeddings times sqrt(d_model), plus positions, then dropout; sections 3.4, 3.5 and 5.4."""

    config: ModelConfig
    embedding: nn.Embed

    def setup(self):
        if self.config.position == "learned":
            self.learned_positions = LearnedPositions(self.config.max_length, self.config.d_model)
        self.drop = Dropout(self.config.dropout)

    def __call__(self, ids_BL: jax.Array, *, first_position: jax.Array | int = 0, **mode) -> jax.Array:
        """(B, L, D) for ids at positions `first_position`, `first_position` + 1, ..."""
        position_L = first_position + jnp.arange(ids_BL.shape[1])
        if self.config.position == "learned":
            position_LD = self.learned_positions(position_L)
        else:
            position_LD = sinusoidal(position_L, self.config.d_model)
        x_BLD = self.embedding(ids_BL) * jnp.sqrt(self.config.d_model).astype(self.config.dtype)
        return self.drop(x_BLD + position_LD[None].astype(x_BLD.dtype), **mode)


class Encoder(nn.Module):
    """A stack of encoder layers; pre-LN ends with one more LayerNorm, post-LN has none to add. Section 3.1."""

    config: ModelConfig

    def setup(self):
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_encoder_layers)]
        if self.config.norm_placement == "pre":
            self.final_norm = layer_norm(self.config)

    def __call__(self, x_BSD: jax.Array, mask: jax.Array, **mode) -> jax.Array:
        for layer in self.layers:
            x_BSD = layer(x_BSD, mask, **mode)
        return self.final_norm(x_BSD) if self.config.norm_placement == "pre" else x_BSD


@flax.struct.dataclass
class DecoderCache:
    """What decoding keeps between steps, one `KVCache` a layer."""

    self_attention: tuple[KVCache, ...]  # (B, max_length, H, K): grows by a position a step
    cross_attention: tuple[KVCache, ...]  # (B, S, H, K): the encoder's output, projected once a sentence


class Decoder(nn.Module):
    """A stack of decoder layers; section 3.1."""

    config: ModelConfig

    def setup(self):
        self.layers = [DecoderLayer(self.config) for _ in range(self.config.num_decoder_layers)]
        if self.config.norm_placement == "pre":
            self.final_norm = layer_norm(self.config)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, mask: jax.Array, cross_mask: jax.Array, **mode
    ) -> jax.Array:
        for layer in self.layers:
            x_BTD = layer(x_BTD, memory_BSD, mask, cross_mask, **mode)
        return self.final_norm(x_BTD) if self.config.norm_placement == "pre" else x_BTD

    def start_cache(self, memory_BSD: jax.Array, max_length: int) -> DecoderCache:
        """An empty self-attention cache and the encoder's output, projected for every layer."""
        cross = tuple(layer.cross_attention.keys_values(memory_BSD) for layer in self.layers)
        batch, _, heads, d_head = cross[0].key.shape
        empty = KVCache.empty((batch, max_length, heads, d_head), cross[0].key.dtype)
        return DecoderCache(self_attention=(empty,) * len(cross), cross_attention=cross)

    def step(
        self, x_B1D: jax.Array, cache: DecoderCache, index: jax.Array, cross_mask: jax.Array
    ) -> tuple[jax.Array, DecoderCache]:
        """The stack at the one position `index`."""
        grown = []
        mask = masks.up_to(index, cache.self_attention[0].key.shape[1])
        for layer, own, memory in zip(self.layers, cache.self_attention, cache.cross_attention, strict=True):
            x_B1D, own = layer.step(x_B1D, own, index, memory, (mask, cross_mask))
            grown.append(own)
        x_B1D = self.final_norm(x_B1D) if self.config.norm_placement == "pre" else x_B1D
        return x_B1D, cache.replace(self_attention=tuple(grown))


class EncoderDecoder(nn.Module):
    """Source ids and target ids in, logits of the next target token out."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.target_embedding = token_embedding(c)
        self.source_embedding = self.target_embedding if c.tie_embeddings else token_embedding(c)
        self.source_inputs = Inputs(c, self.source_embedding)
        self.target_inputs = Inputs(c, self.target_embedding)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)
        if not c.tie_embeddings:
            init = nn.initializers.xavier_uniform()
            dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
            self.output = nn.Dense(c.vocab_size, use_bias=False, dtype=c.dtype, kernel_init=init, dot_general=dot)

    def __call__(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, T, V), float32, of the token after each of `target_BT`.

        Args:
          source_BS: int32 ids, 0 = padding.
          target_BT: the decoder's input, already shifted right: it starts with the start symbol.
          deterministic: False applies dropout and needs `rngs={'dropout': key}`.
          row_B: each row's number in the global batch, for dropout; None: 0, 1, 2, ...
        """
        mode = {"deterministic": deterministic, "row_B": row_B}
        return self.decode(target_BT, self.encode(source_BS, **mode), source_BS, **mode)

    def encode(self, source_BS: jax.Array, *, deterministic: bool = True, row_B: jax.Array | None = None):
        """The encoder's output, (B, S, D)."""
        mode = {"deterministic": deterministic, "row_B": row_B}
        return self.encoder(self.source_inputs(source_BS, **mode), masks.padding(source_BS), **mode)

    def decode(
        self,
        target_BT: jax.Array,
        memory_BSD: jax.Array,
        source_BS: jax.Array,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, T, V) of the token after each of `target_BT`, given the encoder's output."""
        mode = {"deterministic": deterministic, "row_B": row_B}
        mask = masks.combine(masks.causal(target_BT.shape[1]), masks.padding(target_BT))
        x_BTD = self.target_inputs(target_BT, **mode)
        return self.logits(self.decoder(x_BTD, memory_BSD, mask, masks.padding(source_BS), **mode))

    def start_cache(self, memory_BSD: jax.Array, max_length: int) -> DecoderCache:
        """The cache before the first of at most `max_length` calls of `decode_step`."""
        return self.decoder.start_cache(memory_BSD, max_length)

    def decode_step(
        self, token_B: jax.Array, cache: DecoderCache, index: jax.Array, source_BS: jax.Array
    ) -> tuple[jax.Array, DecoderCache]:
        """Logits (B, V) of the token after `token_B`, which stands at position `index`, and the grown cache."""
        x_B1D = self.target_inputs(token_B[:, None], first_position=index, deterministic=True)
        x_B1D, cache = self.decoder.step(x_B1D, cache, index, masks.padding(source_BS))
        return self.logits(x_B1D)[:, 0], cache

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """The final projection, (B, T, V) float32; with tied embeddings its matrix is theirs. Section 3.4."""
        if not self.config.tie_embeddings:
            return self.output(x_BTD)
        table_VD = self.target_embedding.embedding.astype(x_BTD.dtype)
        return jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
