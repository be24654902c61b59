"""Masks as text: a line per query, a column per key, 1 = may attend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.model import masks
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

PACKED = jnp.array([[1, 1, 1, 2, 2, 3, 0]])  # texts of 3, 2 and 1 tokens in a row of 7


def picture(text):
    """Returns the bool array that lines of 0 and 1 spell."""
    return np.array([[int(cell) for cell in line] for line in text.split()], dtype=bool)


def mask_of_row(mask, row=0):
    """Returns the mask (T, S) of a row, which all heads share."""
    assert mask.dtype == bool and mask.shape[1] == 1
    return np.asarray(mask)[row, 0]


def of_length(length):
    """Returns the positions of `length` tokens without padding."""
    return TokenPositions.at(jnp.arange(length))


def test_a_causal_mask_allows_the_present_and_the_past():
    positions = jnp.arange(5)[None]
    expected = """
        10000
        11000
        11100
        11110
        11111
    """
    np.testing.assert_array_equal(
        mask_of_row(masks.causal(positions, positions)), picture(expected)
    )


def test_a_causal_mask_compares_positions_and_not_columns():
    mask = masks.causal(jnp.array([[3, 0]]), jnp.array([[4, 3, 0, 1, 9]]))
    np.testing.assert_array_equal(mask_of_row(mask), picture("01110 00100"))


def test_a_padding_mask_excludes_id_0_at_any_position():
    ids_BS = jnp.array([[7, 2, 0, 0, 0], [0, 0, 5, 1, 2], [3, 0, 3, 0, 3]])
    mask = masks.padding(ids_BS)
    assert mask.shape == (3, 1, 1, 5) and mask.dtype == bool
    np.testing.assert_array_equal(mask[:, 0, 0], picture("11000 00111 10101"))


def test_a_segment_mask_allows_tokens_of_the_same_text_only():
    mask = masks.segments(jnp.array([[1, 2, 2]]), jnp.array([[1, 1, 2, 3, 0]]))
    np.testing.assert_array_equal(mask_of_row(mask), picture("11000 00100 00100"))


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, "11000 11100 01110 00111 00011"), (2, "11100 11110 11111 01111 00111"), (5, "11111 " * 5)],
)
def test_a_window_allows_n_tokens_on_both_sides(size, expected):
    positions = jnp.arange(5)[None]
    np.testing.assert_array_equal(
        mask_of_row(masks.window(positions, positions, size)), picture(expected)
    )


def test_combined_masks_allow_what_every_one_of_them_allows():
    positions, ids_BT = jnp.arange(3)[None], jnp.array([[7, 5, 2], [7, 2, 0]])
    combined = masks.combine(masks.causal(positions, positions), masks.padding(ids_BT))
    assert combined.shape == (2, 1, 3, 3)
    np.testing.assert_array_equal(mask_of_row(combined, row=0), picture("100 110 111"))
    np.testing.assert_array_equal(mask_of_row(combined, row=1), picture("100 110 110"))


def test_one_mask_is_unchanged_and_three_are_combined():
    first, second, third = (
        picture(expected)[None, None] for expected in ("100 110 111", "011 111 111", "111 111 110")
    )
    np.testing.assert_array_equal(masks.combine(first), first)
    np.testing.assert_array_equal(masks.combine(first, second, third)[0, 0], picture("000 110 110"))


def test_a_row_of_one_text_has_positions_from_0_and_marks_its_padding():
    positions = TokenPositions.of(jnp.array([[7, 5, 2, 0, 0], [7, 5, 6, 4, 2]]))
    np.testing.assert_array_equal(positions.position_BL, [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(positions.segment_BL, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_positions_restart_with_each_text_of_a_packed_row():
    segment_BL = jnp.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 0, 0]])
    positions = TokenPositions.of(jnp.ones_like(segment_BL), segment_BL)
    assert positions.packed and not TokenPositions.of(segment_BL).packed
    np.testing.assert_array_equal(
        positions.position_BL[:, :6], [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 0]]
    )
    np.testing.assert_array_equal(positions.segment_BL, segment_BL)


def test_positions_of_one_text_per_row_are_the_same_with_and_without_segments():
    ids_BL = jnp.array([[7, 5, 2, 0, 0], [7, 5, 6, 4, 2]])
    plain = TokenPositions.of(ids_BL)
    numbered = TokenPositions.of(ids_BL, (ids_BL != 0).astype(jnp.int32))
    np.testing.assert_array_equal(plain.segment_BL, numbered.segment_BL)
    is_token = np.asarray(ids_BL) != 0
    positions = np.broadcast_to(plain.position_BL, is_token.shape)
    np.testing.assert_array_equal(positions[is_token], np.asarray(numbered.position_BL)[is_token])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1111100 1111100 1111100 1111100 1111100 0000000 0000000"),
        ({"causal": True}, "1000000 1100000 1110000 1111000 1111100 0000000 0000000"),
        ({"window": 2}, "1110000 1111000 1111100 0111100 0011100 0000000 0000000"),
        ({"causal": True, "window": 1}, "1000000 1100000 0110000 0011000 0001100 0000000 0000000"),
    ],
)
def test_the_mask_of_a_padded_row_excludes_padding_as_keys_and_as_queries(options, expected):
    positions = TokenPositions.of(jnp.array([[7, 5, 6, 4, 2, 0, 0]]))
    np.testing.assert_array_equal(
        mask_of_row(AttentionMask(positions, positions, **options).array()), picture(expected)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "1110000 1110000 1110000 0001100 0001100 0000010 0000000"),
        ({"causal": True}, "1000000 1100000 1110000 0001000 0001100 0000010 0000000"),
        ({"causal": True, "window": 1}, "1000000 1100000 0110000 0001000 0001100 0000010 0000000"),
    ],
)
def test_the_mask_of_a_packed_row_is_block_diagonal_with_the_mask_of_each_text(options, expected):
    positions = TokenPositions.of(PACKED, PACKED)
    np.testing.assert_array_equal(
        mask_of_row(AttentionMask(positions, positions, **options).array()), picture(expected)
    )


def test_the_mask_of_two_packed_rows_allows_the_other_side_of_the_same_pair():
    source = jnp.array([[1, 1, 2, 3, 3]])
    mask = AttentionMask(
        TokenPositions.of(PACKED, PACKED), TokenPositions.of(source, source)
    ).array()
    np.testing.assert_array_equal(
        mask_of_row(mask), picture("11000 11000 11000 00100 00100 00011 00000")
    )


@pytest.mark.parametrize("window", [None, 2])
def test_the_mask_of_a_decoding_step_is_its_row_of_the_whole_mask(window):
    keys = of_length(5)
    whole = mask_of_row(AttentionMask(keys, keys, causal=True, window=window).array())
    for index in range(5):
        mask = AttentionMask(
            TokenPositions.at(jnp.array([index])), keys, causal=True, window=window
        ).array()
        assert mask.shape == (1, 1, 1, 5)
        np.testing.assert_array_equal(mask_of_row(mask), whole[index : index + 1])


def test_a_mask_passes_through_jit_with_its_positions_traced_and_its_options_static():
    positions = TokenPositions.of(PACKED, PACKED)
    mask = AttentionMask(positions, positions, causal=True, window=1)
    assert len(jax.tree.leaves(mask)) == 4
    np.testing.assert_array_equal(jax.jit(lambda mask: mask.array())(mask), mask.array())
