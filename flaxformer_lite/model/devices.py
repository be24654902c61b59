"""Which devices a program is compiled for, as far as a kernel must know that the compiler cannot split over them."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator

import jax
from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Devices:
    """What a program is compiled for: devices, and the axes of their mesh that split rows; the others split heads."""

    mesh: Mesh
    rows: tuple[str, ...]

    @property
    def heads(self) -> tuple[str, ...]:
        """The other axes."""
        return tuple(axis for axis in self.mesh.axis_names if axis not in self.rows)

    def count(self, axes: tuple[str, ...]) -> int:
        """Devices along `axes`."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


_DEVICES: contextvars.ContextVar[Devices | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def compiled_for(mesh: Mesh, rows: tuple[str, ...]) -> Iterator[None]:
    """While a program is traced: it is compiled for `mesh`, whose axes `rows` split rows, and the others heads.

    To be entered within the function that is traced, as JAX keeps traces by function and arguments alone.
    """
    token = _DEVICES.set(Devices(mesh, rows))
    try:
        yield
    finally:
        _DEVICES.reset(token)


def sharing() -> Devices | None:
    """The devices that share rows or heads of what is traced; None: there is one, or each traces its own part."""
    devices = _DEVICES.get()
    shared = devices is not None and devices.mesh.size > 1
    return devices if shared and not jax.sharding.get_abstract_mesh().manual_axes else None


def unknown() -> bool:
    """Whether there are several devices, and nothing says how they share what is traced."""
    return _DEVICES.get() is None and jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes


def platform() -> str:
    """The devices in use: 'cpu', 'tpu', 'gpu', or 'cuda' for an NVIDIA GPU with cuDNN's flash attention."""
    device = devices.mesh.devices.flat[0] if (devices := _DEVICES.get()) else jax.devices()[0]
    capability = getattr(device, "compute_capability", "")  # '9.0'; of an AMD GPU 'gfx942'
    major = capability.partition(".")[0]
    return "cuda" if major.isdigit() and int(major) >= 8 else device.platform  # 8: Ampere
