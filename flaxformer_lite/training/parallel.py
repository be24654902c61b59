"""The parallel modes: how one step runs on many devices.

`MeshMode` is `jit` over a mesh, which can also split the state. `PmapMode` is `pmap`, which copies
the state to every device.

In both modes a process passes its own rows of a batch; the rows of all processes in order are the
global batch. The step is the same pure function. If the mesh splits the state, the step gets the
global batch. If every device has a copy of the state, it gets the rows of one device and sums over
the axis `AXIS`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.model.devices import compiled_for
from flaxformer_lite.training import sharding
from flaxformer_lite.training.meshes import row_shards
from flaxformer_lite.training.sharding import AXES, DATA, FSDP, ROWS, WHOLE

AXIS = DATA
# XLA options by platform. On a CPU, `cse_barrier_expander` removes the barriers around recomputed
# values. XLA then merges them with the values of the forward pass and keeps those: 4 times the
# memory with model.remat='full'. Level 1 of LLVM compiles 10 % faster, and a step is as fast, as
# libraries compute its matrix products.
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_disable_hlo_passes": "cse_barrier_expander", "xla_backend_optimization_level": "1"}
}

Tree = Any


def replicate(tree: Tree, mesh: Mesh) -> Tree:
    """Returns host arrays, equal in all processes, as global arrays replicated on every device."""
    return _put(tree, jax.tree.map(lambda _: NamedSharding(mesh, WHOLE), tree))


def _put(tree: Tree, shardings: Tree) -> Tree:
    """Returns `tree` with `shardings`; arrays that have their sharding already are not copied."""

    def put(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree, shardings)


def shard_rows(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Returns the global batch, split over `mesh`; each process passes its own rows."""
    rows = NamedSharding(mesh, ROWS)
    return {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}


def largest(number: int, mesh: Mesh) -> jax.Array:
    """Returns the largest `number` of all processes, as an array; does not wait for its value."""
    local = np.full((len(mesh.local_devices),), number, np.int32)
    shards = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec(AXES)), local)
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, WHOLE))(shards)


def compiler_options(mesh: Mesh) -> dict[str, str | bool]:
    """Returns the XLA options for the devices of `mesh`."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})


def decoding_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding, NamedSharding]:
    """Returns the shardings of a batch to decode, of its logits, and of the decoded ids.

    The batch is split over data and fsdp, the logits over all devices; the ids are replicated.
    """
    rows, all_devices = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec(AXES))
    return rows, all_devices, NamedSharding(mesh, WHOLE)


def whole_on(mesh: Mesh, tree: Tree) -> Tree:
    """Returns the abstract `tree`, replicated on `mesh`, to restore a checkpoint into."""
    whole = NamedSharding(mesh, WHOLE)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)


def whole_on_host(x: jax.Array, mesh: Mesh) -> np.ndarray:
    """Returns a global array over `mesh` as a NumPy array, whole in every process."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, WHOLE))(x))


class MeshMode:
    """The parallel mode 'mesh': `jit` over a mesh.

    The compiler partitions the global batch and the state, and inserts the communication. If every
    device has a copy of the state, `shard_map` runs the step on the rows of each device, and
    gradients are summed over devices once. The compiler alone would sum the gradients of tied
    embeddings 2 times: those of the inputs, and those of the output.

    Attributes:
      axis_name: the axis that a step sums over; None: the compiler inserts the sums.
      row_shards: how many devices the compiler splits the rows over that a step gets.
      compiles_ahead: whether a step is compiled before its first call.
    """

    compiles_ahead = True

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._copies = 1 < mesh.size == mesh.shape[DATA]
        self.axis_name = AXIS if self._copies else None
        self.row_shards = 1 if self._copies else row_shards(mesh)

    def compile(
        self, step: Callable[..., Any], state: Tree, batch: Tree, *, donate: bool
    ) -> Callable[..., Any]:
        """Returns `step(state, batch)`, compiled for global batches with the shapes of `batch`.

        Raises:
          TypeError: the step does not sum over the `axis_name` of this mode, so that the states of
            the devices would differ.
        """
        _check_axis(step, self.axis_name)
        rows = NamedSharding(self.mesh, ROWS)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
        if self._copies:
            step = jax.shard_map(
                step,
                mesh=self.mesh,
                in_specs=(WHOLE, ROWS),
                out_specs=WHOLE,
                check_vma=False,  # the output of a kernel has no varying axes in its type
            )
        step = compiled_for(step, self.mesh, (DATA, FSDP), keeps_rows=True)
        donated = (0,) if donate else ()
        traced = jax.jit(step, donate_argnums=donated).trace(self.abstract(state), batch)
        jitted = jax.jit(
            step, donate_argnums=donated, out_shardings=sharding.of(traced.out_info, self.mesh)
        )
        lowered = jitted.lower(self.abstract(state), batch)  # not traced again: JAX caches it
        return lowered.compile(compiler_options=compiler_options(self.mesh))

    def abstract(self, tree: Tree) -> Tree:
        """Returns a state, or a part of it, as shapes, types and the shardings of this mode.

        A checkpoint is restored into it.
        """
        shardings = sharding.of(tree, self.mesh)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
        )

    def make_state(self, initial_state: Callable[[], Tree]) -> Tree:
        """Returns the result of `initial_state`; each device computes its own part."""
        return self.compile_state(initial_state)()

    def state_with(self, initial_state: Callable[..., Tree], params: Tree) -> Tree:
        """Returns the result of `initial_state(params=params)`; `params`: as of `put_state`."""
        make = functools.partial(_with_params, initial_state)
        layout = sharding.of(jax.eval_shape(make, params), self.mesh)
        options = compiler_options(self.mesh)
        jitted = jax.jit(make, out_shardings=layout, compiler_options=options)
        return jitted(self.put_state(params))

    def compile_state(self, initial_state: Callable[[], Tree]) -> Callable[[], Tree]:
        """Returns `initial_state`, compiled for the mesh."""
        shardings = sharding.of(jax.eval_shape(initial_state), self.mesh)
        lowered = jax.jit(initial_state, out_shardings=shardings).lower()
        return lowered.compile(compiler_options=compiler_options(self.mesh))

    def put_state(self, state: Tree) -> Tree:
        """Returns a state, on devices or on the host, with the shardings of this mode."""
        return _put(state, sharding.of(state, self.mesh))

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns this process's rows as part of the global batch of this mode."""
        return shard_rows(batch, self.mesh)

    def over_mesh(self, state: Tree) -> Tree:
        """Returns the state as global arrays over the mesh, to save it or to decode with it."""
        return state

    def read(self, sums: Tree) -> Tree:
        """Returns the metrics of a compiled step on the host; waits for the step."""
        return jax.device_get(sums)


