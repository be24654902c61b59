"""Decoding speed at the size of the paper's base model, against Marian and CTranslate2.

Random weights, float32, 32 sentences of 20 source tokens, exactly 32 new tokens each, greedy and
with a beam of 4. Each engine has its own process, configured as its documentation recommends. The
engines alternate, so that other load on the machine affects all of them. This package runs on one
CPU device, and on several that share the sentences or the model (`tensor`). CTranslate2 has a
worker for each thread, with its share of the sentences; Marian (in Transformers) uses all threads.

    pip install -e '.[bench]' && python -m benchmarks.decode
    python -m benchmarks.decode --only=ours --devices=1
"""

import argparse
import contextlib
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks import figures

# Seconds before a run: by then, idle threads of another engine no longer spin.
PAUSE = 0.5
V, SENTENCES, SOURCE, NEW, BEAM = 16_000, 32, 20, 32, 4
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# number of beams (1: greedy) -> a function that decodes all sentences and returns the token count
Engine = dict[int, Callable[[], int]]


def sources() -> np.ndarray:
    """Returns the ids of all sentences, (SENTENCES, SOURCE), without special symbols."""
    return np.random.default_rng(0).integers(4, V - 1, size=(SENTENCES, SOURCE)).astype(np.int32)


def ours(data: int, tensor: int) -> Engine:
    """This package, on `data` groups of `tensor` CPU devices that share a model."""
    os.environ["JAX_NUM_CPU_DEVICES"] = str(data * tensor)
    from flaxformer_lite.system import runtime

    runtime.start()
    import jax

    from flaxformer_lite.config import DecodeConfig, ModelConfig
    from flaxformer_lite.decoding.decoder import Decoder
    from flaxformer_lite.model.transformer import build_model
    from flaxformer_lite.training import meshes, parallel

    model, ids = build_model(ModelConfig(vocab_size=V)), sources()
    mesh = meshes.make_mesh(data, tensor=tensor)
    init = lambda: model.init(jax.random.key(0), ids[:1], ids[:1])["params"]  # noqa: E731
    params = parallel.MeshMode(mesh).make_state(init)

    def decode(beams: int) -> Callable[[], int]:
        method = {"method": "beam", "beam_size": beams} if beams > 1 else {"method": "greedy"}
        config = DecodeConfig(min_length=NEW, max_extra_length=NEW - SOURCE - 1, **method)
        decoder = Decoder(model, config, rows=len(ids), sharding=parallel.decoding_shardings(mesh))
        return lambda: sum(len(row) for row in decoder(params, list(ids)))

    return {beams: decode(beams) for beams in (1, BEAM)}


