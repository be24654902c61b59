"""One device, eight under jit, eight under pmap, and two processes of four: the same run."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import CHOICES, Config, DataConfig, ModelConfig, OptimConfig
from flaxformer_lite.data.batches import batch_shapes
from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.training import loss_in_parts, metrics, optim, parallel
from flaxformer_lite.training import losses as losses_lib
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

STEPS, ROWS, LENGTH, V, CLASSES = 20, 16, 13, 37, 5
ARMS = {"one device": ("mesh", 1), "mesh of 8": ("mesh", 8), "pmap over 8": ("pmap", 8)}
# GELU, as ReLU's gradient is one thing or another where rounding decides whether a number is above 0: now and then, a
# run on other devices is then 1e-4 apart.
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
# What is trained, in how many microbatches; the texts of the language model are packed.
PACKED_PAIRS = "packed pairs"  # of the encoder_decoder
JOBS = [("encoder_decoder", 1), (PACKED_PAIRS, 2), ("encoder_classifier", 1), ("decoder_lm", 1)]


def config_of(architecture: str) -> Config:
    packing = architecture in (PACKED_PAIRS, "decoder_lm")
    architecture = "encoder_decoder" if architecture == PACKED_PAIRS else architecture
    model = dataclasses.replace(MODEL, architecture=architecture, num_classes=CLASSES)
    return Config(model=model, data=DataConfig(packing=packing))


@functools.cache
def batches(architecture: str = "encoder_decoder") -> list[dict[str, np.ndarray]]:
    """Random examples of every length, so that each row of a batch has a padding of its own."""
    rng = np.random.default_rng(3)
    source, target = ([rng.integers(4, V, rng.integers(1, 12), dtype=np.int32) for _ in range(211)] for _ in range(2))
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
    """A model, its optimizer, and the state at the start, on the host."""
    model = transformer.build_model(config_of(architecture).model)
    schedule = {"d_model": MODEL.d_model, "num_steps": STEPS}
    optimizer = optim.make_optimizer(OptimConfig(schedule="linear", learning_rate=3e-3, warmup_steps=5), **schedule)
    initial = jax.jit(functools.partial(state_lib.init_state, model, optimizer, seed=5, ema=True))()
    return model, optimizer, jax.device_get(initial)


@functools.cache
def train(arm: str, architecture: str, microbatches: int) -> tuple[list[float], dict, np.ndarray | None, dict]:
    """Losses of 20 steps; of the first batch its metrics, and a classifier's mistakes; the final state on the host."""
    mode_name, num_devices = ARMS[arm]
    model, optimizer, initial = start(architecture)
    mode = parallel.MODES[mode_name](parallel.make_mesh(num_devices))
    state, struct = mode.put_state(initial), batch_shapes.struct(config_of(architecture), ROWS, LENGTH)

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
    assert not re.search("all-gather|all-to-all|collective-permute", run.as_text())  # devices exchange only sums
    losses = []
    for batch in batches(architecture):
        state, sums = run(state, mode.put_batch(batch))
        losses.append(metrics.divide(mode.read(sums))["loss"])

    def measured_by(step):
        step = functools.partial(step, model=model, axis_name=mode.axis_name)
        if step.func is step_lib.eval_step:
            step = functools.partial(step, row_shards=mode.row_shards)
        measure = mode.compile(step, parameters.shapes(model), struct, donate=False)
        return mode.read(measure(state.params, mode.put_batch(batches(architecture)[0])))

    mistakes = measured_by(step_lib.confusion_step) if architecture == "encoder_classifier" else None
    return losses, metrics.divide(measured_by(step_lib.eval_step)), mistakes, jax.device_get(mode.over_mesh(state))


