"""Batches of ids: the processes' rows make the global batch, and a stream can start anywhere."""

import dataclasses
import hashlib
import itertools
import threading

import numpy as np
import pytest

from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens, fill_rows, fingerprint, stream
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.fields import EOS, PAD

# SHA-256 of the batches of 3 epochs of pairs, and the fingerprint of these pairs, from version 0.1.
# They must not change: runs of that version resume with the same batches, and its published results
# stay reproducible.
BATCHES = "ef92c1df7f4aaafc16c5a75dec14446fc7145953035d835e42fe989a7ee6fc7a"
FINGERPRINT = "e071ad902e80b7eb84ec3cd0441af55820ccee782358b65ecc4e8cd6d3b03f49"


def make_pairs(seed=0, number=83):
    rng = np.random.default_rng(seed)

    def side():
        lengths = (rng.integers(1, 12) for _ in range(number))
        return [rng.integers(4, 31, length).astype(np.int32) for length in lengths]

    return Tokens(side(), side())


def make_classified(seed=0):
    """Returns sources with labels."""
    pairs = make_pairs(seed)
    return Tokens(
        pairs.source,
        label=np.random.default_rng(seed).integers(0, 5, len(pairs.source)).astype(np.int32),
    )


def make_plan(pairs, *, seed=0, buckets=(7, 13), rows_multiple=6):
    return BatchPlan(
        *pairs.lengths(),
        buckets=buckets,
        tokens_per_batch=91,
        rows_multiple=rows_multiple,
        seed=seed,
    )


def make_packed(texts, *, seed=0, rows_multiple=6):
    return PackedPlan(
        texts.lengths()[1],
        buckets=(7, 23),
        tokens_per_batch=161,
        rows_multiple=rows_multiple,
        seed=seed,
    )


def make_packed_pairs(pairs, *, seed=0):
    return PackedPlan(
        *pairs.lengths(), buckets=(7, 23), tokens_per_batch=161, rows_multiple=6, seed=seed
    )


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
    assert (
        Tokens(pairs.source).lengths()[1] is None
        and Tokens(target=pairs.target).lengths()[0] is None
    )
    assert Tokens(pairs.source).lengths()[0].tolist() == source.tolist()


def test_pairs_have_the_batches_and_the_fingerprint_of_version_0_1():
    rng = np.random.default_rng(5)
    length = rng.integers(0, 33, (2, 2, 997)).min(axis=0)
    tokens = Tokens(*[[rng.integers(4, 101, n).astype(np.int32) for n in side] for side in length])
    plan = BatchPlan(
        *tokens.lengths(), buckets=(7, 13, 29), tokens_per_batch=200, rows_multiple=3, seed=11
    )
    assert min(plan.empty, plan.too_long) > 0
    digest = hashlib.sha256()
    batches = Batches(tokens, plan, num_steps=3 * plan.steps_per_epoch)
    for step in range(len(batches)):
        batch = batches[step]
        assert set(batch) == {"source", "target", "row"}
        for name in ("source", "target", "row"):
            digest.update(repr((name, batch[name].shape)).encode())
            digest.update(batch[name].tobytes())
    assert digest.hexdigest() == BATCHES
    assert fingerprint(tokens, plan) == FINGERPRINT


def test_a_row_is_the_ids_of_its_example_then_the_end_symbol_then_padding(pairs, plan):
    batches = Batches(pairs, plan, num_steps=plan.steps_per_epoch)
    assert len(batches) == plan.steps_per_epoch
    for step in range(plan.steps_per_epoch):
        length, rows = plan.batch(step)
        batch = batches[step]
        assert all(array.dtype == np.int32 for array in batch.values())
        assert batch["row"].tolist() == list(range(len(rows)))
        for side in ("source", "target"):
            for row, examples in zip(batch[side].tolist(), rows, strict=True):
                ids = [*getattr(pairs, side)[examples[0]].tolist(), EOS] if len(examples) else []
                assert row == ids + [PAD] * (length - len(ids))


def test_a_row_without_an_example_is_all_padding(pairs, plan):
    empty_rows = [
        np.array([not len(row) for row in plan.batch(step)[1]])
        for step in range(plan.steps_per_epoch)
    ]
    (step,) = [step for step, empty in enumerate(empty_rows) if empty.any()]
    batch, empty = Batches(pairs, plan, num_steps=plan.steps_per_epoch)[step], empty_rows[step]
    assert not batch["source"][empty].any() and not batch["target"][empty].any()
    assert batch["source"][~empty].any(axis=1).all() and batch["target"][~empty].any(axis=1).all()


