"""Parameters in memory as CPU devices read them soonest: a step of decoding reads all of them, for a few rows.

Devices that have the same read the same: one copy may fit into a cache that all cores share, where two do not. And it
lies in huge pages where the system has them, as the addresses of many small ones take a processor long to find.
"""

import contextlib
import itertools
import mmap
from typing import Any

import jax
import numpy as np

ALIGNED = 64  # bytes, to a multiple of which JAX wants an array aligned that it is to read where it lies


def laid_out(tree: Any) -> Any:
    """The arrays of `tree`, of any sharding over CPU devices, copied into one block of memory, each shard once."""
    arrays, structure = jax.tree.flatten(tree)
    shards = {(n, str(shard.index)): shard.data for n, x in enumerate(arrays) for shard in x.addressable_shards}
    sizes = [-(-shard.nbytes // ALIGNED) * ALIGNED for shard in shards.values()]
    block, copies = _block(sum(sizes)), {}
    for (place, shard), start in zip(shards.items(), itertools.accumulate(sizes, initial=0), strict=False):
        copies[place] = block[start : start + shard.nbytes].view(shard.dtype).reshape(shard.shape)
        np.copyto(copies[place], shard)

    def read_there(n: int, x: jax.Array) -> jax.Array:
        parts = [
            jax.device_put(copies[n, str(shard.index)], shard.device, may_alias=True) for shard in x.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    return structure.unflatten([read_there(n, x) for n, x in enumerate(arrays)])


def _block(size: int) -> np.ndarray:
    """So many bytes of memory, zeros, in huge pages if there are any; it goes with the last array that lies in it."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE)  # what can be shared has no huge pages as a rule
    if hasattr(mmap, "MADV_HUGEPAGE"):  # on Linux
        with contextlib.suppress(OSError):  # of a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
