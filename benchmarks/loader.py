"""Cost of the data path: the plan of an epoch of synthetic pairs, and target tokens a second.

Lengths are sampled like those of sentences. Token ids are in a memory-mapped file, as those of a
tokenised split are. Batches come through `Batches` and grain's stream, as in training, in one
process without other work. The plan is made in its own process; its peak memory is printed without
that of its inputs.

With `--train`, trains a small run 2 times: the first start tokenises, the second does not. Prints
their times and the share in which steps waited for a batch. Other flags are those of `train.py`.

    python -m benchmarks.loader --pairs=10000000
    python -m benchmarks.loader --pairs=1000000 --packing
    python -m benchmarks.loader --train --config=default --config.data.subword_sampling=0.1
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks import figures
from flaxformer_lite.config import Config
from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens, fingerprint, stream
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.runs import metrics_log

ROOT = Path(__file__).parent.parent
VOCABULARY = 37000
DATA = Config().data


def lengths(pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens of each source and target: about 27 on average, with a long tail."""
    rng = np.random.default_rng(0)
    source_N = rng.lognormal(3.1, 0.6, pairs)
    return tuple(
        np.clip(x, 1, 255).astype(np.int64)
        for x in (source_N, source_N * rng.normal(1.02, 0.17, pairs))
    )


def make_plan(pairs: int, packing: bool) -> BatchPlan | PackedPlan:
    """Returns the plan of the base model's config."""
    sizes = dict(
        buckets=DATA.buckets,
        tokens_per_batch=DATA.tokens_per_batch,
        rows_multiple=DATA.rows_multiple,
    )
    return (PackedPlan if packing else BatchPlan)(*lengths(pairs), **sizes)


def mebibytes() -> float:
    """Returns the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        2**20 if sys.platform == "darwin" else 2**10
    )


def measure_plan(pairs: int, packing: bool) -> dict[str, float]:
    """Prints and returns the time and the memory of a plan and of its first epochs."""
    lengths(pairs)
    before, started = mebibytes(), time.perf_counter()
    plan = make_plan(pairs, packing)
    made = time.perf_counter()
    plan.batch(0)
    planned = time.perf_counter()
    plan.batch(plan.steps_per_epoch)
    following = time.perf_counter()
    shares = plan.padding_shares()
    padding = " and ".join(f"{share:.1%}" for share in shares)
    print(
        f"plan of {pairs:,} pairs: {made - started:.1f} s with sampled lengths, an epoch's order "
        f"{planned - made:.1f} s, the next one's {following - planned:.1f} s; peak "
        f"{mebibytes():,.0f} MiB, "
        f"{mebibytes() - before:,.0f} more than drawing the lengths; {plan.steps_per_epoch:,} "
        "steps an epoch, padding "
        f"{padding} of source and target"
    )
    return {
        "plan, s": made - started,
        "order, s": planned - made,
        "peak, MiB": mebibytes(),
        "padding of sources, %": 100 * shares[0],
        "padding of targets, %": 100 * shares[1],
    }


def stored(length_N: np.ndarray, file: Path) -> Ragged:
    """Returns random ids of these lengths, mapped from `file`."""
    offsets = np.concatenate([[0], np.cumsum(length_N)])
    np.random.default_rng(1).integers(4, VOCABULARY, offsets[-1], np.uint16).tofile(file)
    return Ragged(np.asarray(np.memmap(file, np.uint16, "r")), offsets)


def measure_batches(pairs: int, packing: bool, steps: int, repeats: int) -> figures.Measured:
    """Prints and returns the target tokens a second; also prints the time of the fingerprint."""
    plan = make_plan(pairs, packing)
    with tempfile.TemporaryDirectory() as folder:
        sides = zip(lengths(pairs), ("source", "target"), strict=True)
        tokens = Tokens(*[stored(length_N, Path(folder) / name) for length_N, name in sides])
        started = time.perf_counter()
        fingerprint(tokens, plan)
        print(f"fingerprint of {pairs:,} pairs: {time.perf_counter() - started:.1f} s")
        rates = []
        for repeat in range(repeats):
            batches = Batches(tokens, plan, num_steps=(repeat + 1) * steps)
            started = time.perf_counter()
            count = sum(
                int((batch["target"] != 0).sum())
                for batch in stream(batches, dict, first_step=repeat * steps)
            )
            rates.append(count / (time.perf_counter() - started))
        print(
            f"batches: {statistics.median(rates):,.0f} target tokens a second "
            f"({min(rates):,.0f} to {max(rates):,.0f}), as many of the source beside them"
        )
    return figures.middle(rates)


def measure_training(flags: list[str], steps: int) -> None:
    """Trains for `steps`, 2 times; prints the times, and the share in which steps wait for data."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TFDS_DATA_DIR": f"{folder}/data"}
        run, again = Path(folder) / "run", Path(folder) / "again"
        flags = [*flags, f"--config.train.num_steps={steps}", f"--config.train.eval_every={steps}"]
        flags += ["--config.train.log_every=10", "--config.train.decode_examples=0"]
        for workdir in (run, again):
            command = [sys.executable, "train.py", *flags, f"--workdir={workdir}"]
            started = time.perf_counter()
            subprocess.run(command, cwd=ROOT, env=environment, check=True, stderr=subprocess.PIPE)
            waits = [
                r["data_wait"]
                for r in metrics_log.read_metrics(workdir / "metrics.jsonl")
                if r["split"] == "train"
            ]
            print(
                f"{steps} steps and the test split: {time.perf_counter() - started:.1f} s; "
                "waiting for data "
                f"{statistics.median(waits):.2%} of the time (median of {len(waits)} intervals "
                "of 10 steps, the worst "
                f"{max(waits):.2%}), ids {'tokenised' if workdir == run else 'found'}"
            )
            for model in run.glob("tokenizer.model"):  # for the second start
                again.mkdir(exist_ok=True)
                (again / model.name).write_bytes(model.read_bytes())


def main() -> None:
    """Measures the data path, or a run with --train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=1_000_000, help="pairs of the plan")
    parser.add_argument(
        "--stored-pairs",
        type=int,
        default=1_000_000,
        help="pairs with token ids, for batches",
    )
    parser.add_argument("--packing", action="store_true", help="pack several pairs into a row")
    parser.add_argument(
        "--steps", type=int, default=200, help="batches of a timed stream, or steps with --train"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed streams")
    parser.add_argument(
        "--train",
        action="store_true",
        help="measure a run; other flags are those of train.py",
    )
    figures.add_flag(parser)
    arguments, flags = parser.parse_known_args()
    if arguments.train:
        return measure_training(flags, arguments.steps)
    if flags:
        parser.error(f"unknown: {' '.join(flags)}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        found = process.submit(measure_plan, arguments.pairs, arguments.packing).result()
    found["target tokens a second"] = measure_batches(
        arguments.stored_pairs, arguments.packing, arguments.steps, arguments.repeats
    )
    rows = "packed" if arguments.packing else "buckets"
    figures.write(arguments.json, {f"{rows}, {name}": figure for name, figure in found.items()})


if __name__ == "__main__":
    main()
