"""`train.metric_command`: its words and files, and programs that fail in each way."""

import math
import os
import subprocess
import sys
import time

import pytest

from flaxformer_lite.config import resolve
from flaxformer_lite.fields import TrainConfig
from flaxformer_lite.sweep.space import Settings
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import external_metric, metrics

TEXTS = {
    "sources": ["one", "two", "three"],
    "hypotheses": ["eins", "zw\nei", ""],
    "references": [["eins", "zwei", "drei"]],
}


@pytest.fixture
def program(tmp_path):
    """Returns a function that writes a shell script, and returns the command that runs it."""

    def write(script, arguments="{hypotheses}"):
        path = tmp_path / "the metric.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return f"'{path}' {arguments}"

    return write


@pytest.fixture
def measure(tmp_path):
    """Returns a function that runs a command on TEXTS, with its files in `tmp_path/files`."""

    def run(command, *, while_waiting=lambda: None, folder=tmp_path / "files", **changes):
        seconds = changes.pop("metric_seconds", 20.0)
        train = TrainConfig(metric_command=command, metric_seconds=seconds)
        texts = {**TEXTS, **changes}
        return external_metric.measure(train, **texts, folder=folder, while_waiting=while_waiting)

    return run


def test_the_last_line_is_the_number(program, measure, capfd):
    assert measure(program("echo loading; echo '  -0.125  '; echo; echo noise >&2")) == -0.125
    assert measure(program("printf 3e2")) == 300
    assert capfd.readouterr() == ("", "")


def test_the_files_have_a_text_a_line_and_paths_with_spaces(program, measure, tmp_path):
    command = program('cat "$@" > "$0.seen"; wc -l < "$2"', "{sources} {hypotheses} {references}")
    folder = tmp_path / "all files"
    assert measure(command, folder=folder) == 3
    seen = (tmp_path / "the metric.sh.seen").read_text()
    assert seen == "one\ntwo\nthree\neins\nzw ei\n\neins\nzwei\ndrei\n"
    assert (folder / "hypotheses.txt").read_text() == "eins\nzw ei\n\n"


def test_a_word_of_references_is_repeated_for_each_of_several_files(program, measure, tmp_path):
    command = program(
        'echo "$@" > "$0.seen"; echo $#', "--hyp={hypotheses} --ref={references} '-q x'"
    )
    other = ["EINS", "ZWEI", "DREI"]
    assert measure(command, references=[*TEXTS["references"], other]) == 4
    files = tmp_path / "files"
    assert (tmp_path / "the metric.sh.seen").read_text() == (
        f"--hyp={files}/hypotheses.txt --ref={files}/references.1.txt "
        f"--ref={files}/references.2.txt -q x\n"
    )
    assert (files / "references.2.txt").read_text() == "EINS\nZWEI\nDREI\n"


def test_there_is_no_shell(program, measure):
    assert measure(program("echo $#", "{hypotheses} $HOME ; echo 7 | cat")) == 7


def test_a_temporary_folder_is_removed(program, measure, tmp_path):
    command = program('echo "$1" > "$0.seen"; echo 1')
    assert measure(command, folder=None) == 1
    seen = (tmp_path / "the metric.sh.seen").read_text().strip()
    assert seen.endswith("hypotheses.txt") and not os.path.exists(seen)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo out; echo first >&2; echo 'No model' >&2; exit 3", "failed with code 3: No model"),
        ("exit 1", "failed with code 1: it wrote nothing to standard error"),
        ("kill -9 $$", "failed with code -9: "),
        ("echo 1.5; echo score: 2", "expected a number in the last line, got 'score: 2'"),
        ("", "expected a number in the last line, got ''"),
        ("echo nan", "expected a number in the last line, got 'nan'"),
        ("echo inf", "expected a number in the last line, got 'inf'"),
    ],
)
def test_a_program_that_fails_is_one_line_and_no_number(program, measure, capfd, script, says):
    assert math.isnan(measure(program(script)))
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert not out and line.startswith("train.metric_command: ") and says in line
    assert line.endswith("; this evaluation has no external_score.")


def test_a_program_that_cannot_start_is_one_line(program, measure, tmp_path, capfd):
    (tmp_path / "plain.txt").write_text("no program")
    for command, says in (
        ("/no/such/program {hypotheses}", "/no/such/program cannot be started: No such file"),
        (f"{tmp_path}/plain.txt {{hypotheses}}", "plain.txt cannot be started: Permission denied"),
        (f"{tmp_path} {{hypotheses}}", "cannot be started: Permission denied"),
    ):
        assert math.isnan(measure(command))
        (line,) = capfd.readouterr().err.splitlines()
        assert says in line
    (tmp_path / "file").write_text("")
    assert math.isnan(measure(program("echo 1"), folder=tmp_path / "file"))
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{tmp_path / 'file'}: File exists" in line


