"""A killed and restarted job writes the bytes of an uninterrupted one, or is refused by name."""

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
from flaxformer_lite.system.compressed import open_bytes

LINES = [f"line {i} of {i * i}" for i in range(101)]
ASKED = {"model": "step 7", "--prefix": None, "--window": 7, "--long": "refuse"}


class Shouting:
    """Returns lines in capitals with their numbers; raises an error at line `fails_at`."""

    def __init__(self, fails_at=None):
        self.fails_at, self.seen = fails_at, []

    def __call__(self, window):
        self.seen += window.numbers
        for number in window.numbers:
            if number == self.fails_at:
                raise ValueError(f"{window.name} {number}: too long.")
        texts = zip(window.numbers, window.lines, strict=True)
        return Answer(
            [f"{n} {line.upper()}" for n, line in texts], split=sum(n % 2 for n in window.numbers)
        )


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


def test_the_output_is_in_order_and_only_the_complete_file_is_left(job):
    job.output.write_text("an older one")
    assert run(job) == 51
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


def test_an_empty_input_gives_an_empty_output(job):
    job.input.write_text("")
    assert run(job) == 0 and job.output.read_bytes() == b"" and names(job) == ["in.txt", "out.txt"]


def test_standard_streams_and_devices_get_each_window_at_once(job, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    with pytest.raises(ValueError):
        run(job._replace(output=None), Shouting(fails_at=17))
    assert raw.getvalue() == b"".join(EXPECTED.splitlines(keepends=True)[:14])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(job.input.read_bytes())))
    assert run(job._replace(input=None)) == 51 and job.output.read_bytes() == EXPECTED
    assert run(job._replace(output=type(job.output)("/dev/null"))) == 51


def test_a_stopped_job_keeps_its_output_and_resumes_after_the_last_complete_window(job, capsys):
    stop_at(job, 40)
    kept = "35 lines are kept in .*out.txt.partial; the same command resumes after them"
    assert re.search(rf"^note: {kept}\.$", capsys.readouterr().err.strip())
    assert names(job) == ["in.txt", "out.txt.partial", "out.txt.partial.json"]
    assert job.output.with_name("out.txt.partial").read_bytes() == b"".join(
        EXPECTED.splitlines(keepends=True)[:35]
    )
    answer = Shouting()
    assert run(job, answer) == 51  # including the lines before the stop
    assert answer.seen == list(range(36, 102))
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_compressed_output_resumes_to_the_bytes_of_an_uninterrupted_job(suffix, job):
    whole, job = (job._replace(output=job.output.with_name(f"{n}{suffix}")) for n in ("one", "two"))
    run(whole)
    with open_bytes(whole.output) as file:
        assert file.read() == EXPECTED
    stop_at(job, 40)
    run(job)
    assert job.output.read_bytes() == whole.output.read_bytes() != EXPECTED
    job.input.write_text("")
    run(job)
    with open_bytes(job.output) as file:
        assert file.read() == b"" and job.output.stat().st_size > 0


def test_plain_partial_output_of_an_older_version_is_not_continued_as_compressed(job, monkeypatch):
    job = job._replace(output=job.output.with_name("out.gz"))
    with monkeypatch.context() as older:
        older.setattr(line_job, "compressor", lambda path: bytes)
        stop_at(job, 40)
    with pytest.raises(ValueError, match=r"^--output: .* was started with None, and .* '\.gz'"):
        run(job)
    run(job._replace(restart=True))
    with open_bytes(job.output) as file:
        assert file.read() == EXPECTED


def test_a_record_without_partial_output_is_ignored(job):
    stop_at(job, 40)
    job.output.with_name("out.txt.partial").unlink()
    answer = Shouting()
    assert run(job, answer, model="another") == 51 and answer.seen == list(range(1, 102))
    assert names(job) == ["in.txt", "out.txt"]


def test_an_interrupted_job_keeps_its_output(job):
    def interrupted(window):
        if window.first >= 14:
            raise KeyboardInterrupt
        return Shouting()(window)

    with pytest.raises(KeyboardInterrupt):
        run(job, interrupted)
    answer = Shouting()
    run(job, answer)
    assert answer.seen[0] == 15 and job.output.read_bytes() == EXPECTED


def test_output_after_the_last_record_is_discarded(job):
    stop_at(job, 40)
    with job.output.with_name("out.txt.partial").open("ab") as file:
        file.write(b"36 half a li")
    run(job)
    assert job.output.read_bytes() == EXPECTED


def test_a_job_that_stops_in_its_first_window_leaves_nothing(job):
    job.output.write_text("an older one")
    stop_at(job, 3)
    assert names(job) == ["in.txt", "out.txt"] and job.output.read_text() == "an older one"


def test_a_refused_line_may_be_fixed_and_the_input_may_grow(job):
    stop_at(job, 40)
    lines = [*LINES[:39], "fixed", *LINES[40:], "one more"]
    job.input.write_text("".join(f"{line}\n" for line in lines))
    run(job)
    expected = [*EXPECTED.decode().splitlines(), "102 ONE MORE"]
    expected[39] = "40 FIXED"
    assert job.output.read_text().splitlines() == expected


