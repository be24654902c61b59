"""Every optimizer, with frozen parameters and groups: equal on 1 device and on 8, and resumed."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from flaxformer_lite.data.batches import loader
from flaxformer_lite.training import meshes, metrics, parallel, sharding
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.state import TrainState, from_parts, to_parts

STEPS, HALF, ROWS, LENGTH = 6, 3, 16, 11
# GELU: the gradient of ReLU depends on rounding near 0. All kernels are factored by Adafactor.
MODEL = ModelConfig(
    architecture="decoder_lm",
    activation="gelu",
    vocab_size=40,
    d_model=32,
    num_heads=2,
    d_head=34,
    d_ff=44,
    num_decoder_layers=1,
    max_length=LENGTH,
)
ARMS = {
    "one device": ("mesh", (1, 1, 1)),
    "data parallel over 8": ("mesh", (8, 1, 1)),
    "pmap over 8": ("pmap", (8, 1, 1)),
    "split over 2 x 2 x 2": ("mesh", (2, 2, 2)),
}
# The true gradient of a key's bias is 0, so that an update would follow rounding.
# One of each kind of state: adam's also has the kinds of adamw, lion and sgd.
OPTIMIZERS = ("adam", "adafactor", "muon", "schedule_free")
RULES = {"freeze": ("self_attention/.*/bias",), "groups": ("feed_forward/.*: rate=0.5",)}


def config_of(optimizer: str, *, accumulate_steps: int = 1) -> Config:
    decay = {} if optimizer == "adam" else {"weight_decay": 0.05}
    optim = OptimConfig(
        optimizer=optimizer,
        schedule="constant",
        learning_rate=0.3 if optimizer == "sgd" else 3e-3,
        warmup_steps=3,
        clip_norm=1.0,
        accumulate_steps=accumulate_steps,
        **decay,
        **RULES,
    )
    train = TrainConfig(num_steps=STEPS, ema_decay=0.9)
    return Config(model=MODEL, optim=optim, train=train, parallel=ParallelConfig())


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    """Returns batches of random texts, whose rows have different amounts of padding."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        target = rng.integers(4, MODEL.vocab_size, (ROWS, LENGTH)).astype(np.int32)
        target[np.arange(LENGTH) >= rng.integers(2, LENGTH, (ROWS, 1))] = 0
        found.append({"target": target, "row": np.arange(ROWS, dtype=np.int32)})
    return found


def train(optimizer: str, arm: str, folder: Path) -> tuple[list[float], TrainState, TrainState]:
    """Returns the losses, the last state, and that of a run resumed from half of the steps."""
    name, sizes = ARMS[arm]
    # in microbatches on one device, so that the comparison is with those too
    config = config_of(optimizer, accumulate_steps=2 if arm == "one device" else 1)
    mode = parallel.MODES[name](meshes.make_mesh(*sizes))
    step, initial = step_lib.of_config(config, axis_name=mode.axis_name, row_shards=mode.row_shards)
    abstract = jax.eval_shape(initial)
    struct = loader.batch_struct(config, ROWS, LENGTH)
    run = mode.compile(step, abstract, struct, donate=False)

    def continued(state: TrainState, first: int, last: int) -> TrainState:
        for batch in batches()[first:last]:
            state, sums = run(state, mode.put_batch(batch))
            losses.append(metrics.divide(mode.read(sums))["loss"])
        return state

    losses: list[float] = []
    middle = continued(mode.make_state(initial), 0, HALF)
    checkpoints = Checkpoints(folder)
    checkpoints.save(HALF, to_parts(mode.over_mesh(middle)), {"step": HALF})
    checkpoints.wait()
    parts, _ = checkpoints.restore_newest(mode.abstract(to_parts(abstract)))
    checkpoints.close()
    resumed = continued(mode.put_state(from_parts(parts)), HALF, STEPS)
    last = continued(middle, HALF, STEPS)
    assert losses[HALF:STEPS] == losses[STEPS:]
    return losses[:STEPS], *(jax.device_get(mode.over_mesh(each)) for each in (last, resumed))


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_is_the_same_on_every_mesh_and_resumes_bit_for_bit(optimizer, tmp_path):
    found = {arm: train(optimizer, arm, tmp_path / arm) for arm in ARMS}
    expected, one_device, _ = found["one device"]
    assert expected[-1] != expected[0]
    for arm, (losses, state, resumed) in found.items():
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=arm)
        jax.tree.map(np.testing.assert_array_equal, resumed, state)
        wanted = jax.tree.leaves(one_device.params)
        for (path, x), y in zip(
            jax.tree_util.tree_leaves_with_path(state.params), wanted, strict=True
        ):
            np.testing.assert_allclose(x, y, atol=2e-4, err_msg=f"{arm}, {path}")


# A device stores its part of every moment, also of those with one axis less.
V, D, H, K, F = MODEL.vocab_size, MODEL.d_model, MODEL.num_heads, MODEL.d_head, MODEL.d_ff
FACTORED = {
    # (shape, mesh axes) of v_row: without the longest axis, and of v_col: without the second
    "query/kernel": (((D, H), ("fsdp", "tensor")), ((H, K), ("tensor", None))),
    "out/kernel": (((H, D), ("tensor", "fsdp")), ((H, K), ("tensor", None))),
    "inner/kernel": (((D,), ("fsdp",)), ((F,), ("tensor",))),
    "outer/kernel": (((D,), ("fsdp",)), ((F,), ("tensor",))),
    "embedding/embedding": (((D,), ("fsdp",)), ((V,), ("tensor",))),
}


