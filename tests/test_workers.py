"""Processes that share the lines of a job: together they answer as one would, and none of them outlives it."""

import functools
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from flaxformer_lite import config, runtime, workers
from flaxformer_lite.data.line_windows import Window
from flaxformer_lite.line_job import Answer

COUNT = 2
LINES = [f"line {i}" for i in range(7)]
pytestmark = pytest.mark.skipif(len(runtime.cores()) < COUNT, reason="there is one core, and so one worker")


class Numbering:
    """Answers with the number of each line, the worker's cores and how many devices it has."""

    def __init__(self, refused=(), bug=None, death=None, sleep=False):
        self._refused, self._bug, self._death, self._sleep = refused, bug, death, sleep  # numbers of lines

    def __call__(self, window):
        for number in window.numbers:
            if number in self._refused:
                config.parse_average(f"{window.name} {number}", "none")
            if number == self._bug:
                int("no number")
            if number == self._death:
                os._exit(7)
        time.sleep(600 if self._sleep else 0)
        texts = zip(window.numbers, window.lines, strict=True)
        return Answer([f"{n}|{line}|{runtime.cores()}|{jax.device_count()}" for n, line in texts], len(window.lines))

    def asked(self):
        return {"cores": runtime.cores()}


def working(**options):
    return workers.working(COUNT, functools.partial(Numbering, **options))


def test_lines_are_answered_in_their_order_by_workers_with_a_share_of_the_cores_and_one_device_each():
    every = runtime.cores()
    shares = [every[: len(every) // COUNT], every[len(every) // COUNT :]]
    with working() as answer:
        assert answer.asked() == {"cores": shares[0]}
        for lines in (LINES, LINES[:1], LINES[:4]):
            written, split = answer(Window(lines, first=10))
            rows = [line.split("|") for line in written]
            assert [row[:2] for row in rows] == [[str(n), line] for n, line in enumerate(lines, start=11)]
            border = len(lines) // COUNT
            assert [row[2:] for row in rows] == [[str(shares[i >= border]), "1"] for i in range(len(lines))]
            assert split == len(lines)
    assert runtime.cores() == every and not multiprocessing.active_children()


def test_of_several_lines_that_are_refused_the_first_is_told_as_one_process_would():
    with pytest.raises(ValueError, match=r"^text 2: expected last:N"), working(refused=(2, 3, 7)) as answer:
        answer(Window(LINES))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("fault", "code"), [({"bug": 5}, 1), ({"death": 5}, 7)])
def test_a_worker_that_ends_by_itself_ends_the_job_with_its_exit_code(fault, code, capfd):
    ended = rf"^worker 1 of 2 has ended with exit code {code}; what it printed says why"
    with pytest.raises(workers.Ended, match=ended), working(**fault) as answer:
        answer(Window(LINES))
    assert ("ValueError: invalid literal for int()" in capfd.readouterr().err) == ("bug" in fault)
    assert not multiprocessing.active_children()


OF_WORKERS_AT_WORK = """
import functools
import test_workers
from flaxformer_lite import workers
from flaxformer_lite.data.line_windows import Window

if __name__ == "__main__":
    with workers.working(2, functools.partial(test_workers.Numbering, sleep=True)) as answer:
        print("ready", flush=True)
        answer(Window(test_workers.LINES))
"""


def test_workers_end_with_a_first_process_that_is_killed_while_they_are_at_work(tmp_path):
    (tmp_path / "main.py").write_text(OF_WORKERS_AT_WORK)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(tmp_path / "main.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(1)  # and the workers are at work
    finally:
        process.kill()
    assert process.communicate(timeout=30)[0] == b""  # which nobody holds open any more


def test_a_path_that_cannot_be_reached_is_told_as_one_process_would(capfd):
    with pytest.raises(OSError, match="File name too long"), workers.working(COUNT, functools.partial(open, "a" * 999)):
        raise AssertionError
    assert capfd.readouterr().err == ""


def test_what_cannot_be_made_is_told_before_there_is_anything_to_answer():
    make = functools.partial(config.parse_average, "average", "none")
    with pytest.raises(ValueError, match=r"^average: expected last:N"), workers.working(COUNT, make):
        raise AssertionError


def test_more_workers_than_cores_are_refused_and_any_where_there_is_more_than_a_cpu(monkeypatch):
    count = len(runtime.cores())
    with pytest.raises(ValueError, match=rf"^--workers: expected 1 to {count}, the cores that there are, got 1009;"):
        workers.working(1009, Numbering).__enter__()
    monkeypatch.setattr(runtime, "computes_on_cpu", lambda: False)
    with pytest.raises(ValueError, match=r"^--workers: goes with a CPU"):
        working().__enter__()
