"""Seconds from the command to the first finished training step, with cold and with warm caches.

Cold: empty folders for data and compiled steps. Warm: the folders of the run before. Every run has
a new workdir and is stopped after its first step.

    python -m benchmarks.first_step --config=default --repeats=5
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import figures

ROOT = Path(__file__).parent.parent


def seconds_to_first_step(config: str, caches: Path) -> float:
    """Starts a run with caches in `caches`, waits for its first step, and stops it."""
    folders = {"TFDS_DATA_DIR": caches / "data", "JAX_COMPILATION_CACHE_DIR": caches / "compiled"}
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    with tempfile.TemporaryDirectory() as workdir:
        flags = [f"--config={config}", f"--workdir={workdir}", "--config.train.log_every=1"]
        started = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "train.py", *flags],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        metrics = Path(workdir) / "metrics.jsonl"
        try:
            while not (metrics.exists() and b"\n" in metrics.read_bytes()):
                if run.poll() is not None:
                    raise RuntimeError(f"the run ended with {run.returncode}: {run.stderr.read()}")
                time.sleep(0.02)
            return time.monotonic() - started
        finally:
            run.send_signal(signal.SIGTERM)
            run.communicate()


def main() -> None:
    """Prints the median and the range of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="default", help="config file, or the name of a shipped one"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    times = {"cold": [], "warm": []}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as caches:
            for kind in times:  # cold fills the caches, warm finds them
                times[kind].append(seconds_to_first_step(arguments.config, Path(caches)))
    for kind, seconds in times.items():
        print(
            f"{kind}: median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to "
            f"{max(seconds):.1f} s"
        )
    figures.write(arguments.json, {kind: figures.middle(times[kind]) for kind in times})


if __name__ == "__main__":
    main()
