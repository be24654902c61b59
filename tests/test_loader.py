"""Batches of ids: rows of all processes make the global batch, and a stream can begin anywhere."""

import itertools

import numpy as np
import pytest

from flaxformer_lite.data.batching import EMPTY_ROW, BatchPlan
from flaxformer_lite.data.loader import Batches, TokenPairs, fingerprint, stream
from flaxformer_lite.data.tokenizer import EOS, PAD


def make_pairs(seed=0, number=83):
    rng = np.random.default_rng(seed)
    side = lambda: [rng.integers(4, 31, rng.integers(1, 12)).astype(np.int32) for _ in range(number)]  # noqa: E731
    return TokenPairs(side(), side())


def make_plan(pairs, *, seed=0, buckets=(7, 13), rows_multiple=6):
    return BatchPlan(*pairs.lengths(), buckets=buckets, tokens_per_batch=91, rows_multiple=rows_multiple, seed=seed)


@pytest.fixture(scope="module")
def pairs():
    return make_pairs()


@pytest.fixture(scope="module")
def plan(pairs):
    return make_plan(pairs)


def as_lists(batch):
    return {name: value.tolist() for name, value in batch.items()}


def test_lengths_are_those_of_both_sides(pairs):
    source, target = pairs.lengths()
    assert source.tolist() == [len(ids) for ids in pairs.source]
    assert target.tolist() == [len(ids) for ids in pairs.target]


def test_a_batch_holds_the_ids_of_its_plan_then_the_end_symbol_then_padding(pairs, plan):
    batches = Batches(pairs, plan, num_steps=plan.steps_per_epoch)
    assert len(batches) == plan.steps_per_epoch
    for step in range(plan.steps_per_epoch):
        length, examples = plan.batch(step)
        batch = batches[step]
        assert all(array.dtype == np.int32 for array in batch.values())
        assert batch["row"].tolist() == list(range(len(examples)))
        for side in ("source", "target"):
            for row, example in zip(batch[side].tolist(), examples, strict=True):
                ids = [] if example == EMPTY_ROW else [*getattr(pairs, side)[example].tolist(), EOS]
                assert row == ids + [PAD] * (length - len(ids))


def test_a_row_without_an_example_is_all_padding(pairs, plan):
    (step,) = [step for step in range(plan.steps_per_epoch) if EMPTY_ROW in plan.batch(step)[1]]
    batch = Batches(pairs, plan, num_steps=plan.steps_per_epoch)[step]
    empty = plan.batch(step)[1] == EMPTY_ROW
    assert not batch["source"][empty].any() and not batch["target"][empty].any()
    assert batch["source"][~empty].any(axis=1).all() and batch["target"][~empty].any(axis=1).all()


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_rows_of_all_processes_together_are_the_global_batch(pairs, plan, count):
    whole = Batches(pairs, plan, num_steps=7)
    parts = [Batches(pairs, plan, num_steps=7, process_index=p, process_count=count) for p in range(count)]
    for step in range(7):
        of_processes = [part[step] for part in parts]
        for name, expected in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in of_processes]), expected)
        assert len({len(batch["row"]) for batch in of_processes}) == 1


def test_a_stream_gives_every_step_in_order_and_then_ends(pairs, plan):
    steps = 2 * plan.steps_per_epoch + 1
    batches = Batches(pairs, plan, num_steps=steps)
    assert list(stream(batches, as_lists)) == [as_lists(batches[step]) for step in range(steps)]


@pytest.mark.parametrize("first", [1, 5, 12, 13])
def test_a_stream_from_a_step_is_the_whole_stream_without_those_before_it(pairs, plan, first):
    batches = Batches(pairs, plan, num_steps=13)
    whole = list(stream(batches, as_lists))
    assert len({str(batch) for batch in whole}) == 13
    assert list(stream(batches, as_lists, first_step=first)) == whole[first:]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_batches_are_put_ahead_of_their_turn_and_each_once(pairs, plan, ahead):
    put = []
    batches = stream(Batches(pairs, plan, num_steps=7), lambda batch: put.append(1) or len(put), ahead=ahead)
    assert next(batches) == 1
    assert len(put) == ahead + 1
    assert list(batches) == [2, 3, 4, 5, 6, 7] and len(put) == 7


def test_equal_data_has_an_equal_fingerprint():
    first, second = make_pairs(), make_pairs()
    assert fingerprint(first, make_plan(first)) == fingerprint(second, make_plan(second))


def changed_id(pairs):
    source = [ids.copy() for ids in pairs.source]
    source[7][0] += 1
    return TokenPairs(source, pairs.target)


def moved_border(pairs):
    """The same ids in a row, but the first token of one example is now the last of the one before it."""
    target = list(pairs.target)
    i = next(i for i in range(1, len(target)) if len(target[i]) > 1)
    target[i - 1], target[i] = np.append(target[i - 1], target[i][0]), target[i][1:]
    return TokenPairs(pairs.source, target)


def test_other_ids_another_order_or_another_plan_have_another_fingerprint(pairs):
    reordered = TokenPairs(pairs.source[::-1], pairs.target[::-1])
    swapped = TokenPairs(pairs.target, pairs.source)
    others = [changed_id(pairs), moved_border(pairs), reordered, swapped]
    prints = [fingerprint(pairs, make_plan(pairs)), *(fingerprint(other, make_plan(other)) for other in others)]
    changes = (dict(seed=1), dict(buckets=(5, 13)), dict(rows_multiple=5))
    prints += [fingerprint(pairs, make_plan(pairs, **change)) for change in changes]
    for first, second in itertools.combinations(range(len(prints)), 2):
        assert prints[first] != prints[second], (first, second)
