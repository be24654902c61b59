"""Minimum Bayes risk: expected utilities against their definition, ties, and utilities."""

import itertools
import math
import sys

import numpy as np
import pytest
import sacrebleu

from flaxformer_lite import translate
from flaxformer_lite.cli import commands, run_flags
from flaxformer_lite.decoding import mbr
from flaxformer_lite.scores.utilities import utility_of
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError

CANDIDATES = ["a b c d", "a b c e", "x y", "a b c d", "a b f d", "", "x y"]


def shared_words(hypotheses, references):
    """Returns the share of the words of each translation that its reference has: not symmetric."""
    return [
        sum(word in reference.split() for word in hypothesis.split()) / max(1, len(hypothesis))
        for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]


def by_definition(candidates, pair):
    """The mean utility of each candidate over all others, one pair after another."""
    return [
        np.mean([pair(text, other) for j, other in enumerate(candidates) if j != i])
        for i, text in enumerate(candidates)
    ]


def test_expected_utilities_count_each_other_candidate_as_often_as_it_occurs():
    expected = by_definition(CANDIDATES, lambda *pair: shared_words(*([text] for text in pair))[0])
    found = mbr.expected_utilities(CANDIDATES, shared_words)
    np.testing.assert_allclose(found, expected)
    assert found.dtype == np.float64 and len(set(found)) == 4
    # Without its copies another candidate wins.
    unique = list(dict.fromkeys(CANDIDATES))
    assert not np.allclose(mbr.expected_utilities(unique, shared_words), found[[0, 1, 2, 4, 5]])


@pytest.mark.parametrize("name", ["chrf", "bleu"])
def test_the_utilities_of_sacrebleu_are_its_sentence_scores(name):
    metric = {
        "chrf": sacrebleu.CHRF(),
        "bleu": sacrebleu.BLEU(effective_order=True, tokenize="char"),
    }[name]
    pair = lambda text, other: metric.sentence_score(text, [other]).score  # noqa: E731
    found = mbr.expected_utilities(CANDIDATES, utility_of(name, bleu_tokenizer="char"))
    np.testing.assert_allclose(found, by_definition(CANDIDATES, pair))
    assert mbr.best(CANDIDATES, utility_of(name, bleu_tokenizer="char")) == "a b c d"


def test_each_pair_of_different_texts_is_computed_once():
    seen = []

    def utility(hypotheses, references):
        seen.append(list(zip(hypotheses, references, strict=True)))
        return np.zeros(len(hypotheses))

    mbr.expected_utilities(["a", "b", "a", "c"], utility)
    (pairs,) = seen
    # Copies are references of each other, and a candidate is not its own.
    assert sorted(pairs) == sorted([("a", "a"), *itertools.permutations("abc", 2)])


def test_of_equal_candidates_the_first_wins_and_a_single_one_needs_no_utility():
    constant = lambda hypotheses, references: [2.5] * len(hypotheses)  # noqa: E731
    assert mbr.best(["b", "a", "c"], constant) == "b"
    assert mbr.expected_utilities(["b", "a"], constant).tolist() == [2.5, 2.5]

    def refuse(hypotheses, references):
        raise AssertionError

    assert mbr.best(["a"], refuse) == mbr.best(["a", "a"], refuse) == "a"
    assert math.isnan(mbr.expected_utilities(["a"], refuse)[0])


@pytest.mark.parametrize("values", [[1.0], [1.0, math.nan], ["a", "b"], 3, None, [[1], [2]]])
def test_a_utility_that_returns_other_than_numbers_is_refused(values):
    with pytest.raises(InputError, match=r"^utility: expected 2 finite numbers"):
        mbr.best(["a", "b"], lambda hypotheses, references: values)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def longest(hypotheses, references):\n    return [len(text) for text in hypotheses]\n"
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("import no_such_module\n")


@pytest.mark.usefixtures("files")
def test_a_utility_is_read_from_a_file():
    assert (
        mbr.best(["a", "ccc", "bb"], utility_of("mine.py:longest", bleu_tokenizer="13a")) == "ccc"
    )


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("comet", "expected chrf, bleu or path.py:function, got 'comet'"),
        ("mine.py", "expected chrf, bleu or path.py:function"),
        ("mine.py:shortest", "mine.py:shortest: cannot be read: .*no attribute 'shortest'"),
        ("mine.py:number", "mine.py:number: expected a function, got int"),
        ("none.py:f", "none.py:f: cannot be read: No such file"),
        ("broken.py:f", "broken.py:f: cannot be read: No module named 'no_such_module'"),
        (3, "expected a name or a function, got 3"),
    ],
)
def test_a_utility_that_does_not_exist_is_refused(name, says):
    with pytest.raises(InputError, match=rf"^utility: {says}"):
        utility_of(name, bleu_tokenizer="13a")


