"""Runs with `train.metric_command`: log, best checkpoint, resumes, several processes."""

import json
import math
import sys

import pytest
import runs

from flaxformer_lite import evaluate, trained
from flaxformer_lite.cli import commands
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError

# The number of call n is line n of the file `numbers`; a line that is no number fails.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
wc -l < "$1" | tr -d ' ' >> calls
sed -n "$(grep -c '' calls)p" numbers
"""
CHANGES = {
    **runs.TINY,
    "train.num_steps": 6,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "train.keep_newest": 5,
    "train.decode_examples": 3,
    "train.best_metric": "external_error",
    "train.metric_name": "external_error",
}


@pytest.fixture
def program(tmp_path):
    """Returns a function that writes the program for some numbers, and returns the fields."""

    def write(*numbers):
        path = tmp_path / "metric.sh"
        path.write_text(PROGRAM)
        path.chmod(0o755)
        (tmp_path / "numbers").write_text("".join(f"{number}\n" for number in numbers))
        (tmp_path / "calls").write_text("")
        return {**CHANGES, "train.metric_command": f"{path} {{hypotheses}} {{references}}"}

    return write


def calls(folder):
    """Returns the number of lines that each call has read."""
    return [int(line) for line in (folder / "calls").read_text().split()]


def logged(workdir, split):
    return {line["step"]: line["external_error"] for line in runs.lines_of(workdir, split)}


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_the_number_is_logged_and_the_lowest_error_is_the_best_checkpoint(
    program, tmp_path, capfd, monkeypatch
):
    changes, run = program(2.5, 0.5, "none", 7), tmp_path / "run"
    first = {**changes, "train.num_steps": 4}
    assert runs.fit(run, first) == 0
    # The number of the test split is missing, and that of validation at step 4 is the best.
    assert logged(run, "validation") == {2: 2.5, 4: 0.5} and logged(run, "test") == {4: None}
    assert calls(tmp_path) == [3, 3, 4]  # all of the test split
    err = capfd.readouterr().err
    assert err.count("train.metric_command: ") == 1 and "got 'none'; this evaluation" in err
    assert "no evaluation has the value" not in err
    assert (run / "samples/metric_command/hypotheses.txt").exists()

    assert runs.fit(run, first) == 0
    assert len(calls(tmp_path)) == 3 and "nothing was trained" in capfd.readouterr().err

    # A resumed run does not repeat logged evaluations; the new ones are worse.
    (tmp_path / "numbers").write_text("0\n0\n0\n3\n0.25\n0.125\n0.0625\n")
    assert runs.fit(run, changes) == 0
    assert logged(run, "validation") == {2: 2.5, 4: 0.5, 6: 3} and calls(tmp_path)[3:] == [3, 4]
    assert logged(run, "test") == {4: 0.25}
    assert trained.load(run).origin.steps == (4,)

    # Numbers of another program are not comparable, until training has ended.
    other = {**changes, "train.metric_command": "other {hypotheses}"}
    with pytest.raises(InputError, match=r"^config\.train\.metric_command: up to step 6"):
        runs.fit(run, {**other, "train.num_steps": 8})
    again = {**changes, "train.metric_command": f"{changes['train.metric_command']} again"}
    assert not workdir_lib.same_result(run, runs.small_config(again))
    assert workdir_lib.same_result(run, runs.small_config(changes))

    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process
    evaluation = ["evaluate", f"--workdir={run}", "--split=test[:2]", f"--output={tmp_path}/out"]
    for flag, count in ((), 5), (("--metric_command=own",), 6):
        with pytest.raises(SystemExit) as ended:
            commands.main([*evaluation, *flag])
        out, err = capfd.readouterr()
        assert ended.value.code == 0 and len(calls(tmp_path)) == count
        assert ("note: the program of this run" in err) == (not flag)
        assert ("external_error" in out) == bool(flag)
    assert ["external_error", "0.125"] in map(str.split, out.splitlines())
    (file,) = (tmp_path / "out").glob("*.scores.json")
    stored = json.loads(file.read_text())
    assert stored["scores"]["external_error"] == 0.125
    assert stored["metric_command"] == changes["train.metric_command"]
    assert (tmp_path / "out/metric_command/references.txt").read_text().count("\n") == 2
    given = {"metric_command": f"{tmp_path}/metric.sh {{hypotheses}}"}
    values = evaluate.evaluate_run(
        trained.load(run), "test[:2]", **given, metric_name="external_score"
    ).values
    assert values["external_score"] == 0.0625 and "external_error" not in values
    assert "external_error" not in evaluate.evaluate(run, "test[:2]").values
    assert len(calls(tmp_path)) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_program_that_always_fails_is_reported_and_the_run_completes(program, tmp_path, capfd):
    changes, run = program(), tmp_path / "run"
    changes |= {"train.num_steps": 4, "train.average": "best:2", "train.keep_best": 2}
    assert runs.fit(run, changes) == 0
    assert logged(run, "validation") == {2: None, 4: None}
    err = capfd.readouterr().err
    assert err.count("train.metric_command: ") == 3
    assert "warning: no evaluation has the value of train.best_metric='external_error'" in err
    assert trained.load(run, average="none").origin.steps == (4,)
    values = evaluate.evaluate_run(trained.load(run), "test[:2]", metric_command="own").values
    assert math.isnan(values["external_error"]) and math.isfinite(values["bleu"])


@pytest.mark.slow
def test_two_processes_agree_on_the_number_of_one_program(program, tmp_path):
    changes = {**program(0.5, 2.5, 7), "train.num_steps": 4, "parallel.data": -1}
    runs.fit_in_processes(2, [(tmp_path / "run", changes)])
    assert calls(tmp_path) == [3, 3, 4]  # 1 call for each evaluation
    assert logged(tmp_path / "run", "validation") == {2: 0.5, 4: 2.5}
    assert logged(tmp_path / "run", "test") == {2: 7}  # the parameters of the lowest error
