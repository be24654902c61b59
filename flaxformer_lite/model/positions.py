"""Position schemes: how attention, blind to order by itself, gets to know it. Section 3.5 and its successors.

A scheme enters the model in one of four places, each with one function that has a branch for each of its schemes:

    PositionVectors  added to the embeddings       sinusoidal, learned
    rotate           turns queries and keys        rotary
    PositionBias     added to the scores           alibi, t5_bias
    RelativeVectors  added to keys and values      relative

Positions are integers, (B, L) or (1, L) where all rows are alike, counted from 0 in each text.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.system.errors import InputError

# (query_BTHK, query_position_BT, key_position_BS) -> (B or 1, H, T, S), to be added to the scaled scores. A function
# and not an array, so that it can be had for one block of queries and keys at a time.
ScoreBias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

T5_BUCKETS, T5_MAX_DISTANCE = 32, 128  # Raffel 2020, section 2.1


def sinusoidal(position: jax.Array, d_model: int) -> jax.Array:
    """Sines and cosines of positions of any shape: (..., d_model) float32, for any length. Section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) is the cosine of the same angle.

    Raises:
      InputError: `d_model` is odd, so that a sine has no cosine beside it.
    """
    if d_model % 2:
        raise InputError(f"sinusoidal positions need an even d_model, got {d_model}.")
    angle = _angles(position, d_model, base=10000.0)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*position.shape, d_model)


def rotary(x_BLHK: jax.Array, position_BL: jax.Array, *, base: float) -> jax.Array:
    """Turns each pair (x[2i], x[2i + 1]) of a head by the angle pos / base^(2i / K). Su 2021, equation 34.

    The dot product of a query and a key turned so depends on their positions by the distance alone.
    """
    angle_BL1P = _angles(position_BL, x_BLHK.shape[-1], base=base)[:, :, None, :]
    sin, cos = jnp.sin(angle_BL1P), jnp.cos(angle_BL1P)
    even, odd = x_BLHK[..., 0::2].astype(jnp.float32), x_BLHK[..., 1::2].astype(jnp.float32)
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BLHK.shape).astype(x_BLHK.dtype)


def _angles(position: jax.Array, width: int, *, base: float) -> jax.Array:
    """pos / base^(2i / width) for i < width / 2: (..., width / 2) float32."""
    frequency = (base ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    return jnp.multiply.outer(position.astype(jnp.float32), frequency)


def offsets(query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
    """How far each key stands after each query, negative before it: (B, T, S)."""
    return key_position_BS[:, None, :] - query_position_BT[:, :, None]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """2^(-8 / n), its square, its cube, ... for n heads (Press 2022, section 3): (num_heads,) float32.

    Where n is no power of two: those of the next lower power, then every second one of the next higher.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-8 / (2 * lower) * np.arange(1, 2 * lower + 1, 2))
    return np.concatenate([slopes, between[: num_heads - lower]]).astype(np.float32)


def alibi(query_position_BT: jax.Array, key_position_BS: jax.Array, *, num_heads: int) -> jax.Array:
    """Minus the distance times the slope of the head, (B, H, T, S); to both sides alike in an encoder. Press 2022."""
    distance_B1TS = jnp.abs(offsets(query_position_BT, key_position_BS))[:, None].astype(jnp.float32)
    return -alibi_slopes(num_heads)[None, :, None, None] * distance_B1TS


def t5_bucket(offset: jax.Array, *, bidirectional: bool) -> jax.Array:
    """The bucket, 0 to 31, of an offset: exact where near, wider and wider up to 128, then one. Raffel 2020, 2.1.

    Bidirectional: half of the buckets for keys after the query. Else keys after it share the bucket of distance 0.
    """
    half = T5_BUCKETS // 2 if bidirectional else T5_BUCKETS
    exact, distance_N = half // 2, np.arange(T5_MAX_DISTANCE + 1)
    log_share_N = np.log(np.maximum(distance_N, exact) / exact) / math.log(T5_MAX_DISTANCE / exact)
    wide_N = exact + (log_share_N * (half - exact) + 1e-9).astype(int)  # 1e-9: a bucket's first distance belongs to it
    bucket_N = jnp.asarray(np.where(distance_N < exact, distance_N, np.minimum(wide_N, half - 1)))
    distance = jnp.abs(offset) if bidirectional else jnp.maximum(-offset, 0)
    bucket = bucket_N[jnp.minimum(distance, T5_MAX_DISTANCE)]
    return jnp.where(offset > 0, bucket + half, bucket) if bidirectional else bucket


def t5_bias(
    table_RH: jax.Array, query_position_BT: jax.Array, key_position_BS: jax.Array, *, bidirectional: bool
) -> jax.Array:
    """The table's entry for the bucket of each offset, (B, H, T, S). Raffel 2020, section 2.1."""
    bucket_BTS = t5_bucket(offsets(query_position_BT, key_position_BS), bidirectional=bidirectional)
    return jnp.moveaxis(table_RH[bucket_BTS], -1, 1)


