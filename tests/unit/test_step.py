"""One step as a pure function: a mean over labels, independent of microbatches and packing."""

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
    """A cheap translator: the last target token plus the mean source token, dropout, a matrix."""

    rate: float
    config: ModelConfig = ModelConfig(architecture="encoder_decoder")

    def setup(self):
        self.target, self.source, self.drop = nn.Embed(V, 13), nn.Embed(V, 13), Dropout(self.rate)
        self.matrix = self.param("matrix", nn.initializers.xavier_uniform(), (V, 13))

    def __call__(self, source_BS, target_BT, **mode):
        return project(
            self.features(source_BS, target_BT, **mode), self.output_weights(), self.config
        )

    def features(self, source_BS, target_BT, **mode):
        return self.drop(self.target(target_BT) + self.source(source_BS).mean(1)[:, None], **mode)

    def output_weights(self):
        return {"matrix": self.matrix}


MODEL, NO_DROPOUT = Bigram(0.3), Bigram(0.0)
ROWS, S, T = 8, 7, 5
SIZES = dict(
    d_model=14,
    num_heads=3,
    d_head=5,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=19,
)
TRANSFORMER = ModelConfig(vocab_size=V, num_classes=CLASSES, **SIZES)


def make_batch(rows=ROWS):
    """Returns rows with 2 to 5 target tokens, and an empty last row.

    Means over rows and means over tokens differ.
    """
    rng = np.random.default_rng(0)
    batch = {"source": np.zeros((rows, S), np.int32), "target": np.zeros((rows, T), np.int32)}
    for row in range(rows - 1):
        for side, longest in (("source", S), ("target", T)):
            ids = [*rng.integers(4, V, rng.integers(1, longest)), 2]
            batch[side][row, : len(ids)] = ids
    return {**batch, "row": np.arange(rows, dtype=np.int32)}


def batch_for(architecture, rows=ROWS):
    """Returns `make_batch` as input of the architecture.

    For a classifier, every row but the last has a label. For a language model, source and target
    are packed in one row.
    """
    batch = make_batch(rows)
    if architecture == "encoder_classifier":
        label = np.append(np.arange(rows - 1, dtype=np.int32) % CLASSES, np.int32(-1))
        return {"source": batch["source"], "label": label, "row": batch["row"]}
    if architecture == "decoder_lm":
        pairs = zip(batch["source"], batch["target"], strict=True)
        target, segment = runs.filled(
            [[ids[ids > 3] for ids in pair if ids.any()] for pair in pairs], S + T
        )
        return {"target": target, "target_segment": segment, "row": batch["row"]}
    return batch


@functools.cache
def transformer_of(architecture, **changes):
    """Returns a small model, and random parameters, so that no bias is 0."""
    model = build_model(dataclasses.replace(TRANSFORMER, architecture=architecture, **changes))
    rng = np.random.default_rng(5)
    sample = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return model, jax.tree.map(sample, parameters.shapes(model))


BATCH = make_batch()
SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def state():
    """The initial state with noise on the parameters, so that no bias is 0."""
    rng = np.random.default_rng(1)
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0))()
    moved = jax.tree.map(
        lambda p: p + jnp.asarray(0.1 * rng.normal(size=p.shape), jnp.float32), start.params
    )
    return start.replace(params=moved)


@functools.cache
def jitted(function, **options):
    return jax.jit(functools.partial(function, **options))


def step_with(state, batch=BATCH, *, model=MODEL, smoothing=0.1, microbatches=1):
    run = jitted(
        train_step, model=model, optimizer=SGD, label_smoothing=smoothing, microbatches=microbatches
    )
    return run(state, batch)


def moved_by(state, batch=BATCH, **options):
    """Returns the mean gradient: the update of gradient descent with rate 1."""
    after, sums = step_with(state, batch, **options)
    return jax.tree.map(jnp.subtract, state.params, after.params), sums


def close(first, second, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), first, second)


def largest_difference(first, second):
    return max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first, second))
    )


