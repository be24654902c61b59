"""Speed of a training step against PyTorch, Marian in Transformers, and Flax's WMT example.

All have equal sizes. Each runs in its own process, which makes its model and a batch of random
tokens and compiles. Then the processes alternate, so that other load on the machine affects all of
them. A step is forward, backward and Adam, with label smoothing and dropout of 0.1, on rows without
padding. PyTorch's layers also apply dropout to attention weights and within feed-forward networks,
unlike the paper; "ours_attention_dropout" is the most similar. "ours_r_drop", on request, makes 2
passes of each row (`train.r_drop`), and counts its tokens once.

Prints target tokens a second; FLOP/s of the matrix products (a multiply-add counts as 2) over the
peak, which is that of a product of large matrices in the same run, the best of all processes; the
peak memory; the time from the start of the process to its first finished step; and the speed
relative to PyTorch, or else to the first engine.

    pip install -e '.[bench]' && python -m benchmarks.train_step --size=base
    python -m benchmarks.train_step --size=tiny --only ours torch
    python -m benchmarks.train_step --size=tiny --only ours ours_r_drop
    python -m benchmarks.train_step --size=paper_base --dtype=bfloat16                    # on a GPU
    python -m benchmarks.train_step --flax_wmt=flax/examples/wmt/models.py --only ours flax_wmt
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures, processes

SMOOTHING, DROPOUT, RATE = 0.1, 0.1, 1e-4
PRODUCTS = 8  # of large matrices, after the steps of each turn
SLICE = 1.0  # shortest turn, in seconds
SIDE = {True: 2048, False: 8192}  # of the large matrices, by whether the device is a CPU


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and a batch of `rows` sources and targets of `length` tokens."""

    d_model: int
    num_heads: int
    d_ff: int
    layers: int  # of the encoder, and of the decoder
    vocabulary: int
    rows: int
    length: int


SIZES = {
    "tiny": Size(128, 4, 256, 4, 10_000, 64, 32),
    "base": Size(512, 8, 2048, 6, 16_000, 16, 64),
    "paper_base": Size(512, 8, 2048, 6, 37_000, 400, 64),  # 25,600 tokens, as in section 5.1
    "paper_big": Size(1024, 16, 4096, 6, 37_000, 400, 64),
}


