"""Examples of one split that another has too: counted by the ids of all sides."""

import numpy as np
import pytest

from flaxformer_lite.data.tokens import ragged
from flaxformer_lite.data.tokens.ragged import Ragged


def sides(source, target):
    return {"source": Ragged.of(source), "target": Ragged.of(target)}


def random_rows(count, seed, longest=11):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 5, size=rng.integers(0, longest)) for _ in range(count)]


def count_shared(one, other):
    return ragged.count_shared(one, ragged.hashes(other))


@pytest.mark.parametrize("at_once", [1, 7, 1 << 16])
def test_rows_are_counted_that_are_equal_on_each_side(at_once, monkeypatch):
    monkeypatch.setattr(ragged, "ROWS_AT_ONCE", at_once)
    train = sides(random_rows(211, 0), random_rows(211, 1))
    test = sides(random_rows(53, 2), random_rows(53, 3))
    known = {(tuple(s), tuple(t)) for s, t in zip(train["source"], train["target"], strict=True)}
    expected = sum(
        (tuple(s), tuple(t)) in known for s, t in zip(test["source"], test["target"], strict=True)
    )
    assert count_shared(test, train) == expected
    both = {
        side: Ragged.of([*rows, *train[side][5:12], train[side][5]]) for side, rows in test.items()
    }
    assert count_shared(both, train) == expected + 8


def test_order_and_side_and_border_of_rows_count():
    pairs = [([1, 2], [3]), ([2, 1], [3]), ([1], [2, 3]), ([3], [1, 2]), ([1, 2, 3], []), ([], [1])]
    pairs += [([0], []), ([], []), ([], [0]), ([0, 0], [])]
    hashes = ragged.hashes(sides(*map(list, zip(*pairs, strict=True))))
    assert hashes.dtype == np.uint64 and len(set(hashes.tolist())) == len(pairs)


def test_one_side_and_no_rows():
    one, none = {"target": Ragged.of([[1, 2], [3]])}, {"target": Ragged.of([])}
    assert count_shared(one, {"target": Ragged.of([[3], [9]])}) == 1
    assert count_shared(none, one) == count_shared(one, none) == 0


def test_rows_with_the_unknown_id_are_not_counted():
    train = sides([[7], [7, 3], [], [5]], [[8], [8], [3, 3], [5]])
    test = sides([[7], [7, 3], [], [], [5]], [[8], [8], [3, 3], [9], [5]])
    of_train = ragged.hashes(train)
    assert ragged.count_shared(test, of_train) == 4
    assert ragged.count_shared(test, of_train, unknown=3) == 2


def test_ids_of_another_type_are_the_same_ids():
    small = Ragged(np.array([1, 2, 3], np.uint16), np.array([0, 2, 3]))
    assert count_shared({"source": small}, {"source": Ragged.of([[1, 2], [4]])}) == 1
