"""Masks as little pictures: a row for each query, a column for each key, 1 = may attend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model import masks
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

PACKED = jnp.array([[1, 1, 1, 2, 2, 3, 0]])  # texts of three, two and one token in a row of seven


def picture(text):
    """The bool array that lines of 0 and 1 draw."""
    return np.array([[int(cell) for cell in line] for line in text.split()], dtype=bool)


def shown(mask, row=0):
    """The one picture that all heads share."""
    assert mask.dtype == bool and mask.shape[1] == 1
    return np.asarray(mask)[row, 0]


def of_length(length):
    """Places of `length` tokens, none of them padding."""
    return TokenPositions.at(jnp.arange(length))


def test_a_causal_mask_shows_the_present_and_the_past():
    positions = jnp.arange(5)[None]
    drawn = """
        10000
        11000
        11100
        11110
        11111
    """
    np.testing.assert_array_equal(shown(masks.causal(positions, positions)), picture(drawn))


def test_a_causal_mask_goes_by_positions_and_not_by_columns():
    mask = masks.causal(jnp.array([[3, 0]]), jnp.array([[4, 3, 0, 1, 9]]))
    np.testing.assert_array_equal(shown(mask), picture("01110 00100"))


def test_a_padding_mask_hides_id_0_wherever_it_stands():
    ids_BS = jnp.array([[7, 2, 0, 0, 0], [0, 0, 5, 1, 2], [3, 0, 3, 0, 3]])
    mask = masks.padding(ids_BS)
    assert mask.shape == (3, 1, 1, 5) and mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], picture("11000 00111 10101"))


def test_segments_show_each_text_itself_alone():
    mask = masks.segments(jnp.array([[1, 2, 2]]), jnp.array([[1, 1, 2, 3, 0]]))
    np.testing.assert_array_equal(shown(mask), picture("11000 00100 00100"))


@pytest.mark.parametrize(
    ("size", "drawn"),
    [(1, "11000 11100 01110 00111 00011"), (2, "11100 11110 11111 01111 00111"), (5, "11111 " * 5)],
)
def test_a_window_shows_so_many_tokens_on_either_side(size, drawn):
    positions = jnp.arange(5)[None]
    np.testing.assert_array_equal(shown(masks.window(positions, positions, size)), picture(drawn))


def test_combined_masks_show_what_every_one_of_them_shows():
    positions, ids_BT = jnp.arange(3)[None], jnp.array([[7, 5, 2], [7, 2, 0]])
    combined = masks.combine(masks.causal(positions, positions), masks.padding(ids_BT))
    assert combined.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(shown(combined, row=0), picture("100 110 111"))
    np.testing.assert_array_equal(shown(combined, row=1), picture("100 110 110"))


def test_one_mask_alone_stays_what_it_is_and_three_are_combined_too():
    first, second, third = (picture(drawn)[None, None] for drawn in ("100 110 111", "011 111 111", "111 111 110"))
    np.testing.assert_array_equal(masks.combine(first), first)
    np.testing.assert_array_equal(masks.combine(first, second, third)[0, 0], picture("000 110 110"))


def test_a_row_of_one_text_counts_its_tokens_from_0_and_knows_its_padding():
    places = TokenPositions.of(jnp.array([[7, 5, 2, 0, 0], [7, 5, 6, 4, 2]]))
    np.testing.assert_array_equal(places.position_BL, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(places.segment_BL, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_positions_begin_again_with_each_text_of_a_packed_row():
    segment_BL = jnp.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 0, 0]])
    places = TokenPositions.of(jnp.ones_like(segment_BL), segment_BL)
    assert places.packed and not TokenPositions.of(segment_BL).packed
    np.testing.assert_array_equal(places.position_BL[:, :6], [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 0]])
    np.testing.assert_array_equal(places.segment_BL, segment_BL)


def test_one_text_a_row_stands_where_it_stands_without_its_number():
    ids_BL = jnp.array([[7, 5, 2, 0, 0], [7, 5, 6, 4, 2]])
    plain, numbered = TokenPositions.of(ids_BL), TokenPositions.of(ids_BL, (ids_BL != 0).astype(jnp.int32))
    np.testing.assert_array_equal(plain.segment_BL, numbered.segment_BL)
    is_token = np.asarray(ids_BL) != 0
    positions = np.broadcast_to(plain.position_BL, is_token.shape)
    np.testing.assert_array_equal(positions[is_token], np.asarray(numbered.position_BL)[is_token])


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, "1111100 1111100 1111100 1111100 1111100 0000000 0000000"),
        ({"causal": True}, "1000000 1100000 1110000 1111000 1111100 0000000 0000000"),
        ({"window": 2}, "1110000 1111000 1111100 0111100 0011100 0000000 0000000"),
        ({"causal": True, "window": 1}, "1000000 1100000 0110000 0011000 0001100 0000000 0000000"),
    ],
)
def test_a_pattern_of_a_padded_row_shows_tokens_and_to_padding_nothing(options, drawn):
    places = TokenPositions.of(jnp.array([[7, 5, 6, 4, 2, 0, 0]]))
    np.testing.assert_array_equal(shown(AttentionMask(places, places, **options).array()), picture(drawn))


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, "1110000 1110000 1110000 0001100 0001100 0000010 0000000"),
        ({"causal": True}, "1000000 1100000 1110000 0001000 0001100 0000010 0000000"),
        ({"causal": True, "window": 1}, "1000000 1100000 0110000 0001000 0001100 0000010 0000000"),
    ],
)
def test_a_pattern_of_a_packed_row_is_that_of_each_text_along_the_diagonal(options, drawn):
    places = TokenPositions.of(PACKED, PACKED)
    np.testing.assert_array_equal(shown(AttentionMask(places, places, **options).array()), picture(drawn))


def test_a_pattern_of_two_packed_rows_shows_each_text_the_other_side_of_its_pair():
    source = jnp.array([[1, 1, 2, 3, 3]])
    mask = AttentionMask(TokenPositions.of(PACKED, PACKED), TokenPositions.of(source, source)).array()
    np.testing.assert_array_equal(shown(mask), picture("11000 11000 11000 00100 00100 00011 00000"))


@pytest.mark.parametrize("window", [None, 2])
def test_one_step_of_decoding_sees_what_the_whole_pattern_shows_at_its_row(window):
    keys = of_length(5)
    whole = shown(AttentionMask(keys, keys, causal=True, window=window).array())
    for index in range(5):
        mask = AttentionMask(TokenPositions.at(jnp.array([index])), keys, causal=True, window=window).array()
        assert mask.shape == (1, 1, 1, 5)
        np.testing.assert_array_equal(shown(mask), whole[index : index + 1])


def test_a_pattern_passes_through_jit_with_its_places_traced_and_its_options_not():
    places = TokenPositions.of(PACKED, PACKED)
    pattern = AttentionMask(places, places, causal=True, window=1)
    assert len(jax.tree.leaves(pattern)) == 4
    np.testing.assert_array_equal(jax.jit(lambda pattern: pattern.array())(pattern), pattern.array())
