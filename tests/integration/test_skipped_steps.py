"""Runs that skip steps whose loss is not finite: the log, the limit, and the error after it."""

import json

import numpy as np
import pytest
import runs

from flaxformer_lite.training.loop import Diverged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

# The first update makes the parameters so large that every later loss is NaN.
BROKEN = {
    **runs.TINY,
    "model.architecture": "decoder_lm",
    "optim.schedule": "inverse_sqrt",
    "optim.learning_rate": 1e30,
    "train.num_steps": 8,
    "train.eval_every": 8,
    "train.checkpoint_every": 2,
    "train.log_every": 1,
    "train.ema_decay": 0.9,
}


def test_a_run_ends_after_the_tolerated_steps_and_saves_no_nan(tmp_path):
    tolerant = {**BROKEN, "optim.nan_tolerance": 3}
    with pytest.raises(Diverged) as error:
        runs.fit(tmp_path / "run", tolerant)
    assert "step 5: loss nan" in str(error.value)
    assert "after 3 skipped ones (optim.nan_tolerance): training has diverged" in str(error.value)
    lines = runs.lines_of(tmp_path / "run", "train")
    assert [line["skipped"] for line in lines] == [0, 1, 2, 3]
    assert [line["loss"] is None for line in lines] == [False, True, True, True]
    assert not any("non_finite" in line for line in lines)
    steps = sorted(int(path.name) for path in (tmp_path / "run/checkpoints").glob("[0-9]*"))
    assert steps[-1] == 4
    for number in steps:
        for name, array in runs.checkpoint_arrays(tmp_path / "run", number).items():
            assert np.isfinite(array).all(), name


def test_a_run_without_tolerance_ends_at_the_first_such_step_and_logs_no_count(tmp_path):
    with pytest.raises(Diverged, match=r"^step 2: loss nan, gradient norm nan: training has"):
        runs.fit(tmp_path / "run", BROKEN)
    logged = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1]
    assert "skipped" not in json.loads(logged[0])
