"""SIGTERM and SIGINT as a polite request: noticed between steps, while compiling and in evaluation.

A Python signal handler runs only when the main thread is back in Python, and XLA compiles for minutes without
coming back. So whatever takes long in XLA runs in a worker thread while the main thread waits in short naps.
"""

import atexit
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
LAST_WAIT = 60  # seconds


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


class Background(threading.Thread):
    """A daemon thread that does one thing after another, until it is closed.

    As a context, it drops what has not begun when it is left, so that a run that fails leaves no work behind it.
    """

    def __init__(self):
        super().__init__(daemon=True, name="background")
        self._tasks: list[tuple[concurrent.futures.Future, Callable, tuple]] = []
        self._wake, self._closed = threading.Condition(), False
        self.start()

    @classmethod
    def once(cls, function: Callable, *args) -> concurrent.futures.Future:
        """A future for `function(*args)`, which runs at once in a thread that ends with it."""
        background = cls()
        future = background.submit(function, *args)
        background.close()
        return future

    def submit(self, function: Callable, *args) -> concurrent.futures.Future:
        """A future for `function(*args)`, which runs after what was submitted before. Raises RuntimeError if closed."""
        future = concurrent.futures.Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("a closed Background takes no more work")
            self._tasks.append((future, function, args))
            self._wake.notify()
        return future

    def close(self, *, drop: bool = False) -> None:
        """Takes no more work; the thread ends when what it has is done, or what it is at if it is to drop the rest."""
        with self._wake:
            self._closed = True
            dropped = self._tasks if drop else []
            self._tasks = [] if drop else self._tasks
            self._wake.notify()
        for future, *_ in dropped:
            future.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close(drop=True)

    def hurry(self, future: concurrent.futures.Future) -> concurrent.futures.Future:
        """Moves what `future` stands for to the front, unless its turn has come already; returns it."""
        with self._wake:
            self._tasks.sort(key=lambda task: task[0] is not future)
        return future

    def run(self) -> None:
        """What the thread does; not to be called."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                future, function, args = self._tasks.pop(0)
            try:
                future.set_result(function(*args))
            except BaseException as error:  # it belongs to whoever asks for the result
                future.set_exception(error)


@atexit.register
def _finish() -> None:
    """Waits for what is under way when Python ends: a thread that is stopped inside XLA aborts the whole process.

    Commands end otherwise, see `cli.parser.exit_now`; this is for programs that call `fit`.
    """
    for background in [thread for thread in threading.enumerate() if isinstance(thread, Background)]:
        background.close(drop=True)
        background.join(LAST_WAIT)