def test_the_decoder_input_is_the_start_symbol_and_then_the_labels_shifted_right():
    assert shift_right(jnp.array([[7, 8, 2, 0], [9, 2, 0, 0]])).tolist() == [
        [1, 7, 8, 2],
        [1, 9, 2, 0],
    ]


@pytest.mark.parametrize(
    ("labels", "segment", "read"),
    [
        ([7, 8, 2, 9, 2], [1, 1, 1, 2, 2], [1, 7, 8, 1, 9]),
        ([7, 2, 8, 2, 2], [1, 1, 2, 2, 3], [1, 7, 1, 8, 1]),
        ([7, 8, 9, 6, 2], [1, 1, 1, 1, 1], [1, 7, 8, 9, 6]),
    ],
)
def test_in_a_packed_row_the_input_of_every_text_starts_with_the_start_symbol(
    labels, segment, read
):
    assert shift_right(jnp.array([labels]), jnp.array([segment])).tolist() == [read]


def test_padding_after_packed_texts_has_none_of_their_tokens_as_input():
    labels, segment = jnp.array([[7, 2, 8, 2, 0, 0]]), jnp.array([[1, 1, 2, 2, 0, 0]])
    read = shift_right(labels, segment)[0]
    assert read[:4].tolist() == [1, 7, 1, 8]
    assert set(read[4:].tolist()) <= {PAD, BOS}


def log_probabilities(state):
    """Returns the log-softmax of the logits without dropout, in float64: (rows, T, V)."""
    logits = NO_DROPOUT.apply(
        {"params": state.params}, BATCH["source"], shift_right(BATCH["target"])
    )
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


def test_smoothing_is_part_of_the_objective_but_not_of_the_reported_loss(state):
    plain, smoothed = (
        jitted(loss_sums, model=MODEL, label_smoothing=smoothing)(state.params, BATCH)
        for smoothing in (0.0, 0.3)
    )
    log_p, labels = log_probabilities(state), BATCH["target"]
    weights = labels != 0
    own = np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    expected = -((0.7 * own + 0.3 * log_p.mean(axis=-1)) * weights).sum()
    assert abs(float(smoothed[0]) - float(plain[0])) > 0.1
    np.testing.assert_allclose(smoothed[0], expected, rtol=1e-5)
    np.testing.assert_allclose(plain[0], plain[1]["loss"][0], rtol=1e-6)
    close(smoothed[1], plain[1], rtol=1e-6)


def test_the_gradient_is_that_of_the_mean_over_tokens_not_over_rows(state):
    tokens_B = (BATCH["target"] != 0).sum(axis=1)
    assert len(set(tokens_B[:-1])) > 1

    @jax.jit
    def gradient_of_row(params, b):
        row = jax.tree.map(lambda x: jnp.asarray(x)[b][None], BATCH)
        return jax.grad(
            lambda params: loss_sums(params, row, model=NO_DROPOUT, label_smoothing=0.1)[0]
        )(params)

    rows = [gradient_of_row(state.params, b) for b in range(ROWS - 1)]
    over_tokens = jax.tree.map(lambda *g: sum(g) / tokens_B.sum(), *rows)
    over_rows = jax.tree.map(
        lambda *g: sum(x / n for x, n in zip(g, tokens_B, strict=False)) / (ROWS - 1), *rows
    )
    assert largest_difference(over_tokens, over_rows) > 1e-3
    close(moved_by(state, model=NO_DROPOUT)[0], over_tokens, atol=1e-6)


def test_the_reported_norm_is_that_of_the_mean_gradient(state):
    gradients, sums = moved_by(state)
    norm = math.sqrt(
        sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(gradients))
    )
    assert metrics.divide(sums)["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("encoder_decoder", marks=pytest.mark.slow),
        pytest.param("encoder_classifier", marks=pytest.mark.slow),
        "decoder_lm",
    ],
)
def test_microbatches_of_a_transformer_have_the_loss_and_gradients_of_the_batch_with_dropout(
    architecture,
):
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
            # A bias of the keys adds the same number to all scores of a query, which the softmax
            # cancels. The true gradient is 0 and the computed one is rounding noise, so that there
            # is no largest gradient to compare with.
            assert max(largest, difference) < 1e-5
        else:
            assert difference <= 1e-6 * largest, name


