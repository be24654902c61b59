"""The devices that a program is compiled for: what the compiler cannot decide well without knowing them."""

import contextvars
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Devices:
    """A mesh that a program is compiled for, and its axes that split rows; the others split heads."""

    mesh: Mesh
    rows: tuple[str, ...]
    keeps_rows: bool = False  # activations stay split by rows, see `keep_rows`

    @property
    def heads(self) -> tuple[str, ...]:
        """The other axes."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.rows)

    def count(self, axes: tuple[str, ...]) -> int:
        """Devices along `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


_DEVICES: contextvars.ContextVar[Devices | None] = contextvars.ContextVar("devices", default=None)


def compiled_for(function: Callable, mesh: Mesh, rows: tuple[str, ...], *, keeps_rows: bool = False) -> Callable:
    """`function`, to be compiled for `mesh`, whose axes `rows` split rows, and the others heads.

    The result is a new function at each call: JAX caches traces by function and arguments, not by mesh.
    """

    def on_mesh(*arguments: Any) -> Any:
        token = _DEVICES.set(Devices(mesh, rows, keeps_rows))
        try:
            return function(*arguments)
        finally:
            _DEVICES.reset(token)

    on_mesh.__name__ = getattr(getattr(function, "func", function), "__name__", "on_mesh")  # func: of a partial
    return on_mesh


def sharing() -> Devices | None:
    """The devices that share the rows or heads of the traced program; None: one device, or each has its own part."""
    devices = _DEVICES.get()
    shared = devices is not None and devices.mesh.size > 1
    return devices if shared and not jax.sharding.get_abstract_mesh().manual_axes else None


def keep_rows(x: jax.Array) -> jax.Array:
    """Returns activations `x` (B, ...), which stay split by rows as the batch is; as they are on one device.

    Without this the compiler may split them as the weights that they meet. Then it sends activations where it should
    send weights, which are smaller.
    """
    devices = sharing()
    if devices is None or not devices.keeps_rows:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(devices.mesh, PartitionSpec(devices.rows)))


def whole_vectors(table_VD: jax.Array) -> jax.Array:
    """Returns a table whose vectors are looked up, each of them whole on a device; as it is on one device."""
    devices = sharing()
    if devices is None or not devices.keeps_rows:
        return table_VD
    return jax.lax.with_sharding_constraint(table_VD, NamedSharding(devices.mesh, PartitionSpec(devices.heads, None)))


def unknown() -> bool:
    """Whether there are several devices, and the program was not `compiled_for` them."""
    return _DEVICES.get() is None and jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes


def platform() -> str:
    """The devices in use: 'cpu', 'tpu', 'gpu', or 'cuda' for an NVIDIA GPU with cuDNN's flash attention."""
    device = devices.mesh.devices.flat[0] if (devices := _DEVICES.get()) else jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # '9.0'; of an AMD GPU 'gfx942'
    major = capability.partition(".")[0]
    return "cuda" if major.isdigit() and int(major) >= 8 else device.platform  # 8: Ampere
