"""The device mesh that a function is compiled for, and what layers constrain by it."""

import contextvars
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh, and the names of its axes that split rows; its other axes split heads."""

    mesh: Mesh
    rows: tuple[str, ...]
    keeps_rows: bool = False  # activations stay split by rows, see `keep_rows_split`

    @property
    def heads(self) -> tuple[str, ...]:
        """The axes that split heads."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.rows)

    def count(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


_DEVICES: contextvars.ContextVar[Devices | None] = contextvars.ContextVar("devices", default=None)


def compiled_for(
    function: Callable[..., Any], mesh: Mesh, rows: tuple[str, ...], *, keeps_rows: bool = False
) -> Callable[..., Any]:
    """Returns `function` to compile for `mesh`, whose axes `rows` split rows, the others heads.

    Each call returns a new function: JAX caches traces by function and arguments, not by mesh.
    """

    def on_mesh(*arguments: Any) -> Any:
        token = _DEVICES.set(Devices(mesh, rows, keeps_rows))
        try:
            return function(*arguments)
        finally:
            _DEVICES.reset(token)

    # a functools.partial has its name in `func`
    on_mesh.__name__ = getattr(getattr(function, "func", function), "__name__", "on_mesh")
    return on_mesh


def split_over() -> Devices | None:
    """Returns the devices that split the traced function's rows or heads.

    None: there is one device, or the function runs per device (pmap, shard_map).
    """
    devices = _DEVICES.get()
    several = devices is not None and devices.mesh.size > 1
    return devices if several and not jax.sharding.get_abstract_mesh().manual_axes else None


def keep_rows_split(x: jax.Array) -> jax.Array:
    """Returns activations `x` (B, ...) with the constraint that devices split them by rows.

    Without it the compiler may split them as their weights are split, and then transfer activations
    where it could transfer weights, which are smaller.
    """
    devices = split_over()
    if devices is None or not devices.keeps_rows:
        return x
    sharding = NamedSharding(devices.mesh, PartitionSpec(devices.rows))
    return jax.lax.with_sharding_constraint(x, sharding)


def keep_vectors_whole(table_VD: jax.Array) -> jax.Array:
    """Returns a lookup table with the constraint that no vector is split over devices."""
    devices = split_over()
    if devices is None or not devices.keeps_rows:
        return table_VD
    sharding = NamedSharding(devices.mesh, PartitionSpec(devices.heads, None))
    return jax.lax.with_sharding_constraint(table_VD, sharding)


def is_mesh_unknown() -> bool:
    """Whether there are several devices, and the function was not `compiled_for` them."""
    return (
        _DEVICES.get() is None
        and jax.device_count() > 1
        and not jax.sharding.get_abstract_mesh().manual_axes
    )


def platform() -> str:
    """Returns 'cpu', 'tpu', 'gpu', or 'cuda' for an NVIDIA GPU with cuDNN's flash attention."""
    device = devices.mesh.devices.flat[0] if (devices := _DEVICES.get()) else jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # '9.0'; of an AMD GPU 'gfx942'
    major = capability.partition(".")[0]
    return "cuda" if major.isdigit() and int(major) >= 8 else device.platform  # 8: Ampere
