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
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import figures, groups, train_config
from flaxformer_lite import generate, scoring, translate
from flaxformer_lite.config import CHOICES
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources.algorithms import TASKS, TEST_LENGTHS, Algorithms
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.runs import workdir as workdirs

KEPT = "algorithms_scores.json"  # file of a workdir


def by_length(
    dataset: Dataset, decode: Callable[[list[str]], list[str]], separator: str | None = None
) -> dict[str, float]:
    """Returns the exact match of each test split, in %.

    Args:
      decode: returns the output for each source; with `separator`, the text for each prompt.
      separator: of source and target in the texts of a language model.
    """
    found = {}
    for length in TEST_LENGTHS:
        examples = dataset.read(f"test_{length}")
        assert examples.target is not None
        if separator is None:
            outputs, targets = decode(examples.source or []), examples.target
        else:
            pairs = [text.split(separator) for text in examples.target]
            prompts = [source + separator.rstrip() for source, _ in pairs]
            targets = [target for _, target in pairs]
            texts = zip(decode(prompts), prompts, strict=True)
            outputs = [text.removeprefix(prompt).strip() for text, prompt in texts]
        matches = scoring.exact_matches(outputs, [targets])
        found[f"{length} digits"] = 100 * float(matches.sum()) / len(targets)
    return found


def scores_of(workdir: Path) -> dict[str, float]:
    """Returns the figures of a finished run; stores them in the workdir for the next start."""

    def measure() -> dict[str, float]:
        config = workdirs.read_config(workdir)
        dataset = pipeline.open_dataset(config)
        if config.model.architecture == "encoder_decoder":
            found = by_length(dataset, translate.load(workdir, method="greedy"))
        else:
            generator = generate.load(workdir, method="greedy")
            found = by_length(dataset, generator, Algorithms.SEPARATOR)
        found["minutes"] = train_config.scores_of(workdir)["minutes"]
        return found

    return groups.kept(workdir / KEPT, measure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains missing runs, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    schemes = CHOICES["model.position"]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--positions", nargs="+", choices=schemes, default=schemes)
    groups.add_flags(parser, "algorithms", steps=1500)
    options, more = parser.parse_known_args(arguments)
    found: dict[str, dict[int, dict[str, float]]] = {}
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
    print(groups.table(found, corner="exact match, %"))
    figures.write(options.json, groups.figures_of(found))


if __name__ == "__main__":
    main()