def test_a_classified_text_has_its_label_and_an_empty_row_minus_one():
    tokens = make_classified()
    plan = make_plan(tokens)
    labels = []
    for step in range(plan.steps_per_epoch):
        batch = Batches(tokens, plan, num_steps=plan.steps_per_epoch)[step]
        assert set(batch) == {"source", "label", "row"} and batch["label"].dtype == np.int32
        rows = plan.batch(step)[1]
        assert batch["label"].tolist() == [tokens.label[row[0]] if len(row) else -1 for row in rows]
        labels += batch["label"].tolist()
    assert set(labels) == {-1, 0, 1, 2, 3, 4}


def test_batches_with_one_text_a_row_have_no_segments():
    tokens = Tokens(target=make_pairs().target)
    batch = Batches(tokens, make_plan(tokens), num_steps=3)[0]
    assert set(batch) == {"target", "row"}


def test_packed_texts_are_concatenated_each_with_its_end_symbol_and_its_number():
    tokens = Tokens(target=make_pairs().target)
    plan = make_packed(tokens)
    counts = set()
    for step in range(plan.steps_per_epoch):
        length, rows = plan.batch(step)
        batch = Batches(tokens, plan, num_steps=plan.steps_per_epoch)[step]
        assert (
            set(batch) == {"target", "target_segment", "row"}
            and batch["target_segment"].dtype == np.int32
        )
        for ids, segment, examples in zip(
            batch["target"].tolist(), batch["target_segment"].tolist(), rows, strict=True
        ):
            texts = [[*tokens.target[example].tolist(), EOS] for example in examples]
            expected = [token for text in texts for token in text]
            numbers = [number for number, text in enumerate(texts, 1) for _ in text]
            padding = [0] * (length - len(expected))
            assert (ids, segment) == (expected + padding, numbers + padding)
            counts.add(len(texts))
    assert {0, 2, 3} <= counts
    assert PAD == 0


def test_packed_pairs_have_the_same_order_and_numbers_on_both_sides(pairs):
    plan = make_packed_pairs(pairs)
    counts = set()
    for step in range(plan.steps_per_epoch):
        length, rows = plan.batch(step)
        batch = Batches(pairs, plan, num_steps=plan.steps_per_epoch)[step]
        assert set(batch) == {"source", "source_segment", "target", "target_segment", "row"}
        for side in ("source", "target"):
            for ids, segment, examples in zip(
                batch[side], batch[f"{side}_segment"], rows, strict=True
            ):
                texts = [[*getattr(pairs, side)[example].tolist(), EOS] for example in examples]
                expected = [
                    (token, number) for number, text in enumerate(texts, 1) for token in text
                ]
                expected += [(PAD, 0)] * (length - len(expected))
                assert list(zip(ids.tolist(), segment.tolist(), strict=True)) == expected
                counts.add(len(texts))
    assert {0, 2, 3} <= counts


def test_texts_too_long_for_their_row_are_an_error():
    texts = Ragged.of([[5, 6], [7], [8, 9]])
    ids, _ = fill_rows(texts, np.array([0, 0, 1]), rows=2, length=5)
    assert ids.tolist() == [[5, 6, EOS, 7, EOS], [8, 9, EOS, PAD, PAD]]
    with pytest.raises(ValueError, match="fit rows of 4 tokens, got 5 in a row"):
        fill_rows(texts, np.array([0, 0, 1]), rows=2, length=4)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("shape", ["pairs", "classified", "packed", "packed pairs"])
def test_the_rows_of_all_processes_together_are_the_global_batch(shape, count):
    tokens = {"classified": make_classified(), "packed": Tokens(target=make_pairs().target)}.get(
        shape, make_pairs()
    )
    plan = {"packed": make_packed, "packed pairs": make_packed_pairs}.get(shape, make_plan)(tokens)
    whole = Batches(tokens, plan, num_steps=7)
    parts = [Batches(tokens, plan, num_steps=7, part=(p, count)) for p in range(count)]
    for step in range(7):
        of_processes = [part[step] for part in parts]
        for name, expected in whole[step].items():
            np.testing.assert_array_equal(
                np.concatenate([batch[name] for batch in of_processes]), expected
            )
        assert len({len(batch["row"]) for batch in of_processes}) == 1


