"""The shape of a slice with n chips, and the errors if there is no slice or no compiler."""

import math

import pytest

from flaxformer_lite.system.accelerators import ACCELERATORS
from flaxformer_lite.training import topology


@pytest.mark.parametrize(
    ("name", "count", "shape"),
    [
        ("v5e", 1, (1, 1)),
        ("v5e", 8, (2, 4)),
        ("v6e", 32, (4, 8)),
        ("v6e", 256, (16, 16)),
        ("v4", 4, (2, 2, 1)),
        ("v4", 8, (2, 2, 2)),
        ("v5p", 16, (2, 2, 4)),
        ("v5p", 128, (4, 4, 8)),
        ("v5p", 512, (8, 8, 8)),
        ("tpu7x", 8, (2, 2, 1)),
    ],
)
def test_a_slice_is_as_close_to_a_square_or_cube_as_possible(name, count, shape):
    assert topology.slice_shape(name, count) == shape
    assert math.prod(shape) * ACCELERATORS[name].cores == count
    assert topology.slice_shape(name, 4 * count, slices=4) == shape


@pytest.mark.parametrize(
    ("name", "count", "slices", "message"),
    [
        (
            "v5e",
            224,
            1,
            "--devices=224: slices of v5e are planned with 1, 2, 4, 8, ... 256 chips; choose "
            "such a number.",
        ),
        ("v6e", 512, 1, "... 256 chips; choose"),
        ("v5p", 12, 2, "... 4096 chips; choose such a number, times --slices=2."),
        ("v5p", 8, 3, "times --slices=3"),
        ("v5e", 8, 16, "times --slices=16"),
        ("tpu7x", 6, 1, "... 4096 chips of 2 devices; choose"),
    ],
)
def test_a_number_of_chips_that_no_slice_has_is_an_error_of_one_line(name, count, slices, message):
    with pytest.raises(ValueError) as error:
        topology.slice_shape(name, count, slices=slices)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_compiler_names_the_extra_to_install(monkeypatch):
    def missing(package: str) -> str:
        raise topology.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(topology.importlib.metadata, "version", missing)
    for name, extra in (("v5e", "[plan]"), ("h100", "[plan-cuda]"), ("a100", "available is h100")):
        assert not topology.prepare(name)
        with pytest.raises(topology.NoCompiler) as error:
            topology.devices(name, 8)
        assert extra in str(error.value)


@pytest.mark.parametrize(
    ("name", "count", "slices", "joined"),
    [
        ("h100", 3, 1, 3),
        ("h100", 8, 1, 8),
        ("a100", 24, 1, 8),
        ("a100", 12, 1, 4),
        ("v5e", 64, 4, 16),
        ("tpu7x", 8, 1, 8),
    ],
)
def test_fast_links_join_a_slice_of_tpus_and_a_machine_of_gpus(name, count, slices, joined):
    assert topology.joined(name, count, slices=slices) == joined
