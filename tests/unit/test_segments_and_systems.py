"""Scores of each line, and the significance of differences between several systems."""

import collections
import json
import math
import sys

import numpy as np
import pytest

from flaxformer_lite import scoring
from flaxformer_lite.cli import commands
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError

REFERENCES = ["a b c d e", "the cat sat here", "x", "on a long mat"]
OTHERS = ["a b c d f", "one cat sat there", "y", "on the mat"]
HYPOTHESES = ["a b c d e", "the cat sat there", "y", "at"]


def sentence_bleu(hypothesis, references, smooth=1.0):
    """Papineni 2002 with n-grams up to the length, and zeros halved for each (Chen 2014, 3)."""
    tokens, texts = hypothesis.split(), [text.split() for text in references]
    logs = []
    for n in range(1, min(4, len(tokens)) + 1):
        grams = [
            collections.Counter(tuple(each[i : i + n]) for i in range(len(each) - n + 1))
            for each in (tokens, *texts)
        ]
        allowed = collections.Counter()
        for each in grams[1:]:
            allowed |= each
        hits, total = (grams[0] & allowed).total(), len(tokens) - n + 1
        if n == 1 and not hits:
            return 0.0
        if not hits:
            smooth *= 2
        logs.append(math.log((hits or 1 / smooth) / total))
    closest = min((abs(len(text) - len(tokens)), len(text)) for text in texts)[1]
    return 100 * min(1.0, math.exp(1 - closest / len(tokens))) * math.exp(np.mean(logs))


def sentence_chrf(hypothesis, references):
    """Popovic 2015: F2 of the mean precision and recall of character n-grams, 1 to 6."""

    def against(reference):
        shares = []
        for n in range(1, 7):
            ours, theirs = (
                collections.Counter(text[i : i + n] for i in range(len(text) - n + 1))
                for text in (hypothesis.replace(" ", ""), reference.replace(" ", ""))
            )
            if ours and theirs:
                hits = (ours & theirs).total()
                shares.append((hits / ours.total(), hits / theirs.total()))
        precision, recall = np.mean(shares, axis=0)
        return 500 * precision * recall / (4 * precision + recall) if precision + recall else 0.0

    return max(map(against, references))


@pytest.mark.parametrize("references", [[REFERENCES], [REFERENCES, OTHERS]])
def test_the_scores_of_each_line_follow_their_definitions(references):
    found = scoring.score_segments(HYPOTHESES, references)
    for row, hypothesis, *texts in zip(found, HYPOTHESES, *references, strict=True):
        assert row == {
            "exact_match": float(hypothesis in texts),
            "bleu": pytest.approx(sentence_bleu(hypothesis, texts)),
            "chrf": pytest.approx(sentence_chrf(hypothesis, texts)),
        }
    assert min(len({row[name] for row in found}) for name in ("bleu", "chrf")) > 2


def test_the_options_of_score_add_and_rename_the_scores_of_lines():
    rows = scoring.score_segments(
        ["A b"], [["a c"], ["a b c"]], tokenized=True, lowercase=True, symbols=True, ter=True
    )
    # Both references are 1 edit away, and the shorter one counts.
    assert rows == [
        {
            "exact_match": 0.0,
            "symbol_edits": 1,
            "reference_symbols": 2,
            "bleu_tokenized": pytest.approx(sentence_bleu("a b", ["a c", "a b c"])),
            "ter": pytest.approx(100 / 2.5),  # of the mean length
        }
    ]
    with pytest.raises(InputError, match=r"^the translations: expected a line"):
        scoring.score_segments([], [[]])


def test_sums_of_edits_over_lines_are_the_rate_of_the_corpus():
    rows = scoring.score_segments(HYPOTHESES, [REFERENCES], symbols=True)
    edits, symbols = (
        sum(row[name] for row in rows) for name in ("symbol_edits", "reference_symbols")
    )
    rate = scoring.score(HYPOTHESES, [REFERENCES], symbols=True).values["symbol_error_rate"]
    assert rate == pytest.approx(100 * edits / symbols) and symbols == 14


def shuffled(share, seed, count=101):
    """Returns references, and translations, a share of them in another order."""
    rng = np.random.default_rng(seed)
    references = [" ".join(rng.permutation(list("abcdefgh"))) for _ in range(count)]
    wrong = np.random.default_rng(seed + 1).permutation(count) < share * count
    texts = [
        " ".join(reversed(text.split())) if is_wrong else text
        for text, is_wrong in zip(references, wrong, strict=True)
    ]
    return texts, references


