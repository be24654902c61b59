"""Published figures of accelerators: for planning, and for a run's share of the peak FLOPs."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """The figures of one device, as JAX counts devices."""

    platform: str  # in JAX: 'gpu' or 'tpu'
    flops: float  # a second, dense bfloat16 matrix products; a multiply-add is 2
    memory: float  # bytes
    link: float  # bytes a second sent over all fast links between devices
    linked: int  # number of devices that the fast links join: GPUs of a machine, chips of a pod
    network: float  # bytes a second sent to other machines, as this device's share of the network
    clock: float | None = None  # matrix-unit cycles a second; the compiler estimates in cycles
    cores: int = 1  # devices of a chip

    def joins(self, devices: Iterable[int]) -> bool:
        """Whether the fast links join all of `devices`, which are numbered machine by machine."""
        return len({device // self.linked for device in devices}) == 1

    def speed(self, devices: Sequence[int], *, ring: bool = True) -> float:
        """Returns the bytes a second that each of `devices` sends to the others.

        Args:
          ring: whether the data passes through all devices in a ring. Then it leaves each machine
            once, split over the networks of all participating devices of the machine. Otherwise it
            leaves over the network of the sender.
        """
        if self.joins(devices):
            return self.link
        of_machine = collections.Counter(device // self.linked for device in devices)
        return min(self.link, self.network * (min(of_machine.values()) if ring else 1))


# Sources. TPU v5p, v6e and TPU7x: docs.cloud.google.com/tpu/docs/tpu7x, which compares them. v5e:
# its own page there. Links: half of the bidirectional bandwidth. TPU7x: half of a chip, as each of
# its 2 cores is a device. Clock: the peak divided by the FLOPs of all matrix units in a cycle,
# 2 * 128**2 each; v4 and v5p have 8 units, v5e 4, v6e 4 with 256**2 multiply-adds (compiler
# estimates agree so far). B200: NVIDIA's HGX B200, dense, 1,000 W. The other figures are widely
# quoted, but not checked against data sheets: check before you rely on them. A network of 25 or
# 50 GB/s is an InfiniBand card of 200 or 400 Gbit/s for each GPU.
ACCELERATORS = {
    "a100": Accelerator("gpu", 312e12, 80e9, 300e9, 8, 25e9),
    "b200": Accelerator("gpu", 2250e12, 180e9, 900e9, 8, 50e9),
    "h100": Accelerator("gpu", 989e12, 80e9, 450e9, 8, 50e9),
    "h200": Accelerator("gpu", 989e12, 141e9, 450e9, 8, 50e9),
    "v4": Accelerator("tpu", 275e12, 32e9, 300e9, 4096, 6.25e9, clock=1.05e9),
    "v5e": Accelerator("tpu", 197e12, 16e9, 200e9, 256, 3.125e9, clock=1.5e9),
    "v5p": Accelerator("tpu", 459e12, 95e9, 600e9, 8960, 6.25e9, clock=1.75e9),
    "v6e": Accelerator("tpu", 918e12, 32e9, 400e9, 256, 12.5e9, clock=1.75e9),
    "tpu7x": Accelerator("tpu", 1153.5e12, 96e9, 300e9, 18432, 6.25e9, cores=2),
}
FORMER_NAMES = {f"tpu-{name}": name for name in ("v4", "v5e", "v5p", "v6e")}
# By the prefix of `device_kind` in JAX. The first match counts, unless the kind is SLOWER.
KINDS = {
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v6": "v6e",
    "TPU7x": "tpu7x",
}
SLOWER = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL")  # variants with a lower peak
MIG = " MIG "  # in the name of a part of a GPU


def peak(devices: Iterable[jax.Device]) -> float | None:
    """Returns the bfloat16 FLOPs a second of all `devices` together; None if one is unknown."""
    names = [name_of(device) for device in devices]
    known = [ACCELERATORS[name].flops for name in names if name is not None]
    return sum(known) if len(known) == len(names) else None


def name_of(device: jax.Device) -> str | None:
    """Returns the key of a device in `ACCELERATORS`; None if it has none."""
    kind = device.device_kind
    if kind.startswith(SLOWER) or MIG in kind:
        return None
    return next((name for prefix, name in KINDS.items() if kind.startswith(prefix)), None)
