"""Attention by the compiler (XLA), by cuDNN's kernel and by the Pallas kernel for TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxformer_lite.fields import PAD
from flaxformer_lite.model.masks import AttentionMask, pad_length
from flaxformer_lite.model.positions import ScoreBias

# `flash` uses the largest block that divides the padded length
FLASH_BLOCKS = (512, 256, 128)


def xla(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """Returns attention with all scores in one array: (B, T, H, K)."""
    bias_BHTS = (
        None if bias is None else bias(query_BTHK, mask.query.position_BL, mask.key.position_BL)
    )
    return jax.nn.dot_product_attention(
        query_BTHK, key_BSGK, value_BSGK, bias_BHTS, mask.array(), implementation="xla"
    )


def cudnn(
    query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Returns attention by cuDNN's flash attention: (B, T, H, K).

    The kernel takes the number of tokens per row of keys instead of a padding mask.
    """
    tokens_B = jnp.sum(mask.key.segment_BL != PAD, axis=1, dtype=jnp.int32)
    # a row of padding keeps one key: a softmax over none would be NaN
    tokens_B = jnp.maximum(tokens_B, 1)
    return jax.nn.dot_product_attention(
        query_BTHK,
        key_BSGK,
        value_BSGK,
        is_causal=mask.causal,
        key_value_seq_lengths=jnp.broadcast_to(tokens_B, query_BTHK.shape[:1]),
        implementation="cudnn",
    )


def flash(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns attention by Pallas' splash attention for TPUs: (B, T, H, K).

    `interpret`: emulates the kernel on any device, for tests.
    """
    # imported here, as it is experimental
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T, H, K = query_BTHK.shape
    pad = functools.partial(pad_length, multiple=min(FLASH_BLOCKS))
    query_BHTK = jnp.moveaxis(pad(query_BTHK * K**-0.5), 2, 1)
    key_BGSK, value_BGSK = (jnp.moveaxis(pad(x), 2, 1) for x in (key_BSGK, value_BSGK))
    segments = [
        jnp.broadcast_to(pad(positions.segment_BL), (B, x.shape[2]))
        for positions, x in ((mask.query, query_BHTK), (mask.key, key_BGSK))
    ]
    lengths = query_BHTK.shape[2], key_BGSK.shape[2]
    is_limited = mask.causal or mask.window is not None
    window = mask.window, 0 if mask.causal else mask.window
    splash_mask = (
        splash.LocalMask(lengths, window, offset=0) if is_limited else splash.FullMask(lengths)
    )
    block_q, block_kv = (
        next(block for block in FLASH_BLOCKS if length % block == 0) for length in lengths
    )
    sizes: dict[str, Any] = {f"block_q{part}": block_q for part in ("", "_dkv", "_dq")}
    parts = ("", "_compute", "_dkv", "_dkv_compute", "_dq")
    sizes |= {f"block_kv{part}": block_kv for part in parts}
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash_mask] * H),
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    # the kernel takes one row, so it is mapped over the batch
    mixed_BHTK = jax.vmap(kernel)(query_BHTK, key_BGSK, value_BGSK, splash.SegmentIds(*segments))
    return jnp.moveaxis(mixed_BHTK, 1, 2)[:, :T]
