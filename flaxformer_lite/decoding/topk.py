"""The k largest values of an array, found in blocks."""

import math

import jax
import jax.numpy as jnp

FEWEST_BLOCKS = 8  # with fewer blocks than this, `jax.lax.top_k` of all values is as fast
SHARDS = 8  # if 8 devices, or a divisor of 8, share N evenly, no block is split between devices


def topk(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest values of x (..., N) and their indices, as `jax.lax.top_k` does.

    The k largest values are in the k blocks with the largest maxima. One pass over x finds the
    maxima, and only the values of k blocks are sorted; `jax.lax.top_k` sorts all values. Of equal
    values the one with the lower index comes first.
    """
    N = x.shape[-1]
    size = block_size(N, k)
    if FEWEST_BLOCKS * size * k > N:
        return jax.lax.top_k(x, k)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -N % size)]
    blocks = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], -1, size)
    block = jnp.sort(jax.lax.top_k(blocks.max(axis=-1), k)[1], axis=-1)
    values = jnp.take_along_axis(blocks, block[..., None], axis=-2, mode="clip")
    largest, position = jax.lax.top_k(values.reshape(*x.shape[:-1], k * size), k)
    block = jnp.take_along_axis(block, position // size, axis=-1, mode="clip")
    index = block * size + position % size
    return largest, jnp.minimum(index, N - 1)  # a padding value, -inf, has no index in x


def block_size(N: int, k: int) -> int:
    """Returns the number of values in a block: about sqrt(N / k), a divisor of N if one is near.

    With sqrt(N / k), there are as many blocks as there are values in k blocks.
    """
    size = max(1, math.isqrt(N // k))
    share = N // math.gcd(N, SHARDS)
    return next((n for n in range(size, 2 * size) if share % n == 0), size)