# R-Drop: 2 passes with different dropout.


@pytest.mark.parametrize(
    "architecture",
    [
        "encoder_decoder",
        pytest.param("encoder_classifier", marks=pytest.mark.slow),
        pytest.param("decoder_lm", marks=pytest.mark.slow),
    ],
)
def test_with_r_drop_the_objective_is_the_mean_loss_of_2_passes_plus_their_disagreement(
    state, architecture
):
    model, params = (
        (MODEL, state.params) if architecture == "encoder_decoder" else transformer_of(architecture)
    )
    batch, key, r_drop = batch_for(architecture), jax.random.key(3), 4.0
    again = {**batch, "row": ~batch["row"]}
    options = dict(model=model, label_smoothing=0.1)
    passes = [
        jitted(loss_sums, **options)(params, rows, dropout_key=key) for rows in (batch, again)
    ]

    @jax.jit
    def log_p(rows):
        mode = dict(deterministic=False, rngs={"dropout": key}, row_B=rows["row"], model=model)
        if architecture == "encoder_classifier":
            return jax.nn.log_softmax(predictions.of_classes(params, rows, **mode).x)
        weights = model.apply({"params": params}, method="output_weights")
        return jax.nn.log_softmax(
            project(predictions.of_tokens(params, rows, **mode).x, weights, model.config)
        )

    weights = (
        batch["label"][:, None] >= 0
        if architecture == "encoder_classifier"
        else batch["target"] > 0
    )
    p, q = (np.asarray(log_p(rows), np.float64) for rows in (batch, again))
    divergence = (((np.exp(p) - np.exp(q)) * (p - q)).sum(axis=-1) * weights).sum()
    objective, sums = jitted(loss_sums, r_drop_weight=r_drop, **options)(
        params, batch, dropout_key=key
    )
    mean = (passes[0][0] + passes[1][0]) / 2
    assert divergence > 0.1 and abs(passes[0][0] - passes[1][0]) > 1e-3
    np.testing.assert_allclose(objective, mean + r_drop / 4 * divergence, rtol=1e-5)
    close(sums, jax.tree.map(lambda a, b: (a + b) / 2, passes[0][1], passes[1][1]), rtol=1e-5)


@pytest.mark.slow
def test_with_r_drop_microbatches_and_parts_of_the_logits_have_the_gradients_of_the_batch(
    state, monkeypatch
):
    options, params, key = (
        dict(model=MODEL, r_drop_weight=4.0),
        state.params,
        {"dropout_key": jax.random.key(3)},
    )
    whole, sums = jitted(gradient_sums, **options)(params, BATCH, **key)
    parts, sums_of_parts = jitted(gradient_sums, microbatches=4, **options)(params, BATCH, **key)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 4 * T * V)  # the 2 passes of 2 rows
    few, sums_of_few = jax.jit(functools.partial(gradient_sums, **options))(params, BATCH, **key)
    plain, _ = jitted(gradient_sums, model=MODEL)(params, BATCH, **key)
    assert largest_difference(whole, plain) > 0.01
    for gradients, part_sums in ((parts, sums_of_parts), (few, sums_of_few)):
        close(part_sums, sums, rtol=1e-5)
        close(gradients, whole, atol=3e-5)


def test_r_drop_has_no_effect_without_dropout(state):
    plain, weighted = (
        jitted(loss_sums, model=MODEL, r_drop_weight=r)(state.params, BATCH) for r in (0.0, 4.0)
    )
    close(weighted, plain, rtol=0)


def test_a_microbatch_has_every_fourth_row():
    seen = []

    class Recorder:
        config = MODEL.config

        def apply(self, variables, *inputs, method, **options):
            if method == "output_weights":
                return {"matrix": jnp.zeros((V, 13))}
            jax.debug.callback(lambda row_B: seen.append(row_B.tolist()), options["row_B"])
            return jnp.zeros((*inputs[1].shape, 13)) + variables["params"]

    of_recorder = functools.partial(gradient_sums, microbatches=4, model=Recorder())
    jax.block_until_ready(jax.jit(of_recorder)(jnp.float32(0), BATCH))
    jax.effects_barrier()
    assert sorted(seen) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_step_increments_the_step_number_and_keeps_the_key(state):
    after, _ = step_with(state)
    assert (int(state.step), int(after.step), int(step_with(after)[0].step)) == (0, 1, 2)
    np.testing.assert_array_equal(after.key_data, state.key_data)


