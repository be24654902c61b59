"""Who may attend to whom: bool arrays that broadcast against attention weights (B, H, T, S); True = may attend.

A mask follows from where each token stands, its position and its text. `AttentionMask` keeps those few numbers, so that
an attention over long texts can build the mask of one block at a time.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import PAD


@flax.struct.dataclass
class TokenPositions:
    """Where each token of a row stands. A row may hold several texts, one after another; each counts from 0."""

    position_BL: jax.Array  # int32, (B, L) or (1, L) if all rows are alike: the token's number in its own text
    segment_BL: jax.Array  # int32, (B, L) or (1, L): the number of its text in the row, from 1; 0 = padding
    packed: bool = flax.struct.field(pytree_node=False, default=True)  # False: one text a row, padding only after it

    @classmethod
    def of(cls, ids_BL: jax.Array, segment_BL: jax.Array | None = None) -> "TokenPositions":
        """Positions of one text a row that ends in padding; or of packed texts, told apart by `segment_BL`."""
        index_1L = jnp.arange(ids_BL.shape[1], dtype=jnp.int32)[None]
        if segment_BL is None:
            return cls(index_1L, (ids_BL != PAD).astype(jnp.int32), packed=False)
        begins_BL = jnp.pad(segment_BL[:, 1:] != segment_BL[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        first_BL = jax.lax.cummax(jnp.where(begins_BL, index_1L, 0), axis=1)
        return cls(index_1L - first_BL, segment_BL)

    @classmethod
    def at(cls, position_L: jax.Array) -> "TokenPositions":
        """The same positions in every row, and no padding."""
        return cls(position_L[None], jnp.ones_like(position_L)[None], packed=False)

    def with_one_before(self) -> "TokenPositions":
        """These positions of one text a row after one more, a symbol in front of it at position -1."""
        before_1L = jnp.arange(-1, self.segment_BL.shape[1], dtype=jnp.int32)[None]
        return TokenPositions(before_1L, jnp.pad(self.segment_BL, ((0, 0), (1, 0)), constant_values=1), packed=False)


@flax.struct.dataclass
class AttentionMask:
    """Which keys each query may attend to: tokens of its own text, not the future if causal, not beyond the window."""

    query: TokenPositions
    key: TokenPositions
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    own_BTS: jax.Array | None = None  # bool: of these keys alone, as in decoding with beams; None: of all

    def array(self) -> jax.Array:
        """(B or 1, 1, T, S)."""
        seen = [padding(self.key.segment_BL), segments(self.query.segment_BL, self.key.segment_BL)]
        if self.causal:
            seen.append(causal(self.query.position_BL, self.key.position_BL))
        if self.window is not None:
            seen.append(window(self.query.position_BL, self.key.position_BL, self.window))
        if self.own_BTS is not None:
            seen.append(self.own_BTS[:, None])
        return combine(*seen)


def padding(ids_BS: jax.Array) -> jax.Array:
    """Hides padding keys: (B, 1, 1, S), True where `ids_BS`, token or segment numbers, is not 0. Section 3.2.3."""
    return (ids_BS != PAD)[:, None, None, :]


def causal(query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
    """Hides the future: (B, 1, T, S), True where the key's position is not after the query's. Section 3.2.3."""
    return key_position_BS[:, None, None, :] <= query_position_BT[:, None, :, None]


def segments(query_segment_BT: jax.Array, key_segment_BS: jax.Array) -> jax.Array:
    """Hides other texts of a packed row: (B, 1, T, S), True where both are of the same segment."""
    return query_segment_BT[:, None, :, None] == key_segment_BS[:, None, None, :]


def window(query_position_BT: jax.Array, key_position_BS: jax.Array, size: int) -> jax.Array:
    """Hides what is far away: (B, 1, T, S), True up to `size` tokens before or after; section 4, restricted."""
    distance_BTS = query_position_BT[:, :, None] - key_position_BS[:, None, :]
    return (jnp.abs(distance_BTS) <= size)[:, None]


def combine(*masks: jax.Array) -> jax.Array:
    """May attend only where every mask says so."""
    return functools.reduce(jnp.logical_and, masks)
