"""Blockwise top-k."""

import math

import jax
import jax.numpy as jnp

FEWEST_BLOCKS = 8  # below this many, `jax.lax.top_k` of all values is as fast
SHARDS = 8  # a block lies on one device, where up to 8 (or a divisor of 8) devices share N evenly


def topk(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of x (..., N) and their indices, (..., k) each, as `jax.lax.top_k` returns them.

    The k largest values lie in the k blocks with the largest maxima. So one pass finds the maxima, and only the values
    of k blocks are sorted, where `jax.lax.top_k` sorts all. Of equal values the first comes first.
    """
    N = x.shape[-1]
    size = _block_size(N, k)
    if FEWEST_BLOCKS * size * k > N:
        return jax.lax.top_k(x, k)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -N % size)]
    blocks = jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], -1, size)
    block = jnp.sort(jax.lax.top_k(blocks.max(axis=-1), k)[1], axis=-1)
    values = jnp.take_along_axis(blocks, block[..., None], axis=-2, mode="clip")
    largest, place = jax.lax.top_k(values.reshape(*x.shape[:-1], k * size), k)
    index = jnp.take_along_axis(block, place // size, axis=-1, mode="clip") * size + place % size
    return largest, jnp.minimum(index, N - 1)  # the padding, -inf, has no index of its own


def _block_size(N: int, k: int) -> int:
    """About sqrt(N / k): as many blocks as values in k blocks; a divisor of N if there is one nearby."""
    size = max(1, math.isqrt(N // k))
    share = N // math.gcd(N, SHARDS)
    return next((n for n in range(size, 2 * size) if share % n == 0), size)
