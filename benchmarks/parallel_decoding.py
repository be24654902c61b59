"""Quality and speed of a causal and of a masked decoder on the default task.

Both have the same sizes and data, and the number of steps of their configs, more for the masked
decoder. Quality is that of the validation split. Speed is in sentences a second over its first
phrases: the median of runs in which the methods alternate, after a warm-up run each. Finished runs
are not trained again, so an interrupted command can be started again.

    python -m benchmarks.parallel_decoding --output=runs/parallel_decoding
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import figures
from flaxformer_lite import config_files, scoring, translate
from flaxformer_lite.data import pipeline
from flaxformer_lite.system import runtime
from flaxformer_lite.training import run_report

ROOT = Path(__file__).parent.parent
CONFIGS = {"causal": "default", "masked": "mask_predict"}
# Name, decoder, fields of DecodeConfig.
METHODS = [
    ("greedy", "causal", {"method": "greedy"}),
    ("beam 4", "causal", {"method": "beam", "beam_size": 4}),
    *(
        (
            f"mask-predict, {C} length{'s' if C > 1 else ''}, {T} iteration{'s' if T > 1 else ''}",
            "masked",
            options,
        )
        for C, T in [(1, 1), (1, 4), (1, 10), (5, 4), (5, 10)]
        for options in [{"method": "mask_predict", "length_candidates": C, "iterations": T}]
    ),
]


def train(decoder: str, steps: int | None, seed: int, folder: Path) -> Path:
    """Trains a run if it is not finished, and returns its workdir."""
    config_file = ROOT / "configs" / f"{CONFIGS[decoder]}.py"
    steps = steps or config_files.load_config(config_file).train.num_steps
    path = folder / f"{decoder}-{steps}-{seed}"
    flags = {
        "data.seed": seed,
        "train.seed": seed,
        "train.num_steps": steps,
        "train.eval_every": steps,
        "train.decode_examples": 0,
        "optim.warmup_steps": max(1, steps // 8),
    }
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    command = [
        sys.executable,
        "train.py",
        f"--config={CONFIGS[decoder]}",
        f"--workdir={path.absolute()}",
        *flags,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return path


def timed(
    translators: Sequence[translate.Translator], texts: Sequence[str], repeats: int
) -> list[list[float]]:
    """Returns sentences a second of each run; translators alternate, after a warm-up run each."""
    rates = [[] for _ in translators]
    for repeat in range(repeats + 1):
        for translator, rates_of_one in zip(translators, rates, strict=True):
            started = time.perf_counter()
            translator(texts)
            if repeat:
                rates_of_one.append(len(texts) / (time.perf_counter() - started))
    return rates


def main() -> None:
    """Trains missing runs, then prints a table with a line for each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="steps of each run; default: those of its config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each method")
    parser.add_argument("--sentences", type=int, default=512, help="phrases of each timed run")
    parser.add_argument("--scored", type=int, help="validation phrases to score; default: all")
    parser.add_argument(
        "--output",
        type=Path,
        default=figures.OUTPUT / "parallel_decoding",
        help="folder of the runs",
    )
    figures.add_flag(parser)
    arguments = parser.parse_args()
    runtime.start()
    workdirs = {
        name: train(name, arguments.steps, arguments.seed, arguments.output) for name in CONFIGS
    }
    translators = [translate.load(workdirs[decoder], **fields) for _, decoder, fields in METHODS]
    config = translators[0].run.config
    examples = pipeline.open_dataset(config).read(config.data.validation_split)
    source, target = examples.source[: arguments.scored], examples.target[: arguments.scored]
    found = [scoring.score(translator(source), [target]) for translator in translators]
    rates = timed(translators, examples.source[: arguments.sentences], arguments.repeats)
    rows = [
        [
            "method",
            "exact match, %",
            "BLEU",
            "sentences a second: median (lowest-highest)",
            "times greedy",
        ]
    ]
    measured = {}
    for (name, _, _), scores, rate in zip(METHODS, found, rates, strict=True):
        measured[f"{name}; exact match"] = 100 * scores.values["exact_match"]
        measured[f"{name}; BLEU"] = scores.values["bleu"]
        measured[f"{name}; sentences a second"] = figures.middle(rate)
        median = statistics.median(rate)
        spread = f"{median:,.0f} ({min(rate):,.0f}-{max(rate):,.0f})"
        quality = [f"{100 * scores.values['exact_match']:.1f}", f"{scores.values['bleu']:.2f}"]
        rows.append([name, *quality, spread, f"{median / statistics.median(rates[0]):.2f}"])
    print(
        f"{', '.join(path.name for path in workdirs.values())}; {len(source):,} validation phrases"
    )
    print(run_report.columns(rows))
    print(f"BLEU: {found[0].signatures['bleu']}")
    figures.write(arguments.json, measured)


if __name__ == "__main__":
    main()
