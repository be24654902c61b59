"""What it saves on a CPU that freed memory is kept: time of a training step, and pages that the system had to make.

Trains the default config on made-up batches in processes that give memory back, that keep it in one heap for all
threads, as with several devices, and that keep it in the first thread's heap, as with one: there that thread runs the
steps, in the others one of JAX's. How long the step compiles is told too, as threads that share a heap wait for each
other.

    python benchmarks/kept_memory.py --repeats=5
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import time

STEPS = 20


KINDS = {"give": 0, "one heap": 2, "keep": 1}  # how many devices memory is kept for; 0: it is not


def measure(devices: int, config: str) -> dict[str, float]:
    """Seconds of a step, CPU seconds of it in the system, MiB of fresh pages, and seconds in which it was compiled.

    After as many steps to warm up.
    """
    from flaxformer_lite.system import runtime

    if devices:
        runtime.keep_memory(devices)
    import jax
    import numpy as np

    from flaxformer_lite.config import resolve, with_vocabulary
    from flaxformer_lite.config_files import find_config, load_config
    from flaxformer_lite.data.batches import batch_shapes
    from flaxformer_lite.model import transformer
    from flaxformer_lite.training import optim, parallel, step
    from flaxformer_lite.training import state as state_lib

    chosen = resolve(load_config(find_config(config)))
    chosen = with_vocabulary(chosen, chosen.data.vocab_size)
    model = transformer.build_model(chosen.model)
    optimizer = optim.make_optimizer(chosen.optim, d_model=chosen.model.d_model, num_steps=1000)
    state = jax.jit(functools.partial(state_lib.init_state, model, optimizer, seed=0))()
    struct = batch_shapes.struct(chosen, *batch_shapes.possible(chosen)[0])
    ids = np.random.default_rng(0)
    batch = {name: ids.integers(4, chosen.data.vocab_size, x.shape, np.int32) for name, x in struct.items()}
    options = dict(model=model, optimizer=optimizer, label_smoothing=0.1)
    lowered = jax.jit(functools.partial(step.train_step, **options), donate_argnums=0).lower(state, batch)
    started = time.monotonic()
    train_step = lowered.compile(compiler_options=parallel.compiler_options(parallel.make_mesh(1)))
    compiled = time.monotonic() - started
    for number in range(2 * STEPS):
        if number == STEPS:
            started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        state, sums = train_step(state, batch)
        jax.block_until_ready(sums)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": (time.monotonic() - started) / STEPS,
        "system": (after.ru_stime - before.ru_stime) / STEPS,
        "fresh_mib": (after.ru_minflt - before.ru_minflt) * resource.getpagesize() / 2**20 / STEPS,
        "peak_mib": after.ru_maxrss / 1024,
        "compile": compiled,
    }


def main() -> None:
    """Prints the medians and the spread of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="default", help="a shipped config, or a file")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each kind")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(KINDS[arguments.child], arguments.config)))
        return
    found = {kind: [] for kind in KINDS}
    for _ in range(arguments.repeats):
        for kind, runs in found.items():
            words = [sys.executable, __file__, f"--config={arguments.config}", f"--child={kind}"]
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            runs.append(json.loads(subprocess.run(words, env=environment, check=True, capture_output=True).stdout))
    for kind, runs in found.items():
        parts = []
        for name in runs[0]:
            values = sorted(run[name] for run in runs)
            parts.append(f"{name} {statistics.median(values):.3g} ({values[0]:.3g} to {values[-1]:.3g})")
        print(f"{kind}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
