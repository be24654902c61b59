"""What a step would take of devices that are not here, told by a program that is compiled for fake ones."""

import dataclasses
import functools

import jax
import pytest
import runs

from flaxformer_lite.config import CHOICES, Config, ModelConfig, with_vocabulary
from flaxformer_lite.model import backends, transformer
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.system.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.system.memory import Memory
from flaxformer_lite.training import flops, hlo, losses, parallel, plan, topology
from flaxformer_lite.training.hlo import Collective

pytestmark = pytest.mark.usefixtures("quickly_compiled")
PLANNED = {**runs.SMALL, "data.buckets": "(64,)", "data.tokens_per_batch": 1536, "data.rows_multiple": 24}
MEAN = Collective("all-reduce", "f32", (tuple(range(8)),))


def model() -> ModelConfig:
    """What is planned."""
    config = runs.small_config(PLANNED)
    return with_vocabulary(config, config.data.vocab_size).model


def parameters() -> int:
    """How many numbers it learns."""
    return sum(x.size for x in jax.tree.leaves(param_shapes(transformer.build_model(model()))))


def fake(*sizes: int, name: str = "h100", **fields) -> plan.Target:
    """Fake devices of a CPU in place of an accelerator's."""
    return plan.Target(name, ACCELERATORS[name], parallel.make_mesh(*sizes), compiler=None, **fields)


@functools.cache
def planned(sizes: tuple[int, int, int]) -> plan.Plan:
    (found,) = plan.plan(runs.small_config(PLANNED), fake(*sizes))
    return found


def made_up(sent: dict[Collective, int], *, cycles: int = 0, loop_cycles: int = 0, flops: float = 1.0) -> plan.Plan:
    """Of a program that does no more than this."""
    program = hlo.Program(sent, {"flash": 3} if cycles else {}, cycles, loop_cycles)
    return plan.Plan(rows=2, length=3, flops=flops, memory=Memory(5 * 10**9, 7 * 10**9), program=program)


def test_messages_between_machines_are_as_fast_as_their_networks_together():
    """Of 16 devices in machines of 8, each with a network of its own."""
    accelerator = Accelerator("gpu", flops=1.0, memory=1.0, link=70.0, linked=8, network=11.0)
    assert accelerator.speed(range(8)) == accelerator.speed([8, 13]) == 70.0
    assert accelerator.speed([3, 11]) == 11.0  # one of each
    assert accelerator.speed([0, 1, 2, 8, 9]) == 22.0  # the second sends by two
    assert accelerator.speed(range(16)) == 70.0  # eight networks are faster than the links within
    assert accelerator.speed(range(16), ring=False) == 11.0
    sent = {Collective("all-reduce", "f32", (tuple(range(16)),)): 140}
    found = made_up(sent | {Collective("all-gather", "bf16", ((0, 1), (3, 11))): 22})
    target = dataclasses.replace(fake(1, utilization=0.5), accelerator=accelerator)
    assert (found.computing(target), found.sending(target)) == pytest.approx((2.0, 4.0))
    assert found.beyond(accelerator) == 162
    assert plan.speed(Collective("collective-permute", "f32", ((0, 1), (7, 8))), accelerator) == 11.0
    assert plan.speed(Collective("all-to-all", "f32", (tuple(range(16)),)), accelerator) == 11.0
    assert dataclasses.replace(accelerator, linked=16).speed([3, 11]) == 70.0


def test_one_device_sends_nothing_and_eight_the_gradients_at_least():
    assert planned((1, 1, 1)).sent == {}
    gradients = 2 * 7 / 8 * 4 * parameters()
    assert gradients <= sum(planned((8, 1, 1)).sent.values()) < 1.01 * gradients  # once, and the metrics


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in [(2, 4, 1), (2, 2, 2)])]
)
def test_a_loss_that_is_taken_in_parts_sends_its_gradients_once(sizes, monkeypatch):
    at_once = planned(sizes)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 64 * model().vocab_size)  # the logits of one row
    (in_parts,) = plan.plan(runs.small_config(PLANNED), fake(*sizes))
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
        (found,) = plan.plan(runs.small_config(changes), fake(1))
        return found.memory

    assert memory("cudnn").temporary < memory("reference").temporary


