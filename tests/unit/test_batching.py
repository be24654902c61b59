"""The plan of an epoch: every example once, alone in a row or packed, by (seed, step)."""

import itertools

import numpy as np
import pytest

from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan, best_buckets, bucket_rows

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


def make_packed(length=None, seed=11, **changes):
    options = dict(buckets=BUCKETS, tokens_per_batch=TOKENS, rows_multiple=MULTIPLE) | changes
    return PackedPlan(lengths()[1] if length is None else length, seed=seed, **options)


def make_packed_pairs(seed=11, **changes):
    options = dict(buckets=BUCKETS, tokens_per_batch=TOKENS, rows_multiple=MULTIPLE) | changes
    return PackedPlan(*lengths(), seed=seed, **options)


def numbers(rows):
    return np.concatenate(rows)


def row_sizes(rows):
    return [len(row) for row in rows]


@pytest.fixture(scope="module")
def plan():
    return make()


@pytest.fixture(scope="module")
def packed():
    return make_packed()


def test_an_epoch_has_every_usable_example_once_and_no_other(plan):
    source, target = lengths()
    usable = [
        i
        for i in range(len(source))
        if min(source[i], target[i]) > 0 and max(source[i], target[i]) + 1 <= 29
    ]
    assert 0 < len(usable) < len(source)
    for number in (0, 1, 5):
        seen = np.concatenate([numbers(rows) for _, rows in epoch(plan, number)])
        assert sorted(seen) == usable == plan.usable.tolist()


def test_a_row_has_one_example_or_none(plan):
    assert {size for _, rows in epoch(plan, 0) for size in row_sizes(rows)} == {0, 1}


def test_a_missing_side_does_not_limit_the_examples():
    source, target = lengths()
    for sides, present in (((source, None), source), ((None, target), target)):
        one, both = make(*sides), make(present, present)
        assert (
            one.usable.tolist()
            == both.usable.tolist()
            == np.flatnonzero((present > 0) & (present < 29)).tolist()
        )
        assert (one.empty, one.too_long) == (both.empty, both.too_long)
        assert same(epoch(one, 0), epoch(both, 0))


def test_unusable_examples_are_counted_by_reason(plan):
    source, target = lengths()
    empty = sum(min(s, t) == 0 for s, t in zip(source, target, strict=True))
    long = sum(min(s, t) > 0 and max(s, t) + 1 > 29 for s, t in zip(source, target, strict=True))
    assert empty > 0 and long > 0
    assert (plan.empty, plan.too_long) == (empty, long)


def test_every_example_fits_its_batch_with_its_end_symbol(plan):
    source, target = lengths()
    for length, rows in epoch(plan, 0):
        real = numbers(rows)
        assert length in BUCKETS
        assert max(source[real].max(), target[real].max()) + 1 <= length


def test_only_the_rest_of_a_bucket_is_in_a_longer_bucket_than_it_needs(plan):
    source, target = lengths()
    need = np.maximum(source, target) + 1
    promoted = sum(
        (need[numbers(e)] <= BUCKETS[BUCKETS.index(n) - 1]).sum()
        for n, e in epoch(plan, 0)
        if n > 7
    )
    assert 0 < promoted < sum(plan.rows[:-1])


def test_a_batch_has_the_most_rows_within_its_tokens_and_multiple(plan):
    assert (
        plan.rows
        == bucket_rows(BUCKETS, tokens_per_batch=TOKENS, rows_multiple=MULTIPLE)
        == [27, 15, 6]
    )
    for length, examples in epoch(plan, 0):
        rows = len(examples)
        assert rows % MULTIPLE == 0
        assert rows * length <= TOKENS < (rows + MULTIPLE) * length


@pytest.mark.parametrize("number", [7, 11, 97, 101, 997])
def test_at_most_one_batch_an_epoch_has_empty_rows_and_they_are_its_last(number):
    plan = make(*lengths(number))
    for n in range(3):
        incomplete = [row_sizes(rows) for _, rows in epoch(plan, n) if 0 in row_sizes(rows)]
        assert len(incomplete) <= 1
        for sizes in incomplete:
            assert sizes == sorted(sizes, reverse=True) and sizes[0] == 1


def test_some_epoch_has_an_incomplete_batch(plan):
    assert any(0 in row_sizes(rows) for _, rows in epoch(plan, 0))


def as_lists(batch):
    length, rows = batch
    return length, [row.tolist() for row in rows]


def same(first, second):
    return [as_lists(batch) for batch in first] == [as_lists(batch) for batch in second]


