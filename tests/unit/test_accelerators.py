"""The figures of accelerators, found by the device kind in JAX."""

import dataclasses

import pytest

from flaxformer_lite.system.accelerators import ACCELERATORS, KINDS, peak


@dataclasses.dataclass
class Device:
    """A fake JAX device."""

    device_kind: str


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_the_peak_of_3_devices_is_3_times_that_of_their_kind(kind, name):
    assert peak([Device(kind)] * 3) == 3 * ACCELERATORS[name].flops


def test_every_accelerator_has_a_device_kind():
    assert set(KINDS.values()) == set(ACCELERATORS)


def test_an_unknown_device_kind_has_no_peak():
    assert peak([Device("cpu")]) is None
    assert peak([Device("NVIDIA H100 PCIe")]) is None and peak([Device("NVIDIA H200 NVL")]) is None
    assert peak([Device("NVIDIA H100 80GB HBM3 MIG 1g.10gb")]) is None
    assert peak([Device("NVIDIA H100"), Device("NVIDIA GeForce GTX 1080")]) is None