def test_a_stream_yields_every_step_in_order_and_then_ends(pairs, plan):
    steps = 2 * plan.steps_per_epoch + 1
    batches = Batches(pairs, plan, num_steps=steps)
    assert list(stream(batches, as_lists)) == [as_lists(batches[step]) for step in range(steps)]


@pytest.mark.parametrize("first", [1, 5, 12, 13])
def test_a_stream_from_a_step_is_the_rest_of_the_whole_stream(pairs, plan, first):
    batches = Batches(pairs, plan, num_steps=13)
    whole = list(stream(batches, as_lists))
    assert len({str(batch) for batch in whole}) == 13
    assert list(stream(batches, as_lists, first_step=first)) == whole[first:]


def test_batches_are_put_before_their_turn_and_each_once(pairs, plan):
    count, second = itertools.count(1), threading.Event()

    def put(batch):
        number = next(count)
        if number == 2:
            second.set()
        return number

    batches = stream(Batches(pairs, plan, num_steps=7), put)
    assert next(batches) == 1
    assert second.wait(60), "Expected the second batch on a device before somebody asks for it."
    assert list(batches) == [2, 3, 4, 5, 6, 7] and next(count) == 8


def test_equal_data_has_an_equal_fingerprint():
    first, second = make_pairs(), make_pairs()
    assert fingerprint(first, make_plan(first)) == fingerprint(second, make_plan(second))


def changed_id(pairs):
    source = [ids.copy() for ids in pairs.source]
    source[7][0] += 1
    return dataclasses.replace(pairs, source=source)


def moved_border(pairs):
    """Moves the first token of an example to the end of the one before."""
    target = list(pairs.target)
    i = next(i for i in range(1, len(target)) if len(target[i]) > 1)
    target[i - 1], target[i] = np.append(target[i - 1], target[i][0]), target[i][1:]
    return dataclasses.replace(pairs, target=target)


def test_other_ids_another_order_or_another_plan_have_another_fingerprint(pairs):
    reordered = Tokens(pairs.source[::-1], pairs.target[::-1])
    swapped = Tokens(pairs.target, pairs.source)
    others = [changed_id(pairs), moved_border(pairs), reordered, swapped]
    prints = [
        fingerprint(pairs, make_plan(pairs)),
        *(fingerprint(other, make_plan(other)) for other in others),
    ]
    changes = (dict(seed=1), dict(buckets=(5, 13)), dict(rows_multiple=5))
    prints += [fingerprint(pairs, make_plan(pairs, **change)) for change in changes]
    assert_all_differ(prints)


def assert_all_differ(prints):
    for first, second in itertools.combinations(range(len(prints)), 2):
        assert prints[first] != prints[second], (first, second)


def test_another_label_has_another_fingerprint():
    tokens, label = make_classified(), make_classified().label.copy()
    label[7] += 1
    others = [
        tokens,
        dataclasses.replace(tokens, label=label),
        dataclasses.replace(tokens, label=None),
    ]
    assert_all_differ([fingerprint(other, make_plan(other)) for other in others])
    assert fingerprint(make_classified(), make_plan(tokens)) == fingerprint(
        tokens, make_plan(tokens)
    )


def test_packing_changes_the_fingerprint():
    tokens = Tokens(target=make_pairs().target)
    plain = BatchPlan(
        None, tokens.lengths()[1], buckets=(7, 23), tokens_per_batch=161, rows_multiple=6
    )
    plans = [
        plain,
        make_packed(tokens),
        make_packed(tokens, seed=1),
        make_packed(tokens, rows_multiple=5),
    ]
    assert_all_differ([fingerprint(tokens, plan) for plan in plans])
    assert fingerprint(tokens, make_packed(tokens)) == fingerprint(tokens, plans[1])


def test_other_borders_of_rows_change_the_fingerprint(monkeypatch):
    tokens = Tokens(target=[np.full(3, 7 + i, np.int32) for i in range(4)])
    prints = []
    for sizes in ((1, 3), (3, 1)):
        plan = make_packed(tokens)
        assert (plan.steps_per_epoch, plan.rows) == (1, [6])
        monkeypatch.setattr(
            plan, "span", lambda *_, sizes=sizes: (np.arange(4), np.array([*sizes, 0, 0, 0, 0]))
        )
        prints.append(fingerprint(tokens, plan))
    assert_all_differ(prints)


