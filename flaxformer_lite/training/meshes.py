"""The mesh of devices, and how the rows of a batch are divided over it."""

import collections
import contextlib
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.sharding import AXES, DATA, FSDP, TENSOR


def make_mesh(
    data: int, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh of `data` x `fsdp` x `tensor` devices, the first of `devices`.

    One of the three sizes may be -1: then it is as large as possible.

    Args:
      data: number of parts of a batch, each with a copy of the state.
      fsdp: number of parts of the rows and of the state.
      tensor: number of devices that compute the same rows.
      devices: None: all devices.

    Raises:
      InputError: there are fewer devices; or -1 leaves some of them unused; or a run of several
        processes leaves some of them unused; or the devices cannot be `arranged`.
    """
    devices, sizes = devices or jax.devices(), {DATA: data, FSDP: fsdp, TENSOR: tensor}
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and known < len(devices) and len(devices) % known:
        given = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size not in (-1, 1))
        raise InputError(
            f"config.parallel: {given} do not divide the {len(devices)} devices, so that -1 "
            "cannot be all the rest; choose a divisor, or a number for each axis."
        )
    rest = max(1, len(devices) // known)
    sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    count = math.prod(sizes.values())
    processes = len({device.process_index for device in devices})
    if count > len(devices) or (processes > 1 and count != len(devices)):
        product = " x ".join(
            f"{size} {axis}" for axis, size in sizes.items() if size > 1 or axis == DATA
        )
        large = [axis for axis, size in sizes.items() if size > 1]
        field = large[0] if large else DATA
        advice = "use -1 for all" if field == DATA else "use fewer, or -1 for all that are left"
        wanted = f"{count} devices" if count == sizes[DATA] else f"{product} = {count} devices"
        raise InputError(
            f"config.parallel.{field}: {wanted} asked for, there are {len(devices)}; {advice}."
        )
    grid = arranged(devices[:count], (sizes[DATA], sizes[FSDP], sizes[TENSOR]))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(devices: Sequence[jax.Device], shape: tuple[int, int, int]) -> np.ndarray:
    """Returns `devices` as an array (data, fsdp, tensor) whose neighbours have fast links.

    The network between TPU slices, or GPU machines, is slower than the links within them. It is
    crossed along data if their number divides data, else along data and fsdp. Devices that compute
    the same rows belong to one process, or to processes that share all of their rows.

    Raises:
      InputError: devices that compute the same rows would belong to several slices; or to several
        processes that share only some of their rows.
    """
    in_order = sorted(devices, key=lambda device: (_slice(device), device.process_index, device.id))
    slices = len({_slice(device) for device in devices})
    across_data = math.gcd(slices, shape[0])
    across = across_data, math.gcd(slices // across_data, shape[1]), 1
    if math.prod(across) != slices:
        raise InputError(
            f"config.parallel.tensor: {shape[2]} devices that work on the same rows would belong "
            f"to several slices, or machines, and there are {slices} of {len(devices) // slices} "
            "devices; choose a divisor of the latter."
        )
    within = tuple(size // slower for size, slower in zip(shape, across, strict=True))
    candidates = [np.array(in_order).reshape(shape)]
    # fails if the devices are only a part of a pod, which is no torus
    with contextlib.suppress(AssertionError, NotImplementedError, TypeError, ValueError):
        grid = mesh_utils.create_hybrid_device_mesh(
            within, across, in_order, allow_split_physical_axes=True
        )
        candidates.insert(0, grid)
    for grid in candidates:
        if _row_shards_of_processes(grid) is not None:
            return grid
    of_process = len(devices) // len({device.process_index for device in devices})
    raise InputError(
        f"config.parallel.tensor: {shape[2]} devices that work on the same rows belong to one "
        f"process, or to whole processes, and each has {of_process}; choose a divisor of that, or "
        "a multiple."
    )


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0


def _row_shards_of_processes(devices: np.ndarray) -> dict[int, frozenset[int]] | None:
    """Returns the row shards of each process; None if two processes share only some of theirs.

    Args:
      devices: array (data, fsdp, tensor).
    """
    found: dict[int, set[int]] = collections.defaultdict(set)
    for shard, group in enumerate(devices.reshape(-1, devices.shape[-1])):
        for device in group:
            found[device.process_index].add(shard)
    shards = {process: frozenset(own) for process, own in found.items()}
    different = set(shards.values())
    equal_sizes = len({len(own) for own in different}) == 1
    disjoint = sum(map(len, different)) == len(frozenset().union(*different))
    return shards if equal_sizes and disjoint else None


def rows_of_process(mesh: Mesh) -> tuple[int, int]:
    """Returns (index, number) of the equal part of a batch's rows that this process provides.

    Processes whose devices compute the same rows provide the same part.
    """
    shards = _row_shards_of_processes(mesh.devices)
    assert shards is not None, "`arranged` ensures it"
    parts = sorted(set(shards.values()), key=min)
    return parts.index(shards[jax.process_index()]), len(parts)


def widest_mesh(rows_multiple: int, tensor: int = 1) -> Mesh:
    """Returns the mesh of the most devices that divide batches of `rows_multiple` rows evenly.

    Args:
      tensor: number of devices that compute the same rows.

    Raises:
      InputError: there are fewer than `tensor` devices.
    """
    count = len(jax.devices())
    if not 1 <= tensor <= count:
        on_cpu = jax.devices()[0].platform == "cpu"
        more = "; JAX_NUM_CPU_DEVICES=2 makes two of a CPU" if on_cpu else ""
        raise InputError(
            f"tensor: expected 1 to {count}, the available devices, got {tensor}{more}."
        )
    data = max(n for n in range(1, count // tensor + 1) if rows_multiple % n == 0)
    return make_mesh(data, tensor=tensor)


def row_shards(mesh: Mesh) -> int:
    """Returns how many parts the rows of a batch are split into over `mesh`."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def check_rows(mesh: Mesh, *, rows_multiple: int, accumulate_steps: int) -> None:
    """Raises InputError if the devices of `mesh` cannot divide every microbatch evenly."""
    parts = row_shards(mesh)
    if rows_multiple % (parts * accumulate_steps):
        raise InputError(
            f"config.data.rows_multiple: {rows_multiple} rows cannot be split evenly over "
            f"{parts} devices and {accumulate_steps} microbatches; make it a multiple of "
            f"{parts * accumulate_steps}, or use fewer devices (parallel.data, parallel.fsdp)."
        )
