"""Scores of groups of runs, such as languages or position schemes, each over its seeds."""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import figures, train_config
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training import run_report

Groups = Mapping[str, Mapping[int, Mapping[str, float]]]  # by group, by seed, by name


def add_flags(parser: argparse.ArgumentParser, name: str, *, steps: int) -> None:
    """Adds `--seeds`, `--steps`, `--output` and `--json` to the flags of a benchmark.

    Args:
      name: of the default folder of the runs.
      steps: the default of `--steps`.
    """
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    parser.add_argument("--steps", type=int, default=steps, help="of each run")
    folder = figures.OUTPUT / name
    parser.add_argument("--output", type=Path, default=folder, help="folder of the runs")
    figures.add_flag(parser)


def table(groups: Groups, *, corner: str = "", digits: int = 1) -> str:
    """Returns a line for each group: the mean of each score over seeds, lowest and highest."""
    names = list(next(iter(next(iter(groups.values())).values())))
    rows = [[corner, *names]]
    for group, seeds in groups.items():
        columns = [[scores[name] for scores in seeds.values()] for name in names]
        cells = [
            f"{statistics.fmean(x):.{digits}f} ({min(x):.{digits}f}-{max(x):.{digits}f})"
            for x in columns
        ]
        rows.append([group, *cells])
    return run_report.columns(rows)


def figures_of(groups: Groups) -> dict[str, float | figures.Measured]:
    """Returns each score of each group: its mean over the seeds, and that of each seed."""
    return {
        f"{group}, {name}": value
        for group, seeds in groups.items()
        for name, value in train_config.over_seeds(seeds).items()
    }


def kept(file: Path, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Returns the scores stored in `file`; measures and stores them if there is no such file."""
    if not file.exists():
        write_whole(file, json.dumps(measure(), indent=1))
    scores: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return scores
