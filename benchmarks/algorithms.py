"""Trains the config `benchmarks/algorithms` on copy, reverse, sort and addition, by length.

Training has 1 to 20 digits. The score is the exact match of whole targets, in %, of each test split
of `algorithms`: 10, 20, 25, 30 and 40 digits, 500 texts each, by greedy decoding with the last
parameters. With `--config.model.architecture=decoder_lm` the same pairs are one text of a language
model, 'source = target', and the prompt is 'source ='. Finished runs are not trained again, so an
interrupted command can be started again.

    python -m benchmarks.algorithms --tasks copy sort --positions sinusoidal rotary --seeds 0 1 2
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures, train_config
from flaxformer_lite import generate, scoring, trained, translate
from flaxformer_lite.config import CHOICES
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources.algorithms import TASKS, TEST_LENGTHS, Algorithms
from flaxformer_lite.runs import workdir as workdirs
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training import run_report

KEPT = "algorithms_scores.json"  # file of a workdir
Found = dict[str, dict[int, dict[str, float]]]  # scores of each seed, by task and scheme


def outputs_of(workdir: Path, split: str) -> tuple[list[str], list[str]]:
    """Returns the outputs of a finished run for a split, and the targets."""
    config = workdirs.read_config(workdir)
    examples = pipeline.open_dataset(config).read(split)
    assert examples.target is not None
    if examples.source is not None:
        return translate.load(workdir, method="greedy")(examples.source), examples.target
    prompts, targets = [], []
    for text in examples.target:
        source, separator, target = text.partition(Algorithms.SEPARATOR)
        prompts.append(source + separator.rstrip())
        targets.append(target)
    texts = generate.load(workdir, method="greedy")(prompts)
    return [
        text.removeprefix(prompt).strip() for text, prompt in zip(texts, prompts, strict=True)
    ], targets


def scores_of(workdir: Path) -> dict[str, float]:
    """Returns the figures of a finished run; stores them in the workdir for the next start."""
    kept = workdir / KEPT
    if not kept.exists():
        found = {}
        for length in TEST_LENGTHS:
            outputs, targets = outputs_of(workdir, f"test_{length}")
            found[str(length)] = 100 * float(scoring.exact_matches(outputs, [targets]).mean())
        found["minutes"] = train_config.scores_of(workdir)["minutes"]
        write_whole(kept, json.dumps(found, indent=1))
    scores: dict[str, float] = json.loads(kept.read_text(encoding="utf-8"))
    return scores


def table(found: Found) -> str:
    """Returns a line for each task and scheme: mean over seeds, lowest and highest."""
    names = [str(length) for length in TEST_LENGTHS]
    rows = [["exact match, %", *(f"{name} digits" for name in names)]]
    for name, seeds in found.items():
        columns = [[scores[each] for scores in seeds.values()] for each in names]
        rows.append([name, *(f"{sum(x) / len(x):.1f} ({min(x):.1f}-{max(x):.1f})" for x in columns)])
    return run_report.columns(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains missing runs, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    schemes = CHOICES["model.position"]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--positions", nargs="+", choices=schemes, default=schemes)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs")
    parser.add_argument("--steps", type=int, default=1500, help="of each run")
    parser.add_argument(
        "--output", type=Path, default=figures.OUTPUT / "algorithms", help="folder of the runs"
    )
    figures.add_flag(parser)
    options, more = parser.parse_known_args(arguments)
    found: Found = {}
    for task, scheme in itertools.product(options.tasks, options.positions):
        flags = [f"--config.data.dataset=algorithms/{task}", f"--config.model.position={scheme}"]
        flags += [f"--config.train.num_steps={options.steps}", *more]
        folder = options.output / f"{task}-{scheme}-{options.steps}"
        runs = found.setdefault(f"{task} {scheme}", {})
        for seed in options.seeds:
            seeded = [f"--config.data.seed={seed}", *flags]
            workdir = train_config.train("benchmarks/algorithms", seed, folder, seeded)
            runs[seed] = scores_of(workdir)
            print(f"{task} {scheme}, seed {seed}: {runs[seed]}", flush=True)
    print(table(found))
    figures.write(
        options.json,
        {
            f"{name}, {figure if figure == 'minutes' else figure + ' digits'}{rest}": value
            for name, seeds in found.items()
            for full, value in train_config.over_seeds(seeds).items()
            for figure, comma, seed in [full.partition(",")]
            for rest in [comma + seed]
        },
    )


if __name__ == "__main__":
    main()
