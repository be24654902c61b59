"""Cross-entropy with label smoothing against section 5.4 in NumPy; R-Drop; the loss in parts."""

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.training import losses
from flaxformer_lite.training.loss_in_parts import summed
from flaxformer_lite.training.losses import cross_entropy, parts_of
from flaxformer_lite.training.r_drop import disagreement

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, T, V = 3, 5, 7
CROSS_ENTROPY = jax.jit(cross_entropy)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, T, V)).astype(np.float32) * 3
LABELS = RNG.integers(0, V, (B, T))
WEIGHTS = RNG.random((B, T)).astype(np.float32) * (RNG.random((B, T)) < 0.7)
SMOOTHINGS = (0.0, 0.1, 0.3)


def smoothed_target(smoothing):
    """Returns 1 - e on the label plus e / V on every token: (B, T, V)."""
    return (1 - smoothing) * np.eye(V)[LABELS] + smoothing / V


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_loss_is_the_weighted_sum_of_the_cross_entropy_with_the_smoothed_target(smoothing):
    total, weight = CROSS_ENTROPY(LOGITS, LABELS, WEIGHTS, label_smoothing=smoothing)
    per_token = -(smoothed_target(smoothing) * log_softmax(LOGITS)).sum(axis=-1)
    np.testing.assert_allclose(total, (WEIGHTS * per_token).sum(), rtol=1e-5)
    np.testing.assert_allclose(weight, WEIGHTS.sum(), rtol=1e-6)
    assert total.shape == weight.shape == () and total.dtype == weight.dtype == jnp.float32


def test_smoothing_changes_the_loss():
    losses = [
        float(CROSS_ENTROPY(LOGITS, LABELS, WEIGHTS, label_smoothing=e)[0]) for e in SMOOTHINGS
    ]
    assert losses[0] < losses[1] < losses[2]


def test_the_disagreement_is_the_weighted_sum_of_the_divergence_in_both_directions():
    other = np.random.default_rng(1).normal(size=LOGITS.shape).astype(np.float32)
    log_p, log_q = log_softmax(LOGITS), log_softmax(other)
    both_ways = sum((np.exp(a) * (a - b)).sum(axis=-1) for a, b in ((log_p, log_q), (log_q, log_p)))
    expected = (WEIGHTS * both_ways).sum()
    assert expected > 1
    weights = np.concatenate([WEIGHTS, WEIGHTS], axis=1)
    of_pair = jax.jit(lambda *pair: disagreement(jnp.concatenate(pair, axis=1), weights))
    for pair in ((LOGITS, other), (other, LOGITS), (LOGITS + 3, other)):
        np.testing.assert_allclose(of_pair(*pair), expected, rtol=1e-5)
    assert abs(of_pair(LOGITS, LOGITS + 3)) < 1e-4  # the same probabilities
    assert of_pair(LOGITS, LOGITS) == 0


def test_the_disagreement_has_the_gradient_of_its_definition():
    def by_definition(logits, weights):
        (p, q), (weights, _) = (
            jnp.split(x, 2, axis=1) for x in (jax.nn.log_softmax(logits), weights)
        )
        return (((jnp.exp(p) - jnp.exp(q)) * (p - q)).sum(axis=-1) * weights).sum()

    other = np.random.default_rng(1).normal(size=LOGITS.shape).astype(np.float32)
    inputs = np.concatenate([LOGITS, other], axis=1), np.concatenate([WEIGHTS, WEIGHTS], axis=1)
    gradient, expected = (
        jax.jit(jax.grad(function))(*inputs) for function in (disagreement, by_definition)
    )
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("size", [2, 31, 1009])
def test_the_loss_of_equal_logits_is_the_logarithm_of_the_vocabulary_size_with_any_smoothing(
    size, smoothing
):
    logits = np.full((1, 1, size), 5.0, np.float32)
    total, weight = CROSS_ENTROPY(
        logits, np.array([[1]]), np.ones((1, 1), np.float32), label_smoothing=smoothing
    )
    np.testing.assert_allclose(total / weight, math.log(size), rtol=1e-5)


GRADIENT = jax.jit(jax.grad(lambda x, e: cross_entropy(x, LABELS, WEIGHTS, label_smoothing=e)[0]))


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_gradient_is_the_softmax_minus_the_smoothed_target_times_the_weight(smoothing):
    gradient = GRADIENT(LOGITS, smoothing)
    expected = WEIGHTS[..., None] * (np.exp(log_softmax(LOGITS)) - smoothed_target(smoothing))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_smallest_loss_is_the_entropy_of_the_smoothed_target(smoothing):
    target = smoothed_target(smoothing)
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(target), -50).astype(np.float32)
    total, weight = CROSS_ENTROPY(
        logits, LABELS, np.ones((B, T), np.float32), label_smoothing=smoothing
    )
    entropy = -sum(p * math.log(p) for p in target[0, 0] if p > 0)
    np.testing.assert_allclose(total / weight, entropy, atol=1e-5)


