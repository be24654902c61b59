"""Error rates of symbols: known edits, the nearest reference, intervals and p-values; groups."""

import functools
import math
import re

import numpy as np
import pytest

from flaxformer_lite import scoring
from flaxformer_lite.field_rules import ERROR_RATES
from flaxformer_lite.scores import symbols
from flaxformer_lite.scores.groups import GroupScores, macro_mean
from flaxformer_lite.scores.symbols import (
    edit_distances,
    nearest_edits,
    range_of,
    sequence_error_rate,
    symbol_error_rate,
    symbols_of,
)
from flaxformer_lite.scoring import scores_by_group
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report

# 3 of 4 texts are wrong, with 1 + 2 + 3 edits; the references have 3 + 4 + 3 + 1 symbols.
REFERENCES = ["a b c", "a b c d", "a b c", "a"]
HYPOTHESES = ["a b c", "a c d", "c a b d", "x y z"]
EDITS = [0, 1, 2, 3]


def distance_by_definition(first, second):
    """The fewest edits, by recursion over the last symbols."""

    @functools.cache
    def of(i, j):
        if not i or not j:
            return i + j
        substituted = of(i - 1, j - 1) + (first[i - 1] != second[j - 1])
        return min(substituted, of(i - 1, j) + 1, of(i, j - 1) + 1)

    return of(len(first), len(second))


def random_texts(count, seed, longest=11, symbols=5):
    rng = np.random.default_rng(seed)
    return [list(map(str, rng.integers(symbols, size=rng.integers(longest)))) for _ in range(count)]


def test_kitten_becomes_sitting_by_3_edits():
    assert edit_distances(
        ["kitten", "sitting", "", "abc"], ["sitting", "kitten", "ab", ""]
    ).tolist() == [*(3, 3, 2, 3)]


@pytest.mark.parametrize("cells", [7, symbols.MOST_CELLS])
def test_distances_are_those_of_the_definition_in_batches_of_any_size(cells, monkeypatch):
    monkeypatch.setattr(symbols, "MOST_CELLS", cells)
    first, second = random_texts(97, 1), random_texts(97, 2, longest=7)
    expected = [distance_by_definition(*pair) for pair in zip(first, second, strict=True)]
    assert len(set(expected)) > 5
    assert edit_distances(first, second).tolist() == expected


def test_symbols_are_the_parts_between_spaces():
    assert symbols_of(" t ʃ  a\u00a0b\tc ") == ["t", "ʃ", "a\u00a0b\tc"]
    assert symbols_of("") == symbols_of("  ") == []


def test_the_symbol_error_rate_is_of_all_texts_together():
    assert (
        edit_distances(
            *([text.split() for text in side] for side in (HYPOTHESES, REFERENCES))
        ).tolist()
        == EDITS
    )
    assert symbol_error_rate(HYPOTHESES, [REFERENCES]) == pytest.approx(100 * 6 / 11)
    mean_of_rates = 100 * np.mean([0, 1 / 4, 2 / 3, 3 / 1])
    assert abs(mean_of_rates - 100 * 6 / 11) > 10


def test_the_sequence_error_rate_counts_texts_that_are_not_exactly_right():
    assert sequence_error_rate(HYPOTHESES, [REFERENCES]) == 75
    assert sequence_error_rate(["a  b", "b a"], [["a b", "a b"]]) == 50


@pytest.mark.parametrize(
    ("hypotheses", "symbols", "sequences"),
    [
        (REFERENCES, 0, 0),
        ([""] * 4, 100, 100),  # every symbol is missing
        (["x y z", "w x y z", "x y z", "x"], 100, 100),  # every symbol is substituted
        ([text + " x" * 11 for text in REFERENCES], 400, 100),  # 44 symbols are inserted
    ],
)
def test_outputs_that_are_right_empty_or_wrong_have_known_rates(hypotheses, symbols, sequences):
    assert symbol_error_rate(hypotheses, [REFERENCES]) == symbols
    assert sequence_error_rate(hypotheses, [REFERENCES]) == sequences