def test_packing_pairs_changes_the_fingerprint(pairs):
    plans = [make_plan(pairs), make_packed_pairs(pairs), make_packed_pairs(pairs, seed=1)]
    assert_all_differ([fingerprint(pairs, plan) for plan in plans])
    assert fingerprint(pairs, make_packed_pairs(pairs)) == fingerprint(pairs, plans[1])


@pytest.mark.parametrize("shape", ["pairs", "packed"])
def test_the_fingerprint_equals_that_of_a_loop_over_batches_and_rows(shape, monkeypatch):
    tokens = make_pairs() if shape == "pairs" else Tokens(target=make_pairs().target)
    plan = make_plan(tokens) if shape == "pairs" else make_packed(tokens)
    digest = hashlib.sha256(repr((plan.buckets, plan.rows, plan.seed)).encode())
    for side in tokens.sides().values():
        digest.update(np.array([len(ids) for ids in side], np.int64).tobytes())
        digest.update(np.concatenate(list(side)).tobytes())
    sizes = set()
    for step in range(plan.steps_per_epoch):
        rows = [row.tolist() for row in plan.batch(step)[1]]
        sizes |= {len(row) for row in rows}
        digest.update(
            np.array([number for row in rows for number in row or [-1]], np.int64).tobytes()
        )
        if shape == "packed":
            digest.update(np.array([len(row) for row in rows], np.int64).tobytes())
    assert 0 in sizes
    for at_once in (1, 50, 1 << 20):
        monkeypatch.setattr("flaxformer_lite.data.batches.loader.HASHED_AT_ONCE", at_once)
        assert fingerprint(tokens, plan) == digest.hexdigest()


class Doubling:
    """A sampler that repeats the ids of a text if `epoch + example` is even; records its calls."""

    def __init__(self, tokens):
        self.tokens, self.calls = tokens, []

    def __call__(self, examples, epoch):
        self.calls.append((epoch, examples.tolist()))
        times = [2 - (epoch + example) % 2 for example in examples]
        return {
            name: Ragged.of([np.tile(side[i], n) for i, n in zip(examples, times, strict=True)])
            for name, side in self.tokens.sides().items()
        }


@pytest.mark.parametrize("make_plan", [make_plan, make_packed_pairs])
def test_rows_have_the_sampled_ids_if_they_fit_else_the_usual_ones(pairs, make_plan):
    plan, sampler = make_plan(pairs), Doubling(pairs)
    batches = Batches(pairs, plan, num_steps=2 * plan.steps_per_epoch, sample=sampler)
    outcomes, texts = set(), 0
    for step in range(len(batches)):
        batch, (length, rows) = batches[step], plan.batch(step)
        epoch = step // plan.steps_per_epoch
        assert sampler.calls[-1] == (epoch, [int(i) for row in rows for i in row])
        for side in ("source", "target"):
            usual = getattr(pairs, side)
            for ids, examples in zip(batch[side].tolist(), rows, strict=True):
                sampled = [[*usual[i].tolist() * (2 - (epoch + i) % 2), EOS] for i in examples]
                fits = sum(map(len, sampled)) <= length
                texts_of_row = sampled if fits else [[*usual[i].tolist(), EOS] for i in examples]
                expected = [token for text in texts_of_row for token in text]
                assert ids == expected + [PAD] * (length - len(expected))
                outcomes.add(fits)
                texts += 0 if fits else len(examples)
    assert outcomes == {True, False}
    assert (batches.sampled, batches.not_fitting) == (4 * len(plan.usable), texts)


def test_sampled_ids_of_all_processes_make_the_global_batch(pairs, plan):
    whole = Batches(pairs, plan, num_steps=7, sample=Doubling(pairs))
    parts = [
        Batches(pairs, plan, num_steps=7, part=(p, 3), sample=Doubling(pairs)) for p in range(3)
    ]
    for step in range(7):
        of_processes = [part[step] for part in parts]
        for name, expected in whole[step].items():
            np.testing.assert_array_equal(
                np.concatenate([batch[name] for batch in of_processes]), expected
            )
    assert any(
        (whole[step]["target"] != Batches(pairs, plan, num_steps=7)[step]["target"]).any()
        for step in range(7)
    )
