"""Plans of a step on absent devices, from a program that is compiled for fake CPU devices."""

import dataclasses
import functools
import os

import jax
import pytest
import runs

from flaxformer_lite.cli import commands
from flaxformer_lite.config import CHOICES, Config, ModelConfig, with_vocabulary
from flaxformer_lite.model import backends, transformer
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.system import runtime
from flaxformer_lite.system.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.memory import Memory
from flaxformer_lite.training import flops, hlo, losses, meshes, plan, topology
from flaxformer_lite.training.hlo import Collective

pytestmark = pytest.mark.usefixtures("quickly_compiled")
TRANSLATOR = {
    **runs.SMALL,
    "data.buckets": "(32, 64)",
    "data.tokens_per_batch": 1536,
    "data.rows_multiple": 24,
}
# A decoder_lm compiles in 60 % of the time of an encoder_decoder.
ARCHITECTURES = pytest.mark.parametrize(
    "architecture", ["decoder_lm", pytest.param("encoder_decoder", marks=pytest.mark.slow)]
)
MEAN = Collective("all-reduce", "f32", (tuple(range(8)),))


def config_of(architecture: str, **changes: object) -> Config:
    """Returns the config of TRANSLATOR with another architecture and `changes`."""
    return runs.small_config({**TRANSLATOR, "model.architecture": architecture, **changes})


def model(architecture: str) -> ModelConfig:
    """Returns the model config of `config_of`."""
    config = config_of(architecture)
    return with_vocabulary(config, config.data.vocab_size).model


def parameter_count(architecture: str) -> int:
    """Returns the number of parameters of `model`."""
    shapes = param_shapes(transformer.build_model(model(architecture)))
    return sum(x.size for x in jax.tree.leaves(shapes))


def fake(*sizes: int, name: str = "h100", **fields) -> plan.Target:
    """Returns fake CPU devices in place of an accelerator's."""
    return plan.Target(name, ACCELERATORS[name], meshes.make_mesh(*sizes), compiler=None, **fields)


@functools.cache
def planned(architecture: str, sizes: tuple[int, int, int]) -> plan.Plan:
    (found,) = plan.plan(config_of(architecture), fake(*sizes))
    return found


def made_up(
    sent: dict[Collective, int], *, cycles: int = 0, loop_cycles: int = 0, flops: float = 1.0
) -> plan.Plan:
    """Returns the plan of a program with these totals."""
    program = hlo.Program(sent, {"flash": 3} if cycles else {}, cycles, loop_cycles)
    return plan.Plan(
        rows=2, length=3, flops=flops, memory=Memory(5 * 10**9, 7 * 10**9), program=program
    )


def test_a_ring_between_machines_is_as_fast_as_the_networks_of_its_devices_together():
    """For 16 devices in machines of 8; each device has its own network."""
    accelerator = Accelerator("gpu", flops=1.0, memory=1.0, link=70.0, linked=8, network=11.0)
    assert accelerator.speed(range(8)) == accelerator.speed([8, 13]) == 70.0
    assert accelerator.speed([3, 11]) == 11.0  # 1 device of each machine
    assert accelerator.speed([0, 1, 2, 8, 9]) == 22.0  # the second machine has 2 networks
    assert accelerator.speed(range(16)) == 70.0  # 8 networks are faster than the links
    assert accelerator.speed(range(16), ring=False) == 11.0
    sent = {Collective("all-reduce", "f32", (tuple(range(16)),)): 140}
    found = made_up(sent | {Collective("all-gather", "bf16", ((0, 1), (3, 11))): 22})
    target = dataclasses.replace(fake(1, utilization=0.5), accelerator=accelerator)
    assert (found.compute_seconds(target), found.send_seconds(target)) == pytest.approx((2.0, 4.0))
    assert found.bytes_beyond_links(accelerator) == 162
    permute = Collective("collective-permute", "f32", ((0, 1), (7, 8)))
    assert plan.speed(permute, accelerator) == 11.0
    assert plan.speed(Collective("all-to-all", "f32", (tuple(range(16)),)), accelerator) == 11.0
    assert dataclasses.replace(accelerator, linked=16).speed([3, 11]) == 70.0


