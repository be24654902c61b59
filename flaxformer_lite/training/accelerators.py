"""Accelerators by name, and what is said of each: for predictions, and to know how near to its peak a run is."""

import dataclasses
from collections.abc import Iterable

import jax


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One chip."""

    flops: float  # multiply-adds count as two; of dense bfloat16 matrices, a second
    memory: float  # bytes
    link: float  # bytes a second that it sends to others of its kind, over all of its links


# TPU v5e, v5p and v6e: Google's pages docs.cloud.google.com/tpu/docs/v5e, v5p-training and v6e (half of a bidirectional
# bandwidth). The others are figures in general circulation, not read off their makers' sheets: check before relying.
ACCELERATORS = {
    "a100": Accelerator(312e12, 80e9, 300e9),
    "h100": Accelerator(989e12, 80e9, 450e9),
    "h200": Accelerator(989e12, 141e9, 450e9),
    "tpu-v4": Accelerator(275e12, 32e9, 300e9),
    "tpu-v5e": Accelerator(197e12, 16e9, 200e9),
    "tpu-v5p": Accelerator(459e12, 95e9, 600e9),
    "tpu-v6e": Accelerator(918e12, 32e9, 400e9),
}
# How JAX names their kinds. The first that a device's kind begins with is its own.
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


def peak(devices: Iterable[jax.Device]) -> float | None:
    """FLOPs a second of all `devices` together, in bfloat16; None: one is not among those above."""
    names = [next((KINDS[kind] for kind in KINDS if device.device_kind.startswith(kind)), None) for device in devices]
    return None if None in names else sum(ACCELERATORS[name].flops for name in names)