def tokens(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Returns sources and targets, (rows, length), without special symbols."""
    rng = np.random.default_rng(0)
    return tuple(
        rng.integers(4, size.vocabulary, (size.rows, size.length)).astype(np.int32)
        for _ in range(2)
    )


@dataclasses.dataclass(frozen=True)
class Engine:
    """An implementation of training."""

    step: Callable[[], float]  # runs a step, waits for it, and returns the loss a token
    matmul: Callable[[int], int]  # runs n large products, waits, and returns the FLOPs of one
    memory: Callable[[], float | None]  # peak bytes of the device; None: those of the process


def config_of(size: Size, dtype: str, attention_dropout: float = 0.0, r_drop: float = 0.0) -> Any:
    """Returns the config of this package for a step of this size."""
    from flaxformer_lite.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

    sizes = dict(
        d_model=size.d_model, num_heads=size.num_heads, d_ff=size.d_ff, vocab_size=size.vocabulary
    )
    layers = dict(num_encoder_layers=size.layers, num_decoder_layers=size.layers)
    drop = dict(dropout=DROPOUT, attention_dropout=attention_dropout)
    return Config(
        model=ModelConfig(**sizes, **layers, **drop, dtype=dtype),
        data=DataConfig(buckets=(size.length,), rows_multiple=1),
        optim=OptimConfig(schedule="linear", learning_rate=RATE, warmup_steps=1),
        train=TrainConfig(r_drop=r_drop),
    )


def ours(size: Size, dtype: str, attention_dropout: float = 0.0, r_drop: float = 0.0) -> Engine:
    """This package: the step that `train` runs, over all devices."""
    from flaxformer_lite.system import runtime

    runtime.start()
    import jax

    from flaxformer_lite.data.batches import loader
    from flaxformer_lite.training import meshes, parallel
    from flaxformer_lite.training import step as step_lib

    config = config_of(size, dtype, attention_dropout, r_drop)
    mode = parallel.MeshMode(meshes.make_mesh(-1))
    train_step, initial_state = step_lib.of_config(
        config, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    struct = loader.batch_struct(config, size.rows, size.length)
    with ThreadPoolExecutor(1) as thread:  # compiles during the initialisation, as `train` does
        compiling = thread.submit(
            mode.compile, train_step, jax.eval_shape(initial_state), struct, donate=True
        )
        state = mode.make_state(initial_state)
        compiled = compiling.result()
    source, target = tokens(size)
    batch = mode.put_batch(
        {"source": source, "target": target, "row": np.arange(size.rows, dtype=np.int32)}
    )

    def step() -> float:
        nonlocal state
        state, sums = compiled(state, batch)
        loss, weight = mode.read(sums)["loss"]
        return float(loss / weight)

    return Engine(step, *_jax_matmul(dtype))


def _jax_matmul(dtype: str) -> tuple[Callable, Callable]:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def product(x, y):
        return x @ y

    x = jnp.ones((SIDE[jax.default_backend() == "cpu"],) * 2, dtype)

    def matmul(times: int) -> int:
        for _ in range(times):
            y = product(x, x)
        y.block_until_ready()
        return 2 * len(x) ** 3

    return matmul, lambda: (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def flax_wmt(size: Size, dtype: str, file: str) -> Engine:
    """The model in `models.py` of Flax's WMT example, with the one-hot loss of its `train.py`."""
    import jax
    import jax.numpy as jnp
    import optax

    spec = importlib.util.spec_from_file_location("wmt_models", file)
    models = importlib.util.module_from_spec(spec)
    sys.modules["wmt_models"] = models
    spec.loader.exec_module(models)
    shape = dict(
        vocab_size=size.vocabulary, output_vocab_size=size.vocabulary, share_embeddings=True
    )
    shape |= dict(
        logits_via_embedding=True,
        emb_dim=size.d_model,
        num_heads=size.num_heads,
        num_layers=size.layers,
    )
    shape |= dict(
        qkv_dim=size.d_model, mlp_dim=size.d_ff, max_len=size.length, dtype=jnp.dtype(dtype)
    )
    config = models.TransformerConfig(**shape, dropout_rate=DROPOUT, attention_dropout_rate=DROPOUT)
    model, optimizer = models.Transformer(config), optax.adam(RATE, b1=0.9, b2=0.98, eps=1e-9)
    source, target = (jnp.asarray(side) for side in tokens(size))
    params = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, source, target
    )["params"]
    state = params, optimizer.init(params), jax.random.key(2)

    def loss(params, key):
        logits = model.apply({"params": params}, source, target, rngs={"dropout": key}).astype(
            jnp.float32
        )
        low = SMOOTHING / (size.vocabulary - 1)
        wanted = jax.nn.one_hot(target, size.vocabulary) * (1 - SMOOTHING - low) + low
        return -(wanted * jax.nn.log_softmax(logits)).sum(axis=-1).mean()

    def update(state):
        params, moments, key = state
        key, used = jax.random.split(key)
        value, gradients = jax.value_and_grad(loss)(params, used)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments, key), value

    compiled = jax.jit(update, donate_argnums=0).lower(state).compile()

    def step() -> float:
        nonlocal state
        state, value = compiled(state)
        return float(value)

    return Engine(step, *_jax_matmul(dtype))


