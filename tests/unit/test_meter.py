"""The meter: throughput, waiting for data, utilization and goodput, by a fake clock."""

import math
import threading
import time

import jax.numpy as jnp
import pytest

from flaxformer_lite.training import meter as meter_lib
from flaxformer_lite.training.meter import Meter


@pytest.fixture
def clock(monkeypatch):
    """A fake clock: seconds, in a list of 1."""
    now = [1000.0]
    monkeypatch.setattr(meter_lib.time, "monotonic", lambda: now[0])
    return now


def meter(clock, **options):
    """Returns the meter of a run that starts now."""
    start = clock[0]
    return Meter("tokens", **{"peak": None, "elapsed": lambda: clock[0] - start, **options})


def test_the_rate_of_tokens_is_since_the_last_line(clock):
    counted = meter(clock)
    counted.add(7, 0)
    counted.add(13, 0)
    clock[0] += 5
    assert counted.rate() == 4
    assert counted.line()["tokens_per_second"] == 4
    counted.add(6, 0)
    clock[0] += 3
    assert counted.line()["tokens_per_second"] == 2


def test_the_share_of_waiting_is_since_the_last_line(clock):
    counted, waits = meter(clock), []

    def made(seconds):
        for second in seconds:
            clock[0] += second
            yield second

    for _ in counted.waiting_for(made([1, 2, 5])):
        clock[0] += 3  # of work
        waits.append(counted.line()["data_wait"])
        clock[0] += 2
    assert waits == [pytest.approx(1 / 4), pytest.approx(2 / 7), pytest.approx(5 / 10)]


class Computing:
    """An array of a step that devices compute until `end`, on the clock."""

    def __init__(self, clock, end):
        self.clock, self.end, self.waiting = clock, end, []

    def is_ready(self):
        return self.clock[0] >= self.end

    def block_until_ready(self):
        self.waiting.append(threading.current_thread())
        while self.clock[0] < self.end:
            time.sleep(0.001)
        return self

    def recorded(self):
        """Returns when the waiting thread has recorded the time."""
        while not self.waiting:
            time.sleep(0.001)
        self.waiting[0].join()


def test_waiting_does_not_count_while_devices_compute(clock):
    counted, computing = meter(clock), []

    def made(*seconds):
        for until_idle, then in seconds:
            clock[0] += until_idle
            if then:
                computing[0].recorded()
            clock[0] += then
            yield

    batches = counted.waiting_for(
        made((0, 0), (3, 0), (2, 4)), lambda: computing[0] if computing else None
    )
    next(batches)
    computing[:] = [Computing(clock, end=clock[0] + 5)]
    next(batches)
    assert counted.line()["data_wait"] == 0  # the batch came before the end of the step
    computing[:] = [Computing(clock, end=clock[0] + 2)]
    next(batches)
    assert counted.line()["data_wait"] == pytest.approx(4 / 6)


def test_waiting_starts_when_the_arrays_of_a_step_are_computed(clock):
    counted, sums = meter(clock), {"loss": (jnp.ones(3), jnp.ones(()))}

    def made():
        before = set(threading.enumerate())
        yield  # the first batch, without a step before it
        for thread in set(threading.enumerate()) - before:
            thread.join()
        clock[0] += 4
        yield

    batches = counted.waiting_for(made(), lambda: sums)
    next(batches)
    next(batches)
    clock[0] += 6
    assert counted.line()["data_wait"] == pytest.approx(4 / 10)


def test_a_paused_block_does_not_count_even_if_it_fails(clock):
    counted = meter(clock)
    counted.add(20, 0)
    clock[0] += 5
    with counted.paused():
        clock[0] += 100
    with pytest.raises(RuntimeError), counted.paused():
        clock[0] += 100
        raise RuntimeError
    assert counted.rate() == 4
    assert counted.useful == 5


def test_utilization_is_the_share_of_the_peak_and_nan_without_one(clock):
    counted = meter(clock, peak=100.0)
    counted.add(1, 90)
    counted.add(1, 60)
    clock[0] += 5
    assert counted.line()["mfu"] == pytest.approx(150 / 5 / 100)
    clock[0] += 5
    assert counted.line()["mfu"] == 0
    assert math.isnan(meter(clock).line()["mfu"])


def test_goodput_excludes_waiting_pauses_and_repeated_steps_of_all_starts(clock):
    """An earlier start took 40 seconds, 10 of them useful."""
    clock[0] += 3  # until the first step
    counted = Meter("tokens", peak=None, elapsed=lambda: 40 + clock[0] - 1000, useful=10.0)
    clock[0] += 20
    with counted.paused():
        clock[0] += 7
    assert counted.line()["goodput"] == pytest.approx((10 + 20) / (40 + 3 + 20 + 7))
    clock[0] += 30  # a test at the end, after the last line
    assert counted.goodput() == pytest.approx((10 + 20) / 100)
