"""Trains every position scheme on short phrases only, and scores each on longer ones.

The default task, cut at half of its longest length: the longest phrase has 30 tokens with its end
symbol, and training uses those of at most 15. Scores are those of held-out phrases (validation and
test split), by the length of the longer side. For comparison, 'all lengths' is the default scheme
trained on all lengths for the same number of steps. Finished runs are not trained again, so an
interrupted command can be started again.

    python -m benchmarks.position_lengths --seeds=3 --output=runs/position_lengths
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import figures
from flaxformer_lite import scoring, translate
from flaxformer_lite.config import CHOICES
from flaxformer_lite.data import pipeline
from flaxformer_lite.plotting import plots
from flaxformer_lite.runs import workdir
from flaxformer_lite.training import run_report

ROOT = Path(__file__).parent.parent
TRAINED_UP_TO, LONGEST = 15, 40  # tokens, the end symbol included
ALL_LENGTHS = "all lengths"
BINS = (8, 12, 15, 18, 21, 24, 30)  # the longest length of each bin


def train(scheme: str, seed: int, steps: int, folder: Path) -> Path:
    """Trains a run if it is not finished, and returns its workdir."""
    path = folder / f"{scheme.replace(' ', '_')}-{seed}"
    buckets = (8, 12, TRAINED_UP_TO, LONGEST) if scheme == ALL_LENGTHS else (8, 12, TRAINED_UP_TO)
    flags = {
        "model.position": "sinusoidal" if scheme == ALL_LENGTHS else scheme,
        "data.buckets": buckets,
        "data.seed": seed,
        "train.seed": seed,
        "train.num_steps": steps,
        "train.eval_every": steps,
        "train.decode_examples": 0,
        "optim.warmup_steps": steps // 8,
    }
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    subprocess.run(
        [sys.executable, "train.py", "--config=default", f"--workdir={path.absolute()}", *flags],
        cwd=ROOT,
        check=True,
    )
    return path


def score(path: Path) -> dict[int, dict[str, float]]:
    """Returns exact match, chrF and the number of phrases of each bin, by its longest length.

    Stores the scores in the workdir for the next start.
    """
    kept = path / "scores_by_length.json"
    if not kept.exists():
        translator = translate.load(path)
        run, dataset = translator.run, pipeline.open_dataset(translator.run.config)
        source, target = [], []
        for split in ("validation", "test"):
            examples = dataset.read(split)
            source, target = source + examples.source, target + examples.target
        hypotheses = translator(source)
        sides = [run.tokenizer.encode(side) for side in (source, target)]
        length_N = 1 + np.max([[len(ids) for ids in side] for side in sides], axis=0)
        scores = {}
        for low, high in zip((0, *BINS), BINS, strict=False):
            chosen = np.flatnonzero((length_N > low) & (length_N <= high))
            values = scoring.score(
                [hypotheses[i] for i in chosen], [[target[i] for i in chosen]]
            ).values
            scores[high] = {
                "exact_match": values["exact_match"],
                "chrf": values["chrf"],
                "phrases": len(chosen),
            }
        workdir.write_whole(kept, json.dumps(scores, indent=1))
    return {int(high): scores for high, scores in json.loads(kept.read_text()).items()}


def table(results: dict[str, list[dict[int, dict[str, float]]]], metric: str, scale: float) -> str:
    """Returns a line for each scheme: mean over seeds, lowest and highest, in each bin."""
    first = next(iter(results.values()))[0]
    heads = [
        f"{low + 1}-{high} ({first[high]['phrases']})"
        for low, high in zip((0, *BINS), BINS, strict=False)
    ]
    rows = [["tokens (phrases)", *heads]]
    for scheme, seeds in results.items():
        cells = []
        for high in BINS:
            values = [scale * scores[high][metric] for scores in seeds]
            cells.append(f"{statistics.mean(values):.1f} ({min(values):.1f}-{max(values):.1f})")
        rows.append([scheme, *cells])
    return run_report.columns(rows)


def main() -> None:
    """Trains missing runs, then prints the tables and writes the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="+", default=[*CHOICES["model.position"], ALL_LENGTHS])
    parser.add_argument("--seeds", type=int, default=3, help="runs of each scheme, seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=600, help="steps of each run")
    parser.add_argument(
        "--output",
        type=Path,
        default=figures.OUTPUT / "position_lengths",
        help="folder of the runs and the figure",
    )
    figures.add_flag(parser)
    arguments = parser.parse_args()
    results: dict[str, list] = {scheme: [] for scheme in arguments.schemes}
    for seed in range(arguments.seeds):
        for scheme in arguments.schemes:
            results[scheme].append(score(train(scheme, seed, arguments.steps, arguments.output)))
    for metric, scale, name in (("exact_match", 100, "Exact match, %"), ("chrf", 1, "chrF")):
        print(
            f"{name}, mean over {arguments.seeds} seeds "
            f"(lowest-highest)\n{table(results, metric, scale)}\n"
        )
    curves = {
        scheme: {high: [100 * scores[high]["exact_match"] for scores in seeds] for high in BINS}
        for scheme, seeds in results.items()
    }
    figure = plots.scores_over_length(curves, trained_up_to=TRAINED_UP_TO, ylabel="exact match, %")
    print(*plots.save(figure, arguments.output, "position_lengths"))
    spread = {
        f"{scheme} {low + 1}-{high}": figures.mean(values[high])
        for scheme, values in curves.items()
        for low, high in zip((0, *BINS), BINS, strict=False)
    }
    figures.write(arguments.json, spread)


if __name__ == "__main__":
    main()
