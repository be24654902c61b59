"""The training step, compiled for each shape of batch in a thread of its own, so that nothing waits needlessly."""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from flaxformer_lite.config import Config
from flaxformer_lite.data.batches import batch_shapes
from flaxformer_lite.runs import multihost
from flaxformer_lite.system import memory
from flaxformer_lite.training import run_report
from flaxformer_lite.training.interrupt import Background
from flaxformer_lite.training.parallel import MeshMode, PmapMode

Shape = tuple[int, int]  # rows and length of a batch


class CompiledSteps:
    """One program a shape, each compiled once, in the order in which they are asked for.

    Processes that share a program meet before it runs for the first time: on CPUs those that are ready half a minute
    before the others would give up.
    """

    def __init__(
        self,
        config: Config,
        mode: MeshMode | PmapMode,
        step: Callable,
        state: Any,
        thread: Background,
        wait: Callable[[Future], Any],
    ):
        """
        Args:
          step: `train_step` of the state and a batch.
          state: shapes and types of the state.
          thread: what compiles.
          wait: returns a future's result, or raises if there is a reason to stop.
        """
        self._config, self._mode, self._step, self._state = config, mode, step, state
        self._thread, self._wait = thread, wait
        self._of_shape: dict[Shape, Future] = {}
        self._shared: set[Shape] = set()  # those that all processes have
        self._told = False

    def start(self, shape: Shape) -> Future:
        """Compiles the step for batches of `shape` in its turn."""
        if shape not in self._of_shape:
            struct = batch_shapes.struct(self._config, *shape)
            compile_step = functools.partial(self._mode.compile, self._step, self._state, struct, donate=True)
            self._of_shape[shape] = self._thread.submit(compile_step)
        return self._of_shape[shape]

    def start_all(self, shapes: Iterable[Shape]) -> None:
        """Compiles it for all of `shapes`."""
        for shape in shapes:
            self.start(shape)

    def get(self, shape: Shape) -> Callable:
        """The program for `shape`, which is compiled next if it is not yet."""
        if not self._told and self._of_shape and all(program.done() for program in self.futures()):
            self._told = True
            self._tell()
        program = self._wait(self._thread.hurry(self.start(shape)))
        if shape not in self._shared:
            multihost.barrier(f"all have compiled the step of {shape}")
            self._shared.add(shape)
        return program

    def _tell(self) -> None:
        """Says what the largest step takes of a device, if it can be known."""
        if known := self._memory():
            largest = max(known, key=lambda each: known[each].total)
            run_report.say(memory.table({largest: known[largest]}, self._mode.mesh.local_devices[0]))

    def get_other(self, compile: Callable[[], Any]) -> Any:
        """Another program, as what evaluates, which `compile` makes next."""
        program = self._wait(self._thread.hurry(self._thread.submit(compile)))
        multihost.barrier("all have compiled another program")
        return program

    def futures(self) -> list[Future]:
        """All programs up to now."""
        return list(self._of_shape.values())

    def explained(self, error: Exception) -> Exception:
        """`error`, or if it is a lack of memory, what takes it and what to do."""
        if not memory.is_lack_of(error):
            return error
        known = self._memory()
        what = memory.table(known, self._mode.mesh.local_devices[0]) + "\n" if known else ""
        return memory.OutOfMemory(f"out of memory: {str(error).splitlines()[0]}\n{what}{memory.ADVICE}")

    def _memory(self) -> dict[Shape, memory.Memory]:
        done = {shape: each for shape, each in self._of_shape.items() if each.done() and not each.exception()}
        platform = self._mode.mesh.devices.flat[0].platform
        found = {shape: memory.of_program(each.result(), platform) for shape, each in done.items()}
        return {shape: each for shape, each in found.items() if each}
