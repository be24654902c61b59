"""One step as a pure function: a mean over labels; microbatches, packing and padding make no difference."""

import dataclasses
import functools
import math

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from flaxformer_lite.config import CHOICES, ModelConfig
from flaxformer_lite.fields import BOS, PAD
from flaxformer_lite.model import parameters
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.embeddings import project
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import losses, metrics, predictions
from flaxformer_lite.training.predictions import shift_right
from flaxformer_lite.training.state import init_state
from flaxformer_lite.training.step import (
    confusion_step,
    eval_step,
    gradient_sums,
    loss_sums,
    train_step,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, CLASSES = 23, 3


class Bigram(nn.Module):
    """The cheapest model of a translation: the last token and the mean of the source's, dropout, and a matrix."""

    rate: float
    config: ModelConfig = ModelConfig(architecture="encoder_decoder")

    def setup(self):
        self.target, self.source, self.drop = nn.Embed(V, 13), nn.Embed(V, 13), Dropout(self.rate)
        self.matrix = self.param("matrix", nn.initializers.xavier_uniform(), (V, 13))

    def __call__(self, source_BS, target_BT, **mode):
        return project(self.features(source_BS, target_BT, **mode), self.output_weights(), self.config)

    def features(self, source_BS, target_BT, **mode):
        return self.drop(self.target(target_BT) + self.source(source_BS).mean(1)[:, None], **mode)

    def output_weights(self):
        return {"matrix": self.matrix}


MODEL, STILL = Bigram(0.3), Bigram(0.0)
ROWS, S, T = 8, 7, 5
SIZES = dict(d_model=14, num_heads=3, d_head=5, d_ff=11, num_encoder_layers=1, num_decoder_layers=1, max_length=19)
TRANSFORMER = ModelConfig(vocab_size=V, num_classes=CLASSES, **SIZES)


def make_batch(rows=ROWS):
    """Rows of 2 to 5 target tokens, so that means over rows and over tokens differ; the last row is empty."""
    rng = np.random.default_rng(0)
    batch = {"source": np.zeros((rows, S), np.int32), "target": np.zeros((rows, T), np.int32)}
    for row in range(rows - 1):
        for side, longest in (("source", S), ("target", T)):
            ids = [*rng.integers(4, V, rng.integers(1, longest)), 2]
            batch[side][row, : len(ids)] = ids
    return {**batch, "row": np.arange(rows, dtype=np.int32)}


def batch_for(architecture, rows=ROWS):
    """`make_batch` as the architecture reads it: a label for all texts but the last, or both sides packed in a row."""
    batch = make_batch(rows)
    if architecture == "encoder_classifier":
        label = np.append(np.arange(rows - 1, dtype=np.int32) % CLASSES, np.int32(-1))
        return {"source": batch["source"], "label": label, "row": batch["row"]}
    if architecture == "decoder_lm":
        pairs = zip(batch["source"], batch["target"], strict=True)
        target, segment = runs.filled([[ids[ids > 3] for ids in pair if ids.any()] for pair in pairs], S + T)
        return {"target": target, "target_segment": segment, "row": batch["row"]}
    return batch


@functools.cache
def transformer_of(architecture, **changes):
    """A small model of the architecture, and parameters that are all drawn, so that no bias is zero."""
    model = build_model(dataclasses.replace(TRANSFORMER, architecture=architecture, **changes))
    rng = np.random.default_rng(5)
    draw = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return model, jax.tree.map(draw, parameters.shapes(model))


BATCH = make_batch()
SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def state():
    """Parameters moved from where they start, so that no bias is zero."""
    rng = np.random.default_rng(1)
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0))()
    moved = jax.tree.map(lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), jnp.float32), start.params)
    return start.replace(params=moved)


@functools.cache
def jitted(function, **options):
    return jax.jit(functools.partial(function, **options))


