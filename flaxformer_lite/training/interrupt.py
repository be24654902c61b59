"""SIGTERM and SIGINT stop a run between steps, while compiling, and during evaluation.

A Python signal handler runs only when the main thread executes Python, and XLA compiles for minutes
without returning to it. So long calls of XLA run in a worker thread, and the main thread polls.
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
POLL_SECONDS = 0.1
EXIT_TIMEOUT = 60  # seconds


class Interrupted(Exception):
    """Stops the work after a signal.

    Attributes:
      agreed: whether every process of the run stops at the same place.
    """

    def __init__(self, *, agreed: bool = False):
        super().__init__("a signal asked to stop")
        self.agreed = agreed


class Interrupt:
    """As a context, records the first of `SIGNALS`; a second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: Any) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number
        name = signal.Signals(number).name
        os.write(
            2, f"\n{name}: saving and stopping; once more ends at once without saving.\n".encode()
        )

    @property
    def requested(self) -> bool:
        """Whether a signal has been received."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of the process: 143 after SIGTERM, 130 after SIGINT, else 0."""
        return 0 if self.signal is None else 128 + self.signal

    def check(self) -> None:
        """Raises Interrupted if a signal has been received."""
        if self.requested:
            raise Interrupted(agreed=jax.process_count() == 1)

    def wait_for(self, future: concurrent.futures.Future[Any]) -> Any:
        """Returns the result of a future.

        If there are several processes, a signal does not end the wait, as they can only stop
        together, see `StopTogether`.

        Raises:
          Interrupted: a signal came first; the thread of the future continues.
        """
        while not future.done():
            if jax.process_count() == 1:
                self.check()
            concurrent.futures.wait([future], timeout=POLL_SECONDS)
        return future.result()


class StopTogether:
    """Raises Interrupted at the same place in every process, once any of them has a signal."""

    def __init__(self, interrupt: Interrupt, mesh: jax.sharding.Mesh):
        self._interrupt, self._mesh = interrupt, mesh
        self._pending: jax.Array | None = None  # the signals of all processes, from `soon`

    def now(self) -> None:
        """Raises Interrupted if any process has a signal; waits for all processes."""
        if jax.process_count() == 1:
            return self._interrupt.check()
        self._raise_if(self._largest_signal())

    def soon(self) -> None:
        """As `now`, for the signals at the previous call, so that no step waits."""
        if jax.process_count() == 1:
            return self._interrupt.check()
        before, self._pending = self._pending, self._largest_signal()
        if before is not None:
            self._raise_if(before)

    def _largest_signal(self) -> jax.Array:
        return parallel.largest(self._interrupt.signal or 0, self._mesh)

    def _raise_if(self, number: jax.Array) -> None:
        if int(number):
            self._interrupt.signal = int(number)  # every process exits with the code of this signal
            raise Interrupted(agreed=True)


class Background(threading.Thread):
    """A daemon thread that runs tasks in order, until it is closed.

    As a context, it drops the waiting tasks at the end, so that a failed run leaves none behind.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="background")
        self._tasks: list[
            tuple[concurrent.futures.Future[Any], Callable[..., Any], tuple[Any, ...]]
        ] = []
        self._wake, self._closed = threading.Condition(), False
        self.start()

    @classmethod
    def once(cls, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Runs `function(*args)` at once in a new thread; returns its future."""
        background = cls()
        future = background.submit(function, *args)
        background.close()
        return future

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Runs `function(*args)` after the earlier tasks; returns its future.

        Raises:
          RuntimeError: the thread is closed.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("a closed Background takes no more work")
            self._tasks.append((future, function, args))
            self._wake.notify()
        return future

    def close(self, *, drop: bool = False) -> None:
        """Lets the thread end after its tasks; with `drop`, after the current one."""
        with self._wake:
            self._closed = True
            dropped = self._tasks if drop else []
            self._tasks = [] if drop else self._tasks
            self._wake.notify()
        for future, *_ in dropped:
            future.cancel()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(drop=True)

    def hurry(self, future: concurrent.futures.Future[Any]) -> concurrent.futures.Future[Any]:
        """Moves the task of `future` to the front, if it is still waiting; returns `future`."""
        with self._wake:
            self._tasks.sort(key=lambda task: task[0] is not future)
        return future

    def run(self) -> None:
        """Runs the tasks; called by the thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                future, function, args = self._tasks.pop(0)
            try:
                future.set_result(function(*args))
            except BaseException as error:  # raised by the future
                future.set_exception(error)


@atexit.register
def _finish() -> None:
    """Waits for running tasks at exit: a thread that is stopped inside XLA aborts the process.

    Commands exit by `cli.parser.exit_now`; this is for programs that call `fit`.
    """
    for thread in threading.enumerate():
        if isinstance(thread, Background):
            thread.close(drop=True)
            thread.join(EXIT_TIMEOUT)
