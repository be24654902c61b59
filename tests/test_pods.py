"""The mesh of a pod, or of several machines: every shape of every size, with made-up devices."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from jax.sharding import Mesh

from flaxformer_lite.training import parallel
from flaxformer_lite.training.sharding import AXES


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU chip, or of a GPU, that a mesh depends on."""

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
    """The chips of `slices` slices; a host has up to 2 x 2 of them."""
    host = (*(min(2, side) for side in sides[:2]), 1)
    hosts = [side // own for side, own in zip(sides, host, strict=True)]
    chips = []
    for slice_index, z, y, x in itertools.product(range(slices), *map(range, reversed(sides))):
        number = np.ravel_multi_index((x // host[0], y // host[1], z), hosts) + slice_index * math.prod(hosts)
        chips.append(Chip(len(chips), "tpu", kind, int(number), slice_index, (x, y, z)))
    return chips


def gpus(machines: int, each: int, *, a_process_each: bool = False) -> list[Chip]:
    ids = range(machines * each)
    return [Chip(i, "gpu", "NVIDIA H100", i if a_process_each else i // each, i // each) for i in ids]


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Every (data, fsdp, tensor) of powers of two whose tensor is at most 16."""
    powers = [2**i for i in range(count.bit_length())]
    return [(count // f // t, f, t) for f in powers for t in powers if t <= 16 and f * t <= count]


@pytest.mark.parametrize(("kind", "sides"), PODS, ids=str)
def test_every_shape_of_every_pod_makes_a_mesh(kind, sides):
    chips = pod(kind, sides)
    for shape in shapes(len(chips)):
        mesh = parallel.make_mesh(*shape, devices=chips)
        assert mesh.devices.shape == shape and set(mesh.devices.flat) == set(chips)
        for group in mesh.devices.reshape(-1, shape[2]):
            far = [
                sum(min(abs(x - y), side - abs(x - y)) for x, y, side in zip(a.coords, b.coords, sides, strict=True))
                for a, b in itertools.pairwise(group)
            ]
            assert max(far, default=1) <= (1 if shape[2] == 2 else len(sides)), (shape, group)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize(("kind", "sides"), PODS, ids=str)
def test_over_several_slices_only_a_tensor_that_fits_into_none_is_refused(kind, sides, slices):
    chips = pod(kind, sides, slices)
    own = math.prod(sides)
    for data, fsdp, tensor in shapes(len(chips)):
        if tensor > own:
            with pytest.raises(ValueError, match=r"^config\.parallel\.tensor: [^\n]* several slices[^\n]*$"):
                parallel.make_mesh(data, fsdp, tensor, devices=chips)
            continue
        mesh = parallel.make_mesh(data, fsdp, tensor, devices=chips)
        crossed = [len({chip.slice_index for chip in group}) for group in mesh.devices.reshape(-1, tensor)]
        assert set(crossed) == {1}
        if data % slices == 0:  # then what shares the state stays within a slice too
            assert {len({chip.slice_index for chip in part.flat}) for part in mesh.devices} == {1}


@pytest.mark.parametrize(("count", "of"), [(3, (2, 2, 1)), (6, (2, 4, 1)), (224, (16, 16, 1))])
def test_a_part_of_the_chips_of_one_process_makes_a_mesh(count, of):
    chips = [dataclasses.replace(chip, process_index=0) for chip in pod("TPU v5 lite", of)]
    mesh = parallel.make_mesh(count, devices=chips)
    assert set(mesh.devices.flat) == set(chips[:count])


def test_a_tensor_stays_within_a_machine_of_gpus_and_may_belong_to_several_processes(monkeypatch):
    for own_process in (False, True):
        devices = gpus(4, 8, a_process_each=own_process)
        assert parallel.make_mesh(4, 1, 8, devices=devices).size == 32
        with pytest.raises(ValueError, match=r"16 devices .* there are 4 of 8 devices; choose a divisor of the latter"):
            parallel.make_mesh(2, 1, 16, devices=devices)
    mesh = parallel.make_mesh(8, 1, 4, devices=devices)
    parts = []
    for process in range(32):
        monkeypatch.setattr(parallel.jax, "process_index", lambda process=process: process)
        parts.append(parallel.rows_of_process(mesh))
    assert parts == [(process // 4, 8) for process in range(32)]


def test_processes_that_share_some_rows_and_not_all_are_refused():
    devices = gpus(1, 6)
    devices = [dataclasses.replace(device, process_index=device.id // 2) for device in devices]
    with pytest.raises(ValueError, match=r"^config\.parallel\.tensor: 3 devices .* each has 2; choose a divisor"):
        parallel.make_mesh(2, 1, 3, devices=devices)


@pytest.mark.parametrize("shape", [(8, 1, 2), (4, 2, 2), (1, 4, 4), (2, 1, 8), (16, 1, 1)])
def test_each_row_of_a_batch_is_provided_once_by_whoever_holds_it(shape, monkeypatch):
    mesh = parallel.make_mesh(*shape, devices=pod("TPU v6 lite", (4, 4, 1)))
    provided = {}
    for process in range(4):
        monkeypatch.setattr(parallel.jax, "process_index", lambda process=process: process)
        number, count = parallel.rows_of_process(mesh)
        groups = mesh.devices.reshape(-1, shape[2])
        held = {i for i, group in enumerate(groups) if process in {chip.process_index for chip in group}}
        assert len(held) * count == len(groups)
        assert provided.setdefault(number, held) == held
    assert sorted(itertools.chain(*provided.values())) == list(range(shape[0] * shape[1]))


def test_devices_without_places_keep_their_order():
    devices = gpus(1, 8)
    mesh = parallel.make_mesh(2, 2, 2, devices=devices)
    assert isinstance(mesh, Mesh) and mesh.axis_names == AXES
    assert list(mesh.devices.flat) == devices


def test_several_processes_are_refused_fewer_devices_than_there_are():
    with pytest.raises(ValueError, match="4 devices asked for, there are 8"):
        parallel.make_mesh(4, devices=gpus(2, 4))