def test_each_system_is_tested_against_the_first_as_if_it_were_alone():
    (base, references), (better, _), (equal, _) = (shuffled(share, 3) for share in (0.6, 0.2, 0.6))
    base = [*base[7:], *base[:7]]  # another set of lines is wrong
    systems = [base, better, equal, base]
    found = scoring.resample(systems, [references], bootstrap=60, symbols=True)
    for system, scores in zip(systems[1:], found[1:], strict=True):
        assert (
            scores == scoring.resample([base, system], [references], bootstrap=60, symbols=True)[1]
        )
    assert found[0].p_values == found[0].bootstrap_p_values == {}
    for values in (found[1].p_values, found[1].bootstrap_p_values):
        assert max(values.values()) < 0.05
    names = set(found[1].p_values)
    assert names == {"exact_match", "symbol_error_rate", "sequence_error_rate", "bleu", "chrf"}
    assert found[3].bootstrap_p_values == found[3].p_values == dict.fromkeys(names, 1.0)


def test_the_paired_bootstrap_finds_too_many_differences_between_equal_systems(monkeypatch):
    # Only exact match, which is fast.
    monkeypatch.setattr(scoring, "corpus_metrics", lambda settings: {})
    rng, references = np.random.default_rng(3), ["x"] * 150
    sample = lambda: ["x" if hit else "y" for hit in rng.random(150) < 0.7]  # noqa: E731
    found = [
        scoring.resample([sample(), sample()], [references], bootstrap=200, seed=trial + 1)[1]
        for trial in range(500)
    ]
    share, bootstrap_share = (
        np.mean([values["exact_match"] < 0.05 for values in each])
        for each in zip(*((s.p_values, s.bootstrap_p_values) for s in found), strict=True)
    )
    assert share < 0.06 and 0.07 < bootstrap_share < 0.14


@pytest.fixture
def command(monkeypatch, capfd):
    """Returns a function that runs a command in this process: its output, or its error."""
    monkeypatch.setattr(runtime, "start", lambda: None)  # it would change this process
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(list(arguments))
        out, err = capfd.readouterr()
        assert (ended.value.code == 0) == (not err), err
        return out or err

    return run


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes three systems, and returns the flag of their references."""
    monkeypatch.chdir(tmp_path)
    texts = {"h1": HYPOTHESES, "h2": OTHERS, "b": REFERENCES[::-1], "ref": REFERENCES}
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return "--references=ref"


def test_score_compares_several_systems_with_the_baseline_in_one_table(command, files):
    printed = command("score", "--hypotheses=h1,h2", files, "--baseline=b", "--bootstrap=40")
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0][:2] == ["h1,", "h2,"]
    found = scoring.resample([REFERENCES[::-1], HYPOTHESES, OTHERS], [REFERENCES], bootstrap=40)
    for name in ("exact_match", "bleu", "chrf"):
        rows = [line for line in lines if line[0] == name]
        assert [row[1] for row in rows] == ["b", "h1", "h2"]
        assert [row[-2:] for row in rows[1:]] == [
            [f"{values[name]:.4f}" for values in (scores.p_values, scores.bootstrap_p_values)]
            for scores in found[1:]
        ]
    assert "(baseline)" in printed and "which is too low" in printed
    alone = command("score", "--hypotheses=h1", files)
    assert "which is too low" not in alone and "p," not in alone


def test_score_writes_the_scores_of_each_line_of_all_systems(command, files, tmp_path):
    flags = ("score", "--hypotheses=h1,h2", files, "--segments=lines.jsonl")
    printed = command(*flags, "--baseline=b", "--bootstrap=40", "--groups=length")
    assert printed.count("mean of ") == 2 and "lines.jsonl: scores of each line" in printed
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    of = lambda texts: scoring.score_segments(texts, [REFERENCES])  # noqa: E731
    assert rows == [
        {"line": number, "baseline": base, "scores": {"h1": first, "h2": second}}
        for number, (base, first, second) in enumerate(
            zip(of(REFERENCES[::-1]), of(HYPOTHESES), of(OTHERS), strict=True), start=1
        )
    ]
    command(*flags)
    (first, *_) = (tmp_path / "lines.jsonl").read_text().splitlines()
    assert json.loads(first).keys() == {"line", "scores"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--hypotheses=h1,h1", "--hypotheses: expected a file of each system, got h1 2 times"),
        ("--hypotheses=h1,", "--hypotheses: expected files, H1,H2 and so on, got 'h1,'"),
        ("--hypotheses=h1 --segments=-", "--segments: expected a file for the scores of each line"),
        (
            "--hypotheses=h1 --segments=h1",
            "--segments=h1: expected a new file, got one that is read",
        ),
        ("--hypotheses=h1 --segments=no/f", "--segments=no/f: cannot be written"),
    ],
)
def test_files_that_cannot_be_used_are_refused(command, files, flags, says):
    assert command("score", files, *flags.split()).startswith(f"error: {says}")
