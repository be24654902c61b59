"""Meshes of pods and of several machines, of every shape and size, with fake devices."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from flaxformer_lite.training import meshes
from flaxformer_lite.training.sharding import AXES


@dataclasses.dataclass(frozen=True)
class Chip:
    """A fake TPU chip or GPU, with the attributes that a mesh depends on."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


FLAT = [(1, 1), (2, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
CUBES = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8)]
PODS = [(kind, (*sides, 1)) for kind in ("TPU v5 lite", "TPU v6 lite") for sides in FLAT]
PODS += [(kind, sides) for kind in ("TPU v4", "TPU v5") for sides in CUBES]


def pod(kind: str, sides: tuple[int, int, int], slices: int = 1) -> list[Chip]:
    """Returns the chips of `slices` slices; a host has up to 2 x 2 chips."""
    host = (*(min(2, side) for side in sides[:2]), 1)
    hosts = [side // own for side, own in zip(sides, host, strict=True)]
    chips = []
    for slice_index, z, y, x in itertools.product(range(slices), *map(range, reversed(sides))):
        number = np.ravel_multi_index(
            (x // host[0], y // host[1], z), hosts
        ) + slice_index * math.prod(hosts)
        chips.append(Chip(len(chips), "tpu", kind, int(number), slice_index, (x, y, z)))
    return chips


def gpus(machines: int, each: int, *, a_process_each: bool = False) -> list[Chip]:
    ids = range(machines * each)
    return [
        Chip(i, "gpu", "NVIDIA H100", i if a_process_each else i // each, i // each) for i in ids
    ]


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Returns every (data, fsdp, tensor) of powers of 2 with a tensor of at most 16."""
    powers = [2**i for i in range(count.bit_length())]
    return [(count // f // t, f, t) for f in powers for t in powers if t <= 16 and f * t <= count]


@pytest.mark.parametrize(("kind", "sides"), PODS, ids=str)
def test_every_shape_of_every_pod_makes_a_mesh(kind, sides):
    chips = pod(kind, sides)
    for shape in shapes(len(chips)):
        mesh = meshes.make_mesh(*shape, devices=chips)
        assert mesh.devices.shape == shape and set(mesh.devices.flat) == set(chips)
        for group in mesh.devices.reshape(-1, shape[2]):
            distances = [
                sum(
                    min(abs(x - y), side - abs(x - y))
                    for x, y, side in zip(a.coords, b.coords, sides, strict=True)
                )
                for a, b in itertools.pairwise(group)
            ]
            assert max(distances, default=1) <= (1 if shape[2] == 2 else len(sides)), (shape, group)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize(("kind", "sides"), PODS, ids=str)
def test_on_several_slices_only_a_tensor_larger_than_a_slice_is_an_error(kind, sides, slices):
    chips = pod(kind, sides, slices)
    own = math.prod(sides)
    for data, fsdp, tensor in shapes(len(chips)):
        if tensor > own:
            with pytest.raises(
                ValueError, match=r"^config\.parallel\.tensor: [^\n]* several slices[^\n]*$"
            ):
                meshes.make_mesh(data, fsdp, tensor, devices=chips)
            continue
        mesh = meshes.make_mesh(data, fsdp, tensor, devices=chips)
        crossed = [
            len({chip.slice_index for chip in group}) for group in mesh.devices.reshape(-1, tensor)
        ]
        assert set(crossed) == {1}
        if data % slices == 0:  # then devices that split the state are in one slice too
            assert {len({chip.slice_index for chip in part.flat}) for part in mesh.devices} == {1}


@pytest.mark.parametrize(("count", "of"), [(3, (2, 2, 1)), (6, (2, 4, 1)), (224, (16, 16, 1))])
def test_some_of_the_chips_of_one_process_make_a_mesh(count, of):
    chips = [dataclasses.replace(chip, process_index=0) for chip in pod("TPU v5 lite", of)]
    mesh = meshes.make_mesh(count, devices=chips)
    assert set(mesh.devices.flat) == set(chips[:count])


def test_tensor_is_within_a_gpu_machine_and_may_belong_to_several_processes(monkeypatch):
    for own_process in (False, True):
        devices = gpus(4, 8, a_process_each=own_process)
        assert meshes.make_mesh(4, 1, 8, devices=devices).size == 32
        with pytest.raises(
            ValueError,
            match=r"16 devices .* there are 4 of 8 devices; choose a divisor of the latter",
        ):
            meshes.make_mesh(2, 1, 16, devices=devices)
    mesh = meshes.make_mesh(8, 1, 4, devices=devices)
    parts = []
    for process in range(32):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        parts.append(meshes.rows_of_process(mesh))
    assert parts == [(process // 4, 8) for process in range(32)]


def test_processes_that_share_only_some_of_their_rows_are_an_error():
    devices = gpus(1, 6)
    devices = [dataclasses.replace(device, process_index=device.id // 2) for device in devices]
    with pytest.raises(
        ValueError, match=r"^config\.parallel\.tensor: 3 devices .* each has 2; choose a divisor"
    ):
        meshes.make_mesh(2, 1, 3, devices=devices)


@pytest.mark.parametrize("shape", [(8, 1, 2), (4, 2, 2), (1, 4, 4), (2, 1, 8), (16, 1, 1)])
def test_each_row_of_a_batch_is_provided_by_the_processes_that_compute_it(shape, monkeypatch):
    mesh = meshes.make_mesh(*shape, devices=pod("TPU v6 lite", (4, 4, 1)))
    provided = {}
    for process in range(4):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        number, count = meshes.rows_of_process(mesh)
        groups = mesh.devices.reshape(-1, shape[2])
        own = {
            i for i, group in enumerate(groups) if process in {chip.process_index for chip in group}
        }
        assert len(own) * count == len(groups)
        assert provided.setdefault(number, own) == own
    assert sorted(itertools.chain(*provided.values())) == list(range(shape[0] * shape[1]))


def test_devices_without_coordinates_keep_their_order():
    devices = gpus(1, 8)
    mesh = meshes.make_mesh(2, 2, 2, devices=devices)
    assert isinstance(mesh, Mesh) and mesh.axis_names == AXES
    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize("data", [1, 4])
def test_a_run_of_several_processes_must_use_all_devices(data):
    expected = rf"^config\.parallel\.data: {data} devices asked for, there are 8; use -1 for all"
    with pytest.raises(ValueError, match=expected):
        meshes.make_mesh(data, devices=gpus(2, 4))