def test_tokens_without_weight_do_not_count_whatever_their_logits_are():
    spoiled = np.where(WEIGHTS[..., None] == 0, np.float32(1e9), LOGITS)
    assert (spoiled != LOGITS).any()
    np.testing.assert_array_equal(
        cross_entropy(spoiled, LABELS, WEIGHTS)[0], cross_entropy(LOGITS, LABELS, WEIGHTS)[0]
    )
    assert [float(x) for x in cross_entropy(LOGITS, LABELS, np.zeros((B, T), np.float32))] == [0, 0]


def test_large_logits_and_bfloat16_are_summed_in_float32():
    total, _ = cross_entropy(LOGITS * 1e4, LABELS, WEIGHTS)
    assert np.isfinite(total)
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    total, _ = cross_entropy(half, LABELS, WEIGHTS)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(
        total, cross_entropy(half.astype(jnp.float32), LABELS, WEIGHTS)[0]
    )


MATRIX = RNG.normal(size=(V, 11)).astype(np.float32)
FEATURES = RNG.normal(size=(12, T, 11)).astype(np.float32)
OF_FEATURES = RNG.integers(0, V, (12, T)), RNG.random((12, T)).astype(np.float32)


SPLITS = [(1, 1), (3, 1), (3, 4)]
SPLITS += [
    pytest.param(*split, marks=pytest.mark.slow)
    for split in [(2, 1), (12, 1), (1, 4), (2, 3), (2, 6)]
]


def loss_of_features(x_BTD, matrix_VD, labels_BT, weights_BT):
    logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, matrix_VD)
    objective, weight = cross_entropy(logits_BTV, labels_BT, weights_BT, label_smoothing=0.1)
    return objective, {"weight": weight, "largest": logits_BTV.max(axis=(1, 2)).sum()}


@functools.cache
def at_once():
    """Returns the value and the gradient of 3 times the loss of the whole batch."""

    def loss(x_BTD, matrix_VD):
        objective, sums = loss_of_features(x_BTD, matrix_VD, *OF_FEATURES)
        return 3 * objective, sums

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(FEATURES, MATRIX)


@pytest.mark.parametrize(("parts", "row_shards"), SPLITS)
def test_the_loss_in_parts_has_the_value_and_the_gradient_of_the_whole_batch(parts, row_shards):
    def in_parts(x_BTD, matrix_VD):
        split = {"parts": parts, "row_shards": row_shards}
        objective, sums = summed(loss_of_features, x_BTD, matrix_VD, *OF_FEATURES, **split)
        return 3 * objective, sums  # so that the cotangent is not 1

    differentiated = jax.jit(jax.value_and_grad(in_parts, argnums=(0, 1), has_aux=True))
    found = differentiated(FEATURES, MATRIX)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, at_once()
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        jax.jit(in_parts)(FEATURES, MATRIX),
        found[0],
    )


def largest_array(jaxpr):
    """Returns the number of elements of the largest array that a jaxpr computes."""
    inner = [
        largest_array(inner)
        for equation in jaxpr.eqns
        for inner in jax.extend.core.jaxprs_in_params(equation.params)
    ]
    return max(
        [math.prod(v.aval.shape) for equation in jaxpr.eqns for v in equation.outvars] + inner
    )


def test_only_the_logits_of_one_part_exist_at_a_time():
    wide = RNG.normal(size=(1009, 11)).astype(
        np.float32
    )  # so that the logits are the largest array

    def largest(parts):
        loss = lambda x, matrix: summed(loss_of_features, x, matrix, *OF_FEATURES, parts=parts)  # noqa: E731
        return largest_array(
            jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), has_aux=True))(FEATURES, wide).jaxpr
        )

    assert (largest(1), largest(4)) == (12 * T * 1009, 3 * T * 1009)


def test_rows_are_split_into_the_fewest_equal_parts_that_are_small_enough(monkeypatch):
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 1000)
    assert [parts_of(rows, 100) for rows in (10, 11, 12, 20, 24, 1)] == [1, 11, 2, 2, 3, 1]
    assert parts_of(6, 5000) == 6  # a row cannot be split
    # with 4 devices
    assert [parts_of(rows, 100, row_shards=4) for rows in (40, 48, 4)] == [1, 2, 1]
