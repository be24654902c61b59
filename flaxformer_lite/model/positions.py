"""Position schemes: section 3.5 and its successors.

A scheme acts in one of 4 parts of the model. Each part is one function or module, with a branch
per scheme:

    PositionVectors  added to the embeddings       sinusoidal, learned
    rotate           rotates queries and keys      rotary
    PositionBias     added to the scores           alibi, t5_bias
    RelativeVectors  added to keys and values      relative

Positions are integers, (B, L), or (1, L) if all rows are the same; they count from 0 in each text.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.system.errors import InputError

# (query_BTHK, query_position_BT, key_position_BS) -> (B or 1, H, T, S), added to the scaled scores.
# It is a function, so that blockwise attention computes it for one block at a time.
ScoreBias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

T5_BUCKETS, T5_MAX_DISTANCE = 32, 128  # Raffel 2020, section 2.1


def sinusoidal(position: jax.Array, d_model: int) -> jax.Array:
    """Returns sines and cosines of positions of any shape, (..., d_model) float32. Section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)); PE(pos, 2i + 1) is the cosine of the same angle.

    Raises:
      InputError: `d_model` is odd, so that the last sine has no cosine.
    """
    if d_model % 2:
        raise InputError(f"sinusoidal positions need an even d_model, got {d_model}.")
    angle = _angles(position, d_model, base=10000.0)
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(*position.shape, d_model)


def rotary(x_BLHK: jax.Array, position_BL: jax.Array, *, base: float) -> jax.Array:
    """Rotates each pair (x[2i], x[2i + 1]) of a head by pos / base^(2i / K). Su 2021, equation 34.

    The dot product of a rotated query and a rotated key depends only on the positions' difference.
    """
    angle_BL1P = _angles(position_BL, x_BLHK.shape[-1], base=base)[:, :, None, :]
    sin, cos = jnp.sin(angle_BL1P), jnp.cos(angle_BL1P)
    even, odd = x_BLHK[..., 0::2].astype(jnp.float32), x_BLHK[..., 1::2].astype(jnp.float32)
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x_BLHK.shape).astype(x_BLHK.dtype)


def _angles(position: jax.Array, width: int, *, base: float) -> jax.Array:
    """Returns pos / base^(2i / width) for i < width / 2: (..., width / 2) float32."""
    frequency = (base ** (-np.arange(0, width, 2) / width)).astype(np.float32)
    return jnp.multiply.outer(position.astype(jnp.float32), frequency)


def offsets(query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
    """Returns the position of each key minus that of each query: (B, T, S)."""
    return key_position_BS[:, None, :] - query_position_BT[:, :, None]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Returns the powers 1 to n of 2^(-8 / n) for n heads, (n,) float32. Press 2022, section 3.

    If n is no power of 2: the slopes of the next lower power of 2, then every second slope of the
    next higher one.
    """
    lower = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-8 / (2 * lower) * np.arange(1, 2 * lower + 1, 2))
    return np.concatenate([slopes, between[: num_heads - lower]]).astype(np.float32)


def alibi(query_position_BT: jax.Array, key_position_BS: jax.Array, *, num_heads: int) -> jax.Array:
    """Returns minus the distance times the slope of the head, (B, H, T, S). Press 2022."""
    offset_BTS = offsets(query_position_BT, key_position_BS)
    distance_B1TS = jnp.abs(offset_BTS)[:, None].astype(jnp.float32)
    return distance_B1TS * -alibi_slopes(num_heads)[None, :, None, None]


def t5_bucket(offset: jax.Array, *, bidirectional: bool) -> jax.Array:
    """Returns the bucket, 0 to 31, of an offset from query to key. Raffel 2020, section 2.1.

    Small distances have a bucket each. Larger ones, up to 128, share buckets of growing width; all
    beyond share one. Bidirectional: half of the buckets are for keys after the query. Otherwise
    keys after the query share the bucket of distance 0.
    """
    half = T5_BUCKETS // 2 if bidirectional else T5_BUCKETS
    exact, distance_N = half // 2, np.arange(T5_MAX_DISTANCE + 1)
    log_fraction_N = np.log(np.maximum(distance_N, exact) / exact) / math.log(
        T5_MAX_DISTANCE / exact
    )
    # 1e-9: rounding must not move the first distance of a bucket into the bucket before
    wide_N = exact + (log_fraction_N * (half - exact) + 1e-9).astype(int)
    bucket_N = jnp.asarray(np.where(distance_N < exact, distance_N, np.minimum(wide_N, half - 1)))
    distance = jnp.abs(offset) if bidirectional else jnp.maximum(-offset, 0)
    bucket = bucket_N[jnp.minimum(distance, T5_MAX_DISTANCE)]
    return jnp.where(offset > 0, bucket + half, bucket) if bidirectional else bucket


def t5_bias(
    table_RH: jax.Array,
    query_position_BT: jax.Array,
    key_position_BS: jax.Array,
    *,
    bidirectional: bool,
) -> jax.Array:
    """Returns the table's entry for the bucket of each offset, (B, H, T, S). Raffel 2020, 2.1."""
    bucket_BTS = t5_bucket(offsets(query_position_BT, key_position_BS), bidirectional=bidirectional)
    return jnp.moveaxis(table_RH[bucket_BTS], -1, 1)


