"""Beam search on tables of log-probabilities, against all texts and a beam search in lists."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.decoding import beam

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, END, T = 5, 2, 4
ALL = 113  # more than the continuations of any step: 27 that end and 81 that do not


@functools.cache
def table(row):
    """Returns log-probabilities (T, texts, V) of the next token after each text.

    Texts have up to T - 1 tokens. Token 0 has probability 0.
    """
    logits = (
        np.random.default_rng(row).normal(scale=1.5, size=(T, V ** (T - 1), V)).astype(np.float32)
    )
    logits[..., 0] = -np.inf
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def number(ids):
    """Returns the index of a text among the texts of its length."""
    return sum(token * V**i for i, token in enumerate(ids))


def penalty(length, alpha, kind="wu"):
    return {"wu": (5 + length) / 6, "power": length}[kind] ** alpha


def tables_of(rows):
    """Returns the tables of the rows, (B, T, texts, V)."""
    return jnp.asarray(np.stack([table(row) for row in rows]))


def step_of(tables_BTXV):
    """Returns a step function that reads each hypothesis from its cache alone, part by part."""

    def step(state):
        index = state.index
        last_BW1 = jax.lax.dynamic_index_in_dim(state.live_BWT, jnp.maximum(index - 1, 0), axis=2)
        last_BW1 = jnp.where(index > 0, last_BW1, 0)
        # The entry at `index` is the token before it.
        cache_BWT = jax.lax.dynamic_update_slice_in_dim(state.cache, last_BW1, index, axis=2)
        past_BWT = jnp.take_along_axis(cache_BWT, state.ancestor_BWT, axis=1)
        value_T = jnp.asarray([0, *(V**i for i in range(T - 1))]) * (jnp.arange(T) <= index)
        number_BW = jnp.einsum("BWT,T->BW", past_BWT, value_T)
        log_prob_BWV = jax.vmap(lambda table_TXV, number_W: table_TXV[index][number_W])(
            tables_BTXV, number_BW
        )
        return log_prob_BWV, cache_BWT

    return step


def search_of(*, n_best, beam_size=ALL, alpha=0.6, kind="wu"):
    return beam.Search(
        beam_size=beam_size, n_best=n_best, alpha=alpha, penalty=kind, max_length=T, end=END
    )


@functools.cache
def compiled(search):
    """Returns the start of a search and its run on tables, both jitted."""

    def start(limit_B):
        cache_BWT = jnp.zeros((len(limit_B), search.beam_size, T), jnp.int32)
        return beam.start(cache_BWT, limit_B, search)

    def run(tables_BTXV, state, limit_B, until):
        return beam.run(step_of(tables_BTXV), state, limit_B, search, until=until)

    return jax.jit(start), jax.jit(run)


def final_state(tables_BTXV, limits, search):
    """Returns the state after a whole search."""
    start, run = compiled(search)
    limit_B = jnp.asarray(limits)
    return run(tables_BTXV, start(limit_B), limit_B, T)


def searched(rows, limits, **options):
    """Returns what beam search finds in each row: a list of (text, score)."""
    search = search_of(**options)
    state = final_state(tables_of(rows), limits, search)
    ids_BNT, score_BN = np.asarray(state.done_BNT), np.asarray(state.score_BN)
    assert ids_BNT.shape == (len(rows), search.n_best, T)
    return [
        [
            ([int(token) for token in ids if token], float(score))
            for ids, score in zip(*row, strict=True)
            if score > -1e30
        ]
        for row in zip(ids_BNT, score_BN, strict=True)
    ]


def every_text(row, limit, alpha, kind="wu"):
    """Returns all texts of a row with their scores: finished texts, then cut ones, best first."""
    ended, cut = [], []

    def extend(ids, log_prob):
        for token in range(1, V):
            text, total = [*ids, token], log_prob + float(table(row)[len(ids), number(ids), token])
            if token == END or len(text) == limit:
                (ended if token == END else cut).append(
                    (text, total / penalty(len(text), alpha, kind))
                )
            else:
                extend(text, total)

    if limit:
        extend([], 0.0)
    return [item for part in (ended, cut) for item in sorted(part, key=lambda item: -item[1])]


def by_definition(row, limit, *, beam_size, n_best, alpha, kind):
    """Returns the texts of a beam search in lists, which never stops before the limit."""
    live, ended = [([], 0.0)] * min(limit, 1), []
    for length in range(1, limit + 1):
        candidates = [
            ([*ids, token], total + float(table(row)[len(ids), number(ids), token]))
            for ids, total in live
            for token in range(1, V)
        ]
        candidates.sort(key=lambda item: -item[1])
        ended += [
            (ids, s / penalty(length, alpha, kind))
            for ids, s in candidates[:beam_size]
            if ids[-1] == END
        ]
        live = [item for item in candidates if item[0][-1] != END][:beam_size]
    cut = [(ids, s / penalty(limit, alpha, kind)) for ids, s in live]
    return [item for part in (ended, cut) for item in sorted(part, key=lambda item: -item[1])][
        :n_best
    ]


def assert_same(found, expected):
    assert [text for text, _ in found] == [text for text, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], atol=1e-5
    )


@pytest.mark.parametrize(
    ("alpha", "kind"),
    [
        (0.6, "wu"),
        (1.0, "power"),
        pytest.param(0.0, "wu", marks=pytest.mark.slow),
        pytest.param(1.0, "wu", marks=pytest.mark.slow),
    ],
)
def test_a_beam_wide_enough_finds_the_best_of_all_texts_in_order(alpha, kind):
    rows, limits = [0, 1, 2, 3, 4], [4, 1, 0, 3, 2]
    found = searched(rows, limits, n_best=59, alpha=alpha, kind=kind)
    assert [len(texts) for texts in found] == [59, 4, 0, 40, 13]
    for row, limit, texts in zip(rows, limits, found, strict=True):
        assert_same(texts, every_text(row, limit, alpha, kind)[:59])


def test_the_penalty_decides_which_text_is_best():
    kinds = [(0.0, "wu"), (0.6, "wu"), (1.0, "wu"), (1.0, "power")]
    orders = [[text for text, _ in every_text(0, 4, *kind)[:7]] for kind in kinds]
    assert orders[0] != orders[1] != orders[2] != orders[3]


@pytest.mark.parametrize(
    ("beam_size", "n_best", "alpha", "kind"),
    [
        (3, 2, 1.0, "power"),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in [
                (1, 1, 0.6, "wu"),
                (3, 2, 1.0, "wu"),
                (2, 1, 1.0, "wu"),
                (2, 2, 0.0, "wu"),
                (7, 5, 0.6, "wu"),
            ]
        ),
    ],
)
def test_a_narrow_beam_finds_the_texts_of_its_definition_which_never_stops_early(
    beam_size, n_best, alpha, kind
):
    rows, limits = list(range(11)), [4, 3, 2, 1, 4, 0, 4, 4, 4, 4, 4]
    options = {"beam_size": beam_size, "n_best": n_best, "alpha": alpha, "kind": kind}
    expected = [
        by_definition(row, limit, **options) for row, limit in zip(rows, limits, strict=True)
    ]
    best = [
        every_text(row, limit, alpha, kind)[:n_best]
        for row, limit in zip(rows, limits, strict=True)
    ]
    assert beam_size > 2 or any(
        a[0][0] != b[0][0] for a, b in zip(expected, best, strict=True) if a
    )
    for texts, texts_by_definition in zip(searched(rows, limits, **options), expected, strict=True):
        assert_same(texts, texts_by_definition)


def test_a_row_has_bit_identical_texts_and_scores_in_any_batch():
    rows, limits = [5, 6, 7], [4, 2, 4]
    together = searched(rows, limits, beam_size=3, n_best=3)
    for row, limit, texts in zip(rows, limits, together, strict=True):
        assert searched([row], [limit], beam_size=3, n_best=3) == [texts]
        assert len(texts) == 3


def test_a_beam_of_one_without_a_penalty_is_greedy():
    rows = list(range(23))
    greedy = []
    for row in rows:
        text = []
        while len(text) < T and END not in text:
            text.append(int(table(row)[len(text), number(text)].argmax()))
        greedy.append(text)
    assert len({len(text) for text in greedy}) > 2
    found = searched(rows, [T] * 23, beam_size=1, n_best=1, alpha=0.0)
    assert [text for ((text, _),) in found] == greedy


LONGEST = 97


@functools.cache
def compiled_chain(alpha):
    """Returns a search for one text: token 3 has the log-probabilities given, the end the rest."""
    search = beam.Search(
        beam_size=1, n_best=1, alpha=alpha, penalty="wu", max_length=LONGEST, end=END
    )

    def run(extend_L, limit_B):
        end_L = jnp.log(-jnp.expm1(extend_L))

        def step(state):
            row_V = jnp.full(V, -jnp.inf).at[3].set(extend_L[state.index])
            row_V = row_V.at[END].set(end_L[state.index])
            return jnp.broadcast_to(row_V[None, None], (*state.log_prob_BW.shape, V)), ()

        return beam.run(step, beam.start((), limit_B, search), limit_B, search, until=LONGEST)

    return jax.jit(run)


def chain(log_probs, *, alpha, limit):
    log_probs = np.resize(np.array(log_probs, np.float32), LONGEST)  # after the limit, anything
    return compiled_chain(alpha)(log_probs, jnp.array([limit]))


def test_a_search_continues_while_a_longer_text_may_overtake_a_finished_one():
    """At first the end is as probable as token 3; then token 3 is certain for 11 tokens."""
    length, limit, half = 13, 17, math.log(0.5)
    log_probs = [half, *[-1e-30] * (length - 2), -80.0, *[-1e-30] * limit]
    finished_first, longer = half / penalty(1, 1.0), half / penalty(length, 1.0)
    # Either of 2 simple rules would stop at once.
    assert longer > finished_first >= half / penalty(1, 1.0)
    state = chain(log_probs, alpha=1.0, limit=limit)
    text = [3] * (length - 1) + [END]
    assert state.done_BNT[0, 0].tolist() == text + [0] * (LONGEST - length)
    assert float(state.score_BN[0, 0]) == pytest.approx(longer, rel=1e-5)


def test_a_search_ends_as_soon_as_no_live_hypothesis_can_overtake():
    sure, limit = math.log1p(-1e-6), LONGEST
    state = chain([math.log(0.01)] + [sure] * limit, alpha=0.6, limit=limit)
    assert math.log(0.01) / penalty(limit, 0.6) < math.log(0.99)
    assert int(state.index) == 1 and state.done_BNT[0, 0, :2].tolist() == [END, 0]
    state = chain([math.log(0.2)] * limit, alpha=1.0, limit=limit)
    steps = 1 + next(
        n for n in range(limit) if (n + 1) * math.log(0.2) / penalty(limit, 1.0) <= math.log(0.8)
    )
    assert int(state.index) == steps > 1


@pytest.mark.parametrize("n_best", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_search_in_two_parts_is_one_search(n_best):
    search = search_of(beam_size=3, n_best=n_best)
    tables, limit_B = tables_of([3, 5, 6]), [T, T - 1, T]
    whole, (start, run) = final_state(tables, limit_B, search), compiled(search)
    half = run(tables, start(jnp.array(limit_B)), jnp.array(limit_B), 2)
    assert int(half.index) == 2 and not np.array_equal(half.done_BNT, whole.done_BNT)
    resumed = run(tables, half, jnp.array(limit_B), T)
    np.testing.assert_array_equal(resumed.done_BNT, whole.done_BNT)
    np.testing.assert_array_equal(resumed.score_BN, whole.score_BN)


def test_cut_texts_come_after_all_finished_texts():
    expected = every_text(1, 3, 0.6)
    scores = [score for _, score in expected]
    assert scores != sorted(scores, reverse=True)
    texts = searched([0, 1, 2, 3, 4], [0, 3, 0, 0, 0], n_best=59)[1]
    assert_same(texts, expected)
    assert [text[-1] == END for text, _ in texts] == [True] * 13 + [False] * 27


def test_if_there_are_fewer_texts_than_n_best_the_rest_is_padding_without_a_score():
    tables, limits = tables_of([0] * 5), [1, 0, 0, 0, 0]
    state = final_state(tables, limits, search_of(n_best=59))
    assert np.isfinite(state.score_BN).sum(axis=1).tolist() == [4, 0, 0, 0, 0]
    assert not state.done_BNT[0, 4:].any() and not state.done_BNT[1:].any()


def test_if_no_token_is_allowed_the_search_ends_without_a_text():
    tables = jnp.full_like(tables_of([0] * 3), -jnp.inf)
    state = final_state(tables, [T] * 3, search_of(beam_size=3, n_best=3))
    assert int(state.index) == 1
    assert not state.done_BNT.any() and (state.score_BN == -jnp.inf).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": -0.1}, "alpha: expected 0 or more, got -0.1"),
        ({"alpha": math.nan}, "alpha: expected 0 or more, got nan"),
        (
            {"alpha": 24.0, "max_length": 500},
            "alpha: 24.0 makes the penalty of 500 tokens infinite; lower it",
        ),
        ({"n_best": 4}, "n_best: expected 1 to 3, the size of the beam, got 4"),
        ({"n_best": 0}, "n_best: expected 1 to 3, the size of the beam, got 0"),
    ],
)
def test_settings_of_a_search_that_could_not_stop_or_return_n_texts_are_refused(wrong, message):
    right = {
        "beam_size": 3,
        "n_best": 2,
        "alpha": 0.6,
        "penalty": "wu",
        "max_length": T,
        "end": END,
    }
    search = beam.Search(**{**right, **wrong})
    with pytest.raises(ValueError) as caught:
        beam.start(jnp.zeros((1, 3, T), jnp.int32), jnp.array([T]), search)
    assert str(caught.value).startswith(message)


def test_the_penalty_of_one_token_is_one_and_grows_with_the_power_alpha():
    def of(length, alpha, kind="wu"):
        return beam.length_penalty(length, alpha=alpha, kind=kind)

    assert of(1, 0.6) == 1 and of(7, 0.0) == 1
    assert of(7, 1.0) == 2 and of(7, 0.6) == pytest.approx(2**0.6)
    assert of(1, 0.6, "power") == 1 and of(7, 0.0, "power") == 1 and of(7, 2.0, "power") == 49
