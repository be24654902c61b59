"""Three models from one set of blocks, from token ids to logits: the encoder-decoder of Figure 1, and each half."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig, check_model
from flaxformer_lite.fields import BOS
from flaxformer_lite.model.attention import DecoderCache, KVCache
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.embeddings import Inputs, Output, project, token_embedding
from flaxformer_lite.model.layers import DecoderLayer, EncoderLayer, make_norm, run
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import PositionBias
from flaxformer_lite.system.errors import InputError

# The start symbol, which no source holds, stands in front of the source of a masked decoder: what the encoder makes of
# it tells the length of the target. Ghazvininejad 2019, section 2.3.
LENGTH = BOS

Memory = jax.Array | tuple[KVCache, ...]  # the encoder's output (B, S, D), or what `project_memory` makes of it


def build_model(config: ModelConfig) -> "EncoderDecoder | EncoderClassifier | DecoderLM":
    """The model that `config` describes.

    Raises:
      InputError: `vocab_size`, or a classifier's `num_classes`, is not set, or two fields contradict each other.
    """
    if config.vocab_size is None:
        raise InputError("ModelConfig.vocab_size: expected the number of token ids, got None; a model needs it.")
    check_model(config)
    if config.architecture == "encoder_classifier":
        if config.num_classes is None:
            raise InputError("ModelConfig.num_classes: expected how many classes there are, got None; set it.")
        return EncoderClassifier(config)
    return EncoderDecoder(config) if config.architecture == "encoder_decoder" else DecoderLM(config)


class Encoder(nn.Module):
    """A stack of encoder layers; pre-LN ends with one more norm, post-LN has none to add. Section 3.1."""

    config: ModelConfig

    def setup(self):
        self.position_bias = PositionBias(self.config, bidirectional=True)
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_encoder_layers)]
        if self.config.norm_placement == "pre":
            self.final_norm = make_norm(self.config)

    def __call__(self, x_BSD: jax.Array, positions: TokenPositions, **mode) -> jax.Array:
        """(B, S, D) to (B, S, D); `positions`: where its tokens stand."""
        mask, bias = AttentionMask(positions, positions, window=self.config.attention_window), self.position_bias()
        for layer in self.layers:
            x_BSD = run(layer, x_BSD, mask, bias, **mode)
        return self.final_norm(x_BSD) if self.config.norm_placement == "pre" else x_BSD


class Decoder(nn.Module):
    """A stack of decoder layers, with or without an encoder to attend to; section 3.1."""

    config: ModelConfig
    has_encoder: bool = True

    def setup(self):
        self.position_bias = PositionBias(self.config, bidirectional=self.config.decoder == "masked")
        self.layers = [DecoderLayer(self.config, self.has_encoder) for _ in range(self.config.num_decoder_layers)]
        if self.config.norm_placement == "pre":
            self.final_norm = make_norm(self.config)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions: TokenPositions,
        memory: Memory | None = None,
        memory_positions: TokenPositions | None = None,
        **mode,
    ) -> jax.Array:
        """(B, T, D) to (B, T, D), with an encoder's `memory` if there is one."""
        causal = self.config.decoder == "causal"  # else it sees all, as an encoder does: Ghazvininejad 2019, 2.1
        mask = AttentionMask(positions, positions, causal=causal, window=self.config.attention_window)
        cross = AttentionMask(positions, memory_positions) if self.has_encoder else None
        bias, memories = self.position_bias(), memory if isinstance(memory, tuple) else (memory,) * len(self.layers)
        for layer, memory in zip(self.layers, memories, strict=True):
            x_BTD = run(layer, x_BTD, mask, bias, memory, cross, **mode)
        return self.final_norm(x_BTD) if self.config.norm_placement == "pre" else x_BTD

    def start_cache(self, batch_size: int, max_length: int, beam_size: int) -> tuple[KVCache, ...]:
        """Empty caches of self-attention, one a layer, for `max_length` positions of each of `beam_size` hypotheses.

        Raises:
          InputError: learned positions have no vector for the last of them.
        """
        c = self.config
        if c.position == "learned" and max_length > c.max_length:
            raise InputError(
                f"learned positions end at max_length = {c.max_length}, got a cache of {max_length} positions; decode "
                "less, or use another position scheme."
            )
        d_head, num_kv_heads = c.d_head or c.d_model // c.num_heads, c.num_kv_heads or c.num_heads
        shape = (batch_size, max_length * beam_size, num_kv_heads, d_head)
        return (KVCache.empty(shape, c.dtype),) * c.num_decoder_layers

    def project_memory(self, memory_BSD: jax.Array, memory_positions: TokenPositions) -> tuple[KVCache, ...]:
        """The encoder's output as the keys and values of every layer."""
        return tuple(layer.cross_attention.keys_values(memory_BSD, memory_positions) for layer in self.layers)

    def step(
        self,
        x_BWD: jax.Array,
        cache: DecoderCache,
        index: jax.Array,
        *,
        ancestor_BWT: jax.Array | None = None,
        memory_positions: TokenPositions | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """The stack at position `index` of W hypotheses a row; W = 1 without beams.

        `ancestor_BWT`: which of the W entries that the cache has for each position is a hypothesis's own; None: W = 1.
        T may be more than the positions of the cache.
        """
        W = x_BWD.shape[1]
        L = cache.self_attention[0].entries // W
        query, position_L = TokenPositions.at(jnp.reshape(index, (1,))), jnp.arange(L)
        own_mask = AttentionMask(query, TokenPositions.at(position_L), causal=True, window=self.config.attention_window)
        if ancestor_BWT is not None:
            own_BWLW = ancestor_BWT[:, :, :L, None] == jnp.arange(W)[None, None, None]
            own_mask = own_mask.replace(
                query=TokenPositions.at(jnp.broadcast_to(index, (W,))),
                key=TokenPositions.at(jnp.repeat(position_L, W)),
                own_BTS=own_BWLW.reshape(*own_BWLW.shape[:2], -1),
            )
        masks = own_mask, AttentionMask(query, memory_positions) if self.has_encoder else None
        written, bias = [], self.position_bias()
        for layer, *layer_cache in zip(self.layers, cache.self_attention, cache.cross_attention, strict=True):
            x_BWD, own = layer.step(x_BWD, layer_cache, index, masks, bias)
            written.append(own)
        x_BWD = self.final_norm(x_BWD) if self.config.norm_placement == "pre" else x_BWD
        return x_BWD, cache.replace(self_attention=tuple(written))


class EncoderDecoder(nn.Module):
    """Source ids and target ids in, logits of the next target token out: the Transformer of Figure 1."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.target_embedding = token_embedding(c)
        self.source_embedding = self.target_embedding if c.tie_embeddings else token_embedding(c)
        self.source_inputs = Inputs(c, self.source_embedding)
        self.target_inputs = Inputs(c, self.target_embedding)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)
        self.output = Output(c, self.target_embedding)
        if c.decoder == "masked":
            self.length = nn.Dense(c.max_length, use_bias=c.use_bias, kernel_init=nn.initializers.xavier_uniform())

    def __call__(self, source_BS: jax.Array, target_BT: jax.Array, **options) -> jax.Array:
        """Logits (B, T, V), float32, of the token after each of `target_BT`; arguments as of `features`.

        Of a masked decoder: of each token itself.
        """
        return project(self.features(source_BS, target_BT, **options), self.output(), self.config)

    def features(self, source_BS: jax.Array, target_BT: jax.Array, **options) -> jax.Array:
        """What the decoder makes of each token, (B, T, D): all but the projection; arguments as below."""
        return self.features_and_lengths(source_BS, target_BT, **options)[0]

    def features_and_lengths(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        source_segment_BS: jax.Array | None = None,
        target_segment_BT: jax.Array | None = None,
        **mode,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`features`, and of a masked decoder the logits (B, max_length) of the target's length, else None.

        Args:
          source_BS: int32 ids, 0 = padding.
          target_BT: the decoder's input, already shifted right: it starts with the start symbol. A masked decoder's is
            not shifted, and some of its tokens are masked.
          source_segment_BS, target_segment_BT: for rows that hold several pairs, the number of each token's pair in
            its row, from 1; 0 = padding. None: one pair a row.
          mode: `deterministic=False` applies dropout and needs `rngs={'dropout': key}`; `row_B` is each row's number
            in the global batch, for dropout; without it 0, 1, 2, ...
        """
        if (source_segment_BS is None) != (target_segment_BT is None):
            raise InputError("Expected the segments of source and target, or of neither; got those of one side.")
        if source_segment_BS is not None and self.config.decoder == "masked":
            raise InputError("Expected one pair a row, whose length is predicted, got segments; leave them out.")
        source, target = (
            TokenPositions.of(source_BS, source_segment_BS),
            TokenPositions.of(target_BT, target_segment_BT),
        )
        memory_BSD, length_logits = self._encode(source_BS, source, **mode)
        return self._decode(target_BT, target, memory_BSD, source, **mode), length_logits

    def output_weights(self) -> dict[str, jax.Array]:
        """What `project` makes logits of features with."""
        return self.output()

    def _encode(self, source_BS: jax.Array, source: TokenPositions, **mode) -> tuple[jax.Array, jax.Array | None]:
        """The encoder's output (B, S, D), and of a masked decoder the logits of the target's length."""
        x_BSD = self.source_inputs(source_BS, source, **mode)
        if self.config.decoder == "causal":
            return self.encoder(x_BSD, source, **mode), None
        # One place before the source, which so stands where it always does, and every scheme has room for it; what is
        # added to embeddings is the first token's.
        ids_B1 = jnp.full_like(source_BS[:, :1], LENGTH)
        x_B1D = self.source_inputs(ids_B1, TokenPositions.of(ids_B1), **mode)
        x_BSD = self.encoder(jnp.concatenate([x_B1D, x_BSD], axis=1), source.with_one_before(), **mode)
        return x_BSD[:, 1:], self.length(x_BSD[:, 0].astype(jnp.float32))

    def _decode(
        self, target_BT: jax.Array, target: TokenPositions, memory: Memory, source: TokenPositions, **mode
    ) -> jax.Array:
        return self.decoder(self.target_inputs(target_BT, target, **mode), target, memory, source, **mode)

    def encode(self, source_BS: jax.Array, **mode) -> jax.Array:
        """The encoder's output, (B, S, D)."""
        return self._encode(source_BS, TokenPositions.of(source_BS), **mode)[0]

    def start_cache(self, source_BS: jax.Array, max_length: int, beam_size: int = 1) -> DecoderCache:
        """Encodes the source: the cache before the first of at most `max_length` calls of `decode_step`."""
        memory = self.decoder.project_memory(self.encode(source_BS), TokenPositions.of(source_BS))
        return DecoderCache(self.decoder.start_cache(source_BS.shape[0], max_length, beam_size), memory)

    def decode_step(
        self,
        token: jax.Array,
        cache: DecoderCache,
        index: jax.Array,
        source_BS: jax.Array,
        *,
        ancestor_BWT: jax.Array | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """Logits (B, V), or with beams (B, W, V), of the next token, and the cache with one more position.

        Args:
          token: (B,), or with beams (B, W); its position is `index`.
          ancestor_BWT: with beams, which of the W entries of each position is a hypothesis's own.
        """
        x_BWD = _embed_at(index, token, self.target_inputs)
        x_BWD, cache = self.decoder.step(
            x_BWD, cache, index, ancestor_BWT=ancestor_BWT, memory_positions=TokenPositions.of(source_BS)
        )
        return project(x_BWD, self.output(), self.config).reshape(*token.shape, -1), cache

    def start_filling(self, source_BS: jax.Array) -> tuple[tuple[KVCache, ...], jax.Array]:
        """Encodes the source for a masked decoder: what `fill` reads, and logits (B, max_length) of the length."""
        source = TokenPositions.of(source_BS)
        memory_BSD, length_logits = self._encode(source_BS, source)
        return self.decoder.project_memory(memory_BSD, source), length_logits

    def fill(self, target_BT: jax.Array, memory: tuple[KVCache, ...], source_BS: jax.Array) -> jax.Array:
        """What a masked decoder makes of each token, (B, T, D), given what `start_filling` made of the source."""
        return self._decode(target_BT, TokenPositions.of(target_BT), memory, TokenPositions.of(source_BS))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """`project` of what `fill` returned: (B, T, V), float32."""
        return project(x_BTD, self.output(), self.config)


def _embed_at(index: jax.Array, token: jax.Array, inputs: Inputs) -> jax.Array:
    """Tokens (B,) or (B, W) that all stand at position `index`, as the decoder's input: (B, W, D)."""
    return inputs(token.reshape(token.shape[0], -1), TokenPositions.at(jnp.reshape(index, (1,))), deterministic=True)


class EncoderClassifier(nn.Module):
    """Source ids in, logits of the classes of each text out: the encoder of Figure 1, pooled. Devlin 2019."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.source_inputs = Inputs(c, token_embedding(c))
        self.encoder = Encoder(c)
        self.drop = Dropout(c.dropout)
        init = nn.initializers.xavier_uniform()
        self.classes = nn.Dense(c.num_classes, use_bias=c.use_bias, dtype=jnp.float32, kernel_init=init)

    def __call__(self, source_BS: jax.Array, **mode) -> jax.Array:
        """Logits (B, C), float32, for ids with 0 = padding; `mode` as in `EncoderDecoder`."""
        source = TokenPositions.of(source_BS)
        x_BSD = self.encoder(self.source_inputs(source_BS, source, **mode), source, **mode)
        return self.classes(self.drop(self._pool(x_BSD.astype(jnp.float32), source), **mode))

    def _pool(self, x_BSD: jax.Array, source: TokenPositions) -> jax.Array:
        """One vector a text, (B, D): the first token's, or the mean over tokens that are not padding."""
        if self.config.pooling == "first":
            return x_BSD[:, 0]
        held_BS = (source.segment_BL != 0).astype(x_BSD.dtype)
        return jnp.einsum("BSD,BS->BD", x_BSD, held_BS) / jnp.maximum(held_BS.sum(axis=1), 1)[:, None]


class DecoderLM(nn.Module):
    """Ids in, logits of the next token out: the decoder of Figure 1 without an encoder to attend to. Radford 2018."""

    config: ModelConfig

    def setup(self):
        c = self.config
        self.target_embedding = token_embedding(c)
        self.target_inputs = Inputs(c, self.target_embedding)
        self.decoder = Decoder(c, has_encoder=False)
        self.output = Output(c, self.target_embedding)

    def __call__(self, target_BT: jax.Array, **options) -> jax.Array:
        """Logits (B, T, V), float32, of the token after each of `target_BT`; arguments as of `features`."""
        return project(self.features(target_BT, **options), self.output(), self.config)

    def features(self, target_BT: jax.Array, *, segment_BT: jax.Array | None = None, **mode) -> jax.Array:
        """What the decoder makes of each token, (B, T, D): all but the projection to logits.

        Args:
          target_BT: int32 ids, 0 = padding; each text starts with the start symbol.
          segment_BT: for rows that hold several texts, the number of each token's text in its row, from 1; 0 =
            padding. None: one text a row.
          mode: as in `EncoderDecoder`.
        """
        target = TokenPositions.of(target_BT, segment_BT)
        return self.decoder(self.target_inputs(target_BT, target, **mode), target, **mode)

    def output_weights(self) -> dict[str, jax.Array]:
        """What `project` makes logits of features with."""
        return self.output()

    def start_cache(self, batch_size: int, max_length: int, beam_size: int = 1) -> DecoderCache:
        """The cache before the first of at most `max_length` calls of `decode_step`."""
        own = self.decoder.start_cache(batch_size, max_length, beam_size)
        return DecoderCache(own, (None,) * len(own))

    def decode_step(
        self, token: jax.Array, cache: DecoderCache, index: jax.Array, *, ancestor_BWT: jax.Array | None = None
    ) -> tuple[jax.Array, DecoderCache]:
        """Logits (B, V), or (B, W, V), of the next token, and the cache with one more position."""
        x_BWD = _embed_at(index, token, self.target_inputs)
        x_BWD, cache = self.decoder.step(x_BWD, cache, index, ancestor_BWT=ancestor_BWT)
        return project(x_BWD, self.output(), self.config).reshape(*token.shape, -1), cache