@pytest.mark.parametrize("make_plan", [make, make_packed, make_packed_pairs])
def test_a_batch_is_a_function_of_seed_and_step_independent_of_earlier_calls(make_plan):
    plan, fresh = make_plan(), make_plan()
    for step in [5 * plan.steps_per_epoch + 2, 0, 3, plan.steps_per_epoch, 3]:
        assert same([plan.batch(step)] * 2, [make_plan().batch(step), fresh.batch(step)])


@pytest.mark.parametrize("make_plan", [make, make_packed, make_packed_pairs])
def test_epochs_differ_and_seeds_differ(make_plan):
    plan = make_plan()
    assert same(epoch(plan, 0), epoch(plan, 0))
    assert not same(epoch(plan, 0), epoch(plan, 1))
    assert not same(epoch(plan, 0), epoch(make_plan(seed=12), 0))


def test_the_batches_of_an_epoch_are_not_sorted_by_length(plan):
    order = [length for length, _ in epoch(plan, 0)]
    assert order != sorted(order) and order != sorted(order, reverse=True)


def test_every_epoch_has_the_same_steps_and_shapes(plan):
    for n in (1, 2, 7):
        assert sorted(len(e) for _, e in epoch(plan, n)) == sorted(
            len(e) for _, e in epoch(plan, 0)
        )


def test_the_shape_of_a_step_equals_that_of_its_batch(plan):
    for step in (0, 1, plan.steps_per_epoch + 1):
        length, examples = plan.batch(step)
        assert plan.shape(step) == (len(examples), length)


def test_the_shapes_are_sorted_by_frequency(plan):
    seen = [plan.shape(step) for step in range(plan.steps_per_epoch)]
    assert set(plan.shapes()) == set(seen) == {(27, 7), (15, 13), (6, 29)}
    counts = [seen.count(shape) for shape in plan.shapes()]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 1


def test_the_share_of_padding_is_counted_for_each_side(plan):
    positions = sum(length * len(rows) for length, rows in epoch(plan, 0))
    tokens = [
        sum((side + 1)[numbers(rows)].sum() for _, rows in epoch(plan, 0)) for side in lengths()
    ]
    assert tokens[0] != tokens[1]
    assert (plan.tokens, plan.positions) == (tuple(tokens), positions)
    assert plan.padding_shares() == pytest.approx([1 - count / positions for count in tokens])


def test_examples_that_fill_their_batches_leave_no_padding():
    assert make(np.full(54, 6), np.full(54, 3)).padding_shares() == (0, 1 - 4 / 7)


def test_buckets_without_examples_are_not_used():
    plan = make(np.full(31, 5), np.full(31, 6))
    assert plan.buckets == (7,) and plan.rows == [27] and plan.steps_per_epoch == 2


def test_an_example_that_just_fits_is_used_and_one_token_more_is_too_long():
    plan = make(np.array([28, 29, 28]), np.array([28, 28, 3]))
    assert (plan.too_long, plan.empty) == (1, 0)
    assert sorted(row.tolist() for row in plan.batch(0)[1]) == [[]] * 4 + [[0], [2]]


@pytest.mark.parametrize("sides", [([0, 5], [3, 0]), ([40], [3]), ([], [])])
def test_examples_without_a_usable_one_are_refused(sides):
    with pytest.raises(ValueError, match=rf"^None of {len(sides[0])} examples can be used"):
        make(*(np.array(side, int) for side in sides))


def test_every_usable_text_is_in_one_row_an_epoch_and_no_other(packed):
    length = lengths()[1]
    usable = np.flatnonzero((length > 0) & (length + 1 <= 29)).tolist()
    assert 0 < len(usable) < len(length)
    for number in (0, 1, 5):
        seen = np.concatenate([numbers(rows) for _, rows in epoch(packed, number)])
        assert sorted(seen) == usable == packed.usable.tolist()
    assert (packed.empty, packed.too_long) == ((length == 0).sum(), (length + 1 > 29).sum())
    assert packed.empty > 0 and packed.too_long > 0


def test_the_texts_of_a_row_fit_it_with_an_end_symbol_each(packed):
    need = lengths()[1] + 1
    shared = 0
    for number in (0, 1):
        for length, rows in epoch(packed, number):
            assert (len(rows), length) == (6, 29) == packed.shape(number)
            assert all(need[row].sum() <= length for row in rows)
            shared += sum(size > 1 for size in row_sizes(rows))
    assert shared > 100
    assert (packed.buckets, packed.rows, packed.shapes()) == ((29,), [6], [(6, 29)])


