"""Several processes that answer the lines of a job between them, each with cores and a model of its own.

On a CPU that is sooner than several devices of one process: these share a pool of threads, and each product is cut into
parts for all of the pool, where a worker with one core computes it whole.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import jax

from flaxformer_lite import runtime
from flaxformer_lite.command_line import is_about_input
from flaxformer_lite.data.line_windows import Window
from flaxformer_lite.line_job import Answer, Answering


def take_share(number: int, count: int) -> None:
    """Keeps this process, which is `number` of `count`, to its share of the cores, and JAX to one device.

    JAX must not have looked for devices yet. Where the system keeps no process to cores, it has all of them.
    """
    every = runtime.cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, every[number * len(every) // count : (number + 1) * len(every) // count])
    jax.config.update("jax_num_cpu_devices", 1)


class Ended(RuntimeError):
    """A worker has ended that was not to; if it could, it has printed why."""


class Workers:
    """Processes that answer a window together, line for line as one would."""

    def __init__(self, pipes: Sequence[Connection], processes: Sequence[BaseProcess]):
        self._pipes, self._processes = pipes, processes

    def __call__(self, window: Window) -> Answer:
        """Lines that follow each other for each worker. Raises the ValueError of the first that has one."""
        count, size = len(self._pipes), len(window.lines)
        borders = [number * size // count for number in range(count + 1)]
        for pipe, a, b in zip(self._pipes, borders, borders[1:], strict=False):
            self.send(pipe, window._replace(lines=window.lines[a:b], first=window.first + a))
        answers = self.hear()
        return Answer([line for answer in answers for line in answer.lines], sum(answer.split for answer in answers))

    def asked(self) -> Mapping[str, Any]:
        """What the answers depend on, as the first worker tells it."""
        self.send(self._pipes[0], None)
        return self.hear(1)[0]

    def hear(self, count: int | None = None) -> list[Any]:
        """What each of the first `count` has to say, all by default; raises the first that is an error."""
        said = []
        for number in range(len(self._pipes) if count is None else count):
            said.append(self._from(number))
            if isinstance(said[-1], Exception):
                raise said[-1]
        return said

    def send(self, pipe: Connection, question: object) -> None:
        """To one of them."""
        with contextlib.suppress(OSError):  # it has ended, which is seen where it does not answer
            pipe.send(question)

    def _from(self, number: int) -> Any:
        try:
            return self._pipes[number].recv()
        except (EOFError, OSError):
            self._processes[number].join(10)
            code, which = self._processes[number].exitcode, f"worker {number} of {len(self._pipes)}"
            advice = "what it printed says why; if nothing, it was killed, as for want of memory: have fewer workers"
            raise Ended(f"{which} has ended with exit code {code}; {advice}.") from None


@contextlib.contextmanager
def working(count: int, make: Callable[[], Answering]) -> Iterator[Workers]:
    """Workers that are ready; with the context they end.

    Args:
      make: called in each worker, which imports it by its name.

    Raises:
      ValueError: there are not so many cores; or as `make`.
      Ended: a worker has.
    """
    if not runtime.computes_on_cpu():
        raise ValueError("--workers: goes with a CPU, and JAX finds more here; leave it out, or set JAX_PLATFORMS=cpu.")
    if not 1 <= count <= (most := len(runtime.cores())):
        raise ValueError(f"--workers: expected 1 to {most}, the cores that there are, got {count}; lower it.")
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    try:
        for number in range(count):
            pipe, theirs = context.Pipe()
            pipes.append(pipe)
            process = context.Process(target=_work, args=(theirs, number, count), daemon=True)
            with _without_interrupts():
                process.start()
            processes.append(process)
            theirs.close()
        workers = Workers(pipes, processes)
        for pipe in pipes:
            workers.send(pipe, make)
        workers.hear()
        yield workers
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started ignores SIGINT, which a terminal sends to all: the first process ends the others."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what becomes of signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(pipe: Connection, number: int, count: int) -> None:
    """A worker: it makes what it is told to, says that it is ready, and answers; bad input is its last word."""
    threading.Thread(target=_end_with_the_first_process, daemon=True).start()
    take_share(number, count)
    runtime.start()
    try:
        answer = next(_heard(pipe))()  # whose libraries are imported only now
        _tell(pipe, None)
        for window in _heard(pipe):
            _tell(pipe, answer.asked() if window is None else answer(window))
    except (ValueError, OSError) as error:
        if not is_about_input(error):
            raise
        _tell(pipe, error)


def _heard(pipe: Connection) -> Iterator[Any]:
    """What the first process says, as long as it does."""
    while True:
        try:
            said = pipe.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        yield said


def _tell(pipe: Connection, what: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more, and this process ends with the first one
        pipe.send(what)


def _end_with_the_first_process() -> None:
    """Also where that was killed, and this one is at work."""
    multiprocessing.parent_process().join()
    os._exit(0)
