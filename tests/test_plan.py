"""What a step would take of devices that are not here, told by a program that is compiled for fake ones."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_lite.config import CHOICES, Config, ModelConfig, with_vocabulary
from flaxformer_lite.model import backends, transformer
from flaxformer_lite.training import flops, losses, parallel, plan
from flaxformer_lite.training.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.training.memory import Memory
from flaxformer_lite.training.step import param_shapes

pytestmark = pytest.mark.usefixtures("quickly_compiled")
PLANNED = {**runs.SMALL, "data.buckets": "(64,)", "data.tokens_per_batch": 1536, "data.rows_multiple": 24}


MEAN = plan.Message("all-reduce", (tuple(range(8)),))


def model() -> ModelConfig:
    """What is planned."""
    config = runs.small_config(PLANNED)
    return with_vocabulary(config, config.data.vocab_size).model


def parameters() -> int:
    """How many numbers it learns."""
    return sum(x.size for x in jax.tree.leaves(param_shapes(transformer.build_model(model()))))


@functools.cache
def planned(sizes: tuple[int, int, int]) -> plan.Plan:
    (found,) = plan.plan(runs.small_config(PLANNED), parallel.make_mesh(*sizes))
    return found


def compiled(function, spec: PartitionSpec, *, out: PartitionSpec) -> str:
    """The program of `function` of one array of (16, 24), split as `spec` says over 2 x 4 devices."""
    split, out = (NamedSharding(parallel.make_mesh(2, 4, 1), each) for each in (spec, out))
    x = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=split)
    return jax.jit(function, out_shardings=out).lower(x).compile().as_text()


def test_a_sum_over_all_devices_sends_its_result_around_twice():
    program = compiled(lambda x: x.sum(axis=0), PartitionSpec(("data", "fsdp")), out=PartitionSpec())
    assert plan.messages(program, 8) == {MEAN: round(2 * 7 / 8 * 24 * 4)}


def test_a_gathered_array_sends_every_part_but_the_devices_own():
    """Of 2 x 4 devices those of one row exchange what is split over 'fsdp', those of one column what is over 'data'."""
    program = compiled(lambda x: x + 1, PartitionSpec("fsdp"), out=PartitionSpec())
    assert plan.messages(program, 8) == {
        plan.Message("all-gather", ((0, 1, 2, 3), (4, 5, 6, 7))): round(3 / 4 * 16 * 24 * 4)
    }
    program = compiled(lambda x: x + 1, PartitionSpec("data"), out=PartitionSpec())
    assert plan.messages(program, 8) == {
        plan.Message("all-gather", ((0, 4), (1, 5), (2, 6), (3, 7))): round(1 / 2 * 16 * 24 * 4)
    }


def test_what_a_loop_sends_counts_as_often_as_the_loop_runs():
    def repeated(x):
        return jax.lax.fori_loop(0, 7, lambda _, total: total + jnp.tanh(total).sum(axis=0, keepdims=True), x)

    program = compiled(repeated, PartitionSpec(("data", "fsdp")), out=PartitionSpec(("data", "fsdp")))
    assert plan.messages(program, 8) == {MEAN: 7 * round(2 * 7 / 8 * 24 * 4)}


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
            "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}",
            [(0, 1, 2, 3), (4, 5, 6, 7)],
        ),
        ("replica_groups=mesh['a'=4,'c'=3] {'a':(2)2,'c'}, dimensions={0}", [range(6), range(6, 12)]),
        ("replica_groups=mesh['a'=4,'c'=2] {'a':(1)2}, dimensions={0}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups={}", [range(8)]),
    ],
)
def test_who_exchanges_a_message_is_read_in_every_notation(attributes, groups):
    assert plan._groups(attributes, 8) == tuple(map(tuple, groups))


def test_messages_between_machines_are_as_fast_as_their_networks_together():
    """Of 16 devices in machines of 8, each with a network of its own."""
    accelerator = Accelerator("gpu", flops=1.0, memory=1.0, link=70.0, linked=8, network=11.0)
    assert accelerator.speed(range(8)) == accelerator.speed([8, 13]) == 70.0
    assert accelerator.speed([3, 11]) == 11.0  # one of each
    assert accelerator.speed([0, 1, 2, 8, 9]) == 22.0  # the second sends by two
    assert accelerator.speed(range(16)) == 70.0  # eight networks are faster than the links within
    assert accelerator.speed(range(16), ring=False) == 11.0
    sent = {plan.Message("all-reduce", (tuple(range(16)),)): 140, plan.Message("all-gather", ((0, 1), (3, 11))): 22}
    found = plan.Plan(rows=2, length=3, memory=Memory(5, 7), flops=1.0, sent=sent)
    assert found.seconds(accelerator, 0.5) == pytest.approx((2.0, 4.0))
    assert found.beyond(accelerator) == 162
    assert plan.Message("collective-permute", ((0, 1), (7, 8))).speed(accelerator) == 11.0
    assert plan.Message("all-to-all", (tuple(range(16)),)).speed(accelerator) == 11.0
    assert dataclasses.replace(accelerator, linked=16).speed([3, 11]) == 70.0


def test_one_device_sends_nothing_and_eight_the_gradients_at_least():
    assert planned((1, 1, 1)).sent == {}
    assert sum(planned((8, 1, 1)).sent.values()) >= 2 * 7 / 8 * 4 * parameters()


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in [(2, 4, 1), (2, 2, 2)])]
)
def test_a_loss_that_is_taken_in_parts_sends_its_gradients_once(sizes, monkeypatch):
    at_once = planned(sizes)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 64 * model().vocab_size)  # the logits of one row
    (in_parts,) = plan.plan(runs.small_config(PLANNED), parallel.make_mesh(*sizes))
    assert in_parts.memory.temporary < at_once.memory.temporary
    matrix = 4 * model().vocab_size * model().d_model  # which may be sent once more, and its gradient may not
    assert sum(in_parts.sent.values()) < sum(at_once.sent.values()) + matrix


def test_a_device_holds_and_computes_less_the_more_there_are():
    one, copies, split = planned((1, 1, 1)), planned((8, 1, 1)), planned((1, 8, 1))
    assert split.memory.state < copies.memory.state < one.memory.state
    assert split.memory.state < copies.memory.state / 4
    assert copies.memory.temporary < one.memory.temporary
    assert copies.flops == split.flops == one.flops / 8
    assert one.flops == flops.train_step(Config(model=model()), one.rows, one.length)


def test_the_state_is_that_of_the_parameters_moments_and_batch():
    one = planned((1, 1, 1))
    batch = 2 * one.rows * one.length + one.rows
    assert one.memory.state == pytest.approx(4 * (3 * parameters() + batch), rel=0.01)


@pytest.mark.slow
def test_attention_by_an_accelerators_kernel_is_planned_as_blocks_which_keep_no_weights_either():
    for name in CHOICES["model.backend"]:
        assert backends.stand_in(name) == ("blockwise" if name in ("cudnn", "flash") else name)

    def memory(backend):
        changes = PLANNED | {"data.buckets": "(512,)", "data.tokens_per_batch": 4096, "data.rows_multiple": 8}
        changes |= {"model.max_length": 512, "model.num_encoder_layers": 1, "model.backend": backend}
        (found,) = plan.plan(runs.small_config(changes), parallel.make_mesh(1))
        return found.memory

    assert memory("cudnn").temporary < memory("reference").temporary


def test_a_step_takes_the_time_of_its_products_and_its_messages():
    found = plan.Plan(rows=2, length=3, memory=Memory(5, 7), flops=1e12, sent={MEAN: 11 * 10**9})
    h100 = ACCELERATORS["h100"]
    assert found.seconds(h100, 0.5) == pytest.approx((1e12 / (989e12 * 0.5), 11e9 / 450e9))
    assert found.memory.total == 12
    text = plan.table([found], parallel.make_mesh(8), "h100", 0.5)
    assert (
        "batch of 2 x 3" in text and "each of 8 devices" in text and "estimate" in text and "all-reduce 11,000" in text
    )


def test_the_command_plans_for_devices_that_are_not_here():
    changes = [f"--config.{name}={value}" for name, value in PLANNED.items() if name != "parallel.data"]
    done = runs.run("plan", "--config=smoke", "--devices=12", "--accelerator=tpu-v5e", *changes)
    assert done.returncode == 0, done.stderr
    assert "each of 12 devices" in done.stdout and "tpu-v5e" in done.stdout
    assert "W1" not in done.stderr and "rematerialization" not in done.stderr


@pytest.mark.slow
def test_a_table_tells_how_a_step_scales_with_the_devices(monkeypatch):
    """Each has as many rows at any number of them; what is split gets smaller, and two machines need a network."""
    monkeypatch.setitem(ACCELERATORS, "h100", dataclasses.replace(ACCELERATORS["h100"], linked=2))
    config = runs.small_config({**PLANNED, "parallel.data": 1, "parallel.fsdp": -1})
    told, *_, two, eight = plan.scaling_table(config, [2, 8], "h100", 0.4).splitlines()
    assert told == "h100, 40% of 989 TFLOP/s; 450 GB/s among 2 devices, 50 GB/s a device beyond"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (two, eight)]
    assert [row[:3] for row in cells] == [["2", "1 x 2 x 1", "24 x 64"], ["8", "1 x 8 x 1", "96 x 64"]]
    held = [float(row[3].split(" + ")[0]) for row in cells]
    assert held[1] < held[0] / 3  # all but the batch and some vectors is split four times as far
    beyond = [float(row[4].split(", ")[1]) for row in cells]
    assert beyond[0] == 0 < beyond[1]
    assert 0 < float(cells[1][5].rstrip("%")) < float(cells[0][5].rstrip("%")) < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accelerator=abacus"], "--accelerator"),
        (["--devices=0"], "--devices: expected a number from 1 on"),
        (["--devices=8,many"], "--devices: expected a number from 1 on, or several"),
        (["--devices=8,12"], "--devices: 12 is no multiple of 8"),
        pytest.param(
            ["--devices=4,8", "--config.parallel.data=4"],
            "config.parallel: makes 4 of 8 devices; set one of its sizes to -1",
            marks=pytest.mark.slow,
        ),
        (["--devices=3"], "config.data.rows_multiple: 8 rows cannot be split evenly over 3 devices"),
        (["--config.parallel.fsdp=3", "--config.parallel.data=1"], "config.data.rows_multiple: 8 rows"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(flags, message):
    done = runs.run("plan", "--config=smoke", *flags)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--config.parallel.fsdp=2", "--config.parallel.tensor=2"]])
def test_the_compiler_sends_no_activations_where_it_could_send_weights(arguments):
    changes = [f"--config.{name}={value}" for name, value in PLANNED.items() if name != "parallel.data"]
    done = runs.run("plan", "--config=smoke", *changes, *arguments)
    assert done.returncode == 0 and "rematerialization" not in done.stderr, done.stderr
