"""The 3 models, from token ids to logits: the encoder-decoder of Figure 1, and each half of it."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.checks.model_checks import check_model
from flaxformer_lite.fields import BOS, PAD, ModelConfig
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.embeddings import Inputs, Output, project, token_embedding
from flaxformer_lite.model.kv_cache import DecoderCache, KVCache
from flaxformer_lite.model.layers import Decoder, Encoder, Memory
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.system.errors import InputError

# A model with a masked decoder prepends this token, the start symbol, to the source. The encoder's
# output at this token predicts the length of the target. Ghazvininejad 2019, section 2.3.
LENGTH = BOS


def build_model(config: ModelConfig) -> "EncoderDecoder | EncoderClassifier | DecoderLM":
    """Returns the model that `config` describes.

    Raises:
      InputError: `vocab_size`, or a classifier's `num_classes`, is not set, a model without a
        source and a target has `target_vocab_size`, or 2 other fields contradict each other.
    """
    if config.vocab_size is None:
        raise InputError(
            "ModelConfig.vocab_size: expected the number of token ids, got None; set it."
        )
    if config.target_vocab_size is not None and config.architecture != "encoder_decoder":
        raise InputError(
            "ModelConfig.target_vocab_size: expected None with architecture="
            f"{config.architecture!r}, which has one vocabulary, got {config.target_vocab_size}; "
            "leave it unset."
        )
    check_model(config)
    if config.architecture == "encoder_classifier":
        if config.num_classes is None:
            raise InputError(
                "ModelConfig.num_classes: expected the number of classes, got None; set it."
            )
        return EncoderClassifier(config)
    return EncoderDecoder(config) if config.architecture == "encoder_decoder" else DecoderLM(config)


class EncoderDecoder(nn.Module):
    """The Transformer of Figure 1: source and target ids to logits of the next target token."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.target_embedding = token_embedding(c)
        self.source_embedding = (
            self.target_embedding if c.ties_source else token_embedding(c, side="source")
        )
        self.source_inputs = Inputs(c, self.source_embedding)
        self.target_inputs = Inputs(c, self.target_embedding)
        self.encoder = Encoder(c)
        self.decoder = Decoder(c)
        self.output = Output(c, self.target_embedding)
        if c.decoder == "masked":
            self.length = nn.Dense(
                c.max_length, use_bias=c.use_bias, kernel_init=nn.initializers.xavier_uniform()
            )

    def __call__(self, source_BS: jax.Array, target_BT: jax.Array, **options: Any) -> jax.Array:
        """Returns logits (B, T, V), float32, of the token after each token of `target_BT`.

        With a masked decoder: of the token itself. Arguments as of `features_and_lengths`.
        """
        return project(self.features(source_BS, target_BT, **options), self.output(), self.config)

    def features(self, source_BS: jax.Array, target_BT: jax.Array, **options: Any) -> jax.Array:
        """Returns the decoder's output, (B, T, D); arguments as of `features_and_lengths`."""
        return self.features_and_lengths(source_BS, target_BT, **options)[0]

    def features_and_lengths(
        self,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        source_segment_BS: jax.Array | None = None,
        target_segment_BT: jax.Array | None = None,
        **dropout_args: Any,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns `features`, and with a masked decoder the logits of the target's length.

        Args:
          source_BS: int32 ids, 0 = padding.
          target_BT: the decoder's input, shifted right: it starts with the start symbol. With a
            masked decoder it is not shifted, and some of its tokens are masked.
          source_segment_BS, target_segment_BT: for packed rows, the number of each token's pair in
            its row, from 1; 0 = padding. None: one pair per row.
          dropout_args: `deterministic=False` applies dropout and requires `rngs={'dropout': key}`;
            `row_B` is each row's number in the global batch, by default 0, 1, 2, ...

        Returns:
          The decoder's output (B, T, D); and logits (B, max_length) with a masked decoder, else
          None.

        Raises:
          InputError: one side alone has segments, or a masked decoder gets segments.
        """
        if (source_segment_BS is None) != (target_segment_BT is None):
            raise InputError(
                "source_segment_BS, target_segment_BT: expected both or neither, got one; "
                "pass the segments of both sides."
            )
        if source_segment_BS is not None and self.config.decoder == "masked":
            raise InputError(
                "Expected one pair a row, whose length is predicted, got segments; leave them out."
            )
        source = TokenPositions.of(source_BS, source_segment_BS)
        target = TokenPositions.of(target_BT, target_segment_BT)
        memory_BSD, length_logits = self._encode(source_BS, source, **dropout_args)
        return self._decode(target_BT, target, memory_BSD, source, **dropout_args), length_logits

    def output_weights(self) -> dict[str, jax.Array]:
        """Returns the weights with which `project` maps features to logits."""
        return self.output()

    def _encode(
        self, source_BS: jax.Array, source: TokenPositions, **dropout_args: Any
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the encoder's output, and with a masked decoder the logits of the length."""
        x_BSD = self.source_inputs(source_BS, source, **dropout_args)
        if self.config.decoder == "causal":
            return self.encoder(x_BSD, source, **dropout_args), None
        # The LENGTH token has position -1, so that the source keeps its positions and its length
        # limit. Schemes that add vectors to embeddings use the vector of position 0 for it.
        ids_B1 = jnp.full_like(source_BS[:, :1], LENGTH)
        x_B1D = self.source_inputs(ids_B1, TokenPositions.of(ids_B1), **dropout_args)
        x_BSD = jnp.concatenate([x_B1D, x_BSD], axis=1)
        x_BSD = self.encoder(x_BSD, source.with_prefix_token(), **dropout_args)
        return x_BSD[:, 1:], self.length(x_BSD[:, 0].astype(jnp.float32))

    def _decode(
        self,
        target_BT: jax.Array,
        target: TokenPositions,
        memory: Memory,
        source: TokenPositions,
        **dropout_args: Any,
    ) -> jax.Array:
        x_BTD = self.target_inputs(target_BT, target, **dropout_args)
        return self.decoder(x_BTD, target, memory, source, **dropout_args)

    def encode(self, source_BS: jax.Array, **dropout_args: Any) -> jax.Array:
        """Returns the encoder's output, (B, S, D)."""
        return self._encode(source_BS, TokenPositions.of(source_BS), **dropout_args)[0]

    def start_cache(
        self, source_BS: jax.Array, max_length: int, beam_size: int = 1
    ) -> DecoderCache:
        """Encodes the source; returns the cache for at most `max_length` calls of `decode_step`."""
        memory = self.decoder.project_memory(self.encode(source_BS), TokenPositions.of(source_BS))
        own = self.decoder.start_cache(source_BS.shape[0], max_length, beam_size)
        return DecoderCache(own, memory)

    def decode_step(
        self,
        token: jax.Array,
        cache: DecoderCache,
        index: jax.Array,
        source_BS: jax.Array,
        *,
        ancestor_BWT: jax.Array | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """Returns logits of the next token, (B, V) or with beams (B, W, V), and the updated cache.

        Args:
          token: ids (B,), or with beams (B, W), at position `index`.
          ancestor_BWT: with beams, for each position, which of its W cache entries belongs to the
            hypothesis.
        """
        x_BWD = _embed_at(index, token, self.target_inputs)
        memory = {"memory_positions": TokenPositions.of(source_BS)}
        x_BWD, cache = self.decoder.step(x_BWD, cache, index, ancestor_BWT=ancestor_BWT, **memory)
        return project(x_BWD, self.output(), self.config).reshape(*token.shape, -1), cache

    def start_filling(self, source_BS: jax.Array) -> tuple[tuple[KVCache, ...], jax.Array | None]:
        """Encodes the source for a masked decoder.

        Returns:
          The keys and values for `fill`, and logits (B, max_length) of the target's length.
        """
        source = TokenPositions.of(source_BS)
        memory_BSD, length_logits = self._encode(source_BS, source)
        return self.decoder.project_memory(memory_BSD, source), length_logits

    def fill(
        self, target_BT: jax.Array, memory: tuple[KVCache, ...], source_BS: jax.Array
    ) -> jax.Array:
        """Returns a masked decoder's output, (B, T, D); `memory`: from `start_filling`."""
        target, source = TokenPositions.of(target_BT), TokenPositions.of(source_BS)
        return self._decode(target_BT, target, memory, source)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the logits of the output of `fill`: (B, T, V), float32."""
        return project(x_BTD, self.output(), self.config)


def _embed_at(index: jax.Array, token: jax.Array, inputs: Inputs) -> jax.Array:
    """Returns the decoder's input (B, W, D) for tokens (B,) or (B, W) at position `index`."""
    positions = TokenPositions.at(jnp.reshape(index, (1,)))
    return inputs(token.reshape(token.shape[0], -1), positions, deterministic=True)


class EncoderClassifier(nn.Module):
    """The encoder of Figure 1, pooled: source ids to logits of the classes. Devlin 2019."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.source_inputs = Inputs(c, token_embedding(c))
        self.encoder = Encoder(c)
        self.drop = Dropout(c.dropout)
        assert c.num_classes is not None, "build_model requires it"
        init = nn.initializers.xavier_uniform()
        self.classes = nn.Dense(
            c.num_classes, use_bias=c.use_bias, dtype=jnp.float32, kernel_init=init
        )

    def __call__(self, source_BS: jax.Array, **dropout_args: Any) -> jax.Array:
        """Returns logits (B, C), float32; arguments as of `EncoderDecoder`."""
        source = TokenPositions.of(source_BS)
        x_BSD = self.source_inputs(source_BS, source, **dropout_args)
        x_BSD = self.encoder(x_BSD, source, **dropout_args)
        x_BD = self._pool(x_BSD.astype(jnp.float32), source)
        return self.classes(self.drop(x_BD, **dropout_args))

    def _pool(self, x_BSD: jax.Array, source: TokenPositions) -> jax.Array:
        """Returns a vector per text, (B, D): the first token's, or the mean without padding."""
        if self.config.pooling == "first":
            return x_BSD[:, 0]
        is_token_BS = (source.segment_BL != PAD).astype(x_BSD.dtype)
        count_B = jnp.maximum(is_token_BS.sum(axis=1), 1)
        return jnp.einsum("BSD,BS->BD", x_BSD, is_token_BS) / count_B[:, None]


class DecoderLM(nn.Module):
    """The decoder of Figure 1 without an encoder: ids to logits of the next token. Radford 2018."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.target_embedding = token_embedding(c)
        self.target_inputs = Inputs(c, self.target_embedding)
        self.decoder = Decoder(c, has_encoder=False)
        self.output = Output(c, self.target_embedding)

    def __call__(self, target_BT: jax.Array, **options: Any) -> jax.Array:
        """Returns logits (B, T, V), float32, of the token after each token of `target_BT`.

        Arguments as of `features`.
        """
        return project(self.features(target_BT, **options), self.output(), self.config)

    def features(
        self, target_BT: jax.Array, *, segment_BT: jax.Array | None = None, **dropout_args: Any
    ) -> jax.Array:
        """Returns the decoder's output, (B, T, D).

        Args:
          target_BT: int32 ids, 0 = padding; each text starts with the start symbol.
          segment_BT: for packed rows, the number of each token's text in its row, from 1; 0 =
            padding. None: one text per row.
          dropout_args: as of `EncoderDecoder.features_and_lengths`.
        """
        target = TokenPositions.of(target_BT, segment_BT)
        x_BTD = self.target_inputs(target_BT, target, **dropout_args)
        return self.decoder(x_BTD, target, **dropout_args)

    def output_weights(self) -> dict[str, jax.Array]:
        """Returns the weights with which `project` maps features to logits."""
        return self.output()

    def start_cache(self, batch_size: int, max_length: int, beam_size: int = 1) -> DecoderCache:
        """Returns an empty cache for at most `max_length` calls of `decode_step`."""
        own = self.decoder.start_cache(batch_size, max_length, beam_size)
        return DecoderCache(own, (None,) * len(own))

    def decode_step(
        self,
        token: jax.Array,
        cache: DecoderCache,
        index: jax.Array,
        *,
        ancestor_BWT: jax.Array | None = None,
    ) -> tuple[jax.Array, DecoderCache]:
        """As `EncoderDecoder.decode_step`."""
        x_BWD = _embed_at(index, token, self.target_inputs)
        x_BWD, cache = self.decoder.step(x_BWD, cache, index, ancestor_BWT=ancestor_BWT)
        return project(x_BWD, self.output(), self.config).reshape(*token.shape, -1), cache