@ARCHITECTURES
def test_1_device_sends_nothing_and_8_send_the_gradients_once(architecture):
    assert planned(architecture, (1, 1, 1)).sent == {}
    gradients = 2 * 7 / 8 * 4 * parameter_count(architecture)
    # the gradients, and the metrics
    assert gradients <= sum(planned(architecture, (8, 1, 1)).sent.values()) < 1.01 * gradients


@pytest.mark.slow
@ARCHITECTURES
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (2, 2, 2)])
def test_a_loss_in_parts_sends_its_gradients_once(architecture, sizes, monkeypatch):
    at_once, vocab_size = planned(architecture, sizes), model(architecture).vocab_size
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 64 * vocab_size)  # the logits of one row
    (in_parts,) = plan.plan(config_of(architecture), fake(*sizes))
    assert in_parts.memory.temporary < at_once.memory.temporary
    # the matrix may be sent 1 more time, but not its gradient
    matrix = 4 * vocab_size * model(architecture).d_model
    assert sum(in_parts.sent.values()) < sum(at_once.sent.values()) + matrix


@pytest.mark.slow
@ARCHITECTURES
def test_memory_and_flops_of_a_device_fall_with_the_number_of_devices(architecture):
    one, copies, split = (
        planned(architecture, sizes) for sizes in [(1, 1, 1), (8, 1, 1), (1, 8, 1)]
    )
    assert split.memory.state < copies.memory.state < one.memory.state
    assert split.memory.state < copies.memory.state / 4
    assert copies.memory.temporary < one.memory.temporary
    assert copies.flops == split.flops == one.flops / 8
    config = Config(model=model(architecture))
    assert one.flops == flops.train_step(config, one.rows, one.length)


@ARCHITECTURES
def test_the_memory_of_the_state_is_that_of_parameters_moments_and_batch(architecture):
    one, has_source = planned(architecture, (1, 1, 1)), architecture == "encoder_decoder"
    batch = (1 + has_source) * one.rows * one.length + one.rows
    numbers = 3 * parameter_count(architecture) + batch
    assert one.memory.state == pytest.approx(4 * numbers, rel=0.01)


@pytest.mark.slow
@ARCHITECTURES
def test_a_kernel_is_planned_as_blockwise_attention_which_stores_no_weights_either(architecture):
    for name in CHOICES["model.backend"]:
        assert backends.stand_in(name) == ("blockwise" if name in ("cudnn", "flash") else name)

    def memory(backend):
        changes = {
            "data.buckets": "(512,)",
            "data.tokens_per_batch": 4096,
            "data.rows_multiple": 8,
            "model.max_length": 512,
            "model.num_encoder_layers": 1,
            "model.backend": backend,
        }
        (found,) = plan.plan(config_of(architecture, **changes), fake(1))
        return found.memory

    assert memory("cudnn").temporary < memory("reference").temporary


def test_the_time_of_a_step_is_that_of_its_flops_and_its_collectives():
    found, target = made_up({MEAN: 11 * 10**9}, flops=1e12), fake(8, utilization=0.5)
    assert (found.compute_seconds(target), found.send_seconds(target)) == pytest.approx(
        (1e12 / (989e12 * 0.5), 11e9 / 450e9)
    )
    lines = plan.table([found], target).splitlines()
    assert lines[0] == "estimated on a CPU (), for 8 x h100, mesh 8 x 1 x 1 (data, fsdp, tensor)"
    assert lines[1] == "a training step, global batch of 2 x 3; each of 8 devices:"
    assert lines[2] == "  peak 12 GB of 80 GB a device: fits"
    assert "  sends       11,000 MB: all-reduce (f32) 11,000" in lines
    assert "  computes    2.02 ms, at 50% of 989 TFLOP/s" in lines
    assert "  of the peak 4%, 4% if they hide" in lines


def test_the_cycles_of_the_compiler_take_precedence_over_an_assumed_share_of_the_peak():
    found, target = (
        made_up({}, cycles=3 * 10**6, loop_cycles=3 * 10**5, flops=1e12),
        fake(1, name="v5e"),
    )
    # cycles from a CPU compiler do not count
    assert found.compute_seconds(target) == pytest.approx(1e12 / (197e12 * 0.4))
    target = dataclasses.replace(target, compiler="libtpu 7")
    assert found.compute_seconds(target) == pytest.approx(2e-3)
    text = plan.table([found], target)
    assert text.startswith("compiled by libtpu 7, for 1 x v5e") and "kernels     3 x flash" in text
    assert "computes    2 ms, by the compiler's estimates" in text
    assert "a step      0.2 ms for 2 inputs" in plan.table([found], target, decode=True)