def test_of_two_references_the_nearest_counts_and_of_equally_near_ones_the_shorter():
    references = [["a b c d", "a b", "a b c"], ["a x", "a b c d", "a"]]
    for each in (references, references[::-1]):
        edits_N, length_N = nearest_edits(["a b", "a b c", "a b"], each)
        # Both have 1 edit from the second text, and the third.
        assert (edits_N.tolist(), length_N.tolist()) == ([1, 1, 1], [2, 2, 1])
        assert symbol_error_rate(["a b", "a b c", "a b"], each) == pytest.approx(100 * 3 / 5)
    one = [symbol_error_rate(["a b", "a b c", "a b"], [each]) for each in references]
    assert min(one) != pytest.approx(60)


def test_references_without_symbols_have_no_symbol_error_rate():
    assert math.isnan(symbol_error_rate(["a"], [[" "]]))
    assert sequence_error_rate(["a", ""], [["", ""]]) == 50
    baseline, scores = scoring.resample([["a"], ["b"]], [[""]], bootstrap=40, symbols=True)
    assert math.isnan(scores.values["symbol_error_rate"])
    assert scores.p_values["symbol_error_rate"] == 1
    assert run_report.table(scores.values).splitlines()[1].split() == ["symbol_error_rate", "-"]


@pytest.mark.parametrize("references", [[], [["a", "b"], ["a"]]])
def test_references_without_a_text_for_each_hypothesis_are_refused(references):
    counts = [len(texts) for texts in references]
    with pytest.raises(
        InputError, match=rf"1 or more lists of 2 texts, .* {re.escape(str(counts))}"
    ):
        symbol_error_rate(["a", "b"], references)


def test_scores_have_the_rates_only_if_wanted():
    plain, scores = (
        scoring.score(HYPOTHESES, [REFERENCES], symbols=each) for each in (False, True)
    )
    assert plain.values.keys() == {"exact_match", "bleu", "chrf"}
    rates = {"symbol_error_rate": 100 * 6 / 11, "sequence_error_rate": 75}
    assert scores.values == pytest.approx(plain.values | rates)
    assert tuple(rates) == ERROR_RATES
    assert scores.signatures == plain.signatures
    assert "sequence_error_rate  75.00 %" in run_report.table(scores.values)


def test_case_is_ignored_if_wanted():
    upper = [text.upper() for text in REFERENCES]
    for lowercase, expected in ((True, 0), (False, 100)):
        values = scoring.score(upper, [REFERENCES], symbols=True, lowercase=lowercase).values
        assert values["symbol_error_rate"] == values["sequence_error_rate"] == expected
        assert values["exact_match"] == 0


def corpus(count, wrong, seed):
    """Returns phone strings, each wrong in one phone with a probability, and their references."""
    rng, phones = np.random.default_rng(seed), np.array(list("aeioubdfgklmn"))
    references = [rng.choice(phones, 7) for _ in range(count)]
    hypotheses = [[*text[:-1], "x" if rng.random() < wrong else text[-1]] for text in references]
    return [[" ".join(text) for text in side] for side in (hypotheses, references)]


def test_the_intervals_of_rates_are_binomial():
    hypotheses, references = corpus(401, 0.3, seed=1)
    (scores,) = scoring.resample([hypotheses], [references], bootstrap=1000, symbols=True)
    rate, (mean, half) = (each["sequence_error_rate"] for each in (scores.values, scores.intervals))
    assert mean == pytest.approx(rate, abs=0.5)
    assert half == pytest.approx(1.96 * math.sqrt(rate * (100 - rate) / 401), rel=0.15)
    # Each wrong text has 1 edit in 7 phones.
    assert scores.values["symbol_error_rate"] == pytest.approx(rate / 7)
    assert scores.intervals["symbol_error_rate"] == pytest.approx((mean / 7, half / 7))
    line = run_report.table(scores.values, scores.intervals).splitlines()[3]
    expected = f"sequence_error_rate {rate:.2f} % {mean:.2f} % ± {half:.2f} %"
    assert line.split() == expected.split()


def test_the_p_value_of_rates_is_small_for_a_large_difference_and_1_for_none():
    hypotheses, references = corpus(211, 0.2, seed=1)
    worse, same = corpus(211, 0.6, seed=1)
    assert references == same
    _, large, none = scoring.resample(
        [hypotheses, worse, hypotheses], [references], bootstrap=300, symbols=True
    )
    for name in ERROR_RATES:
        assert large.values[name] > 2 * none.values[name] and large.p_values[name] < 0.01
        assert none.p_values[name] == 1
    # A random swap of 3 wrong texts and 2 others is as large as 1 in most trials.
    few = [*worse[:5], *hypotheses[5:]]
    _, small = scoring.resample([hypotheses, few], [references], bootstrap=300, symbols=True)
    assert small.values != none.values and small.p_values["symbol_error_rate"] > 0.1


