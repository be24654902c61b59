"""A job killed at any moment and started again writes the bytes of one that never was; what it cannot go on with, it
refuses by name."""

import io
import json
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from flaxformer_lite.lines import line_job
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import Answer

LINES = [f"line {i} of {i * i}" for i in range(101)]
ASKED = {"model": "step 7", "--prefix": None, "--window": 7, "--long": "refuse"}


class Shouting:
    """Answers in capitals, with the number of the line; `fails_at` is a number that it refuses."""

    def __init__(self, fails_at=None):
        self.fails_at, self.seen = fails_at, []

    def __call__(self, window):
        self.seen += window.numbers
        for number in window.numbers:
            if number == self.fails_at:
                raise ValueError(f"{window.name} {number}: too long.")
        texts = zip(window.numbers, window.lines, strict=True)
        return Answer([f"{n} {line.upper()}" for n, line in texts], split=sum(n % 2 for n in window.numbers))


EXPECTED = "".join(f"{i} {line.upper()}\n" for i, line in enumerate(LINES, start=1)).encode()


@pytest.fixture
def job(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES))
    return LineJob(tmp_path / "in.txt", tmp_path / "out.txt", window=7)


def run(job, answer=None, **changes):
    return line_job.run(job, answer or Shouting(), asked=lambda: ASKED | changes)


def names(job):
    return sorted(path.name for path in job.output.parent.iterdir())


def stop_at(job, number, **changes):
    with pytest.raises(ValueError, match=rf"^.*in.txt, line {number}: too long\.$"):
        run(job, Shouting(fails_at=number), **changes)


def test_the_answers_come_in_order_and_only_the_whole_file_is_left(job):
    job.output.write_text("an older one")
    assert run(job) == 51
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


def test_an_empty_input_gives_an_empty_output(job):
    job.input.write_text("")
    assert run(job) == 0 and job.output.read_bytes() == b"" and names(job) == ["in.txt", "out.txt"]


def test_standard_streams_and_devices_get_each_window_as_it_is_done(job, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    with pytest.raises(ValueError):
        run(job._replace(output=None), Shouting(fails_at=17))
    assert raw.getvalue() == b"".join(EXPECTED.splitlines(keepends=True)[:14])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(job.input.read_bytes())))
    assert run(job._replace(input=None)) == 51 and job.output.read_bytes() == EXPECTED
    assert run(job._replace(output=type(job.output)("/dev/null"))) == 51


def test_a_job_that_stopped_keeps_what_was_done_and_goes_on_after_the_last_whole_window(job, capsys):
    stop_at(job, 40)
    kept = "35 lines are kept in .*out.txt.partial; the same command goes on after them"
    assert re.search(rf"^note: {kept}\.$", capsys.readouterr().err.strip())
    assert names(job) == ["in.txt", "out.txt.partial", "out.txt.partial.json"]
    assert job.output.with_name("out.txt.partial").read_bytes() == b"".join(EXPECTED.splitlines(keepends=True)[:35])
    answer = Shouting()
    assert run(job, answer) == 51  # those of before are counted
    assert answer.seen == list(range(36, 102))
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


def test_a_record_without_its_part_is_of_a_job_that_has_ended(job):
    stop_at(job, 40)
    job.output.with_name("out.txt.partial").unlink()
    answer = Shouting()
    assert run(job, answer, model="another") == 51 and answer.seen == list(range(1, 102))
    assert names(job) == ["in.txt", "out.txt"]


def test_a_key_that_interrupts_keeps_what_was_done(job):
    def interrupted(window):
        if window.first >= 14:
            raise KeyboardInterrupt
        return Shouting()(window)

    with pytest.raises(KeyboardInterrupt):
        run(job, interrupted)
    answer = Shouting()
    run(job, answer)
    assert answer.seen[0] == 15 and job.output.read_bytes() == EXPECTED


def test_what_was_written_after_the_last_record_does_not_count(job):
    stop_at(job, 40)
    with job.output.with_name("out.txt.partial").open("ab") as file:
        file.write(b"36 half a li")
    run(job)
    assert job.output.read_bytes() == EXPECTED


def test_a_job_that_stopped_before_its_first_window_was_done_leaves_nothing(job):
    job.output.write_text("an older one")
    stop_at(job, 3)
    assert names(job) == ["in.txt", "out.txt"] and job.output.read_text() == "an older one"


def test_a_line_that_was_refused_may_be_mended_and_the_input_may_grow(job):
    stop_at(job, 40)
    lines = [*LINES[:39], "mended", *LINES[40:], "one more"]
    job.input.write_text("".join(f"{line}\n" for line in lines))
    run(job)
    expected = [*EXPECTED.decode().splitlines(), "102 ONE MORE"]
    expected[39] = "40 MENDED"
    assert job.output.read_text().splitlines() == expected


