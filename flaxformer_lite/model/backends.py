"""What computes attention where its weights need not be kept: kernels and a memory-lean scan, to the same result.

    blockwise   any device: blocks of scores, one after another; memory grows with the length, not with its square
    xla         any device: all scores at once, as jax.nn.dot_product_attention writes it for the compiler
    cudnn       NVIDIA GPUs: cuDNN's flash attention (Dao 2022)
    flash       TPUs: Pallas' splash attention, a flash attention that skips what a mask hides

The `reference`, which keeps every weight, is in `attention.py`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from flaxformer_lite.fields import PAD
from flaxformer_lite.model import devices
from flaxformer_lite.model.devices import Devices
from flaxformer_lite.model.masks import AttentionMask
from flaxformer_lite.model.positions import ScoreBias
from flaxformer_lite.system.errors import InputError

BLOCK = 256  # queries, and keys, of a block: the fastest of 128 to 1024, or close to it, at every length
LONG = 1024**2  # scores of a head from which, on a CPU, blocks take a quarter of the memory and about the same time
KERNEL_BLOCKS = (512, 256, 128)  # `flash` takes the largest that divides the length; shorter rows leave it half idle
KERNELS = ("cudnn", "flash")  # which the compiler cannot split over devices
LOWEST = jnp.finfo(jnp.float32).min

Block = tuple  # arrays of queries, or of keys and values, their `Places`, and their `_order` or None
# Over some blocks of keys, float32: the sum of exp(score - largest), (B, H, T), and of values times that, (B, H, T, K).
Sums = tuple[jax.Array, jax.Array]


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
    """The backend that `backend` ('auto' or a name) means for these arguments.

    Queries of a decoding step are the reference's whatever the name: their scores are few.

    Args:
      reference_only: why the weights must be kept, if they must.
      platform: 'cpu', 'tpu', 'gpu', or 'cuda' for an NVIDIA GPU with cuDNN's flash attention; None: of the devices
        that the program is `compiled_for`, or else of the first that there is.

    Raises:
      InputError: the backend that is named cannot do it.
    """
    T, S = query_BTHK.shape[1], key_BSGK.shape[1]
    if backend == "reference" or 1 in (T, mask.query.position_BL.shape[1]) or mask.own_BTS is not None:
        return "reference"
    platform = platform or devices.platform()
    if backend == "auto":
        if reference_only is not None or (platform == "cpu" and T * S < LONG):
            return "reference"
        kernel = {"cuda": "cudnn", "tpu": "flash"}.get(platform, "")
        arguments = query_BTHK, key_BSGK, mask, bias, platform
        if kernel and min(T, S) >= min(KERNEL_BLOCKS) and not _why_not(kernel, *arguments):
            return kernel
        return "blockwise" if T * S >= LONG else "xla"
    reason = reference_only or _why_not(backend, query_BTHK, key_BSGK, mask, bias, platform)
    if reason is not None:
        raise InputError(f"config.model.backend: {backend!r} cannot be used: {reason}; use 'reference' or 'auto'.")
    return backend


def stand_in(backend: str) -> str:
    """What is traced in place of `backend` where its devices are not: a kernel's, like blocks, keeps no weights."""
    return "blockwise" if backend in KERNELS else backend


