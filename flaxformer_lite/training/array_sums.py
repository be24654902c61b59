"""Checksums and averages of trees of arrays, independent of how the arrays are sharded."""

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

Tree = Any

HASHED_AT_ONCE = 2**16  # numbers

# The position of a shard: its start and end along each dimension of the array.
Position = tuple[tuple[int, int], ...]


def _position(index: tuple[slice, ...], shape: tuple[int, ...]) -> Position:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _shards(
    x: jax.Array | np.ndarray, *, first_replicas: bool = False
) -> dict[Position, np.ndarray]:
    """Returns the distinct shards of an array in this process, by position.

    Args:
      first_replicas: leaves out a shard if its first replica is in another process.
    """
    if not isinstance(x, jax.Array):
        return {_position((slice(None),) * x.ndim, x.shape): x}
    shards = x.addressable_shards
    if first_replicas:
        shards = [shard for shard in shards if shard.replica_id == 0]
    return {_position(shard.index, x.shape): np.asarray(shard.data) for shard in shards}


def checksum(tree: Tree) -> int:
    """Returns a 32-bit checksum of all arrays of `tree`, in order.

    The checksum of an array is the sum of hashes of its numbers and their positions, so it does not
    depend on the sharding. If an array is sharded over processes, all of them must call this.
    """
    arrays = jax.tree.leaves(tree)
    local = [_shards(x) for x in arrays]
    shared = any(
        sum(shard.size for shard in shards.values()) < x.size
        for x, shards in zip(arrays, local, strict=True)
    )
    if shared:
        local = [_shards(x, first_replicas=True) for x in arrays]
    sums = [
        sum(_hash(shard, position, x.shape) for position, shard in shards.items()) % 2**32
        for x, shards in zip(arrays, local, strict=True)
    ]
    if shared:
        sums_PN = multihost_utils.process_allgather(np.array(sums, np.uint32))
        sums = sums_PN.sum(axis=0, dtype=np.uint64) % 2**32
    return zlib.crc32(np.array(sums, np.uint32).data)


def _hash(shard: np.ndarray, position: Position, shape: tuple[int, ...]) -> int:
    """Returns the sum of the hashes of the numbers of a shard of an array of `shape`."""
    # Pieces of this size fit into the cache of a processor.
    if shard.ndim > 1 and shard.size > HASHED_AT_ONCE and len(shard) > 1:
        middle, ((start, end), *rest) = len(shard) // 2, position
        halves = (shard[:middle], (start, start + middle)), (shard[middle:], (start + middle, end))
        return sum(_hash(half, (rows, *rest), shape) for half, rows in halves)
    index = np.zeros([1] * shard.ndim, np.uint32)  # of each number in the whole, flattened array
    for axis, (start, end) in enumerate(position):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        along = np.arange(start, end, dtype=np.uint32) * stride
        other_axes = tuple(other for other in range(shard.ndim) if other != axis)
        index = index + np.expand_dims(along, other_axes)
    words = np.ascontiguousarray(shard).view(f"u{min(4, shard.itemsize)}")
    words = words.reshape(*shard.shape, max(1, shard.itemsize // 4))
    mixed = (words ^ (index * np.uint32(0x9E3779B1))[..., None]) * np.uint32(0x85EBCA6B)
    return int((mixed ^ (mixed >> np.uint32(15))).sum(dtype=np.uint64))


def average(trees: Iterable[Tree]) -> Tree:
    """Returns the mean of each array over `trees`, with its type and sharding. Section 6.1.

    The sum is in float64, so that the mean of equal arrays is exact. Only 1 tree at a time is in
    memory.
    """
    total: list[dict[Position, np.ndarray]] = []
    count = 0
    for tree in trees:
        count += 1
        if count == 1:
            like = jax.tree.map(_struct, tree)
            total = [
                {position: np.array(shard, np.float64) for position, shard in _shards(x).items()}
                for x in jax.tree.leaves(tree)
            ]
        else:
            _add(total, tree)
        del tree  # before the next one is read
    means = iter(total)

    def mean(struct: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
        shards = {
            position: (sums / count).astype(struct.dtype) for position, sums in next(means).items()
        }
        if struct.sharding is None:
            return next(iter(shards.values()))
        shard_at = lambda index: shards[_position(index, struct.shape)]  # noqa: E731
        return jax.make_array_from_callback(struct.shape, struct.sharding, shard_at)

    return jax.tree.map(mean, like)


def _add(total: list[dict[Position, np.ndarray]], tree: Tree) -> None:
    for sums, x in zip(total, jax.tree.leaves(tree), strict=True):
        for position, shard in _shards(x).items():
            sums[position] += shard


def _struct(x: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def checksums(parts: Mapping[str, Tree], record: dict[str, Any]) -> dict[str, int | str]:
    """Returns the checksum of each part, and of `record` by that name."""
    return {name: checksum(tree) for name, tree in parts.items()} | {"record": _of_json(record)}


def _of_json(record: dict[str, Any]) -> str:
    """Returns the SHA-256 of a record as JSON, without its checksums."""
    others = {name: value for name, value in record.items() if name != "checksum"}
    as_read = json.loads(json.dumps(others))  # a number as a key becomes a text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()