def test_a_step_larger_than_the_device_does_not_fit_and_gets_advice():
    found = dataclasses.replace(
        made_up({}), memory=Memory(5 * 10**9, 7 * 10**9, code=10**9, most=10**10)
    )
    small = dataclasses.replace(ACCELERATORS["h100"], memory=11e9)
    target = dataclasses.replace(fake(1), accelerator=small)
    text = plan.table([found], target)
    assert "peak 10 GB of 11 GB a device: fits (and 1 GB of program)\n" in text
    smaller = dataclasses.replace(small, memory=10.9e9)
    target = dataclasses.replace(fake(1), accelerator=smaller)
    text = plan.table([found], target)
    peak = "peak 10 GB of 10.9 GB a device: does not fit (and 1 GB of program)"
    assert f"{peak}\n  To take less: model.remat" in text
    tpu = dataclasses.replace(smaller, platform="tpu")
    tpu = plan.Target("v5e", tpu, target.mesh, compiler="libtpu 7")
    assert found.fits(tpu)  # its compiler would have raised an error
    refused = dataclasses.replace(found, memory=None, program=None, shortage="needs 96 GiB")
    text = plan.table([refused], target)
    assert "more than 10.9 GB a device: does not fit: needs 96 GiB\n  To take less" in text


@pytest.mark.slow
@ARCHITECTURES
def test_the_plan_is_of_the_longest_batch_shape_or_of_each(architecture):
    longest, shorter = plan.plan(config_of(architecture), fake(1), every_shape=True)
    assert (longest.rows, longest.length) == (24, 64)
    assert (shorter.rows, shorter.length) == (48, 32)
    only = planned(architecture, (1, 1, 1))
    assert (only.rows, only.length) == (24, 64)


@pytest.mark.slow
@ARCHITECTURES
def test_decoding_is_planned_for_a_full_batch_of_the_longest_inputs(architecture):
    beams = {"decode.method": "beam", "decode.beam_size": 3, "decode.tokens_per_batch": 960}
    config = config_of(architecture, **beams)
    copies, split = (plan.decoding(config, fake(*sizes)) for sizes in [(2, 1, 1), (1, 1, 2)])
    assert (copies.rows, copies.length) == (4, 64)  # 960 // 3 // 64, of 2 devices
    assert copies.sent == {} and split.sent != {}
    steps = min(64 + config.decode.max_extra_length, config.model.max_length)
    config = with_vocabulary(config, config.data.vocab_size)
    assert copies.flops == flops.decoding(config, 4, 64, steps) / 2


def config_flags() -> list[str]:
    return [
        f"--config.{name}={value}" for name, value in TRANSLATOR.items() if name != "parallel.data"
    ]


@pytest.mark.slow
def test_the_command_plans_for_more_devices_than_this_machine_has():
    changes = config_flags()
    # an accelerator without a description, so that a CPU compiler is used
    done = runs.run("plan", "--config=smoke", "--devices=12", "--accelerator=h200", *changes)
    assert done.returncode == 0, done.stderr
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("estimated on a CPU (the only GPU") and "for 12 x h200" in first
    assert second == "a training step, global batch of 24 x 64; each of 12 devices:"
    assert "W1" not in done.stderr and "rematerialization" not in done.stderr


def no_compiler(name: str) -> str:
    """Replaces `topology.compiler`: no compiler is installed."""
    raise topology.NoCompiler("none here")


