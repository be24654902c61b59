"""Choosing the next token: what is cut away, against small definitions in numpy, and how often each token is drawn."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding.constraints import forbid, force, no_early_end, no_repeated_ngram
from flaxformer_lite.decoding.sampling import greedy, keep_top_k, keep_top_p, sample

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, DRAWS = 7, 40_009
LOGITS = np.random.default_rng(2).normal(size=(5, V)).astype(np.float32)


def softmax(logits):
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def likeliest(logits, k):
    """Which of one row's tokens are among the k highest, or as high as the k-th."""
    return logits >= sorted(logits, reverse=True)[min(k, len(logits)) - 1]


def nucleus(logits, p):
    """Which of one row's tokens are needed, the likeliest first, until their probabilities reach p, or equal one."""
    order = np.argsort(-logits, kind="stable")
    reached = np.cumsum(softmax(logits)[order])
    return logits >= logits[order[np.flatnonzero(reached >= min(p, reached[-1]))[0]]]


def assert_keeps(kept, logits, expected):
    """Logits stay as they are where `expected` says so, and are -inf elsewhere."""
    np.testing.assert_array_equal(np.isfinite(kept), expected)
    np.testing.assert_array_equal(np.asarray(kept)[expected], np.asarray(logits)[expected])


def logs(*shares):
    return np.log(np.array([shares], np.float64)).astype(np.float32)


@pytest.mark.parametrize("size", [V, 401, 16_000])  # the larger ones are searched by blocks
def test_the_greedy_choice_is_the_most_probable_token_and_of_equals_the_first(size):
    logits = np.random.default_rng(size).normal(size=(5, size)).astype(np.float32)
    logits[1, [5, size - 1]] = 50
    logits[2, :-1] = -np.inf
    logits[3] = 0
    logits[4, size - 1] = 60
    tokens = jax.jit(greedy)(jnp.asarray(logits))
    assert tokens.tolist() == logits.argmax(axis=1).tolist() and tokens.dtype == jnp.int32


@pytest.mark.parametrize("k", [1, 2, 3, V - 1, V, V + 1, 1000])
def test_the_k_likeliest_tokens_are_kept_or_all_where_there_are_fewer(k):
    expected = np.array([likeliest(row, k) for row in LOGITS])
    assert (expected.sum(axis=1) == min(k, V)).all()
    assert_keeps(keep_top_k(jnp.asarray(LOGITS), k), LOGITS, expected)


@pytest.mark.parametrize(("k", "kept"), [(1, [1, 4]), (2, [1, 4]), (3, [0, 1, 3, 4]), (5, [0, 1, 2, 3, 4])])
def test_tokens_as_likely_as_the_last_one_kept_are_kept_too(k, kept):
    logits = np.array([[2, 5, 1, 2, 5]], np.float32)
    assert_keeps(keep_top_k(jnp.asarray(logits), k), logits, np.isin(np.arange(5), kept)[None])


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.77, 0.95, 0.999])
def test_the_fewest_likeliest_tokens_that_reach_p_are_kept(p):
    expected = np.array([nucleus(row, p) for row in LOGITS])
    assert expected.any(axis=1).all()
    assert p > 0.95 or not expected.all()
    assert_keeps(keep_top_p(jnp.asarray(LOGITS), p), LOGITS, expected)


@pytest.mark.parametrize(("p", "kept"), [(0.25, [2]), (0.5, [2]), (0.51, [0, 2]), (0.75, [0, 2]), (0.76, [0, 1, 2, 3])])
def test_where_tokens_reach_p_exactly_no_further_one_is_kept(p, kept):
    logits = logs(0.25, 0.125, 0.5, 0.125)
    assert_keeps(keep_top_p(jnp.asarray(logits), p), logits, np.isin(np.arange(4), kept)[None])


def test_a_token_as_likely_as_the_last_one_needed_is_kept_too():
    logits = logs(0.3, 0.4, 0.3)
    assert_keeps(keep_top_p(jnp.asarray(logits), 0.5), logits, np.array([[True, True, True]]))


@pytest.mark.parametrize("p", [0.9, 1.0])
def test_of_a_large_vocabulary_too_what_is_kept_reaches_p_up_to_rounding(p):
    logits = np.random.default_rng(0).normal(scale=3, size=(13, 30_011)).astype(np.float32)
    kept = np.isfinite(keep_top_p(jnp.asarray(logits), p))
    share = (softmax(logits) * kept).sum(axis=1)
    assert (share > p - 1e-5).all()
    assert p == 1 or (kept.mean(axis=1) < 0.5).all()


def test_what_is_cut_away_already_stays_away():
    logits = jnp.asarray([[1.0, -jnp.inf, 3.0, 2.0]])
    assert_keeps(keep_top_p(logits, 0.99), logits, np.array([[True, False, True, True]]))
    assert_keeps(keep_top_k(logits, 3), logits, np.array([[True, False, True, True]]))


@functools.cache
def frequencies(row=0, **options):
    """How often each token of a row of LOGITS comes in many draws."""
    draw = jax.jit(functools.partial(sample, **options))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[row]), (DRAWS, V))
    return np.bincount(draw(logits, jax.random.key(11), jnp.arange(DRAWS)), minlength=V) / DRAWS