def test_dropout_is_a_function_of_the_step_and_the_seed(state):
    first, _ = moved_by(state)
    close(moved_by(state)[0], first, rtol=0)
    later, _ = moved_by(state.replace(step=jnp.int32(1)))
    other, _ = moved_by(state.replace(key_data=state.key_data + 1))
    assert largest_difference(first, later) > 1e-3 and largest_difference(first, other) > 1e-3
    # the step number has no other effect
    close(
        *(moved_by(state.replace(step=jnp.int32(s)), model=NO_DROPOUT)[0] for s in (0, 1)), rtol=0
    )


def test_an_empty_row_has_no_effect(state):
    assert not BATCH["target"][-1].any()
    without = {name: array[:-1] for name, array in BATCH.items()}
    gradients, sums = moved_by(state)
    fewer, sums_of_fewer = moved_by(state, without)
    close(gradients, fewer, atol=1e-6)
    close(sums, sums_of_fewer, rtol=1e-5)


def test_the_order_of_rows_has_no_effect_if_each_keeps_its_number(state):
    order = np.random.default_rng(0).permutation(ROWS)
    shuffled = {name: array[order] for name, array in BATCH.items()}
    renumbered = {**shuffled, "row": BATCH["row"]}
    gradients, _ = moved_by(state)
    assert largest_difference(gradients, moved_by(state, renumbered)[0]) > 1e-3
    close(moved_by(state, shuffled)[0], gradients, atol=1e-6)


def test_a_batch_of_empty_rows_has_zero_gradients(state):
    empty = {
        "source": np.zeros((ROWS, S), np.int32),
        "target": np.zeros((ROWS, T), np.int32),
        "row": BATCH["row"],
    }
    gradients, sums = moved_by(state, empty)
    assert largest_difference(gradients, jax.tree.map(jnp.zeros_like, gradients)) == 0
    assert float(sums["loss"][1]) == 0


def test_evaluation_has_no_dropout(state):
    close(
        jitted(eval_step, model=MODEL)(state.params, BATCH),
        jitted(eval_step, model=NO_DROPOUT)(state.params, BATCH),
    )


def test_devices_with_a_part_of_the_batch_each_compute_the_step_of_the_batch(state):
    parts = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), BATCH)
    step_of_part = functools.partial(
        train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, axis_name="data"
    )
    after, sums = jax.jit(jax.vmap(step_of_part, in_axes=(None, 0), axis_name="data"))(state, parts)
    expected, expected_sums = step_with(state)
    for part in range(2):
        close(jax.tree.map(lambda x, part=part: x[part], after.params), expected.params, atol=1e-6)
        close(jax.tree.map(lambda x, part=part: x[part], sums), expected_sums, rtol=1e-5)
    eval_part = functools.partial(eval_step, model=MODEL, axis_name="data")
    evaluated = jax.jit(jax.vmap(eval_part, in_axes=(None, 0), axis_name="data"))(
        state.params, parts
    )
    close(
        jax.tree.map(lambda x: x[1], evaluated),
        jitted(eval_step, model=MODEL)(state.params, BATCH),
        rtol=1e-5,
    )


@pytest.mark.parametrize("decay", [0.4, 0.999])
def test_the_moving_average_follows_the_recurrence_with_a_rising_decay(decay):
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0, ema=True))()
    run = jitted(train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, ema_decay=decay)
    state, expected = start, jax.tree.map(lambda x: np.asarray(x, np.float64), start.params)
    for number in range(11):
        state, _ = run(state, BATCH)
        kept = min(decay, (1 + number) / (10 + number))
        expected = jax.tree.map(
            lambda a, x, kept=kept: kept * a + (1 - kept) * np.asarray(x), expected, state.params
        )
    assert (10 + 1) / (10 + 10) > 0.4  # so 0.4 is reached and 0.999 is not
    close(state.ema, expected, atol=1e-6)
    assert largest_difference(state.ema, state.params) > 1e-3
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {np.dtype("float32")}
    assert state.measured is state.ema


