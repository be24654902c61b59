"""Small training runs for tests, in this process or in others."""

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from flaxformer_lite import train
from flaxformer_lite.cli import train_flags
from flaxformer_lite.config import CHOICES, Config, ModelConfig
from flaxformer_lite.data.batches.loader import fill_rows
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.runs import metrics_log

ROOT = Path(__file__).resolve().parent.parent.parent
# Dropout is on, as in the smoke config. 2 buckets and compiled steps; 6 checkpoints a run.
SMALL = {
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "data.train_split": "train[:1000]",
    "data.validation_split": "validation[:24]",
    "data.test_split": "test[:24]",
    "data.vocab_size": 512,
    "optim.learning_rate": 4e-3,
    "optim.warmup_steps": 10,
    "train.num_steps": 48,
    "train.eval_every": 24,
    "train.checkpoint_every": 8,
    "train.decode_examples": 8,
    "parallel.data": 1,
}

# For tests that need any training: quick to compile.
TINY = {
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "data.train_split": "train[:300]",
    "data.validation_split": "validation[:8]",
    "data.test_split": "test[:4]",
    "data.buckets": "(64,)",
    "train.decode_examples": 0,
}
# Runs of the other architectures that learn a little. The language model's texts are packed, and
# its result is an average of moving averages.
CLASSIFIER = {
    **TINY,
    "model.architecture": "encoder_classifier",
    "data.dataset": "cldr_language",
    "data.train_split": "train[:2000]",
    "data.validation_split": "validation[:100]",
    "data.test_split": "test[:100]",
    "data.num_buckets": 2,
    "data.vocab_size": 1200,  # so small that many letters are bytes
    "optim.learning_rate": 2e-2,
    "train.checkpoint_every": 24,
    "train.best_metric": "accuracy",
}
LANGUAGE_MODEL = {
    **TINY,
    "model.architecture": "decoder_lm",
    "data.packing": True,
    "data.subword_sampling": 0.2,
    "data.train_split": "train[:1000]",
    "train.checkpoint_every": 24,
    "train.average": "last:2",
    "train.ema_decay": 0.9,
    "decode.method": "sample",
    "decode.temperature": 0.9,
}


# Only one of the position schemes of the same place in the model is in the plain suite.
SLOW = {position: [pytest.mark.slow] for position in ("learned", "alibi", "none")}
SCHEMES = [
    pytest.param(position, marks=SLOW.get(position, [])) for position in CHOICES["model.position"]
]


def filled(rows: Sequence[Sequence[Sequence[int]]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and text numbers of packed rows, both (len(rows), length)."""
    row_N = np.repeat(np.arange(len(rows)), [len(texts) for texts in rows])
    return fill_rows(
        Ragged.of([text for texts in rows for text in texts]), row_N, rows=len(rows), length=length
    )


def flags(changes: dict[str, object] | None = None) -> list[str]:
    """Returns the command line of SMALL with `changes`."""
    return [
        "--config=smoke",
        *(f"--config.{name}={value}" for name, value in {**SMALL, **(changes or {})}.items()),
    ]


def small_config(changes: dict[str, object] | None = None) -> Config:
    """Returns the config of SMALL with `changes`."""
    return _parsed(*flags(changes))


@functools.cache
def _parsed(*arguments: str) -> Config:
    return train_flags.parse_train(arguments).config


def fit(workdir: Path, changes: dict[str, object] | None = None) -> int:
    """Trains SMALL with `changes` in this process; returns the exit code."""
    return train.fit(small_config(changes), workdir)


def start(
    *arguments: str,
    env: dict[str, str] | None = None,
    module: str | None = "flaxformer_lite",
    **options,
):
    """Starts `python -m MODULE ARGUMENTS`, or `python train.py ARGUMENTS` if `module` is None."""
    pipes = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | options
    return subprocess.Popen(
        start_command(*arguments, module=module), env={**os.environ, **(env or {})}, **pipes
    )


def start_command(*arguments: str, module: str | None = "flaxformer_lite") -> list[str]:
    """Returns the command of `start`."""
    return [sys.executable, *(["-m", module] if module else [str(ROOT / "train.py")]), *arguments]


def run(*arguments: str, input: bytes = b"", **options) -> subprocess.CompletedProcess:
    """Starts a process, and waits for it; see `start`."""
    process = start(*arguments, stdin=subprocess.PIPE, **options)
    try:
        out, err = process.communicate(input, timeout=300)
    finally:
        process.kill()  # after a timeout
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


@contextlib.contextmanager
def started(*arguments: str, **options):
    """Starts a process, and kills it at the end of the block; see `start`."""
    process = start(*arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen, *, seconds: float = 120.0
) -> None:
    """Waits for `condition`; fails after `seconds`, or if the process ends."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(
                f"the process ended with {process.returncode}: {process.stderr.read().decode()}"
            )
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)


