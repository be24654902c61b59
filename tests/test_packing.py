"""Texts, or pairs, that share rows: best fit decreasing, against one that goes through them one by one."""

import numpy as np
import pytest

from flaxformer_lite.data.batches.packing import pack, pack_pairs


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


def pairs(number, seed, longest=23):
    """Targets much like their sources, a little longer or shorter."""
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest + 1, number)
    return source, np.clip(source + rng.integers(-4, 5, number), 1, longest)


@pytest.mark.parametrize("number", [1, 2, 7, 97, 4001])
def test_both_sides_of_every_pair_fit_its_row_and_no_row_is_empty(number):
    for seed in range(5):
        source, target = pairs(number, seed)
        row = pack_pairs(source, target, 29)
        assert np.bincount(row, weights=source).max() <= 29 and np.bincount(row, weights=target).max() <= 29
        assert set(row.tolist()) == set(range(row.max() + 1))


def test_pairs_with_more_of_source_share_rows_with_those_that_have_more_of_target():
    source, target = np.repeat([[4, 2, 2], [2, 4, 2]], 11, axis=1)
    row = pack_pairs(source, target, 8)
    assert sorted(set(row.tolist())) == list(range(11))
    assert len(set(pack(np.maximum(source, target), 8).tolist())) > 11


def test_pairs_of_many_lengths_leave_less_padding_than_if_their_longer_sides_were_packed():
    source, target = pairs(20_011, seed=3, longest=60)

    def padding(row):
        return 1 - np.array([source.sum(), target.sum()]) / ((row.max() + 1) * 127)

    by_longer, by_both = padding(pack(np.maximum(source, target), 127)), padding(pack_pairs(source, target, 127))
    assert (by_both < 0.02).all() and (by_longer > 2 * by_both).all()


def test_texts_that_are_their_own_translation_take_the_rows_that_their_lengths_take_alone():
    length, _ = pairs(4001, seed=7)
    assert pack_pairs(length, length, 29).max() == pytest.approx(pack(length, 29).max(), rel=0.01)