def test_a_moving_average_has_no_effect_on_the_parameters(state):
    averaging = state.replace(ema=state.params)
    after, sums = jitted(
        train_step, model=MODEL, optimizer=SGD, label_smoothing=0.1, ema_decay=0.9
    )(averaging, BATCH)
    expected, expected_sums = step_with(state)
    assert expected.ema is None and expected.measured is expected.params
    close(after.params, expected.params, rtol=1e-6)
    close(sums, expected_sums, rtol=1e-6)


def test_a_moving_average_starts_as_a_copy_of_the_parameters():
    start = jax.jit(lambda: init_state(MODEL, SGD, seed=0, ema=True))()
    close(start.ema, start.params, rtol=0)
    pairs = zip(jax.tree.leaves(start.ema), jax.tree.leaves(start.params), strict=True)
    assert all(one.unsafe_buffer_pointer() != other.unsafe_buffer_pointer() for one, other in pairs)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=[] if each == "decoder_lm" else pytest.mark.slow)
        for each in CHOICES["model.architecture"]
    ],
)
def test_the_initial_state_is_a_function_of_the_seed(architecture):
    model, _ = transformer_of(architecture)
    start = jax.jit(lambda seed: init_state(model, optax.adam(0.1), seed=seed))
    first, same, other = start(0), start(0), start(1)
    assert int(first.step) == 0
    close(first, same, rtol=0)
    assert largest_difference(first.params, other.params) > 0.1
    assert (first.key_data != other.key_data).any()
    assert jax.tree.map(jnp.shape, first.params) == jax.tree.map(
        lambda leaf: leaf.shape, parameters.shapes(model)
    )


def test_the_loss_falls_on_a_repeated_batch():
    optimizer = optax.adam(0.01)
    state = jax.jit(lambda: init_state(MODEL, optimizer, seed=0))()
    run = jitted(train_step, model=MODEL, optimizer=optimizer, label_smoothing=0.1)
    losses = []
    for _ in range(41):
        state, sums = run(state, BATCH)
        losses.append(metrics.divide(sums)["loss"])
    assert losses[-1] < 0.7 * losses[0]


# A language model on packed rows.

TEXTS = [[7, 8], [9], [10, 11, 12, 13, 14], [15, 7], [9, 9, 9], [16, 17, 18], [5]]


def rows_of(*rows):
    """Returns a batch with the texts of each row packed."""
    ids_BT, segment_BT = runs.filled(rows, 11)
    return {
        "target": ids_BT,
        "target_segment": segment_BT,
        "row": np.arange(len(rows), dtype=np.int32),
    }


def test_packed_texts_have_the_loss_and_gradients_of_unpacked_texts():
    model, params = transformer_of("decoder_lm", position="learned")
    packed, alone = rows_of(TEXTS[:3], TEXTS[3:6], TEXTS[6:]), rows_of(*([text] for text in TEXTS))
    del alone["target_segment"]
    run = jitted(gradient_sums, model=model, label_smoothing=0.1)
    (gradients, sums), (expected, expected_sums) = run(params, packed), run(params, alone)
    merged, sums_of_merged = run(
        params, {**packed, "target_segment": (packed["target"] != 0).astype(np.int32)}
    )
    assert largest_difference(merged, expected) > 0.1
    assert (
        abs(metrics.divide(sums_of_merged)["loss"] - metrics.divide(expected_sums)["loss"]) > 1e-3
    )
    assert float(sums["loss"][1]) == sum(len(text) + 1 for text in TEXTS)
    close(sums, expected_sums, rtol=1e-5)
    close(gradients, expected, atol=2e-5)


# A translator on packed rows.

PAIRS = [(source, target) for source, target in zip(TEXTS, [TEXTS[-1], *TEXTS[:-1]], strict=True)]