def is_running(pid):
    """Whether a process exists and has not ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pid):
    """Waits until a process has ended."""
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_a_program_that_hangs_is_killed_with_its_children(program, measure, tmp_path, capfd):
    command = program('sleep 97 & echo $! > "$0.child"; echo 1; wait')
    started = time.monotonic()
    assert math.isnan(measure(command, metric_seconds=0.5))
    assert 0.5 < time.monotonic() - started < 10
    (line,) = capfd.readouterr().err.splitlines()
    assert "ran for more than train.metric_seconds = 0.5 s, and was killed" in line
    assert ended(int((tmp_path / "the metric.sh.child").read_text()))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_an_exception_of_the_caller_ends_the_program(program, measure, tmp_path):
    command = program('sleep 97 & echo $! > "$0.child"; wait')
    child = tmp_path / "the metric.sh.child"

    def stop():
        if child.exists() and child.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(command, while_waiting=stop)
    assert ended(int(child.read_text()))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_a_stopped_run_ends_the_program_before_it_goes_on(program, tmp_path, monkeypatch):
    monkeypatch.setattr(external_metric, "MEET_SECONDS", 0.05)
    train = TrainConfig(metric_command=program('echo $$ > "$0.pid"; sleep 97'))
    started = tmp_path / "the metric.sh.pid"

    def stop():
        if started.exists() and started.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        external_metric.measure_together(train, **TEXTS, folder=tmp_path / "files", between=stop)
    assert not is_running(int(started.read_text()))
    quick = TrainConfig(metric_command=program("echo 3"))
    found = external_metric.measure_together(quick, **TEXTS, folder=None, between=lambda: None)
    assert found == 3


def test_a_child_that_holds_the_output_open_does_not_delay_the_number(program, measure):
    started = time.monotonic()
    assert measure(program("sleep 5 & echo 2")) == 2
    assert time.monotonic() - started < 4


def test_two_measurements_in_folders_of_their_own_do_not_disturb_each_other(program, tmp_path):
    command = program('sleep 0.3; grep -c "" < "$1"')
    code = (
        "import sys; from flaxformer_lite.fields import TrainConfig; "
        "from flaxformer_lite.training import external_metric; from pathlib import Path; "
        "n = int(sys.argv[1]); "
        "print(external_metric.measure(TrainConfig(metric_command=sys.argv[2]), sources=['a'] * n, "
        "hypotheses=['a'] * n, references=[['a'] * n], folder=Path(sys.argv[3]) / str(n), "
        "while_waiting=lambda: None))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(n), command, str(tmp_path)], stdout=subprocess.PIPE
        )
        for n in (3, 11)
    ]
    assert [float(process.communicate(timeout=100)[0]) for process in started] == [3, 11]


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"metric_command": "a 'b {hypotheses}"}, "metric_command: .*No closing quotation"),
        ({"metric_command": ""}, r"metric_command: expected a program and \{hypotheses\}"),
        ({"metric_command": "{hypotheses}"}, r"metric_command: expected a program and"),
        ({"metric_command": "a {references}"}, r"metric_command: .*add \{hypotheses\}"),
        ({"metric_command": "a {hypothesis}"}, r"metric_command: .*got \{hypothesis\}; correct"),
        ({"metric_seconds": 600.0}, "metric_seconds: requires train.metric_command"),
        ({"metric_name": "external_error"}, "metric_name: requires train.metric_command"),
        ({"metric_command": "a {hypotheses}", "metric_seconds": 0.0}, "metric_seconds: expected a"),
        ({"best_metric": "external_score"}, "best_metric: .*metric_command is unset"),
        (
            {"best_metric": "external_error", "metric_command": "a {hypotheses}"},
            "best_metric: .*train.metric_name='external_score'; set both to the same",
        ),
    ],
)
def test_a_wrong_field_of_the_metric_is_refused(train, says):
    with pytest.raises(InputError, match=rf"^config\.train\.{says}"):
        resolve({"train": train}, given=[f"train.{name}" for name in train])


@pytest.mark.parametrize("architecture", ["encoder_classifier", "decoder_lm"])
def test_a_model_without_translations_is_refused(architecture):
    train = {"metric_command": "a {hypotheses}"}
    with pytest.raises(InputError, match=r"^config\.train\.metric_command: needs translations"):
        resolve({"train": train, "model": {"architecture": architecture}})


def test_a_sweep_minimizes_an_error_and_maximizes_a_score():
    assert Settings(objective="external_error").minimizes
    assert not Settings(objective="external_score").minimizes


def test_the_name_states_the_direction_and_a_missing_number_is_never_the_best():
    assert metrics.score({"external_score": 0.25}, "external_score") == 0.25
    assert metrics.score({"external_error": 0.25}, "external_error") == -0.25
    for name in ("external_score", "external_error"):
        assert (
            metrics.score({name: None}, name) == metrics.score({name: math.nan}, name) == -math.inf
        )