def step_with(state, batch=BATCH, *, model=MODEL, smoothing=0.1, microbatches=1):
    run = jitted(train_step, model=model, optimizer=SGD, label_smoothing=smoothing, microbatches=microbatches)
    return run(state, batch)


def moved_by(state, batch=BATCH, **options):
    """What one step of plain gradient descent at rate 1 subtracts: the mean gradient."""
    after, sums = step_with(state, batch, **options)
    return jax.tree.map(jnp.subtract, state.params, after.params), sums


def close(first, second, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), first, second)


def largest_difference(first, second):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first, second)))


def test_the_decoder_reads_the_labels_one_place_to_the_right_after_the_start_symbol():
    assert shift_right(jnp.array([[7, 8, 2, 0], [9, 2, 0, 0]])).tolist() == [[1, 7, 8, 2], [1, 9, 2, 0]]


@pytest.mark.parametrize(
    ("labels", "segment", "read"),
    [
        ([7, 8, 2, 9, 2], [1, 1, 1, 2, 2], [1, 7, 8, 1, 9]),
        ([7, 2, 8, 2, 2], [1, 1, 2, 2, 3], [1, 7, 1, 8, 1]),
        ([7, 8, 9, 6, 2], [1, 1, 1, 1, 1], [1, 7, 8, 9, 6]),
    ],
)
def test_in_a_packed_row_every_text_is_read_after_a_start_symbol_of_its_own(labels, segment, read):
    assert shift_right(jnp.array([labels]), jnp.array([segment])).tolist() == [read]


def test_padding_after_packed_texts_reads_no_token_of_theirs():
    labels, segment = jnp.array([[7, 2, 8, 2, 0, 0]]), jnp.array([[1, 1, 2, 2, 0, 0]])
    read = shift_right(labels, segment)[0]
    assert read[:4].tolist() == [1, 7, 1, 8]
    assert set(read[4:].tolist()) <= {PAD, BOS}


