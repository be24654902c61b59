"""Compares optimizers: runs the sweeps `optimizers` and `optimizers_seeds`, and reads their runs.

The first trains every optimizer at 4 learning rates with seed 0, the second the best rate of each
with seeds 1 and 2. With several jobs, each computes with one thread. Sweeps that were stopped go on
from where they were. Then a step of each optimizer is timed, with all threads.

    python -m benchmarks.optimizers --jobs=2
"""

import argparse
import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks import figures
from flaxformer_lite.config_files import find_config
from flaxformer_lite.plotting import plots
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.sweep import space
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.training import step as step_lib

ROOT = Path(__file__).parent.parent
SWEEPS = ("optimizers", "optimizers_seeds")


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run of one of the sweeps."""

    optimizer: str
    rate: float
    scores: dict[str, float]  # of validation: loss, exact match in percent, BLEU
    training_loss: dict[int, float]  # by step


def sweep(name: str, folder: Path, jobs: int, flags: Sequence[str]) -> None:
    """Runs a sweep, or its remaining runs."""
    command = [sys.executable, "-m", "flaxformer_lite", "sweep", f"--sweep={name}"]
    command += [f"--workdir={(folder / name).absolute()}", f"--jobs={jobs}", *flags]
    one_thread = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if jobs > 1 else {}
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | one_thread)


def runs_of(folder: Path) -> list[Run]:
    """Returns the finished runs of a sweep, in the order of its points."""
    sweep_folder, found = SweepFolder(folder), []
    for row in sweep_folder.rows():
        for result in row.runs:
            workdir = sweep_folder.point(row.number).workdir(result.seed)
            lines = metrics_log.read_metrics(workdir / "metrics.jsonl")
            lines = [line for line in lines if line["split"] == "train"]
            scores = {
                "loss": result.values["loss"],
                "exact match": 100 * result.values["exact_match"],
                "BLEU": result.values["bleu"],
            }
            curve = {line["step"]: line["loss"] for line in lines}
            names = ("optim.optimizer", "optim.learning_rate")
            found.append(Run(*(row.params[name] for name in names), scores, curve))
    return found


def figures_of(
    grid: Sequence[Run], more_seeds: Sequence[Run]
) -> tuple[dict[str, float | figures.Measured], dict[str, dict[int, list[float]]]]:
    """Returns the figures, and the training losses of the best rate of each optimizer."""
    found: dict[str, float | figures.Measured] = {}
    curves: dict[str, dict[int, list[float]]] = {}
    for run in grid:
        found |= {f"{run.optimizer} {run.rate:g}; {n}": x for n, x in run.scores.items()}
    for first in more_seeds:
        if first.optimizer in curves:
            continue
        chosen = [
            run
            for run in (*grid, *more_seeds)
            if (run.optimizer, run.rate) == (first.optimizer, first.rate)
        ]
        for name in first.scores:
            found[f"{first.optimizer}; {name}"] = figures.mean([r.scores[name] for r in chosen])
        curves[first.optimizer] = {
            step: [run.training_loss[step] for run in chosen] for step in first.training_loss
        }
    return found, curves


def step_times(file: Path, rounds: int) -> dict[str, figures.Measured]:
    """Returns the milliseconds of a training step of each point of a sweep, the median of rounds.

    The points take turns, so that other load on the machine affects all of them.
    """
    steps = {}
    for point in space.load(file).points or ():
        config = point.config
        model = dataclasses.replace(config.model, vocab_size=config.data.vocab_size)
        step, init = step_lib.of_config(dataclasses.replace(config, model=model))
        compiled, length = jax.jit(step), config.data.buckets[0]
        rows = config.data.tokens_per_batch // length
        shape, rng = (rows, length), np.random.default_rng(0)
        batch = {n: rng.integers(4, model.vocab_size, shape, "int32") for n in ("source", "target")}
        batch["row"] = np.arange(rows, dtype=np.int32)
        steps[config.optim.optimizer] = functools.partial(compiled, init(), batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # the first one compiles
        for name, run in steps.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            times[name] += [1000 * (time.perf_counter() - started)] if number else []
    return {f"{name}; ms": figures.middle(values) for name, values in times.items()}


def main() -> None:
    """Runs the sweeps, prints a line for each figure, and writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, default=figures.OUTPUT / "optimizers")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--rounds", type=int, default=25, help="repeats of each timed step")
    figures.add_flag(parser)
    arguments, more = parser.parse_known_args()
    for name in SWEEPS:
        sweep(name, arguments.workdir, arguments.jobs, more)
    found, curves = figures_of(*(runs_of(arguments.workdir / name) for name in SWEEPS))
    found |= step_times(find_config(SWEEPS[1], kind="sweeps"), arguments.rounds)
    figure = plots.scores_over_steps(curves, ylabel="training loss, nats a token")
    print(*plots.save(figure, arguments.workdir, "optimizers"))
    figures.write(arguments.json, found)
    for name, value in found.items():
        print(f"{name:35} {value['value'] if isinstance(value, dict) else value:10.3f}")


if __name__ == "__main__":
    main()
