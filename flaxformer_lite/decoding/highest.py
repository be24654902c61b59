"""The highest of many logits, and the sum of their exponentials: by the maxima of blocks, which are found once.

V  tokens; they come first, as a CPU makes the logits of few rows soonest       W  hypotheses of a row
"""

import bisect
import math

import jax
import jax.numpy as jnp

SMALL = 8  # blocks of fewer are not worth their maxima
SHARES = 8  # so many devices, or a divisor, may share V, where it divides evenly: no block lies on two of them


def top_k(
    x_VBW: jax.Array, k: int, plus_BW: jax.Array | None = None, *, without: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k highest of each (W, V), (B, k), highest first, and where they stand, w and v: as `jax.lax.top_k`, faster.

    That sorts all of it. But the k highest numbers stand in the k blocks with the highest maxima, so that only these
    need be searched; with blocks of sqrt(W V / k) there are as many numbers in them as there are blocks. A block is
    part of one w, and of one of the SHARES of V, so that devices which share it find the maxima of their own blocks.

    A block with one of `without` in it may have too high a maximum, and take the place of one that is wanted. So as
    many more are searched as there are such blocks: what is wanted is among them whatever these hold.

    Args:
      x_VBW: in memory already; where a CPU would make it while it looks for maxima, that takes thrice as long.
      plus_BW: added to all numbers of a w, where they are looked at.
      without: those of V that do not count. Where fewer than k are left, -inf stands at any place.
    """
    V, B, W = x_VBW.shape
    plus_BW = jnp.zeros((B, W), x_VBW.dtype) if plus_BW is None else plus_BW
    size = _block_size(V, W, k)
    start_M = _starts(V, size) if size else []
    blocks = k + W * len({bisect.bisect_right(start_M, v) for v in without})
    if blocks > W * len(start_M):
        x_BWV = jnp.moveaxis(x_VBW + plus_BW[None], 0, -1)
        best_BK, place_BK = jax.lax.top_k(_without(x_BWV, jnp.arange(V)[None, None], without).reshape(B, W * V), k)
        return best_BK, place_BK // V, place_BK % V
    x_MXBW = _in_blocks(x_VBW, size)
    M = len(start_M)
    max_WMB = jnp.transpose(_maxima(x_MXBW) + plus_BW[None], (2, 0, 1))
    block_BK = top_k(max_WMB.reshape(W * M, B, 1), blocks)[2]
    block_BK = jnp.sort(block_BK, axis=-1)  # of equals the first comes first
    w_BK, m_BK = block_BK // M, block_BK % M
    found_BKX = x_MXBW[m_BK, :, jnp.arange(B)[:, None], w_BK] + entries_at(plus_BW, w_BK)[..., None]
    v_BK = jnp.array(start_M)[m_BK]
    found_BKX = _without(found_BKX, v_BK[..., None] + jnp.arange(size)[None, None], without)
    best_BK, number_BK, place_BK = top_k(jnp.moveaxis(found_BKX, -1, 0), k)
    # What fills a block, -inf, has no place of its own.
    return best_BK, entries_at(w_BK, number_BK), jnp.minimum(entries_at(v_BK, number_BK) + place_BK, V - 1)


def log_sum_exp(x: jax.Array) -> jax.Array:
    """The log of the sum of exp(x), not all -inf, over the first axis, that of V.

    By the maxima of the blocks in which `top_k` looks for the best W of (V, B, W): XLA finds them once for both.
    """
    size = _block_size(x.shape[0], 1, 1)
    highest = (_maxima(_in_blocks(x, size)) if size else x).max(axis=0)
    return jnp.log(jnp.exp(x - highest[None]).sum(axis=0)) + highest


def _block_size(V: int, W: int, k: int) -> int:
    """Of the blocks in which `top_k` looks; 0: they would not be worth their maxima."""
    size, part = math.isqrt(W * V // k), V // math.gcd(V, SHARES)
    if size < SMALL or max(size, k) > part:  # -inf that fills a block could come before -inf of x
        return 0
    return next((n for n in range(size, 2 * size) if part % n == 0), size)  # others need filling, which copies it all


def _starts(V: int, size: int) -> list[int]:
    """Where in V each of the blocks begins."""
    part = V // math.gcd(V, SHARES)
    return [start for first in range(0, V, part) for start in range(first, first + part, size)]


def _in_blocks(x: jax.Array, size: int) -> jax.Array:
    """(V, ...) as blocks of V, the last of each share filled with -inf: (M, size, ...)."""
    parts = x.reshape(math.gcd(x.shape[0], SHARES), -1, *x.shape[1:])
    filling = (0, 0), (0, -parts.shape[1] % size), *[(0, 0)] * (x.ndim - 1)
    return jnp.pad(parts, filling, constant_values=-jnp.inf).reshape(-1, size, *x.shape[1:])


def _maxima(x_MX: jax.Array) -> jax.Array:
    """Those of blocks (M, size, ...): (M, ...). The barrier keeps XLA from finding them again for each use of them."""
    return jax.lax.optimization_barrier(x_MX.max(axis=1))


def _without(x: jax.Array, v: jax.Array, without: tuple[int, ...]) -> jax.Array:
    """`x` with -inf where `v`, which repeats to its shape, is one of `without`."""
    return jnp.where(jnp.isin(v, jnp.array(without, jnp.int32)), -jnp.inf, x) if without else x


def entries_at(x_BW: jax.Array, place_BK: jax.Array) -> jax.Array:
    """Row by row the entries of (B, W, ...) at the places: (B, K, ...)."""
    return jnp.take_along_axis(x_BW, place_BK.reshape(*place_BK.shape, *[1] * (x_BW.ndim - 2)), axis=1, mode="clip")
