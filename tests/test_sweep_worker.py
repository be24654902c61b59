"""A worker when something fails around it: the storage, the start of a process, a run that does not get on.

The trainings are short scripts that write what a training logs; whole sweeps are in test_sweep.py.
"""

import os
import sys

import pytest

from flaxformer_lite.sweep import process, space
from flaxformer_lite.sweep import study as study_lib
from flaxformer_lite.sweep import worker as worker_lib
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.study import Study
from flaxformer_lite.sweep.worker import Worker

SWEEP = """
from flaxformer_lite.config import default_config as get_config
SWEEP = {"seeds": (0, 5)}
def points(config):
    return [{"model.d_ff": 64}, {"model.d_ff": 128}]
"""
# What `train` is told, as (seed, workdir); then a line of the log for each evaluation.
TRAINING = """
import json, os, pathlib, re, signal, sys, time
words = " ".join(sys.argv)
seed, workdir = int(re.search(r"train.seed=(\\d+)", words)[1]), pathlib.Path(re.search(r"--workdir=(\\S+)", words)[1])
workdir.mkdir(exist_ok=True)
def log(step, split, **values):
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "split": split, "seconds": 1.0, **values}) + "\\n")
"""
WELL = 'log(10, "train", loss=3.0)\nlog(10, "validation", loss=2.0 + seed)\n'


@pytest.fixture
def sweep_with(tmp_path, monkeypatch):
    """Runs a sweep of two points and two seeds with a training that does what it is given."""
    monkeypatch.setattr(worker_lib, "NAP", 0.02)
    monkeypatch.setattr(worker_lib, "LOOK", 0.05)
    opened = []

    def prepare(training):
        (tmp_path / "widths.py").write_text(SWEEP)
        (tmp_path / "training.py").write_text(TRAINING + training)
        monkeypatch.setattr(process, "TRAIN", (sys.executable, str(tmp_path / "training.py")))
        swept, folder = space.load(tmp_path / "widths.py"), SweepFolder(tmp_path / "S")
        study = Study(folder.path, name="s", sweep=folder.begin(swept), points=2)
        study.add([point.params for point in swept.points])
        opened.append(study)
        return Worker(swept, folder, study, jobs=1, gpus=[], board=Board(2)), folder, study

    yield prepare
    for study in opened:
        study.close()


def states(folder):
    return [row.state for row in folder.rows()]