def key_biases(params: dict) -> dict[str, np.ndarray]:
    """Biases of key projections: their true gradient is zero, so Adam makes steps of their rounding noise."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path): x for path, x in leaves if jax.tree_util.keystr(path).endswith("['key']['bias']")
    }


@pytest.mark.parametrize("architecture", [*CHOICES["model.architecture"], PACKED_PAIRS])
def test_the_rows_of_each_device_have_different_amounts_of_padding(architecture):
    for batch in batches(architecture):
        side = batch["source" if architecture == "encoder_classifier" else "target"]
        padding = [int((part == 0).sum()) for part in np.split(side, 8)]
        assert len(set(padding)) > 1
    assert MODEL.dropout > 0


@pytest.mark.parametrize("architecture", [*CHOICES["model.architecture"], PACKED_PAIRS])
def test_steps_are_compiled_for_the_shapes_and_types_that_batches_have(architecture):
    expected = batch_shapes.struct(config_of(architecture), ROWS, LENGTH)
    for batch in batches(architecture):
        assert jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch) == expected


# Under pmap a device runs what one device alone runs: one job shows that its sums meet.
EVERY = [(arm, *job) for arm in ("mesh of 8", "pmap over 8") for job in JOBS]
IN_PLAIN = [("mesh of 8", *JOBS[3]), ("pmap over 8", *JOBS[0])]
ON_EIGHT = [pytest.param(*each, marks=[] if each in IN_PLAIN else [pytest.mark.slow]) for each in EVERY]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(("arm", "architecture", "microbatches"), ON_EIGHT)
def test_the_losses_are_those_of_one_device(arm, architecture, microbatches):
    losses, measured, mistakes, state = train(arm, architecture, microbatches)
    expected_losses, expected_measured, expected_mistakes, expected_state = train(
        "one device", architecture, microbatches
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert measured == pytest.approx(expected_measured, rel=1e-5)
    np.testing.assert_array_equal(mistakes, expected_mistakes)
    noise = key_biases(expected_state.params)
    assert noise
    for tree, expected_tree in ((state.params, expected_state.params), (state.ema, expected_state.ema)):
        for path, expected in jax.tree_util.tree_leaves_with_path(expected_tree):
            if jax.tree_util.keystr(path) not in noise:
                actual = dict(jax.tree_util.tree_leaves_with_path(tree))[path]
                np.testing.assert_allclose(actual, expected, atol=2e-4, err_msg=jax.tree_util.keystr(path))
    assert state.step == expected_state.step == STEPS
    np.testing.assert_array_equal(state.key_data, expected_state.key_data)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("arm", ARMS)
def test_a_loss_that_is_taken_in_parts_is_the_same_on_every_arm(arm, monkeypatch):
    expected, *_ = train("one device", "encoder_decoder", 1)
    monkeypatch.setattr(losses_lib, "LOGITS_AT_ONCE", LENGTH * V)  # the logits of one row
    parts = []
    taken = loss_in_parts.summed
    spy = lambda *args, **options: (parts.append(options["parts"]), taken(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(loss_in_parts, "summed", spy)
    losses, *_ = train.__wrapped__(arm, "encoder_decoder", 1)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert set(parts) == {ROWS if arm == "one device" else ROWS // 8}  # every device takes its rows one by one


@pytest.mark.usefixtures("quickly_compiled")
def test_the_table_of_mistakes_holds_every_text_of_the_batch_once():
    _, measured, mistakes, _ = train("one device", "encoder_classifier", 1)
    classes, counts = np.unique(batches("encoder_classifier")[0]["label"], return_counts=True)
    assert mistakes.sum(axis=1).tolist() == [dict(zip(classes, counts, strict=True)).get(c, 0) for c in range(CLASSES)]
    assert np.trace(mistakes) / mistakes.sum() == pytest.approx(measured["accuracy"])


@functools.cache
def eval_step() -> tuple:
    """The initial parameters, and the evaluation step on one device."""
    model, _, initial = start("encoder_decoder")
    return initial.params, jax.jit(functools.partial(step_lib.eval_step, model=model))


def eval_loss(batch: dict[str, np.ndarray]) -> float:
    params, run = eval_step()
    return metrics.divide(jax.device_get(run(params, batch)))["loss"]


@pytest.mark.usefixtures("quickly_compiled")
def test_the_first_loss_would_differ_without_dropout():
    """So the comparison above sees whether devices drop the same elements."""
    losses, *_ = train("one device", "encoder_decoder", 1)
    assert abs(eval_loss(batches()[0]) / losses[0] - 1) > 1e-3


def test_a_mean_of_the_devices_means_would_be_noticed():
    """Padding differs so much that weighing devices equally moves the loss by far more than the tolerance."""
    batch = batches()[0]
    means = [eval_loss(jax.tree.map(lambda x, i=i: np.split(x, 8)[i], batch)) for i in range(8)]
    assert abs(np.mean(means) / eval_loss(batch) - 1) > 1e-4


def test_a_mesh_has_the_devices_asked_for_or_all():
    assert parallel.make_mesh(-1).size == len(jax.devices()) == 8
    assert list(parallel.make_mesh(3).devices.flat) == jax.devices()[:3]


def test_more_devices_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(ValueError, match=r"config\.parallel\.data: 9 devices asked for, there are 8; use -1 for all"):
        parallel.make_mesh(9)


@pytest.mark.parametrize(("rows", "devices"), [(8, 8), (12, 6), (7, 7), (5, 5), (11, 1), (10, 5)])
def test_the_widest_mesh_is_the_largest_that_shares_the_rows_evenly(rows, devices):
    assert parallel.widest_mesh(rows).size == devices


@pytest.mark.parametrize(("rows", "tensor", "shares"), [(8, 2, 4), (12, 2, 4), (7, 2, 1), (8, 3, 2), (8, 8, 1)])
def test_groups_of_devices_that_share_a_model_share_the_rows_evenly(rows, tensor, shares):
    mesh = parallel.widest_mesh(rows, tensor)
    assert dict(mesh.shape) == {"data": shares, "fsdp": 1, "tensor": tensor}


@pytest.mark.parametrize("tensor", [0, 9])
def test_a_model_is_not_shared_by_more_devices_than_there_are(tensor):
    with pytest.raises(ValueError, match=rf"^tensor: expected 1 to 8, .*, got {tensor}; JAX_NUM_CPU_DEVICES=2 makes"):
        parallel.widest_mesh(8, tensor)


@pytest.mark.parametrize(("devices", "rows", "microbatches"), [(8, 12, 1), (3, 8, 1), (4, 8, 4), (1, 8, 3)])
def test_rows_that_devices_and_microbatches_cannot_share_are_an_error(devices, rows, microbatches):
    multiple = devices * microbatches
    with pytest.raises(
        ValueError, match=rf"config\.data\.rows_multiple: {rows} rows .* make it a multiple of {multiple}"
    ):
        parallel.check_rows(parallel.make_mesh(devices), rows_multiple=rows, accumulate_steps=microbatches)


@pytest.mark.parametrize(("devices", "rows", "microbatches"), [(8, 8, 1), (4, 8, 2), (1, 8, 8), (3, 12, 2)])
def test_rows_that_can_be_shared_are_no_error(devices, rows, microbatches):
    parallel.check_rows(parallel.make_mesh(devices), rows_multiple=rows, accumulate_steps=microbatches)


@pytest.mark.parametrize("given", [("host:1", None, None), (None, 2, None), (None, None, 0), ("host:1", 2, None)])
def test_half_of_the_process_flags_is_an_error(given):
    with pytest.raises(ValueError, match="go together: give all three"):
        parallel.initialize(*given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("host", 2, 0), r"^--coordinator_address: expected HOST:PORT of process 0, got 'host'"),
        (("host:1", 2, 2), r"^--process_id: expected 0 to --num_processes - 1, got 2 of 2 processes"),
        (("host:1", 2, -1), r"^--process_id: .* got -1 of 2"),
        (("host:1", 0, 0), r"^--process_id: .* got 0 of 0"),
    ],
)
def test_wrong_process_flags_are_an_error(given, says):
    with pytest.raises(ValueError, match=says):
        parallel.initialize(*given)


def test_without_flags_or_a_cluster_nothing_is_initialized(monkeypatch):
    called = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *arguments, **options: called.append((arguments, options))
    )
    parallel.initialize(None, None, None)
    assert called == []
    monkeypatch.setenv("SLURM_NTASKS", "2")
    parallel.initialize(None, None, None)  # inside an allocation, but not started by srun
    assert called == []
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    parallel.initialize(None, 1, None)  # said to be alone
    assert called == []
    parallel.initialize(None, None, None)
    assert called == [((), {"heartbeat_timeout_seconds": parallel.SILENCE})]


def test_the_largest_number_of_all_processes_is_known_to_each():
    assert int(parallel.largest(0, parallel.make_mesh(8))) == 0
    assert int(parallel.largest(15, parallel.make_mesh(8))) == 15


ROWS_OF_TWO = """
import sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from flaxformer_lite.training import parallel
from flaxformer_lite.training.sharding import AXES, WHOLE

