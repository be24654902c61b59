"""What a masked decoder is to predict: how many tokens, which, and that a row draws for itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.training import masking

pytestmark = pytest.mark.usefixtures("quickly_compiled")

N, T, ROWS = 7, 11, 5003
KEY = jax.random.key(3)
DRAW = jax.jit(masking.draw, static_argnames="size")


@functools.cache
def drawn(length=N):
    """Which tokens of many texts of one length are masked, (ROWS, T)."""
    return np.asarray(DRAW(KEY, jnp.arange(ROWS), jnp.full(ROWS, length), size=T))


def test_how_many_tokens_are_masked_is_uniform_from_one_to_all_of_them():
    count = np.bincount(drawn().sum(axis=1), minlength=N + 1)
    assert len(count) == N + 1 and count[0] == 0
    # Each count is binomial; six standard deviations.
    np.testing.assert_allclose(count[1:], ROWS / N, atol=6 * np.sqrt(ROWS / N * (1 - 1 / N)))


@pytest.mark.parametrize("count", range(1, N))
def test_every_token_is_as_likely_as_every_other_to_be_among_those_that_are_masked(count):
    of_count = drawn()[drawn().sum(axis=1) == count][:, :N]
    share = count / N
    np.testing.assert_allclose(of_count.mean(axis=0), share, atol=6 * np.sqrt(share * (1 - share) / len(of_count)))


def test_no_padding_is_masked_and_a_single_token_always_is():
    assert drawn()[:, :N].any(axis=0).all() and not drawn()[:, N:].any()
    assert drawn(1)[:, 0].all() and not drawn(1)[:, 1:].any()
    assert not drawn(0).any()


def test_what_is_masked_belongs_to_the_key_the_row_and_the_length_and_to_nothing_else():
    row_B, length_B = jnp.arange(23), jnp.arange(23) % N
    hidden = np.asarray(DRAW(KEY, row_B, length_B, size=T))
    order = np.random.default_rng(0).permutation(23)
    assert (hidden[order] != hidden).any()
    np.testing.assert_array_equal(DRAW(KEY, row_B[order], length_B[order], size=T), hidden[order])
    np.testing.assert_array_equal(DRAW(KEY, row_B, length_B, size=T + 6)[:, :T], hidden)
    assert (np.asarray(DRAW(KEY, row_B + 23, length_B, size=T)) != hidden).any()
    assert (np.asarray(DRAW(jax.random.key(4), row_B, length_B, size=T)) != hidden).any()


def test_the_number_of_a_text_depends_on_each_token_and_its_place_and_not_on_padding():
    numbers = jax.jit(masking.number_of_text)
    texts = np.array([[7, 8, 9, 2, 0, 0], [8, 7, 9, 2, 0, 0], [7, 8, 9, 9, 2, 0], [7, 8, 2, 0, 0, 0], [0] * 6])
    assert len(set(numbers(texts).tolist())) == 5
    np.testing.assert_array_equal(numbers(texts[::-1])[::-1], numbers(texts))
    np.testing.assert_array_equal(numbers(np.pad(texts, ((0, 0), (0, 3)))), numbers(texts))


def test_a_masked_token_is_read_as_the_mask_and_the_end_symbol_is_read_and_never_predicted():
    target_BT = np.array([[7, 8, 9, 2, 0, 0], [5, 2, 0, 0, 0, 0], [0] * 6, [6, 7, 8, 9, 10, 2]])
    masked = jax.jit(masking.mask_targets)(KEY, jnp.arange(4), jnp.asarray(target_BT))
    assert masked.length_B.tolist() == [3, 1, 0, 5]
    hidden = np.asarray(DRAW(KEY, jnp.arange(4), masked.length_B, size=6))
    assert 0 < hidden.sum() < (target_BT > 2).sum() and (target_BT[hidden] > 2).all()
    np.testing.assert_array_equal(masked.inputs_BT, np.where(hidden, masking.MASK, target_BT))
    np.testing.assert_array_equal(masked.labels_BT, target_BT)
    np.testing.assert_array_equal(masked.weights_BT, hidden)
    assert masked.weights_BT.dtype == jnp.float32 and masked.inputs_BT.dtype == jnp.int32