def test_a_step_takes_the_time_of_its_products_and_its_messages():
    found, target = made_up({MEAN: 11 * 10**9}, flops=1e12), fake(8, utilization=0.5)
    assert (found.computing(target), found.sending(target)) == pytest.approx((1e12 / (989e12 * 0.5), 11e9 / 450e9))
    lines = plan.table([found], target).splitlines()
    assert lines[0] == "estimated on a CPU (), for 8 x h100, mesh 8 x 1 x 1 (data, fsdp, tensor)"
    assert lines[1] == "a training step, global batch of 2 x 3; each of 8 devices:"
    assert lines[2] == "  peak 12 GB of 80 GB a device: fits"
    assert "  sends       11,000 MB: all-reduce (f32) 11,000" in lines
    assert "  computes    2.02 ms, at 50% of 989 TFLOP/s" in lines
    assert "  of the peak 4%, 4% if they hide" in lines


def test_the_compilers_own_cycles_take_precedence_over_an_assumed_share_of_the_peak():
    found, target = made_up({}, cycles=3 * 10**6, loop_cycles=3 * 10**5, flops=1e12), fake(1, name="v5e")
    assert found.computing(target) == pytest.approx(1e12 / (197e12 * 0.4))  # those of a CPU, were there any
    target = dataclasses.replace(target, compiler="libtpu 7")
    assert found.computing(target) == pytest.approx(2e-3)
    text = plan.table([found], target)
    assert text.startswith("compiled by libtpu 7, for 1 x v5e") and "kernels     3 x flash" in text
    assert "computes    2 ms, by the compiler's estimates" in text
    assert "a step      0.2 ms for 2 inputs" in plan.table([found], target, decode=True)


def test_what_is_larger_than_the_device_does_not_fit_and_advice_follows():
    found = dataclasses.replace(made_up({}), memory=Memory(5 * 10**9, 7 * 10**9, code=10**9, most=10**10))
    small = dataclasses.replace(ACCELERATORS["h100"], memory=11e9)
    target = dataclasses.replace(fake(1), accelerator=small)
    assert "peak 10 GB of 11 GB a device: fits (and 1 GB of program)\n" in plan.table([found], target)
    target = dataclasses.replace(fake(1), accelerator=dataclasses.replace(small, memory=10.9e9))
    text = plan.table([found], target)
    assert "peak 10 GB of 10.9 GB a device: does not fit (and 1 GB of program)\n  To take less: model.remat" in text
    tpu = plan.Target("v5e", target.accelerator, target.mesh, compiler="libtpu 7")
    tpu = dataclasses.replace(tpu, accelerator=dataclasses.replace(target.accelerator, platform="tpu"))
    assert found.fits(tpu)  # its compiler would have refused it
    refused = dataclasses.replace(found, memory=None, program=None, lack="needs 96 GiB")
    assert "more than 10.9 GB a device: does not fit: needs 96 GiB\n  To take less" in plan.table([refused], target)


def test_the_longest_batch_is_planned_or_each():
    config = runs.small_config({**PLANNED, "data.buckets": "(32, 64)", "data.rows_multiple": 8})
    assert [(each.rows, each.length) for each in plan.plan(config, fake(1), every_shape=True)] == [(24, 64), (48, 32)]
    assert [(each.rows, each.length) for each in plan.plan(config, fake(1))] == [(24, 64)]


def test_decoding_is_planned_for_a_full_batch_of_the_longest_inputs():
    config = runs.small_config(
        {**PLANNED, "decode.method": "beam", "decode.beam_size": 3, "decode.tokens_per_batch": 960}
    )
    copies, split = (plan.decoding(config, fake(*sizes)) for sizes in [(2, 1, 1), (1, 1, 2)])
    assert (copies.rows, copies.length) == (4, 64)  # 960 // 3 // 64, of 2 devices
    assert copies.sent == {} and split.sent != {}
    steps = min(64 + config.decode.max_extra_length, config.model.max_length)
    assert copies.flops == flops.decoding(with_vocabulary(config, config.data.vocab_size), 4, 64, steps) / 2


def test_the_command_plans_for_devices_that_are_not_here():
    changes = [f"--config.{name}={value}" for name, value in PLANNED.items() if name != "parallel.data"]
    done = runs.run("plan", "--config=smoke", "--devices=12", "--accelerator=h200", *changes)  # no description
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("estimated on a CPU (the only GPU") and "for 12 x h200" in first
    assert second == "a training step, global batch of 24 x 64; each of 12 devices:"
    assert "W1" not in done.stderr and "rematerialization" not in done.stderr


