"""Two ways to run one step on many devices: jit over a mesh, and pmap. Both keep the state whole on each device.

Either way a process passes its own rows of a batch (the processes' rows in order make the global batch), and the
step is the same pure function: over a mesh it sees the global batch, under pmap a device's part, and sums over
`AXIS`.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"

Tree = Any


def initialize(address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes of a run: by the three flags, or by what a TPU pod or Slurm says; else does nothing.

    Raises:
      ValueError: some of the three flags are given, but not all.
    """
    given = [flag is not None for flag in (address, num_processes, process_id)]
    if all(given):
        if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, process_id)
    elif any(given):
        raise ValueError("--coordinator_address, --num_processes and --process_id go together: give all three.")
    elif _in_slurm_step_of_many() or _on_tpu_host():
        jax.distributed.initialize()  # finds the address and the numbers by itself


def _in_slurm_step_of_many() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1  # of srun; a batch script itself is one task


def _on_tpu_host() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
    return "tpu" in platforms and importlib.util.find_spec("libtpu") is not None


def make_mesh(num_devices: int) -> Mesh:
    """A mesh with one axis, `data`, over the first `num_devices` devices; -1: over all of them.

    Raises:
      ValueError: there are fewer devices, or the processes of a run would not have equal parts.
    """
    devices = jax.devices()
    count = len(devices) if num_devices == -1 else num_devices
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        raise ValueError(f"config.parallel.data: {count} devices asked for, there are {len(devices)}; use -1 for all.")
    return jax.make_mesh((count,), (AXIS,), devices=devices[:count], axis_types=(AxisType.Auto,))


def widest_mesh(rows_multiple: int) -> Mesh:
    """A mesh over as many devices as can share batches of `rows_multiple` rows evenly."""
    return make_mesh(max(n for n in range(1, len(jax.devices()) + 1) if rows_multiple % n == 0))


def check_rows(mesh: Mesh, *, rows_multiple: int, accumulate_steps: int) -> None:
    """Raises ValueError if the devices of `mesh` cannot share every (micro)batch evenly."""
    if rows_multiple % (mesh.size * accumulate_steps):
        raise ValueError(
            f"config.data.rows_multiple: {rows_multiple} rows cannot be split evenly over {mesh.size} devices and "
            f"{accumulate_steps} microbatches; make it a multiple of {mesh.size * accumulate_steps}, "
            "or use fewer devices (parallel.data)."
        )


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """`tree` of host arrays, equal in all processes, as global arrays that every device holds whole."""
    whole = NamedSharding(mesh, PartitionSpec())

    def put(x: jax.Array | np.ndarray) -> jax.Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, whole, lambda index: x[index])

    return jax.tree.map(put, tree)


def shard_rows(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch as part of global arrays, split over the devices of `mesh`."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


def largest(number: int, mesh: Mesh) -> jax.Array:
    """The largest `number` of all processes, as an array that can be read later: nobody waits here."""
    mine = np.full((len(mesh.local_devices),), number, np.int32)
    shards = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXIS)), mine)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(shards)


class MeshMode:
    """`jit` over the mesh: the compiler splits the global batch and adds what devices must exchange."""

    axis_name = None
    compiles_ahead = True

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.row_shards = mesh.size  # devices that share the rows which a step sees

    def compile(self, step: Callable, state: Tree, batch: Tree, *, donate: bool) -> Callable:
        """`step(state, batch)` compiled for global batches of the shapes and types of `batch`."""
        rows = NamedSharding(self.mesh, PartitionSpec(AXIS))
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
        whole = NamedSharding(self.mesh, PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
        jitted = jax.jit(step, donate_argnums=(0,) if donate else (), out_shardings=whole)
        return jitted.lower(shapes, batch).compile()

    def put_state(self, state: Tree) -> Tree:
        """Host or replicated arrays as this mode's state."""
        return replicate(state, self.mesh)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows as this mode's batch."""
        return shard_rows(batch, self.mesh)

    def replicated(self, state: Tree) -> Tree:
        """This mode's state as arrays that every device of the mesh holds whole."""
        return state

    def read(self, sums: Tree) -> Tree:
        """Metrics of a compiled step on the host; waits for the step."""
        return jax.device_get(sums)


class PmapMode:
    """`pmap`: each device runs the step on its part of the batch, with a copy of the state of its own."""

    axis_name = AXIS
    row_shards = 1

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._local = mesh.local_devices
        self._leading = NamedSharding(Mesh(np.array(self._local), (AXIS,)), PartitionSpec(AXIS))
        self.compiles_ahead = jax.process_count() == 1

    def compile(self, step: Callable, state: Tree, batch: Tree, *, donate: bool) -> Callable:
        """`step(state, batch)` compiled for global batches of the shapes and types of `batch`."""
        size = self.mesh.size
        device_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype), batch)
        mapped = jax.pmap(step, axis_name=AXIS, devices=self._devices_argument(), donate_argnums=(0,) if donate else ())
        arguments = jax.tree.map(self._a_device_each, (state, device_batch))
        if self.compiles_ahead:
            return mapped.lower(*arguments).compile()
        # Over several processes pmap compiles in its first call only, which all of them must make at the same time.
        zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), self._leading), arguments)
        jax.block_until_ready(mapped(*zeros))
        return mapped

    def _a_device_each(self, x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(self._local), *x.shape), x.dtype)

    def _devices_argument(self) -> list | None:
        """pmap takes an explicit device list within one process only; over several it uses all."""
        return None if jax.process_count() > 1 else self._local

    def put_state(self, state: Tree) -> Tree:
        """Host or replicated arrays as one copy a device, on a new leading axis."""
        count = len(self._local)
        copies = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (count, *np.shape(x))), state)
        return jax.device_put(copies, self._leading)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows, cut into one part a device."""
        parts = {name: x.reshape(len(self._local), -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.device_put(parts, self._leading)

    def replicated(self, state: Tree) -> Tree:
        """The first copy of the state, as arrays that every device of the mesh holds whole."""
        return replicate(self.read(state), self.mesh)

    def read(self, sums: Tree) -> Tree:
        """Metrics of a compiled step, the same on every device, on the host; waits for the step."""
        return jax.device_get(jax.tree.map(lambda x: x.addressable_shards[0].data[0], sums))


MODES = {"mesh": MeshMode, "pmap": PmapMode}


def decoding_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Of a batch to decode, split by rows over `mesh`, and of what comes out, whole everywhere."""
    return NamedSharding(mesh, PartitionSpec(AXIS)), NamedSharding(mesh, PartitionSpec())


def whole_on(mesh: Mesh, tree: Tree) -> Tree:
    """Shapes and types of `tree`, to be held whole by every device of `mesh`: what a checkpoint is read into."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)
