"""The benchmarks of grokking and of optimizers: the figures of logged runs."""

import pytest

from benchmarks import grokking, optimizers
from benchmarks.optimizers import Run

LEARNT = {20: 0.5, 40: 0.992, 60: 1.0, 80: 1.0}


def test_the_figures_of_a_run_are_the_first_steps_above_each_accuracy():
    validation = {30: 0.0, 60: 0.25, 70: 0.96, 80: 1.0}
    assert grokking.figures_of(LEARNT, validation) == {
        "training at 99 %; step": 40,
        "validation accuracy then": 25.0,
        "validation at 95 %; step": 70,
        "last validation accuracy": 100.0,
    }


@pytest.mark.parametrize(
    ("train", "missing"),
    [
        (LEARNT, {"validation at 95 %; step"}),
        (
            {20: 0.5},
            {
                "validation at 95 %; step",
                "training at 99 %; step",
                "validation accuracy then",
            },
        ),
    ],
)
def test_a_step_that_a_run_does_not_reach_is_left_out(train, missing):
    found = grokking.figures_of(train, {40: 0.25})
    assert found["last validation accuracy"] == 25.0
    assert not missing & found.keys()
    assert len(found) == 4 - len(missing)


def test_the_curves_have_the_steps_that_both_splits_and_all_runs_have():
    runs = [(LEARNT, {40: 0.25, 60: 0.5}), ({40: 0.5, 60: 0.75}, {20: 0.0, 60: 0.75})]
    assert grokking.curves_of(runs, ", more") == {
        "training, more": {60: [100.0, 75.0]},
        "validation, more": {60: [50.0, 75.0]},
    }


def test_the_best_rate_has_the_mean_of_all_seeds_and_the_others_have_their_one_run():
    def run(rate, loss):
        return Run("lion", rate, {"loss": loss}, {10: 2 * loss})

    found, curves = optimizers.figures_of(
        [run(0.01, 3.0), run(0.03, 5.0)], [run(0.01, 4.0), run(0.01, 8.0)]
    )
    assert found["lion 0.01; loss"] == 3.0 and found["lion 0.03; loss"] == 5.0
    assert found["lion; loss"] == {"value": 5.0, "low": 3.0, "high": 8.0, "n": 3}
    assert curves == {"lion": {10: [6.0, 8.0, 16.0]}}