def log_probabilities(state):
    """Log-softmax of the logits without dropout, in float64: (rows, T, V)."""
    logits = STILL.apply({"params": state.params}, BATCH["source"], shift_right(BATCH["target"]))
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_the_metrics_are_sums_over_tokens_that_are_not_padding(state):
    log_p = log_probabilities(state)
    tokens = [(b, t) for b in range(ROWS) for t in range(T) if BATCH["target"][b, t]]
    loss = -sum(log_p[b, t, BATCH["target"][b, t]] for b, t in tokens)
    hits = sum(log_p[b, t].argmax() == BATCH["target"][b, t] for b, t in tokens)
    sums = jitted(eval_step, model=MODEL)(state.params, BATCH)
    assert sums.keys() == {"loss", "accuracy"}
    np.testing.assert_allclose(sums["loss"], (loss, len(tokens)), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"], (hits, len(tokens)), rtol=1e-6)


def test_smoothing_is_in_what_is_minimised_and_not_in_the_loss_that_is_reported(state):
    plain, smoothed = (
        jitted(loss_sums, model=MODEL, label_smoothing=smoothing)(state.params, BATCH) for smoothing in (0.0, 0.3)
    )
    log_p, labels = log_probabilities(state), BATCH["target"]
    weights = labels != 0
    own = np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    expected = -((0.7 * own + 0.3 * log_p.mean(axis=-1)) * weights).sum()
    assert abs(float(smoothed[0]) - float(plain[0])) > 0.1
    np.testing.assert_allclose(smoothed[0], expected, rtol=1e-5)
    np.testing.assert_allclose(plain[0], plain[1]["loss"][0], rtol=1e-6)
    close(smoothed[1], plain[1], rtol=1e-6)


def test_a_step_follows_the_gradient_of_the_mean_over_tokens_and_not_over_rows(state):
    tokens_B = (BATCH["target"] != 0).sum(axis=1)
    assert len(set(tokens_B[:-1])) > 1

    @jax.jit
    def gradient_of_row(params, b):
        row = jax.tree.map(lambda x: jnp.asarray(x)[b][None], BATCH)
        return jax.grad(lambda params: loss_sums(params, row, model=STILL, label_smoothing=0.1)[0])(params)

    rows = [gradient_of_row(state.params, b) for b in range(ROWS - 1)]
    over_tokens = jax.tree.map(lambda *g: sum(g) / tokens_B.sum(), *rows)
    over_rows = jax.tree.map(lambda *g: sum(x / n for x, n in zip(g, tokens_B, strict=False)) / (ROWS - 1), *rows)
    assert largest_difference(over_tokens, over_rows) > 1e-3
    close(moved_by(state, model=STILL)[0], over_tokens, atol=1e-6)


def test_the_norm_that_is_reported_is_that_of_the_mean_gradient(state):
    gradients, sums = moved_by(state)
    norm = math.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(gradients)))
    assert metrics.divide(sums)["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("encoder_decoder", marks=pytest.mark.slow),
        pytest.param("encoder_classifier", marks=pytest.mark.slow),
        "decoder_lm",
    ],
)
def test_microbatches_give_the_loss_and_the_gradients_of_the_whole_batch_with_dropout_for_the_transformer(architecture):
    model, _ = transformer_of(architecture)
    params = jax.jit(lambda: init_state(model, SGD, seed=0).params)()
    batch = batch_for(architecture, rows=32)
    options = dict(model=model, label_smoothing=0.1)
    _, other = jitted(gradient_sums, **options)(params, batch, dropout_key=jax.random.key(4))
    whole, sums = jitted(gradient_sums, **options)(params, batch, dropout_key=jax.random.key(3))
    parts, sums_of_parts = jitted(gradient_sums, microbatches=4, **options)(
        params, batch, dropout_key=jax.random.key(3)
    )
    assert abs(metrics.divide(sums)["loss"] - metrics.divide(other)["loss"]) > 1e-3  # dropout is on
    close(sums_of_parts, sums, rtol=1e-6)
    whole, parts = (flax.traverse_util.flatten_dict(tree, sep="/") for tree in (whole, parts))
    for name, expected in whole.items():
        largest, difference = np.abs(expected).max(), np.abs(parts[name] - expected).max()
        if name.endswith("key/bias"):
            # A bias of the keys adds the same to all scores of a query, and the softmax takes it out: the true
            # gradient is zero, and what is computed is rounding noise, without a largest gradient to compare with.
            assert max(largest, difference) < 1e-5
        else:
            assert difference <= 1e-6 * largest, name


# R-Drop: each row twice, with two draws of dropout.


@pytest.mark.parametrize(
    "architecture",
    [
        "encoder_decoder",
        pytest.param("encoder_classifier", marks=pytest.mark.slow),
        pytest.param("decoder_lm", marks=pytest.mark.slow),
    ],
)
def test_with_r_drop_what_is_minimised_is_the_mean_loss_of_two_draws_and_how_far_they_disagree(state, architecture):
    model, params = (MODEL, state.params) if architecture == "encoder_decoder" else transformer_of(architecture)
    batch, key, r_drop = batch_for(architecture), jax.random.key(3), 4.0
    again = {**batch, "row": ~batch["row"]}
    options = dict(model=model, label_smoothing=0.1)
    draws = [jitted(loss_sums, **options)(params, rows, dropout_key=key) for rows in (batch, again)]

    @jax.jit
    def log_p(rows):
        mode = dict(deterministic=False, rngs={"dropout": key}, row_B=rows["row"], model=model)
        if architecture == "encoder_classifier":
            return jax.nn.log_softmax(predictions.of_classes(params, rows, **mode).x)
        weights = model.apply({"params": params}, method="output_weights")
        return jax.nn.log_softmax(project(predictions.of_tokens(params, rows, **mode).x, weights, model.config))

    weights = batch["label"][:, None] >= 0 if architecture == "encoder_classifier" else batch["target"] > 0
    p, q = (np.asarray(log_p(rows), np.float64) for rows in (batch, again))
    both_ways = (((np.exp(p) - np.exp(q)) * (p - q)).sum(axis=-1) * weights).sum()
    objective, sums = jitted(loss_sums, r_drop_weight=r_drop, **options)(params, batch, dropout_key=key)
    mean = (draws[0][0] + draws[1][0]) / 2
    assert both_ways > 0.1 and abs(draws[0][0] - draws[1][0]) > 1e-3
    np.testing.assert_allclose(objective, mean + r_drop / 4 * both_ways, rtol=1e-5)
    close(sums, jax.tree.map(lambda a, b: (a + b) / 2, draws[0][1], draws[1][1]), rtol=1e-5)


