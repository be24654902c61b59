"""The cache of keys and values for decoding token by token."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Keys and values of one attention layer, laid out for the 2 matrix products of equation 1.

    In beam search each position has W entries, one per hypothesis, and S = L W.
    """

    key_BGKS: jax.Array
    value_BGSK: jax.Array

    @classmethod
    def of(cls, key_BSGK: jax.Array, value_BSGK: jax.Array) -> "KVCache":
        """Returns the cache of projected keys and values."""
        return cls(jnp.transpose(key_BSGK, (0, 2, 3, 1)), jnp.swapaxes(value_BSGK, 1, 2))

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: jax.typing.DTypeLike) -> "KVCache":
        """Returns a cache of zeros; `shape`: (B, S, G, K)."""
        return cls.of(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def entries(self) -> int:
        """The number of entries per row, S."""
        return self.value_BGSK.shape[2]

    def projected(self) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values in the layout of their projections, (B, S, G, K) each."""
        return jnp.transpose(self.key_BGKS, (0, 3, 1, 2)), jnp.swapaxes(self.value_BGSK, 1, 2)

    def extended(self, entries: int) -> "KVCache":
        """Returns this cache padded with zeros to `entries` entries."""
        added = (0, entries - self.entries)
        return KVCache(
            jnp.pad(self.key_BGKS, ((0, 0), (0, 0), (0, 0), added)),
            jnp.pad(self.value_BGSK, ((0, 0), (0, 0), added, (0, 0))),
        )

    def write(self, new: "KVCache", index: jax.Array) -> "KVCache":
        """Returns this cache with `new`, of 1 entry or W, written at position `index`."""
        start, update = index * new.entries, jax.lax.dynamic_update_slice_in_dim
        return KVCache(
            update(self.key_BGKS, new.key_BGKS.astype(self.key_BGKS.dtype), start, axis=3),
            update(self.value_BGSK, new.value_BGSK.astype(self.value_BGSK.dtype), start, axis=2),
        )


@flax.struct.dataclass
class DecoderCache:
    """The state of a decoder between steps: a `KVCache` per layer.

    In beam search the W hypotheses of a row share the cache, and each position of self-attention
    has W entries. The search tracks the entries that belong to each hypothesis, so reordering
    hypotheses moves no entry.
    """

    self_attention: tuple[KVCache, ...]  # W entries per position; W = 1 without beams
    # S entries: the encoder's output, projected once per sentence
    cross_attention: tuple[KVCache | None, ...]

    def extended(self, max_length: int, beam_size: int = 1) -> "DecoderCache":
        """Returns this cache padded with zeros to `max_length` positions."""
        entries = max_length * beam_size
        extended = tuple(cache.extended(entries) for cache in self.self_attention)
        return dataclasses.replace(self, self_attention=extended)
