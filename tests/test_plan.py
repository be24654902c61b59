"""What a step would take of devices that are not here, told by a program that is compiled for fake ones."""

import functools

import jax
import jax.numpy as jnp
import pytest
import runs
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_lite.config import Config, ModelConfig, with_vocabulary
from flaxformer_lite.model import transformer
from flaxformer_lite.training import flops, parallel, plan
from flaxformer_lite.training.accelerators import ACCELERATORS
from flaxformer_lite.training.memory import Memory
from flaxformer_lite.training.step import param_shapes

PLANNED = {**runs.SMALL, "data.buckets": "(64,)", "data.tokens_per_batch": 1536, "data.rows_multiple": 24}


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
    assert plan.messages(program, 8) == {"all-reduce": round(2 * 7 / 8 * 24 * 4)}


def test_a_gathered_array_sends_every_part_but_the_devices_own():
    program = compiled(lambda x: x + 1, PartitionSpec("fsdp"), out=PartitionSpec())
    assert plan.messages(program, 8) == {"all-gather": round(3 / 4 * 16 * 24 * 4)}


def test_what_a_loop_sends_counts_as_often_as_the_loop_runs():
    def repeated(x):
        return jax.lax.fori_loop(0, 7, lambda _, total: total + jnp.tanh(total).sum(axis=0, keepdims=True), x)

    program = compiled(repeated, PartitionSpec(("data", "fsdp")), out=PartitionSpec(("data", "fsdp")))
    assert plan.messages(program, 8) == {"all-reduce": 7 * round(2 * 7 / 8 * 24 * 4)}


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups=[4,2]<=[8], dimensions={0}", 2),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}, dimensions={0}", 4),
        ("replica_groups=mesh['a'=4,'c'=3] {'a':(2)2,'c'}, dimensions={0}", 6),
        ("replica_groups={}", 8),
    ],
)
def test_how_many_devices_exchange_a_message_is_read_in_every_notation(attributes, size):
    assert plan._group_size(attributes, 8) == size


def test_one_device_sends_nothing_and_eight_the_gradients_at_least():
    assert planned((1, 1, 1)).sent == {}
    assert sum(planned((8, 1, 1)).sent.values()) >= 2 * 7 / 8 * 4 * parameters()


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


def test_a_step_takes_the_time_of_its_products_and_its_messages():
    found = plan.Plan(rows=2, length=3, memory=Memory(5, 7), flops=1e12, sent={"all-reduce": 11 * 10**9})
    h100 = ACCELERATORS["h100"]
    assert found.seconds(h100, 0.5) == pytest.approx((1e12 / (989e12 * 0.5), 11e9 / 450e9))
    assert found.memory.total == 12
    text = plan.table([found], parallel.make_mesh(8), "h100", 0.5)
    assert (
        "batch of 2 x 3" in text and "each of 8 devices" in text and "estimate" in text and "all-reduce 1.1e+04" in text
    )


def test_the_command_plans_for_devices_that_are_not_here():
    changes = [f"--config.{name}={value}" for name, value in PLANNED.items() if name != "parallel.data"]
    done = runs.run("plan", "--config=smoke", "--devices=12", "--accelerator=tpu-v5e", *changes)
    assert done.returncode == 0, done.stderr
    assert "each of 12 devices" in done.stdout and "tpu-v5e" in done.stdout
    assert "W1" not in done.stderr and "rematerialization" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accelerator=abacus"], "--accelerator"),
        (["--devices=0"], "--devices"),
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
