"""The common output of all benchmarks: `--json=FILE` writes the figures that the tables show.

Runs and plots are written below OUTPUT, never over files of the repository.

figures.add_flag(parser)
figures.write(arguments.json, {"greedy seconds": figures.middle(seconds), "bleu": 40.2})
"""

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUTPUT_VARIABLE = "BENCHMARKS_OUTPUT"  # set by `python -m benchmarks NAME`
OUTPUT = Path(os.environ.get(OUTPUT_VARIABLE, "runs"))
Measured = dict[str, Any]  # value, low, high, n


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--json=FILE` to the flags of a benchmark."""
    parser.add_argument("--json", type=Path, help="also write the figures to this file, as JSON")


def middle(values: Sequence[float]) -> Measured:
    """Returns the median of repeated timings, with the lowest and the highest."""
    return _measured(statistics.median(values), values)


def mean(values: Sequence[float]) -> Measured:
    """Returns the mean of several seeds, with the lowest and the highest."""
    return _measured(statistics.fmean(values), values)


def _measured(value: float, values: Sequence[float]) -> Measured:
    numbers = {"value": value, "low": min(values), "high": max(values)}
    return {name: float(f"{x:.10g}") for name, x in numbers.items()} | {"n": len(values)}


def write(path: Path | None, figures: Mapping[str, float | Measured]) -> None:
    """Writes the figures if a file is given; a number is a figure of one measurement."""
    if path is None:
        return
    full = {
        name: figure if isinstance(figure, Mapping) else mean([figure])
        for name, figure in figures.items()
    }
    path.write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
