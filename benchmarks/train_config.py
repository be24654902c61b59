"""Trains a config with several seeds, and scores the best checkpoint of each.

Figures are the mean over the seeds: the metrics of the closing evaluation of the test split, those
of the best evaluation of the validation split, and the minutes of a run. Finished runs are not
trained again, so an interrupted command can be started again.

    python -m benchmarks.train_config --config=default --seeds 0 1 2
    python -m benchmarks.train_config --config=multi30k_tok --devices=2 --ensemble
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parent.parent
PERCENT = ("exact_match", "accuracy")  # are shares in metrics.jsonl
ONE_THREAD_A_DEVICE = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count={}"


def train(config: str, seed: int, folder: Path, more: Sequence[str]) -> Path:
    """Trains a run if it is not finished, and returns its workdir."""
    workdir = folder.absolute() / f"seed{seed}"
    flags = [f"--config={config}", f"--workdir={workdir}", f"--config.train.seed={seed}", *more]
    subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, check=True)
    return workdir


def scores_of(workdir: Path) -> dict[str, float]:
    """Returns 'test bleu', 'validation loss' and so on, shares in percent, and 'minutes'."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    test = next(line for line in reversed(lines) if line["split"] == "test")
    validation = [line for line in lines if line["split"] == "validation"]
    best = next((line for line in reversed(validation) if line["step"] == test["step"]), {})
    found = {"minutes": lines[-1]["seconds"] / 60}
    for split, line in (("test", test), ("validation", best)):
        found |= {f"{split} {name}": value for name, value in named(line).items()}
    for line in validation:
        at = f", step {line['step']}"
        found |= {f"validation {name}{at}": value for name, value in named(line).items()}
    return found


def named(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns the scores among `metrics`, with 'exact_match/date' as 'exact_match date'."""
    left_out = ("step", "split", "seconds")
    return {
        name.replace("/", " "): value * (100 if name.split("/")[0] in PERCENT else 1)
        for name, value in metrics.items()
        if name not in left_out and isinstance(value, int | float)
    }


def over_seeds(runs: Mapping[int, Mapping[str, float]]) -> dict[str, float | figures.Measured]:
    """Returns each score of the first run: its mean over the seeds that have it, and theirs."""
    found: dict[str, float | figures.Measured] = {}
    for name in next(iter(runs.values())):
        value_of = {seed: scores[name] for seed, scores in runs.items() if name in scores}
        found[name] = figures.mean(list(value_of.values()))
        found |= {f"{name}, seed {seed}": value for seed, value in value_of.items()}
    return found


def evaluated(workdir: Path, split: str, flags: Sequence[str]) -> dict[str, float]:
    """Returns the scores of `flaxformer-lite evaluate` with more flags."""
    output = workdir / "benchmark" / "-".join([split, *flags]).replace("/", "_")
    command = [sys.executable, "-m", "flaxformer_lite", "evaluate", f"--workdir={workdir}"]
    command += [f"--split={split}", f"--output={output}", *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (scores,) = output.glob("*.scores.json")
    found = named(json.loads(scores.read_text())["scores"])
    return {f"{split} {name}": value for name, value in found.items()}


def main() -> None:
    """Trains the seeds, and prints a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="default", help="name of a config, or a file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="values of train.seed")
    parser.add_argument("--devices", type=int, help="CPU devices; default: 1 with all threads")
    parser.add_argument("--beam", action="store_true", help="also score beam 5, alpha 1, on test")
    parser.add_argument(
        "--ensemble", action="store_true", help="also score the last 2 seeds as one"
    )
    parser.add_argument("--output", type=Path, help="folder of the runs; default: runs/CONFIG")
    figures.add_flag(parser)
    arguments, more = parser.parse_known_args()
    if arguments.devices:
        os.environ["XLA_FLAGS"] = ONE_THREAD_A_DEVICE.format(arguments.devices)
    folder = arguments.output or figures.OUTPUT / Path(arguments.config).stem
    start = functools.partial(train, arguments.config, folder=folder, more=more)
    workdirs = [start(seed) for seed in arguments.seeds]
    runs = map(scores_of, workdirs)
    found = over_seeds(dict(zip(arguments.seeds, runs, strict=True)))
    if arguments.beam:
        flags = ["--method=beam", "--beam_size=5", "--alpha=1"]
        beam = [evaluated(workdir, "test", flags) for workdir in workdirs]
        found |= {f"{n}, beam 5": figures.mean([each[n] for each in beam]) for n in beam[0]}
    if arguments.ensemble:
        first, second = workdirs[-2:]
        for split in ("validation", "test"):
            scores = evaluated(first, split, [f"--ensemble={second}"])
            found |= {f"{name}, ensemble": value for name, value in scores.items()}
    figures.write(arguments.json, found)
    for name, figure in found.items():
        value = figure["value"] if isinstance(figure, dict) else figure
        print(f"{name:40} {value:.4f}")


if __name__ == "__main__":
    main()
