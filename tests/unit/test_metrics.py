"""Sums of metrics are added over batches and divided once."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.training import metrics


def test_a_token_is_correct_if_its_logit_is_the_highest_and_counts_with_its_weight():
    labels = np.array([[0, 2, 1], [2, 2, 0]])
    logits = np.eye(3, dtype=np.float32)[np.array([[0, 2, 2], [2, 1, 0]])]
    weights = np.array([[1, 3, 5], [7, 11, 0]], np.float32)
    hits, weight = metrics.correct_tokens(logits, labels, weights)
    assert (float(hits), float(weight)) == (1 + 3 + 7, 1 + 3 + 5 + 7 + 11)


def test_sums_and_weights_are_added_by_name_and_the_first_may_be_none():
    first = {"loss": (jnp.float32(2), jnp.float32(3)), "accuracy": (jnp.float32(5), jnp.float32(7))}
    second = {
        "loss": (jnp.float32(11), jnp.float32(13)),
        "accuracy": (jnp.float32(17), jnp.float32(19)),
    }
    assert metrics.add(None, first) is first
    added = metrics.add(metrics.add(None, first), second)
    assert {name: tuple(map(float, pair)) for name, pair in added.items()} == {
        "loss": (13, 16),
        "accuracy": (22, 26),
    }


def test_sums_of_different_weight_are_added_and_divided_once_not_averaged():
    parts = [
        {"loss": (jnp.float32(10), jnp.float32(1))},
        {"loss": (jnp.float32(2), jnp.float32(5))},
    ]
    together = metrics.divide(metrics.add(*parts))["loss"]
    mean_of_means = sum(metrics.divide(part)["loss"] for part in parts) / 2
    assert together == 2 != mean_of_means
    assert type(together) is float


def test_a_sum_with_weight_0_is_nan():
    assert math.isnan(metrics.divide({"loss": (jnp.float32(0), jnp.float32(0))})["loss"])


def test_perplexity_is_the_exponential_of_the_loss():
    assert metrics.with_perplexity({"loss": math.log(7), "accuracy": 0.5}) == {
        "loss": math.log(7),
        "accuracy": 0.5,
        "perplexity": pytest.approx(7),
    }


@pytest.mark.parametrize(
    ("loss", "expected"), [(1e6, math.inf), (math.inf, math.inf), (math.nan, math.nan)]
)
def test_the_perplexity_of_a_very_large_loss_is_infinite_and_that_of_nan_is_nan(loss, expected):
    np.testing.assert_equal(metrics.with_perplexity({"loss": loss})["perplexity"], expected)


@pytest.mark.parametrize("metric", ["loss", "accuracy", "bleu", "symbol_error_rate"])
def test_of_two_results_the_better_has_the_higher_score(metric):
    better, worse = (
        {"loss": 0.3, "accuracy": 0.9, "bleu": 40.0, "symbol_error_rate": 2.0},
        {"loss": 0.5, "accuracy": 0.8, "bleu": 30.0, "symbol_error_rate": 5.0},
    )
    assert metrics.score(better, metric) > metrics.score(worse, metric)
    assert abs(metrics.score(better, metric)) == better[metric]


def test_a_score_that_is_not_finite_or_was_logged_as_null_is_the_worst():
    for value in (math.nan, math.inf, None):
        assert metrics.score({"loss": value}, "loss") == -math.inf
    assert metrics.score({"loss": 3.0}, "loss") == -3.0
    assert metrics.score({"bleu": math.nan}, "bleu") == -math.inf