@pytest.mark.slow
@ARCHITECTURES
def test_a_table_shows_how_a_step_scales_with_the_number_of_devices(architecture, monkeypatch):
    """The rows per device are constant, the split state shrinks, and 2 machines need a network."""
    monkeypatch.setitem(ACCELERATORS, "h100", dataclasses.replace(ACCELERATORS["h100"], linked=2))
    config = config_of(architecture, **{"parallel.data": 1, "parallel.fsdp": -1})
    monkeypatch.setattr(topology, "compiler", no_compiler)
    header, *_, two, eight = plan.scaling_table(config, [2, 8], "h100").splitlines()
    links = "450 GB/s a device among the GPUs of a machine, 50 beyond"
    assert (
        header == f"estimated on a CPU (none here), for h100; time at 40% of 989 TFLOP/s; {links}"
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (two, eight)]
    assert [row[:3] for row in cells] == [
        ["2", "1 x 2 x 1", "24 x 64"],
        ["8", "1 x 8 x 1", "96 x 64"],
    ]
    state = [float(row[3].split(" (")[1].rstrip(")")) for row in cells]
    assert state[1] < state[0] / 3  # all but the batch and some vectors is split 4 times as far
    beyond = [float(row[4].split(", ")[1]) for row in cells]
    assert beyond[0] == 0 < beyond[1]
    assert 0 < float(cells[1][5].rstrip("%")) < float(cells[0][5].rstrip("%")) < 100


IMPOSSIBLE = pytest.mark.parametrize(
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
        (
            ["--decode", "--devices=3"],
            "config.data.rows_multiple: 8 rows cannot be split evenly over 3 devices",
        ),
        (
            ["--config.parallel.data=4"],
            "config.parallel: makes 4 of 8 devices; set one of its sizes to -1",
        ),
        (
            ["--accelerator=v5e", "--devices=3"],
            "--devices=3: slices of v5e are planned with 1, 2, 4",
        ),
        (["--accelerator=tpu-v5e", "--devices=8", "--slices=3"], "--slices=3"),
        (["--devices=16", "--config.parallel.tensor=16"], "config.parallel.tensor: 16 devices"),
        pytest.param(
            ["--devices=4,8", "--config.parallel.data=4"],
            "config.parallel: makes 4 of 8 devices; set one of its sizes to -1",
            marks=pytest.mark.slow,
        ),
        (
            ["--devices=3"],
            "config.data.rows_multiple: 8 rows cannot be split evenly over 3 devices",
        ),
        (
            ["--devices=3", "--config.parallel.fsdp=3", "--config.parallel.data=1"],
            "config.data.rows_multiple: 8 rows",
        ),
    ],
)


@IMPOSSIBLE
def test_an_impossible_plan_is_an_error_that_names_the_flag_or_field(
    flags, message, monkeypatch, capfd
):
    # the command sets up its process for the compiler; here that is the process of the tests
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(topology, "prepare", lambda name: False)
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(variable, os.environ[variable])
    with pytest.raises((InputError, SystemExit)) as error:
        commands.plan(["--config=smoke", "--accelerator=h200", *flags])
    err = capfd.readouterr().err
    if error.type is InputError:
        assert message in str(error.value)
    else:
        (line,) = err.splitlines()
        assert error.value.code == 2 and message in line


@pytest.mark.slow
@IMPOSSIBLE
def test_the_process_of_an_impossible_plan_prints_one_line_and_exits_with_2(flags, message):
    done = runs.run("plan", "--config=smoke", "--accelerator=h200", *flags)
    *warnings, error = done.stderr.splitlines()
    assert done.returncode == 2 and message in error
    renamed = "--accelerator=tpu-v5e" in flags
    assert warnings == ["warning: --accelerator=tpu-v5e: renamed to v5e"] * renamed


def test_an_error_of_the_command_is_one_line_and_a_former_name_is_a_warning():
    flags = ["--accelerator=tpu-v5e", "--devices=8", "--slices=3"]
    done = runs.run("plan", "--config=smoke", *flags)
    assert done.returncode == 2
    warning, error = done.stderr.splitlines()
    assert warning == "warning: --accelerator=tpu-v5e: renamed to v5e"
    assert error.startswith("error: --devices=8: ") and "--slices=3" in error


@pytest.mark.slow
def test_the_compiler_does_not_rematerialize_activations_of_a_split_state():
    split = ["--config.parallel.fsdp=2", "--config.parallel.tensor=2"]
    done = runs.run("plan", "--config=smoke", *config_flags(), *split)
    assert done.returncode == 0 and "rematerialization" not in done.stderr, done.stderr
