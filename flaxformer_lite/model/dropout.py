"""Dropout whose mask is a function of the row's number in the global batch.

A training step may split its batch over devices or microbatches. Each row of the global batch has
its own random bits, so every split drops the same elements and computes the same step.

The bits are a hash of the key, the row and the element, which the compiler fuses into the
operation that uses them. Masks from `jax.random.bernoulli` are arrays in memory: a training step
with them takes 6 to 10 % longer.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

LEVELS = 2**32  # the rate is rounded to a multiple of 1 / LEVELS


def scramble(x: jax.Array) -> jax.Array:
    """Returns a hash of uint32 numbers, a permutation: each input bit flips half the output bits.

    Shifts and factors: Wellons 2018, "Prospecting for hash functions", lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


# jitted, so that it is traced once and not in each layer
@functools.partial(jax.jit, static_argnames=("shape", "rate"), inline=True)
def keep_mask(
    key: jax.Array, row_B: jax.Array, shape: tuple[int, ...], *, rate: float
) -> jax.Array:
    """Returns a bool mask of `shape` (B, ...), False with probability `rate`.

    Row b is a function of (key, row_B[b]).
    """
    seed_B = row_B.astype(jnp.uint32)
    for word in jax.random.key_data(key).ravel():
        seed_B = scramble(seed_B + word)
    # Each row has 2 seeds: one enters before the element is hashed, one after. With one seed, rows
    # could have the same bits in another order.
    first, second = (
        seed.reshape(-1, *[1] * (len(shape) - 1)) for seed in (seed_B, scramble(~seed_B))
    )
    element = jnp.arange(math.prod(shape[1:]), dtype=jnp.uint32).reshape(1, *shape[1:])
    threshold = jnp.uint32(min(round(rate * LEVELS), LEVELS - 1))
    return scramble(scramble(element ^ first) + second) >= threshold


def dropout(x: jax.Array, key: jax.Array, row_B: jax.Array, *, rate: float) -> jax.Array:
    """Zeroes elements of `x` (B, ...) with probability `rate`, scales the rest. Section 5.4."""
    return jnp.where(keep_mask(key, row_B, x.shape, rate=rate), x / (1 - rate), 0).astype(x.dtype)


class Dropout(nn.Module):
    """`dropout` with a key from the 'dropout' RNG; the identity if deterministic or at rate 0."""

    rate: float

    @nn.compact
    def __call__(
        self, x: jax.Array, *, deterministic: bool = True, row_B: jax.Array | None = None
    ) -> jax.Array:
        """`row_B`: each row's number in the global batch; None: 0, 1, 2, ..."""
        if deterministic or self.rate == 0:
            return x
        rows = jnp.arange(x.shape[0]) if row_B is None else row_B
        return dropout(x, self.make_rng("dropout"), rows, rate=self.rate)
