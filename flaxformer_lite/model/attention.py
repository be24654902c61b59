"""Attention with weights to look at, many heads of it, and the cache of keys and values for decoding."""

import functools
import itertools
from collections.abc import Callable, Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model import backends
from flaxformer_lite.model.dense import Dense
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.masks import Pattern, Places
from flaxformer_lite.model.positions import RelativeVectors, ScoreBias, rotate

# Keys and values, (B, S, G, K) each, in one piece, or in decoding in several, one after another.
Pieces = Sequence[tuple[jax.Array, jax.Array]]


def dot_product_scores(query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
    """Q K^T / sqrt(d_k), (B, H, T, S) float32: the scores of equation 1, section 3.2.1."""
    scale = query_BTHK.shape[-1] ** -0.5
    return jnp.einsum("BTHK,BSHK->BHTS", query_BTHK * scale, key_BSHK, preferred_element_type=jnp.float32)


def additive_scores(query_BTHK: jax.Array, key_BSHK: jax.Array, vector_HK: jax.Array) -> jax.Array:
    """v . tanh(q + k), (B, H, T, S) float32: a network with one hidden layer. Bahdanau 2015, appendix A.1.2."""
    hidden_BTSHK = jnp.tanh(query_BTHK[:, :, None] + key_BSHK[:, None])
    return jnp.einsum("BTSHK,HK->BHTS", hidden_BTSHK, vector_HK, preferred_element_type=jnp.float32)


def softmax(scores_BHTS: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The weights of equation 1, (B, H, T, S): over the keys that `mask` (bool, broadcast to them) lets a query see.

    A query that may attend to nothing gets equal weights: finite, and meant to be ignored.
    """
    if mask is not None:
        scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores_BHTS, axis=-1)


def mix(weights_BHTS: jax.Array, value_BSHK: jax.Array) -> jax.Array:
    """The mean of the values by the weights, (B, T, H, K): the last product of equation 1."""
    mixed_BHTK = jnp.einsum("BHTS,BSHK->BHTK", weights_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return mixed_BHTK.swapaxes(1, 2)  # asked for at once, this order takes a CPU four times as long in decoding


def dot_product_attention(
    query_BTHK: jax.Array, key_BSHK: jax.Array, value_BSHK: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1 of section 3.2.1: (B, T, H, K), and its weights (B, H, T, S)."""
    weights_BHTS = softmax(dot_product_scores(query_BTHK, key_BSHK), mask)
    return mix(weights_BHTS, value_BSHK), weights_BHTS


def repeat_heads(x_BSGK: jax.Array, query_BTHK: jax.Array) -> jax.Array:
    """Keys or values with one head for each of the query's, (B, S, H, K): head g serves H / G neighbours."""
    times = query_BTHK.shape[2] // x_BSGK.shape[2]
    return x_BSGK if times == 1 else jnp.repeat(x_BSGK, times, axis=2)


@flax.struct.dataclass
class KVCache:
    """Keys and values of one attention, S entries; the position to write next is the caller's to keep.

    They lie as the two products of a decoding step read them: the right matrix of either, head by head. With the keys
    the other way around a CPU takes four times as long for the first. With beams, W entries for each position.

    A cache that grows goes on in a new piece: what was written before is not copied, and a CPU compares with 64 keys
    and 80 more in half of the time that it takes with 144.
    """

    key_BGKS: jax.Array  # the last piece, as `value_BGSK`
    value_BGSK: jax.Array
    before: "KVCache | None" = None  # what it was before it grew, all of it written; those entries come first

    @classmethod
    def of(cls, key_BSGK: jax.Array, value_BSGK: jax.Array) -> "KVCache":
        """Keys and values as they are projected."""
        return cls(jnp.transpose(key_BSGK, (0, 2, 3, 1)), jnp.swapaxes(value_BSGK, 1, 2))

    def projected(self) -> Pieces:
        """Keys and values as they were projected: one piece, and one more for each time that it has grown."""
        own = jnp.transpose(self.key_BGKS, (0, 3, 1, 2)), jnp.swapaxes(self.value_BGSK, 1, 2)
        return (own,) if self.before is None else (*self.before.projected(), own)

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> "KVCache":
        """Zeros; `shape`: (B, S, G, K)."""
        return cls.of(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def entries(self) -> int:
        """How many there is room for, in all pieces."""
        return self._first + self.value_BGSK.shape[2]

    @property
    def _first(self) -> int:
        """The number of the first entry of the last piece."""
        return 0 if self.before is None else self.before.entries

    def with_room(self, entries: int) -> "KVCache":
        """This cache, which is full, with one more piece, zeros, up to so many entries; or the first of its entries.

        None but the last piece can be written to.
        """
        if self.before is not None and entries <= self._first:
            return self.before.with_room(entries)
        B, G, _, K = self.value_BGSK.shape
        if entries > self.entries:
            added = KVCache.empty((B, entries - self.entries, G, K), self.value_BGSK.dtype)
            return added.replace(before=self)
        kept = entries - self._first
        return self.replace(key_BGKS=self.key_BGKS[..., :kept], value_BGSK=self.value_BGSK[:, :, :kept])

    def write(self, new: "KVCache", index: jax.Array) -> "KVCache":
        """This cache with `new`, of one entry, or of W with beams, at position `index`, one of the last piece."""
        place, update = index * new.entries - self._first, jax.lax.dynamic_update_slice_in_dim
        return self.replace(
            key_BGKS=update(self.key_BGKS, new.key_BGKS.astype(self.key_BGKS.dtype), place, axis=3),
            value_BGSK=update(self.value_BGSK, new.value_BGSK.astype(self.value_BGSK.dtype), place, axis=2),
        )


@flax.struct.dataclass
class DecoderCache:
    """What decoding keeps between steps, one `KVCache` a layer.

    With beams, W texts are written for each row, and each position of self-attention has W entries. Which of them
    belongs to a text is the caller's to keep, so that nothing need be moved when beams change places.
    """

    self_attention: tuple[KVCache, ...]  # W entries for each position that it has room for; W = 1 without beams
    cross_attention: tuple[KVCache | None, ...]  # S entries: the encoder's output, projected once a sentence

    def with_room(self, length: int, beam_size: int = 1) -> "DecoderCache":
        """This cache with room for `length` positions: more, once all that there are have been written, or fewer."""
        own = tuple(cache.with_room(length * beam_size) for cache in self.self_attention)
        return self.replace(self_attention=own)


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: project, attend in `num_heads` subspaces, project back.

    With `num_kv_heads` G < H, each head of keys and values serves H / G heads of queries (Ainslie 2023; one for all:
    Shazeer 2019). Weights are sown as ('intermediates', 'attention_weights'): `apply(..., mutable=['intermediates'])`
    returns them, and otherwise nothing is kept.
    """

    config: ModelConfig
    among_itself: bool = False  # self-attention, where position schemes act; else attention to the encoder's output

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
        if self.among_itself and c.position == "relative":
            self.relative = RelativeVectors(c)

    def keys_values(self, memory_BSD: jax.Array, places: Places) -> KVCache:
        """What queries compare with and mix; `places`: where the tokens of `memory_BSD` stand."""
        return KVCache.of(*self._project(memory_BSD, places))

    def _project(self, memory_BSD: jax.Array, places: Places) -> tuple[jax.Array, jax.Array]:
        """Keys and values, (B, S, G, K) each."""
        key_BSGK = self.key(memory_BSD)
        if self.among_itself:
            key_BSGK = rotate(key_BSGK, places.position_BL, self.config)
        return key_BSGK, self.value(memory_BSD)

    def attend(
        self,
        x_BTD: jax.Array,
        memory: KVCache,
        pattern: Pattern,
        bias: ScoreBias | None = None,
        **mode,
    ) -> jax.Array:
        """Queries from `x_BTD` against keys and values already projected: (B, T, D)."""
        return self._attend(x_BTD, memory.projected(), pattern, bias, **mode)

    def _attend(
        self,
        x_BTD: jax.Array,
        pieces: Pieces,
        pattern: Pattern,
        bias: ScoreBias | None,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        query_BTHK = self.query(x_BTD)
        if self.among_itself:
            query_BTHK = rotate(query_BTHK, pattern.query.position_BL, self.config)
            if self.config.position == "relative":
                bias = self.relative.score_bias()
        why = self._wants_weights(deterministic)
        (key_BSGK, value_BSGK), *others = pieces
        given = self.config.backend, query_BTHK, key_BSGK, pattern, bias
        backend = "reference" if others else backends.choose(*given, reference_only=why)
        if backend != "reference":
            return self.out(backends.attend(backend, query_BTHK, key_BSGK, value_BSGK, pattern, bias))
        drop = lambda weights: self.drop(weights, deterministic=deterministic, row_B=row_B)  # noqa: E731
        return self.out(self._reference(query_BTHK, pieces, pattern, bias, drop=drop))

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, pattern: Pattern, bias: ScoreBias | None = None, **mode
    ) -> jax.Array:
        """Attention from `x_BTD` to `memory_BSD` (the same array for self-attention): (B, T, D)."""
        return self._attend(x_BTD, [self._project(memory_BSD, pattern.key)], pattern, bias, **mode)

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
        return self.among_itself and self.config.position == "relative" and self.config.relative_values

    def _reference(
        self,
        query_BTHK: jax.Array,
        pieces: Pieces,
        pattern: Pattern,
        bias: ScoreBias | None,
        *,
        drop: Callable,
    ) -> jax.Array:
        """Attention as the paper writes it, with all its weights at once: (B, T, H, K)."""
        pieces = [tuple(repeat_heads(x_BSGK, query_BTHK) for x_BSGK in piece) for piece in pieces]
        positions = pattern.query.position_BL, pattern.key.position_BL
        scores_BHTS = jnp.concatenate([self._scores(query_BTHK, key_BSHK) for key_BSHK, _ in pieces], axis=-1)
        if bias is not None:
            scores_BHTS += jnp.broadcast_to(bias(query_BTHK, *positions), scores_BHTS.shape)
        weights_BHTS = softmax(scores_BHTS, pattern.mask())
        self.sow("intermediates", "attention_weights", weights_BHTS)
        weights_BHTS = drop(weights_BHTS)
        borders = list(itertools.accumulate(value_BSHK.shape[1] for _, value_BSHK in pieces))[:-1]
        parts = zip(jnp.split(weights_BHTS, borders, axis=-1), pieces, strict=True)
        mixed_BTHK = functools.reduce(jnp.add, [mix(weights, value_BSHK) for weights, (_, value_BSHK) in parts])
        if self._relative_values():
            mixed_BTHK += self.relative.values(weights_BHTS, *positions).astype(mixed_BTHK.dtype)
        return mixed_BTHK

    def _scores(self, query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
        if self.config.attention == "additive":
            return additive_scores(query_BTHK, key_BSHK, self.score_vector)
        return dot_product_scores(query_BTHK, key_BSHK)