class PmapMode:
    """The parallel mode 'pmap': each device has a copy of the state, and runs the step on its rows.

    A state has a leading axis of devices. The attributes are those of `MeshMode`.
    """

    axis_name = AXIS
    row_shards = 1

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        # A single process uses all devices. JAX does not count those of a topology as local.
        self._local = mesh.local_devices if jax.process_count() > 1 else list(mesh.devices.flat)
        self._leading = NamedSharding(Mesh(np.array(self._local), (AXIS,)), PartitionSpec(AXIS))
        self.compiles_ahead = jax.process_count() == 1

    def compile(
        self, step: Callable[..., Any], state: Tree, batch: Tree, *, donate: bool
    ) -> Callable[..., Any]:
        """Returns `step(state, batch)`, compiled for global batches with the shapes of `batch`.

        Raises:
          TypeError: as in `MeshMode.compile`.
        """
        _check_axis(step, self.axis_name)
        size, step = self.mesh.size, compiled_for(step, self.mesh, AXES)
        device_batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // size, *x.shape[1:]), x.dtype), batch
        )
        mapped = jax.pmap(
            step,
            axis_name=AXIS,
            devices=self._devices_argument(),
            donate_argnums=(0,) if donate else (),
        )
        arguments = jax.tree.map(self._with_device_axis, (state, device_batch))
        if self.compiles_ahead:
            return mapped.lower(*arguments).compile(compiler_options=compiler_options(self.mesh))
        # With several processes pmap compiles only in its first call, which all of them must make
        # at the same time.
        zeros = jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), self._leading), arguments
        )
        jax.block_until_ready(mapped(*zeros))
        return mapped

    def _with_device_axis(self, x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(self._local), *x.shape), x.dtype)

    def _devices_argument(self) -> list[Any] | None:
        """Returns None for several processes: pmap accepts a device list only in a single one."""
        return None if jax.process_count() > 1 else self._local

    def abstract(self, tree: Tree) -> Tree:
        """Returns a state, or a part of it, as shapes and types, replicated on every device.

        A checkpoint is restored into it.
        """
        return whole_on(self.mesh, tree)

    def make_state(self, initial_state: Callable[[], Tree]) -> Tree:
        """Returns the result of `initial_state`, a copy on each device."""
        lowered = jax.jit(initial_state).lower()
        return self.put_state(lowered.compile(compiler_options=compiler_options(self.mesh))())

    def state_with(self, initial_state: Callable[..., Tree], params: Tree) -> Tree:
        """Returns the result of `initial_state(params=params)`, a copy on each device."""
        options = compiler_options(self.mesh)
        make = functools.partial(_with_params, initial_state)
        return self.put_state(jax.jit(make, compiler_options=options)(params))

    def put_state(self, state: Tree) -> Tree:
        """Returns host or replicated arrays with a leading axis: a copy on each device."""
        count = len(self._local)
        copies = jax.tree.map(
            lambda x: np.broadcast_to(np.asarray(x), (count, *np.shape(x))), state
        )
        return jax.device_put(copies, self._leading)

    def put_batch(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns this process's rows with a leading axis: a part on each device."""
        parts = {name: x.reshape(len(self._local), -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.device_put(parts, self._leading)

    def over_mesh(self, state: Tree) -> Tree:
        """Returns the first copy of the state as global arrays, replicated on the mesh."""
        return replicate(self.read(state), self.mesh)

    def read(self, sums: Tree) -> Tree:
        """Returns the metrics of a compiled step on the host; waits for the step."""
        return jax.device_get(jax.tree.map(lambda x: x.addressable_shards[0].data[0], sums))


def _with_params(initial_state: Callable[..., Tree], params: Tree) -> Tree:
    return initial_state(params=params)


def _check_axis(step: Callable[..., Any], axis_name: str | None) -> None:
    """Raises TypeError if a partial `step` has another `axis_name` than the parallel mode."""
    given = step.keywords.get("axis_name") if isinstance(step, functools.partial) else axis_name
    if given != axis_name:
        raise TypeError(
            f"step: expected axis_name={axis_name!r}, as in the parallel mode, got {given!r}; "
            "pass mode.axis_name."
        )


Mode = MeshMode | PmapMode
# by `parallel.mode` of the config
MODES: dict[str, type[Mode]] = {"mesh": MeshMode, "pmap": PmapMode}
