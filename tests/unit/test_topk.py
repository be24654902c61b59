"""Top-k in blocks, against `jax.lax.top_k` of all values."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding import topk as topk_lib

topk = jax.jit(topk_lib.topk, static_argnums=1)

pytestmark = pytest.mark.usefixtures("quickly_compiled")


PLAIN = {(7, 4), (2002, 4), (3001, 1), (16_000, 7)}


@pytest.mark.parametrize(
    ("N", "k"),
    [
        pytest.param(N, k, marks=() if (N, k) in PLAIN else pytest.mark.slow)
        for N in (7, 127, 2002, 3001, 4096, 10_002, 16_000)
        for k in (1, 4, 7)
    ],
)
def test_it_finds_the_values_and_indices_of_a_top_k_of_all_values_even_of_equal_values(N, k):
    rng = np.random.default_rng(N)
    rows = [
        rng.normal(size=N),
        rng.integers(0, 3, N),
        np.full(N, -np.inf),
        np.arange(N),
        np.zeros(N),
    ]
    x_BN = jnp.asarray(np.stack(rows), jnp.float32).at[0, ::2].set(-jnp.inf)
    assert N < 200 or topk_lib.FEWEST_BLOCKS * topk_lib.block_size(N, k) * k <= N  # it uses blocks
    for found, expected in zip(topk(x_BN, k), jax.lax.top_k(x_BN, k), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_it_accepts_any_leading_axes():
    x_BWN = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 3001)), jnp.float32)
    for found, expected in zip(topk(x_BWN, 4), jax.lax.top_k(x_BWN, 4), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("N", [401, pytest.param(2002, marks=pytest.mark.slow), 3001])
def test_indices_are_valid_even_if_too_few_values_are_finite(N):
    for x_1N in (
        jnp.full((1, N), -jnp.nan).at[0, N - 1].set(0),
        jnp.full((1, N), -jnp.inf).at[0, N - 1].set(0),
    ):
        for k in (1, 4):
            _, index_1K = topk(x_1N, k)
            assert index_1K.min() >= 0 and index_1K.max() < N


@pytest.mark.parametrize(("N", "k"), [(16_000, 4), (17_000, 4), (16_000, 1)])
def test_devices_that_split_the_values_send_only_maxima_and_chosen_blocks(N, k):
    shape, mesh = (2, 4, N), jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    split = jax.NamedSharding(mesh, jax.P(None, None, "tensor"))
    x_BWN = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    jitted = jax.jit(topk_lib.topk, static_argnums=1, in_shardings=split)
    compiled = jitted.lower(x_BWN, k).compile()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute"
    sent = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{kinds})\(", compiled.as_text())
    sizes = [math.prod(map(int, dims.split(","))) for dims in sent if dims]
    assert sent and max(sizes) < math.prod(shape) / 5
    found = compiled(jax.device_put(x_BWN, split))
    for ours, expected in zip(found, jax.lax.top_k(x_BWN, k), strict=True):
        np.testing.assert_array_equal(ours, expected)