def rule(method, translations, *, candidates=3):
    """Returns the rule over a translator that returns `translations` in turn, and its calls."""
    calls, remaining = [], iter(translations)

    def translate_ids(sources, prefixes, numbers):
        calls.append((sources, prefixes, numbers))
        return [next(remaining) for _ in sources]

    def n_best(sources, n, prefixes, numbers):
        calls.append((sources, n, prefixes, numbers))
        return [[(text, 0.0) for text in next(remaining)] for _ in sources]

    settings = dict(method=method, candidates=candidates, utility=shared_words)
    return mbr.MbrRule(translate_ids, n_best, **settings), calls


def test_each_source_is_sampled_several_times_with_numbers_of_its_own():
    sampled = ["a b", "c", "a d", "x", "y z", "z y"]
    choose, calls = rule("sample", sampled)
    assert choose(["S", "T"], ["p", "q"], [5, 7]) == ["a b", "y z"]
    ((sources, prefixes, numbers),) = calls
    assert sources == [*"SSSTTT"] and prefixes == [*"pppqqq"]
    assert numbers[0] == 5 and numbers[3] == 7 and len(set(numbers)) == 6
    far = 2**31 - 1
    _, calls = found = rule("sample", sampled)
    found[0](["S", "T"], None, [far, 1])
    assert max(calls[0][2]) < 2**31 and calls[0][1] is None


@pytest.mark.parametrize("method", ["beam", "diverse_beam", "stochastic_beam"])
def test_the_candidates_of_beam_search_are_the_n_best(method):
    choose, calls = rule(method, [["a b", "c", "a d"], ["x"]])
    assert choose(["S", "T"], None, [5, 7]) == ["a b", "x"]
    assert calls == [(["S", "T"], 3, None, [5, 7])]


@pytest.mark.parametrize("method", ["greedy", "mask_predict"])
def test_a_method_with_one_translation_is_refused(method):
    with pytest.raises(InputError, match=rf"^mbr: .*'{method}' makes one; set it to 'sample'"):
        rule(method, [])


TEXTS = ["Monday, May 5, 2025", "3:05 PM", ""]


@pytest.mark.usefixtures("quickly_compiled")
def test_a_translator_chooses_among_its_own_samples(finished_run):
    translator = translate.load(finished_run, method="sample", seed=3)
    plain = translator(TEXTS)
    found = translator.mbr(TEXTS, samples=4)
    sampled = [[] for _ in TEXTS]
    sources = translator.run.encode(TEXTS)
    for s in range(4):
        numbers = [n + s * mbr.SAMPLE_STRIDE for n in range(3)]
        for own, text in zip(
            sampled, translator.translate_ids(sources, None, numbers), strict=True
        ):
            own.append(text)
    assert [own[0] for own in sampled] == plain and len({*sampled[0]}) > 1
    chrf = utility_of("chrf", bleu_tokenizer="13a")
    assert found == [mbr.best(own, chrf) for own in sampled] and found[2] == ""
    assert translator.mbr(TEXTS, samples=4, utility=lambda h, r: [-len(t) for t in h]) == [
        min(own, key=len) for own in sampled
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_the_command_writes_one_translation_of_each_line(
    finished_run, tmp_path, monkeypatch, capsys
):
    (tmp_path / "in").write_text("".join(f"{text}\n" for text in TEXTS))
    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process
    files = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}"]
    flags = ["--method=beam", "--beam_size=3", "--mbr=3", "--utility=bleu"]
    with pytest.raises(SystemExit) as ended:
        commands.main(["translate", f"--workdir={finished_run}", *files, *flags])
    assert ended.value.code == 0
    translator = translate.load(finished_run, method="beam", beam_size=3)
    expected = [
        mbr.best([text for text, _ in row], utility_of("bleu", bleu_tokenizer="13a"))
        for row in translator.n_best(TEXTS, 3)
    ]
    assert (tmp_path / "out").read_text().splitlines() == expected
    for flag, says in (
        ("--mbr=4", "n_best: expected 1 to 3"),
        ("--method=greedy", "mbr: chooses between several"),
        ("--utility=x", "utility: expected chrf, bleu or"),
    ):
        (tmp_path / "out").unlink(missing_ok=True)
        changed = [each for each in flags if not each.startswith(flag.split("=")[0])]
        changed = changed if flag != "--method=greedy" else ["--mbr=3"]
        with pytest.raises(SystemExit) as ended:
            commands.main(["translate", f"--workdir={finished_run}", *files, *changed, flag])
        assert ended.value.code == 2 and f"error: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--utility=bleu"], "--utility: requires --mbr"),
        (["--mbr=4", "--n_best=2"], "--mbr: writes one translation of a line, and --n_best"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(flags, says):
    with pytest.raises(InputError, match=f"^{says}"):
        run_flags.parse_translate(["--workdir=w", *flags])


def test_a_job_without_the_flags_has_the_settings_of_earlier_versions():
    plain = run_flags.parse_translate(["--workdir=w"]).settings
    assert plain.keys() == {"command", "--window", "--prefix", "--n_best", "--long"}
    given = run_flags.parse_translate(["--workdir=w", "--mbr=4", "--utility=bleu"]).settings
    assert given == plain | {"--mbr": 4, "--utility": "bleu"}
