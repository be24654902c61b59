"""A state that is split over a mesh of data, fsdp and tensor trains as on 1 device; the rules."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from flaxformer_lite.config import CHOICES, Config, ModelConfig, OptimConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.batches.batching import BatchPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.training import checkpoint, meshes, metrics, optim, parallel, sharding
from flaxformer_lite.training import losses as losses_lib
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

STEPS, HALF, ROWS, LENGTH = 20, 10, 16, 13
# GELU: the gradient of ReLU depends on rounding near 0, so that runs on other devices sometimes
# differ by 1e-4.
MODEL = ModelConfig(
    activation="gelu",
    vocab_size=40,
    d_model=16,
    num_heads=8,
    d_ff=32,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LENGTH,
)
WHOLE = (1, 1, 1)
MESHES = [
    (data, fsdp, 8 // data // fsdp)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    if 8 % (data * fsdp) == 0
]


class Start(NamedTuple):
    """The initial state on a mesh."""

    mode: parallel.MeshMode
    state: state_lib.TrainState


@functools.cache
def trained() -> tuple:
    """Returns a model and its optimizer."""
    schedule = {"d_model": MODEL.d_model, "num_steps": STEPS}
    optimizer = optim.make_optimizer(
        OptimConfig(schedule="linear", learning_rate=3e-3, warmup_steps=5), **schedule
    )
    return transformer.build_model(MODEL), optimizer


@functools.cache
def start(sizes: tuple[int, int, int]) -> Start:
    mode = parallel.MeshMode(meshes.make_mesh(*sizes))
    return Start(
        mode, mode.make_state(functools.partial(state_lib.init_state, *trained(), seed=5, ema=True))
    )


@functools.cache
def compiled_step(sizes: tuple[int, int, int]) -> Callable:
    (mode, state), (model, optimizer) = start(sizes), trained()
    options = {"label_smoothing": 0.1, "microbatches": 2, "ema_decay": 0.9}
    options |= {"axis_name": mode.axis_name, "row_shards": mode.row_shards}
    step = functools.partial(step_lib.train_step, model=model, optimizer=optimizer, **options)
    struct = loader.batch_struct(Config(model=MODEL), ROWS, LENGTH)
    return mode.compile(step, jax.eval_shape(lambda: state), struct, donate=False)


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    source, target = (
        [rng.integers(4, 40, rng.integers(1, 12), dtype=np.int32) for _ in range(211)]
        for _ in range(2)
    )
    examples = Tokens(source, target)
    plan = BatchPlan(
        *examples.lengths(), buckets=(LENGTH,), tokens_per_batch=LENGTH * ROWS, rows_multiple=ROWS
    )
    every = Batches(examples, plan, num_steps=STEPS)
    return [every[step] for step in range(STEPS)]


def train(
    sizes: tuple, state: state_lib.TrainState, first: int, last: int
) -> tuple[state_lib.TrainState, list[float]]:
    mode, run, losses = start(sizes).mode, compiled_step(sizes), []
    for batch in batches()[first:last]:
        state, sums = run(state, mode.put_batch(batch))
        losses.append(metrics.divide(mode.read(sums))["loss"])
    return state, losses


@functools.cache
def halves(sizes: tuple[int, int, int]) -> tuple[state_lib.TrainState, list[float], list[float]]:
    """Returns the state after half of the steps, and the losses before and after it."""
    middle, before = train(sizes, start(sizes).state, 0, HALF)
    return middle, before, train(sizes, middle, HALF, STEPS)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function from a mesh to a folder with a checkpoint after half of the steps."""
    root = tmp_path_factory.mktemp("saved")

    @functools.cache
    def save(sizes: tuple[int, int, int]):
        folder = root / "x".join(map(str, sizes))
        written = checkpoint.Checkpoints(folder)
        written.save(HALF, {"state": halves(sizes)[0]}, {"step": HALF})
        written.close()
        return folder

    return save


def assert_resumes(folder, sizes: tuple[int, int, int]) -> None:
    """The checkpoint in `folder`, restored on a mesh, continues with the losses of 1 device."""
    read = checkpoint.Checkpoints(folder, read_only=True)
    like = start(sizes).mode.abstract(jax.eval_shape(lambda: start(sizes).state))
    restored, _ = read.restore_newest({"state": like})
    read.close()
    for x, struct in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert x.sharding.is_equivalent_to(struct.sharding, x.ndim)
    np.testing.assert_allclose(
        train(sizes, restored["state"], HALF, STEPS)[1], halves(WHOLE)[2], rtol=1e-5
    )