address, count, number = (each.partition("=")[2] for each in sys.argv[1:])
parallel.initialize(address, int(count), int(number))
order = np.array(jax.devices()).reshape(2, 4).T  # as pods have it: each process holds every other part of the rows
mesh = Mesh(order.reshape(8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3)
index, parts = parallel.rows_of_process(mesh)
rows = np.split(np.arange(16, dtype=np.int32), parts)[index]
put = parallel.shard_rows({"row": rows, "twice": 2 * rows}, mesh)
whole = jax.jit(lambda batch: batch, out_shardings=NamedSharding(mesh, WHOLE))(put)
assert sorted(np.asarray(whole["row"])) == list(range(16)), whole
assert (np.asarray(whole["twice"]) == 2 * np.asarray(whole["row"])).all()
assert not (np.asarray(whole["row"]) == np.arange(16)).all()  # so the parts do interleave
print("each row once")
"""


def test_processes_whose_devices_interleave_provide_each_row_once():
    pipes = {"stdout": runs.subprocess.PIPE, "stderr": runs.subprocess.STDOUT}
    processes = runs.processes(2, script=["-c", ROWS_OF_TWO], **pipes)
    outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    assert [output.splitlines()[-1] for output in outputs] == ["each row once"] * 2, outputs


# Whole runs: five ways to train, and each checkpoint taken up by others.

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
SPLIT = "split over 2 x 4"  # so that no process holds the whole state
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
# Who wrote a checkpoint, and who goes on from it; every other pair is left to the slow test.
TAKEN_UP = [
    ("mesh of 2 x 4", "one device"),
    ("pmap over 2 x 4", "mesh of 8"),
    ("pmap over 8", "mesh of 2 x 4"),
    ("one device", "pmap over 8"),
    ("one device", SPLIT),
    (SPLIT, "mesh of 8"),
    (SPLIT, SPLIT_BY_FOUR),
    (SPLIT_BY_FOUR, "one device"),
    (SPLIT, ACROSS),
    (ACROSS, "one device"),
]
# What is split goes on in every other way in test_sharding.py, and is made of what pmap held whole here.
OTHER_PAIRS = [
    (a, b)
    for a in EVERY_WAY
    for b in EVERY_WAY
    if a != b and (a, b) not in TAKEN_UP and not {SPLIT, SPLIT_BY_FOUR, ACROSS} & {a, b}
]
OTHER_PAIRS += [("pmap over 2 x 4", SPLIT)]


def half_of(workdir: Path, target: Path) -> Path:
    """A copy of a finished run as it stood at step 10."""
    shutil.copytree(workdir, target)
    shutil.rmtree(target / "checkpoints" / str(STEPS))
    lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 10 and json.loads(line)["split"] != "test"]
    (target / "metrics.jsonl").write_text("".join(kept))
    return target


def fit_in_processes(count: int, jobs: list[tuple[Path, dict]]) -> None:
    """Several fits, one after another, in the same processes with eight devices together."""
    work = json.dumps([[str(workdir), {**RUN, **changes}] for workdir, changes in jobs])
    pipes = {"stdout": runs.subprocess.PIPE, "stderr": runs.subprocess.STDOUT}
    processes = runs.processes(count, work, script=[str(Path(__file__).with_name("fit_jobs.py"))], **pipes)
    try:
        outputs = [process.communicate(timeout=600)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = "\n".join(output[-3000:] for output in outputs)
    assert [process.returncode for process in processes] == [0] * count, told


def take_up(folder: dict, pairs: list[tuple[str, str]], *, first: bool = False) -> None:
    """Goes on from the tenth step of each first of `pairs` in the way of the second.

    `first`: before that, a whole run in each way of several processes.
    """
    for count, ways in ((2, TWO_PROCESSES), (4, FOUR_PROCESSES)):
        jobs = [(folder[name], changes) for name, changes in ways.items() if first]
        for writer, reader in pairs:
            if reader in ways:
                half_of(folder[writer], folder[writer, reader])
                jobs.append((folder[writer, reader], ways[reader]))
        if jobs:
            fit_in_processes(count, jobs)
    for writer, reader in pairs:
        if reader in ONE_PROCESS:
            half_of(folder[writer], folder[writer, reader])
            assert runs.fit(folder[writer, reader], {**RUN, **EVERY_WAY[reader]}) == 0


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str | tuple[str, str], Path]:
    """The workdir of a whole run in every way, and of each taken up by another after its tenth step."""
    root = tmp_path_factory.mktemp("ways")
    pairs = TAKEN_UP + OTHER_PAIRS
    folder = {name: root / name for name in EVERY_WAY} | {pair: root / " then ".join(pair) for pair in pairs}
    for name, changes in ONE_PROCESS.items():
        assert runs.fit(folder[name], {**RUN, **changes}) == 0
    take_up(folder, TAKEN_UP, first=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY_WAY if name != "one device"])
def test_a_whole_run_logs_the_losses_of_one_device(ways, name):
    expected, actual = runs.losses(ways["one device"]), runs.losses(ways[name])
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(expected, rel=1e-5)
    for split in ("validation", "test"):
        pairs = zip(runs.lines_of(ways[name], split), runs.lines_of(ways["one device"], split), strict=True)
        for one, other in pairs:
            assert (one["step"], one["loss"]) == (other["step"], pytest.approx(other["loss"], rel=1e-5))


def assert_went_on(ways: dict, pair: tuple[str, str]) -> None:
    expected, actual = runs.losses(ways["one device"]), runs.losses(ways[pair])
    assert list(actual) == list(range(1, STEPS + 1))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert (ways[pair] / "checkpoints" / str(STEPS)).is_dir()
    events = list(ways[pair].glob("events.*"))
    assert len(events) == 2  # one a start, so it did go on


@pytest.mark.slow
@pytest.mark.parametrize("pair", TAKEN_UP, ids=" then ".join)
def test_a_checkpoint_written_in_one_way_goes_on_in_another(ways, pair):
    assert_went_on(ways, pair)


@pytest.mark.slow
def test_a_checkpoint_written_in_any_way_goes_on_in_any_other(ways):
    take_up(ways, OTHER_PAIRS)
    for pair in OTHER_PAIRS:
        assert_went_on(ways, pair)
