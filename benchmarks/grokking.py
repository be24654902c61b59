"""Trains the config `grokking` with several seeds, and without weight decay for comparison.

Figures of a run: the first step with a training accuracy of 99 % (the mean since the last line of
the log), the validation accuracy at that step, the first evaluation with a validation accuracy of
95 %, and the accuracy of the last evaluation. The picture has both accuracies over the steps.
Finished runs are not trained again, so an interrupted command can be started again.

    python -m benchmarks.grokking --seeds 0 1 2
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import figures, train_config
from flaxformer_lite.plotting import plots
from flaxformer_lite.runs import metrics_log

LEARNT, GENERALISES = 0.99, 0.95  # accuracies
WITHOUT_DECAY = ("--config.optim.weight_decay=0.0", "--config.optim.groups=()")
Curve = dict[int, float]  # step to accuracy


def accuracies(workdir: Path, split: str) -> Curve:
    """Returns the accuracy of each line of the log of a split, by its step."""
    lines = metrics_log.read_metrics(workdir / "metrics.jsonl")
    return {line["step"]: line["accuracy"] for line in lines if line["split"] == split}


def first_step(curve: Mapping[int, float], accuracy: float) -> int | None:
    """Returns the first step at which a curve is at least `accuracy`; None: it never is."""
    return next((step for step, value in sorted(curve.items()) if value >= accuracy), None)


def figures_of(train: Curve, validation: Curve) -> dict[str, float]:
    """Returns the figures of a run; a step that it does not reach is left out."""
    found = {"last validation accuracy": 100 * validation[max(validation)]}
    learnt = first_step(train, LEARNT)
    if learnt is not None:
        found["training at 99 %; step"] = learnt
        later = min((step for step in validation if step >= learnt), default=max(validation))
        found["validation accuracy then"] = 100 * validation[later]
    generalises = first_step(validation, GENERALISES)
    if generalises is not None:
        found["validation at 95 %; step"] = generalises
    return found


def curves_of(
    runs: Sequence[tuple[Curve, Curve]], ending: str = ""
) -> dict[str, dict[int, list[float]]]:
    """Returns the accuracies in percent at the steps of the evaluations, of all runs together."""
    table: dict[str, dict[int, list[float]]] = {}
    for split, number in (("training", 0), ("validation", 1)):
        steps = set.intersection(*({*train} & {*validation} for train, validation in runs))
        table[split + ending] = {
            step: [100 * run[number][step] for run in runs] for step in sorted(steps)
        }
    return table


def main() -> None:
    """Trains missing runs, prints a line for each figure, and writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    parser.add_argument(
        "--output", type=Path, default=figures.OUTPUT / "grokking", help="folder of the runs"
    )
    figures.add_flag(parser)
    arguments, more = parser.parse_known_args()

    def run(seed: int, folder: str, *flags: str) -> tuple[Curve, Curve, float]:
        flags = (f"--config.data.seed={seed}", *flags, *more)
        workdir = train_config.train("grokking", seed, arguments.output / folder, flags)
        minutes = train_config.scores_of(workdir)["minutes"]
        return accuracies(workdir, "train"), accuracies(workdir, "validation"), minutes

    runs = {seed: run(seed, "decay") for seed in arguments.seeds}
    *bare, _ = run(arguments.seeds[0], "without_decay", *WITHOUT_DECAY)
    of_seeds = {
        seed: figures_of(train, validation) | {"minutes": minutes}
        for seed, (train, validation, minutes) in runs.items()
    }
    found = train_config.over_seeds(of_seeds)
    found |= {f"{name}; no decay": value for name, value in figures_of(*bare).items()}
    curves = curves_of([(train, validation) for train, validation, _ in runs.values()])
    curves |= curves_of([tuple(bare)], ", no weight decay")
    figure = plots.scores_over_steps(curves, ylabel="accuracy, %", log_steps=True)
    print(*plots.save(figure, arguments.output, "grokking"))
    figures.write(arguments.json, found)
    for name, value in found.items():
        print(f"{name:45} {value['value'] if isinstance(value, dict) else value:.2f}")


if __name__ == "__main__":
    main()