def clipped_offset(query_position_BT: jax.Array, key_position_BS: jax.Array, clip: int) -> jax.Array:
    """The offset of each key, at most `clip` either way, one-hot: (B, T, S, 2 clip + 1). Shaw 2018, section 3.2."""
    number_BTS = jnp.clip(offsets(query_position_BT, key_position_BS), -clip, clip) + clip
    return jax.nn.one_hot(number_BTS, 2 * clip + 1)


class LearnedPositions(nn.Module):
    """A table with one learned vector a position; Table 3, row (E). It ends at `max_length`."""

    max_length: int
    d_model: int

    @nn.compact
    def __call__(self, position_BL: jax.Array) -> jax.Array:
        """(B, L, d_model) float32 for positions below `max_length`.

        Raises:
          InputError: rows are longer than the table.
        """
        if position_BL.shape[-1] > self.max_length:
            raise InputError(
                f"learned positions end at max_length = {self.max_length}, got {position_BL.shape[-1]} positions; "
                "shorten the input, or use another position scheme."
            )
        shape = (self.max_length, self.d_model)
        table = self.param("embedding", nn.initializers.normal(self.d_model**-0.5), shape)
        return table[position_BL]


class PositionVectors(nn.Module):
    """What a scheme adds to the embeddings; None if it acts elsewhere."""

    config: ModelConfig

    @nn.compact
    def __call__(self, position_BL: jax.Array) -> jax.Array | None:
        """(B or 1, L, D) float32."""
        c = self.config
        if c.position == "sinusoidal":
            return sinusoidal(position_BL, c.d_model)
        if c.position == "learned":
            return LearnedPositions(c.max_length, c.d_model, name="learned")(position_BL)
        return None


def rotate(x_BLHK: jax.Array, position_BL: jax.Array, config: ModelConfig) -> jax.Array:
    """Queries or keys as a scheme turns them; as they are if it acts elsewhere."""
    if config.position == "rotary":
        return rotary(x_BLHK, position_BL, base=config.rope_base)
    return x_BLHK


class PositionBias(nn.Module):
    """What a scheme adds to the scores of self-attention, the same in every layer of a stack.

    It depends on the offset of the key from the query alone. None if the scheme acts elsewhere.
    """

    config: ModelConfig
    bidirectional: bool  # True in an encoder, whose queries see keys on both sides

    @nn.compact
    def __call__(self) -> ScoreBias | None:
        num_heads, bidirectional = self.config.num_heads, self.bidirectional
        if self.config.position == "alibi":
            return lambda query, query_at, key_at: alibi(query_at, key_at, num_heads=num_heads)
        if self.config.position == "t5_bias":
            table_RH = self.param("embedding", nn.initializers.xavier_uniform(), (T5_BUCKETS, num_heads))
            return lambda query, query_at, key_at: t5_bias(table_RH, query_at, key_at, bidirectional=bidirectional)
        return None


class RelativeVectors(nn.Module):
    """Vectors for clipped offsets, added to keys and if asked for to values; heads share them. Shaw 2018, section 3.

    A key's vector never joins the key itself: its product with the query is added to the score (equation 5).
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        shape = (2 * c.relative_clip + 1, c.d_head or c.d_model // c.num_heads)
        self.key_RK = self.param("key", nn.initializers.xavier_uniform(), shape)
        if c.relative_values:
            self.value_RK = self.param("value", nn.initializers.xavier_uniform(), shape)

    def score_bias(self) -> ScoreBias:
        """q . a(clipped offset) / sqrt(K): equation 4."""
        key_RK, clip = self.key_RK, self.config.relative_clip

        def bias(query_BTHK: jax.Array, query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
            query_BTHK = query_BTHK * query_BTHK.shape[-1] ** -0.5
            product_BHTR = jnp.einsum("BTHK,RK->BHTR", query_BTHK, key_RK, preferred_element_type=jnp.float32)
            offset_BTSR = clipped_offset(query_position_BT, key_position_BS, clip)
            return _per_row("BHTR,BTSR->BHTS", product_BHTR, offset_BTSR)

        return bias

    def values(self, weights_BHTS: jax.Array, query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
        """The vectors that join the values, mixed by the weights: (B, T, H, K). Equation 3."""
        offset_BTSR = clipped_offset(query_position_BT, key_position_BS, self.config.relative_clip)
        weights_BHTR = _per_row("BHTS,BTSR->BHTR", weights_BHTS, offset_BTSR)
        return jnp.einsum("BHTR,RK->BTHK", weights_BHTR, self.value_RK)


def _per_row(equation: str, x: jax.Array, one_hot_BTSR: jax.Array) -> jax.Array:
    """The einsum `equation`, where all rows may share one `one_hot_BTSR`, which then is not repeated."""
    if one_hot_BTSR.shape[0] == 1:
        return jnp.einsum(equation.replace(",B", ","), x, one_hot_BTSR[0])
    return jnp.einsum(equation, x, one_hot_BTSR)
