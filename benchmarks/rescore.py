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
from collections.abc import Callable, Mapping
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
    """Prints median and range of each task, tokens a second, and how much faster rescoring is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each task")
    parser.add_argument("--sentences", type=int, nargs="+", default=[1, 8, 64], help="of a batch")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    found: dict[str, float | figures.Measured] = {}
    print("| sentences, task | seconds: median (spread) | target tokens a second | rescoring: x |")
    print("| --- | --- | ---: | ---: |")
    for sentences in arguments.sentences:
        seconds = timed(tasks(sentences), arguments.repeats)
        scoring = statistics.median(seconds["rescoring"])
        for name, times in seconds.items():
            median = statistics.median(times)
            print(
                f"| {sentences}, {name} | {median:.3f} ({min(times):.3f} to {max(times):.3f}) | "
                f"{sentences * TARGET / median:,.0f} | {median / scoring:.2f} |"
            )
            found[f"{sentences}, {name}"] = figures.middle(times)
            found[f"{sentences}, {name}, times rescoring"] = median / scoring
    figures.write(arguments.json, found)


def timed(run: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each task; the tasks alternate, after a run of each that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for repeat in range(repeats + 1):
        for name, task in run.items():
            started = time.perf_counter()
            task()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
