"""The choice of an attention backend. All backends compute the same result.

    blockwise   any device: one block of scores at a time; memory is linear in the length
    xla         any device: all scores at once, by jax.nn.dot_product_attention
    cudnn       NVIDIA GPUs: cuDNN's flash attention (Dao 2022)
    flash       TPUs: Pallas' splash attention, a flash attention that skips masked blocks

The `reference`, in `attention.py`, is the only one that returns the attention weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flaxformer_lite.model import devices
from flaxformer_lite.model.blockwise import blockwise
from flaxformer_lite.model.devices import Devices
from flaxformer_lite.model.kernels import FLASH_BLOCKS, cudnn, flash, xla
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import ScoreBias
from flaxformer_lite.system.errors import InputError

# T S, the scores of a head, from which 'auto' uses blocks: on a CPU they need 4 times less memory
# than all scores at once, and about the same time
LONG = 1024**2
SHORTEST_FOR_KERNEL = min(FLASH_BLOCKS)  # shorter rows would be padded to this by `flash`
KERNELS = ("cudnn", "flash")  # the compiler cannot split them over devices


def choose(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None,
    *,
    reference_only: str | None = None,
    platform: str | None = None,
) -> str:
    """Returns the backend for these arguments; `backend`: 'auto' or a name.

    A decoding step, with one query or one per beam, always uses the reference: its scores are few.

    Args:
      reference_only: why only the reference can compute it; None: other backends can too.
      platform: 'cpu', 'tpu', 'gpu', or 'cuda' for an NVIDIA GPU with cuDNN's flash attention; None:
        the platform of the mesh of `compiled_for`, or else of the first device.

    Raises:
      InputError: the named backend does not support these arguments.
    """
    T, S = query_BTHK.shape[1], key_BSGK.shape[1]
    is_decoding = 1 in (T, mask.query.position_BL.shape[1]) or mask.allowed_BTS is not None
    if backend == "reference" or is_decoding:
        return "reference"
    platform = platform or devices.platform()
    if backend == "auto":
        if reference_only is not None or (platform == "cpu" and T * S < LONG):
            return "reference"
        kernel = {"cuda": "cudnn", "tpu": "flash"}.get(platform, "")
        arguments = query_BTHK, key_BSGK, mask, bias, platform
        if kernel and min(T, S) >= SHORTEST_FOR_KERNEL and not _why_not(kernel, *arguments):
            return kernel
        return "blockwise" if T * S >= LONG else "xla"
    reason = reference_only or _why_not(backend, query_BTHK, key_BSGK, mask, bias, platform)
    if reason is not None:
        raise InputError(
            f"config.model.backend: {backend!r} cannot be used: {reason}; use "
            "'reference' or 'auto'."
        )
    return backend


def stand_in(backend: str) -> str:
    """Returns a backend that compiles on any device, with memory like that of `backend`."""
    return "blockwise" if backend in KERNELS else backend


def attend(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """Returns softmax(Q K^T / sqrt(d_k) + bias) V over the unmasked keys: (B, T, H, K).

    `backend`: the result of `choose` for these arguments, other than 'reference'. Each of the G
    heads of keys and values serves H / G neighbouring heads of queries. The output of a query that
    may attend to no key is finite, and callers ignore it.
    """
    compute = {"blockwise": blockwise, "xla": xla, "cudnn": cudnn, "flash": flash}[backend]
    if backend in KERNELS and (split := devices.split_over()):
        compute = functools.partial(run_per_device, compute, split)
    return compute(query_BTHK, key_BSGK, value_BSGK, mask, *([] if bias is None else [bias]))


def run_per_device(
    kernel: Callable[..., Any],
    split: Devices,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
) -> jax.Array:
    """Returns the output of `kernel`, (B, T, H, K); each device computes its rows and heads."""
    B, is_self_attention = query_BTHK.shape[0], mask.query is mask.key
    by_rows, by_heads = PartitionSpec(split.rows), PartitionSpec(split.rows, None, split.heads)
    query, key = jax.tree.map(
        lambda x_BL: jnp.broadcast_to(x_BL, (B, *x_BL.shape[1:])), (mask.query, mask.key)
    )

    def on_device(
        query_BTHK: jax.Array,
        key_BSGK: jax.Array,
        value_BSGK: jax.Array,
        query: TokenPositions,
        key: TokenPositions,
    ) -> jax.Array:
        key = query if is_self_attention else key
        device_mask = dataclasses.replace(mask, query=query, key=key)
        return kernel(query_BTHK, key_BSGK, value_BSGK, device_mask)

    run = jax.shard_map(
        on_device,
        mesh=split.mesh,
        in_specs=(by_heads, by_heads, by_heads, by_rows, by_rows),
        out_specs=by_heads,
        check_vma=False,  # the output of a kernel has no varying-axes type
    )
    return run(query_BTHK, key_BSGK, value_BSGK, query, key)


def _why_not(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None,
    platform: str,
) -> str | None:
    """Returns why `backend` does not support these arguments; None if it does."""
    if backend not in KERNELS:
        return None
    why_not = _why_not_cudnn if backend == "cudnn" else _why_not_flash
    return why_not(query_BTHK, mask, bias, platform) or _why_not_split(query_BTHK, key_BSGK)


def _why_not_split(query_BTHK: jax.Array, key_BSGK: jax.Array) -> str | None:
    if (split := devices.split_over()) is None:
        return None
    sizes = {
        "rows": (query_BTHK.shape[0], split.rows),
        "heads of queries": (query_BTHK.shape[2], split.heads),
        "heads of keys": (key_BSGK.shape[2], split.heads),
    }
    for what, (size, axes) in sizes.items():
        if size % (count := split.count(axes)):
            return f"{size} {what} do not divide evenly over {count} devices"
    return None


def _why_not_cudnn(
    query_BTHK: jax.Array, mask: AttentionMask, bias: ScoreBias | None, platform: str
) -> str | None:
    d_head, dtype = query_BTHK.shape[-1], query_BTHK.dtype
    if platform != "cuda":
        return f"it requires an NVIDIA GPU, Ampere or newer, got {platform!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it requires model.dtype = 'bfloat16', got {dtype.name!r}"
    if d_head % 8 or d_head > 128:
        return f"it requires a head size that is a multiple of 8, at most 128, got {d_head}"
    if bias is not None:  # for more than one row, the gradient of cuDNN's bias is 0
        return "it does not compute the gradient of the bias that model.position adds"
    if mask.window is not None:  # a query in the padding would have no key: NaN
        return "it does not support model.attention_window for padded rows"
    if mask.key.packed:
        return "it does not support packed rows"
    return _why_not_by_index(mask)


def _why_not_flash(
    query_BTHK: jax.Array, mask: AttentionMask, bias: ScoreBias | None, platform: str
) -> str | None:
    if platform != "tpu":
        return f"it requires a TPU, got {platform!r}"
    if devices.is_mesh_unknown():
        return "there are several devices, and the function was not wrapped in `compiled_for`"
    if bias is not None:
        return "it does not support the bias that model.position adds to the scores"
    return _why_not_by_index(mask)


def _why_not_by_index(mask: AttentionMask) -> str | None:
    """Returns why a kernel's causal or window mask, which goes by row index, would be wrong."""
    by_position = mask.causal or mask.window is not None
    # in self-attention, distances by index and by position are the same within a text
    if by_position and mask.query is not mask.key:
        return "it masks by the index in the row, and queries and keys differ in their positions"
    return None
