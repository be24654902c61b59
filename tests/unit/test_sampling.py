"""The choice of the next token, against numpy: constraints, top-k, top-p and sampling."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding.constraints import forbid, force, no_early_end, no_repeated_ngram
from flaxformer_lite.decoding.sampling import greedy, keep_epsilon, keep_top_k, keep_top_p, sample

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, SAMPLES = 7, 40_009
LOGITS = np.random.default_rng(2).normal(size=(5, V)).astype(np.float32)


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def most_probable(logits, k):
    """Returns a mask of the k most probable tokens of a row, and of those equal to the k-th."""
    return logits >= sorted(logits, reverse=True)[min(k, len(logits)) - 1]


def nucleus(logits, p):
    """Returns a mask of the fewest most probable tokens of a row whose probabilities reach p.

    Tokens with the probability of the last one are included.
    """
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(softmax(logits)[order])
    return logits >= logits[order[np.flatnonzero(reached >= min(p, reached[-1]))[0]]]


def assert_keeps(kept, logits, expected):
    """Asserts that `kept` equals `logits` if `expected` is true, and is -inf otherwise."""
    np.testing.assert_array_equal(np.isfinite(kept), expected)
    np.testing.assert_array_equal(np.asarray(kept)[expected], np.asarray(logits)[expected])


def logs(*shares):
    return np.log(np.array([shares], np.float64)).astype(np.float32)


@pytest.mark.parametrize("size", [V, 401, 16_000])  # the larger sizes use blocks
def test_the_greedy_choice_is_the_most_probable_token_and_of_equal_tokens_the_first(size):
    logits = np.random.default_rng(size).normal(size=(5, size)).astype(np.float32)
    logits[1, [5, size - 1]] = 50
    logits[2, :-1] = -np.inf
    logits[3] = 0
    logits[4, size - 1] = 60
    tokens = jax.jit(greedy)(jnp.asarray(logits))
    assert tokens.tolist() == logits.argmax(axis=1).tolist() and tokens.dtype == jnp.int32


@pytest.mark.parametrize("k", [1, 2, 3, V - 1, V, V + 1, 1000])
def test_the_k_most_probable_tokens_are_kept_or_all_if_there_are_fewer(k):
    expected = np.array([most_probable(row, k) for row in LOGITS])
    assert (expected.sum(axis=1) == min(k, V)).all()
    assert_keeps(keep_top_k(jnp.asarray(LOGITS), k), LOGITS, expected)


@pytest.mark.parametrize(
    ("k", "kept"), [(1, [1, 4]), (2, [1, 4]), (3, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_tokens_equal_to_the_kth_are_kept_too(k, kept):
    logits = np.array([[2, 5, 1, 2, 5]], np.float32)
    assert_keeps(keep_top_k(jnp.asarray(logits), k), logits, np.isin(np.arange(5), kept)[None])


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.2, 0.5, 0.99])
def test_tokens_of_a_probability_of_epsilon_or_more_are_kept_and_the_most_probable(epsilon):
    shares = softmax(LOGITS)
    expected = (shares >= epsilon) | (shares == shares.max(axis=1, keepdims=True))
    assert (expected.sum(axis=1) == 1).all() == (epsilon >= 0.5) and not expected.all()
    assert_keeps(keep_epsilon(jnp.asarray(LOGITS), epsilon), LOGITS, expected)


def test_epsilon_restricts_the_tokens_that_top_k_and_top_p_leave():
    logits = jnp.asarray(logs(0.4, 0.3, 0.2, 0.06, 0.04))
    rows = jnp.zeros(1, jnp.int32)

    def seen(**options):
        keys = jax.random.split(jax.random.key(0), 400)
        picked = jax.vmap(lambda key: sample(logits, key, rows, **options))(keys)
        return set(np.asarray(picked).ravel().tolist())

    assert seen() == {0, 1, 2, 3, 4}
    assert seen(epsilon=0.05) == {0, 1, 2, 3}
    assert seen(epsilon=0.43) == {0}
    assert seen(epsilon=0.43, top_k=2) == {0}  # 0.4 / 0.7 = 0.57 and 0.43
    assert seen(epsilon=0.42, top_k=2) == {0, 1}
    assert seen(epsilon=0.25, temperature=100.0) == {0}  # all are under 0.25


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.77, 0.95, 0.999])
def test_the_fewest_most_probable_tokens_that_reach_p_are_kept(p):
    expected = np.array([nucleus(row, p) for row in LOGITS])
    assert expected.any(axis=1).all()
    assert p > 0.95 or not expected.all()
    assert_keeps(keep_top_p(jnp.asarray(LOGITS), p), LOGITS, expected)


@pytest.mark.parametrize(
    ("p", "kept"), [(0.25, [2]), (0.5, [2]), (0.51, [0, 2]), (0.75, [0, 2]), (0.76, [0, 1, 2, 3])]
)
def test_if_tokens_reach_p_exactly_no_other_token_is_kept(p, kept):
    logits = logs(0.25, 0.125, 0.5, 0.125)
    assert_keeps(keep_top_p(jnp.asarray(logits), p), logits, np.isin(np.arange(4), kept)[None])


def test_a_token_equal_to_the_last_one_of_the_nucleus_is_kept_too():
    logits = logs(0.3, 0.4, 0.3)
    assert_keeps(keep_top_p(jnp.asarray(logits), 0.5), logits, np.array([[True, True, True]]))


@pytest.mark.parametrize("p", [0.9, 1.0])
def test_in_a_large_vocabulary_the_kept_tokens_reach_p_up_to_rounding(p):
    logits = np.random.default_rng(0).normal(scale=3, size=(13, 30_011)).astype(np.float32)
    kept = np.isfinite(keep_top_p(jnp.asarray(logits), p))
    share = (softmax(logits) * kept).sum(axis=1)
    assert (share > p - 1e-5).all()
    assert p == 1 or (kept.mean(axis=1) < 0.5).all()


def test_tokens_with_a_logit_of_minus_infinity_are_not_kept():
    logits = jnp.asarray([[1.0, -jnp.inf, 3.0, 2.0]])
    assert_keeps(keep_top_p(logits, 0.99), logits, np.array([[True, False, True, True]]))
    assert_keeps(keep_top_k(logits, 3), logits, np.array([[True, False, True, True]]))


@functools.cache
def frequencies(row=0, **options):
    """Returns the frequency of each token of a row of LOGITS in many samples."""
    run = jax.jit(functools.partial(sample, **options))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[row]), (SAMPLES, V))
    tokens = run(logits, jax.random.key(11), jnp.arange(SAMPLES))
    return np.bincount(tokens, minlength=V) / SAMPLES


def expected_frequencies(row=0, temperature=1.0, top_k=V, top_p=1.0):
    logits = np.asarray(LOGITS[row], np.float64) / temperature
    logits = np.where(most_probable(logits, top_k), logits, -np.inf)
    return softmax(np.where(nucleus(logits, top_p), logits, -np.inf))


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"temperature": 0.5},
                {"temperature": 3.0},
                {"top_k": 3},
                {"top_p": 0.6},
            )
        ),
        {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
    ],
    ids=str,
)
def test_the_frequencies_of_samples_are_the_softmax_over_the_kept_tokens(options):
    expected = expected_frequencies(**options)
    if options:
        assert np.abs(expected - expected_frequencies()).max() > 0.05
    deviation = np.sqrt(expected * (1 - expected) / SAMPLES)  # of a binomial frequency
    assert (np.abs(frequencies(**options) - expected) <= 4 * deviation).all()


def test_top_p_applies_to_the_probabilities_after_top_k():
    """The first token has more than p among the 2 most probable, and less among all tokens."""
    logits = logs(0.4, 0.3, 0.2, 0.1)
    p = 0.5
    assert 0.4 / (0.4 + 0.3) > p > 0.4
    logits_BV = jnp.asarray(np.repeat(logits, 97, axis=0))
    tokens = sample(logits_BV, jax.random.key(0), jnp.arange(97), top_k=2, top_p=p)
    assert set(tokens.tolist()) == {0}


def test_the_temperature_divides_the_logits_before_top_p():
    """At a low temperature the most probable token alone reaches p."""
    logits = jnp.asarray(np.repeat(logs(0.5, 0.3, 0.2), 97, axis=0))
    run = functools.partial(sample, logits, jax.random.key(0), jnp.arange(97), top_p=0.6)
    assert set(run().tolist()) == {0, 1}
    assert 0.5**4 / (0.5**4 + 0.3**4 + 0.2**4) > 0.6
    assert set(run(temperature=0.25).tolist()) == {0}


def test_a_sample_is_a_function_of_the_key_and_the_number_of_its_row():
    logits, key, run = jnp.zeros((6, 1009)), jax.random.key(5), jax.jit(sample)
    row_B = np.array([3, 0, 8, 3, 104_729, -1])
    tokens = run(logits, key, row_B).tolist()
    assert tokens[0] == tokens[3] and len(set(tokens)) == 5
    order = np.array([4, 2, 0, 5, 1, 3])
    assert run(logits, key, row_B[order]).tolist() == [tokens[i] for i in order]
    alone = [run(logits[:1], key, row_B[i : i + 1]).tolist() for i in range(6)]
    assert alone == [[token] for token in tokens]
    assert run(logits, jax.random.key(6), row_B).tolist() != tokens


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-30}], ids=str
)
def test_if_one_token_is_kept_the_sample_is_the_greedy_choice(options):
    tokens = sample(jnp.asarray(LOGITS), jax.random.key(0), jnp.arange(5), **options)
    assert tokens.tolist() == greedy(jnp.asarray(LOGITS)).tolist() == LOGITS.argmax(axis=1).tolist()
    assert tokens.dtype == jnp.int32


def test_a_temperature_of_one_changes_nothing_and_a_high_one_gives_a_uniform_distribution():
    np.testing.assert_array_equal(frequencies(temperature=1.0), frequencies())
    spread = [np.ptp(expected_frequencies(temperature=t)) for t in (0.5, 1.0, 3.0, 1e4)]
    assert spread == sorted(spread, reverse=True)
    deviation = math.sqrt((V - 1) / V**2 / SAMPLES)
    assert np.abs(frequencies(temperature=1e4) - 1 / V).max() < 4 * deviation + 1e-3


# Constraints.


def test_forbidden_tokens_get_no_probability_and_a_forced_token_gets_all_of_it():
    for logits in (LOGITS, LOGITS[:, None], LOGITS[None, :, None]):  # with any leading axes
        logits = jnp.asarray(logits)
        allowed = np.broadcast_to(~np.isin(np.arange(V), [1, 4]), logits.shape)
        assert_keeps(forbid(logits, [1, 4]), logits, allowed)
        token = jnp.arange(5).reshape(logits.shape[:-1])
        assert_keeps(force(logits, token), logits, np.arange(V) == np.asarray(token)[..., None])


@pytest.mark.parametrize(("length", "kept"), [(0, False), (2, False), (3, True), (4, True)])
def test_the_end_symbol_is_forbidden_before_the_minimum_length(length, kept):
    ended = no_early_end(jnp.asarray(LOGITS), jnp.int32(length), min_length=3, end=2)
    assert_keeps(ended, LOGITS, np.broadcast_to((np.arange(V) != 2) | kept, LOGITS.shape))


def test_the_end_symbol_is_allowed_if_no_other_token_is():
    only_end = jnp.full((2, V), -jnp.inf).at[0, 2].set(-5.0).at[1, 2:4].set(-5.0)
    ended = no_early_end(only_end, jnp.int32(0), min_length=3, end=2)
    assert np.argwhere(np.isfinite(ended)).tolist() == [[0, 2], [1, 3]]


def repeats_an_ngram(text, token, n):
    """Whether the last n tokens of `text` with `token` added are an n-gram of `text`."""
    last = [*text, token][-n:]
    return len(last) == n and any(text[i : i + n] == last for i in range(len(text) - n + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12])
def test_a_token_that_would_repeat_an_ngram_of_the_text_is_forbidden(n):
    rng = np.random.default_rng(n)
    # Only 3 different tokens, so that n-grams repeat; the ids after the text do not matter.
    ids = rng.integers(0, 3, size=(2, 7, 11))
    logits = rng.normal(size=(2, 7, V)).astype(np.float32)
    run = jax.jit(functools.partial(no_repeated_ngram, n=n))
    found = 0
    for length in range(12):
        texts = ids[..., :length].reshape(14, length).tolist()
        expected = [[repeats_an_ngram(text, token, n) for token in range(V)] for text in texts]
        expected = np.reshape(expected, logits.shape)
        assert_keeps(run(jnp.asarray(logits), jnp.asarray(ids), length), logits, ~expected)
        found += expected.sum()
    assert (found > 0) == (n <= 5)
