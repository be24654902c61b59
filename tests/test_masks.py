"""Masks as little pictures: a row for each query, a column for each key, 1 = may attend."""

import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model import masks


def picture(text):
    """The bool array that lines of 0 and 1 draw."""
    return np.array([[int(cell) for cell in line] for line in text.split()], dtype=bool)


def test_a_causal_mask_shows_the_present_and_the_past():
    mask = masks.causal(5)
    assert mask.shape == (1, 1, 5, 5) and mask.dtype == bool
    drawn = """
        10000
        11000
        11100
        11110
        11111
    """
    np.testing.assert_array_equal(mask[0, 0], picture(drawn))


def test_a_padding_mask_hides_id_0_wherever_it_stands():
    ids_BS = jnp.array([[7, 2, 0, 0, 0], [0, 0, 5, 1, 2], [3, 0, 3, 0, 3]])
    mask = masks.padding(ids_BS)
    assert mask.shape == (3, 1, 1, 5) and mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], picture("11000 00111 10101"))


@pytest.mark.parametrize("index", range(5))
def test_one_step_of_decoding_sees_what_the_causal_mask_shows_at_its_row(index):
    mask = masks.up_to(jnp.int32(index), 5)
    assert mask.shape == (1, 1, 1, 5)
    np.testing.assert_array_equal(mask[0, 0, 0], masks.causal(5)[0, 0, index])


def test_combined_masks_show_what_every_one_of_them_shows():
    ids_BT = jnp.array([[7, 5, 2], [7, 2, 0]])
    combined = masks.combine(masks.causal(3), masks.padding(ids_BT))
    assert combined.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(combined[0, 0], picture("100 110 111"))
    np.testing.assert_array_equal(combined[1, 0], picture("100 110 110"))


def test_one_mask_alone_stays_what_it_is_and_three_are_combined_too():
    causal = masks.causal(3)
    np.testing.assert_array_equal(masks.combine(causal), causal)
    second, third = picture("011 111 111")[None, None], picture("111 111 110")[None, None]
    np.testing.assert_array_equal(masks.combine(causal, second, third)[0, 0], picture("000 110 110"))
