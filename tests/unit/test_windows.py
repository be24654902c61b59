"""Windows: each token of the joined texts is a label once, after the token before it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.data.batches.loader import Batches, Tokens, fingerprint
from flaxformer_lite.data.batches.windows import WindowPlan
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.fields import BOS, EOS, PAD
from flaxformer_lite.model import transformer
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import predictions, step
from flaxformer_lite.training.predictions import preceding

WINDOW, ROWS, V = 7, 3, 31


def make_texts(sizes=(23, 0, 1, 11, 5, 0, 29), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, V, size).astype(np.int32) for size in sizes]


def joined(texts):
    """Returns the stream of some texts, by concatenation."""
    full = [ids for ids in texts if len(ids)]
    return np.concatenate([part for ids in full for part in ([EOS], ids)][1:])


def make(texts, *, windows=WINDOW, seed=11, shuffled=True, rows=ROWS):
    tokens = Tokens(target=texts)
    plan = WindowPlan(
        tokens.target.lengths(),
        windows=windows,
        tokens_per_batch=windows * rows,
        rows_multiple=rows,
        seed=seed,
        shuffled=shuffled,
    )
    return tokens, plan


def batches_of(texts, epochs=1, part=(0, 1), **options):
    tokens, plan = make(texts, **options)
    batches = Batches(tokens, plan, num_steps=epochs * plan.steps_per_epoch, part=part)
    return [batches[step] for step in range(len(batches))]


def epoch_of(plan, number):
    """Returns the (first, stop) of all blocks of an epoch, in their order."""
    steps = range(number * plan.steps_per_epoch, (number + 1) * plan.steps_per_epoch)
    pairs = [pair for step in steps for pair in zip(*plan.borders(step), strict=True)]
    return [(int(first), int(stop)) for first, stop in pairs if stop > first]


# Any length of a stream, shorter than a window and a multiple of it too.
SIZES = [*range(1, 3 * WINDOW + 2), 97]


@pytest.mark.parametrize("windows", [1, 2, WINDOW, 131])
@pytest.mark.parametrize("shuffled", [True, False])
def test_each_token_of_the_stream_is_a_label_once_an_epoch(windows, shuffled):
    for size in SIZES:
        _, plan = make([np.full(size, 5, np.int32)], windows=windows, shuffled=shuffled)
        for epoch in range(9):
            blocks = epoch_of(plan, epoch)
            labels = np.concatenate([np.arange(first, stop) for first, stop in blocks])
            assert sorted(labels.tolist()) == list(range(size))
            assert all(stop - first <= windows for first, stop in blocks)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_no_batch_is_empty_and_only_the_last_of_an_epoch_has_empty_rows(rows):
    for size in SIZES:
        _, plan = make([np.full(size, 5, np.int32)], rows=rows)
        for epoch, position in itertools.product(range(9), range(plan.steps_per_epoch)):
            first_R, stop_R = plan.borders(epoch * plan.steps_per_epoch + position)
            filled = int((stop_R > first_R).sum())
            assert filled == rows or (filled > 0 and position == plan.steps_per_epoch - 1)


def test_each_epoch_has_other_borders_and_another_order():
    _, plan = make(make_texts((997,)))
    epochs = [epoch_of(plan, number) for number in range(20)]
    assert len({sorted(blocks)[1] for blocks in epochs}) == WINDOW  # all offsets occur
    assert all(sorted(blocks) != blocks for blocks in epochs)
    full = [stop - first == WINDOW for blocks in epochs for first, stop in blocks]
    assert np.mean(full) > 0.97
    same = [epoch_of(make(make_texts((997,)))[1], number) for number in range(20)]
    assert same == epochs
    assert epoch_of(make(make_texts((997,)), seed=12)[1], 0) != epochs[0]


def test_an_evaluation_has_all_blocks_in_order_and_the_last_one_is_short():
    _, plan = make(make_texts((16,)), shuffled=False)
    assert epoch_of(plan, 0) == epoch_of(plan, 3) == [(0, 7), (7, 14), (14, 16)]
    assert (plan.tokens, plan.positions, plan.steps_per_epoch) == ((16,), 21, 1)
    assert plan.padding_shares() == (pytest.approx(5 / 21),)


def test_a_row_has_consecutive_tokens_and_the_one_before_them():
    texts = make_texts()
    stream = joined(texts)
    assert (stream == EOS).sum() == 4  # between the 5 texts that are not empty
    with_start = np.concatenate([[BOS], stream])
    _, plan = make(texts)
    batches = batches_of(texts, epochs=4)
    for number, batch in enumerate(batches):
        assert {name: x.dtype for name, x in batch.items()} == dict.fromkeys(batch, np.int32)
        first_R, stop_R = plan.borders(number)
        for first, stop, row, before in zip(
            first_R, stop_R, batch["target"], batch["before"], strict=True
        ):
            assert row[: stop - first].tolist() == stream[first:stop].tolist()
            assert (row[stop - first :] == PAD).all()
            assert before == (with_start[first] if stop > first else BOS)


def test_empty_texts_are_left_out_and_no_text_is_too_long():
    _, plan = make(make_texts())
    assert (plan.empty, plan.too_long, plan.usable.tolist()) == (2, 0, [0, 2, 3, 4, 6])
    with pytest.raises(InputError, match="None of 2 texts can be used: all are empty"):
        make(make_texts((0, 0)))


def test_a_stream_is_read_from_stored_ids_as_from_ids_in_memory():
    texts = make_texts()
    stored = Ragged.of(texts)
    stored = Ragged(stored.values.astype(np.uint16), stored.offsets)
    for one, other in zip(batches_of(texts), batches_of(stored), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_rows_of_several_processes_make_the_global_batch():
    texts = make_texts()
    whole = batches_of(texts, rows=6)
    parts = [batches_of(texts, rows=6, part=(i, 3)) for i in range(3)]
    for batch, *of_parts in zip(whole, *parts, strict=True):
        for name, array in batch.items():
            assert np.array_equal(array, np.concatenate([part[name] for part in of_parts]))


def test_the_fingerprint_depends_on_tokens_window_seed_and_borders_of_texts():
    texts = make_texts()
    options = [{}, {"windows": 5}, {"seed": 12}, {"shuffled": False}]
    prints = [fingerprint(*make(texts, **each)) for each in options]
    halves = [texts[0][:11], texts[0][11:], *texts[1:]]
    prints += [fingerprint(*make(other)) for other in (make_texts(seed=1), halves)]
    assert len(set(prints)) == len(prints)
    assert fingerprint(*make(make_texts())) == prints[0]


def test_the_decoder_reads_the_token_before_each_label_and_a_start_symbol_before_each_text():
    labels = jnp.array([[9, EOS, 8, 7], [6, 5, PAD, PAD], [4, 5, 6, 7]])
    inputs = preceding(labels, jnp.array([4, BOS, EOS]))
    assert inputs.tolist() == [[4, 9, BOS, 8], [BOS, 6, 5, PAD], [BOS, 4, 5, 6]]


CONFIG = ModelConfig(
    architecture="decoder_lm",
    vocab_size=V,
    d_model=12,
    num_heads=2,
    d_ff=13,
    num_decoder_layers=1,
    max_length=WINDOW,
    dropout=0.0,
)


def test_the_loss_of_a_batch_of_windows_is_that_of_its_rows_computed_with_numpy():
    texts = make_texts()
    model, params = runs.varied_model(CONFIG)
    logits_of = jax.jit(lambda params, rows: model.apply({"params": params}, rows))
    sums_of = jax.jit(lambda params, batch: step.loss_sums(params, batch, model=model)[1]["loss"])
    _, plan = make(texts, shuffled=False)
    stream, total = joined(texts), 0.0
    read = np.concatenate([[BOS], np.where(stream == EOS, BOS, stream)])
    for first, stop in epoch_of(plan, 0):
        rows = np.pad(read[first:stop], (0, WINDOW - (stop - first)))[None]
        logits = np.asarray(logits_of(params, rows), np.float64)[0, : stop - first]
        log_prob = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= log_prob[np.arange(stop - first), stream[first:stop]].sum()
    sums = [sums_of(params, batch) for batch in batches_of(texts, shuffled=False)]
    assert sum(float(weight) for _, weight in sums) == len(stream)
    assert sum(float(loss) for loss, _ in sums) == pytest.approx(total, rel=1e-5)
    # With a start symbol before each window, as before a text of its own, the loss is another one.
    alone = [dict(batch, before=np.full(ROWS, BOS)) for batch in batches_of(texts, shuffled=False)]
    others = [float(sums_of(params, batch)[0]) for batch in alone]
    assert abs(sum(others) - total) > 1e-3 * total


def test_a_window_at_the_start_of_a_text_is_read_like_that_text_in_a_row_of_its_own():
    (text,) = make_texts((5,))
    (window,) = batches_of([text], shuffled=False)
    inputs, _ = predictions.decoder_inputs(window, model=transformer.build_model(CONFIG))
    assert inputs[0][0].tolist() == [BOS, *text.tolist(), PAD]
