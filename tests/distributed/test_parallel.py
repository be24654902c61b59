"""The same run on 1 device, on 8 in each parallel mode, and in 2 or 4 processes."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import CHOICES, Config, DataConfig, ModelConfig, OptimConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.training import loss_in_parts, meshes, metrics, optim, parallel, processes
from flaxformer_lite.training import losses as losses_lib
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

STEPS, ROWS, LENGTH, V, CLASSES = 20, 16, 13, 37, 5
ARMS = {"one device": ("mesh", 1), "mesh of 8": ("mesh", 8), "pmap over 8": ("pmap", 8)}
# GELU: the gradient of ReLU depends on rounding near 0, so that runs on other devices sometimes
# differ by 1e-4.
MODEL = ModelConfig(
    activation="gelu",
    vocab_size=V,
    d_model=22,
    num_heads=2,
    d_ff=29,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LENGTH,
)
PACKED_PAIRS = "packed pairs"  # an encoder_decoder; the texts of decoder_lm are packed too
# (architecture, microbatches)
JOBS = [("encoder_decoder", 1), (PACKED_PAIRS, 2), ("encoder_classifier", 1), ("decoder_lm", 1)]


def config_of(architecture: str) -> Config:
    packing = architecture in (PACKED_PAIRS, "decoder_lm")
    architecture = "encoder_decoder" if architecture == PACKED_PAIRS else architecture
    model = dataclasses.replace(MODEL, architecture=architecture, num_classes=CLASSES)
    return Config(model=model, data=DataConfig(packing=packing))


@functools.cache
def batches(architecture: str = "encoder_decoder") -> list[dict[str, np.ndarray]]:
    """Returns batches of random examples whose rows have different amounts of padding."""
    rng = np.random.default_rng(3)
    source, target = (
        [rng.integers(4, V, rng.integers(1, 12), dtype=np.int32) for _ in range(211)]
        for _ in range(2)
    )
    label = rng.integers(0, CLASSES, 211).astype(np.int32)
    examples = {
        "encoder_decoder": Tokens(source, target),
        PACKED_PAIRS: Tokens(source, target),
        "encoder_classifier": Tokens(source, label=label),
        "decoder_lm": Tokens(target=target),
    }[architecture]
    sizes = dict(buckets=(LENGTH,), tokens_per_batch=LENGTH * ROWS, rows_multiple=ROWS)
    packing = config_of(architecture).data.packing
    plan = (PackedPlan if packing else BatchPlan)(*examples.lengths(), **sizes)
    every = Batches(examples, plan, num_steps=STEPS)
    return [every[step] for step in range(STEPS)]


@functools.cache
def start(architecture: str) -> tuple:
    """Returns a model, its optimizer, and the initial state on the host."""
    model = transformer.build_model(config_of(architecture).model)
    schedule = {"d_model": MODEL.d_model, "num_steps": STEPS}
    optimizer = optim.make_optimizer(
        OptimConfig(schedule="linear", learning_rate=3e-3, warmup_steps=5), **schedule
    )
    initial = jax.jit(functools.partial(state_lib.init_state, model, optimizer, seed=5, ema=True))()
    return model, optimizer, jax.device_get(initial)


def mode_of(arm: str) -> parallel.MeshMode | parallel.PmapMode:
    """Returns the parallel mode of an arm, on its devices."""
    mode_name, num_devices = ARMS[arm]
    return parallel.MODES[mode_name](meshes.make_mesh(num_devices))


@functools.cache
def train(
    arm: str, architecture: str, microbatches: int
) -> tuple[list[float], dict, np.ndarray | None, dict]:
    """Returns the losses of 20 steps, the evaluation of the result, and the final state.

    The state is on the host.
    """
    mode, (model, optimizer, initial) = mode_of(arm), start(architecture)
    state = mode.put_state(initial)
    struct = loader.batch_struct(config_of(architecture), ROWS, LENGTH)

    def train_step(state, batch):
        return step_lib.train_step(
            state,
            batch,
            model=model,
            optimizer=optimizer,
            label_smoothing=0.1,
            microbatches=microbatches,
            ema_decay=0.9,
            r_drop_weight=2.0 if architecture == PACKED_PAIRS else 0.0,
            axis_name=mode.axis_name,
            row_shards=mode.row_shards,
        )

    run = mode.compile(train_step, jax.eval_shape(lambda: initial), struct, donate=True)
    # devices communicate only sums
    assert not re.search("all-gather|all-to-all|collective-permute", run.as_text())
    losses = []
    for batch in batches(architecture):
        state, sums = run(state, mode.put_batch(batch))
        losses.append(metrics.divide(mode.read(sums))["loss"])

    evaluation, confusion = evaluate(mode, state.params, architecture)
    return losses, evaluation, confusion, jax.device_get(mode.over_mesh(state))


def evaluate(
    mode: parallel.MeshMode | parallel.PmapMode, params: dict, architecture: str
) -> tuple[dict, np.ndarray | None]:
    """Returns the metrics of the first batch, and the confusion matrix of a classifier."""
    model, *_ = start(architecture)
    struct = loader.batch_struct(config_of(architecture), ROWS, LENGTH)

    def result_of(step: Callable, **options: int) -> Any:
        step = functools.partial(step, model=model, axis_name=mode.axis_name, **options)
        run = mode.compile(step, parameters.shapes(model), struct, donate=False)
        return mode.read(run(params, mode.put_batch(batches(architecture)[0])))

    sums = result_of(step_lib.eval_step, row_shards=mode.row_shards)
    if architecture != "encoder_classifier":
        return metrics.divide(sums), None
    return metrics.divide(sums), result_of(step_lib.confusion_step)


def key_biases(params: dict) -> dict[str, np.ndarray]:
    """Returns the biases of key projections.

    Their true gradient is 0, so that Adam follows rounding noise.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path): x
        for path, x in leaves
        if jax.tree_util.keystr(path).endswith("['key']['bias']")
    }