def attend(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k) + bias) V over the keys that `mask` lets each query see: (B, T, H, K).

    `backend`: what `choose` returned for these arguments, other than 'reference'. Head g of the G heads of keys and
    values serves H / G neighbouring heads of queries. A query that may attend to nothing gets something finite,
    meant to be ignored.
    """
    compute = {"blockwise": blockwise, "xla": xla, "cudnn": cudnn, "flash": flash}[backend]
    if backend in KERNELS and (shared := devices.sharing()):
        compute = functools.partial(on_each_device, compute, shared)
    return compute(query_BTHK, key_BSGK, value_BSGK, mask, *([] if bias is None else [bias]))


def on_each_device(
    kernel: Callable,
    shared: Devices,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
) -> jax.Array:
    """What `kernel` returns, each of the devices having computed its own rows and heads: (B, T, H, K)."""
    B, is_self_attention = query_BTHK.shape[0], mask.query is mask.key
    of_rows, of_heads = PartitionSpec(shared.rows), PartitionSpec(shared.rows, None, shared.heads)
    query, key = jax.tree.map(lambda x_BL: jnp.broadcast_to(x_BL, (B, *x_BL.shape[1:])), (mask.query, mask.key))

    def of_device(query_BTHK, key_BSGK, value_BSGK, query, key):
        own = mask.replace(query=query, key=query if is_self_attention else key)
        return kernel(query_BTHK, key_BSGK, value_BSGK, own)

    specs = {"in_specs": (*[of_heads] * 3, of_rows, of_rows), "out_specs": of_heads}
    split = jax.shard_map(of_device, mesh=shared.mesh, **specs, check_vma=False)  # a kernel's output has no such type
    return split(query_BTHK, key_BSGK, value_BSGK, query, key)


def _why_not(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None,
    platform: str,
) -> str | None:
    """Why `backend` cannot do this; None if it can, as 'blockwise' and 'xla' always can."""
    if backend not in KERNELS:
        return None
    why_not = _why_not_cudnn if backend == "cudnn" else _why_not_flash
    return why_not(query_BTHK, mask, bias, platform) or _why_not_split(query_BTHK, key_BSGK)


def _why_not_split(query_BTHK: jax.Array, key_BSGK: jax.Array) -> str | None:
    if (shared := devices.sharing()) is None:
        return None
    sizes = {"rows": (query_BTHK.shape[0], shared.rows), "heads of queries": (query_BTHK.shape[2], shared.heads)}
    sizes["heads of keys"] = key_BSGK.shape[2], shared.heads
    for what, (size, axes) in sizes.items():
        if size % (count := shared.count(axes)):
            return f"{count} devices cannot share {size} {what} evenly"
    return None


def _why_not_cudnn(query_BTHK: jax.Array, mask: AttentionMask, bias: ScoreBias | None, platform: str) -> str | None:
    d_head, dtype = query_BTHK.shape[-1], query_BTHK.dtype
    if platform != "cuda":
        return f"it runs on NVIDIA GPUs from Ampere on, and this is {platform!r}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs model.dtype = 'bfloat16', not {dtype.name!r}"
    if d_head % 8 or d_head > 128:
        return f"it needs heads of at most 128 numbers, a multiple of 8, not {d_head}"
    if bias is not None:  # for batches of more than one row, cuDNN gives a bias the gradient 0
        return "it would lose gradients of what model.position adds to the scores"
    if mask.window is not None:  # padding far behind a text would see nothing: NaN
        return "it has no model.attention_window for rows that end in padding"
    if mask.key.packed:
        return "it cannot tell the texts of a packed row apart"
    return _why_not_by_index(mask)


def _why_not_flash(query_BTHK: jax.Array, mask: AttentionMask, bias: ScoreBias | None, platform: str) -> str | None:
    if platform != "tpu":
        return f"it runs on TPUs, and this is {platform!r}"
    if devices.unknown():
        return "there are several devices, and no `devices.compiled_for` says how they share rows and heads"
    if bias is not None:
        return "it takes nothing that model.position adds to the scores"
    return _why_not_by_index(mask)


def _why_not_by_index(mask: AttentionMask) -> str | None:
    """Why causal or window masks by the index in the row, not by the position in the text, would be wrong."""
    by_position = mask.causal or mask.window is not None
    if by_position and mask.query is not mask.key:  # else both give the same distances within a text
        return "it masks by the index in a row, and queries do not stand where the keys do"
    return None


def blockwise(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """For one block of queries after another, the keys block by block: (B, T, H, K). After Rabe 2021, section 2.

    The keys pass twice: for the largest score of each query, and for the sums of its softmax. Two passes cost the
    values some time and save the gradients more, as the sums then need no rescaling. A block of the future, or beyond
    the window, is skipped. Outside the products all is float32, so that gradients are summed over blocks in it.
    """
    dtype, order = value_BSGK.dtype, _order(mask)
    query_BTHK, key_BSGK, value_BSGK = (x.astype(jnp.float32) for x in (query_BTHK, key_BSGK, value_BSGK))
    key_blocks = _split((key_BSGK, value_BSGK, mask.key, order and order[1]), block)

    def attend_from(query_block: Block) -> jax.Array:
        blocks = {"query_block": query_block, "key_blocks": key_blocks, "dtype": dtype}
        fold = functools.partial(_fold, **blocks, mask=mask, bias=bias)
        B, T, H, K = query_block[0].shape

        def take_larger(largest_BHT: jax.Array, scores_BHTS: jax.Array, value_BSGK: jax.Array) -> jax.Array:
            # What is subtracted from all scores of a query cancels out, and so would its gradient.
            return jnp.maximum(largest_BHT, jax.lax.stop_gradient(scores_BHTS).max(axis=-1))

        largest_BHT = fold(take_larger, jnp.full((B, H, T), LOWEST))

        def add(sums: Sums, scores_BHTS: jax.Array, value_BSGK: jax.Array) -> Sums:
            weights_BHTS = jnp.exp(scores_BHTS - largest_BHT[..., None])
            return sums[0] + weights_BHTS.sum(axis=-1), sums[1] + _mix(weights_BHTS, value_BSGK)

        total_BHT, mixed_BHTK = fold(add, (jnp.zeros((B, H, T)), jnp.zeros((B, H, T, K))))
        total_BHT = jnp.where(total_BHT == 0, 1, total_BHT)  # 0: every block was skipped
        return jnp.moveaxis(mixed_BHTK / total_BHT[..., None], 1, 2).astype(dtype)

    mixed_NBTHK = jax.lax.map(attend_from, _split((query_BTHK, mask.query, order and order[0]), block))
    mixed_BTHK = jnp.moveaxis(mixed_NBTHK, 0, 1).reshape(query_BTHK.shape[0], -1, *query_BTHK.shape[2:])
    return mixed_BTHK[:, : query_BTHK.shape[1]]


def _fold(
    update: Callable,
    start: jax.Array | Sums,
    *,
    query_block: Block,
    key_blocks: Block,
    dtype: jnp.dtype,
    mask: AttentionMask,
    bias: ScoreBias | None,
) -> jax.Array | Sums:
    """`update(state, scores, values)` from `start` on, over the blocks of keys; products are made in `dtype`."""
    query_BTHK, query_positions, query_order = query_block

    @functools.partial(jax.checkpoint, prevent_cse=False)  # gradients compute the scores again, and do not store them
    def step(state: jax.Array | Sums, key_block: Block) -> tuple:
        key_BSGK, value_BSGK, key_positions, key_order = key_block

        def of_block(state: jax.Array | Sums) -> jax.Array | Sums:
            rounded_BTHK = query_BTHK.astype(dtype)
            seen = mask.replace(query=query_positions, key=key_positions).array()
            scores_BHTS = _scores(rounded_BTHK, key_BSGK.astype(dtype))
            if bias is not None:
                scores_BHTS += bias(rounded_BTHK, query_positions.position_BL, key_positions.position_BL)
            return update(state, jnp.where(seen, scores_BHTS, LOWEST), value_BSGK.astype(dtype))

        if query_order is None:
            return of_block(state), None
        return jax.lax.cond(_may_see(query_order, key_order, mask), of_block, lambda state: state, state), None

    return jax.lax.scan(step, start, key_blocks)[0]


def _order(mask: AttentionMask) -> tuple[jax.Array, jax.Array] | None:
    """Of queries (1, T) and of keys (1, S), numbers that grow along a row and tell what is hidden as positions do.

    None: nothing is hidden by position, or rows differ. They are the same in all rows, so that devices that split the
    rows need not ask each other which blocks to skip.
    """
    if not mask.causal and mask.window is None:
        return None
    query_BT, key_BS = mask.query.position_BL, mask.key.position_BL
    if mask.query is mask.key:  # within a text, places are as far from each other in the row as in the text
        index_1L = jnp.arange(query_BT.shape[1])[None]
        return index_1L, index_1L
    return (query_BT, key_BS) if query_BT.shape[0] == key_BS.shape[0] == 1 else None


def _may_see(query_1T: jax.Array, key_1S: jax.Array, mask: AttentionMask) -> jax.Array:
    """Whether some query of a block may see some key of a block, by their order; padding at the end of one is 0."""
    nearest = key_1S[0, 0] - query_1T.max()  # over 0: all keys stand after all queries
    farthest = key_1S.max() - query_1T[0, 0]
    if mask.window is None:
        return nearest <= 0
    return (nearest <= (0 if mask.causal else mask.window)) & (farthest >= -mask.window)


def _scores(query_BTHK: jax.Array, key_BSGK: jax.Array) -> jax.Array:
    """Q K^T / sqrt(d_k): (B, H, T, S) float32."""
    (B, T, H, K), (S, G) = query_BTHK.shape, key_BSGK.shape[1:3]
    query_BTGRK = (query_BTHK * K**-0.5).reshape(B, T, G, H // G, K)
    scores_BGRTS = jnp.einsum("BTGRK,BSGK->BGRTS", query_BTGRK, key_BSGK, preferred_element_type=jnp.float32)
    return scores_BGRTS.reshape(B, H, T, S)


def _mix(weights_BHTS: jax.Array, value_BSGK: jax.Array) -> jax.Array:
    """The sum of the values by the weights: (B, H, T, K) float32."""
    (B, H, T, S), (G, K) = weights_BHTS.shape, value_BSGK.shape[2:]
    weights_BGRTS = weights_BHTS.astype(value_BSGK.dtype).reshape(B, G, H // G, T, S)
    mixed_BGRTK = jnp.einsum("BGRTS,BSGK->BGRTK", weights_BGRTS, value_BSGK, preferred_element_type=jnp.float32)
    return mixed_BGRTK.reshape(B, H, T, K)


def _split(tree: tuple, size: int) -> tuple:
    """Each array (B, L, ...) as (N, B, L / N, ...): as few blocks of at most `size` as hold it, filled with padding."""

    def split(x_BL: jax.Array) -> jax.Array:
        number = math.ceil(x_BL.shape[1] / size)
        x_BL = _pad(x_BL, multiple=number)
        return jnp.moveaxis(x_BL.reshape(x_BL.shape[0], number, -1, *x_BL.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _pad(x_BL: jax.Array, *, multiple: int) -> jax.Array:
    """Zeros after each row, up to a multiple of so many; as segment numbers they say padding."""
    return jnp.pad(x_BL, [(0, 0), (0, -x_BL.shape[1] % multiple)] + [(0, 0)] * (x_BL.ndim - 2))


def xla(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    mask: AttentionMask,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """All scores at once: (B, T, H, K)."""
    bias_BHTS = None if bias is None else bias(query_BTHK, mask.query.position_BL, mask.key.position_BL)
    return jax.nn.dot_product_attention(query_BTHK, key_BSGK, value_BSGK, bias_BHTS, mask.array(), implementation="xla")


def cudnn(query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGK: jax.Array, mask: AttentionMask) -> jax.Array:
    """cuDNN's kernel, which knows padding by the number of tokens in each row of keys: (B, T, H, K)."""
    tokens_B = jnp.sum(mask.key.segment_BL != PAD, axis=1, dtype=jnp.int32)
    tokens_B = jnp.maximum(tokens_B, 1)  # where all is padding one key is seen: a softmax over none would be NaN
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
    """The kernel for TPUs, row by row of the batch: (B, T, H, K). `interpret`: on any device, slowly, to test it."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # experimental: only where it is used

    B, H, K = query_BTHK.shape[0], *query_BTHK.shape[2:]
    pad = functools.partial(_pad, multiple=min(KERNEL_BLOCKS))
    query_BHTK = jnp.moveaxis(pad(query_BTHK * K**-0.5), 2, 1)
    key_BGSK, value_BGSK = (jnp.moveaxis(pad(x), 2, 1) for x in (key_BSGK, value_BSGK))
    segments = [
        jnp.broadcast_to(pad(positions.segment_BL), (B, x.shape[2]))
        for positions, x in ((mask.query, query_BHTK), (mask.key, key_BGSK))
    ]
    shape = query_BHTK.shape[2], key_BGSK.shape[2]
    hidden = splash.FullMask(shape)
    if mask.causal or mask.window is not None:
        hidden = splash.LocalMask(shape, (mask.window, 0 if mask.causal else mask.window), offset=0)
    block_q, block_kv = (next(block for block in KERNEL_BLOCKS if length % block == 0) for length in shape)
    sizes = {f"block_q{part}": block_q for part in ("", "_dkv", "_dq")}
    sizes |= {f"block_kv{part}": block_kv for part in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([hidden] * H),
        block_sizes=splash.BlockSizes(**sizes),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    mixed_BHTK = jax.vmap(kernel)(query_BHTK, key_BGSK, value_BGSK, splash.SegmentIds(*segments))
    return jnp.moveaxis(mixed_BHTK, 1, 2)[:, : query_BTHK.shape[1]]
