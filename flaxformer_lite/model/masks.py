"""Attention masks: bool arrays, broadcast to the weights (B, H, T, S); True = may attend.

A mask follows from the position and the segment of each token. `AttentionMask` keeps only those
numbers, so that blockwise attention builds the mask of one block at a time.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import PAD


@flax.struct.dataclass
class TokenPositions:
    """The position and the segment of each token in rows that hold one or several texts."""

    # int32, (B, L), or (1, L) if all rows are the same: position in the text, from 0
    position_BL: jax.Array
    # int32, (B, L) or (1, L): number of the text within the row, from 1; 0 = padding
    segment_BL: jax.Array
    # False: each row is one text, then padding
    packed: bool = flax.struct.field(pytree_node=False, default=True)

    @classmethod
    def of(cls, ids_BL: jax.Array, segment_BL: jax.Array | None = None) -> "TokenPositions":
        """Returns the positions of packed texts by `segment_BL`, or of one padded text per row."""
        index_1L = jnp.arange(ids_BL.shape[1], dtype=jnp.int32)[None]
        if segment_BL is None:
            return cls(index_1L, (ids_BL != PAD).astype(jnp.int32), packed=False)
        is_first_BL = jnp.pad(
            segment_BL[:, 1:] != segment_BL[:, :-1], ((0, 0), (1, 0)), constant_values=True
        )
        first_BL = jax.lax.cummax(jnp.where(is_first_BL, index_1L, 0), axis=1)
        return cls(index_1L - first_BL, segment_BL)

    @classmethod
    def at(cls, position_L: jax.Array) -> "TokenPositions":
        """Returns the same positions for every row, without padding."""
        return cls(position_L[None], jnp.ones_like(position_L)[None], packed=False)

    def with_prefix_token(self) -> "TokenPositions":
        """Returns the positions of these unpacked rows after a token is prepended, at -1."""
        position_1L = jnp.arange(-1, self.segment_BL.shape[1], dtype=jnp.int32)[None]
        segment_BL = jnp.pad(self.segment_BL, ((0, 0), (1, 0)), constant_values=1)
        return TokenPositions(position_1L, segment_BL, packed=False)


@flax.struct.dataclass
class AttentionMask:
    """The keys that each query may attend to: tokens of the same segment, with more limits."""

    query: TokenPositions
    key: TokenPositions
    # excludes keys after the query
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    # excludes keys more than this many tokens away
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    # bool: excludes all other keys (in beam search, those of other hypotheses); None: no limit
    allowed_BTS: jax.Array | None = None

    def array(self) -> jax.Array:
        """Returns the mask as an array, (B or 1, 1, T, S)."""
        parts = [padding(self.key.segment_BL), segments(self.query.segment_BL, self.key.segment_BL)]
        if self.causal:
            parts.append(causal(self.query.position_BL, self.key.position_BL))
        if self.window is not None:
            parts.append(window(self.query.position_BL, self.key.position_BL, self.window))
        if self.allowed_BTS is not None:
            parts.append(self.allowed_BTS[:, None])
        return combine(*parts)


def padding(ids_BS: jax.Array) -> jax.Array:
    """Masks padding: (B, 1, 1, S), True if `ids_BS`, token or segment ids, is not 0; 3.2.3."""
    return (ids_BS != PAD)[:, None, None, :]


def causal(query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
    """Masks the future: (B, 1, T, S), True if the key is not after the query. Section 3.2.3."""
    return key_position_BS[:, None, None, :] <= query_position_BT[:, None, :, None]


def segments(query_segment_BT: jax.Array, key_segment_BS: jax.Array) -> jax.Array:
    """Masks other texts of a packed row: (B, 1, T, S), True if both have the same segment."""
    return query_segment_BT[:, None, :, None] == key_segment_BS[:, None, None, :]


def window(query_position_BT: jax.Array, key_position_BS: jax.Array, size: int) -> jax.Array:
    """Masks keys over `size` tokens away: (B, 1, T, S). Section 4, restricted self-attention."""
    distance_BTS = query_position_BT[:, :, None] - key_position_BS[:, None, :]
    return (jnp.abs(distance_BTS) <= size)[:, None]


def combine(*masks: jax.Array) -> jax.Array:
    """Returns the logical AND of masks."""
    return functools.reduce(jnp.logical_and, masks)


def pad_length(x_BL: jax.Array, *, multiple: int) -> jax.Array:
    """Returns rows padded with zeros to a multiple of a length; segment 0 is padding."""
    return jnp.pad(x_BL, [(0, 0), (0, -x_BL.shape[1] % multiple)] + [(0, 0)] * (x_BL.ndim - 2))
