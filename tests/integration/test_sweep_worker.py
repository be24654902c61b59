"""A worker during failures: of the storage, of the start of a process, or of a run.

The runs are short scripts that write the log of a training; complete sweeps are in test_sweep.py.
"""

import os
import sys
import time

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flaxformer_lite.sweep import active_point, process, space
from flaxformer_lite.sweep import study as study_lib
from flaxformer_lite.sweep import worker as worker_lib
from flaxformer_lite.sweep.active_point import ActivePoint
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.study import Study, StudyOptions
from flaxformer_lite.sweep.study_storage import JOURNAL
from flaxformer_lite.sweep.worker import Worker

SWEEP = """
from flaxformer_lite.config import default_config as get_config
SWEEP = {"seeds": (0, 5)}
def points(config):
    return [{"model.d_ff": 64}, {"model.d_ff": 128}]
"""
# Reads the arguments of `train`; `log` adds a line to the log.
TRAINING = """
import json, os, pathlib, re, signal, sys, time
words = " ".join(sys.argv)
seed = int(re.search(r"train.seed=(\\d+)", words)[1])
workdir = pathlib.Path(re.search(r"--workdir=(\\S+)", words)[1])
workdir.mkdir(exist_ok=True)
def log(step, split, **values):
    with open(workdir / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "split": split, "seconds": 1.0, **values}) + "\\n")
"""
WELL = 'log(10, "train", loss=3.0)\nlog(10, "validation", loss=2.0 + seed)\n'


