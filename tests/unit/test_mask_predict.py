"""Mask-predict on a table of logits, against its definition in lists."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding import mask_predict
from flaxformer_lite.decoding.mask_predict import (
    NONE,
    least_probable,
    masked_count,
    most_probable_lengths,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

T, V, MASK, END = 8, 6, 3, 2
# The logits of every position are the sum, over all input tokens, of TABLE[position, token].
TABLE = 2 * np.random.default_rng(5).normal(size=(T, V, T, V)).astype(np.float32)
TABLE[..., [0, MASK, END]] = -100  # these are never the most probable
LENGTH_LOG_PROB = -np.random.default_rng(6).exponential(size=(8, 3)).astype(np.float32)
LENGTHS = [[3, 7, 4], [5, 0, 0], [0, 0, 0], [1, 2, 3], [6, 5, 7], [7, 6, 2], [4, 6, 5], [2, 7, 1]]


def log_probabilities(ids):
    """Returns log-probabilities (T, V) for the ids of one row; padding has no influence."""
    logits = sum(TABLE[position, token] for position, token in enumerate(ids) if token)
    return np.asarray(jax.nn.log_softmax(logits))


@jax.jit
def predict(ids_BCT):
    read = jax.nn.one_hot(ids_BCT, V) * (ids_BCT != 0)[..., None]
    log_prob_BCTV = jax.nn.log_softmax(jnp.einsum("BCSU,SUTV->BCTV", read, TABLE))
    return log_prob_BCTV.argmax(axis=-1).astype(jnp.int32), log_prob_BCTV.max(axis=-1)


@functools.partial(jax.jit, static_argnames=("iterations", "positions"))
def run(length_BC, log_prob_BC, *, iterations, positions=T):
    def within(ids_BCT):
        wide = jnp.pad(ids_BCT, ((0, 0), (0, 0), (0, T - positions)))
        return jax.tree.map(lambda x: x[..., :positions], predict(wide))

    options = {"iterations": iterations, "max_length": positions, "mask": MASK, "end": END}
    return mask_predict.mask_predict(within, length_BC, log_prob_BC, **options)


def by_definition(length, length_log_prob, iterations):
    """Returns the text of one length, in lists, and its score."""
    ids, log_prob = [MASK] * length, [0.0] * length
    for step in range(iterations):
        masked = sorted(range(length), key=lambda i: log_prob[i])[
            : int(length * (iterations - step) / iterations)
        ]
        read = [MASK if i in masked else token for i, token in enumerate(ids)]
        table = log_probabilities([*read, END] + [0] * (T - length - 1))
        for i in masked:
            ids[i], log_prob[i] = int(table[i].argmax()), float(table[i].max())
    return ids, (sum(log_prob) + length_log_prob) / (length + 1)


def candidates(iterations):
    """Returns the candidates of each row by the definition, with their scores."""
    rows = [zip(*row, strict=True) for row in zip(LENGTHS, LENGTH_LOG_PROB, strict=True)]
    return [[by_definition(*length, iterations) for length in row if length[0]] for row in rows]


@pytest.mark.parametrize(
    "iterations", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 10]
)
def test_the_best_candidate_of_each_row_is_that_of_the_definition(iterations):
    ids_BT, score_B = run(jnp.array(LENGTHS), LENGTH_LOG_PROB, iterations=iterations)
    chosen = []
    for row, ids, score in zip(
        candidates(iterations), np.asarray(ids_BT), np.asarray(score_B), strict=True
    ):
        if not row:
            assert score == NONE and not ids.any()
            continue
        number, (text, best) = max(enumerate(row), key=lambda item: item[1][1])
        chosen.append(number)
        assert ids.tolist() == [*text, END] + [0] * (T - len(text) - 1)
        np.testing.assert_allclose(score, best, atol=1e-5)
    assert len(set(chosen)) > 1  # the most probable length is not always the best


def test_more_iterations_find_other_and_more_probable_texts():
    once, often = candidates(1), candidates(10)
    assert once != often
    mean = lambda rows: np.mean([score for row in rows for _, score in row])  # noqa: E731
    assert mean(often) > mean(once)


def test_a_row_has_the_same_text_in_any_batch_and_with_any_number_of_positions():
    lengths = [[3, 4], [5, 2], [0, 0], [1, 5]]
    log_prob = LENGTH_LOG_PROB[:4, :2]
    ids_BT, score_B = run(jnp.array(lengths), log_prob, iterations=4)
    for row, its_log_prob, ids, score in zip(lengths, log_prob, ids_BT, score_B, strict=True):
        alone, its_score = run(jnp.array([row]), its_log_prob[None], iterations=4, positions=6)
        assert alone[0].tolist() == ids[:6].tolist() and not ids[6:].any()
        np.testing.assert_allclose(its_score[0], score, atol=1e-6)


@pytest.mark.parametrize("iterations", [1, 3, 10])
def test_all_tokens_are_masked_first_and_then_linearly_fewer(iterations):
    length = np.arange(41)
    counts = [np.asarray(masked_count(length, step, iterations)) for step in range(iterations)]
    np.testing.assert_array_equal(counts[0], length)
    for step, count in enumerate(counts):
        np.testing.assert_array_equal(
            count, np.floor(length * ((iterations - step) / iterations) + 1e-9)
        )


def test_the_least_probable_tokens_are_masked_and_padding_never_is():
    rng = np.random.default_rng(0)
    log_prob = rng.integers(-3, 0, size=(53, T)).astype(np.float32)  # with many equal ones
    length, count = rng.integers(0, T + 1, size=53), rng.integers(0, T + 1, size=53)
    found = np.asarray(
        least_probable(jnp.asarray(log_prob), jnp.asarray(length), jnp.asarray(count))
    )
    for row in range(53):
        expected = sorted(range(length[row]), key=lambda i: log_prob[row, i])[: count[row]]
        assert np.flatnonzero(found[row]).tolist() == sorted(expected)


@pytest.mark.parametrize("shortest", [0, 3, 50])
def test_the_most_probable_lengths_are_within_bounds_and_the_most_probable_is_first(shortest):
    logits = np.random.default_rng(1).normal(size=(7, 13)).astype(np.float32)
    limit = [0, 1, 2, 4, 9, 12, 40]
    found, log_prob = map(
        np.asarray, most_probable_lengths(jnp.asarray(logits), shortest, jnp.array(limit), count=5)
    )
    assert found.shape == log_prob.shape == (7, 5)
    of_all = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, most in enumerate(limit):
        allowed = range(max(1, min(shortest, most)), min(most, 12) + 1)
        expected = sorted(allowed, key=lambda n: -logits[row, n])[:5]
        none = [0] * (5 - len(expected))
        assert found[row].tolist() == expected + none
        np.testing.assert_allclose(log_prob[row], [*of_all[row, expected], *none], atol=1e-5)


def test_if_there_are_fewer_lengths_than_candidates_all_lengths_are_returned():
    found, _ = most_probable_lengths(jnp.array([[9.0, 1.0, 2.0]]), 0, jnp.array([2]), count=7)
    assert found.tolist() == [[2, 1, 0]]
