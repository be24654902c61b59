"""Blockwise attention: its memory is linear in the length. After Rabe 2021, section 2."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_lite.model.masks import AttentionMask, pad_length
from flaxformer_lite.model.positions import ScoreBias

# queries or keys per block; of 128 to 1024, the fastest or close to it at every length
BLOCK = 256
LOWEST = jnp.finfo(jnp.float32).min

# arrays of queries or of keys and values, their `TokenPositions`, and their `_order` or None
Block = tuple[Any, ...]
# Over some blocks of keys, float32: the sum of exp(score - largest), (B, H, T), and the sum of the
# values with these weights, (B, H, T, K).
Sums = tuple[jax.Array, jax.Array]


def blockwise(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """Returns attention (B, T, H, K), computed per block of queries over the blocks of keys.

    It passes over the keys 2 times: for the largest score of each query, and for the sums of its
    softmax. This makes the forward pass slower and the backward pass faster, because the sums need
    no rescaling. It skips blocks that the causal or window mask hides. All but the matrix products
    is float32, so that gradients are accumulated over blocks in float32.
    """
    dtype, order = value_BSGK.dtype, _order(mask)
    query_BTHK, key_BSGK, value_BSGK = (
        x.astype(jnp.float32) for x in (query_BTHK, key_BSGK, value_BSGK)
    )
    key_blocks = _split((key_BSGK, value_BSGK, mask.key, order and order[1]), block)

    def attend_from(query_block: Block) -> jax.Array:
        fold = functools.partial(
            _fold, query_block=query_block, key_blocks=key_blocks, dtype=dtype, mask=mask, bias=bias
        )
        B, T, H, K = query_block[0].shape

        def take_larger(
            largest_BHT: jax.Array, scores_BHTS: jax.Array, value_BSGK: jax.Array
        ) -> jax.Array:
            # The largest score cancels out of the softmax, so it needs no gradient.
            return jnp.maximum(largest_BHT, jax.lax.stop_gradient(scores_BHTS).max(axis=-1))

        largest_BHT = fold(take_larger, jnp.full((B, H, T), LOWEST))

        def add(sums: Sums, scores_BHTS: jax.Array, value_BSGK: jax.Array) -> Sums:
            weights_BHTS = jnp.exp(scores_BHTS - largest_BHT[..., None])
            return sums[0] + weights_BHTS.sum(axis=-1), sums[1] + _mix(weights_BHTS, value_BSGK)

        total_BHT, mixed_BHTK = fold(add, (jnp.zeros((B, H, T)), jnp.zeros((B, H, T, K))))
        total_BHT = jnp.where(total_BHT == 0, 1, total_BHT)  # 0: every block was skipped
        return jnp.moveaxis(mixed_BHTK / total_BHT[..., None], 1, 2).astype(dtype)

    query_blocks = _split((query_BTHK, mask.query, order and order[0]), block)
    mixed_NBTHK = jax.lax.map(attend_from, query_blocks)
    B, T, H, K = query_BTHK.shape
    return jnp.moveaxis(mixed_NBTHK, 0, 1).reshape(B, -1, H, K)[:, :T]


def _fold(
    update: Callable[..., Any],
    start: Any,
    *,
    query_block: Block,
    key_blocks: Block,
    dtype: jnp.dtype,
    mask: AttentionMask,
    bias: ScoreBias | None,
) -> Any:
    """Returns `update(state, scores, values)` folded over the blocks of keys from `start`.

    `dtype`: of the factors of matrix products.
    """
    query_BTHK, query_positions, query_order = query_block

    # the backward pass recomputes the scores, so they are not stored
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state: Any, key_block: Block) -> tuple[Any, None]:
        key_BSGK, value_BSGK, key_positions, key_order = key_block

        def updated(state: Any) -> Any:
            rounded_BTHK = query_BTHK.astype(dtype)
            mask_array = dataclasses.replace(mask, query=query_positions, key=key_positions).array()
            scores_BHTS = _scores(rounded_BTHK, key_BSGK.astype(dtype))
            if bias is not None:
                positions = query_positions.position_BL, key_positions.position_BL
                scores_BHTS += bias(rounded_BTHK, *positions)
            scores_BHTS = jnp.where(mask_array, scores_BHTS, LOWEST)
            return update(state, scores_BHTS, value_BSGK.astype(dtype))

        if query_order is None:
            return updated(state), None
        may_attend = _may_attend(query_order, key_order, mask)
        return jax.lax.cond(may_attend, updated, lambda state: state, state), None

    return jax.lax.scan(step, start, key_blocks)[0]


def _order(mask: AttentionMask) -> tuple[jax.Array, jax.Array] | None:
    """Returns numbers of queries (1, T) and keys (1, S) for skipping blocks, or None.

    They increase along a row, and their differences within a text are those of the positions. All
    rows share them, so that devices that split the rows need no communication to skip a block.
    None: no mask depends on positions, or rows differ.
    """
    if not mask.causal and mask.window is None:
        return None
    query_BT, key_BS = mask.query.position_BL, mask.key.position_BL
    # in self-attention, distances in a text are distances in the row, also if texts are packed
    if mask.query is mask.key:
        index_1L = jnp.arange(query_BT.shape[1])[None]
        return index_1L, index_1L
    return (query_BT, key_BS) if query_BT.shape[0] == key_BS.shape[0] == 1 else None


def _may_attend(query_1T: jax.Array, key_1S: jax.Array, mask: AttentionMask) -> jax.Array:
    """Whether a query of a block may attend to a key of a block, by their `_order`.

    Padding at the end of a block is 0, so maxima are used.
    """
    nearest = key_1S[0, 0] - query_1T.max()  # above 0: all keys are after all queries
    farthest = key_1S.max() - query_1T[0, 0]
    if mask.window is None:
        return nearest <= 0
    return (nearest <= (0 if mask.causal else mask.window)) & (farthest >= -mask.window)


def _scores(query_BTHK: jax.Array, key_BSGK: jax.Array) -> jax.Array:
    """Returns Q K^T / sqrt(d_k): (B, H, T, S) float32."""
    (B, T, H, K), (S, G) = query_BTHK.shape, key_BSGK.shape[1:3]
    query_BTGRK = (query_BTHK * K**-0.5).reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum(
        "BTGRK,BSGK->BGRTS", query_BTGRK, key_BSGK, preferred_element_type=jnp.float32
    )
    return scores_BGRTS.reshape(B, H, T, S)


def _mix(weights_BHTS: jax.Array, value_BSGK: jax.Array) -> jax.Array:
    """Returns the weighted sum of the values: (B, H, T, K) float32."""
    (B, H, T, S), (G, K) = weights_BHTS.shape, value_BSGK.shape[2:]
    weights_BGRTS = weights_BHTS.astype(value_BSGK.dtype).reshape(B, G, H // G, T, S)
    mixed_BGRTK = jnp.einsum(
        "BGRTS,BSGK->BGRTK", weights_BGRTS, value_BSGK, preferred_element_type=jnp.float32
    )
    return mixed_BGRTK.reshape(B, H, T, K)


def _split(tree: Block, size: int) -> Block:
    """Returns each array (B, L, ...) as (N, B, L / N, ...), the fewest blocks of at most `size`.

    The last block is padded.
    """

    def split(x_BL: jax.Array) -> jax.Array:
        blocks = math.ceil(x_BL.shape[1] / size)
        x_BL = pad_length(x_BL, multiple=blocks)
        return jnp.moveaxis(x_BL.reshape(x_BL.shape[0], blocks, -1, *x_BL.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)
