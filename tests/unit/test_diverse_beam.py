"""Diverse beam search on tables of logits, against beam search and a search in lists."""

import collections
import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import tables
from tables import LONGEST, WORDS

from flaxformer_lite.checks.model_checks import check_method
from flaxformer_lite.config import DecodeConfig, ModelConfig
from flaxformer_lite.decoding.beam import length_penalty
from flaxformer_lite.decoding.methods import beam_search
from flaxformer_lite.fields import EOS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ROWS = tuple(range(13))
LIMITS = (4, 4, 3, 2, 1, 0, 4, 4, 4, 4, 4, 4, 4)
ALPHA = 0.7


@functools.cache
def compiled(n_best, capacities, fields):
    """Returns the search for the texts of tables, jitted; the diversity is an argument."""
    config = DecodeConfig(alpha=ALPHA, penalty="power", **dict(fields))

    def search(tables_BTXV, limit_B, diversity):
        task = tables.task_of(tables_BTXV, limit_B, range(len(limit_B)))
        changed = dataclasses.replace(config, diversity=diversity)
        return beam_search(task, changed, n_best=n_best, capacities=capacities)

    return jax.jit(search)


def searched(n_best, *, diversity=0.0, capacities=(LONGEST,), method="diverse_beam", **fields):
    """Returns the texts of each row: a list of (ids, score)."""
    search = compiled(n_best, capacities, tuple({"method": method, **fields}.items()))
    rows = np.stack([tables.table(row) for row in ROWS])
    return tables.texts_of(search(rows, np.array(LIMITS), diversity))


def score(text, log_prob):
    return log_prob / length_penalty(float(len(text)), alpha=ALPHA, kind="power")


def by_definition(row, limit, *, groups, size, diversity):
    """Returns the texts of a diverse beam search in lists, best first.

    A group with `size` texts stops once its live hypotheses cannot overtake them.
    """
    logits = tables.table(row)
    live = [[((), 0.0)] if limit else [] for _ in range(groups)]
    finished, cut = [{} for _ in range(groups)], [{} for _ in range(groups)]
    for length in range(1, limit + 1):
        uses = collections.Counter()
        for g in range(groups):
            continuations = [
                ((*text, token), total + tables.log_probs(logits, text)[token])
                for text, total in live[g]
                for token in (EOS, *WORDS)
            ]
            continuations.sort(key=lambda item: item[1] - diversity * uses[item[0][-1]])
            continuations.reverse()
            finished[g] |= {
                text: score(text, total) for text, total in continuations[:size] if text[-1] == EOS
            }
            live[g] = [item for item in continuations if item[0][-1] != EOS][:size]
            uses.update(text[-1] for text, _ in live[g])
            if length == limit:
                cut[g] = {text: score(text, total) for text, total in live[g]}
            finished[g] = dict(sorted(finished[g].items(), key=lambda item: -item[1])[:size])
            best = max((total for _, total in live[g]), default=-math.inf)
            if len(finished[g]) == size and min(finished[g].values()) >= best / limit**ALPHA:
                live[g] = []
    for g in range(groups):
        cut[g] = dict(sorted(cut[g].items(), key=lambda item: -item[1])[: size - len(finished[g])])
    parts = [functools.reduce(lambda a, b: a | b, part) for part in (finished, cut)]
    return [item for part in parts for item in sorted(part.items(), key=lambda item: -item[1])]


def assert_same(found, expected):
    assert [text for text, _ in found] == [text for text, _ in expected]
    np.testing.assert_allclose(
        [value for _, value in found], [value for _, value in expected], atol=1e-5
    )


@pytest.mark.parametrize(
    ("groups", "size", "capacities"),
    [(3, 2, (LONGEST,)), pytest.param(2, 2, (2, LONGEST), marks=pytest.mark.slow)],
)
def test_a_search_finds_the_texts_of_its_definition(groups, size, capacities):
    sizes = {"beam_size": groups * size, "beam_groups": groups, "capacities": capacities}
    found = searched(groups * size, diversity=0.9, **sizes)
    assert found != searched(groups * size, diversity=0.0, **sizes)
    for row, limit, texts in zip(ROWS, LIMITS, found, strict=True):
        expected = by_definition(row, limit, groups=groups, size=size, diversity=0.9)
        assert_same(texts, expected)
    assert len({len(texts) for texts in found}) > 2  # some texts are of several groups


def test_one_group_is_beam_search_bit_for_bit():
    found = searched(2, beam_size=2, beam_groups=1, diversity=0.9)
    assert found == searched(2, method="beam", beam_size=2)
    several = searched(6, beam_size=6, beam_groups=3, diversity=0.9)
    assert found != [row[:2] for row in several]


def test_without_diversity_all_groups_find_the_texts_of_one_and_each_counts_once():
    found = searched(6, beam_size=6, beam_groups=3, diversity=0.0)
    assert found == searched(2, method="beam", beam_size=2)


def test_more_diversity_starts_with_more_different_tokens():
    def different(diversity):
        found = searched(6, beam_size=6, beam_groups=3, diversity=diversity)
        return sum(len({text[0] for text, _ in row}) for row in found)

    none, some, much = map(different, (0.0, 0.9, 50.0))
    assert none < some < much


def test_a_score_is_the_log_probability_over_the_penalty_also_with_much_diversity():
    found = searched(6, beam_size=6, beam_groups=3, diversity=50.0)
    assert sum(map(len, found)) > 40
    for row, texts in zip(ROWS, found, strict=True):
        for text, value in texts:
            steps = range(len(text))
            log_prob = sum(tables.log_probs(tables.table(row), text[:i])[text[i]] for i in steps)
            assert value == pytest.approx(score(text, log_prob), abs=1e-5)
        ended = [text[-1] == EOS for text, _ in texts]
        assert ended == sorted(ended, reverse=True)  # cut texts come last


@pytest.mark.slow
def test_the_end_symbol_has_no_penalty():
    """The end is the best choice of both groups; with a penalty, group 2 would choose token 5."""
    logits_V = np.full(tables.V, -30.0, np.float32)
    logits_V[[EOS, 4, 5]] = np.log([0.6, 0.3, 0.1])
    fields = {"method": "diverse_beam", "beam_size": 2, "beam_groups": 2}
    search = compiled(2, (2,), tuple(fields.items()))
    found = search(np.broadcast_to(logits_V, (1, *tables.table(0).shape)), np.array([2]), 50.0)
    assert [text for text, _ in tables.texts_of(found)[0]] == [(EOS,)]


@pytest.mark.slow
def test_the_best_texts_do_not_depend_on_how_many_are_wanted():
    fields = {"beam_size": 6, "beam_groups": 3, "diversity": 0.9}
    assert [row[:2] for row in searched(6, **fields)] == searched(2, **fields)


def test_groups_that_do_not_divide_the_beam_are_refused():
    config = DecodeConfig(method="diverse_beam", beam_size=6, beam_groups=4)
    with pytest.raises(ValueError) as caught:
        check_method(ModelConfig(), config)
    assert str(caught.value).startswith(
        "config.decode.beam_groups: 4 groups do not divide decode.beam_size = 6 evenly"
    )
    check_method(ModelConfig(), DecodeConfig(method="beam", beam_size=6))