@pytest.mark.parametrize("architecture", [*CHOICES["model.architecture"], PACKED_PAIRS])
def test_the_rows_of_each_device_have_different_amounts_of_padding(architecture):
    for batch in batches(architecture):
        side = batch["source" if architecture == "encoder_classifier" else "target"]
        padding = [int((part == 0).sum()) for part in np.split(side, 8)]
        assert len(set(padding)) > 1
    assert MODEL.dropout > 0


@pytest.mark.parametrize("architecture", [*CHOICES["model.architecture"], PACKED_PAIRS])
def test_batches_have_the_shapes_and_types_that_steps_are_compiled_for(architecture):
    expected = loader.batch_struct(config_of(architecture), ROWS, LENGTH)
    for batch in batches(architecture):
        assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch) == expected


EVERY = [(arm, *job) for arm in ("mesh of 8", "pmap over 8") for job in JOBS]
IN_PLAIN = [("mesh of 8", *JOBS[3])]
ON_EIGHT = [
    pytest.param(*each, marks=[] if each in IN_PLAIN else [pytest.mark.slow]) for each in EVERY
]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(("arm", "architecture", "microbatches"), ON_EIGHT)
def test_the_losses_and_parameters_are_those_of_1_device(arm, architecture, microbatches):
    losses, evaluation, confusion, state = train(arm, architecture, microbatches)
    expected_losses, expected_evaluation, expected_confusion, expected_state = train(
        "one device", architecture, microbatches
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    np.testing.assert_array_equal(confusion, expected_confusion)
    noise = key_biases(expected_state.params)
    assert noise
    for tree, expected_tree in (
        (state.params, expected_state.params),
        (state.ema, expected_state.ema),
    ):
        leaves = dict(jax.tree_util.tree_leaves_with_path(tree))
        for path, expected in jax.tree_util.tree_leaves_with_path(expected_tree):
            name = jax.tree_util.keystr(path)
            if name not in noise:
                np.testing.assert_allclose(leaves[path], expected, atol=2e-4, err_msg=name)
    assert state.step == expected_state.step == STEPS
    np.testing.assert_array_equal(state.key_data, expected_state.key_data)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("arm", ARMS)
def test_a_loss_in_parts_is_the_same_on_every_arm(arm, monkeypatch):
    expected, *_ = train("one device", "encoder_decoder", 1)
    monkeypatch.setattr(losses_lib, "LOGITS_AT_ONCE", LENGTH * V)  # the logits of one row
    parts = []
    summed = loss_in_parts.summed

    def spy(*arguments, **options):
        parts.append(options["parts"])
        return summed(*arguments, **options)

    monkeypatch.setattr(loss_in_parts, "summed", spy)
    losses, *_ = train.__wrapped__(arm, "encoder_decoder", 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    # one row of each device at a time
    assert set(parts) == {ROWS if arm == "one device" else ROWS // 8}


def evaluate_untrained() -> tuple[dict, np.ndarray]:
    """Returns the metrics and the confusion matrix of the initial classifier, on 1 device."""
    mode, (*_, initial) = mode_of("one device"), start("encoder_classifier")
    return evaluate(mode, mode.put_state(initial.params), "encoder_classifier")


def evaluate_trained() -> tuple[dict, np.ndarray]:
    """Returns the same as `evaluate_untrained`, but after 20 steps."""
    _, evaluation, confusion, _ = train("one device", "encoder_classifier", 1)
    return evaluation, confusion


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(
    "evaluated", [evaluate_untrained, pytest.param(evaluate_trained, marks=pytest.mark.slow)]
)
def test_the_confusion_matrix_counts_every_text_of_the_batch_once(evaluated):
    evaluation, confusion = evaluated()
    classes, counts = np.unique(batches("encoder_classifier")[0]["label"], return_counts=True)
    assert confusion.sum(axis=1).tolist() == [
        dict(zip(classes, counts, strict=True)).get(c, 0) for c in range(CLASSES)
    ]
    assert np.trace(confusion) / confusion.sum() == pytest.approx(evaluation["accuracy"])


@functools.cache
def eval_step(architecture: str) -> tuple:
    """Returns the initial parameters, and the evaluation step on 1 device."""
    model, _, initial = start(architecture)
    return initial.params, jax.jit(functools.partial(step_lib.eval_step, model=model))


def eval_loss(architecture: str, batch: dict[str, np.ndarray]) -> float:
    params, run = eval_step(architecture)
    return metrics.divide(jax.device_get(run(params, batch)))["loss"]


COMPARED = pytest.mark.parametrize(
    "architecture", ["decoder_lm", pytest.param("encoder_decoder", marks=pytest.mark.slow)]
)


@pytest.mark.usefixtures("quickly_compiled")
@COMPARED
def test_the_first_loss_would_differ_without_dropout(architecture):
    """So the comparison above detects devices with different dropout."""
    losses, *_ = train("one device", architecture, 1)
    assert abs(eval_loss(architecture, batches(architecture)[0]) / losses[0] - 1) > 1e-3


@COMPARED
def test_a_mean_of_the_means_of_devices_would_differ(architecture):
    """The amounts of padding differ so much that equal weights of the devices change the loss."""
    batch = batches(architecture)[0]
    parts = [jax.tree.map(lambda x, i=i: np.split(x, 8)[i], batch) for i in range(8)]
    means = [eval_loss(architecture, part) for part in parts]
    assert abs(np.mean(means) / eval_loss(architecture, batch) - 1) > 1e-4


def test_a_mesh_has_the_given_number_of_devices_or_all():
    assert meshes.make_mesh(-1).size == len(jax.devices()) == 8
    assert list(meshes.make_mesh(3).devices.flat) == jax.devices()[:3]


def test_the_error_for_too_many_devices_has_both_numbers():
    with pytest.raises(
        ValueError,
        match=r"config\.parallel\.data: 9 devices asked for, there are 8; use -1 for all",
    ):
        meshes.make_mesh(9)


@pytest.mark.parametrize(("rows", "devices"), [(8, 8), (12, 6), (7, 7), (5, 5), (11, 1), (10, 5)])
def test_the_widest_mesh_is_the_largest_that_divides_the_rows_evenly(rows, devices):
    assert meshes.widest_mesh(rows).size == devices


@pytest.mark.parametrize(
    ("rows", "tensor", "data"), [(8, 2, 4), (12, 2, 4), (7, 2, 1), (8, 3, 2), (8, 8, 1)]
)
def test_groups_of_devices_with_one_model_divide_the_rows_evenly(rows, tensor, data):
    mesh = meshes.widest_mesh(rows, tensor)
    assert dict(mesh.shape) == {"data": data, "fsdp": 1, "tensor": tensor}


@pytest.mark.parametrize("tensor", [0, 9])
def test_a_tensor_larger_than_the_number_of_devices_is_an_error(tensor):
    with pytest.raises(
        ValueError,
        match=rf"^tensor: expected 1 to 8, .*, got {tensor}; JAX_NUM_CPU_DEVICES=2 makes",
    ):
        meshes.widest_mesh(8, tensor)


@pytest.mark.parametrize(
    ("devices", "rows", "microbatches"), [(8, 12, 1), (3, 8, 1), (4, 8, 4), (1, 8, 3)]
)
def test_rows_that_devices_and_microbatches_do_not_divide_are_an_error(devices, rows, microbatches):
    multiple = devices * microbatches
    with pytest.raises(
        ValueError,
        match=rf"config\.data\.rows_multiple: {rows} rows .* make it a multiple of {multiple}",
    ):
        meshes.check_rows(
            meshes.make_mesh(devices), rows_multiple=rows, accumulate_steps=microbatches
        )


@pytest.mark.parametrize(
    ("devices", "rows", "microbatches"), [(8, 8, 1), (4, 8, 2), (1, 8, 8), (3, 12, 2)]
)
def test_rows_that_devices_and_microbatches_divide_are_no_error(devices, rows, microbatches):
    meshes.check_rows(meshes.make_mesh(devices), rows_multiple=rows, accumulate_steps=microbatches)


@pytest.mark.parametrize(
    "given", [("host:1", None, None), (None, 2, None), (None, None, 0), ("host:1", 2, None)]
)
def test_some_of_the_process_flags_without_the_others_are_an_error(given):
    with pytest.raises(ValueError, match="go together: give all three"):
        processes.initialize(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host", 2, 0), r"^--coordinator_address: expected HOST:PORT of process 0, got 'host'"),
        (
            ("host:1", 2, 2),
            r"^--process_id: expected 0 to --num_processes - 1, got 2 of 2 processes",
        ),
        (("host:1", 2, -1), r"^--process_id: .* got -1 of 2"),
        (("host:1", 0, 0), r"^--process_id: .* got 0 of 0"),
    ],
)
def test_invalid_process_flags_are_an_error(given, message):
    with pytest.raises(ValueError, match=message):
        processes.initialize(*given)


def test_without_flags_or_a_cluster_nothing_is_initialized(monkeypatch):
    called = []
    monkeypatch.setattr(
        jax.distributed,
        "initialize",
        lambda *arguments, **options: called.append((arguments, options)),
    )
    processes.initialize(None, None, None)
    assert called == []
    monkeypatch.setenv("SLURM_NTASKS", "2")
    processes.initialize(None, None, None)  # inside an allocation, but not started by srun
    assert called == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    processes.initialize(None, 1, None)  # a run of 1 process
    assert called == []
    processes.initialize(None, None, None)
    assert called == [((), {"heartbeat_timeout_seconds": processes.HEARTBEAT_TIMEOUT})]


def test_every_process_gets_the_largest_number_of_all():
    assert int(parallel.largest(0, meshes.make_mesh(8))) == 0
    assert int(parallel.largest(15, meshes.make_mesh(8))) == 15


ROWS_OF_TWO = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from flaxformer_lite.training import meshes, parallel, processes
from flaxformer_lite.training.sharding import AXES, WHOLE

address, count, number = (each.partition("=")[2] for each in sys.argv[1:])
processes.initialize(address, int(count), int(number))
order = np.array(jax.devices()).reshape(2, 4).T  # as in pods: each process has every other part
mesh = Mesh(order.reshape(8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
index, parts = meshes.rows_of_process(mesh)
rows = np.split(np.arange(16, dtype=np.int32), parts)[index]
put = parallel.shard_rows({"row": rows, "double": 2 * rows}, mesh)
whole = jax.jit(lambda batch: batch, out_shardings=NamedSharding(mesh, WHOLE))(put)
assert sorted(np.asarray(whole["row"])) == list(range(16)), whole
assert (np.asarray(whole["double"]) == 2 * np.asarray(whole["row"])).all()
assert not (np.asarray(whole["row"]) == np.arange(16)).all()  # so the parts do interleave
print("each row once")
"""


def test_processes_whose_devices_interleave_provide_each_row_once():
    pipes = {"stdout": runs.subprocess.PIPE, "stderr": runs.subprocess.STDOUT}
    started = runs.processes(2, script=["-c", ROWS_OF_TWO], **pipes)
    outputs = [process.communicate(timeout=120)[0].decode() for process in started]
    assert [output.splitlines()[-1] for output in outputs] == ["each row once"] * 2, outputs


# Whole runs in every way, and each checkpoint resumed in other ways.

RUN = {
    **runs.TINY,
    "train.num_steps": STEPS,
    "train.eval_every": 10,
    "train.checkpoint_every": 10,
    "train.keep_newest": 3,
    "train.average": "last:2",
    "train.ema_decay": 0.9,
}
ONE_PROCESS = {
    "one device": {"parallel.data": 1},
    "mesh of 8": {"parallel.data": 8},
    "pmap over 8": {"parallel.data": 8, "parallel.mode": "pmap"},
}
SPLIT = "split over 2 x 4"  # so that no process has the whole state
TWO_PROCESSES = {
    "mesh of 2 x 4": {"parallel.data": 8},
    SPLIT: {"parallel.data": 1, "parallel.fsdp": 4, "parallel.tensor": 2},
    "pmap over 2 x 4": {"parallel.data": 8, "parallel.mode": "pmap"},
}
SPLIT_BY_FOUR, ACROSS = "split over 4 x 2", "tensor across processes"
FOUR_PROCESSES = {
    SPLIT_BY_FOUR: {"parallel.data": 2, "parallel.fsdp": 2, "parallel.tensor": 2},
    ACROSS: {"parallel.data": 2, "parallel.tensor": 4},
}
EVERY_WAY = {**ONE_PROCESS, **TWO_PROCESSES, **FOUR_PROCESSES}
# (the way that saves a checkpoint, the way that resumes from it): each way is on both sides.
# test_sharding.py has the other ways of a split state.
RESUMED = [
    ("mesh of 2 x 4", "one device"),
    ("pmap over 2 x 4", "mesh of 8"),
    ("mesh of 8", "pmap over 2 x 4"),
    ("pmap over 8", "mesh of 2 x 4"),
    ("one device", "pmap over 8"),
    ("one device", SPLIT),
    (SPLIT, "mesh of 8"),
    (SPLIT, SPLIT_BY_FOUR),
    (SPLIT_BY_FOUR, "one device"),
    (SPLIT, ACROSS),
    (ACROSS, "one device"),
]


def half_of(workdir: Path, target: Path) -> Path:
    """Returns a copy of a finished run, as it was at step 10."""
    shutil.copytree(workdir, target)
    shutil.rmtree(target / "checkpoints" / str(STEPS))
    lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if json.loads(line)["step"] <= 10 and json.loads(line)["split"] != "test"
    ]
    (target / "metrics.jsonl").write_text("".join(kept))
    return target


def train_and_resume(folder: dict) -> None:
    """Does the whole runs in several processes, and resumes each pair of RESUMED from step 10."""
    for count, ways in ((2, TWO_PROCESSES), (4, FOUR_PROCESSES)):
        jobs = [(folder[name], changes) for name, changes in ways.items()]
        for saver, reader in RESUMED:
            if reader in ways:
                half_of(folder[saver], folder[saver, reader])
                jobs.append((folder[saver, reader], ways[reader]))
        runs.fit_in_processes(count, [(workdir, {**RUN, **changes}) for workdir, changes in jobs])
    for saver, reader in RESUMED:
        if reader in ONE_PROCESS:
            half_of(folder[saver], folder[saver, reader])
            assert runs.fit(folder[saver, reader], {**RUN, **EVERY_WAY[reader]}) == 0


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str | tuple[str, str], Path]:
    """The workdir of a whole run in every way, and of each pair of RESUMED."""
    root = tmp_path_factory.mktemp("ways")
    folder = {name: root / name for name in EVERY_WAY} | {
        pair: root / " then ".join(pair) for pair in RESUMED
    }
    jax.config.update("jax_disable_most_optimizations", True)  # as in `runs.processes`
    try:
        for name, changes in ONE_PROCESS.items():
            assert runs.fit(folder[name], {**RUN, **changes}) == 0
        train_and_resume(folder)
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY_WAY if name != "one device"])
def test_a_whole_run_logs_the_losses_of_1_device(ways, name):
    expected, actual = runs.losses(ways["one device"]), runs.losses(ways[name])
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(expected, rel=1e-5)
    for split in ("validation", "test"):
        pairs = zip(
            runs.lines_of(ways[name], split), runs.lines_of(ways["one device"], split), strict=True
        )
        for one, other in pairs:
            assert (one["step"], one["loss"]) == (
                other["step"],
                pytest.approx(other["loss"], rel=1e-5),
            )


def assert_resumed(ways: dict, pair: tuple[str, str]) -> None:
    expected, actual = runs.losses(ways["one device"]), runs.losses(ways[pair])
    assert list(actual) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert (ways[pair] / "checkpoints" / str(STEPS)).is_dir()
    events = list(ways[pair].glob("events.*"))
    assert len(events) == 2  # one for each start, so it did resume


@pytest.mark.slow
@pytest.mark.parametrize("pair", RESUMED, ids=" then ".join)
def test_a_checkpoint_of_one_way_resumes_in_another(ways, pair):
    assert_resumed(ways, pair)
