"""Accelerators by name, and what is said of each: for predictions, and to know how near to its peak a run is."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One chip."""

    platform: str  # as JAX calls it
    flops: float  # multiply-adds count as two; of dense bfloat16 matrices, a second
    memory: float  # bytes
    link: float  # bytes a second that it sends to others of its kind, over all of its links
    linked: int  # as many as these links join: a machine's GPUs, a pod's chips
    network: float  # bytes a second that it sends beyond them, over its share of the machine's network

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


# TPU v5e, v5p and v6e: Google's pages docs.cloud.google.com/tpu/docs/v5e, v5p and v6e (half of a bidirectional
# bandwidth), but for the network of v6e. The others are figures in general circulation, not read off their makers'
# sheets: check before relying. A network of 25 or 50 GB/s is an InfiniBand card of 200 or 400 Gbit/s for each GPU.
ACCELERATORS = {
    "a100": Accelerator("gpu", 312e12, 80e9, 300e9, 8, 25e9),
    "h100": Accelerator("gpu", 989e12, 80e9, 450e9, 8, 50e9),
    "h200": Accelerator("gpu", 989e12, 141e9, 450e9, 8, 50e9),
    "tpu-v4": Accelerator("tpu", 275e12, 32e9, 300e9, 4096, 6.25e9),
    "tpu-v5e": Accelerator("tpu", 197e12, 16e9, 200e9, 256, 3.125e9),
    "tpu-v5p": Accelerator("tpu", 459e12, 95e9, 600e9, 8960, 6.25e9),
    "tpu-v6e": Accelerator("tpu", 918e12, 32e9, 400e9, 256, 12.5e9),
}
# How JAX names their kinds. The first that a device's kind begins with is its own, unless it is SLOWER.
KINDS = {
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6": "tpu-v6e",
}
SLOWER = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL")  # whose peak is none of the above
SLICE = " MIG "  # in the name of a part of a GPU


def peak(devices: Iterable[jax.Device]) -> float | None:
    """FLOPs a second of all `devices` together, in bfloat16; None: one is not among those above."""
    names = [_name(device.device_kind) for device in devices]
    return None if None in names else sum(ACCELERATORS[name].flops for name in names)


def _name(kind: str) -> str | None:
    if kind.startswith(SLOWER) or SLICE in kind:
        return None
    return next((KINDS[each] for each in KINDS if kind.startswith(each)), None)