def test_with_r_drop_microbatches_and_parts_of_the_logits_give_the_gradients_of_the_whole(state, monkeypatch):
    options, params, key = dict(model=MODEL, r_drop_weight=4.0), state.params, {"dropout_key": jax.random.key(3)}
    whole, sums = jitted(gradient_sums, **options)(params, BATCH, **key)
    parts, sums_of_parts = jitted(gradient_sums, microbatches=4, **options)(params, BATCH, **key)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 4 * T * V)  # two rows, each twice
    few, sums_of_few = jax.jit(functools.partial(gradient_sums, **options))(params, BATCH, **key)
    plain, _ = jitted(gradient_sums, model=MODEL)(params, BATCH, **key)
    assert largest_difference(whole, plain) > 0.01
    for gradients, measured in ((parts, sums_of_parts), (few, sums_of_few)):
        close(measured, sums, rtol=1e-5)
        close(gradients, whole, atol=3e-5)


def test_r_drop_changes_nothing_where_nothing_is_dropped(state):
    plain, weighted = (jitted(loss_sums, model=MODEL, r_drop_weight=r)(state.params, BATCH) for r in (0.0, 4.0))
    close(weighted, plain, rtol=0)


def test_a_microbatch_takes_every_so_manieth_row(state):
    seen = []

    class Recorder:
        config = MODEL.config

        def apply(self, variables, *inputs, method, **options):
            if method == "output_weights":
                return {"matrix": jnp.zeros((V, 13))}
            seen.append(options["row_B"])
            return jnp.zeros((*inputs[1].shape, 13)) + variables["params"]

    with jax.disable_jit():
        gradient_sums(jnp.float32(0), BATCH, microbatches=4, model=Recorder())
    assert sorted(tuple(int(row) for row in rows) for rows in seen) == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_a_step_counts_itself_and_leaves_the_key_alone(state):
    after, _ = step_with(state)
    assert (int(state.step), int(after.step), int(step_with(after)[0].step)) == (0, 1, 2)
    np.testing.assert_array_equal(after.key_data, state.key_data)


def test_the_same_step_drops_the_same_and_another_step_or_seed_drops_others(state):
    first, _ = moved_by(state)
    close(moved_by(state)[0], first, rtol=0)
    later, _ = moved_by(state.replace(step=jnp.int32(1)))
    other, _ = moved_by(state.replace(key_data=state.key_data + 1))
    assert largest_difference(first, later) > 1e-3 and largest_difference(first, other) > 1e-3
    close(*(moved_by(state.replace(step=jnp.int32(s)), model=STILL)[0] for s in (0, 1)), rtol=0)  # only dropout differs


def test_an_empty_row_changes_nothing(state):
    assert not BATCH["target"][-1].any()
    without = {name: array[:-1] for name, array in BATCH.items()}
    gradients, sums = moved_by(state)
    fewer, sums_of_fewer = moved_by(state, without)
    close(gradients, fewer, atol=1e-6)
    close(sums, sums_of_fewer, rtol=1e-5)