def pytorch(size: Size, dtype: str, compiled: bool = False) -> Engine:
    """`torch.nn.Transformer` with embeddings, sinusoidal positions and a tied output."""
    import torch
    from torch import nn

    device = "cuda" if torch.cuda.is_available() else "cpu"

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.d_model)
            nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
            sizes = dict(
                d_model=size.d_model,
                nhead=size.num_heads,
                dim_feedforward=size.d_ff,
                dropout=DROPOUT,
            )
            layers = dict(num_encoder_layers=size.layers, num_decoder_layers=size.layers)
            self.transformer = nn.Transformer(**sizes, **layers, batch_first=True)
            self.drop = nn.Dropout(DROPOUT)
            angle = torch.arange(size.length)[:, None] * 10_000 ** (
                -torch.arange(0, size.d_model, 2) / size.d_model
            )
            self.register_buffer(
                "positions", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
            )
            self.register_buffer(
                "causal", nn.Transformer.generate_square_subsequent_mask(size.length)
            )

        def inputs(self, ids):
            return self.drop(self.embedding(ids) * size.d_model**0.5 + self.positions)

        def forward(self, source, shifted):
            masked = {"tgt_mask": self.causal, "tgt_is_causal": True}
            return (
                self.transformer(self.inputs(source), self.inputs(shifted), **masked)
                @ self.embedding.weight.T
            )

    return _of_torch(
        Model().to(device), device, size, dtype, lambda model, *ids: model(*ids), compiled=compiled
    )


def marian(size: Size, dtype: str) -> Engine:
    """`MarianMTModel` of Transformers."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"d_model": size.d_model, "max_position_embeddings": 256, "activation_function": "relu"}
    shape |= {
        "scale_embedding": True,
        "dropout": DROPOUT,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    }
    for side in ("encoder", "decoder"):
        shape |= {f"{side}_layers": size.layers, f"{side}_attention_heads": size.num_heads}
        shape |= {f"{side}_ffn_dim": size.d_ff, f"{side}_layerdrop": 0.0}
    config = MarianConfig(
        vocab_size=size.vocabulary,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
        **shape,
    )

    def forward(model, source, shifted):
        return model(input_ids=source, decoder_input_ids=shifted).logits

    return _of_torch(MarianMTModel(config).to(device), device, size, dtype, forward)


def _of_torch(
    model: Any, device: str, size: Size, dtype: str, forward: Callable, compiled: bool = False
) -> Engine:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    source, target = (torch.tensor(side, dtype=torch.long, device=device) for side in tokens(size))
    shifted = torch.nn.functional.pad(target, (1, -1), value=1)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
    model.train()

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = forward(model, source, shifted)
        return criterion(logits.flatten(0, 1).float(), target.flatten())

    loss = torch.compile(loss) if compiled else loss

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    x = torch.ones((SIDE[device == "cpu"],) * 2, dtype=getattr(torch, dtype), device=device)

    def matmul(times: int) -> int:
        for _ in range(times):
            y = x @ x
        y[0, 0].item()
        return 2 * len(x) ** 3

    return Engine(
        step, matmul, torch.cuda.max_memory_allocated if device == "cuda" else lambda: None
    )


ENGINES = {
    "ours": ours,
    "ours_attention_dropout": lambda size, dtype: ours(size, dtype, DROPOUT),
    "ours_r_drop": lambda size, dtype: ours(size, dtype, r_drop=3.0),
    "torch": pytorch,
    "torch.compile": lambda size, dtype: pytorch(size, dtype, compiled=True),
    "marian": marian,
    "flax_wmt": flax_wmt,
}


def work(engine: Engine, answer: Callable[..., None]) -> None:
    """Runs in a process: makes the first step, then a turn for each line of standard input."""
    answer(loss=engine.step())
    engine.step()
    started = time.perf_counter()
    engine.step()
    steps = max(1, round(SLICE / (time.perf_counter() - started)))
    rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # noqa: E731
    engine.matmul(1)
    for _ in sys.stdin:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        stepped = time.perf_counter()
        work = PRODUCTS * engine.matmul(PRODUCTS)
        peak = work / (time.perf_counter() - stepped)
        answer(seconds=(stepped - started) / steps, peak=peak, memory=engine.memory() or rss())


class Worker:
    """A process with one engine."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.name, started = name, time.monotonic()
        flags = [
            f"--size={arguments.size}",
            f"--dtype={arguments.dtype}",
            f"--flax_wmt={arguments.flax_wmt}",
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.train_step", f"--worker={name}", *flags],
            env=processes.environment(),
            **pipes,
        )
        self.loss = self._answer()["loss"]
        self.first = time.monotonic() - started
        self.memory, self.steps, self.peaks = 0.0, [], []

    def turn(self) -> None:
        """Runs some steps, and some products of large matrices."""
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.steps.append(answer["seconds"])
        self.peaks.append(answer["peak"])
        self.memory = answer["memory"]

    def end(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name}: the process ended with {self._process.wait()}")