def clipped_offset(
    query_position_BT: jax.Array, key_position_BS: jax.Array, clip: int
) -> jax.Array:
    """Returns the offset of each key, clipped to +-`clip`, one-hot: (B, T, S, 2 clip + 1).

    Shaw 2018, section 3.2.
    """
    index_BTS = jnp.clip(offsets(query_position_BT, key_position_BS), -clip, clip) + clip
    return jax.nn.one_hot(index_BTS, 2 * clip + 1)


class LearnedPositions(nn.Module):
    """A learned vector per position, up to `max_length` positions. Table 3, row (E)."""

    max_length: int
    d_model: int

    @nn.compact
    def __call__(self, position_BL: jax.Array) -> jax.Array:
        """Returns the vectors of positions, (B, L, d_model) float32.

        Raises:
          InputError: rows are longer than the table.
        """
        length = position_BL.shape[-1]
        if length > self.max_length:
            raise InputError(
                f"learned positions end at max_length = {self.max_length}, got {length} "
                "positions; shorten the input, or use another position scheme."
            )
        shape = (self.max_length, self.d_model)
        table = self.param("embedding", nn.initializers.normal(self.d_model**-0.5), shape)
        return table[position_BL]


class PositionVectors(nn.Module):
    """The vectors that a scheme adds to the embeddings; None for other schemes."""

    config: ModelConfig

    @nn.compact
    def __call__(self, position_BL: jax.Array) -> jax.Array | None:
        """Returns (B or 1, L, D) float32."""
        c = self.config
        if c.position == "sinusoidal":
            return sinusoidal(position_BL, c.d_model)
        if c.position == "learned":
            return LearnedPositions(c.max_length, c.d_model, name="learned")(position_BL)
        return None


def rotate(x_BLHK: jax.Array, position_BL: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns queries or keys, rotated if the scheme is 'rotary'."""
    if config.position == "rotary":
        return rotary(x_BLHK, position_BL, base=config.rope_base)
    return x_BLHK


class PositionBias(nn.Module):
    """The bias that a scheme adds to the scores of self-attention; None for other schemes.

    It is a function of the offset from query to key, the same in every layer of a stack.
    """

    config: ModelConfig
    bidirectional: bool  # whether queries attend to keys after them, as in an encoder

    @nn.compact
    def __call__(self) -> ScoreBias | None:
        num_heads, bidirectional = self.config.num_heads, self.bidirectional
        if self.config.position == "alibi":
            return lambda query, query_at, key_at: alibi(query_at, key_at, num_heads=num_heads)
        if self.config.position == "t5_bias":
            init = nn.initializers.xavier_uniform()
            table_RH = self.param("embedding", init, (T5_BUCKETS, num_heads))
            return lambda query, query_at, key_at: t5_bias(
                table_RH, query_at, key_at, bidirectional=bidirectional
            )
        return None


class RelativeVectors(nn.Module):
    """Vectors of clipped offsets for keys, and optionally values. Shaw 2018, section 3.

    All heads share them. The vector of a key is not added to the key: its product with the query is
    added to the score (equation 5).
    """

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        shape = (2 * c.relative_clip + 1, c.d_head or c.d_model // c.num_heads)
        self.key_RK = self.param("key", nn.initializers.xavier_uniform(), shape)
        if c.relative_values:
            self.value_RK = self.param("value", nn.initializers.xavier_uniform(), shape)

    def score_bias(self) -> ScoreBias:
        """Returns the bias q . a(clipped offset) / sqrt(K). Equation 4."""
        key_RK, clip = self.key_RK, self.config.relative_clip

        def bias(
            query_BTHK: jax.Array, query_position_BT: jax.Array, key_position_BS: jax.Array
        ) -> jax.Array:
            query_BTHK = query_BTHK * query_BTHK.shape[-1] ** -0.5
            product_BHTR = jnp.einsum(
                "BTHK,RK->BHTR", query_BTHK, key_RK, preferred_element_type=jnp.float32
            )
            offset_BTSR = clipped_offset(query_position_BT, key_position_BS, clip)
            return _einsum_shared("BHTR,BTSR->BHTS", product_BHTR, offset_BTSR)

        return bias

    def values(
        self, weights_BHTS: jax.Array, query_position_BT: jax.Array, key_position_BS: jax.Array
    ) -> jax.Array:
        """Returns the vectors of the values, summed with the weights: (B, T, H, K). Equation 3."""
        offset_BTSR = clipped_offset(query_position_BT, key_position_BS, self.config.relative_clip)
        weights_BHTR = _einsum_shared("BHTS,BTSR->BHTR", weights_BHTS, offset_BTSR)
        return jnp.einsum("BHTR,RK->BTHK", weights_BHTR, self.value_RK)


def _einsum_shared(equation: str, x: jax.Array, one_hot_BTSR: jax.Array) -> jax.Array:
    """Returns the einsum `equation` without repeating a `one_hot_BTSR` that all rows share."""
    if one_hot_BTSR.shape[0] == 1:
        return jnp.einsum(equation.replace(",B", ","), x, one_hot_BTSR[0])
    return jnp.einsum(equation, x, one_hot_BTSR)
