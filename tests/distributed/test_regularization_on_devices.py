"""Layer drop, the z-loss and skipped updates on several devices and processes, and after a stop."""

import dataclasses
import functools
import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.training import meshes, metrics, parallel, step
from flaxformer_lite.training.spikes import WARMUP

pytestmark = pytest.mark.slow

ROWS, LENGTH, V = 16, 7, 40
STEPS = WARMUP + 4
ONE_LABEL = WARMUP + 1  # the step whose batch has one label, and a gradient of a high norm
MODEL = ModelConfig(
    architecture="decoder_lm",
    activation="gelu",
    vocab_size=V,
    d_model=16,
    num_heads=4,
    d_ff=32,
    num_decoder_layers=2,
    max_length=LENGTH,
    layer_drop=0.4,
    feed_forward_dropout=0.2,
)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(rows_multiple=ROWS),
    optim=OptimConfig(
        schedule="constant",
        learning_rate=1e-3,
        warmup_steps=1,
        accumulate_steps=2,
        skip_spikes=6.0,
        nan_tolerance=1,
    ),
    train=TrainConfig(z_loss=0.01, ema_decay=0.9),
)
ARMS = {
    "one device": ("mesh", 1, 1, 1),
    "mesh of 8": ("mesh", 8, 1, 1),
    "pmap over 8": ("pmap", 8, 1, 1),
    "split over 8": ("mesh", 2, 2, 2),
}


@functools.cache
def batches() -> list[dict[str, np.ndarray]]:
    rng, row = np.random.default_rng(3), np.arange(ROWS, dtype=np.int32)
    target_NBT = rng.integers(4, V, (STEPS, ROWS, LENGTH), dtype=np.int32)
    target_NBT[:, ::3, LENGTH - 2 :] = 0
    target_NBT[ONE_LABEL, 1:], target_NBT[ONE_LABEL, 0, 1:] = 0, 0
    return [{"target": target_BT, "row": row} for target_BT in target_NBT]


@functools.cache
def trained(arm: str, **changes) -> tuple[list[dict[str, float]], parallel.Tree]:
    """Returns the metrics of all steps, and the final state on the host."""
    mode_name, *sizes = ARMS[arm]
    mode = parallel.MODES[mode_name](meshes.make_mesh(*sizes))
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, **changes))
    train_step, initial_state = step.of_config(
        config, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    state = mode.make_state(initial_state)
    struct = loader.batch_struct(config, ROWS, LENGTH)
    run = mode.compile(train_step, jax.eval_shape(initial_state), struct, donate=True)
    values = []
    for batch in batches():
        state, sums = run(state, mode.put_batch(batch))
        values.append(metrics.divide(mode.read(sums)))
    return values, jax.device_get(mode.over_mesh(state))


def column(values: list[dict[str, float]], name: str) -> list[float]:
    return [each[name] for each in values]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "one device"])
def test_the_losses_and_skipped_steps_are_those_of_1_device(arm):
    expected, expected_state = trained("one device")
    values, state = trained(arm)
    np.testing.assert_allclose(column(values, "loss"), column(expected, "loss"), rtol=2e-5)
    assert column(values, "skipped") == column(expected, "skipped")
    assert column(values, "skipped") == [float(n >= ONE_LABEL) for n in range(STEPS)]
    for name in ("mean", "variance", "accepted", "spikes", "non_finite"):
        statistic, of_one = (getattr(each.opt_state, name) for each in (state, expected_state))
        np.testing.assert_allclose(statistic, of_one, rtol=1e-3)


@pytest.mark.usefixtures("quickly_compiled")
def test_the_losses_would_differ_without_layer_drop():
    """So the test above detects devices that skip different layers."""
    first, without = (trained("one device", **each)[0] for each in ({}, dict(layer_drop=0.0)))
    assert abs(first[0]["loss"] / without[0]["loss"] - 1) > 1e-3


# Whole runs. With a limit of half a deviation, many steps after the warmup are skipped.

RUN = {
    **runs.TINY,
    "model.architecture": "decoder_lm",
    "model.num_decoder_layers": 2,
    "model.layer_drop": 0.3,
    "model.tie_layers": True,
    "train.z_loss": 1e-3,
    "optim.skip_spikes": 0.5,
    "optim.learning_rate": 1e-5,  # so that the norms do not fall
    "train.num_steps": WARMUP + 14,
    "train.eval_every": WARMUP + 14,
    "train.checkpoint_every": 32,
    "train.log_every": 1,
}


def skipped(workdir: Path) -> dict[int, float]:
    return {line["step"]: line["skipped"] for line in runs.lines_of(workdir, "train")}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert runs.fit(workdir, RUN) == 0
    return workdir


def test_a_resumed_run_skips_the_same_steps_and_is_the_same_bit_for_bit(
    whole_run, tmp_path, monkeypatch
):
    """The run stops between two skipped steps."""
    of_step = skipped(whole_run)
    first = min(step for step, count in of_step.items() if count)
    stop = next(step for step, count in of_step.items() if step > first and count == 1)
    assert of_step[max(of_step)] > of_step[stop] > of_step[WARMUP] == 0
    write = metrics_log.MetricsWriter.write

    def write_and_signal(writer, step, *line, **words) -> None:
        write(writer, step, *line, **words)
        if step == stop:
            signal.raise_signal(signal.SIGTERM)

    resumed = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(metrics_log.MetricsWriter, "write", write_and_signal)
        assert runs.fit(resumed, RUN) == 143
    assert stop <= runs.last_step(resumed) < RUN["train.num_steps"]
    assert runs.fit(resumed, RUN) == 0
    assert skipped(resumed) == of_step
    assert runs.losses(resumed) == runs.losses(whole_run)
    last = RUN["train.num_steps"]
    runs.assert_same_arrays(
        runs.checkpoint_arrays(resumed, last), runs.checkpoint_arrays(whole_run, last)
    )


def test_2_processes_have_the_losses_of_1_device(whole_run, tmp_path):
    changes = {**RUN, "parallel.data": 8, "train.num_steps": 4, "train.eval_every": 4}
    work = json.dumps([[str(tmp_path / "run"), changes]])
    script = [str(Path(__file__).parent.parent / "support/fit_jobs.py")]
    pipes = {"stdout": runs.subprocess.PIPE, "stderr": runs.subprocess.STDOUT}
    started = runs.processes(2, work, script=script, **pipes)
    try:
        outputs = [process.communicate(timeout=300)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    losses, expected = runs.losses(tmp_path / "run"), runs.losses(whole_run)
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)
    assert len(losses) == 4
