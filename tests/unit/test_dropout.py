"""Dropout: its rate, its mean, and masks that depend on the row and not on the batch."""

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
    """Returns the masks of training steps with a key each, (number, rows, columns)."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(number))
    of_step = lambda key: keep_mask(key, jnp.arange(rows), (rows, columns), rate=rate)  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(of_step))(keys))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 3, 8, 32])
def test_dropped_elements_are_independent_across_steps_rows_and_columns(axis, distance):
    """The correlation with the element `distance` away is that of chance."""
    kept = masks(40, rate=0.1).astype(np.float64) - 0.9
    here, there = (
        np.take(kept, range(*ends), axis=axis)
        for ends in ((0, kept.shape[axis] - distance), (distance, kept.shape[axis]))
    )
    assert abs((here * there).mean()) <= 4 * 0.09 / math.sqrt(here.size)


def test_counts_of_dropped_elements_per_row_and_column_have_binomial_variance():
    dropped = ~masks(60, rate=0.2)
    for counts, trials in (
        (dropped.sum(axis=2), 512),
        (dropped.sum(axis=1), 64),
        (dropped.sum(axis=0), 60),
    ):
        expected = trials * 0.2 * 0.8
        spread = expected * math.sqrt(2 / counts.size) * 4
        assert abs(counts.var() - expected) <= spread + expected * 0.01
        assert abs(counts.mean() - 0.2 * trials) <= 4 * math.sqrt(expected / counts.size)


def test_run_lengths_of_kept_and_dropped_elements_have_a_geometric_distribution():
    kept = masks(20, rate=0.5).reshape(-1)
    ends = np.flatnonzero(kept[1:] != kept[:-1])
    length, count = np.unique(np.diff(ends), return_counts=True)
    expected = (len(ends) - 1) * 0.5**length
    often = expected > 50
    chi_squared = ((count - expected)[often] ** 2 / expected[often]).sum()
    assert often.sum() > 8 and chi_squared <= often.sum() + 4 * math.sqrt(2 * often.sum())


def test_each_input_bit_of_the_hash_flips_each_output_bit_half_of_the_time():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32))
    for bit in range(32):
        changed = np.asarray(scramble(x) ^ scramble(x ^ jnp.uint32(1 << bit)))
        shares = ((changed[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(axis=0)
        np.testing.assert_allclose(shares, 0.5, atol=0.05)


def test_no_two_rows_share_a_block_of_64_elements():
    """Rows that were offsets into one sequence of bits would share blocks."""
    kept = np.asarray(keep_mask(KEY, jnp.arange(200), (200, 4096), rate=0.5))
    words = np.packbits(kept, axis=1).view(np.uint64)  # 64 elements each
    assert len(np.unique(words)) == words.size


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_kept_elements_are_scaled_so_that_the_mean_is_kept(rate):
    x = jnp.full((199, 103), 3.0)
    dropped = np.asarray(dropout(x, KEY, jnp.arange(199), rate=rate))
    np.testing.assert_allclose(np.unique(dropped), [0, 3 / (1 - rate)], rtol=1e-6)
    sigma = 3 * math.sqrt(rate / (1 - rate) / x.size)
    assert abs(dropped.mean() - 3) <= 4 * sigma


def test_the_mask_of_a_row_does_not_depend_on_its_batch():
    whole = keep_mask(KEY, jnp.arange(11), (11, 5, 7), rate=0.4)
    some = keep_mask(KEY, jnp.array([10, 2, 3]), (3, 5, 7), rate=0.4)
    np.testing.assert_array_equal(some, whole[jnp.array([10, 2, 3])])


def test_rows_have_different_masks_and_so_have_keys():
    rows = jnp.arange(31)
    mask, other = (
        np.asarray(keep_mask(key, rows, (31, 61), rate=0.5)) for key in jax.random.split(KEY)
    )
    assert len(np.unique(mask, axis=0)) == 31
    for row, of_other_key in zip(mask, other, strict=True):
        assert (row != of_other_key).any()


def test_the_same_key_and_row_have_the_same_mask_under_jit():
    mask = keep_mask(KEY, jnp.arange(3), (3, 5, 7), rate=0.5)
    jitted = jax.jit(keep_mask, static_argnames=("shape", "rate"))
    np.testing.assert_array_equal(mask, jitted(KEY, jnp.arange(3), shape=(3, 5, 7), rate=0.5))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout_keeps_the_dtype(dtype):
    assert dropout(jnp.ones((3, 5), dtype), KEY, jnp.arange(3), rate=0.5).dtype == dtype


@pytest.mark.parametrize(("rate", "deterministic"), [(0.5, True), (0.0, False)])
def test_dropout_is_the_identity_if_deterministic_or_at_rate_0(rate, deterministic):
    x = jax.random.normal(KEY, (3, 5))
    np.testing.assert_array_equal(Dropout(rate).apply({}, x, deterministic=deterministic), x)


def test_the_module_numbers_rows_from_0_unless_row_numbers_are_given():
    x, drop = jnp.ones((5, 31)), Dropout(0.5)
    rngs = {"dropout": KEY}
    whole = drop.apply({}, x, deterministic=False, rngs=rngs)
    assert (np.asarray(whole) == 0).any()
    np.testing.assert_array_equal(
        whole, drop.apply({}, x, deterministic=False, row_B=jnp.arange(5), rngs=rngs)
    )
    part = drop.apply({}, x[:2], deterministic=False, row_B=jnp.array([4, 1]), rngs=rngs)
    np.testing.assert_array_equal(part, whole[jnp.array([4, 1])])


def test_two_modules_of_one_model_drop_different_elements():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Dropout(0.5)(x, deterministic=False), Dropout(0.5)(x, deterministic=False)

    first, second = Two().apply({}, jnp.ones((3, 31)), rngs={"dropout": KEY})
    assert (np.asarray(first) != np.asarray(second)).any()