def test_5_percent_of_equal_systems_have_a_p_below_0_05(monkeypatch):
    monkeypatch.setattr(scoring, "corpus_metrics", lambda settings: {})
    p = []
    for trial in range(200):
        one, references = corpus(83, 0.3, seed=trial)
        rng = np.random.default_rng(trial)
        other = [text if rng.random() < 0.7 else "x x " + text for text in references]
        _, scores = scoring.resample(
            [one, other], [references], bootstrap=100, seed=trial + 1, symbols=True
        )
        p.append(scores.p_values["sequence_error_rate"])
    assert 0.005 < (np.array(p) < 0.05).mean() < 0.1 and 0.35 < (np.array(p) < 0.5).mean() < 0.6


# Groups.


def test_lengths_are_in_ranges_that_double():
    lengths = (0, 1, 4, 5, 8, 9, 16, 17, 33)
    ranges = [range_of(length) for length in lengths]
    assert [name.removesuffix(" symbols") for name in ranges] == [
        *("0", "1-4", "1-4", "5-8", "5-8", "9-16", "9-16", "17-32", "33-64")
    ]


def test_each_group_has_the_scores_of_its_sentences_and_the_mean_weighs_groups_alike():
    groups = ["de", "ady", "de", "de"]
    found = scores_by_group(HYPOTHESES, [REFERENCES], groups, symbols=True)
    assert list(found) == ["ady", "de"] and [each.sentences for each in found.values()] == [1, 3]
    assert (
        found["ady"].values
        == scoring.score(HYPOTHESES[1:2], [REFERENCES[1:2]], symbols=True).values
    )
    rates = {name: each.values["symbol_error_rate"] for name, each in found.items()}
    assert rates == pytest.approx({"ady": 100 / 4, "de": 100 * 5 / 7})
    mean = macro_mean(found)
    assert mean["symbol_error_rate"] == pytest.approx((25 + 500 / 7) / 2)
    assert mean["sequence_error_rate"] == pytest.approx((100 + 200 / 3) / 2)
    assert mean["sequence_error_rate"] != sequence_error_rate(HYPOTHESES, [REFERENCES])


def test_groups_by_length_are_of_the_first_references_and_in_the_order_of_length():
    references = ["a " * length for length in (17, 1, 9, 3, 0)]
    found = scores_by_group(references, [references, ["b"] * 5], "length", symbols=True)
    assert {name: each.sentences for name, each in found.items()} == {
        "0 symbols": 1,
        "1-4 symbols": 2,
        "9-16 symbols": 1,
        "17-32 symbols": 1,
    }
    assert list(found)[-1] == "17-32 symbols"
    # Group 0 has no symbol error rate against the first references, and is left out of no other.
    alone = scores_by_group(references, [references], "length", symbols=True)
    assert math.isnan(alone["0 symbols"].values["symbol_error_rate"])
    assert macro_mean(alone)["symbol_error_rate"] == 0


def test_the_table_of_groups_has_a_line_for_each_and_one_for_the_mean():
    found = {
        "ady": GroupScores(1450, {"exact_match": 0.5, "bleu": 30.0, "symbol_error_rate": 2.5}),
        "vie": GroupScores(7, {"exact_match": 0.25, "bleu": 20.0, "symbol_error_rate": math.nan}),
    }
    assert [line.split() for line in run_report.group_table(found).splitlines()] == [
        ["group", "n", "exact_match", "bleu", "symbol_error_rate"],
        ["ady", "1,450", "50.00", "%", "30", "2.50", "%"],
        ["vie", "7", "25.00", "%", "20", "-"],
        ["mean", "of", "2", "groups", "37.50", "%", "25", "2.50", "%"],
    ]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (["a"] * 3, "the groups: expected 4 lines, as many as the hypotheses has, got 3."),
        (["a", " ", "b", "b"], "the groups: line 2: expected the name of a group, got none."),
    ],
)
def test_wrong_names_of_groups_are_one_message(groups, says):
    with pytest.raises(InputError) as caught:
        scores_by_group(HYPOTHESES, [REFERENCES], groups)
    assert str(caught.value) == says
