"""The distribution of the masks of a masked decoder, and that each row is masked independently."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.training import masking

pytestmark = pytest.mark.usefixtures("quickly_compiled")

N, T, ROWS = 7, 11, 5003
KEY = jax.random.key(3)
SAMPLE_MASK = jax.jit(masking.sample_mask, static_argnames="size")


@functools.cache
def sampled(length=N):
    """Returns the masks of many texts of one length, (ROWS, T)."""
    return np.asarray(SAMPLE_MASK(KEY, jnp.arange(ROWS), jnp.full(ROWS, length), size=T))


def test_the_number_of_masked_tokens_is_uniform_from_1_to_the_length():
    count = np.bincount(sampled().sum(axis=1), minlength=N + 1)
    assert len(count) == N + 1 and count[0] == 0
    # Each count is binomial. The tolerance is 6 standard deviations.
    np.testing.assert_allclose(count[1:], ROWS / N, atol=6 * np.sqrt(ROWS / N * (1 - 1 / N)))


@pytest.mark.parametrize("count", range(1, N))
def test_every_token_has_the_same_probability_of_being_masked(count):
    of_count = sampled()[sampled().sum(axis=1) == count][:, :N]
    share = count / N
    np.testing.assert_allclose(
        of_count.mean(axis=0), share, atol=6 * np.sqrt(share * (1 - share) / len(of_count))
    )


def test_padding_is_never_masked_and_a_single_token_always_is():
    assert sampled()[:, :N].any(axis=0).all() and not sampled()[:, N:].any()
    assert sampled(1)[:, 0].all() and not sampled(1)[:, 1:].any()
    assert not sampled(0).any()


def test_a_mask_is_a_function_of_the_key_the_row_number_and_the_length_alone():
    row_B, length_B = jnp.arange(23), jnp.arange(23) % N
    mask = np.asarray(SAMPLE_MASK(KEY, row_B, length_B, size=T))
    order = np.random.default_rng(0).permutation(23)
    assert (mask[order] != mask).any()
    np.testing.assert_array_equal(
        SAMPLE_MASK(KEY, row_B[order], length_B[order], size=T), mask[order]
    )
    np.testing.assert_array_equal(SAMPLE_MASK(KEY, row_B, length_B, size=T + 6)[:, :T], mask)
    assert (np.asarray(SAMPLE_MASK(KEY, row_B + 23, length_B, size=T)) != mask).any()
    assert (np.asarray(SAMPLE_MASK(jax.random.key(4), row_B, length_B, size=T)) != mask).any()


def test_the_number_of_a_text_depends_on_each_token_and_its_position_and_not_on_padding():
    numbers = jax.jit(masking.number_of_text)
    texts = np.array(
        [[7, 8, 9, 2, 0, 0], [8, 7, 9, 2, 0, 0], [7, 8, 9, 9, 2, 0], [7, 8, 2, 0, 0, 0], [0] * 6]
    )
    assert len(set(numbers(texts).tolist())) == 5
    np.testing.assert_array_equal(numbers(texts[::-1])[::-1], numbers(texts))
    np.testing.assert_array_equal(numbers(np.pad(texts, ((0, 0), (0, 3)))), numbers(texts))


def test_masked_tokens_become_the_mask_symbol_and_the_end_symbol_is_never_masked():
    target_BT = np.array([[7, 8, 9, 2, 0, 0], [5, 2, 0, 0, 0, 0], [0] * 6, [6, 7, 8, 9, 10, 2]])
    masked = jax.jit(masking.mask_targets)(KEY, jnp.arange(4), jnp.asarray(target_BT))
    assert masked.length_B.tolist() == [3, 1, 0, 5]
    mask = np.asarray(SAMPLE_MASK(KEY, jnp.arange(4), masked.length_B, size=6))
    assert 0 < mask.sum() < (target_BT > 2).sum() and (target_BT[mask] > 2).all()
    np.testing.assert_array_equal(masked.inputs_BT, np.where(mask, masking.MASK, target_BT))
    np.testing.assert_array_equal(masked.labels_BT, target_BT)
    np.testing.assert_array_equal(masked.weights_BT, mask)
    assert masked.weights_BT.dtype == jnp.float32 and masked.inputs_BT.dtype == jnp.int32