def test_a_job_that_refused_a_long_line_goes_on_splitting_it_but_not_the_other_way_round(job):
    stop_at(job, 40)
    stop_at(job, 60, **{"--long": "split"})
    with pytest.raises(ValueError, match=r"^--long: .*out.txt.partial was begun with 'split', and this start asks for"):
        run(job)
    assert run(job, **{"--long": "split"}) == 51 and job.output.read_bytes() == EXPECTED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--prefix": "so"}, "--prefix: .*out.txt.partial was begun with None, and this start asks for 'so'; put it"),
        ({"model": "step 9"}, "model: .*out.txt.partial was begun with 'step 7', and this start asks for 'step 9'"),
        ({"--new": 1}, "--new: .* was begun with None, and this start asks for 1; .* begin anew with --restart"),
    ],
)
def test_other_options_or_another_model_are_refused_by_name_and_the_part_is_left(job, changes, says):
    stop_at(job, 40)
    before = {path: path.read_bytes() for path in job.output.parent.iterdir()}
    with pytest.raises(ValueError, match=f"^{says}"):
        run(job, **changes)
    assert {path: path.read_bytes() for path in job.output.parent.iterdir()} == before
    assert run(job._replace(restart=True), **changes) == 51
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


def test_an_input_that_changed_where_it_was_read_is_refused(job):
    stop_at(job, 40)
    job.input.write_text("L" + job.input.read_text()[1:])
    with pytest.raises(ValueError, match=r"^.*in.txt: its first \d+ bytes are not those that .*partial was made from"):
        run(job)
    with pytest.raises(ValueError, match="its first"):
        job.input.write_text("line")
        run(job)


def test_a_part_that_nobody_knows_or_that_was_cut_is_refused(job):
    partial, record = (job.output.with_name(f"out.txt.partial{end}") for end in ("", ".json"))
    partial.write_text("mine")
    with pytest.raises(
        ValueError, match=r"^--output=.*out.txt.partial is there, and out.txt.partial.json, which tells"
    ):
        run(job)
    assert partial.read_text() == "mine"
    record.write_text("{}")
    with pytest.raises(ValueError, match="which tells what it is of, cannot be read; put it right"):
        run(job)
    partial.unlink()
    stop_at(job, 40)
    written = json.loads(record.read_text())["written"]
    partial.write_bytes(partial.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"out.txt.partial: expected {written} bytes or more, got {written - 1}"):
        run(job)


def test_a_disk_that_is_full_is_one_message_and_what_was_done_stays(job, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(EXPECTED) // 2, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"^--output=.*out\.txt: cannot be written: File too large\.$"):
            run(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "lines are kept in" in capsys.readouterr().err
    assert run(job) == 51 and job.output.read_bytes() == EXPECTED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_device_that_is_full_is_one_message(job):
    with pytest.raises(ValueError, match=r"^--output=/dev/full: cannot be written: No space left on device\.$"):
        run(job._replace(output=Path("/dev/full")))


def test_two_jobs_do_not_write_the_same_file(job):
    def meddle(window):
        with pytest.raises(ValueError, match=r"^--output=.*: another process is writing .*out.txt.partial; wait, or"):
            run(job._replace(restart=True))
        return Shouting()(window)

    run(job, meddle)
    assert job.output.read_bytes() == EXPECTED


@pytest.mark.parametrize("name", ["missing/out", "folder"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(job, name):
    (job.output.parent / "folder").mkdir()
    answer = Shouting()
    with pytest.raises(ValueError, match=r"^--output=.*: cannot be written: "):
        run(job._replace(output=job.output.parent / name), answer)
    assert answer.seen == [] and names(job) == ["folder", "in.txt"]


def test_progress_is_told_in_a_log_if_asked_for_and_only_after_a_while(job, capsys, monkeypatch):
    run(job._replace(progress=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(line_job, "QUIET", 0.0)
    monkeypatch.setattr(line_job, "PACE", 0.0)
    run(job)
    assert capsys.readouterr().err == ""
    run(job._replace(progress=True))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 15 and re.fullmatch(r"7 lines, [\d,]+ lines a second, \d\d:\d\d left", told[0])
    assert told[-1].startswith("101 lines, ") and told[-1].endswith("00:00 left")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar_unless_it_is_quickly_done_or_told_not_to(job, monkeypatch):
    shown = {}
    for quiet, progress in ((0.0, None), (0.0, False), (99.0, None)):
        monkeypatch.setattr("sys.stderr", Terminal())
        monkeypatch.setattr(line_job, "QUIET", quiet)
        run(job._replace(progress=progress))
        shown[quiet, progress] = sys.stderr.getvalue()
    assert "101 lines, " in shown[0.0, None] and "100%|" in shown[0.0, None]
    assert shown[0.0, False] == shown[99.0, None] == ""


SLOW = """
import sys, time
from pathlib import Path
from flaxformer_lite.lines.line_job import LineJob, run
from flaxformer_lite.lines.line_windows import Answer
def answer(window):
    time.sleep(0.01)
    print(window.first, flush=True)
    return Answer([f"{n} {line.upper()}" for n, line in zip(window.numbers, window.lines)])
run(LineJob(Path(sys.argv[1]), Path(sys.argv[2]), window=3), answer, asked=dict)
"""


def test_a_job_killed_at_random_moments_and_started_again_writes_what_one_never_stopped_does(job):
    command, rng = [sys.executable, "-c", SLOW, str(job.input), str(job.output)], np.random.default_rng(7)
    begun, killed = [], 0
    while not job.output.exists():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        begun += [int(line) for line in [process.stdout.readline()] if line]  # none: only the name was missing
        if killed < 7:
            time.sleep(rng.uniform(0, 0.02 * (killed + 1)))
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
    assert len(begun) > 2 and begun == sorted(begun) and begun[-1] > 0  # each went on where the one before was
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]
