"""No program runs that only the config of a run names."""

import json
import shutil

import pytest

from flaxformer_lite import evaluate, trained
from flaxformer_lite.cli import train_flags
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import saved_evaluation


@pytest.fixture
def prepared_run(finished_run, tmp_path):
    """Returns a copy of a run whose config names a program."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["train"]["metric_command"] = f"touch {tmp_path}/ran {{hypotheses}}"
    (run / "config.json").write_text(json.dumps(config))
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_evaluate_runs_it_only_if_it_is_named(prepared_run, tmp_path, capfd):
    run = trained.load(prepared_run)
    assert "external_score" not in evaluate.evaluate_run(run, "test[:2]").values
    assert "runs with --metric_command=own" in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()
    named = evaluate.evaluate_run(run, "test[:2]", metric_command="own")
    assert "external_score" in named.values and (tmp_path / "ran").exists()
    assert named.program == run.config.train.metric_command


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_the_stored_scores_have_the_program_that_has_run(prepared_run, tmp_path):
    run = trained.load(prepared_run)
    of = dict(run=prepared_run, split="test", config=run.config, origin=run.origin)
    for command in (None, "echo {hypotheses}"):
        evaluated = evaluate.evaluate_run(run, "test[:2]", metric_command=command)
        _, scores = saved_evaluation.save(evaluated, tmp_path / "out", **of)
        stored = json.loads(scores.read_text())
        assert stored.get("metric_command") == command
        assert ("external_score" in stored["scores"]) == (command is not None)


def test_train_does_not_read_it_from_a_run_alone(prepared_run, tmp_path):
    command = json.loads((prepared_run / "config.json").read_text())["train"]["metric_command"]
    own = [f"--workdir={prepared_run}"]
    for flags in (own, [f"--init={prepared_run}"]):
        with pytest.raises(
            InputError, match=r"^config\.train\.metric_command: the config of the run"
        ):
            train_flags.parse_train(flags)
        named = [*flags, f"--config.train.metric_command={command}"]
        assert train_flags.parse_train(named).config.train.metric_command == command
        off = [*flags, "--config.train.metric_command=None"]
        assert train_flags.parse_train(off).config.train.metric_command is None
    planned = train_flags.parse_plan([*own, "--devices=1"])
    assert planned.config.train.metric_command == command
    assert not (tmp_path / "ran").exists()


def test_a_program_that_cannot_be_named_is_refused(finished_run):
    run = trained.load(finished_run)
    for given, says in (
        ({"metric_command": "own"}, "--metric_command=own: this run has no train.metric_command"),
        ({"metric_command": "a b"}, r"--metric_command: expected a program and \{hypotheses\}"),
        ({"metric_name": "external_error"}, "--metric_name: requires --metric_command"),
    ):
        with pytest.raises(InputError, match=f"^{says}"):
            evaluate.evaluate_run(run, "test[:2]", **given)


def test_a_classifier_is_refused(finished_classifier):
    with pytest.raises(InputError, match=r"^--metric_command: applies only to translations"):
        evaluate.evaluate_run(
            trained.load(finished_classifier), "test[:2]", metric_command="a {hypotheses}"
        )
