"""Table 3 of the paper, scaled down: runs the sweep `table3`, and reads its report.

A sweep that was stopped goes on from where it was.

    python -m benchmarks.table3
"""

import argparse
import csv
import subprocess
import sys
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Runs the sweep and prints a line for each row of the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, default=figures.OUTPUT / "table3")
    figures.add_flag(parser)
    arguments, more = parser.parse_known_args()
    workdir = arguments.workdir.absolute()
    command = [sys.executable, "-m", "flaxformer_lite", "sweep", "--sweep=table3"]
    subprocess.run([*command, f"--workdir={workdir}", *more], cwd=ROOT, check=True)
    found = {}
    with (workdir / "report" / "results.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[f"{row['row']}; perplexity"] = float(row["perplexity"])
            found[f"{row['row']}; BLEU"] = float(row["bleu"])
            found[f"{row['row']}; parameters"] = float(row["parameters"]) / 1e3
            print(f"{row['row']:20} {float(row['perplexity']):8.2f} {float(row['bleu']):6.1f}")
    figures.write(arguments.json, found)


if __name__ == "__main__":
    main()
