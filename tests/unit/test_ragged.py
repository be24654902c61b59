"""`Ragged` has the same rows as a list of rows."""

import numpy as np
import pytest

from flaxformer_lite.data.tokens.ragged import Ragged, ranges

ROWS = [[7, 5, 9], [], [8], [11, 13, 17, 19, 23], []]


def as_lists(ragged):
    return [row.tolist() for row in ragged]


@pytest.fixture(params=[np.uint16, np.uint32, np.int32])
def ragged(request):
    whole = Ragged.of(ROWS)
    return Ragged(whole.values.astype(request.param), whole.offsets)


def test_rows_are_read_by_index_by_slice_and_by_iteration(ragged):
    assert len(ragged) == 5 and as_lists(ragged) == ROWS
    assert [ragged[i].tolist() for i in range(-5, 5)] == ROWS * 2
    for part in (slice(2), slice(1, 4), slice(None, None, -1), slice(3, None), slice(0, 0)):
        assert [row.tolist() for row in ragged[part]] == ROWS[part]
    assert all(row.dtype == np.int32 for row in [*ragged, ragged[0], *ragged[1:]])
    with pytest.raises(IndexError):
        ragged[5]


def test_lengths_are_those_of_the_rows(ragged):
    assert ragged.lengths().tolist() == [3, 0, 1, 5, 0]


@pytest.mark.parametrize("numbers", [[], [3], [4, 3, 3, 0, 1], [1, 4]])
def test_rows_are_taken_in_any_order_and_repeatedly(ragged, numbers):
    taken = ragged.take(np.array(numbers, int))
    assert as_lists(taken) == [ROWS[i] for i in numbers]
    assert taken.values.dtype == ragged.values.dtype and len(taken.values) == sum(
        len(ROWS[i]) for i in numbers
    )


def test_each_row_comes_from_one_or_the_other_array(ragged):
    other = Ragged.of([[1], [2, 3], [], [4], [5]])
    mixed = ragged.or_else(other, np.array([True, False, False, True, False]))
    assert as_lists(mixed) == [[7, 5, 9], [2, 3], [], [11, 13, 17, 19, 23], [5]]


def test_a_ragged_array_is_unchanged_and_lists_become_int32():
    assert Ragged.of(Ragged.of(ROWS)).values.dtype == np.int32
    ragged = Ragged.of(ROWS)
    assert Ragged.of(ragged) is ragged
    assert as_lists(Ragged.of([])) == [] and as_lists(Ragged.of([np.array([3], np.int64), []])) == [
        [3],
        [],
    ]


def test_ranges_are_concatenated():
    first, stop = np.array([3, 7, 2, 11]), np.array([5, 7, 6, 12])
    assert ranges(first, stop).tolist() == [3, 4, 2, 3, 4, 5, 11]
    assert ranges(first[:0], stop[:0]).tolist() == []
