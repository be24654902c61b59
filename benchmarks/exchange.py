"""Scores and speed of a trained run in this package and in CTranslate2, float32 and int8.

Both translate the same sentences, longest first, in batches of the same number of tokens, with the
same decoding method. Runs alternate. This package splits a batch over 2 CPU devices; CTranslate2
has 2 workers of 1 thread each.

    pip install -e '.[exchange]'
    python -m benchmarks.exchange --workdir=runs/multi30k_tok --beam_size=5 --alpha=1
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=2"
)  # before jax is imported

from benchmarks import figures
from flaxformer_lite import scoring, trained
from flaxformer_lite.data import pipeline
from flaxformer_lite.exchange import exports
from flaxformer_lite.system import runtime
from flaxformer_lite.translate import Translator

WORKERS = 2
# Seconds before a run: by then, idle threads of the other engine no longer spin.
PAUSE = 0.5


def in_ctranslate2(
    run: trained.Trained, workdir: Path, folder: Path, quantization: str
) -> Callable[[list[str]], list]:
    """Returns a function that translates texts with an export of the run."""
    import ctranslate2

    options = {"kind": "ctranslate2", "quantization": quantization, "license": None}
    exports.export(run, workdir, folder, **options)
    engine = ctranslate2.Translator(
        str(folder), compute_type=quantization, inter_threads=WORKERS, intra_threads=1
    )
    arguments = json.loads((folder / "decode.json").read_text())
    pieces = run.tokenizer.vocabulary_of("source")
    known = {piece: number for number, piece in enumerate(run.tokenizer.vocabulary_of("target"))}
    per_batch = run.config.decode.tokens_per_batch // arguments["beam_size"]

    def translate(texts: list[str]) -> list[str]:
        rows = [[pieces[i] for i in ids] for ids in run.encode(texts)]
        found = engine.translate_batch(
            rows, max_batch_size=per_batch, batch_type="tokens", **arguments
        )
        return run.tokenizer.decode(
            [[known[piece] for piece in result.hypotheses[0]] for result in found]
        )

    return translate


def main() -> None:
    """Prints a row for each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder of a translation run")
    parser.add_argument("--split", default="test", help="split to translate (default: test)")
    parser.add_argument("--beam_size", type=int, default=1, help="1: greedy (default)")
    parser.add_argument("--alpha", type=float, default=1.0, help="exponent of the length penalty")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each engine (default: 7)")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    runtime.start()
    decode = {"method": "greedy"}
    if arguments.beam_size > 1:
        decode = {
            "method": "beam",
            "beam_size": arguments.beam_size,
            "alpha": arguments.alpha,
            "penalty": "power",
        }
    run = trained.with_decode(trained.load(arguments.workdir), decode)
    dataset = pipeline.open_dataset(run.config)
    dataset.prepare()
    examples = dataset.part(arguments.split).read(
        getattr(run.config.data, f"{arguments.split}_split")
    )
    texts, references = list(examples.source), list(examples.target)
    with tempfile.TemporaryDirectory() as folder:
        engines = {"flaxformer_lite float32": Translator(run)}
        for quantization in ("float32", "int8"):
            name = f"CTranslate2 {quantization}"
            engines[name] = in_ctranslate2(
                run, arguments.workdir, Path(folder) / quantization, quantization
            )
        # The first run is a warm-up, in which this package compiles.
        translations = {name: translate(texts) for name, translate in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(arguments.repeats):
            for name, translate in engines.items():
                time.sleep(PAUSE)
                started = time.perf_counter()
                translate(texts)
                seconds[name].append(time.perf_counter() - started)
    tokenized, first = run.config.data.pretokenized, next(iter(translations.values()))
    tokens = sum(map(len, run.tokenizer.encode(first, side="target")))
    print(
        f"{len(texts):,} sentences of {arguments.split}, {decode}, {run.origin} of "
        f"{arguments.workdir}"
    )
    found = {}
    for name, hypotheses in translations.items():
        scores = scoring.score(hypotheses, [references], tokenized=tokenized).values
        bleu = next(value for metric, value in scores.items() if metric.startswith("bleu"))
        same = sum(ours == theirs for ours, theirs in zip(first, hypotheses, strict=True))
        middle, low, high = statistics.median(seconds[name]), min(seconds[name]), max(seconds[name])
        print(
            f"{name:<24} BLEU {bleu:6.3f}  {same:5,} as ours  {tokens / middle:8,.0f} tokens/s  "
            f"{middle:6.2f} s ({low:.2f} to {high:.2f})"
        )
        method = "greedy" if arguments.beam_size == 1 else f"beam {arguments.beam_size}"
        found[f"{name}, {method}, BLEU"] = bleu
        found[f"{name}, {method}, same"] = same
        rates = [tokens / each for each in seconds[name]]
        found[f"{name}, {method}, tokens a second"] = figures.middle(rates)
    figures.write(arguments.json, found)


if __name__ == "__main__":
    main()