@pytest.fixture
def sweep_with(tmp_path, monkeypatch):
    """Makes a worker for a sweep of two points and two seeds, whose runs execute the given code."""
    monkeypatch.setattr(worker_lib, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(worker_lib, "CLAIM_INTERVAL", 0.05)
    monkeypatch.setattr(active_point, "LOG_INTERVAL", 0.05)
    opened = []

    def prepare(training):
        (tmp_path / "widths.py").write_text(SWEEP)
        (tmp_path / "training.py").write_text(TRAINING + training)
        monkeypatch.setattr(process, "TRAIN", (sys.executable, str(tmp_path / "training.py")))
        swept, folder = space.load(tmp_path / "widths.py"), SweepFolder(tmp_path / "S")
        options = StudyOptions("s", points=2, sweep=folder.create_or_join(swept))
        study = Study(folder.path, options)
        study.add([point.params for point in swept.points])
        opened.append(study)
        return Worker(swept, folder, study, jobs=1, gpus=[], board=Board(2)), folder, study

    yield prepare
    for study in opened:
        study.close()


def trials(folder):
    """The trials of the study, as Optuna's own objects."""
    storage = JournalStorage(JournalFileBackend(str(folder.path / JOURNAL)))
    return optuna.load_study(study_name="s", storage=storage).trials


def states(folder):
    return [row.state for row in folder.rows()]


def failing(monkeypatch, owner, name, times):
    """Makes the first calls of a method raise OSError; returns the number of calls left."""
    method, left = getattr(owner, name), [times]

    def call(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise OSError("away")
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return left


def test_every_seed_of_every_point_is_run(sweep_with):
    worker, folder, study = sweep_with(WELL)
    assert worker.work() == 0 and study.ended()
    assert states(folder) == ["complete"] * 2
    assert [(run.seed, run.values["loss"]) for run in folder.rows()[0].runs] == [(0, 2.0), (5, 7.0)]
    first = trials(folder)[0]
    assert first.value == 4.5 and first.intermediate_values == {10: 2.0}


@pytest.mark.parametrize("method", ["finish", "report", "renew", "claim"])
def test_a_storage_that_is_unavailable_for_a_moment_has_no_effect(
    sweep_with, monkeypatch, method, capsys
):
    worker, folder, study = sweep_with(WELL)
    left = failing(monkeypatch, study, method, 3)
    assert worker.work() == 0 and left == [0]
    assert states(folder) == ["complete"] * 2 and study.ended()
    assert "cannot be used for now: away" in capsys.readouterr().err


def test_a_storage_that_stays_unavailable_ends_the_worker_with_a_message(sweep_with, monkeypatch):
    worker, folder, study = sweep_with(WELL)
    monkeypatch.setattr(worker_lib, "LEASE", 0.5)
    failing(monkeypatch, study, "finish", 10**9)
    with pytest.raises(ValueError, match=r"the study could not be used for 0 s: away"):
        worker.work()
    assert folder.rows()[0].state == "complete", "the result is not on disk"


def test_a_process_that_cannot_start_is_started_later(sweep_with, monkeypatch):
    worker, folder, _ = sweep_with(WELL)
    original, calls = active_point.Run, []

    def run(*arguments, **options):
        calls.append(options)
        if len(calls) in (1, 3, 4, 5, 6):  # the first seed of the first point; the second one
            raise OSError("no more processes")
        return original(*arguments, **options)

    monkeypatch.setattr(active_point, "Run", run)
    assert worker.work() == 0
    assert states(folder) == ["complete"] * 2 and len(calls) == 4 + 5


def test_a_final_state_missing_in_the_study_is_reported_without_a_run(sweep_with, tmp_path):
    worker, folder, study = sweep_with("raise SystemExit('this must not run')\n")
    point = space.load(tmp_path / "widths.py").points[0]
    for seed, loss in ((0, 1.0), (5, 2.0)):
        workdir = folder.point(0).workdir(seed)
        workdir.mkdir(parents=True)
        line = f'{{"step": 3, "split": "validation", "loss": {loss}}}\n'
        (workdir / "metrics.jsonl").write_text(line)
    folder.point(0).write(point, state="complete", reason="")
    assert worker.work() == 0
    assert states(folder) == ["complete", "failed"]
    assert trials(folder)[0].value == 1.5


def test_a_run_ended_by_a_signal_resumes_and_one_without_progress_fails(sweep_with):
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


def test_a_run_without_the_objective_fails(sweep_with):
    worker, folder, _ = sweep_with('log(10, "validation", loss=None)\n')
    assert worker.work() == 0
    assert [row.reason.split(";")[0] for row in folder.rows()] == [
        "no evaluation has a finite loss"
    ] * 2


def test_a_finished_run_of_a_point_that_another_worker_holds_is_ignored(
    sweep_with, monkeypatch, tmp_path
):
    _, folder, study = sweep_with(WELL)
    swept, claim = space.load(tmp_path / "widths.py"), study.claim()
    active = ActivePoint(claim, swept.points[0], folder.point(0), study, swept, {})
    while active.is_running():
        time.sleep(0.02)
    (run,) = folder.rows()[0].runs  # its script has written the last line
    assert run.values["loss"] == 2.0
    study.retry(0)
    monkeypatch.setattr(study_lib, "RENEWAL", 0.0)
    assert active.has_ended() and active.lost
    assert states(folder)[0] == "begun"


def test_the_run_of_a_point_that_another_worker_has_taken_over_is_killed(sweep_with, monkeypatch):
    worker, folder, study = sweep_with(
        "open(workdir / 'pid', 'w').write(str(os.getpid()))\n"
        "log(1, 'train', loss=1.0)\ntime.sleep(3600 * (seed == 0))\n" + WELL
    )
    monkeypatch.setattr(study_lib, "RENEWAL", 0.0)
    renew, claim, ended = study.renew, study.claim, study.ended
    taken, pid = [], folder.point(0).workdir(0) / "pid"

    def renew_or_lose(held):
        if not taken and pid.exists() and pid.read_text():
            taken.append(True)
            study.retry(0)
        return renew(held)

    monkeypatch.setattr(study, "renew", renew_or_lose)
    # This worker must not take the point back.
    monkeypatch.setattr(study, "claim", lambda: None if taken else claim())
    monkeypatch.setattr(study, "ended", lambda: bool(taken) or ended())
    worker.work()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert states(folder)[0] == "begun"
