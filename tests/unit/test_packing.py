"""Packing of texts and pairs into rows, compared with a plain loop of best fit decreasing."""

import numpy as np
import pytest

from flaxformer_lite.data.batches.packing import pack, pack_pairs


def test_each_text_goes_into_the_fullest_row_with_enough_space():
    def one_by_one(lengths, capacity):
        space, rows = [], {}
        for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            fits = [(free, row) for row, free in enumerate(space) if free >= lengths[text]]
            if not fits:
                space.append(capacity)
                fits = [(capacity, len(space) - 1)]
            rows[text] = min(fits)[1]
            space[rows[text]] -= lengths[text]
        return [rows[i] for i in range(len(lengths))]

    for seed in range(31):
        rng = np.random.default_rng(seed)
        length = rng.integers(1, 18, rng.integers(1, 97))
        assert pack(length, 17).tolist() == one_by_one(length.tolist(), 17)


@pytest.mark.parametrize(
    ("length", "capacity", "rows"),
    [
        ([7, 7, 7], 7, 3),
        ([3, 3, 3, 3, 3], 7, 3),
        ([5, 2, 4, 3], 7, 2),
        ([4, 4, 4], 7, 3),
        ([1] * 13, 13, 1),
    ],
)
def test_texts_are_packed_into_the_fewest_rows_for_these_lengths(length, capacity, rows):
    row = pack(np.array(length), capacity)
    assert sorted(set(row.tolist())) == list(range(rows))
    assert np.bincount(row, weights=length).max() <= capacity


def pairs(number, seed, longest=23):
    """Returns lengths of sources, and of targets that differ by at most 4."""
    rng = np.random.default_rng(seed)
    source = rng.integers(1, longest + 1, number)
    return source, np.clip(source + rng.integers(-4, 5, number), 1, longest)


@pytest.mark.parametrize("number", [1, 2, 7, 97, 4001])
def test_both_sides_of_every_pair_fit_its_row_and_no_row_is_empty(number):
    for seed in range(5):
        source, target = pairs(number, seed)
        row = pack_pairs(source, target, 29)
        assert np.bincount(row, weights=source).max() <= 29
        assert np.bincount(row, weights=target).max() <= 29
        assert set(row.tolist()) == set(range(row.max() + 1))


def test_pairs_with_a_longer_source_share_rows_with_pairs_with_a_longer_target():
    source, target = np.repeat([[4, 2, 2], [2, 4, 2]], 11, axis=1)
    row = pack_pairs(source, target, 8)
    assert sorted(set(row.tolist())) == list(range(11))
    assert len(set(pack(np.maximum(source, target), 8).tolist())) > 11


def test_packing_pairs_leaves_less_padding_than_packing_their_longer_sides():
    source, target = pairs(20_011, seed=3, longest=60)

    def padding(row):
        return 1 - np.array([source.sum(), target.sum()]) / ((row.max() + 1) * 127)

    by_longer = padding(pack(np.maximum(source, target), 127))
    by_both = padding(pack_pairs(source, target, 127))
    assert (by_both < 0.02).all() and (by_longer > 2 * by_both).all()


def test_pairs_of_equal_lengths_need_as_many_rows_as_single_texts():
    length, _ = pairs(4001, seed=7)
    assert pack_pairs(length, length, 29).max() == pytest.approx(pack(length, 29).max(), rel=0.01)
