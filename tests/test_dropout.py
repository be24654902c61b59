"""Dropout: the rate, the mean, and a mask that belongs to the row and not to the batch."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model.dropout import Dropout, dropout, keep_mask, scramble

KEY = jax.random.key(5)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_rate(rate):
    mask = np.asarray(keep_mask(KEY, jnp.arange(211), (211, 13, 17), rate=rate))
    sigma = math.sqrt(rate * (1 - rate) / mask.size)
    assert abs(1 - mask.mean() - rate) <= 4 * sigma


def test_every_column_is_dropped_at_the_rate():
    mask = np.asarray(keep_mask(KEY, jnp.arange(5003), (5003, 7), rate=0.3))
    sigma = math.sqrt(0.3 * 0.7 / len(mask))
    np.testing.assert_allclose(1 - mask.mean(axis=0), 0.3, atol=4 * sigma)


@pytest.mark.parametrize("shift", [(0, 1), (0, 2), (1, 0), (1, 1)])
def test_neighbours_are_dropped_independently(shift):
    mask = np.asarray(keep_mask(KEY, jnp.arange(503), (503, 101), rate=0.5))
    rows, columns = 503 - shift[0], 101 - shift[1]
    both = mask[:rows, :columns] & mask[shift[0] :, shift[1] :]
    assert abs(both.mean() - 0.25) <= 4 * math.sqrt(0.25 * 0.75 / both.size)


def masks(number: int, *, rate: float, rows: int = 64, columns: int = 512) -> np.ndarray:
    """Masks of as many steps of a run, (number, rows, columns), each with the key that its step has."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(number))
    draw = jax.jit(jax.vmap(lambda key: keep_mask(key, jnp.arange(rows), (rows, columns), rate=rate)))
    return np.asarray(draw(keys))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 3, 8, 32])
def test_what_is_dropped_does_not_depend_on_any_other_step_row_or_element(axis, distance):
    """The correlation with what lies `distance` away is that of chance."""
    kept = masks(40, rate=0.1).astype(np.float64) - 0.9
    here, there = (
        np.take(kept, range(*ends), axis=axis)
        for ends in ((0, kept.shape[axis] - distance), (distance, kept.shape[axis]))
    )
    assert abs((here * there).mean()) <= 4 * 0.09 / math.sqrt(here.size)


def test_so_many_are_dropped_in_each_row_and_column_as_chance_would_have_it():
    """Neither more evenly nor less: the variance of the counts is the binomial one."""
    dropped = ~masks(60, rate=0.2)
    for counts, trials in ((dropped.sum(axis=2), 512), (dropped.sum(axis=1), 64), (dropped.sum(axis=0), 60)):
        expected = trials * 0.2 * 0.8
        spread = expected * math.sqrt(2 / counts.size) * 4
        assert abs(counts.var() - expected) <= spread + expected * 0.01
        assert abs(counts.mean() - 0.2 * trials) <= 4 * math.sqrt(expected / counts.size)


def test_runs_of_elements_that_are_kept_have_the_lengths_that_chance_gives_them():
    kept = masks(20, rate=0.5).reshape(-1)
    ends = np.flatnonzero(kept[1:] != kept[:-1])
    length, count = np.unique(np.diff(ends), return_counts=True)
    expected = (len(ends) - 1) * 0.5**length
    often = expected > 50
    chi_squared = ((count - expected)[often] ** 2 / expected[often]).sum()
    assert often.sum() > 8 and chi_squared <= often.sum() + 4 * math.sqrt(2 * often.sum())


def test_every_bit_that_goes_in_changes_every_bit_that_comes_out_half_of_the_time():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32))
    for bit in range(32):
        changed = np.asarray(scramble(x) ^ scramble(x ^ jnp.uint32(1 << bit)))
        shares = ((changed[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
        np.testing.assert_allclose(shares, 0.5, atol=0.05)


def test_no_row_is_another_in_another_order_of_its_elements():
    """As it would be if a row were but a place in one sequence: then blocks of one were found in the other."""
    kept = np.asarray(keep_mask(KEY, jnp.arange(200), (200, 4096), rate=0.5))
    words = np.packbits(kept, axis=1).view(np.uint64)  # 64 elements each
    assert len(np.unique(words)) == words.size


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(rate):
    x = jnp.full((199, 103), 3.0)
    dropped = np.asarray(dropout(x, KEY, jnp.arange(199), rate=rate))
    np.testing.assert_allclose(np.unique(dropped), [0, 3 / (1 - rate)], rtol=1e-6)
    sigma = 3 * math.sqrt(rate / (1 - rate) / x.size)
    assert abs(dropped.mean() - 3) <= 4 * sigma


def test_the_mask_of_a_row_does_not_depend_on_the_batch_it_is_in():
    whole = keep_mask(KEY, jnp.arange(11), (11, 5, 7), rate=0.4)
    some = keep_mask(KEY, jnp.array([10, 2, 3]), (3, 5, 7), rate=0.4)
    np.testing.assert_array_equal(some, whole[jnp.array([10, 2, 3])])


def test_two_rows_have_two_masks_and_so_have_two_keys():
    rows = jnp.arange(31)
    mask, other = (np.asarray(keep_mask(key, rows, (31, 61), rate=0.5)) for key in jax.random.split(KEY))
    assert len(np.unique(mask, axis=0)) == 31
    for row, of_other_key in zip(mask, other, strict=True):
        assert (row != of_other_key).any()


def test_the_same_key_and_row_have_the_same_mask_under_jit():
    mask = keep_mask(KEY, jnp.arange(3), (3, 5, 7), rate=0.5)
    jitted = jax.jit(keep_mask, static_argnames=("shape", "rate"))
    np.testing.assert_array_equal(mask, jitted(KEY, jnp.arange(3), shape=(3, 5, 7), rate=0.5))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_type_of_the_activations_stays(dtype):
    assert dropout(jnp.ones((3, 5), dtype), KEY, jnp.arange(3), rate=0.5).dtype == dtype


@pytest.mark.parametrize(("rate", "deterministic"), [(0.5, True), (0.0, False)])
def test_nothing_happens_when_deterministic_or_at_rate_0(rate, deterministic):
    x = jax.random.normal(KEY, (3, 5))
    np.testing.assert_array_equal(Dropout(rate).apply({}, x, deterministic=deterministic), x)


def test_the_module_drops_with_the_rows_that_it_is_told_or_else_0_1_2():
    x, drop = jnp.ones((5, 31)), Dropout(0.5)
    rngs = {"dropout": KEY}
    whole = drop.apply({}, x, deterministic=False, rngs=rngs)
    assert (np.asarray(whole) == 0).any()
    np.testing.assert_array_equal(whole, drop.apply({}, x, deterministic=False, row_B=jnp.arange(5), rngs=rngs))
    part = drop.apply({}, x[:2], deterministic=False, row_B=jnp.array([4, 1]), rngs=rngs)
    np.testing.assert_array_equal(part, whole[jnp.array([4, 1])])


def test_two_modules_of_one_model_drop_different_elements():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dropout(0.5)(x, deterministic=False), Dropout(0.5)(x, deterministic=False)

    first, second = Two().apply({}, jnp.ones((3, 31)), rngs={"dropout": KEY})
    assert (np.asarray(first) != np.asarray(second)).any()
