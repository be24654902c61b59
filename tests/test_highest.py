"""The highest of many numbers by the maxima of blocks: against `jax.lax.top_k` of all of them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding import highest

log_sum_exp, top_k = jax.jit(highest.log_sum_exp), jax.jit(highest.top_k, static_argnums=1, static_argnames="without")

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize(
    "shape", [(1, 7), (1, 3001), (1, 4096), (1, 10_002), (4, 127), (4, 640), (7, 1000), (3, 2002), (200, 5)]
)
def test_the_highest_of_many_are_found_in_their_blocks_as_among_them_all(shape, k):
    W, V = shape
    rng = np.random.default_rng(V)
    rows = [rng.normal(size=W * V), rng.integers(0, 3, W * V), np.full(W * V, -np.inf), np.arange(W * V)]
    x_BX = jnp.asarray(np.stack(rows), jnp.float32).at[0, ::2].set(-jnp.inf)
    best_BK, place_BK = jax.lax.top_k(x_BX, k)
    x_VBW = jnp.moveaxis(x_BX.reshape(-1, W, V), -1, 0)
    for found, expected in zip(top_k(x_VBW, k), (best_BK, place_BK // V, place_BK % V), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("shape", "without"),
    [
        ((1, 7), (2,)),
        ((1, 4096), ()),
        ((4, 640), (0, 1, 2, 3)),
        ((4, 640), (0, 639, 77)),
        ((3, 3001), (1, 77, 3000)),
        ((3, 2002), (1, 1001, 2001)),
    ],
    ids=str,
)
def test_the_highest_are_those_of_the_sums_without_what_does_not_count(shape, without):
    """Also where what does not count is the highest of all, in more blocks than are wanted."""
    (W, V), k = shape, 4
    rng = np.random.default_rng(V)
    rows = [rng.normal(size=(W, V)), rng.normal(size=(W, V)), np.zeros((W, V))]
    x_BWV, without = np.stack(rows).astype(np.float32), list(without)
    x_BWV[0, :, without] += 100
    plus_BW = rng.normal(size=(3, W)).astype(np.float32)
    plus_BW[1] = -1e30  # so far below all of the row that its sums are equal
    sum_BWV = x_BWV + plus_BW[..., None]
    sum_BWV[..., without] = -np.inf
    best_BK, place_BK = jax.lax.top_k(sum_BWV.reshape(3, -1), k)
    found = top_k(jnp.moveaxis(jnp.asarray(x_BWV), -1, 0), k, jnp.asarray(plus_BW), without=tuple(without))
    for part, expected in zip(found, (best_BK, place_BK // V, place_BK % V), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("shape", [(7, 3), (16000, 2, 4), (3001, 5, 1)])
def test_the_sum_of_exponentials_is_found_by_the_maxima_of_blocks(shape):
    x = np.random.default_rng(0).normal(scale=9, size=shape).astype(np.float32)
    x.reshape(shape[0], -1)[:, 0] += 1e4  # whose exponentials no float32 holds
    x.reshape(shape[0], -1)[1::2, 1] = -np.inf
    np.testing.assert_allclose(log_sum_exp(jnp.asarray(x)), jax.nn.logsumexp(x, axis=0), rtol=1e-6)


@pytest.mark.parametrize(("V", "W", "k"), [(16000, 4, 4), (17000, 4, 4), (10002, 4, 4), (16000, 1, 1), (25002, 1, 1)])
def test_devices_that_split_the_vocabulary_search_their_own_part_of_it_and_send_none_of_it(V, W, k):
    """Only the maxima of blocks, and the few blocks that are chosen, go from one device to another."""
    B = 2
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    split = jax.NamedSharding(mesh, jax.P("tensor"))
    x_VBW = jnp.asarray(np.random.default_rng(0).normal(size=(V, B, W)), jnp.float32)

    plus_BW = jnp.asarray(np.random.default_rng(1).normal(size=(B, W)), jnp.float32)

    def of_a_step(x_VBW):
        return log_sum_exp(x_VBW), (x_VBW[2], *top_k(x_VBW, k, plus_BW, without=(0, 1, 2, 3)))

    compiled = jax.jit(of_a_step, in_shardings=split).lower(x_VBW).compile()
    sent = re.findall(
        r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)\(", compiled.as_text()
    )
    assert sent and max(math.prod(map(int, dims.split(","))) for dims in sent if dims) < B * W * V / 20
    (log_sum_BW, parts), (expected_BW, alone) = compiled(jax.device_put(x_VBW, split)), of_a_step(x_VBW)
    np.testing.assert_allclose(log_sum_BW, expected_BW, rtol=1e-6)  # a sum in another order
    for found, expected in zip(parts, alone, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_where_too_few_are_left_the_rest_is_minus_infinity_at_places_that_there_are():
    x_VBW = jnp.full((401, 1, 3), -jnp.inf).at[jnp.array([0, 7, 400]), 0, 2].set(jnp.array([9.0, 5.0, 6.0]))
    best_BK, w_BK, v_BK = top_k(x_VBW, 4, jnp.zeros((1, 3)), without=(0, 3))
    assert best_BK.tolist() == [[6, 5, -math.inf, -math.inf]]
    assert (w_BK[0, :2].tolist(), v_BK[0, :2].tolist()) == ([2, 2], [400, 7])
    assert v_BK.min() >= 0 and v_BK.max() < 401


@pytest.mark.parametrize("V", [401, 3001, 2002])
def test_where_no_number_is_one_there_are_places_all_the_same(V):
    x_VBW = jnp.full((V, 1, 1), -jnp.nan).at[V - 1].set(0)
    for k in (1, 4):
        _, w_BK, v_BK = top_k(x_VBW, k)
        assert w_BK.max() == 0 and v_BK.min() >= 0 and v_BK.max() < V