def test_the_order_of_rows_changes_nothing_as_long_as_each_keeps_its_number(state):
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = {name: array[order] for name, array in BATCH.items()}
    renumbered = {**shuffled, "row": BATCH["row"]}
    gradients, _ = moved_by(state)
    assert largest_difference(gradients, moved_by(state, renumbered)[0]) > 1e-3
    close(moved_by(state, shuffled)[0], gradients, atol=1e-6)


def test_a_batch_of_empty_rows_alone_moves_nothing(state):
    empty = {"source": np.zeros((ROWS, S), np.int32), "target": np.zeros((ROWS, T), np.int32), "row": BATCH["row"]}
    gradients, sums = moved_by(state, empty)
    assert largest_difference(gradients, jax.tree.map(jnp.zeros_like, gradients)) == 0
    assert float(sums["loss"][1]) == 0


def test_evaluating_drops_nothing(state):
    close(jitted(eval_step, model=MODEL)(state.params, BATCH), jitted(eval_step, model=STILL)(state.params, BATCH))


def test_devices_that_each_hold_a_part_compute_the_step_of_the_whole(state):
    parts = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), BATCH)
    step_of_part = functools.partial(train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, axis_name="data")
    after, sums = jax.jit(jax.vmap(step_of_part, in_axes=(None, 0), axis_name="data"))(state, parts)
    expected, expected_sums = step_with(state)
    for part in range(2):
        close(jax.tree.map(lambda x, part=part: x[part], after.params), expected.params, atol=1e-6)
        close(jax.tree.map(lambda x, part=part: x[part], sums), expected_sums, rtol=1e-5)
    eval_part = functools.partial(eval_step, model=MODEL, axis_name="data")
    evaluated = jax.jit(jax.vmap(eval_part, in_axes=(None, 0), axis_name="data"))(state.params, parts)
    close(jax.tree.map(lambda x: x[1], evaluated), jitted(eval_step, model=MODEL)(state.params, BATCH), rtol=1e-5)


@pytest.mark.parametrize("decay", [0.4, 0.999])
def test_the_moving_average_is_that_of_the_recurrence_whose_decay_rises_to_its_value(decay):
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0, ema=True))()
    run = jitted(train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, ema_decay=decay)
    state, expected = start, jax.tree.map(lambda x: np.asarray(x, np.float64), start.params)
    for number in range(11):
        state, _ = run(state, BATCH)
        kept = min(decay, (1 + number) / (10 + number))
        expected = jax.tree.map(lambda a, x, kept=kept: kept * a + (1 - kept) * np.asarray(x), expected, state.params)
    assert (10 + 1) / (10 + 10) > 0.4  # so one decay was reached and the other was not
    close(state.ema, expected, atol=1e-6)
    assert largest_difference(state.ema, state.params) > 1e-3
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {np.dtype("float32")}
    assert state.measured is state.ema


def test_a_moving_average_changes_nothing_else(state):
    averaging = state.replace(ema=state.params)
    after, sums = jitted(train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, ema_decay=0.9)(averaging, BATCH)
    expected, expected_sums = step_with(state)
    assert expected.ema is None and expected.measured is expected.params
    close(after.params, expected.params, rtol=1e-6)
    close(sums, expected_sums, rtol=1e-6)


def test_a_moving_average_starts_at_the_parameters_in_memory_of_its_own():
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0, ema=True))()
    close(start.ema, start.params, rtol=0)
    pairs = zip(jax.tree.leaves(start.ema), jax.tree.leaves(start.params), strict=True)
    assert all(one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer() for one, other in pairs)


@pytest.mark.parametrize("architecture", CHOICES["model.architecture"])
def test_the_state_at_the_start_is_a_function_of_the_seed(architecture):
    model, _ = transformer_of(architecture)
    start = jax.jit(lambda seed: init_state(model, optax.adam(0.1), seed=seed))
    first, same, other = start(0), start(0), start(1)
    assert int(first.step) == 0
    close(first, same, rtol=0)
    assert largest_difference(first.params, other.params) > 0.1
    assert (first.key_data != other.key_data).any()
    assert jax.tree.map(jnp.shape, first.params) == jax.tree.map(lambda leaf: leaf.shape, parameters.shapes(model))


