"""The highest of many logits, and the sum of their exponentials: by the maxima of blocks, which are found once.

V  tokens; they come first, as a CPU makes the logits of few rows soonest       W  hypotheses of a row
"""

import math

import jax
import jax.numpy as jnp

SMALL = 8  # blocks of fewer are not worth their maxima
SHARES = 8  # so many devices, or a divisor, may share the blocks, where V allows it


def top_k(
    x_VBW: jax.Array, k: int, plus_BW: jax.Array | None = None, *, without: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k highest of each (W, V), (B, k), highest first, and where they stand, w and v: as `jax.lax.top_k`, faster.

    That sorts all of it. But the k highest numbers stand in the k blocks with the highest maxima, so that only these
    need be searched; with blocks of sqrt(W V / k) there are as many numbers in them as there are blocks. A block is
    part of one w, so that devices which share V, if it divides evenly, find the maxima of their own blocks.

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
    blocks = k + W * len({v // size for v in without}) if size else 0
    if size == 0 or blocks > W * (V // size):
        x_BWV = jnp.moveaxis(x_VBW + plus_BW[None], 0, -1)
        best_BK, place_BK = jax.lax.top_k(_without(x_BWV, jnp.arange(V)[None, None], without).reshape(B, W * V), k)
        return best_BK, place_BK // V, place_BK % V
    x_MXBW = _in_blocks(x_VBW, size)
    M = x_MXBW.shape[0]
    max_WMB = jnp.transpose(_maxima(x_MXBW) + plus_BW[None], (2, 0, 1))
    block_BK = top_k(max_WMB.reshape(W * M, B, 1), blocks)[2]
    block_BK = jnp.sort(block_BK, axis=-1)  # of equals the first comes first
    w_BK, m_BK = block_BK // M, block_BK % M
    found_BKX = x_MXBW[m_BK, :, jnp.arange(B)[:, None], w_BK] + take(plus_BW, w_BK)[..., None]
    found_BKX = _without(found_BKX, m_BK[..., None] * size + jnp.arange(size)[None, None], without)
    best_BK, number_BK, place_BK = top_k(jnp.moveaxis(found_BKX, -1, 0), k)
    return best_BK, take(w_BK, number_BK), take(m_BK, number_BK) * size + place_BK


def log_sum_exp(x: jax.Array) -> jax.Array:
    """The log of the sum of exp(x), not all -inf, over the first axis, that of V.

    By the maxima of the blocks in which `top_k` looks for the best W of (V, B, W): XLA finds them once for both.
    """
    size = _block_size(x.shape[0], 1, 1)
    highest = (_maxima(_in_blocks(x, size)) if size else x).max(axis=0)
    return jnp.log(jnp.exp(x - highest[None]).sum(axis=0)) + highest


def _block_size(V: int, W: int, k: int) -> int:
    """Of the blocks in which `top_k` looks; 0: they would not be worth their maxima."""
    size = math.isqrt(W * V // k)
    if size < SMALL or max(size, k) > V:  # -inf that fills a block could come before -inf of x
        return 0
    fitting = [n for n in range(size, 2 * size) if V % n == 0]  # others need padding, which copies it all
    return next((n for n in fitting if V // n % SHARES == 0), (fitting or [size])[0])


def _in_blocks(x: jax.Array, size: int) -> jax.Array:
    """(V, ...) as blocks of V, the last filled with -inf: (M, size, ...)."""
    filled = jnp.pad(x, ((0, -x.shape[0] % size), *[(0, 0)] * (x.ndim - 1)), constant_values=-jnp.inf)
    return filled.reshape(-1, size, *x.shape[1:])


def _maxima(x_MX: jax.Array) -> jax.Array:
    """Those of blocks (M, size, ...): (M, ...). The barrier keeps XLA from finding them again for each use of them."""
    return jax.lax.optimization_barrier(x_MX.max(axis=1))


def _without(x: jax.Array, v: jax.Array, without: tuple[int, ...]) -> jax.Array:
    """`x` with -inf where `v`, which repeats to its shape, is one of `without`."""
    return jnp.where(jnp.isin(v, jnp.array(without, jnp.int32)), -jnp.inf, x) if without else x


def take(x_BW: jax.Array, place_BK: jax.Array) -> jax.Array:
    """Row by row the entries of (B, W, ...) at the places: (B, K, ...)."""
    return jnp.take_along_axis(x_BW, place_BK.reshape(*place_BK.shape, *[1] * (x_BW.ndim - 2)), axis=1, mode="clip")