def stop_at(
    condition: Callable[[], bool], number: signal.Signals, *arguments: str, **options
) -> tuple[int, str]:
    """Sends a new process a signal on `condition`; returns its exit code and standard error."""
    with started(*arguments, **options) as process:
        wait_until(condition, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        return process.returncode, err.decode()


def lines_of(path: Path, split: str) -> list[dict]:
    """Returns the lines of `split` in metrics.jsonl, the last of each step, without `seconds`."""
    records = [
        record
        for record in metrics_log.read_metrics(path / "metrics.jsonl")
        if record["split"] == split
    ]
    return [
        {name: value for name, value in record.items() if name != "seconds"} for record in records
    ]


def last_step(path: Path) -> int:
    """Returns the last logged training step; 0 without any."""
    return max((record["step"] for record in lines_of(path, "train")), default=0)


def losses(path: Path) -> dict[int, float]:
    """Returns step to the last logged training loss."""
    return {record["step"]: record["loss"] for record in lines_of(path, "train")}


def checkpoint_arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Returns path to array of a checkpoint, read by Orbax."""
    arrays = {}
    for part in ("params", "progress", "ema"):
        if not (workdir / "checkpoints" / str(step) / part).exists():
            continue
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore((workdir / "checkpoints" / str(step) / part).absolute())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[part + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return arrays


def assert_same_arrays(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Asserts the same names, and arrays that are equal bit for bit."""
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype and array.tobytes() == second[name].tobytes(), name


def files_below(folder: Path) -> dict[str, bytes]:
    """Returns path to contents of every file and folder below `folder`."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def error_lines(text: str) -> list[str]:
    """Returns the lines of standard error that start with 'error: '."""
    return [line for line in text.splitlines() if re.match(r"error: ", line)]


def free_port() -> int:
    """Returns a free port on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def processes(
    count: int,
    *arguments: str,
    script: Sequence[str],
    own: Sequence[Sequence[str]] | None = None,
    env: dict[str, str] | None = None,
    **options,
) -> list[subprocess.Popen]:
    """Starts the processes of a run on loopback, with 8 devices in total.

    They compile without optimization, in half the time: each compiles every program itself.

    Args:
      script: the arguments of Python.
      own: additional arguments of each process.
    """
    few = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={8 // count}")
    quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    env = {**os.environ, **quickly, **(env or {}), "XLA_FLAGS": few}
    port = free_port()
    return [
        subprocess.Popen(
            [
                sys.executable,
                *script,
                *arguments,
                *(own[number] if own else ()),
                f"--coordinator_address=127.0.0.1:{port}",
                f"--num_processes={count}",
                f"--process_id={number}",
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            **options,
        )
        for number in range(count)
    ]


def fit_in_processes(count: int, jobs: Sequence[tuple[Path, dict]]) -> None:
    """Runs several trainings, one after another, in the same processes with 8 devices together.

    Args:
      jobs: the workdir of each training, and its changes of SMALL.
    """
    work = json.dumps([[str(workdir), changes] for workdir, changes in jobs])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    script = [str(ROOT / "tests/support/fit_jobs.py")]
    started = processes(count, work, script=script, **pipes)
    try:
        outputs = [process.communicate(timeout=600)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    ends = "\n".join(output[-3000:] for output in outputs)
    assert [process.returncode for process in started] == [0] * count, ends


@functools.cache
def varied_model(config: ModelConfig) -> tuple[nn.Module, dict]:
    """Returns a model, and parameters so large that texts get different probabilities."""
    model, rng = transformer.build_model(config), np.random.default_rng(4)

    def sample(path, leaf):
        name, noise = jax.tree_util.keystr(path), rng.normal(size=leaf.shape)
        if "scale" in name or "['bias']" in name:
            return jnp.float32(0.1 * noise + ("scale" in name))
        return jnp.float32(0.3 * noise if "embedding" in name else noise)

    return model, jax.tree_util.tree_map_with_path(sample, parameters.shapes(model))
