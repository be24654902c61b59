"""Effect of keeping freed memory on a CPU: time of a training step, and new memory pages.

Trains the default config on random batches in processes that return freed memory to the system
(give), that keep it in one heap for all threads (one heap, as with several devices), and that keep
it in the heap of the first thread (keep, as with one device). In the last case the first thread
runs the steps, in the others a thread of JAX. The compile time of the step is printed too, since
threads that share a heap wait for each other.

    python -m benchmarks.kept_memory --repeats=5
"""

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time

from benchmarks import figures, processes

STEPS = 20  # of the warm-up, and of the measurement
KINDS = {"give": 0, "one heap": 2, "keep": 1}  # devices for which memory is kept; 0: not kept


def measure(devices: int, config: str) -> dict[str, float]:
    """Returns seconds, system seconds and MiB of new pages a step; peak MiB; compile seconds."""
    from flaxformer_lite.system import runtime

    if devices:
        runtime.keep_memory(devices)
    import jax
    import numpy as np

    from flaxformer_lite.config import resolve, with_vocabulary
    from flaxformer_lite.config_files import find_config, load_config
    from flaxformer_lite.data.batches import loader
    from flaxformer_lite.model import transformer
    from flaxformer_lite.training import meshes, optim, parallel, step
    from flaxformer_lite.training import state as state_lib

    chosen = resolve(load_config(find_config(config)))
    chosen = with_vocabulary(chosen, chosen.data.vocab_size)
    model = transformer.build_model(chosen.model)
    optimizer = optim.make_optimizer(chosen.optim, d_model=chosen.model.d_model, num_steps=1000)
    state = jax.jit(functools.partial(state_lib.init_state, model, optimizer, seed=0))()
    struct = loader.batch_struct(chosen, *loader.possible_shapes(chosen)[0])
    ids = np.random.default_rng(0)
    batch = {
        name: ids.integers(4, chosen.data.vocab_size, x.shape, np.int32)
        for name, x in struct.items()
    }
    options = dict(model=model, optimizer=optimizer, label_smoothing=0.1)
    lowered = jax.jit(functools.partial(step.train_step, **options), donate_argnums=0).lower(
        state, batch
    )
    started = time.monotonic()
    train_step = lowered.compile(compiler_options=parallel.compiler_options(meshes.make_mesh(1)))
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
    """Prints the median and the range of each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="default", help="config file, or the name of a shipped one"
    )
    parser.add_argument("--repeats", type=int, default=5, help="processes of each kind")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    figures.add_flag(parser)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(KINDS[arguments.child], arguments.config)))
        return
    found = {kind: [] for kind in KINDS}
    for _ in range(arguments.repeats):
        for kind, runs in found.items():
            words = [sys.executable, "-m", "benchmarks.kept_memory"]
            words += [f"--config={arguments.config}", f"--child={kind}"]
            environment = processes.environment(JAX_PLATFORMS="cpu")
            runs.append(
                json.loads(
                    subprocess.run(words, env=environment, check=True, capture_output=True).stdout
                )
            )
    for kind, runs in found.items():
        parts = []
        for name in runs[0]:
            values = sorted(run[name] for run in runs)
            parts.append(
                f"{name} {statistics.median(values):.3g} ({values[0]:.3g} to {values[-1]:.3g})"
            )
        print(f"{kind}: {', '.join(parts)}")
    spread = {
        f"{kind}, {name}": figures.middle([run[name] for run in runs])
        for kind, runs in found.items()
        for name in runs[0]
    }
    figures.write(arguments.json, spread)


if __name__ == "__main__":
    main()
