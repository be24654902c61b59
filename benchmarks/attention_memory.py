"""Memory and time of attention with gradients over the length, for the reference and `blockwise`.

The attention is causal, with one row. Each point runs in its own process.

Compiler: memory of the compiled step besides inputs and outputs. Peak: largest memory of the
process, Python and JAX included. Time: median of the repeats, and their range. A point over the
memory limit is not run.

    python -m benchmarks.attention_memory --longest=16384
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import figures, processes
from flaxformer_lite.model import backends
from flaxformer_lite.model.attention import dot_product_attention
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

HEADS, D_HEAD = 8, 64
NAMES = ("reference", "blockwise")


def loss(query_BTHK: jax.Array, key_BSHK: jax.Array, value_BSHK: jax.Array, name: str) -> jax.Array:
    """Returns the sum of the outputs of causal attention."""
    positions = TokenPositions.at(jnp.arange(query_BTHK.shape[1]))
    mask = AttentionMask(positions, positions, causal=True)
    if name == "reference":
        return dot_product_attention(query_BTHK, key_BSHK, value_BSHK, mask.array())[0].sum()
    return backends.attend(name, query_BTHK, key_BSHK, value_BSHK, mask).sum()


def measure(name: str, length: int, *, repeats: int, limit_bytes: float) -> dict:
    """Returns the figures of one point in bytes and seconds.

    A point over the limit has no peak and no seconds.
    """
    numbers = np.random.default_rng(0).normal(size=(3, 1, length, HEADS, D_HEAD))
    inputs = [jnp.asarray(x, jnp.float32) for x in numbers]
    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    compiled = gradients.lower(*inputs, name).compile()
    point = {"compiler": compiled.memory_analysis().temp_size_in_bytes}
    if point["compiler"] > limit_bytes:
        return point
    seconds = []
    for _ in range(repeats + 1):  # the first is a warm-up, which also touches new memory pages
        started = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return point | {
        "peak": peak * (1 if sys.platform == "darwin" else 1024),
        "seconds": seconds[1:],
    }


def table_row(name: str, length: int, point: dict) -> str:
    """Returns one line of the table."""
    peak, times = "-", "-"
    if "seconds" in point:
        seconds = point["seconds"]
        peak = f"{point['peak'] / 2**20:,.0f}"
        times = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    return f"| {length:,} | {name} | {point['compiler'] / 2**20:,.0f} | {peak} | {times} |"


def main() -> None:
    """Prints the table point by point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shortest", type=int, default=1024, help="shortest length in tokens; doubled from there"
    )
    parser.add_argument("--longest", type=int, default=16384, help="longest length in tokens")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each point")
    parser.add_argument(
        "--memory-limit", type=float, default=8.0, help="GiB; points that need more are not run"
    )
    parser.add_argument(
        "--point", nargs=2, metavar=("NAME", "LENGTH"), help="measure only this point; print JSON"
    )
    figures.add_flag(parser)
    arguments = parser.parse_args()
    if arguments.point:
        name, length = arguments.point[0], int(arguments.point[1])
        limit_bytes = arguments.memory_limit * 2**30
        print(json.dumps(measure(name, length, repeats=arguments.repeats, limit_bytes=limit_bytes)))
        return
    print(
        "| tokens | attention | compiler, MiB | peak, MiB | seconds |\n| ---: | --- | ---: | "
        "---: | ---: |"
    )
    length, found = arguments.shortest, {}
    while length <= arguments.longest:
        for name in NAMES:
            command = [sys.executable, "-m", "benchmarks.attention_memory", *sys.argv[1:]]
            command += ["--point", name, str(length)]
            done = subprocess.run(
                command, env=processes.environment(), check=True, stdout=subprocess.PIPE
            )
            point = json.loads(done.stdout)
            print(table_row(name, length, point), flush=True)
            found[f"{name} {length} MiB"] = point["compiler"] / 2**20
            if "seconds" in point:
                found[f"{name} {length} seconds"] = figures.middle(point["seconds"])
        length *= 2
    figures.write(arguments.json, found)


if __name__ == "__main__":
    main()
