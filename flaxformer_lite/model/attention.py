"""Scaled dot-product attention, multi-head attention, and the cache of keys and values for decoding. Section 3.2."""

from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model import backends
from flaxformer_lite.model.dense import Dense
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import RelativeVectors, ScoreBias, rotate


def dot_product_scores(query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
    """Q K^T / sqrt(d_k), (B, H, T, S) float32: the scores of equation 1, section 3.2.1."""
    scale = query_BTHK.shape[-1] ** -0.5
    return jnp.einsum("BTHK,BSHK->BHTS", query_BTHK * scale, key_BSHK, preferred_element_type=jnp.float32)


def additive_scores(query_BTHK: jax.Array, key_BSHK: jax.Array, vector_HK: jax.Array) -> jax.Array:
    """v . tanh(q + k), (B, H, T, S) float32: a network with one hidden layer. Bahdanau 2015, appendix A.1.2."""
    hidden_BTSHK = jnp.tanh(query_BTHK[:, :, None] + key_BSHK[:, None])
    return jnp.einsum("BTSHK,HK->BHTS", hidden_BTSHK, vector_HK, preferred_element_type=jnp.float32)


def softmax(scores_BHTS: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The weights of equation 1, (B, H, T, S): a softmax over the keys that `mask` allows.

    `mask`: bool, broadcast to the scores; True = may attend. A query that may attend to no key gets equal weights:
    finite, and meant to be ignored.
    """
    if mask is not None:
        scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores_BHTS, axis=-1)


def weighted_sum(weights_BHTS: jax.Array, value_BSHK: jax.Array) -> jax.Array:
    """The weighted sum of the values, (B, T, H, K): the last product of equation 1."""
    mixed_BHTK = jnp.einsum("BHTS,BSHK->BHTK", weights_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return mixed_BHTK.swapaxes(1, 2)


def dot_product_attention(
    query_BTHK: jax.Array, key_BSHK: jax.Array, value_BSHK: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1 of section 3.2.1: (B, T, H, K), and its weights (B, H, T, S)."""
    weights_BHTS = softmax(dot_product_scores(query_BTHK, key_BSHK), mask)
    return weighted_sum(weights_BHTS, value_BSHK), weights_BHTS


def repeat_heads(x_BSGK: jax.Array, query_BTHK: jax.Array) -> jax.Array:
    """Keys or values with one head for each head of the query, (B, S, H, K): head g serves H / G neighbours."""
    times = query_BTHK.shape[2] // x_BSGK.shape[2]
    return x_BSGK if times == 1 else jnp.repeat(x_BSGK, times, axis=2)


@flax.struct.dataclass
class KVCache:
    """Keys and values of one attention: the right-hand matrices of the two products of equation 1, head by head.

    In beam search each position has W entries, one a hypothesis, and S = L W.
    """

    key_BGKS: jax.Array
    value_BGSK: jax.Array

    @classmethod
    def of(cls, key_BSGK: jax.Array, value_BSGK: jax.Array) -> "KVCache":
        """The cache of keys and values as they are projected."""
        return cls(jnp.transpose(key_BSGK, (0, 2, 3, 1)), jnp.swapaxes(value_BSGK, 1, 2))

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> "KVCache":
        """Zeros; `shape`: (B, S, G, K)."""
        return cls.of(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def entries(self) -> int:
        """S."""
        return self.value_BGSK.shape[2]

    def projected(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values as they were projected, (B, S, G, K) each."""
        return jnp.transpose(self.key_BGKS, (0, 3, 1, 2)), jnp.swapaxes(self.value_BGSK, 1, 2)

    def extended(self, entries: int) -> "KVCache":
        """This cache with zeros after its entries, up to `entries` of them."""
        added = (0, entries - self.entries)
        return KVCache(
            jnp.pad(self.key_BGKS, ((0, 0), (0, 0), (0, 0), added)),
            jnp.pad(self.value_BGSK, ((0, 0), (0, 0), added, (0, 0))),
        )

    def write(self, new: "KVCache", index: jax.Array) -> "KVCache":
        """This cache with the entries of `new`, one (or W with beams), at position `index`."""
        start, update = index * new.entries, jax.lax.dynamic_update_slice_in_dim
        return KVCache(
            update(self.key_BGKS, new.key_BGKS.astype(self.key_BGKS.dtype), start, axis=3),
            update(self.value_BGSK, new.value_BGSK.astype(self.value_BGSK.dtype), start, axis=2),
        )


@flax.struct.dataclass
class DecoderCache:
    """What decoding keeps between steps, one `KVCache` a layer.

    In beam search W hypotheses of a row share the cache, and each position of self-attention has W entries. The search
    keeps track of which entries are a hypothesis's own, so that none is moved when hypotheses are reordered.
    """

    self_attention: tuple[KVCache, ...]  # W entries for each position; W = 1 without beams
    cross_attention: tuple[KVCache | None, ...]  # S entries: the encoder's output, projected once a sentence

    def extended(self, max_length: int, beam_size: int = 1) -> "DecoderCache":
        """This cache with zeros after its positions, up to `max_length` of them."""
        return self.replace(self_attention=tuple(own.extended(max_length * beam_size) for own in self.self_attention))


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: project, attend in `num_heads` subspaces, project back.

    With `num_kv_heads` G < H, each head of keys and values serves H / G heads of queries (Ainslie 2023; one for all:
    Shazeer 2019). Weights are sown as ('intermediates', 'attention_weights'): `apply(..., mutable=['intermediates'])`
    returns them, and otherwise nothing is kept.
    """

    config: ModelConfig
    is_self_attention: bool = (
        False  # self-attention, where position schemes act; else attention to the encoder's output
    )

    def setup(self):
        c = self.config
        d_head = c.d_head or c.d_model // c.num_heads
        num_kv_heads = c.num_kv_heads or c.num_heads
        self.query = Dense(c, (c.num_heads, d_head))
        self.key = Dense(c, (num_kv_heads, d_head))
        self.value = Dense(c, (num_kv_heads, d_head))
        self.out = Dense(c, (c.d_model,), axes=2)
        self.drop = Dropout(c.attention_dropout)
        if c.attention == "additive":
            self.score_vector = self.param("score_vector", nn.initializers.xavier_uniform(), (c.num_heads, d_head))
        if self.is_self_attention and c.position == "relative":
            self.relative = RelativeVectors(c)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, mask: AttentionMask, bias: ScoreBias | None = None, **mode
    ) -> jax.Array:
        """Attention from `x_BTD` to `memory_BSD` (the same array for self-attention): (B, T, D)."""
        return self.attend(x_BTD, self.keys_values(memory_BSD, mask.key), mask, bias, **mode)

    def keys_values(self, memory_BSD: jax.Array, positions: TokenPositions) -> KVCache:
        """Keys and values of the tokens of `memory_BSD`; `positions`: their positions and segments."""
        key_BSGK = self.key(memory_BSD)
        if self.is_self_attention:
            key_BSGK = rotate(key_BSGK, positions.position_BL, self.config)
        return KVCache.of(key_BSGK, self.value(memory_BSD))

    def attend(
        self,
        x_BTD: jax.Array,
        memory: KVCache,
        mask: AttentionMask,
        bias: ScoreBias | None = None,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Attention from `x_BTD` to keys and values that are already projected: (B, T, D)."""
        query_BTHK = self.query(x_BTD)
        if self.is_self_attention:
            query_BTHK = rotate(query_BTHK, mask.query.position_BL, self.config)
            if self.config.position == "relative":
                bias = self.relative.score_bias()
        key_BSGK, value_BSGK = memory.projected()
        why = self._wants_weights(deterministic)
        backend = backends.choose(self.config.backend, query_BTHK, key_BSGK, mask, bias, reference_only=why)
        if backend != "reference":
            return self.out(backends.attend(backend, query_BTHK, key_BSGK, value_BSGK, mask, bias))
        drop = lambda weights: self.drop(weights, deterministic=deterministic, row_B=row_B)  # noqa: E731
        return self.out(self._reference(query_BTHK, key_BSGK, value_BSGK, mask, bias, drop=drop))

    def _wants_weights(self, deterministic: bool) -> str | None:
        """Why the weights must exist as an array, if they must: only the reference makes one."""
        c = self.config
        if self.is_mutable_collection("intermediates") and not self.is_initializing():
            return "the attention weights are asked for"
        if c.attention == "additive":
            return "model.attention is 'additive'"
        if c.attention_dropout and not deterministic:
            return "model.attention_dropout acts on the weights"
        return "model.relative_values acts on the weights" if self._relative_values() else None

    def _relative_values(self) -> bool:
        return self.is_self_attention and self.config.position == "relative" and self.config.relative_values

    def _reference(
        self,
        query_BTHK: jax.Array,
        key_BSGK: jax.Array,
        value_BSGK: jax.Array,
        mask: AttentionMask,
        bias: ScoreBias | None,
        *,
        drop: Callable,
    ) -> jax.Array:
        """Attention as the paper writes it, with all its weights at once: (B, T, H, K)."""
        key_BSHK, value_BSHK = (repeat_heads(x_BSGK, query_BTHK) for x_BSGK in (key_BSGK, value_BSGK))
        positions = mask.query.position_BL, mask.key.position_BL
        scores_BHTS = self._scores(query_BTHK, key_BSHK)
        if bias is not None:
            scores_BHTS += jnp.broadcast_to(bias(query_BTHK, *positions), scores_BHTS.shape)
        weights_BHTS = softmax(scores_BHTS, mask.array())
        self.sow("intermediates", "attention_weights", weights_BHTS)
        weights_BHTS = drop(weights_BHTS)
        mixed_BTHK = weighted_sum(weights_BHTS, value_BSHK)
        if self._relative_values():
            mixed_BTHK += self.relative.values(weights_BHTS, *positions).astype(mixed_BTHK.dtype)
        return mixed_BTHK

    def _scores(self, query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
        if self.config.attention == "additive":
            return additive_scores(query_BTHK, key_BSHK, self.score_vector)
        return dot_product_scores(query_BTHK, key_BSHK)
