"""The device memory of a compiled step, and out-of-memory errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.system import memory
from flaxformer_lite.system.memory import Memory

N = 257


def test_the_memory_of_a_step_is_its_state_its_batch_and_its_temporary_buffers():
    """The state is donated, so that the new state uses the same memory."""

    def step(state, batch):
        outer = jnp.outer(batch, batch)  # N x N, materialised, as it is sorted
        return state + jnp.sort(outer, axis=0)[N // 2]

    state = jax.ShapeDtypeStruct((N,), jnp.float32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, state).compile()
    found = memory.of_program(compiled, "cpu")
    assert found.state == 2 * 4 * N
    assert found.temporary >= 4 * N * N
    assert found.total == found.state + found.temporary


def test_the_peak_is_that_of_the_compiler_if_reported_and_the_total_adds_the_code():
    found = Memory(state=10**9, temporary=7 * 10**9, code=2 * 10**8, most=6 * 10**9)
    assert (found.peak, found.total) == (6 * 10**9, 62 * 10**8)
    assert str(found) == "state and batch 1, within the step 5, the program 0.2"


@pytest.mark.parametrize(
    ("error", "shortage"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (96.00G) exceeds available HBM (15.75G).",
            "needs 96 GiB, 15.75 GiB available, 80.2 GiB short",
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 28.21G of 15.75G hbm. Exceeded hbm capacity by 12.46G.\n\nTotal hbm "
            "usage",
            "needs 28.2 GiB, 15.75 GiB available, 12.5 GiB short",
        ),
        ("RESOURCE_EXHAUSTED: something else\nand more", "RESOURCE_EXHAUSTED: something else"),
    ],
)
def test_the_missing_memory_is_parsed_from_the_compilers_error(error, shortage):
    assert memory.is_lack_of(Exception(error))
    assert memory.shortage(Exception(error)) == shortage


def test_a_function_without_memory_analysis_has_no_memory():
    assert memory.of_program(lambda state, batch: state, "cpu") is None


def test_the_buffers_within_the_step_count_even_if_the_state_is_larger():
    def step(state):
        return state + jnp.sort(state, axis=0)[::-1] @ jnp.ones((N, N))

    state = jax.ShapeDtypeStruct((8 * N, N), jnp.float32)
    found = memory.of_program(jax.jit(step, donate_argnums=0).lower(state).compile(), "cpu")
    assert found.state == 4 * 8 * N * N
    assert found.total > found.state + found.temporary / 2 > found.state


def test_the_table_is_sorted_from_most_to_least_memory():
    of_shape = {(3, 5): Memory(10**9, 2 * 10**9), (7, 11): Memory(10**9, 4 * 10**9)}
    first, *lines = memory.table(of_shape, jax.local_devices()[0]).splitlines()
    assert first == "memory of a device (cpu), by the compiler, in GB:"
    assert lines == [
        "  batch of 7 x 11: 5: state and batch 1, within the step 4",
        "  batch of 3 x 5: 3: state and batch 1, within the step 2",
    ]


class Device:
    """A fake accelerator."""

    device_kind = "NVIDIA H200"

    def memory_stats(self):
        return {"bytes_limit": 141 * 10**9}


def test_the_table_has_the_memory_of_an_accelerator():
    assert "(NVIDIA H200, which has 141 GB)" in memory.table({(3, 5): Memory(1, 1)}, Device())


def test_an_out_of_memory_error_is_distinguished_from_other_errors():
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jnp.zeros((2**22, 2**22)).block_until_ready()  # 64 TiB
    assert memory.is_lack_of(error.value)
    with pytest.raises(Exception) as other:
        jnp.asarray(np.ones(3)).reshape(2)
    assert not memory.is_lack_of(other.value)
