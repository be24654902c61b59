"""Speed of scoring given texts, against evaluation and decoding of the same sentences.

Random weights at the size of the paper's base model, float32, one CPU device; sentences of 20
source tokens and 32 target tokens, the end symbol included. Scoring returns a log-probability for
each token, evaluation the sum of the loss, greedy decoding 32 new tokens a sentence. The tasks
alternate, so that other load on the machine affects all of them.

    python -m benchmarks.rescore
"""

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import figures

V, SOURCE, TARGET = 16_000, 20, 32
END = 2


def tasks(sentences: int) -> dict[str, Callable[[], object]]:
    """Returns the functions to time: each processes all sentences once, in one batch."""
    os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    from flaxformer_lite.system import runtime

    runtime.start()
    import jax

    from flaxformer_lite.config import DecodeConfig, ModelConfig
    from flaxformer_lite.data.tokens.tokenizer import pad_rows
    from flaxformer_lite.decoding.decoder import Decoder
    from flaxformer_lite.model import parameters
    from flaxformer_lite.model.transformer import build_model
    from flaxformer_lite.training import meshes, parallel, step
    from flaxformer_lite.training.token_scores import TokenScorer

    rng, model = np.random.default_rng(0), build_model(ModelConfig(vocab_size=V))
    sources = list(rng.integers(4, V, (sentences, SOURCE)).astype(np.int32))
    targets = list(rng.integers(4, V, (sentences, TARGET - 1)).astype(np.int32))
    labels = [np.append(ids, np.int32(END)) for ids in targets]
    mode = parallel.MeshMode(meshes.make_mesh(1))
    params = mode.make_state(lambda: model.init(jax.random.key(0), *_first(sources))["params"])
    scorer = TokenScorer(model, mode.mesh, tokens_per_batch=sentences * TARGET)
    batch = {
        "source": pad_rows(sources, TARGET),
        "target": pad_rows(targets, TARGET),
        "row": np.arange(sentences, dtype=np.int32),
    }
    struct = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    eval_step = functools.partial(
        step.eval_step, model=model, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    evaluate = mode.compile(eval_step, parameters.shapes(model), struct, donate=False)
    sharding, length = parallel.decoding_shardings(mode.mesh), TARGET - SOURCE - 1

    def decoder(**method: Any) -> Callable[[], object]:
        config = DecodeConfig(min_length=TARGET, max_extra_length=length, **method)
        decode = Decoder(model, config, rows=sentences, sharding=sharding)
        return lambda: decode(params, sources)

    return {
        "rescoring": lambda: scorer(params, labels, sources=sources),
        "evaluation": lambda: mode.read(evaluate(params, mode.put_batch(batch))),
        "greedy decoding": decoder(method="greedy"),
        "decoding with beam 5": decoder(method="beam", beam_size=5),
    }


def _first(sources: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return sources[0][None], sources[0][None]


def main() -> None:
    """Prints median and range of each task, tokens a second, and the speed of rescoring by it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each task")
    parser.add_argument("--sentences", type=int, default=64, help="sentences of the batch")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    run, tokens = tasks(arguments.sentences), arguments.sentences * TARGET
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for repeat in range(arguments.repeats + 1):  # the first one compiles
        for name, task in run.items():
            started = time.perf_counter()
            task()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print("| task | seconds: median (spread) | target tokens a second | rescoring is faster by |")
    print("| --- | --- | ---: | ---: |")
    for name, times in seconds.items():
        print(
            f"| {name} | {median[name]:.2f} ({min(times):.2f} to {max(times):.2f}) | "
            f"{tokens / median[name]:,.0f} | {median[name] / median['rescoring']:.2f} |"
        )
    figures.write(arguments.json, {name: figures.middle(times) for name, times in seconds.items()})


if __name__ == "__main__":
    main()