def marian(folder: Path) -> Engine:
    """`MarianMTModel.generate` with random weights of the same shape, also saved in `folder`."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    shape = {
        "d_model": 512,
        "max_position_embeddings": 256,
        "activation_function": "relu",
        "scale_embedding": True,
    }
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": 6, f"{side}_attention_heads": 8, f"{side}_ffn_dim": 2048}
    symbols = {
        "eos_token_id": 0,
        "pad_token_id": V - 1,
        "decoder_start_token_id": V - 1,
        "forced_eos_token_id": None,
    }
    model = MarianMTModel(
        MarianConfig(vocab_size=V, tie_word_embeddings=True, **shape, **symbols)
    ).eval()
    model.save_pretrained(folder)
    ids = torch.tensor(sources(), dtype=torch.long)

    def decode(beams: int) -> int:
        with torch.inference_mode():
            output = model.generate(
                ids, num_beams=beams, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW
            )
        return output[:, 1:].numel()

    return {beams: functools.partial(decode, beams) for beams in (1, BEAM)}


def ctranslate2(folder: Path) -> Engine:
    """CTranslate2 with the weights saved by `marian`, float32, THREADS workers of 1 thread."""
    import ctranslate2
    from transformers import MarianTokenizer

    write_vocabulary(folder)
    MarianTokenizer(
        **{name: str(folder / file) for name, file in VOCABULARY.items()}
    ).save_pretrained(folder)
    converter = ctranslate2.converters.TransformersConverter(str(folder))
    converted = converter.convert(str(folder / "converted"), force=True)
    translator = ctranslate2.Translator(
        converted, device="cpu", compute_type="float32", inter_threads=THREADS, intra_threads=1
    )
    texts = [[f"t{i}" for i in row] for row in sources()]

    def decode(beams: int) -> int:
        results = translator.translate_batch(
            texts,
            beam_size=beams,
            min_decoding_length=NEW,
            max_decoding_length=NEW,
            max_batch_size=SENTENCES // THREADS,
        )
        return sum(len(result.hypotheses[0]) for result in results)

    return {beams: functools.partial(decode, beams) for beams in (1, BEAM)}


VOCABULARY = {"vocab": "vocab.json", "source_spm": "source.spm", "target_spm": "target.spm"}


def write_vocabulary(folder: Path) -> None:
    """Writes the files that the converter requires: a vocabulary t2, t3, ... and unused models."""
    import json

    import sentencepiece

    names = ["</s>", "<unk>", *(f"t{i}" for i in range(2, V - 1)), "<pad>"]  # Marian's order
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    text = folder / "text.txt"
    text.write_text("a b c d e f g h\n" * 9)
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / side),
            vocab_size=12,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")


def serve(make: Callable[[], Engine], pipe: Connection) -> None:
    """Runs in a child process: receives numbers of beams, decodes, and sends token counts."""
    engine = make()
    pipe.send("ready")
    with contextlib.suppress(EOFError):  # the parent closes the pipe at the end
        while True:
            pipe.send(engine[pipe.recv()]())


@contextlib.contextmanager
def running(makes: dict[str, Callable[[], Engine]]) -> Iterator[dict[str, Connection]]:
    """Starts a process for each engine and yields the pipes; closing them ends the processes."""
    context, pipes, processes = multiprocessing.get_context("spawn"), {}, []
    try:
        for name, make in makes.items():
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(make, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes[name].recv()
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join()


def measure(pipes: dict[str, Connection], repeats: int) -> dict[tuple[str, int], list[float]]:
    """Returns the seconds of each run, by engine and beams; engines alternate, after a warm-up."""
    seconds = {(name, beams): [] for beams in (1, BEAM) for name in pipes}
    for repeat in range(repeats + 1):
        for (name, beams), times in seconds.items():
            time.sleep(PAUSE)
            started = time.perf_counter()
            pipes[name].send(beams)
            tokens = pipes[name].recv()
            taken = time.perf_counter() - started
            if tokens != SENTENCES * NEW:
                raise RuntimeError(
                    f"{name}, {beams} beams: {tokens} tokens, expected {SENTENCES * NEW}"
                )
            if repeat:
                times.append(taken)
    return seconds


def main() -> None:
    """Prints median and range of each engine, tokens a second, and the speed relative to Marian."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each engine")
    parser.add_argument("--only", choices=["ours"], help="run only this engine")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of this package")
    figures.add_flag(parser)
    arguments = parser.parse_args()
    many, partial = arguments.devices, functools.partial
    makes = {"ours": partial(ours, 1, 1)}
    if many > 1:
        makes |= {f"ours, {many} devices": partial(ours, many, 1)}
        makes |= {f"ours, {many} devices, tensor": partial(ours, 1, many)}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.only is None:
            makes |= {
                "Marian": partial(marian, Path(folder)),
                "CTranslate2": partial(ctranslate2, Path(folder)),
            }
        with running(makes) as pipes:
            seconds = measure(pipes, arguments.repeats)
    print("| beams | engine | seconds: median (spread) | tokens a second | times Marian |")
    print("| ---: | --- | --- | ---: | ---: |")
    for (name, beams), times in seconds.items():
        median = statistics.median(times)
        ratio = (
            f"{statistics.median(seconds['Marian', beams]) / median:.2f}"
            if "Marian" in makes
            else "-"
        )
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(
            f"| {beams} | {name} | {median:.2f} ({spread}) | {SENTENCES * NEW / median:,.0f} | "
            f"{ratio} |"
        )
    methods = {1: "greedy", BEAM: f"beam {BEAM}"}
    found = {f"{name}, {methods[n]}": figures.middle(times) for (name, n), times in seconds.items()}
    figures.write(arguments.json, found)


if __name__ == "__main__":
    main()
