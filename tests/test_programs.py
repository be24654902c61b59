"""Steps compiled in the background: each shape once, the one that is waited for next, and their memory told."""

import threading

import jax
import jax.numpy as jnp
import pytest
import runs

from flaxformer_lite.config import Config
from flaxformer_lite.runs import multihost
from flaxformer_lite.system import memory
from flaxformer_lite.training import parallel
from flaxformer_lite.training.compilation import CompiledSteps
from flaxformer_lite.training.interrupt import Background

SHAPES = [(3, 5), (7, 11), (13, 17)]


class Compiler(parallel.MeshMode):
    """A mode that notes in which order it compiles."""

    def __init__(self):
        super().__init__(parallel.make_mesh(1))
        self.compiled = []

    def compile(self, step, state, batch, *, donate):
        self.compiled.append(batch["target"].shape)
        return super().compile(step, state, batch, donate=donate)


def count(state, batch):
    """A step that learns nothing."""
    return state + batch["target"].sum(), {"loss": batch["source"].sum()}


def wait(future):
    return future.result(60)


@pytest.fixture
def programs():
    with Background() as thread:
        yield CompiledSteps(Config(), Compiler(), count, jax.ShapeDtypeStruct((), jnp.int32), thread, wait)


def batch(shape):
    ids = jnp.ones(shape, jnp.int32)
    return {"source": ids, "target": ids, "row": jnp.arange(shape[0])}


def test_each_shape_is_compiled_once_and_runs_on_batches_of_its_own(programs):
    programs.start_all(SHAPES)
    programs.start_all(SHAPES[1:])
    for shape in SHAPES:
        state, _ = programs.get(shape)(jnp.int32(2), batch(shape))
        assert int(state) == 2 + shape[0] * shape[1]
    assert sorted(programs._mode.compiled) == SHAPES
    assert len(programs.futures()) == len(SHAPES)


def test_what_is_waited_for_is_compiled_before_what_was_asked_for_earlier(programs):
    begun = []

    def first():
        while not begun:  # until the others stand in line
            pass

    programs._thread.submit(first)
    programs.start_all(SHAPES)
    threading.Timer(0.2, begun.append, [True]).start()
    programs.get(SHAPES[-1])
    assert programs._mode.compiled[0] == SHAPES[-1]


def test_processes_meet_before_a_program_runs_first(programs, monkeypatch):
    met = []
    monkeypatch.setattr(multihost, "barrier", lambda name: met.append(list(programs._mode.compiled)))
    for _ in range(3):
        programs.get(SHAPES[0])
        programs.get(SHAPES[1])
    assert met == [SHAPES[:1], SHAPES[:2]]  # each was compiled by then
    assert programs.get_other(lambda: len(met)) == 2
    assert len(met) == 3


def test_the_memory_of_the_largest_step_is_told_once_when_all_are_compiled(programs, capfd):
    programs.start_all(SHAPES)
    for future in programs.futures():
        future.result(60)
    programs.get(SHAPES[0])
    programs.get(SHAPES[1])
    err = capfd.readouterr().err
    assert err.count("memory of a device") == 1
    assert "batch of 13 x 17" in err and "batch of 3 x 5" not in err


def test_a_lack_of_memory_is_explained_by_what_takes_it_and_other_errors_stay_what_they_are(programs):
    programs.get(SHAPES[0])
    explained = programs.explained(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmore"))
    assert isinstance(explained, memory.OutOfMemory)
    first, *table, advice = str(explained).splitlines()
    assert first == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes."
    assert "batch of 3 x 5" in table[1] and "model.remat='dots'" in advice
    other = RuntimeError("INTERNAL: a bug")
    assert programs.explained(other) is other


def test_what_does_not_compile_says_so_to_whoever_waits(programs):
    state = jax.ShapeDtypeStruct((), jnp.int32)
    broken = CompiledSteps(Config(), Compiler(), lambda state, batch: 1 / 0, state, Background(), wait)
    with pytest.raises(ZeroDivisionError):
        broken.get(SHAPES[0])
    assert "out of memory" in str(broken.explained(RuntimeError("RESOURCE_EXHAUSTED: no")))


@pytest.mark.slow
def test_a_run_that_no_device_can_hold_ends_with_what_takes_the_memory_and_what_to_do(tmp_path):
    process = runs.run("train", *runs.flags({"model.d_ff": 2**40}), f"--workdir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = runs.error_lines(process.stderr)
    assert line.startswith("error: out of memory: ") and "Out of memory allocating" in line
    assert "memory of a device (cpu)" in process.stderr and "model.remat='dots'" in process.stderr
    assert "Traceback" not in process.stderr