def failing(monkeypatch, owner, name, times):
    """The first calls of a method raise OSError, as for a disk that is full or a storage that is away."""
    whole, left = getattr(owner, name), [times]

    def call(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise OSError("away")
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return left


def test_every_seed_of_every_point_is_run(sweep_with):
    worker, folder, study = sweep_with(WELL)
    assert worker.work() == 0 and study.ended()
    assert states(folder) == ["complete"] * 2
    assert [(run.seed, run.values["loss"]) for run in folder.rows()[0].runs] == [(0, 2.0), (5, 7.0)]
    assert study._study.trials[0].value == 4.5 and study._study.trials[0].intermediate_values == {10: 2.0}


@pytest.mark.parametrize("method", ["finish", "report", "renew", "claim"])
def test_a_storage_that_is_away_for_a_moment_costs_nothing(sweep_with, monkeypatch, method, capsys):
    worker, folder, study = sweep_with(WELL)
    left = failing(monkeypatch, study, method, 3)
    assert worker.work() == 0 and left == [0]
    assert states(folder) == ["complete"] * 2 and study.ended()
    assert "cannot be used for now: away" in capsys.readouterr().err


def test_a_storage_that_stays_away_ends_the_worker_with_a_message(sweep_with, monkeypatch):
    worker, folder, study = sweep_with(WELL)
    monkeypatch.setattr(worker_lib, "LEASE", 0.5)
    failing(monkeypatch, study, "finish", 10**9)
    with pytest.raises(ValueError, match=r"the study could not be used for 0 s: away"):
        worker.work()
    assert folder.rows()[0].state == "complete", "what was done is not on disk"


def test_a_process_that_cannot_be_started_now_is_started_later(sweep_with, monkeypatch):
    worker, folder, _ = sweep_with(WELL)
    whole, calls = worker_lib.Run, []

    def run(*arguments, **options):
        calls.append(options)
        if len(calls) in (1, 3, 4, 5, 6):  # the first seed of the first point; the second one
            raise OSError("no more processes")
        return whole(*arguments, **options)

    monkeypatch.setattr(worker_lib, "Run", run)
    assert worker.work() == 0
    assert states(folder) == ["complete"] * 2 and len(calls) == 4 + 5


def test_an_end_that_the_study_was_not_told_of_is_told_and_nothing_is_run_again(sweep_with):
    worker, folder, study = sweep_with("raise SystemExit('this must not run')\n")
    point = worker._sweep.points[0]
    for seed, loss in ((0, 1.0), (5, 2.0)):
        workdir = folder.point(0).workdir(seed)
        workdir.mkdir(parents=True)
        line = f'{{"step": 3, "split": "validation", "loss": {loss}}}\n'
        (workdir / "metrics.jsonl").write_text(line)
    folder.point(0).write(point, state="complete", reason="")
    assert worker.work() == 0
    assert states(folder) == ["complete", "failed"]
    assert study._study.trials[0].value == 1.5


def test_a_run_that_a_signal_ends_is_gone_on_with_and_one_that_never_gets_on_has_failed(sweep_with):
    worker, folder, _ = sweep_with(
        "file = workdir / 'metrics.jsonl'\n"
        "done = len(file.read_text().splitlines()) if file.exists() else 0\n"
        "if 'points/0001' in words and seed == 5: sys.exit(143)\n"
        "log(done, 'train', loss=3.0)\n"
        "if seed == 0 and done < 6: os.kill(os.getpid(), signal.SIGTERM)\n" + WELL
    )
    assert worker.work() == 0
    assert states(folder) == ["complete", "failed"]
    assert "(exit code 143; see " in folder.rows()[1].reason


def test_a_run_without_the_objective_has_failed(sweep_with):
    worker, folder, _ = sweep_with('log(10, "validation", loss=None)\n')
    assert worker.work() == 0
    assert [row.reason.split(";")[0] for row in folder.rows()] == ["no evaluation has a finite loss"] * 2


def test_a_run_that_has_ended_when_its_point_is_found_to_be_anothers_is_left(sweep_with, monkeypatch):
    worker, folder, study = sweep_with(WELL)
    worker._look()
    (active,) = worker._active
    active._run._process.wait()
    assert active._run.code == 0
    worker._free = []
    study._retry(study._latest()[0])
    monkeypatch.setattr(study_lib, "RENEWAL", 0.0)
    assert active.has_ended() and active.lost
    assert states(folder)[0] == "begun"


def test_a_point_that_another_worker_has_taken_up_is_dropped_and_its_run_is_ended(sweep_with, monkeypatch):
    marker = "open(workdir / 'pid', 'w').write(str(os.getpid()))\n"
    worker, folder, study = sweep_with(marker + "log(1, 'train', loss=1.0)\ntime.sleep(3600 * (seed == 0))\n" + WELL)
    monkeypatch.setattr(study_lib, "RENEWAL", 0.0)
    look, taken, told = worker._look, [], folder.point(0).workdir(0) / "pid"

    def look_until_it_is_taken():
        if not taken and told.exists() and told.read_text():
            taken.append(True)
            worker._free = []  # it shall not take the point up itself
            study._retry(study._latest()[0])
        return look() or (taken and not worker._active)

    monkeypatch.setattr(worker, "_look", look_until_it_is_taken)
    worker.work()
    with pytest.raises(ProcessLookupError):  # else the run goes on
        os.kill(int(told.read_text()), 0)
    assert states(folder)[0] == "begun"