def expected_frequencies(row=0, temperature=1.0, top_k=V, top_p=1.0):
    logits = np.asarray(LOGITS[row], np.float64) / temperature
    logits = np.where(likeliest(logits, top_k), logits, -np.inf)
    return softmax(np.where(nucleus(logits, top_p), logits, -np.inf))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_the_softmax_of_what_is_left_says(options):
    expected = expected_frequencies(**options)
    if options:
        assert np.abs(expected - expected_frequencies()).max() > 0.05
    deviation = np.sqrt(expected * (1 - expected) / DRAWS)  # of a binomial share
    assert (np.abs(frequencies(**options) - expected) <= 4 * deviation).all()


def test_the_share_to_reach_is_of_what_the_k_likeliest_leave():
    """Of the two likeliest the first has more than p by itself; among all tokens it has less."""
    logits = logs(0.4, 0.3, 0.2, 0.1)
    p = 0.5
    assert 0.4 / (0.4 + 0.3) > p > 0.4
    draws = sample(jnp.asarray(np.repeat(logits, 97, axis=0)), jax.random.key(0), jnp.arange(97), top_k=2, top_p=p)
    assert set(draws.tolist()) == {0}


def test_the_temperature_divides_before_the_share_is_cut():
    """Cold, the likeliest token reaches p by itself."""
    logits = jnp.asarray(np.repeat(logs(0.5, 0.3, 0.2), 97, axis=0))
    draw = functools.partial(sample, logits, jax.random.key(0), jnp.arange(97), top_p=0.6)
    assert set(draw().tolist()) == {0, 1}
    assert 0.5**4 / (0.5**4 + 0.3**4 + 0.2**4) > 0.6
    assert set(draw(temperature=0.25).tolist()) == {0}


def test_a_draw_is_a_function_of_the_key_and_the_number_of_its_row():
    logits, key = jnp.zeros((6, 1009)), jax.random.key(5)
    row_B = jnp.array([3, 0, 8, 3, 104_729, -1])
    drawn = sample(logits, key, row_B).tolist()
    assert drawn[0] == drawn[3] and len(set(drawn)) == 5
    order = np.array([4, 2, 0, 5, 1, 3])
    assert sample(logits, key, row_B[order]).tolist() == [drawn[i] for i in order]
    assert [sample(logits[:1], key, row_B[i : i + 1]).tolist() for i in range(6)] == [[token] for token in drawn]
    assert sample(logits, jax.random.key(6), row_B).tolist() != drawn


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-30}], ids=str)
def test_where_one_token_is_left_it_is_the_greedy_choice(options):
    drawn = sample(jnp.asarray(LOGITS), jax.random.key(0), jnp.arange(5), **options)
    assert drawn.tolist() == greedy(jnp.asarray(LOGITS)).tolist() == LOGITS.argmax(axis=1).tolist()
    assert drawn.dtype == jnp.int32


def test_a_temperature_of_one_changes_nothing_and_a_high_one_makes_all_tokens_alike():
    np.testing.assert_array_equal(frequencies(temperature=1.0), frequencies())
    spread = [np.ptp(expected_frequencies(temperature=t)) for t in (0.5, 1.0, 3.0, 1e4)]
    assert spread == sorted(spread, reverse=True)
    assert np.abs(frequencies(temperature=1e4) - 1 / V).max() < 4 * math.sqrt((V - 1) / V**2 / DRAWS) + 1e-3


# What may not come.


def test_forbidden_tokens_get_no_probability_and_a_forced_one_gets_all_whatever_axes_there_are():
    for logits in (LOGITS, LOGITS[:, None], LOGITS[None, :, None]):
        logits = jnp.asarray(logits)
        assert_keeps(forbid(logits, [1, 4]), logits, np.broadcast_to(~np.isin(np.arange(V), [1, 4]), logits.shape))
        token = jnp.arange(5).reshape(logits.shape[:-1])
        assert_keeps(force(logits, token), logits, np.arange(V) == np.asarray(token)[..., None])


@pytest.mark.parametrize(("length", "kept"), [(0, False), (2, False), (3, True), (4, True)])
def test_the_end_may_not_come_before_so_many_tokens(length, kept):
    ended = no_early_end(jnp.asarray(LOGITS), jnp.int32(length), min_length=3, end=2)
    assert_keeps(ended, LOGITS, np.broadcast_to((np.arange(V) != 2) | kept, LOGITS.shape))


def test_the_end_may_come_early_where_nothing_else_is_left():
    only_end = jnp.full((2, V), -jnp.inf).at[0, 2].set(-5.0).at[1, 2:4].set(-5.0)
    ended = no_early_end(only_end, jnp.int32(0), min_length=3, end=2)
    assert np.argwhere(np.isfinite(ended)).tolist() == [[0, 2], [1, 3]]


def ends_a_known_ngram(text, token, n):
    """Whether the last n tokens of `text` with `token` stand in `text` already."""
    last = [*text, token][-n:]
    return len(last) == n and any(text[i : i + n] == last for i in range(len(text) - n + 1))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12])
def test_a_token_that_would_repeat_an_ngram_of_the_text_may_not_come(n):
    rng = np.random.default_rng(n)
    ids = rng.integers(0, 3, size=(2, 7, 11))  # of three tokens only, so that much repeats; after the text anything
    logits = rng.normal(size=(2, 7, V)).astype(np.float32)
    cut = jax.jit(functools.partial(no_repeated_ngram, n=n))
    found = 0
    for length in range(12):
        expected = np.array(
            [
                [[ends_a_known_ngram(text[:length].tolist(), token, n) for token in range(V)] for text in row]
                for row in ids
            ]
        )
        assert_keeps(cut(jnp.asarray(logits), jnp.asarray(ids), jnp.int32(length)), logits, ~expected)
        found += expected.sum()
    assert (found > 0) == (n <= 5)