def test_on_one_batch_the_loss_falls():
    optimizer = optax.adam(0.01)
    state = jax.jit(lambda: init_state(MODEL, optimizer, seed=0))()
    run = jitted(train_step, model=MODEL, optimizer=optimizer, label_smoothing=0.1)
    losses = []
    for _ in range(41):
        state, sums = run(state, BATCH)
        losses.append(metrics.divide(sums)["loss"])
    assert losses[-1] < 0.7 * losses[0]


# A language model whose rows hold many texts.

TEXTS = [[7, 8], [9], [10, 11, 12, 13, 14], [15, 7], [9, 9, 9], [16, 17, 18], [5]]


def rows_of(*rows):
    """The texts of each row one after another, and their numbers."""
    ids_BT, segment_BT = runs.filled(rows, 11)
    return {"target": ids_BT, "target_segment": segment_BT, "row": np.arange(len(rows), dtype=np.int32)}


def test_a_packed_batch_has_the_loss_and_the_gradients_of_its_texts_in_rows_of_their_own():
    model, params = transformer_of("decoder_lm", position="learned")
    packed, alone = rows_of(TEXTS[:3], TEXTS[3:6], TEXTS[6:]), rows_of(*([text] for text in TEXTS))
    del alone["target_segment"]
    run = jitted(gradient_sums, model=model, label_smoothing=0.1)
    (gradients, sums), (expected, expected_sums) = run(params, packed), run(params, alone)
    merged, sums_of_merged = run(params, {**packed, "target_segment": (packed["target"] != 0).astype(np.int32)})
    assert largest_difference(merged, expected) > 0.1
    assert abs(metrics.divide(sums_of_merged)["loss"] - metrics.divide(expected_sums)["loss"]) > 1e-3
    assert float(sums["loss"][1]) == sum(len(text) + 1 for text in TEXTS)
    close(sums, expected_sums, rtol=1e-5)
    close(gradients, expected, atol=2e-5)


# A translator whose rows hold many pairs.

PAIRS = [(source, target) for source, target in zip(TEXTS, [TEXTS[-1], *TEXTS[:-1]], strict=True)]


def pairs_in(*rows):
    """The pairs of each row one after another on both sides, and their numbers."""
    batch = {"row": np.arange(len(rows), dtype=np.int32)}
    for side, name in enumerate(("source", "target")):
        batch[name], batch[f"{name}_segment"] = runs.filled([[pair[side] for pair in row] for row in rows], 13)
    return batch


def alone(*pairs):
    batch = pairs_in(*([pair] for pair in pairs))
    return {name: batch[name] for name in ("source", "target", "row")}


PACKED_PAIRS = pairs_in(PAIRS[:3], PAIRS[3:5], PAIRS[5:6], PAIRS[6:])


def test_a_batch_of_packed_pairs_has_the_loss_and_the_gradients_of_the_pairs_in_rows_of_their_own():
    model, params = transformer_of("encoder_decoder", position="learned")
    run = jitted(gradient_sums, model=model, label_smoothing=0.1)
    (gradients, sums), (expected, expected_sums) = run(params, PACKED_PAIRS), run(params, alone(*PAIRS))
    ones = {f"{name}_segment": (PACKED_PAIRS[name] != 0).astype(np.int32) for name in ("source", "target")}
    merged, sums_of_merged = run(params, PACKED_PAIRS | ones)
    assert largest_difference(merged, expected) > 0.1
    assert abs(metrics.divide(sums_of_merged)["loss"] - metrics.divide(expected_sums)["loss"]) > 1e-3
    assert float(sums["loss"][1]) == sum(len(target) + 1 for _, target in PAIRS)
    close(sums, expected_sums, rtol=1e-5)
    close(gradients, expected, atol=3e-5)