def pairs_in(*rows):
    """Returns a batch with the pairs of each row packed on both sides."""
    batch = {"row": np.arange(len(rows), dtype=np.int32)}
    for side, name in enumerate(("source", "target")):
        batch[name], batch[f"{name}_segment"] = runs.filled(
            [[pair[side] for pair in row] for row in rows], 13
        )
    return batch


def alone(*pairs):
    batch = pairs_in(*([pair] for pair in pairs))
    return {name: batch[name] for name in ("source", "target", "row")}


PACKED_PAIRS = pairs_in(PAIRS[:3], PAIRS[3:5], PAIRS[5:6], PAIRS[6:])


def test_packed_pairs_have_the_loss_and_gradients_of_unpacked_pairs():
    model, params = transformer_of("encoder_decoder", position="learned")
    run = jitted(gradient_sums, model=model, label_smoothing=0.1)
    (gradients, sums), (expected, expected_sums) = (
        run(params, PACKED_PAIRS),
        run(params, alone(*PAIRS)),
    )
    ones = {
        f"{name}_segment": (PACKED_PAIRS[name] != 0).astype(np.int32)
        for name in ("source", "target")
    }
    merged, sums_of_merged = run(params, PACKED_PAIRS | ones)
    assert largest_difference(merged, expected) > 0.1
    assert (
        abs(metrics.divide(sums_of_merged)["loss"] - metrics.divide(expected_sums)["loss"]) > 1e-3
    )
    assert float(sums["loss"][1]) == sum(len(target) + 1 for _, target in PAIRS)
    close(sums, expected_sums, rtol=1e-5)
    close(gradients, expected, atol=3e-5)


def test_each_packed_pair_has_its_loss_in_an_unpacked_row():
    model, params = transformer_of("encoder_decoder", position="learned")
    packed = pairs_in(PAIRS[:3])
    run = jitted(eval_step, model=model)
    before = 0.0
    for number, pair in enumerate(PAIRS[:3], 1):
        up_to = {
            name: np.where(packed[f"{name[:6]}_segment"] <= number, packed[name], 0)
            for name in packed
            if name != "row"
        }
        total = float(run(params, {**up_to, "row": packed["row"]})["loss"][0])
        assert total - before == pytest.approx(float(run(params, alone(pair))["loss"][0]), rel=1e-4)
        before = total


@pytest.mark.slow  # the plain suite has microbatches of packed texts, above
def test_microbatches_of_packed_pairs_have_the_gradients_of_the_batch():
    model, params = transformer_of("encoder_decoder", position="learned")
    options = dict(model=model, label_smoothing=0.1)
    whole, sums = jitted(gradient_sums, **options)(params, PACKED_PAIRS)
    parts, sums_of_parts = jitted(gradient_sums, microbatches=2, **options)(params, PACKED_PAIRS)
    close(sums_of_parts, sums, rtol=1e-5)
    close(parts, whole, atol=3e-5)


# A classifier.

CLASSIFIED = batch_for("encoder_classifier")


@functools.cache
def log_probabilities_of_classes():
    model, params = transformer_of("encoder_classifier")
    apply = jitted(model.apply)
    logits = np.asarray(apply({"params": params}, CLASSIFIED["source"]), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_a_classifier_is_evaluated_on_its_labels_and_a_row_without_a_label_has_no_weight():
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


def test_label_smoothing_of_a_classifier_is_over_the_classes():
    model, params = transformer_of("encoder_classifier")
    log_p, label = log_probabilities_of_classes(), CLASSIFIED["label"]
    rows = np.flatnonzero(label >= 0)
    expected = -sum(0.7 * log_p[b, label[b]] + 0.3 * log_p[b].mean() for b in rows)
    smoothed, sums = jitted(loss_sums, model=model, label_smoothing=0.3)(params, CLASSIFIED)
    assert abs(expected - float(sums["loss"][0])) > 1e-3
    np.testing.assert_allclose(smoothed, expected, rtol=1e-5)


def test_the_confusion_matrix_counts_each_text_by_its_label_and_its_predicted_class():
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
