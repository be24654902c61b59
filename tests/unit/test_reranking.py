"""Reranking of n-best lists, in Python and by the command."""

import re
import sys

import pytest

from flaxformer_lite.cli import commands
from flaxformer_lite.scores.reranking import rerank
from flaxformer_lite.system.errors import InputError

N_BEST = ["1\t-0.5\ta b", "1\t-0.75\ta\tc", "1\t-3.0\td", "2\t0.0\t", "3\t-1.0\te", "3\t-1.5\tf"]
OTHER = [0.25, 0.75, 4.0, 0.0, 1.0, 1.5]


def test_the_highest_weighted_sum_wins_and_of_equal_ones_the_first():
    assert rerank(N_BEST) == ["a b", "", "e"]
    assert rerank(N_BEST, [OTHER]) == ["d", "", "e"]  # sums of line 3: 0 and 0
    assert rerank(N_BEST, [OTHER], [1, 0.5]) == ["a b", "", "e"]  # -0.375, -0.375 and -1
    assert rerank(N_BEST, [OTHER], [1, 0.625]) == ["a\tc", "", "e"]  # -0.34, -0.28 and -0.5
    assert rerank(N_BEST, [OTHER, OTHER], [0, 1, -0.5]) == ["d", "", "f"]
    assert rerank([]) == []


@pytest.mark.parametrize(
    ("n_best", "scores", "weights", "says"),
    [
        (["1\t0.5"], [], None, "the n-best list, line 1: expected the number of an input line, a"),
        (["a\t0.5\tb"], [], None, "the n-best list, line 1: expected the number of an input line"),
        (["1\tnan\tb"], [], None, "the n-best list, line 1: expected the number of an input line"),
        (["0\t1\ta"], [], None, "the n-best list, line 1: .* input line 0 or 1, got one of 0"),
        ([*N_BEST[:1], *N_BEST[4:]], [], None, "line 2: .* input line 1 or 2, got one of 3"),
        ([*N_BEST[3:], N_BEST[0]], [], None, "line 1: .* input line 0 or 1, got one of 2"),
        (N_BEST, [OTHER[1:]], None, "scores 1: expected 6 numbers, .* got 5"),
        (N_BEST, [OTHER], [1], "weights: expected 2, .* got 1"),
    ],
)
def test_lists_that_do_not_belong_together_are_refused(n_best, scores, weights, says):
    with pytest.raises(InputError) as caught:
        rerank(n_best, scores, weights)
    assert re.search(says, str(caught.value))


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Returns a function that runs `rerank` in a folder with files; output, or error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "exit_now", sys.exit)  # the real one ends the process
    for name, lines in (("n", N_BEST), ("s", OTHER), ("bad", ["x"] * 6), ("few", OTHER[1:])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(["rerank", *arguments])
        out, err = capfd.readouterr()
        assert (ended.value.code == 0) == (not err), err
        return err or out

    return run


def test_the_command_writes_the_best_translation_of_each_line(command, tmp_path):
    assert command("--n_best=n", "--scores=s") == "d\n\ne\n"
    assert command("--n_best=n", "--scores=s,s", "--weights=0,1,-0.5", "--output=o") == ""
    assert (tmp_path / "o").read_text() == "d\n\nf\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--scores=s", "--n_best: expected a file of n-best lists, got nothing"),
        ("--n_best=n", "--scores: expected files, S1,S2 and so on, got ''"),
        ("--n_best=n --scores=s --weights=1", "--weights: expected 2 numbers, .* got '1'"),
        ("--n_best=n --scores=s --weights=1,x", "--weights: expected 2 numbers, .* got '1,x'"),
        ("--n_best=n --scores=none", "--scores=none: cannot be read"),
        ("--n_best=n --scores=few", "--scores=few: expected 6 lines, as many as --n_best has"),
        ("--n_best=n --scores=bad", "--scores=bad, line 1: expected a number, got 'x'"),
        ("--n_best=s --scores=s", "the n-best list, line 1: expected the number of an input line"),
    ],
)
def test_files_that_cannot_be_used_are_refused(command, flags, says):
    assert re.match(f"error: {says}", command(*flags.split()))
