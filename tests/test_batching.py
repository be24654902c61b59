"""The plan of an epoch: every example once, among others of like length, as a function of (seed, step)."""

import numpy as np
import pytest

from flaxformer_lite.data.batching import EMPTY_ROW, BatchPlan, bucket_rows

BUCKETS, TOKENS, MULTIPLE = (7, 13, 29), 200, 3


def lengths(number=997, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 33, (2, 2, number)).min(axis=0))


def make(*sides, seed=11, **changes):
    options = dict(buckets=BUCKETS, tokens_per_batch=TOKENS, rows_multiple=MULTIPLE) | changes
    return BatchPlan(*(sides or lengths()), seed=seed, **options)


def epoch(plan, number):
    first = number * plan.steps_per_epoch
    return [plan.batch(step) for step in range(first, first + plan.steps_per_epoch)]


@pytest.fixture(scope="module")
def plan():
    return make()


def test_every_usable_example_comes_exactly_once_an_epoch_and_no_other(plan):
    source, target = lengths()
    usable = [i for i in range(len(source)) if min(source[i], target[i]) > 0 and max(source[i], target[i]) + 1 <= 29]
    assert 0 < len(usable) < len(source)
    for number in (0, 1, 5):
        seen = np.concatenate([examples for _, examples in epoch(plan, number)])
        assert sorted(seen[seen != EMPTY_ROW]) == usable


def test_what_is_left_out_is_counted_by_its_reason(plan):
    source, target = lengths()
    empty = sum(min(s, t) == 0 for s, t in zip(source, target, strict=True))
    long = sum(min(s, t) > 0 and max(s, t) + 1 > 29 for s, t in zip(source, target, strict=True))
    assert empty > 0 and long > 0
    assert (plan.empty, plan.too_long) == (empty, long)


def test_every_example_fits_its_batch_with_its_end_symbol(plan):
    source, target = lengths()
    for length, examples in epoch(plan, 0):
        real = examples[examples != EMPTY_ROW]
        assert length in BUCKETS
        assert max(source[real].max(), target[real].max()) + 1 <= length


def test_only_what_fills_no_batch_stands_in_a_longer_bucket_than_it_needs(plan):
    source, target = lengths()
    need = np.maximum(source, target) + 1
    promoted = sum((need[e[e != EMPTY_ROW]] <= BUCKETS[BUCKETS.index(n) - 1]).sum() for n, e in epoch(plan, 0) if n > 7)
    assert 0 < promoted < sum(plan.rows[:-1])


def test_a_batch_holds_as_many_rows_as_its_tokens_allow_in_a_multiple(plan):
    assert plan.rows == bucket_rows(BUCKETS, tokens_per_batch=TOKENS, rows_multiple=MULTIPLE) == [27, 15, 6]
    for length, examples in epoch(plan, 0):
        rows = len(examples)
        assert rows % MULTIPLE == 0
        assert rows * length <= TOKENS < (rows + MULTIPLE) * length


@pytest.mark.parametrize("number", [7, 11, 97, 101, 997])
def test_at_most_one_batch_an_epoch_has_empty_rows_and_they_are_its_last(number):
    plan = make(*lengths(number))
    for n in range(3):
        incomplete = [examples for _, examples in epoch(plan, n) if EMPTY_ROW in examples]
        assert len(incomplete) <= 1
        for examples in incomplete:
            (at,) = np.nonzero(examples == EMPTY_ROW)
            assert at[0] > 0 and at.tolist() == list(range(at[0], len(examples)))


def test_some_epoch_has_an_incomplete_batch(plan):
    assert any(EMPTY_ROW in examples for _, examples in epoch(plan, 0))


def test_a_batch_is_a_function_of_seed_and_step_whatever_was_asked_before(plan):
    steps = [5 * plan.steps_per_epoch + 2, 0, 3, plan.steps_per_epoch, 3]
    fresh = make()
    for step in steps:
        length, examples = plan.batch(step)
        other_length, other = make().batch(step)
        assert length == other_length == fresh.batch(step)[0]
        np.testing.assert_array_equal(examples, other)
        np.testing.assert_array_equal(examples, fresh.batch(step)[1])


def same(first, second):
    return all(np.array_equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def test_epochs_differ_and_seeds_differ(plan):
    assert same(epoch(plan, 0), epoch(plan, 0))
    assert not same(epoch(plan, 0), epoch(plan, 1))
    assert not same(epoch(plan, 0), epoch(make(seed=12), 0))


def test_the_batches_of_an_epoch_are_not_in_the_order_of_their_lengths(plan):
    order = [length for length, _ in epoch(plan, 0)]
    assert order != sorted(order) and order != sorted(order, reverse=True)


def test_every_epoch_has_the_same_steps_and_shapes(plan):
    for n in (1, 2, 7):
        assert sorted(len(e) for _, e in epoch(plan, n)) == sorted(len(e) for _, e in epoch(plan, 0))


def test_the_shape_of_a_step_is_that_of_its_batch(plan):
    for step in (0, 1, plan.steps_per_epoch + 1):
        length, examples = plan.batch(step)
        assert plan.shape(step) == (len(examples), length)


def test_the_shapes_are_listed_by_how_often_they_come(plan):
    seen = [plan.shape(step) for step in range(plan.steps_per_epoch)]
    assert set(plan.shapes()) == set(seen) == {(27, 7), (15, 13), (6, 29)}
    counts = [seen.count(shape) for shape in plan.shapes()]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 1


def test_the_share_of_padding_is_that_of_the_longer_sides(plan):
    source, target = lengths()
    need = np.maximum(source, target) + 1
    positions = sum(length * len(examples) for length, examples in epoch(plan, 0))
    tokens = sum(need[examples[examples != EMPTY_ROW]].sum() for _, examples in epoch(plan, 0))
    assert plan.padding_share() == pytest.approx(1 - tokens / positions)


def test_examples_that_fill_their_batches_leave_no_padding():
    assert make(np.full(54, 6), np.full(54, 3)).padding_share() == 0


def test_buckets_that_no_example_needs_are_not_used():
    plan = make(np.full(31, 5), np.full(31, 6))
    assert plan.buckets == (7,) and plan.rows == [27] and plan.steps_per_epoch == 2


def test_an_example_that_just_fits_is_used_and_one_token_more_is_too_long():
    plan = make(np.array([28, 29, 28]), np.array([28, 28, 3]))
    assert (plan.too_long, plan.empty) == (1, 0)
    assert sorted(plan.batch(0)[1].tolist()) == [EMPTY_ROW] * 4 + [0, 2]


@pytest.mark.parametrize("sides", [([0, 5], [3, 0]), ([40], [3]), ([], [])])
def test_nothing_to_train_on_is_refused(sides):
    with pytest.raises(ValueError, match=rf"^None of {len(sides[0])} examples can be used"):
        make(*(np.array(side, int) for side in sides))