def assert_trains_as_one_device(sizes: tuple[int, int, int]) -> None:
    middle, before, after = halves(sizes)
    np.testing.assert_allclose(before + after, halves(WHOLE)[1] + halves(WHOLE)[2], rtol=1e-5)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(middle)} == {8}
    data, fsdp, tensor = sizes
    kernel = ("decoder", "layers_0", "feed_forward", "inner", "kernel")
    kernels = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(middle)
        if sharding.name_of(path).endswith("/".join(kernel))
    ]
    assert len(kernels) == 4  # the parameter, its moving average and its two moments
    assert {x.addressable_shards[0].data.shape for x in kernels} == {(16 // fsdp, 32 // tensor)}


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_mesh_of_3_axes_trains_as_1_device_and_checkpoints_resume_on_the_other(saved):
    assert_trains_as_one_device((2, 2, 2))
    assert_resumes(saved((2, 2, 2)), WHOLE)
    assert_resumes(saved(WHOLE), (2, 2, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2), (1, 4, 2)])
def test_a_loss_in_parts_is_the_same_on_a_mesh_and_each_device_adds_up_its_own_gradients(
    sizes, monkeypatch
):
    expected, losses = halves(WHOLE)[1][:3], []
    # the logits of one row
    monkeypatch.setattr(losses_lib, "LOGITS_AT_ONCE", LENGTH * MODEL.vocab_size)
    mode, state = start(sizes)
    run = compiled_step.__wrapped__(sizes)
    for batch in batches()[:3]:
        state, sums = run(state, mode.put_batch(batch))
        losses.append(metrics.divide(mode.read(sums))["loss"])
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    gradient = [
        f"{MODEL.vocab_size // sizes[2]},{MODEL.d_model}",
        f"{MODEL.vocab_size},{MODEL.d_model}",
    ]
    shards = sizes[0] * sizes[1]
    assert any(f"f32[1,{shape}]" in run.as_text() for shape in gradient)
    # no device adds up the gradients of all devices
    assert not any(f"f32[{shards},{shape}]" in run.as_text() for shape in gradient)


@pytest.mark.parametrize("mode", [parallel.MeshMode, parallel.PmapMode])
def test_a_step_that_does_not_sum_over_the_devices_is_an_error(mode):
    model, optimizer = trained()
    step = functools.partial(step_lib.train_step, model=model, optimizer=optimizer, row_shards=1)
    with pytest.raises(TypeError, match="axis_name='data', as in the parallel mode, got None"):
        mode(meshes.make_mesh(8)).compile(step, {}, {}, donate=False)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_of_8_devices_trains_as_1_device(sizes):
    assert_trains_as_one_device(sizes)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_checkpoint_of_every_mesh_resumes_on_3_others(saved):
    every = [WHOLE, *MESHES]
    assert len(every) == 11
    for number, saver in enumerate(every):
        for steps in (1, 3, 5):  # so each of them also resumes 3 others
            assert_resumes(saved(saver), every[(number + steps) % len(every)])


@functools.cache
def initial_params() -> dict:
    """Returns the initial parameters, on the host."""
    initial = functools.partial(state_lib.init_state, *trained(), seed=5)
    return jax.device_get(jax.jit(initial)().params)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_decoding_with_split_parameters_generates_the_same_texts(beams, monkeypatch):
    texts, model = {}, transformer.build_model(MODEL)
    for sizes in (WHOLE, (2, 2, 2)):
        # without padding, outputs are longer than the initial capacity of the cache
        if sizes != WHOLE:
            monkeypatch.setattr(
                "flaxformer_lite.decoding.decoder.padded_length", lambda length, max_length: length
            )
        mode = parallel.MeshMode(meshes.make_mesh(*sizes))
        config = dataclasses.replace(
            Config().decode, method="beam" if beams > 1 else "greedy", beam_size=max(beams, 1)
        )
        params = mode.put_state(initial_params())
        decoder = Decoder(model, config, rows=ROWS, sharding=parallel.decoding_shardings(mode.mesh))
        texts[sizes] = [
            ids.tolist() for ids in decoder(mode.over_mesh(params), batches()[0]["source"][:, :5])
        ]
    assert texts[WHOLE] == texts[2, 2, 2]
    assert len(set(map(tuple, texts[WHOLE]))) > 1


# The rules.


def models(*, every: bool) -> list[ModelConfig]:
    """Returns models that together have every parameter of the package.

    Args:
      every: each position scheme in each architecture, and not in the encoder_decoder alone.
    """
    made = []
    architectures, positions = CHOICES["model.architecture"], CHOICES["model.position"]
    for architecture, position in itertools.product(architectures, positions):
        if not every and architecture != "encoder_decoder" and position != "sinusoidal":
            continue
        changes = {
            "architecture": architecture,
            "position": position,
            "num_classes": 5,
            "relative_values": True,
        }
        made += [
            {},
            {
                "tie_embeddings": False,
                "output_bias": True,
                "activation": "swiglu",
                "norm_placement": "pre",
            },
        ]
        made[-2:] = [{**changes, **extra} for extra in made[-2:]]
    made += [{"attention": "additive"}, {"decoder": "masked"}]
    return [dataclasses.replace(MODEL, **changes) for changes in made]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_parameter_of_every_model_has_one_rule_and_every_rule_is_used(every):
    used = set()
    for config in models(every=every):
        params = parameters.shapes(transformer.build_model(config))
        sharding.check(params, meshes.make_mesh(1))
        names = [sharding.name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        used |= {rule for name in names for rule in sharding.rules_for(name)}
    assert used == set(sharding.RULES)


def test_no_rule_has_an_axis_2_times():
    for axes in sharding.RULES.values():
        named = [axis for axis in axes if axis]
        assert len(named) == len(set(named)) and set(named) <= {"fsdp", "tensor"}


@pytest.mark.parametrize("name", ["decoder/key/wernel", "keykernel", "encoder/output/kernels"])
def test_the_error_for_a_parameter_without_a_rule_names_it(name):
    tree = {name.partition("/")[0]: {name.partition("/")[2]: np.ones((2, 3))}}
    with pytest.raises(
        ValueError, match=rf"expected one rule for the parameter {name.rstrip('/')}.*matches none"
    ):
        sharding.check(tree, meshes.make_mesh(1))


def test_the_error_for_a_rule_with_another_number_of_dimensions_names_it():
    with pytest.raises(
        ValueError, match="names 2 dimensions, and source_embedding/embedding has 1"
    ):
        sharding.check({"source_embedding": {"embedding": np.ones(3)}}, meshes.make_mesh(1))


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (
            (1, 8, 1),
            {"d_model": 20, "num_heads": 2},
            "config.parallel.fsdp: 8 devices cannot share the parameter ",
        ),
        (
            (1, 1, 4),
            {"d_model": 24, "num_heads": 6},
            "config.parallel.tensor: 4 devices cannot share the parameter ",
        ),
        ((1, 1, 8), {"num_kv_heads": 2}, "do not divide 2; choose a divisor"),
        (
            (2, 2, 2),
            {"vocab_size": 41},
            r"target_embedding/embedding of shape \(41, 16\) evenly: they do not divide 41",
        ),
    ],
)
def test_the_error_for_a_dimension_that_is_not_divisible_names_the_axis_and_the_parameter(
    sizes, changes, message
):
    params = parameters.shapes(transformer.build_model(dataclasses.replace(MODEL, **changes)))
    with pytest.raises(ValueError, match=message):
        sharding.check(params, meshes.make_mesh(*sizes))