def main() -> None:
    """Prints a table, a line for each engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each engine")
    parser.add_argument("--only", nargs="+", choices=ENGINES, help="run only these engines")
    parser.add_argument(
        "--flax_wmt", default="", help="models.py of Flax's WMT example; adds that engine"
    )
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    figures.add_flag(parser)
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    if arguments.worker:
        more = [str(Path(arguments.flax_wmt))] if arguments.worker == "flax_wmt" else []
        engine = ENGINES[arguments.worker](size, arguments.dtype, *more)
        return work(engine, lambda **values: print(json.dumps(values), flush=True))
    left_out = {"torch.compile", "ours_r_drop", *(() if arguments.flax_wmt else ("flax_wmt",))}
    workers = [
        Worker(name, arguments)
        for name in arguments.only or [name for name in ENGINES if name not in left_out]
    ]
    for _ in range(arguments.rounds):
        for worker in workers:
            worker.turn()
    for worker in workers:
        worker.end()
    figures.write(arguments.json, show(workers, size, arguments.size))


def show(workers: list[Worker], size: Size, name: str) -> dict[str, Any]:
    """Prints the table, and returns its figures; the peak is the best product of all engines."""
    from flaxformer_lite.config import Config, ModelConfig
    from flaxformer_lite.training import flops

    sizes = dict(
        d_model=size.d_model, num_heads=size.num_heads, d_ff=size.d_ff, vocab_size=size.vocabulary
    )
    config = ModelConfig(**sizes, num_encoder_layers=size.layers, num_decoder_layers=size.layers)
    step = flops.train_step(Config(model=config), size.rows, size.length)
    peak = max(statistics.median(worker.peaks) for worker in workers)
    print(
        f"{name}: {step / 1e9:,.1f} GFLOPs a step; peak of matrix products {peak / 1e9:,.0f} "
        "GFLOP/s"
    )
    compared = next((worker for worker in workers if worker.name == "torch"), workers[0])
    measured = "ms a step: median (spread) | tokens a second | of the peak | GB | first step, s"
    print(f"| engine | {measured} | / {compared.name} |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    found = {}
    for worker in workers:
        median, passes = statistics.median(worker.steps), 2 if worker.name == "ours_r_drop" else 1
        ratios = [theirs / mine for theirs, mine in zip(compared.steps, worker.steps, strict=True)]
        print(
            f"| {worker.name} | {1e3 * median:.1f} ({1e3 * min(worker.steps):.1f} to "
            f"{1e3 * max(worker.steps):.1f}) "
            f"| {size.rows * size.length / median:,.0f} | {passes * step / median / peak:.0%} "
            f"| {worker.memory / 1e9:.2f} | {worker.first:.1f} | {statistics.median(ratios):.2f} |"
        )
        engine = f"{name}, {worker.name}"
        found[f"{engine}, ms"] = figures.middle([1e3 * each for each in worker.steps])
        found[f"{engine}, % of the peak"] = 100 * passes * step / median / peak
        slower = [mine / theirs for theirs, mine in zip(compared.steps, worker.steps, strict=True)]
        found[f"{engine}, times {compared.name}"] = statistics.median(slower)
    return found


if __name__ == "__main__":
    main()