def test_a_job_may_resume_with_long_split_after_refuse_but_not_the_reverse(job):
    stop_at(job, 40)
    stop_at(job, 60, **{"--long": "split"})
    with pytest.raises(
        ValueError,
        match=r"^--long: .*out.txt.partial was started with 'split', and this start asks for",
    ):
        run(job)
    assert run(job, **{"--long": "split"}) == 51 and job.output.read_bytes() == EXPECTED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--prefix": "so"},
            "--prefix: .*out.txt.partial was started with None, and this start asks for 'so'; corr",
        ),
        (
            {"model": "step 9"},
            "model: .*out.txt.partial was started with 'step 7', and this start asks for 'step 9'",
        ),
        (
            {"--new": 1},
            "--new: .* was started with None, and this start asks for 1; .* start over "
            "with --restart",
        ),
    ],
)
def test_other_options_or_another_model_are_refused_and_the_partial_output_is_kept(
    job, changes, message
):
    stop_at(job, 40)
    before = {path: path.read_bytes() for path in job.output.parent.iterdir()}
    with pytest.raises(ValueError, match=f"^{message}"):
        run(job, **changes)
    assert {path: path.read_bytes() for path in job.output.parent.iterdir()} == before
    assert run(job._replace(restart=True), **changes) == 51
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]


def test_an_input_with_changes_in_its_done_part_is_refused(job):
    stop_at(job, 40)
    job.input.write_text("L" + job.input.read_text()[1:])
    with pytest.raises(
        ValueError,
        match=r"^.*in.txt: its first \d+ bytes are not those that .*partial was made from",
    ):
        run(job)
    with pytest.raises(ValueError, match="its first"):
        job.input.write_text("line")
        run(job)


def test_partial_output_without_a_record_or_with_bytes_missing_is_refused(job):
    partial, record = (job.output.with_name(f"out.txt.partial{end}") for end in ("", ".json"))
    partial.write_text("mine")
    with pytest.raises(
        ValueError,
        match=r"^--output=.*out.txt.partial is there, and out.txt.partial.json, which records",
    ):
        run(job)
    assert partial.read_text() == "mine"
    record.write_text("{}")
    with pytest.raises(ValueError, match="which records its source, cannot be read; correct it"):
        run(job)
    partial.unlink()
    stop_at(job, 40)
    written = json.loads(record.read_text())["written"]
    partial.write_bytes(partial.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=rf"out.txt.partial: expected {written} bytes or more, got {written - 1}"
    ):
        run(job)


def test_a_full_disk_is_one_message_and_the_output_is_kept(job, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(EXPECTED) // 2, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=r"^--output=.*out\.txt: cannot be written: File too large\.$"
        ):
            run(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "lines are kept in" in capsys.readouterr().err
    assert run(job) == 51 and job.output.read_bytes() == EXPECTED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_device_is_one_message(job):
    with pytest.raises(
        ValueError, match=r"^--output=/dev/full: cannot be written: No space left on device\.$"
    ):
        run(job._replace(output=Path("/dev/full")))


def test_two_jobs_do_not_write_the_same_file(job):
    def start_another(window):
        with pytest.raises(
            ValueError,
            match=r"^--output=.*: another process is writing .*out.txt.partial; wait, or",
        ):
            run(job._replace(restart=True))
        return Shouting()(window)

    run(job, start_another)
    assert job.output.read_bytes() == EXPECTED


@pytest.mark.parametrize("name", ["missing/out", "folder"])
def test_an_unwritable_output_is_refused_before_any_work(job, name):
    (job.output.parent / "folder").mkdir()
    answer = Shouting()
    with pytest.raises(ValueError, match=r"^--output=.*: cannot be written: "):
        run(job._replace(output=job.output.parent / name), answer)
    assert answer.seen == [] and names(job) == ["folder", "in.txt"]


def test_progress_is_shown_in_a_log_on_request_and_only_after_some_seconds(
    job, capsys, monkeypatch
):
    run(job._replace(progress=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(line_job, "QUIET", 0.0)
    monkeypatch.setattr(line_job, "PACE", 0.0)
    run(job)
    assert capsys.readouterr().err == ""
    run(job._replace(progress=True))
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 15
    assert re.fullmatch(r"7 lines, [\d,]+ lines a second, \d\d:\d\d left", shown[0])
    assert shown[-1].startswith("101 lines, ") and shown[-1].endswith("00:00 left")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_unless_the_job_is_quick_or_progress_is_off(job, monkeypatch):
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


def test_a_job_killed_at_random_and_restarted_writes_the_same_bytes(job):
    command = [sys.executable, "-c", SLOW, str(job.input), str(job.output)]
    rng = np.random.default_rng(7)
    first_lines, killed = [], 0
    while not job.output.exists():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # no output: only the rename was missing
        first_lines += [int(line) for line in [process.stdout.readline()] if line]
        if killed < 7:
            time.sleep(rng.uniform(0, 0.02 * (killed + 1)))
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
    # each job resumed after the last one
    assert len(first_lines) > 2 and first_lines == sorted(first_lines) and first_lines[-1] > 0
    assert job.output.read_bytes() == EXPECTED and names(job) == ["in.txt", "out.txt"]