def test_every_usable_pair_is_in_one_packed_row_an_epoch_and_both_its_sides_fit():
    plan, (source, target) = make_packed_pairs(), lengths()
    assert plan.usable.tolist() == make().usable.tolist() and (plan.empty, plan.too_long) == (
        make().empty,
        make().too_long,
    )
    for number in (0, 1, 5):
        seen, shared = [], 0
        for length, rows in epoch(plan, number):
            assert (len(rows), length) == (6, 29) == plan.shape(number)
            assert all(max((source + 1)[row].sum(), (target + 1)[row].sum()) <= 29 for row in rows)
            shared += sum(size > 1 for size in row_sizes(rows))
            seen += rows
        assert sorted(numbers(seen)) == plan.usable.tolist() and shared > 100
    positions = plan.steps_per_epoch * 6 * 29
    tokens = [(side + 1)[plan.usable].sum() for side in (source, target)]
    assert tokens[0] != tokens[1]
    assert plan.padding_shares() == pytest.approx([1 - count / positions for count in tokens])
    assert max(plan.padding_shares()) < min(make().padding_shares())


@pytest.mark.parametrize("make_plan", [make, make_packed, make_packed_pairs])
def test_a_span_of_steps_has_their_rows_one_after_another(make_plan):
    plan = make_plan()
    for first, stop in (
        (0, 1),
        (2, 9),
        (0, plan.steps_per_epoch),
        (2 * plan.steps_per_epoch, 3 * plan.steps_per_epoch),
    ):
        examples, size = plan.span(first, stop)
        rows = [row for step in range(first, stop) for row in plan.batch(step)[1]]
        assert size.tolist() == row_sizes(rows) and examples.tolist() == numbers(rows).tolist()


def test_a_shuffle_of_32_bit_numbers_equals_that_of_64_bit_numbers():
    """Plans with 32-bit example numbers equal older plans with 64-bit numbers."""
    wide, narrow = (
        np.random.default_rng(3).permutation(np.arange(997, dtype=dtype))
        for dtype in (np.int64, np.int32)
    )
    assert wide.tolist() == narrow.tolist() != sorted(narrow.tolist())


def test_only_the_last_rows_of_an_epoch_are_empty(packed):
    sizes = [size for _, rows in epoch(packed, 1) for size in row_sizes(rows)]
    assert 0 in sizes and sizes.count(0) < packed.rows[0]
    assert all(sizes[: -sizes.count(0)])


def test_a_text_shares_its_row_with_other_texts_in_another_epoch(packed):
    def neighbours(number):
        return {
            frozenset(row.tolist())
            for _, rows in epoch(packed, number)
            for row in rows
            if len(row) > 1
        }

    first, second = neighbours(0), neighbours(1)
    assert len(first & second) < 0.1 * len(first)


def test_the_padding_of_packed_rows_is_the_rest_of_their_texts(packed):
    tokens = (lengths()[1] + 1)[packed.usable].sum()
    positions = packed.steps_per_epoch * 6 * 29
    assert packed.padding_shares() == pytest.approx([1 - tokens / positions])
    assert packed.padding_shares() < make(None, lengths()[1]).padding_shares()


def test_packing_texts_of_many_lengths_leaves_less_than_2_percent_of_padding():
    length = np.random.default_rng(3).geometric(0.05, 20_011)
    plan = make_packed(length, buckets=(127,), tokens_per_batch=127 * 8, rows_multiple=8)
    assert plan.padding_shares()[0] < 0.02


@pytest.mark.parametrize("length", [[0, 0], [29, 40], []])
def test_packing_without_a_usable_text_is_refused(length):
    with pytest.raises(ValueError, match=rf"^None of {len(length)} examples can be used"):
        make_packed(np.array(length, int))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_best_buckets_have_the_least_padding_of_all_choices(seed, count):
    length_N = np.random.default_rng(seed).geometric(0.2, 61).clip(max=17)

    def positions(buckets):
        return sum(min(bucket for bucket in buckets if bucket >= length) for length in length_N)

    longest = int(length_N.max())
    every = [(*others, longest) for others in itertools.combinations(range(1, longest), count - 1)]
    found = best_buckets(length_N, count)
    assert list(found) == sorted(set(found)) and found[-1] == longest and len(found) == count
    assert positions(found) == min(map(positions, every)) >= length_N.sum()


def test_the_number_of_buckets_is_at_most_that_of_lengths():
    assert best_buckets(np.array([7, 3, 7, 5]), 11) == (3, 5, 7)


def test_a_plan_with_chosen_buckets_has_less_padding_and_the_same_examples(plan):
    chosen = make(num_buckets=len(BUCKETS))
    assert chosen.usable.tolist() == plan.usable.tolist()
    assert chosen.buckets[-1] <= BUCKETS[-1] and len(chosen.buckets) == len(BUCKETS)
    assert chosen.positions < plan.positions
    assert max(length for length, _ in epoch(chosen, 0)) == chosen.buckets[-1]