def test_each_packed_pair_has_the_loss_that_it_has_alone():
    model, params = transformer_of("encoder_decoder", position="learned")
    packed = pairs_in(PAIRS[:3])
    run = jitted(eval_step, model=model)
    before = 0.0
    for number, pair in enumerate(PAIRS[:3], 1):
        up_to = {
            name: np.where(packed[f"{name[:6]}_segment"] <= number, packed[name], 0) for name in packed if name != "row"
        }
        total = float(run(params, {**up_to, "row": packed["row"]})["loss"][0])
        assert total - before == pytest.approx(float(run(params, alone(pair))["loss"][0]), rel=1e-4)
        before = total


def test_microbatches_of_packed_pairs_give_the_gradients_of_the_whole_batch():
    model, params = transformer_of("encoder_decoder", position="learned")
    options = dict(model=model, label_smoothing=0.1)
    whole, sums = jitted(gradient_sums, **options)(params, PACKED_PAIRS)
    parts, sums_of_parts = jitted(gradient_sums, microbatches=2, **options)(params, PACKED_PAIRS)
    close(sums_of_parts, sums, rtol=1e-5)
    close(parts, whole, atol=3e-5)


# A classifier: one label a text.

CLASSIFIED = batch_for("encoder_classifier")


def log_probabilities_of_classes():
    model, params = transformer_of("encoder_classifier")
    logits = np.asarray(model.apply({"params": params}, CLASSIFIED["source"]), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_a_classifier_is_measured_by_its_labels_and_a_row_without_one_weighs_nothing():
    model, params = transformer_of("encoder_classifier")
    log_p, label = log_probabilities_of_classes(), CLASSIFIED["label"]
    rows = np.flatnonzero(label >= 0)
    assert len(rows) < ROWS
    loss = -sum(log_p[b, label[b]] for b in rows)
    hits = sum(log_p[b].argmax() == label[b] for b in rows)
    assert 0 < hits < len(rows)
    sums = jitted(eval_step, model=model)(params, CLASSIFIED)
    np.testing.assert_allclose(sums["loss"], (loss, len(rows)), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"], (hits, len(rows)), rtol=1e-6)


def test_smoothing_the_labels_of_a_classifier_spreads_them_over_the_classes():
    model, params = transformer_of("encoder_classifier")
    log_p, label = log_probabilities_of_classes(), CLASSIFIED["label"]
    rows = np.flatnonzero(label >= 0)
    expected = -sum(0.7 * log_p[b, label[b]] + 0.3 * log_p[b].mean() for b in rows)
    smoothed, sums = jitted(loss_sums, model=model, label_smoothing=0.3)(params, CLASSIFIED)
    assert abs(expected - float(sums["loss"][0])) > 1e-3
    np.testing.assert_allclose(smoothed, expected, rtol=1e-5)


def test_the_table_of_mistakes_counts_each_text_once_in_the_row_of_its_class_and_the_column_it_was_taken_for():
    model, params = transformer_of("encoder_classifier")
    log_p, label = log_probabilities_of_classes(), CLASSIFIED["label"]
    expected = np.zeros((CLASSES, CLASSES))
    for b in np.flatnonzero(label >= 0):
        expected[label[b], log_p[b].argmax()] += 1
    assert np.trace(expected) < expected.sum() and (expected != expected.T).any()
    np.testing.assert_array_equal(jitted(confusion_step, model=model)(params, CLASSIFIED), expected)
    parts = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), CLASSIFIED)
    of_part = functools.partial(confusion_step, model=model, axis_name="data")
    counted = jax.jit(jax.vmap(of_part, in_axes=(None, 0), axis_name="data"))(params, parts)
    np.testing.assert_array_equal(counted, [expected, expected])
