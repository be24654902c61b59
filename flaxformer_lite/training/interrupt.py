"""SIGTERM and SIGINT as a polite request: noticed between steps, while compiling and in evaluation.

A Python signal handler runs only when the main thread is back in Python, and XLA compiles for minutes without
coming back. So whatever takes long in XLA runs in a worker thread while the main thread waits in short naps.
"""

import concurrent.futures
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from flaxformer_lite.training import parallel

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NAP = 0.1  # seconds


class Interrupted(Exception):
    """Raised where work stops because a signal asked for it; `agreed` if every process of the run stops here."""

    def __init__(self, *, agreed: bool = False):
        super().__init__("a signal asked to stop")
        self.agreed = agreed


class Interrupt:
    """Remembers the first signal of `SIGNALS` while it is entered; a second one ends the process at once."""

    def __init__(self):
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        name = signal.Signals(number).name
        os.write(2, f"\n{name}: saving and stopping; once more ends at once without saving.\n".encode())

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What the process should exit with: 143 after SIGTERM, 130 after SIGINT; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.requested:
            raise Interrupted(agreed=jax.process_count() == 1)

    def wait_for(self, future: concurrent.futures.Future) -> Any:
        """The future's result; raises Interrupted if a signal comes before it is there, leaving its thread at work.

        One process of many waits to the end: it may only stop where the others do, see `StopTogether`.
        """
        while not future.done():
            if jax.process_count() == 1:
                self.check()
            concurrent.futures.wait([future], timeout=NAP)
        return future.result()


class StopTogether:
    """Raises Interrupted at the same place in every process, once a signal has come to any of them."""

    def __init__(self, interrupt: Interrupt, mesh: jax.sharding.Mesh):
        self._interrupt, self._mesh, self._asked = interrupt, mesh, None

    def now(self) -> None:
        """Asks all processes and waits for the answer."""
        if jax.process_count() == 1:
            return self._interrupt.check()
        self._act_on(self._ask())

    def soon(self) -> None:
        """Asks all processes, and acts on the answer of the call before: no step waits for it."""
        if jax.process_count() == 1:
            return self._interrupt.check()
        before, self._asked = self._asked, self._ask()
        if before is not None:
            self._act_on(before)

    def _ask(self) -> jax.Array:
        return parallel.largest(self._interrupt.signal or 0, self._mesh)

    def _act_on(self, answer: jax.Array) -> None:
        if int(answer):
            self._interrupt.signal = int(answer)  # every process exits with the code of this signal
            raise Interrupted(agreed=True)


class Background:
    """One daemon thread that does one thing after another: it never keeps the process from ending.

    As a context, it drops what has not begun when it is left, so that a run that fails leaves no work behind it.
    """

    def __init__(self):
        self._tasks: list[tuple[concurrent.futures.Future, Callable, tuple]] = []
        self._wake = threading.Condition()
        threading.Thread(target=self._work, daemon=True, name="background").start()

    def submit(self, function: Callable, *args) -> concurrent.futures.Future:
        """A future for `function(*args)`, which runs after what was submitted before."""
        future = concurrent.futures.Future()
        with self._wake:
            self._tasks.append((future, function, args))
            self._wake.notify()
        return future

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        with self._wake:
            dropped, self._tasks = self._tasks, []
        for future, *_ in dropped:
            future.cancel()

    def hurry(self, future: concurrent.futures.Future) -> concurrent.futures.Future:
        """Moves what `future` stands for to the front, unless its turn has come already; returns it."""
        with self._wake:
            self._tasks.sort(key=lambda task: task[0] is not future)
        return future

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._tasks)
                future, function, args = self._tasks.pop(0)
            try:
                future.set_result(function(*args))
            except BaseException as error:  # it belongs to whoever asks for the result
                future.set_exception(error)