def no_compiler(name: str) -> str:
    """In place of `topology.compiler`, whatever is installed."""
    raise topology.NoCompiler("none here")


@pytest.mark.slow
def test_a_table_tells_how_a_step_scales_with_the_devices(monkeypatch):
    """Each has as many rows at any number of them; what is split gets smaller, and two machines need a network."""
    monkeypatch.setitem(ACCELERATORS, "h100", dataclasses.replace(ACCELERATORS["h100"], linked=2))
    config = runs.small_config({**PLANNED, "parallel.data": 1, "parallel.fsdp": -1})
    monkeypatch.setattr(topology, "compiler", no_compiler)
    header, *_, two, eight = plan.scaling_table(config, [2, 8], "h100").splitlines()
    links = "450 GB/s a device among the GPUs of a machine, 50 beyond"
    assert header == f"estimated on a CPU (none here), for h100; time at 40% of 989 TFLOP/s; {links}"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (two, eight)]
    assert [row[:3] for row in cells] == [["2", "1 x 2 x 1", "24 x 64"], ["8", "1 x 8 x 1", "96 x 64"]]
    held = [float(row[3].split(" (")[1].rstrip(")")) for row in cells]
    assert held[1] < held[0] / 3  # all but the batch and some vectors is split four times as far
    beyond = [float(row[4].split(", ")[1]) for row in cells]
    assert beyond[0] == 0 < beyond[1]
    assert 0 < float(cells[1][5].rstrip("%")) < float(cells[0][5].rstrip("%")) < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--accelerator=abacus"], "--accelerator"),
        (["--devices=0"], "--devices: expected a number from 1 to 16,384"),
        (["--devices=8,1000000"], "--devices: expected a number from 1 to 16,384, or several"),
        (["--devices=8,12"], "--devices: 12 is no multiple of 8"),
        (["--devices=8,16", "--decode"], "--decode: requires one number of --devices"),
        (["--all", "--decode"], "--all: applies only to a training step on one number"),
        (["--slices=2"], "--slices=2: applies only to TPUs, and h200 is a GPU"),
        (["--decode", "--utilization=0.5"], "--utilization: has no effect with --decode"),
        (["--decode", "--config.parallel.fsdp=2"], "--decode: expected config.parallel.fsdp=1"),
        (["--decode", "--devices=3"], "config.data.rows_multiple: 8 rows cannot be split evenly over 3 devices"),
        (["--config.parallel.data=4"], "config.parallel: makes 4 of 8 devices; set one of its sizes to -1"),
        (["--accelerator=v5e", "--devices=3"], "--devices=3: slices of v5e are planned with 1, 2, 4"),
        (["--accelerator=tpu-v5e", "--devices=8", "--slices=3"], "--slices=3"),
        (["--devices=16", "--config.parallel.tensor=16"], "config.parallel.tensor: 16 devices"),
        pytest.param(
            ["--devices=4,8", "--config.parallel.data=4"],
            "config.parallel: makes 4 of 8 devices; set one of its sizes to -1",
            marks=pytest.mark.slow,
        ),
        (["--devices=3"], "config.data.rows_multiple: 8 rows cannot be split evenly over 3 devices"),
        (["--devices=3", "--config.parallel.fsdp=3", "--config.parallel.data=1"], "config.data.rows_multiple: 8 rows"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(flags, message):
    done = runs.run("plan", "--config=smoke", "--accelerator=h200", *flags)
    *warnings, error = done.stderr.splitlines()
    assert done.returncode == 2 and message in error
    assert warnings == (["warning: --accelerator=tpu-v5e: renamed to v5e"] if "--accelerator=tpu-v5e" in flags else [])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--config.parallel.fsdp=2", "--config.parallel.tensor=2"]])
def test_the_compiler_sends_no_activations_where_it_could_send_weights(arguments):
    changes = [f"--config.{name}={value}" for name, value in PLANNED.items() if name != "parallel.data"]
    done = runs.run("plan", "--config=smoke", *changes, *arguments)
    assert done.returncode == 0 and "rematerialization" not in done.stderr, done.stderr
