"""The commands `score` and `evaluate` with error rates of symbols, and with groups."""

import json
import shutil
import sys

import pytest

from flaxformer_lite import evaluate, trained
from flaxformer_lite.cli import commands
from flaxformer_lite.scoring import scores_by_group
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report

REFERENCES = ["a b c", "a b c d", "a b c d e", "a"]
HYPOTHESES = ["a b c", "a c d", "a b c d e", "x y z"]


@pytest.fixture
def command(monkeypatch, capfd):
    """Returns a function that runs a command in this process and returns its output."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(list(arguments))
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        return out

    return run


@pytest.fixture
def files(tmp_path):
    for name, lines in (("hyp", HYPOTHESES), ("ref", REFERENCES), ("names", "baab")):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return [f"--hypotheses={tmp_path / 'hyp'}", f"--references={tmp_path / 'ref'}"]


@pytest.mark.parametrize("more", [(), ("--bootstrap=40",)])
def test_score_prints_the_rates_and_a_table_of_groups(command, files, tmp_path, more):
    names = f"--groups={tmp_path / 'names'}"
    printed = command("score", *files, "--symbols", names, *more)
    rows = [line.split() for line in printed.splitlines()]
    assert ["symbol_error_rate", "30.77", "%"] in [row[:3] for row in rows]  # 4 of 13
    assert ["sequence_error_rate", "50.00", "%"] in [row[:3] for row in rows]
    for groups, flag in ((list("baab"), names), ("length", "--groups=length")):
        found = scores_by_group(HYPOTHESES, [REFERENCES], groups, symbols=True)
        assert len(found) == 2
        assert run_report.group_table(found) in command("score", *files, "--symbols", flag, *more)


def test_score_has_neither_by_default(command, files):
    printed = command("score", *files)
    assert "symbol" not in printed and "group" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_evaluate_prints_and_stores_the_rates_and_the_groups(command, finished_run, tmp_path):
    workdir = shutil.copytree(finished_run, tmp_path / "run")
    split, count = "test[:6]", 6
    (tmp_path / "names").write_text("one\ntwo\n" * (count // 2))
    printed = command(
        "evaluate",
        f"--workdir={workdir}",
        f"--split={split}",
        f"--output={tmp_path / 'scores'}",
        "--symbols",
        f"--groups={tmp_path / 'names'}",
    )
    (file,) = (tmp_path / "scores").glob("*.scores.json")
    stored = json.loads(file.read_text())
    assert list(stored["groups"]) == ["one", "two"]
    assert {each["sentences"] for each in stored["groups"].values()} == {count // 2}
    rates = [each["scores"]["sequence_error_rate"] for each in stored["groups"].values()]
    assert stored["mean_of_groups"]["sequence_error_rate"] == sum(rates) / 2
    # Groups of the same size have the mean of all sentences.
    assert stored["scores"]["sequence_error_rate"] == pytest.approx(sum(rates) / 2)
    assert "symbol_error_rate" in printed and "mean of 2 groups" in printed
    plain = evaluate.evaluate(workdir, split)
    assert "symbol_error_rate" not in plain.values and plain.groups == {}

    run = trained.load(workdir)
    by_length = evaluate.evaluate_run(run, split, groups="length")
    assert all(name.endswith(" symbols") for name in by_length.groups)
    assert sum(group.sentences for group in by_length.groups.values()) == count
    with pytest.raises(InputError, match=r"^the groups: expected 6 lines, as many as the test\[:6"):
        evaluate.evaluate_run(run, split, groups=["one"])
