"""Signals: recorded in a block, noticed while waiting for a thread, and handled as before after."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flaxformer_lite.training import meshes
from flaxformer_lite.training.interrupt import Background, Interrupt, Interrupted, StopTogether


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_recorded_with_its_exit_code(number, code):
    with Interrupt() as interrupt:
        assert (interrupt.requested, interrupt.exit_code) == (False, 0)
        os.kill(os.getpid(), number)
        assert (interrupt.requested, interrupt.exit_code) == (True, code)
        with pytest.raises(Interrupted) as raised:
            interrupt.check()
    assert raised.value.agreed


def test_the_previous_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Interrupt():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_ends_the_wait_for_a_result():
    release = threading.Event()
    with Interrupt() as interrupt:
        future = Background().submit(release.wait)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Interrupted):
            interrupt.wait_for(future)
        assert not future.done()
    release.set()
    assert future.result(timeout=10)


def test_waiting_returns_the_result_or_raises_the_error_of_a_task():
    background = Background()
    with Interrupt() as interrupt:
        assert interrupt.wait_for(background.submit(lambda a, b: a + b, 2, 5)) == 7
        with pytest.raises(ZeroDivisionError):
            interrupt.wait_for(background.submit(lambda: 1 / 0))


def test_tasks_run_in_order_unless_one_is_hurried():
    background, release, order = Background(), threading.Event(), []
    background.submit(release.wait)
    futures = [background.submit(order.append, number) for number in range(4)]
    background.hurry(futures[2])
    release.set()
    futures[3].result(timeout=10)
    assert order == [2, 0, 1, 3]


def test_waiting_tasks_are_dropped_at_the_end_of_the_block():
    started, release, done = threading.Event(), threading.Event(), []
    with pytest.raises(KeyError), Background() as background:
        first = background.submit(lambda: (started.set(), release.wait(), done.append("first")))
        second = background.submit(done.append, "second")
        assert started.wait(10)
        raise KeyError
    assert second.cancelled()
    release.set()
    first.result(timeout=10)
    assert done == ["first"]
    with pytest.raises(RuntimeError, match="closed"):
        background.submit(len, done)


def test_a_closed_background_finishes_its_tasks_and_ends():
    background, release = Background(), threading.Event()
    background.submit(release.wait)
    last = background.submit(int, "7")
    background.close()
    release.set()
    background.join(10)
    assert not background.is_alive()
    assert last.result() == 7
    assert Background.once(int, "11").result(timeout=10) == 11


ENDS_EARLY = """
import sys
import time
from flaxformer_lite.training.interrupt import Background

def work():
    time.sleep(1)
    print("done")

with Background() as background:
    background.submit(work)
    time.sleep(0.2)
    background.submit(print, "never started")
Background.once(work)
sys.exit(3)
"""


def test_a_program_waits_for_running_tasks_at_exit():
    """Python would stop the thread, which aborts the process if it is inside XLA."""
    command = [sys.executable, "-c", ENDS_EARLY]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "done\ndone\n", "")


def test_hurrying_a_finished_task_has_no_effect():
    background = Background()
    future = background.submit(int, "11")
    assert future.result(timeout=10) == 11
    assert background.hurry(future).result() == 11


def test_no_handler_is_set_outside_the_main_thread():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def enter():
        with Interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_single_process_stops_at_the_next_check():
    with Interrupt() as interrupt:
        stop = StopTogether(interrupt, meshes.make_mesh(1))
        stop.now()
        stop.soon()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
        for ask in (stop.now, stop.soon):
            with pytest.raises(Interrupted):
                ask()
