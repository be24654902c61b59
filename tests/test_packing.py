"""Texts, or pairs, that share rows: best fit decreasing, against one that goes through them one by one."""

import numpy as np
import pytest

from flaxformer_lite.data.packing import pack


def test_best_fit_decreasing_puts_each_text_into_the_fullest_row_that_has_room():
    def one_by_one(lengths, room):
        left, rows = [], {}
        for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            fits = [(free, row) for row, free in enumerate(left) if free >= lengths[text]]
            if not fits:
                left.append(room)
                fits = [(room, len(left) - 1)]
            rows[text] = min(fits)[1]
            left[rows[text]] -= lengths[text]
        return [rows[i] for i in range(len(lengths))]

    for seed in range(31):
        rng = np.random.default_rng(seed)
        length = rng.integers(1, 18, rng.integers(1, 97))
        assert pack(length, 17).tolist() == one_by_one(length.tolist(), 17)


@pytest.mark.parametrize(
    ("length", "room", "rows"),
    [([7, 7, 7], 7, 3), ([3, 3, 3, 3, 3], 7, 3), ([5, 2, 4, 3], 7, 2), ([4, 4, 4], 7, 3), ([1] * 13, 13, 1)],
)
def test_texts_are_packed_into_as_few_rows_as_these_lengths_allow(length, room, rows):
    row = pack(np.array(length), room)
    assert sorted(set(row.tolist())) == list(range(rows))
    assert np.bincount(row, weights=length).max() <= room
