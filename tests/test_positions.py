"""Positions against the formula of section 3.5 in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model.positions import LearnedPositions, sinusoidal


def formula(position, d_model):
    """PE of one position, element by element as the paper writes it."""
    row = np.empty(d_model)
    for i in range(d_model // 2):
        angle = position / 10000 ** (2 * i / d_model)
        row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
    return row


@pytest.mark.parametrize(("length", "d_model"), [(1, 2), (7, 6), (31, 22), (257, 46)])
def test_sinusoidal_positions_are_the_formula_of_the_paper(length, d_model):
    encoded = sinusoidal(jnp.arange(length), d_model)
    assert encoded.shape == (length, d_model) and encoded.dtype == jnp.float32
    np.testing.assert_allclose(encoded, [formula(p, d_model) for p in range(length)], atol=3e-5)


def test_sinusoidal_positions_have_no_last_one():
    positions = [0, 9973, 104_729]
    encoded = sinusoidal(jnp.array(positions), 14)
    # float32 holds an angle near 1e5 to about 0.008
    np.testing.assert_allclose(encoded, [formula(p, 14) for p in positions], atol=0.02)


def test_sines_and_cosines_are_interleaved():
    encoded = sinusoidal(jnp.array([1]), 6)[0]
    np.testing.assert_allclose(encoded[:2], [math.sin(1), math.cos(1)], atol=1e-6)
    np.testing.assert_allclose(encoded[4:], [math.sin(10000 ** (-2 / 3)), math.cos(10000 ** (-2 / 3))], atol=1e-6)


@pytest.mark.parametrize("offset", [1, 5, 13])
def test_a_shift_by_any_offset_is_one_rotation_for_all_positions(offset):
    d_model, positions = 10, jnp.array([0, 3, 17, 29])
    here, there = sinusoidal(positions, d_model), np.asarray(sinusoidal(positions + offset, d_model))
    assert np.abs(here - there).max() > 0.1
    rotated = np.empty_like(there)
    for i in range(d_model // 2):
        angle = offset / 10000 ** (2 * i / d_model)
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        rotated[:, 2 * i : 2 * i + 2] = here[:, 2 * i : 2 * i + 2] @ turn.T
    np.testing.assert_allclose(there, rotated, atol=1e-5)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match=r"need an even d_model, got 7"):
        sinusoidal(jnp.arange(3), 7)


def test_learned_positions_are_rows_of_a_table_with_a_row_for_each_position():
    table = LearnedPositions(max_length=11, d_model=7)
    variables = table.init(jax.random.key(0), jnp.arange(3))
    assert jax.tree.map(jnp.shape, variables) == {"params": {"embedding": (11, 7)}}
    looked_up = table.apply(variables, jnp.array([4, 5, 10]))
    rows = variables["params"]["embedding"]
    assert len(np.unique(np.asarray(rows), axis=0)) == 11
    np.testing.assert_array_equal(looked_up, rows[jnp.array([4, 5, 10])])


def test_learned_positions_start_as_large_as_the_embeddings():
    variables = LearnedPositions(max_length=997, d_model=31).init(jax.random.key(1), jnp.arange(2))
    entries = np.asarray(variables["params"]["embedding"]) * 31**0.5
    assert abs(entries.std() - 1) < 4 / math.sqrt(2 * entries.size)
    assert abs(entries.mean()) < 4 / math.sqrt(entries.size)


def test_more_positions_than_the_table_has_are_refused_with_its_length():
    table = LearnedPositions(max_length=5, d_model=7)
    variables = table.init(jax.random.key(0), jnp.arange(5))
    with pytest.raises(ValueError, match=r"end at max_length = 5, got 6 positions"):
        table.apply(variables, jnp.arange(6))
