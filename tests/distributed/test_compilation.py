"""Steps compiled in the background: once for each shape, the requested one next; their memory."""

import threading

import jax
import jax.numpy as jnp
import pytest
import runs

from flaxformer_lite.config import Config
from flaxformer_lite.runs import multihost
from flaxformer_lite.system import memory
from flaxformer_lite.training import meshes, parallel
from flaxformer_lite.training.compilation import CompiledSteps
from flaxformer_lite.training.interrupt import Background

SHAPES = [(3, 5), (7, 11), (13, 17)]


class Compiler(parallel.MeshMode):
    """A parallel mode that records the order in which it compiles."""

    def __init__(self):
        super().__init__(meshes.make_mesh(1))
        self.compiled = []

    def compile(self, step, state, batch, *, donate):
        self.compiled.append(batch["target"].shape)
        return super().compile(step, state, batch, donate=donate)


def count(state, batch):
    """A fake training step: counts tokens."""
    return state + batch["target"].sum(), {"loss": batch["source"].sum()}


def wait(future):
    return future.result(60)


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def thread():
    with Background() as thread:
        yield thread


@pytest.fixture
def steps(compiler, thread):
    state = jax.ShapeDtypeStruct((), jnp.int32)
    return CompiledSteps(Config(), compiler, count, state, thread, wait)


def batch(shape):
    ids = jnp.ones(shape, jnp.int32)
    return {"source": ids, "target": ids, "row": jnp.arange(shape[0])}


def test_each_shape_is_compiled_once_and_runs_on_batches_of_that_shape(steps, compiler):
    steps.start_all(SHAPES)
    steps.start_all(SHAPES[1:])
    for shape in SHAPES:
        state, _ = steps.get(shape)(jnp.int32(2), batch(shape))
        assert int(state) == 2 + shape[0] * shape[1]
    assert sorted(compiler.compiled) == SHAPES
    assert len(steps.futures()) == len(SHAPES)


def test_the_step_that_is_waited_for_is_compiled_before_those_queued_earlier(
    steps, compiler, thread
):
    queued = []

    def first():
        while not queued:  # until the other shapes are queued
            pass

    thread.submit(first)
    steps.start_all(SHAPES)
    threading.Timer(0.2, queued.append, [True]).start()
    steps.get(SHAPES[-1])
    assert compiler.compiled[0] == SHAPES[-1]


def test_processes_wait_for_each_other_before_the_first_run_of_a_step(steps, compiler, monkeypatch):
    met = []
    monkeypatch.setattr(multihost, "barrier", lambda name: met.append(list(compiler.compiled)))
    for _ in range(3):
        steps.get(SHAPES[0])
        steps.get(SHAPES[1])
    assert met == [SHAPES[:1], SHAPES[:2]]  # each was compiled by then
    assert steps.get_other(lambda: len(met)) == 2
    assert len(met) == 3


def test_the_memory_of_the_largest_step_is_printed_once_when_all_are_compiled(steps, capfd):
    steps.start_all(SHAPES)
    for future in steps.futures():
        future.result(60)
    steps.get(SHAPES[0])
    steps.get(SHAPES[1])
    err = capfd.readouterr().err
    assert err.count("memory of a device") == 1
    assert "batch of 13 x 17" in err and "batch of 3 x 5" not in err


def test_an_out_of_memory_error_gets_a_table_and_advice_and_other_errors_are_unchanged(steps):
    steps.get(SHAPES[0])
    explained = steps.explained(
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.\nmore")
    )
    assert isinstance(explained, memory.OutOfMemory)
    first, *table, advice = str(explained).splitlines()
    assert first == "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes."
    assert "batch of 3 x 5" in table[1] and "model.remat='dots'" in advice
    other = RuntimeError("INTERNAL: a bug")
    assert steps.explained(other) is other


def test_a_compilation_error_is_raised_in_the_thread_that_waits():
    state = jax.ShapeDtypeStruct((), jnp.int32)
    broken = CompiledSteps(
        Config(), Compiler(), lambda state, batch: 1 / 0, state, Background(), wait
    )
    with pytest.raises(ZeroDivisionError):
        broken.get(SHAPES[0])
    assert "out of memory" in str(broken.explained(RuntimeError("RESOURCE_EXHAUSTED: no")))


@pytest.mark.slow
def test_a_run_that_needs_too_much_memory_ends_with_a_table_and_advice(tmp_path):
    process = runs.run("train", *runs.flags({"model.d_ff": 2**40}), f"--workdir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = runs.error_lines(process.stderr)
    assert line.startswith("error: out of memory: ") and "Out of memory allocating" in line
    assert "memory of a device (cpu)" in process.stderr and "model.remat='dots'" in process.stderr
    assert "Traceback" not in process.stderr
