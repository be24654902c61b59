"""The training step, compiled for each batch shape in a background thread."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from flaxformer_lite.data.batches import loader
from flaxformer_lite.fields import Config
from flaxformer_lite.runs import multihost
from flaxformer_lite.system import memory
from flaxformer_lite.training import run_report
from flaxformer_lite.training.interrupt import Background
from flaxformer_lite.training.parallel import MeshMode, PmapMode

Shape = tuple[int, int]  # (rows, length) of a batch


class CompiledSteps:
    """One compiled step for each batch shape; each is compiled once, in the order of the requests.

    Processes that run the same compiled step wait for each other before its first run. Otherwise,
    on CPUs, a process that is ready 30 s before the others would time out.
    """

    def __init__(
        self,
        config: Config,
        mode: MeshMode | PmapMode,
        step: Callable[..., Any],
        state: Any,
        thread: Background,
        wait: Callable[[Future[Any]], Any],
    ):
        """
        Args:
          mode: the parallel mode.
          step: a function of the state and a batch, such as `train_step`.
          state: the abstract state: shapes and types.
          thread: the background thread that compiles.
          wait: returns the result of a future, or raises if the run is to stop.
        """
        self._config, self._mode, self._step, self._state = config, mode, step, state
        self._thread, self._wait = thread, wait
        self._of_shape: dict[Shape, Future[Any]] = {}
        self._shared: set[Shape] = set()  # shapes that all processes have compiled
        self._reported = False

    def start(self, shape: Shape) -> Future[Any]:
        """Queues the compilation for a shape, unless it is queued or done; returns its future."""
        if shape not in self._of_shape:
            struct = loader.batch_struct(self._config, *shape, train=True)
            compile_step = functools.partial(
                self._mode.compile, self._step, self._state, struct, donate=True
            )
            self._of_shape[shape] = self._thread.submit(compile_step)
        return self._of_shape[shape]

    def start_all(self, shapes: Iterable[Shape]) -> None:
        """Queues the compilation for all of `shapes`."""
        for shape in shapes:
            self.start(shape)

    def get(self, shape: Shape) -> Callable[..., Any]:
        """Returns the compiled step for `shape`; if it is not compiled yet, it is compiled next."""
        if not self._reported and self._of_shape and all(each.done() for each in self.futures()):
            self._reported = True
            self._report_memory()
        compiled = self._wait(self._thread.hurry(self.start(shape)))
        if shape not in self._shared:
            multihost.barrier(f"all have compiled the step of {shape}")
            self._shared.add(shape)
        return compiled

    def _report_memory(self) -> None:
        """Prints the device memory of the largest step, if the compiler reports it."""
        if known := self._memory():
            largest = max(known, key=lambda each: known[each].total)
            run_report.say(
                memory.table({largest: known[largest]}, self._mode.mesh.local_devices[0])
            )

    def get_other(self, compile: Callable[[], Any]) -> Any:
        """Returns the result of `compile`, for another step such as the evaluation step."""
        compiled = self._wait(self._thread.hurry(self._thread.submit(compile)))
        multihost.barrier("all have compiled another program")
        return compiled

    def futures(self) -> list[Future[Any]]:
        """Returns the futures of all steps that have been requested."""
        return list(self._of_shape.values())

    def explained(self, error: Exception) -> Exception:
        """Returns `error`; an out-of-memory error as OutOfMemory, with a table and advice."""
        if not memory.is_lack_of(error):
            return error
        known = self._memory()
        table = memory.table(known, self._mode.mesh.local_devices[0]) + "\n" if known else ""
        return memory.OutOfMemory(
            f"out of memory: {str(error).splitlines()[0]}\n{table}{memory.ADVICE}"
        )

    def _memory(self) -> dict[Shape, memory.Memory]:
        """Returns the memory of each compiled step, as far as the compiler reports it."""
        done = {
            shape: each
            for shape, each in self._of_shape.items()
            if each.done() and not each.exception()
        }
        platform = self._mode.mesh.devices.flat[0].platform
        found = {shape: memory.of_program(each.result(), platform) for shape, each in done.items()}
        return {shape: each for shape, each in found.items() if each}