def test_arrays_that_are_not_parameters_are_replicated():
    mesh = meshes.make_mesh(2, 2, 2)
    tree = {
        "step": np.ones(()),
        "key_data": np.ones(2),
        "mu": {"inner": {"kernel": np.ones((8, 8))}},
    }
    specs = jax.tree.map(lambda s: s.spec, sharding.of(tree, mesh))
    assert specs == {
        "step": PartitionSpec(),
        "key_data": PartitionSpec(),
        "mu": {"inner": {"kernel": PartitionSpec("fsdp", "tensor")}},
    }


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((-1, 2, 2), (2, 2, 2)),
        ((1, -1, 2), (1, 4, 2)),
        ((2, 1, -1), (2, 1, 4)),
        ((3, 2, 1), (3, 2, 1)),
    ],
)
def test_a_size_of_minus_1_is_as_large_as_possible(sizes, shape):
    assert tuple(meshes.make_mesh(*sizes).shape.values()) == shape


def test_the_error_for_a_mesh_of_too_many_devices_has_its_sizes():
    with pytest.raises(
        ValueError, match="4 data x 2 fsdp x 2 tensor = 16 devices asked for, there are 8"
    ):
        meshes.make_mesh(4, 2, 2)


def test_sizes_that_do_not_divide_the_devices_are_an_error_with_minus_1():
    with pytest.raises(
        ValueError,
        match=r"^config\.parallel: 3 fsdp do not divide the 8 devices, so that -1 cannot",
    ):
        meshes.make_mesh(-1, 3)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_are_split_over_2_axes(microbatches):
    mesh = meshes.make_mesh(2, 2, 2)
    meshes.check_rows(mesh, rows_multiple=4 * microbatches, accumulate_steps=microbatches)
    with pytest.raises(
        ValueError, match=rf"over 4 devices .* make it a multiple of {4 * microbatches}"
    ):
        meshes.check_rows(mesh, rows_multiple=6, accumulate_steps=microbatches)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_device_stores_its_part_of_the_state_and_gathers_the_rest():
    compiled = {sizes: compiled_step(sizes) for sizes in (WHOLE, (2, 2, 2))}
    bytes_of = {
        sizes: run.memory_analysis().argument_size_in_bytes for sizes, run in compiled.items()
    }
    # matrices are split over 4 devices, vectors over 2 or not at all
    assert bytes_of[2, 2, 2] < bytes_of[WHOLE] / 2
    sent = {sizes: bool(re.search("all-gather", run.as_text())) for sizes, run in compiled.items()}
    assert sent == {WHOLE: False, (2, 2, 2): True}
