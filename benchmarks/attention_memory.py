"""Memory and time of attention's value and gradients as texts get longer: the reference and blocks. One row, causal.

Each point is a process of its own. Compiler: what the compiled program reserves besides inputs and outputs. Peak: the
most memory the process ever held, Python and JAX included. Time: the median of the repeats, and their spread. A point
over the memory limit is not run.

    python benchmarks/attention_memory.py --longest=16384
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

from flaxformer_lite.model import backends
from flaxformer_lite.model.attention import dot_product_attention
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

HEADS, D_HEAD = 8, 64
NAMES = ("reference", "blockwise")


def loss(query_BTHK: jax.Array, key_BSHK: jax.Array, value_BSHK: jax.Array, name: str) -> jax.Array:
    """The sum of what causal attention gives."""
    positions = TokenPositions.at(jnp.arange(query_BTHK.shape[1]))
    mask = AttentionMask(positions, positions, causal=True)
    if name == "reference":
        return dot_product_attention(query_BTHK, key_BSHK, value_BSHK, mask.array())[0].sum()
    return backends.attend(name, query_BTHK, key_BSHK, value_BSHK, mask).sum()


def measure(name: str, length: int, *, repeats: int, limit_bytes: float) -> dict:
    """The figures of one point, in bytes and seconds; without peak and seconds if it is over the limit."""
    numbers = np.random.default_rng(0).normal(size=(3, 1, length, HEADS, D_HEAD))
    inputs = [jnp.asarray(x, jnp.float32) for x in numbers]
    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    compiled = gradients.lower(*inputs, name).compile()
    point = {"compiler": compiled.memory_analysis().temp_size_in_bytes}
    if point["compiler"] > limit_bytes:
        return point
    seconds = []
    for _ in range(repeats + 1):  # the first, which also touches the memory, is not counted
        started = time.perf_counter()
        jax.block_until_ready(compiled(*inputs))
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return point | {"peak": peak * (1 if sys.platform == "darwin" else 1024), "seconds": seconds[1:]}


def table_row(name: str, length: int, point: dict) -> str:
    """One line of the table."""
    peak, times = "-", "-"
    if "seconds" in point:
        seconds = point["seconds"]
        peak = f"{point['peak'] / 2**20:,.0f}"
        times = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    return f"| {length:,} | {name} | {point['compiler'] / 2**20:,.0f} | {peak} | {times} |"


def main() -> None:
    """Prints the table, a point at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shortest", type=int, default=1024, help="tokens; doubled from here")
    parser.add_argument("--longest", type=int, default=16384, help="tokens, the longest that is measured")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each point")
    parser.add_argument("--memory-limit", type=float, default=8.0, help="GiB; points that need more are not run")
    parser.add_argument("--point", nargs=2, metavar=("NAME", "LENGTH"), help="measure this one alone, as JSON")
    arguments = parser.parse_args()
    if arguments.point:
        name, length = arguments.point[0], int(arguments.point[1])
        limit_bytes = arguments.memory_limit * 2**30
        print(json.dumps(measure(name, length, repeats=arguments.repeats, limit_bytes=limit_bytes)))
        return
    print("| tokens | attention | compiler, MiB | peak, MiB | seconds |\n| ---: | --- | ---: | ---: | ---: |")
    length = arguments.shortest
    while length <= arguments.longest:
        for name in NAMES:
            command = [sys.executable, __file__, *sys.argv[1:], "--point", name, str(length)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(table_row(name, length, json.loads(output)), flush=True)
        length *= 2


if __name__ == "__main__":
    main()
