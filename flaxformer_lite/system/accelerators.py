"""Accelerators by name, and what is said of each: for predictions, and to know how near to its peak a run is."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device, as JAX counts them."""

    platform: str  # as JAX calls it
    flops: float  # multiply-adds count as two; of dense bfloat16 matrices, a second
    memory: float  # bytes
    link: float  # bytes a second that it sends to others of its kind, over all of its links
    linked: int  # as many as these links join: a machine's GPUs, a pod's chips
    network: float  # bytes a second that it sends beyond them, over its share of the machine's network
    clock: float | None = None  # cycles a second of its matrix units, in which its compiler estimates times
    cores: int = 1  # devices of one chip

    def joins(self, devices: Iterable[int]) -> bool:
        """Whether its links join all of `devices`, where numbers go through one machine after another."""
        return len({device // self.linked for device in devices}) == 1

    def speed(self, devices: Sequence[int], *, ring: bool = True) -> float:
        """Bytes a second that each of `devices` sends the others.

        What passes around all of them in a ring leaves each machine once, in parts over the network of every device
        there that takes part. What does not leaves over the network of the one that sends it.
        """
        if self.joins(devices):
            return self.link
        together = collections.Counter(device // self.linked for device in devices)
        return min(self.link, self.network * (min(together.values()) if ring else 1))


# TPU v5p, v6e and TPU7x: Google's page docs.cloud.google.com/tpu/docs/tpu7x, which compares them; v5e: its own page
# there (half of a bidirectional bandwidth, and half a chip of TPU7x, whose cores are devices of their own). A clock
# is the peak divided by the FLOPs of all matrix units in a cycle, 2 * 128**2 each: v4 and v5p have 8 units, v5e 4,
# v6e 4 of 256**2 multiply-adds (compiler estimates agree so far). B200: NVIDIA's HGX B200, dense, 1,000 W. The others
# are figures in general circulation, not read off their makers' sheets: check before relying. A network of 25 or 50
# GB/s is an InfiniBand card of 200 or 400 Gbit/s for each GPU.
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
# How JAX names their kinds. The first that a device's kind begins with is its own, unless it is SLOWER.
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
SLOWER = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL")  # whose peak is none of the above
SLICE = " MIG "  # in the name of a part of a GPU


def peak(devices: Iterable[jax.Device]) -> float | None:
    """FLOPs a second of all `devices` together, in bfloat16; None: one is not among those above."""
    names = [name_of(device) for device in devices]
    return None if None in names else sum(ACCELERATORS[name].flops for name in names)


def name_of(device: jax.Device) -> str | None:
    """The name of a device's kind in `ACCELERATORS`; None: it is not there."""
    kind = device.device_kind
    if kind.startswith(SLOWER) or SLICE in kind:
        return None
    return next((KINDS[each] for each in KINDS if kind.startswith(each)), None)
