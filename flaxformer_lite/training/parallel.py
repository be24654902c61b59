"""Two ways to run one step on many devices: jit over a mesh, which may split the state too, and pmap, which does not.

Either way a process passes its own rows of a batch (the processes' rows in order make the global batch), and the
step is the same pure function. Over a mesh that splits the state it sees the global batch; where devices hold copies of
the state, and under pmap, it sees a device's part and sums over `AXIS`.
"""

import collections
import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.model.devices import compiled_for
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import sharding
from flaxformer_lite.training.sharding import AXES, DATA, FSDP, ROWS, TENSOR, WHOLE

AXIS = DATA
# For XLA, by platform. On a CPU one pass would take away the barriers that keep what is computed again in the backward
# pass apart from the first time, find both alike, and keep the first: with model.remat='full' four times the memory.
# And LLVM is to do less: a step is as fast, libraries compute its products, and compiling takes a tenth less time.
COMPILER_OPTIONS = {"cpu": {"xla_disable_hlo_passes": "cse_barrier_expander", "xla_backend_optimization_level": "1"}}

SILENCE = 30  # seconds without a sign of life after which a process is taken for dead, and the others end

Tree = Any


def initialize(address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the other processes of a run: by the three flags, or by what a TPU pod or Slurm says; else does nothing.

    One process that is given as such, without the other two flags, looks for no others.

    Raises:
      InputError: some of the three flags are given, but not all; or one is wrong.
    """
    given = [flag is not None for flag in (address, num_processes, process_id)]
    if num_processes == 1 and sum(given) == 1:
        return
    if all(given):
        if not re.fullmatch(r".+:\d+", address):
            raise InputError(f"--coordinator_address: expected HOST:PORT of process 0, got {address!r}.")
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise InputError(
                f"--process_id: expected 0 to --num_processes - 1, got {process_id} of {num_processes} processes."
            )
        if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, num_processes, process_id, heartbeat_timeout_seconds=SILENCE)
    elif any(given):
        raise InputError("--coordinator_address, --num_processes and --process_id go together: give all three.")
    elif _in_slurm_step_of_many() or _on_tpu_host():
        jax.distributed.initialize(heartbeat_timeout_seconds=SILENCE)  # finds address and numbers by itself


def _in_slurm_step_of_many() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1  # of srun; a batch script itself is one task


def _on_tpu_host() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
    return "tpu" in platforms and runtime.has_tpu()


def make_mesh(data: int, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `data` x `fsdp` x `tensor` devices, of the first of `devices`; -1, for one of the three: the rest.

    Args:
      data: how many share the rows of a batch.
      fsdp: how many share rows and state.
      tensor: how many work on the same rows.
      devices: what to choose from; None: all that there are.

    Raises:
      InputError: there are fewer devices, or -1 would leave some out, or several processes would not use all of theirs,
        or the devices cannot be `arranged`.
    """
    devices, sizes = devices or jax.devices(), {DATA: data, FSDP: fsdp, TENSOR: tensor}
    known = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and known < len(devices) and len(devices) % known:
        given = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size not in (-1, 1))
        raise InputError(
            f"config.parallel: {given} do not divide the {len(devices)} devices, so that -1 cannot be all the rest; "
            "choose a divisor, or a number for each axis."
        )
    sizes = {axis: max(1, len(devices) // known) if size == -1 else size for axis, size in sizes.items()}
    count = math.prod(sizes.values())
    processes = len({device.process_index for device in devices})
    if count > len(devices) or (processes > 1 and count != len(devices)):
        asked = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1 or axis == DATA)
        what = f"{count} devices" if count == sizes[DATA] else f"{asked} = {count} devices"
        raise InputError(f"config.parallel.data: {what} asked for, there are {len(devices)}; use -1 for all.")
    return Mesh(arranged(devices[:count], tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(devices: Sequence[jax.Device], shape: tuple[int, int, int]) -> np.ndarray:
    """`devices` as an array (data, fsdp, tensor) in which neighbours along an axis have fast links between them.

    Slices of TPUs, and machines of GPUs, are joined by a slower network than the devices within them. It is crossed by
    data if that divides among them, else by data and fsdp. Devices that work on the same rows belong to one process, or
    to the same few.

    Raises:
      InputError: devices that work on the same rows would belong to two slices; or to two processes which also work on
        different rows.
    """
    in_order = np.array(sorted(devices, key=lambda device: (_slice(device), device.process_index, device.id)))
    slices = len({_slice(device) for device in devices})
    across = math.gcd(slices, shape[0]), math.gcd(slices // math.gcd(slices, shape[0]), shape[1]), 1
    if math.prod(across) != slices:
        raise InputError(
            f"config.parallel.tensor: {shape[2]} devices that work on the same rows would belong to several slices, or "
            f"machines, and there are {slices} of {len(devices) // slices} devices; choose a divisor of the latter."
        )
    within = tuple(size // slower for size, slower in zip(shape, across, strict=True))
    options = {"allow_split_physical_axes": True}
    candidates = [in_order.reshape(shape)]
    with contextlib.suppress(AssertionError, NotImplementedError, TypeError, ValueError):  # part of a pod: no torus
        candidates.insert(0, mesh_utils.create_hybrid_device_mesh(within, across, list(in_order), **options))
    if not (found := [each for each in candidates if _row_shards_of_processes(each) is not None]):
        own = len(devices) // len({device.process_index for device in devices})
        raise InputError(
            f"config.parallel.tensor: {shape[2]} devices that work on the same rows belong to one process, or to whole "
            f"processes, and each has {own}; choose a divisor of that, or a multiple."
        )
    return found[0]


def _slice(device: jax.Device) -> int:
    return getattr(device, "slice_index", None) or 0


def _row_shards_of_processes(devices: np.ndarray) -> dict[int, frozenset[int]] | None:
    """For each process the parts of the rows that its devices hold; None if two share some of theirs and not all."""
    found = collections.defaultdict(set)
    for shard, group in enumerate(devices.reshape(-1, devices.shape[-1])):
        for device in group:
            found[device.process_index].add(shard)
    shards = {process: frozenset(held) for process, held in found.items()}
    alike = len({len(held) for held in shards.values()}) == 1
    return shards if alike and sum(map(len, set(shards.values()))) == len(frozenset().union(*shards.values())) else None


def rows_of_process(mesh: Mesh) -> tuple[int, int]:
    """Which of how many equal parts of a batch's rows this process provides.

    Processes whose devices work on the same rows provide the same part.
    """
    shards = _row_shards_of_processes(mesh.devices)
    parts = sorted(set(shards.values()), key=min)
    return parts.index(shards[jax.process_index()]), len(parts)


def widest_mesh(rows_multiple: int, tensor: int = 1) -> Mesh:
    """A mesh over as many devices as can share batches of `rows_multiple` rows evenly, `tensor` for each share.

    Raises:
      InputError: there are fewer than `tensor` devices.
    """
    count = len(jax.devices())
    if not 1 <= tensor <= count:
        more = "; JAX_NUM_CPU_DEVICES=2 makes two of a CPU" if jax.devices()[0].platform == "cpu" else ""
        raise InputError(f"tensor: expected 1 to {count}, the devices that there are, got {tensor}{more}.")
    data = max(n for n in range(1, count // tensor + 1) if rows_multiple % n == 0)
    return make_mesh(data, tensor=tensor)


def row_shards(mesh: Mesh) -> int:
    """How many parts the rows of a batch are split into over `mesh`."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def check_rows(mesh: Mesh, *, rows_multiple: int, accumulate_steps: int) -> None:
    """Raises InputError if the devices of `mesh` cannot share every (micro)batch evenly."""
    parts = row_shards(mesh)
    if rows_multiple % (parts * accumulate_steps):
        raise InputError(
            f"config.data.rows_multiple: {rows_multiple} rows cannot be split evenly over {parts} devices and "
            f"{accumulate_steps} microbatches; make it a multiple of {parts * accumulate_steps}, "
            "or use fewer devices (parallel.data, parallel.fsdp)."
        )


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """`tree` of host arrays, equal in all processes, as global arrays that every device holds whole."""
    return _put(tree, jax.tree.map(lambda _: NamedSharding(mesh, WHOLE), tree))


def _put(tree: Tree, shardings: Tree) -> Tree:
    """`tree` laid out as `shardings`; what already lies so stays where it is."""

    def put(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree, shardings)


def shard_rows(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows of a batch as part of global arrays, split over the devices of `mesh`."""
    rows = NamedSharding(mesh, ROWS)
    return {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}


def largest(number: int, mesh: Mesh) -> jax.Array:
    """The largest `number` of all processes, as an array that can be read later: nobody waits here."""
    mine = np.full((len(mesh.local_devices),), number, np.int32)
    shards = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXES)), mine)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, WHOLE))(shards)


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Options of XLA for a step, or the state before the first, on the devices of `mesh`."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})


class MeshMode:
    """`jit` over the mesh: the compiler splits the global batch and the state, and adds what devices must exchange.

    Where all devices hold copies of the whole state, each runs the step on its own rows, and gradients are summed over
    them once. Left to the compiler, those of tied embeddings would be summed twice: of the inputs, and of the output.
    """

    compiles_ahead = True

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._copies = 1 < mesh.size == mesh.shape[DATA]
        self.axis_name = AXIS if self._copies else None
        # Parts of the rows that a step sees, each on devices of its own.
        self.row_shards = 1 if self._copies else row_shards(mesh)

    def compile(self, step: Callable, state: Tree, batch: Tree, *, donate: bool) -> Callable:
        """`step(state, batch)` compiled for global batches of the shapes and types of `batch`.

        Raises:
          TypeError: the step does not sum over this mode's `axis_name`, so that devices would go apart.
        """
        _check_axis(step, self.axis_name)
        rows = NamedSharding(self.mesh, ROWS)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
        if self._copies:
            specs = {"in_specs": (WHOLE, ROWS), "out_specs": WHOLE}
            step = jax.shard_map(step, mesh=self.mesh, **specs, check_vma=False)  # a kernel's output has no such type
        step = compiled_for(step, self.mesh, (DATA, FSDP), keeps_rows=True)
        donated = (0,) if donate else ()
        traced = jax.jit(step, donate_argnums=donated).trace(self.abstract(state), batch)
        jitted = jax.jit(step, donate_argnums=donated, out_shardings=sharding.of(traced.out_info, self.mesh))
        lowered = jitted.lower(self.abstract(state), batch)  # JAX remembers what it has traced
        return lowered.compile(compiler_options=compiler_options(self.mesh))

    def abstract(self, tree: Tree) -> Tree:
        """Shapes and types of a state or a part of it, with how this mode holds it: what a checkpoint is read into."""
        shardings = sharding.of(tree, self.mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    def make_state(self, initial_state: Callable[[], Tree]) -> Tree:
        """What `initial_state` returns, each device making its own part of it."""
        return self.compile_state(initial_state)()

    def compile_state(self, initial_state: Callable[[], Tree]) -> Callable[[], Tree]:
        """`initial_state` compiled for these devices."""
        shardings = sharding.of(jax.eval_shape(initial_state), self.mesh)
        lowered = jax.jit(initial_state, out_shardings=shardings).lower()
        return lowered.compile(compiler_options=compiler_options(self.mesh))

    def put_state(self, state: Tree) -> Tree:
        """A state as `held`, or on the host, as this mode's state."""
        return _put(state, sharding.of(state, self.mesh))

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows as this mode's batch."""
        return shard_rows(batch, self.mesh)

    def over_mesh(self, state: Tree) -> Tree:
        """This mode's state as global arrays: what is saved, and what texts are written with."""
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
        # One process uses all devices, including those of a topology, which JAX does not count as local.
        self._local = mesh.local_devices if jax.process_count() > 1 else list(mesh.devices.flat)
        self._leading = NamedSharding(Mesh(np.array(self._local), (AXIS,)), PartitionSpec(AXIS))
        self.compiles_ahead = jax.process_count() == 1

    def compile(self, step: Callable, state: Tree, batch: Tree, *, donate: bool) -> Callable:
        """`step(state, batch)` compiled for global batches of the shapes and types of `batch`.

        Raises:
          TypeError: as `MeshMode.compile`.
        """
        _check_axis(step, self.axis_name)
        size, step = self.mesh.size, compiled_for(step, self.mesh, AXES)
        device_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype), batch)
        mapped = jax.pmap(step, axis_name=AXIS, devices=self._devices_argument(), donate_argnums=(0,) if donate else ())
        arguments = jax.tree.map(self._a_device_each, (state, device_batch))
        if self.compiles_ahead:
            return mapped.lower(*arguments).compile(compiler_options=compiler_options(self.mesh))
        # Over several processes pmap compiles in its first call only, which all of them must make at the same time.
        zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), self._leading), arguments)
        jax.block_until_ready(mapped(*zeros))
        return mapped

    def _a_device_each(self, x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(self._local), *x.shape), x.dtype)

    def _devices_argument(self) -> list | None:
        """pmap takes an explicit device list within one process only; over several it uses all."""
        return None if jax.process_count() > 1 else self._local

    def abstract(self, tree: Tree) -> Tree:
        """Shapes and types of a state or a part of it, whole on every device: what a checkpoint is read into."""
        return whole_on(self.mesh, tree)

    def make_state(self, initial_state: Callable[[], Tree]) -> Tree:
        """What `initial_state` returns, as one copy a device."""
        lowered = jax.jit(initial_state).lower()
        return self.put_state(lowered.compile(compiler_options=compiler_options(self.mesh))())

    def put_state(self, state: Tree) -> Tree:
        """Host or replicated arrays as one copy a device, on a new leading axis."""
        count = len(self._local)
        copies = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (count, *np.shape(x))), state)
        return jax.device_put(copies, self._leading)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows, cut into one part a device."""
        parts = {name: x.reshape(len(self._local), -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.device_put(parts, self._leading)

    def over_mesh(self, state: Tree) -> Tree:
        """The first copy of the state as global arrays that every device of the mesh holds whole."""
        return replicate(self.read(state), self.mesh)

    def read(self, sums: Tree) -> Tree:
        """Metrics of a compiled step, the same on every device, on the host; waits for the step."""
        return jax.device_get(jax.tree.map(lambda x: x.addressable_shards[0].data[0], sums))


def _check_axis(step: Callable, axis_name: str | None) -> None:
    given = step.keywords.get("axis_name") if isinstance(step, functools.partial) else axis_name
    if given != axis_name:
        raise TypeError(f"step: expected axis_name={axis_name!r}, the mode's own, got {given!r}; pass mode.axis_name.")


MODES = {"mesh": MeshMode, "pmap": PmapMode}


def decoding_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
    """Of a batch to decode and of logits, both split by rows over `mesh`, and of what comes out, whole everywhere.

    A batch is split between devices that hold the same part of the model, logits between all.
    """
    batch, logits, output = (NamedSharding(mesh, spec) for spec in (ROWS, PartitionSpec(AXES), WHOLE))
    return batch, logits, output


def whole_on(mesh: Mesh, tree: Tree) -> Tree:
    """Shapes and types of `tree`, to be held whole by every device of `mesh`: what a checkpoint is read into."""
    whole = NamedSharding(mesh, WHOLE)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)
