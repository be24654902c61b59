"""Collectives, loops, kernels and cycles, parsed from the HLO text of a compiled program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_lite.training import hlo, meshes

EIGHT = (tuple(range(8)),)
MEAN = hlo.Collective("all-reduce", "f32", EIGHT)


def compiled(function, spec: PartitionSpec, *, out: PartitionSpec) -> str:
    """Returns the HLO text of `function` of an array (16, 24) with a sharding on 2 x 4 devices."""
    split, out = (NamedSharding(meshes.make_mesh(2, 4, 1), each) for each in (spec, out))
    x = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=split)
    return jax.jit(function, out_shardings=out).lower(x).compile().as_text()


def test_an_all_reduce_sends_its_result_2_times_around_the_ring():
    program = compiled(
        lambda x: x.sum(axis=0), PartitionSpec(("data", "fsdp")), out=PartitionSpec()
    )
    assert hlo.read(program, 8).sent == {MEAN: round(2 * 7 / 8 * 24 * 4)}


def test_in_an_all_gather_each_device_sends_every_part_but_one():
    """On 2 x 4 devices, the groups for 'fsdp' are the rows, and those for 'data' the columns."""
    program = compiled(lambda x: x + 1, PartitionSpec("fsdp"), out=PartitionSpec())
    rows = hlo.Collective("all-gather", "f32", ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert hlo.read(program, 8).sent == {rows: round(3 / 4 * 16 * 24 * 4)}
    program = compiled(lambda x: x + 1, PartitionSpec("data"), out=PartitionSpec())
    columns = hlo.Collective("all-gather", "f32", ((0, 4), (1, 5), (2, 6), (3, 7)))
    assert hlo.read(program, 8).sent == {columns: round(1 / 2 * 16 * 24 * 4)}


def test_the_bytes_sent_in_a_loop_are_multiplied_by_its_trip_count():
    def repeated(x):
        body = lambda _, total: total + jnp.tanh(total).sum(axis=0, keepdims=True)  # noqa: E731
        return jax.lax.fori_loop(0, 7, body, x)

    rows = PartitionSpec(("data", "fsdp"))
    program = compiled(repeated, rows, out=rows)
    assert hlo.read(program, 8).sent == {MEAN: 7 * round(2 * 7 / 8 * 24 * 4)}


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups=[4,2]<=[8], dimensions={0}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("replica_groups=[1,8]<=[8]", [range(8)]),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("channel_id=1, source_target_pairs={{0,1},{1,0}}, other={}", [(0, 1), (1, 0)]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (
            "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, "
            "dimensions={0}",
            [(0, 1, 2, 3), (4, 5, 6, 7)],
        ),
        (
            "replica_groups=mesh['a'=4,'c'=3] {'a':(2)2,'c'}, dimensions={0}",
            [range(6), range(6, 12)],
        ),
        (
            "replica_groups=mesh['a'=4,'c'=2] {'a':(1)2}, dimensions={0}",
            [(0, 4), (1, 5), (2, 6), (3, 7)],
        ),
        ("replica_groups={}", [range(8)]),
    ],
)
def test_the_groups_of_a_collective_are_parsed_in_every_notation(attributes, groups):
    assert hlo.groups_of(attributes, 8) == tuple(map(tuple, groups))


TPU = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[24]) -> f32[24] {
  %inside = f32[24]{0:T(256)} multiply(%p, %p), backend_config={"estimated_cycles":"1000"}
  ROOT %reduced = f32[24]{0:T(256)} all-reduce(%inside), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%add
}

%fused_again (p: f32[24]) -> f32[24] {
  ROOT %reduced = f32[24]{0:T(256)} all-reduce(%p), channel_id=7, replica_groups={{0,1},{2,3}}, to_apply=%add
}

%scan (c: (s32[], f32[24])) -> (s32[], f32[24]) {
  %step = f32[24]{0:T(256)} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"7"}
  %ended = f32[24]{0:T(256)} fusion(%x), kind=kLoop, calls=%fused_again, backend_config={"estimated_cycles":"3"}
  ROOT %out = (s32[], f32[24]) tuple(%i, %ended)
}

%scan_ends (c: (s32[], f32[24])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  ROOT %less = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%search (c: (s32[], pred[])) -> (s32[], pred[]) {
  %kernel = f32[24]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"estimated_cycles":"NONE"}
  %step = f32[24]{0} fusion(%x), kind=kOutput, calls=%other, backend_config={"estimated_cycles":"11"}
}

%other (p: f32[24]) -> f32[24] {
  ROOT %same = f32[24] copy(%p)
}

%search_ends (c: (s32[], pred[])) -> pred[] {
  %bound = s32[]{:T(128)} constant(5)
  %less = pred[] compare(%i, %bound), direction=LT
  ROOT %both = pred[] and(%less, %unfinished)
}

ENTRY %main (x: f32[24]) -> f32[24] {
  %loop = (s32[], f32[24]) while(%start), condition=%scan_ends, body=%scan
  %decoded = (s32[], pred[]) while(%start), condition=%search_ends, body=%search
  %gathered = (bf16[3,5]{1,0}, bf16[6,5]{1,0:T(8,128)(2,1)}) all-gather-start(%y), replica_groups={{0,1},{2,3}}
  %moved = (f32[7]{0}, f32[7]{0}, u32[], u32[]) collective-permute-start(%z), source_target_pairs={{0,1},{1,0}}
  %sent = (f32[8,128]{1,0}, u32[], token[]) send(%w), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %rest = (bf16[6]{0}, u32[], token[]) send(%w, %t), frontend_attributes={_xla_megascale_transfer_type="ALL_GATHER"}
  ROOT %done = f32[24]{0} copy(%x), backend_config={"estimated_cycles":"2"}
}
"""  # noqa: E501


def test_a_loop_in_a_tpu_program_runs_to_the_constant_of_its_condition():
    """5 iterations of 7 + 3 cycles, with the same collective in both fusions.

    The loop `search` ends depending on data and counts once: 11 cycles. The copy has 2.
    """
    found = hlo.read(TPU.replace("NONE", str(2**62)), 4)
    pairs = ((0, 1), (2, 3))
    assert found.sent == {
        hlo.Collective("all-reduce", "f32", pairs): 5 * 24 * 4,
        hlo.Collective("all-gather", "bf16", pairs): 6 * 5 * 2 // 2,
        hlo.Collective("collective-permute", "f32", ((0, 1), (1, 0))): 7 * 4,
    }
    assert found.bytes_by_kind() == {
        "all-reduce (f32)": 480,
        "all-gather (bf16)": 30,
        "collective-permute (f32)": 28,
    }
    between = ((0, 2), (1, 3))
    slices = hlo.read(TPU, 4, slices=2).sent
    assert slices[hlo.Collective("all-reduce", "f32", between)] == 8 * 128 * 4
    assert slices[hlo.Collective("all-gather", "bf16", between)] == 6 * 2
    assert found.cycles == 5 * (7 + 3) + 11 + 2 and found.loop_cycles == 11
    assert found.kernels == {"flash": 1}