def test_a_factored_moment_has_the_sharding_of_the_axes_that_it_keeps():
    mesh = meshes.make_mesh(2, 2, 2)
    _, initial = step_lib.of_config(config_of("adafactor"))
    state = jax.eval_shape(initial)
    for tree in (state, to_parts(state), (state, {"loss": state.step})):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        shapes = {sharding.name_of(path): x.shape for path, x in leaves}
        specs = {
            sharding.name_of(path): each.spec
            for path, each in jax.tree_util.tree_leaves_with_path(sharding.of(tree, mesh))
        }
        for ending, moments in FACTORED.items():
            for kind, (shape, axes) in zip(("v_row", "v_col"), moments, strict=True):
                names = [name for name in shapes if f"/{kind}/" in name and name.endswith(ending)]
                assert names
                for name in names:
                    assert (shapes[name], tuple(specs[name])) == (shape, axes), name
        for name, shape in shapes.items():  # vectors are not factored
            if shape == (1,):
                assert tuple(specs[name]) in ((), (None,)), name
            if "/v/" in name and name.endswith("inner/bias"):
                assert (shape, tuple(specs[name])) == ((F,), ("tensor",))


def test_of_equal_axes_a_row_moment_keeps_the_first():
    mesh = meshes.make_mesh(2, 2, 2)
    kernel, vector = np.ones((34, 34)), np.ones(34)
    tree = {
        "params": {"inner": {"kernel": kernel}},
        "v_row": {"inner": {"kernel": vector}},
        "v_col": {"inner": {"kernel": vector}},
        "v": {"inner": {"kernel": np.ones(1)}},
    }
    specs = jax.tree.map(lambda each: tuple(each.spec), sharding.of(tree, mesh))
    del tree
    assert specs["params"]["inner"]["kernel"] == ("fsdp", "tensor")
    assert specs["v_row"]["inner"]["kernel"] == ("fsdp",)
    assert specs["v_col"]["inner"]["kernel"] == ("tensor",)
    assert specs["v"]["inner"]["kernel"] == ()


# Whole runs.

RUN = {
    **runs.TINY,
    "model.d_model": 64,
    "model.num_heads": 2,
    "model.layer_drop": 0.2,
    "optim.schedule": "constant",
    "optim.warmup_steps": 20,
    "optim.learning_rate": 1e-5,
    "optim.freeze": r"('decoder/.*norm/scale',)",
    "optim.skip_spikes": 0.5,
    "train.num_steps": 140,
    "train.eval_every": 140,
    "train.checkpoint_every": 60,
    "train.log_every": 1,
}


def changes_of(optimizer: str) -> dict[str, object]:
    decay = {} if optimizer == "adam" else {"optim.weight_decay": 0.05}
    return {**RUN, "optim.optimizer": optimizer, **decay}


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the workdir of a run on 1 device with an optimizer."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def run(optimizer: str) -> Path:
        assert runs.fit(root / optimizer, changes_of(optimizer)) == 0
        return root / optimizer

    return run


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_killed_run_resumes_bit_for_bit(whole_runs, optimizer, tmp_path):
    killed = tmp_path / "killed"
    flags = [*runs.flags(changes_of(optimizer)), f"--workdir={killed}"]
    at_80 = lambda: (killed / "checkpoints/60").exists() and runs.last_step(killed) >= 80  # noqa: E731
    assert runs.stop_at(at_80, signal.SIGKILL, "train", *flags)[0] == -signal.SIGKILL
    assert not (killed / "checkpoints/120").exists()
    assert runs.fit(killed, changes_of(optimizer)) == 0
    whole = whole_runs(optimizer)
    assert runs.losses(killed) == runs.losses(whole)
    skipped = {line["step"]: line["skipped"] for line in runs.lines_of(killed, "train")}
    assert 0 < skipped[80] < skipped[140], "of each part of the run"
    runs.assert_same_arrays(runs.checkpoint_arrays(killed, 140), runs.checkpoint_arrays(whole, 140))


@pytest.mark.slow
def test_2_processes_that_share_a_state_log_the_losses_of_1_device(tmp_path):
    short = {"train.num_steps": 8, "train.eval_every": 8, "train.checkpoint_every": 8}
    split = {"parallel.data": 1, "parallel.fsdp": 4, "parallel.tensor": 2}
    optimizers = ("muon",)  # its state is unlike the parameters
    changes = {
        name: {**changes_of(name), **short, "optim.learning_rate": 1e-3} for name in optimizers
    }
    jobs = [(tmp_path / name, {**changes[name], **split}) for name in optimizers]
    runs.fit_in_processes(2, jobs)
    for name in optimizers:
        assert runs.fit(tmp_path / f"{name} alone", changes[name]) == 0
        expected = runs.losses(tmp_path / f"{name} alone")
        assert list(expected) == list(range(1, 9))
        assert runs.losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)
