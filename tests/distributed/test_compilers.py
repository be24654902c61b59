"""Programs compiled for TPUs and GPUs by their own compilers, on a machine that has only a CPU.

`.ci/run` installs the compilers and runs these tests: `pytest -m compilers`. Without a compiler,
its tests are skipped.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache

from flaxformer_lite.config import Config, resolve, with_vocabulary
from flaxformer_lite.data.batches import loader
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.system.accelerators import ACCELERATORS
from flaxformer_lite.training import hlo, meshes, parallel, plan, topology
from flaxformer_lite.training import step as step_lib

pytestmark = pytest.mark.compilers
VOCABULARY, ROWS, LENGTH = 512, 16, 256
SUMS = ("all-reduce", "reduce-scatter")


@pytest.fixture(autouse=True, scope="module")
def less_effort() -> Iterator[None]:
    """Compiles in half the time, without the cache: no test depends on the speed of a program."""
    settings = {"jax_exec_time_optimization_effort": -1.0, "jax_enable_compilation_cache": False}
    before = {name: getattr(jax.config, name) for name in settings}

    def use(values: dict[str, object]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX reads the settings once

    use(settings)
    yield
    use(before)


def config_of(changes: dict[str, object]) -> Config:
    """Returns the config of a model with 1 layer, in bfloat16."""
    fields = {
        "model": {
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "d_model": 128,
            "num_heads": 2,
            "d_ff": 256,
        },
        "data": {"vocab_size": VOCABULARY, "buckets": (LENGTH,), "tokens_per_batch": ROWS * LENGTH},
        "optim": {},
        "train": {},
        "decode": {},
        "parallel": {},
    }
    fields["model"] |= {"dtype": "bfloat16", "max_length": LENGTH}
    fields["data"]["rows_multiple"] = ROWS
    for name, value in changes.items():
        section, field = name.split(".")
        fields[section][field] = value
    return resolve(fields)


def target(name: str, count: int, config: Config, **options) -> plan.Target:
    """Returns devices by their description; skips the test without a compiler."""
    if not topology.prepare(name):
        with pytest.raises(topology.NoCompiler) as error:
            topology.compiler(name)
        pytest.skip(str(error.value))
    return plan.target(config, name, count, **options)


def step_of(
    name: str, count: int, changes: dict[str, object]
) -> tuple[plan.Plan, plan.Target, Config]:
    config = config_of(changes)
    found = target(name, count, config)
    (planned,) = plan.plan(config, found)
    assert planned.memory is not None, planned.shortage
    return planned, found, config


def parameter_count(config: Config) -> int:
    shapes = parameters.shapes(transformer.build_model(with_vocabulary(config, VOCABULARY).model))
    return sum(x.size for x in jax.tree.leaves(shapes))


KERNEL = {"v5e": "flash", "v5p": "flash", "v6e": "flash", "h100": "cudnn"}
VARIANTS = {
    "base": ("v6e", {}),
    "pmap": ("v5p", {"parallel.mode": "pmap"}),
    "named kernel": ("v5e", {"model.backend": "flash"}),
    "packing, rotary, window, grouped heads": (
        "v5e",
        {
            "data.packing": True,
            "model.position": "rotary",
            "model.attention_window": 64,
            "model.num_heads": 4,
            "model.num_kv_heads": 2,
            "model.architecture": "decoder_lm",
        },
    ),
    "R-Drop, EMA": ("v5p", {"train.r_drop": 1.0, "train.ema_decay": 0.99}),
    "remat, accumulation": ("v6e", {"model.remat": "full", "optim.accumulate_steps": 2}),
    "GPU": ("h100", {}),
    "GPU, pmap": ("h100", {"parallel.mode": "pmap"}),
    "GPU, named kernel": ("h100", {"model.backend": "cudnn"}),
}


@pytest.mark.parametrize(("name", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_with_copies_of_the_state_each_gradient_is_summed_once_in_float32_and_attention_is_a_kernel(
    name, changes
):
    planned, _, config = step_of(name, 8, changes)
    # forward, backward of the queries, backward of the keys and values
    assert planned.program.kernels.get(KERNEL[name], 0) >= 3
    assert {each.kind for each in planned.sent} == {"all-reduce"}
    assert {each.dtype for each in planned.sent} == {"f32"}
    gradients = 2 * 7 / 8 * 4 * parameter_count(config)
    assert gradients <= sum(planned.sent.values()) < 1.01 * gradients  # and the metrics


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_attention_in_float32_is_matrix_products_on_a_gpu_and_a_kernel_on_a_tpu(name):
    planned, _, _ = step_of(name, 4, {"model.dtype": "float32"})
    assert planned.program.kernels == ({} if name == "h100" else {"flash": 9})
    assert {each.dtype for each in planned.sent} == {"f32"}


@pytest.mark.parametrize("name", ["v5e", "v5p", "h100"])
def test_with_a_split_state_only_activations_are_summed_in_bfloat16(name):
    """Devices that compute the same rows sum their parts of an activation in `model.dtype`."""
    planned, found, _ = step_of(
        name, 8, {"parallel.data": 2, "parallel.fsdp": 2, "parallel.tensor": 2}
    )
    assert planned.program.kernels.get(KERNEL[name], 0) >= 3
    assert {each.dtype for each in planned.sent if each.kind in SUMS} == {"f32", "bf16"}
    assert any(each.kind == "all-gather" for each in planned.sent)  # of the state split by fsdp
    neighbours = tuple((2 * pair, 2 * pair + 1) for pair in range(4))
    for each in planned.sent:
        assert each.kind not in SUMS or each.dtype == "f32" or each.groups == neighbours, each
    assert found.mesh.devices.shape == (2, 2, 2)


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_state_and_evaluation_compile(name):
    config = config_of({})
    mode = parallel.MeshMode(target(name, 8, config).mesh)
    config = with_vocabulary(config, VOCABULARY)
    _, initial_state = step_lib.of_config(
        config, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    assert hlo.read(mode.compile_state(initial_state).as_text(), 8).sent == {}
    model = transformer.build_model(config.model)
    options = {"model": model, "axis_name": mode.axis_name, "row_shards": mode.row_shards}
    step, batch = (
        functools.partial(step_lib.eval_step, **options),
        loader.batch_struct(config, ROWS, LENGTH),
    )
    program = hlo.read(
        mode.compile(step, parameters.shapes(model), batch, donate=False).as_text(), 8
    )
    assert program.kernels.get(KERNEL[name]) == 3 and sum(program.sent.values()) < 100


@pytest.mark.parametrize(
    ("name", "tensor", "changes"),
    [
        ("v5e", 1, {"decode.method": "greedy"}),
        ("v6e", 1, {"decode.method": "beam"}),
        ("v5p", 2, {"decode.method": "beam"}),
        ("v5e", 1, {"decode.method": "mask_predict", "model.decoder": "masked"}),
        ("h100", 1, {"decode.method": "greedy"}),
        ("h100", 2, {"decode.method": "beam"}),
    ],
)
def test_decoding_compiles_and_devices_with_the_whole_model_send_nothing(name, tensor, changes):
    config = config_of(changes | {"parallel.tensor": tensor})
    found = target(name, 4, config, decode=True)
    planned = plan.decoding(config, found)
    assert (
        parameter_count(config) * 4 / tensor
        < planned.memory.total
        < ACCELERATORS[name].memory / 100
    )
    assert bool(planned.sent) == (tensor > 1)
    text = plan.table([planned], found, decode=True)
    assert ("a step" in text) == (name != "h100" and changes["decode.method"] != "mask_predict")


@pytest.mark.parametrize("name", ["v4", "v5e"])
def test_slices_exchange_gradients_over_the_network_between_them(name):
    """Sums are within a slice first, then between devices at the same position in each slice."""
    config = config_of({})
    found = target(name, 8, config, slices=2)
    (planned,) = plan.plan(config, found)
    between = sum(
        size
        for each, size in planned.sent.items()
        if each.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    )
    assert planned.bytes_beyond_links(found.accelerator) == between
    part = 2 * 1 / 2 * 4 * parameter_count(config) / 4
    assert part <= between < 4.1 * part  # small gradients are not split over the slice first


def test_the_command_prints_a_compiled_plan_and_rejects_a_flag_without_effect():
    target("v5e", 1, config_of({}))  # skips without a compiler
    command = ["plan", "--config=smoke", "--accelerator=v5e", "--devices=2"]
    done = runs.run(*command)
    assert done.returncode == 0 and done.stdout.startswith("compiled by libtpu"), done.stderr
    assert ": fits" in done.stdout and "by the compiler's estimates" in done.stdout
    done = runs.run(*command, "--utilization=0.5")
    assert (
        done.returncode == 2
        and "--utilization: the compiler of v5e estimates times itself" in done.stderr
    )


def test_a_step_that_does_not_fit_reports_the_missing_memory():
    rows = 2**17
    config = config_of({"data.tokens_per_batch": rows * LENGTH, "data.rows_multiple": rows})
    found = target("v5e", 1, config)
    text = plan.table(plan.plan(config, found), found)
    assert "does not fit" in text and "GiB short" in text and "model.remat" in text


PODS = [(name, 4 * 2**i) for name in ("v4", "v5e", "v5p", "v6e") for i in range(8)]


@pytest.mark.parametrize(
    ("name", "chips"), [(n, c) for n, c in PODS if c <= 256 or n in ("v4", "v5p")]
)
def test_every_shape_of_every_pod_makes_a_mesh_of_described_devices(name, chips):
    config = config_of({})
    for slices in (1, 2, 4):
        target(name, chips * slices, config, slices=slices)
        devices = topology.devices(name, chips * slices, slices=slices)
        assert len(devices) == chips * slices
        powers = [2**i for i in range(len(devices).bit_length())]
        for fsdp, tensor in itertools.product(powers, powers):
            if fsdp * tensor <= len(devices) and tensor <= min(16, chips):
                shape = len(devices) // fsdp // tensor, fsdp, tensor
                mesh = meshes.make_mesh(*shape, devices=devices)
                groups = mesh.devices.reshape(-1, tensor)
                assert {
                    len({getattr(chip, "slice_index", 0) for chip in group}) for group in groups
                } == {1}
                assert len(set(mesh.devices.flat)) == len(devices)
