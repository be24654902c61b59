"""Checks and benchmarks this package on the accelerator of this machine, in a few minutes.

    python -m benchmarks.accelerator                    # on a machine with a GPU or TPU
    python -m benchmarks.accelerator --rehearse         # every part with tiny sizes, on any machine

The parts, in this order:

    device      versions, devices, and the speed of a large bfloat16 matrix product
    attention   values and gradients of every backend and mask, against the reference in float32
    smoke       40 steps of the smoke config: losses against a CPU's; a resumed run against one
                without interruption
    base        training steps of the paper's base model, bfloat16, 25,600 tokens; the same in
                `torch.compile`, if installed, and the estimate of `flaxformer-lite plan`
    decoding    tokens a second of the base model, bfloat16, greedy and with a beam of 4, for 32 and
                512 sentences
    big         as `base`, for the paper's big model
    multi30k    `multi30k_tok` with 2 buckets, trained for 2 minutes, and its greedy test BLEU; only
                if its data exists and 3 minutes of `--seconds` are left

For a machine without a network, `python -m benchmarks.offline` collects the dependencies.

Results are written after each part, as JSON and as text, so an interrupted run keeps them. If a
part fails, the failure is reported and the next part starts. Parts that are not timed share the
device.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import figures, train_step

ROOT = Path(__file__).parent.parent
# Largest difference, relative to the largest value of the reference: the rounding of each dtype.
BOUNDS = {"bfloat16": 2e-2, "float32": 2e-5}
STEPS, RESUMED_AT = 40, 20  # of the smoke config
TRAINED, LEFT = 120, 180  # seconds of training in `multi30k`, and seconds that it needs
LOSS_BOUND = 1e-3  # relative difference from a CPU's losses
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the computations of each part."""

    side: int  # of the square matrices of the product
    rows: tuple[int, int, int, int]  # of attention: batch, length, heads, width of a head
    base: str  # of `train_step.SIZES`
    big: str
    decoder: dict[str, int]  # fields of `ModelConfig`
    sentences: tuple[int, ...]
    rounds: int  # repeats of each measurement


FULL = Sizes(8192, (4, 256, 8, 64), "paper_base", "paper_big", {"vocab_size": 16_000}, (32, 512), 5)
SMALL = {
    "d_model": 64,
    "num_heads": 2,
    "d_ff": 128,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}
TINY = Sizes(512, (2, 128, 2, 64), "tiny", "tiny", SMALL | {"vocab_size": 500}, (4, 8), 2)


def device(sizes: Sizes) -> Result:
    """Returns versions, devices, and FLOP/s of a bfloat16 product (a multiply-add counts as 2)."""
    import flax
    import jax
    import jax.numpy as jnp
    import optax

    from flaxformer_lite.system import accelerators

    versions = {module.__name__: module.__version__ for module in (jax, flax, optax, np)}
    found = jax.devices()
    x = jax.random.normal(jax.random.key(0), (sizes.side, sizes.side), jnp.bfloat16)
    product = jax.jit(lambda x, y: x @ y)
    seconds = [
        _seconds(lambda: jax.block_until_ready([product(x, x) for _ in range(10)]))
        for _ in range(6)
    ][1:]
    return {
        "python": sys.version.split()[0],
        "versions": versions,
        "devices": len(found),
        "kind": found[0].device_kind,
        "accelerator": accelerators.name_of(found[0]),
        "platform": found[0].platform,
        "published_tflops": (accelerators.peak(found) or 0) / 1e12,
        "tflops_of_a_product": 10 * 2 * sizes.side**3 / statistics.median(seconds) / 1e12,
    }


def attention(sizes: Sizes) -> Result:
    """Returns the largest relative difference of values and gradients from the reference's.

    It has one for each backend, dtype and mask.
    """
    import jax
    import jax.numpy as jnp

    from flaxformer_lite.model import backends
    from flaxformer_lite.model.attention import dot_product_scores, softmax, weighted_sum
    from flaxformer_lite.model.masks import AttentionMask, TokenPositions

    B, L, H, K = sizes.rows
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=sizes.rows).astype(np.float32) for _ in range(3)]
    weight = rng.normal(size=sizes.rows).astype(np.float32)
    index_1L, length_B1 = np.arange(L)[None], np.linspace(L, L // 8, B).astype(int)[:, None]
    padded_BL = (index_1L < length_B1).astype(np.int32)
    packed_BL = padded_BL * (1 + (index_1L >= length_B1 // 2))
    padded, packed = TokenPositions.of(padded_BL), TokenPositions.of(padded_BL, packed_BL)
    patterns = {
        f"{name}, {rows}": AttentionMask(positions, positions, causal=causal, window=window)
        for rows, positions in (("padded", padded), ("packed", packed))
        for name, causal, window in (
            ("full", False, None),
            ("causal", True, None),
            ("window", False, L // 8),
            ("causal window", True, L // 8),
        )
    }
    real = padded_BL[:, :, None, None]  # outputs of padding are not compared

    def reference(query, key, value, mask):
        return weighted_sum(softmax(dot_product_scores(query, key), mask.array()), value)

    def refusal(backend: str, dtype: str, mask: AttentionMask) -> str | None:
        query = jax.ShapeDtypeStruct(sizes.rows, dtype)
        try:
            backends.choose(backend, query, query, mask, None)
        except ValueError as error:
            return str(error).split(": ", 2)[-1].partition(";")[0]

    def results(
        backend: str, dtype: str, wanted: dict[str, AttentionMask]
    ) -> dict[str, list[np.ndarray]]:
        """Returns values, and gradients by queries, keys and values, for each pattern."""
        attend = (
            reference if backend == "reference" else functools.partial(backends.attend, backend)
        )

        def of_pattern(inputs, mask):
            def loss(inputs):
                mixed = attend(*inputs, mask).astype(jnp.float32)
                return jnp.sum(mixed * weight * real), mixed * real

            gradients, mixed = jax.grad(loss, has_aux=True)(inputs)
            return [mixed, *gradients]

        run = jax.jit(
            lambda inputs: {name: of_pattern(inputs, mask) for name, mask in wanted.items()}
        )
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            found = run([jnp.asarray(x, dtype) for x in inputs])
        return jax.tree.map(lambda x: np.asarray(x, np.float32), found)

    def differences(backend: str, dtype: str) -> Result:
        refused = {
            name: why for name, mask in patterns.items() if (why := refusal(backend, dtype, mask))
        }
        if len(refused) == len(patterns):
            return {"refused": ", ".join(sorted(set(refused.values())))}
        try:
            found = results(
                backend, dtype, {name: patterns[name] for name in patterns if name not in refused}
            )
        except Exception as error:  # one backend failed; continue with the others
            return {"failed": f"{type(error).__name__}: {error}"[:2000]}
        of_mask = {
            name: max(
                float(np.abs(x - y).max() / np.abs(y).max())
                for x, y in zip(arrays, expected[name], strict=True)
            )
            for name, arrays in found.items()
        }
        return {
            "largest": of_mask,
            "refused": refused,
            "within": all(d <= BOUNDS[dtype] for d in of_mask.values()),
        }

    expected = results("reference", "float32", patterns)
    asked = [(b, d) for b in ("reference", "xla", "blockwise", "cudnn", "flash") for d in BOUNDS]
    with ThreadPoolExecutor(4) as pool:  # compiling takes most of the time
        found = pool.map(lambda each: differences(*each), asked)
        return {
            f"{backend}, {dtype}": each for (backend, dtype), each in zip(asked, found, strict=True)
        }


def smoke(sizes: Sizes) -> Result:
    """Compares losses of the smoke config here with a CPU's, and with those of a resumed run here.

    Deterministic operations exclude autotuning, so that processes with separate compilations
    compute the same bits.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            f"--config.train.{name}={RESUMED_AT}" for name in ("eval_every", "checkpoint_every")
        ]
        exact = {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} "
            "--xla_gpu_deterministic_ops=true".strip()
        }
        exact |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}

        def train(name: str, steps: int, **environment: str) -> list[float]:
            """Returns the losses of all steps of the workdir, trained up to `steps`."""
            command = [
                sys.executable,
                "-m",
                "flaxformer_lite",
                "train",
                "--config=smoke",
                f"--workdir={folder}/{name}",
            ]
            command += [*flags, f"--config.train.num_steps={steps}"]
            caches = {
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/{name}_compiled",
                "TFDS_DATA_DIR": f"{folder}/{name}_data",
            }
            environment = os.environ | exact | caches | environment
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(
                    f"{name}: train ended with {done.returncode}: {done.stderr[-2000:]}"
                )
            lines = map(json.loads, Path(folder, name, "metrics.jsonl").read_text().splitlines())
            return [line["loss"] for line in lines if line["split"] == "train"]

        def resumed() -> list[float]:
            train("resumed", RESUMED_AT)
            return train("resumed", STEPS)

        with ThreadPoolExecutor(3) as pool:
            cpu = pool.submit(train, "cpu", STEPS, JAX_PLATFORMS="cpu")
            here, again = pool.submit(train, "here", STEPS), pool.submit(resumed)
            cpu, here, again = cpu.result(), here.result(), again.result()
        difference = max(abs(x - y) / abs(y) for x, y in zip(here, cpu, strict=True))
        return {
            "steps": len(here),
            "last_loss": here[-1],
            "last_loss_on_a_cpu": cpu[-1],
            "largest_relative_difference": difference,
            "within": difference <= LOSS_BOUND,
            "resumed_alike": here == again,
        }


def training(sizes: Sizes, model: str, accelerator: str | None) -> Result:
    """Returns milliseconds a step, FLOP/s and memory of each engine, and the estimate of `plan`.

    The engines alternate.

    Args:
      accelerator: the device's name in `plan`; None: it has none, and the plan is for an H100.
    """
    from flaxformer_lite.training import flops

    arguments = argparse.Namespace(size=model, dtype="bfloat16", flax_wmt="")
    engines = ["ours", *(["torch.compile"] if importlib.util.find_spec("torch") else [])]
    with ThreadPoolExecutor(len(engines) + 1) as pool:
        planned = pool.submit(
            _child, "estimate", sizes, model, accelerator or "h100", JAX_PLATFORMS="cpu"
        )
        workers = {name: pool.submit(train_step.Worker, name, arguments) for name in engines}
    failed = {name: str(error) for name, worker in workers.items() if (error := worker.exception())}
    workers = {name: worker.result() for name, worker in workers.items() if name not in failed}
    try:
        for _ in range(sizes.rounds):
            for worker in workers.values():
                worker.turn()
    finally:  # a running process would keep its memory on the device
        for worker in workers.values():
            worker.end()
    size = train_step.SIZES[model]
    work = flops.train_step(train_step.config_of(size, "bfloat16"), size.rows, size.length)
    plan = {"failed": str(error)} if (error := planned.exception()) else planned.result()
    found = {"tokens_a_step": size.rows * size.length, "plan": plan, "failed": failed}
    for name, worker in workers.items():
        seconds, product = statistics.median(worker.steps), statistics.median(worker.peaks)
        found[name] = {
            "ms_a_step": _spread([1e3 * each for each in worker.steps]),
            "tokens_a_second": size.rows * size.length / seconds,
            "tflops": work / seconds / 1e12,
            "tflops_of_a_product": product / 1e12,
            "gb": worker.memory / 1e9,
            "seconds_to_the_first_step": worker.first,
        }
    return found


def multi30k(sizes: Sizes, seconds: float = TRAINED) -> Result:
    """Returns steps and test BLEU of `multi30k_tok`, stopped by SIGTERM after `seconds`.

    The seconds include compilation.
    """
    files = [path for split in ("train", "val", "test_2016_flickr") for path in data_files(split)]
    if lacking := [path for path in files if not list(ROOT.glob(path))]:
        return {"skipped": f"{ROOT / lacking[0]} is not there; see configs/multi30k_tok.py"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flaxformer_lite"]
        flags = [
            "--config=multi30k_tok",
            "--config.data.buckets=(24,64)",
            "--config.train.eval_every=100000",
        ]
        if sizes is TINY:
            flags += ["--config.model.num_encoder_layers=1", "--config.model.num_decoder_layers=1"]
        errors = Path(folder, "errors")
        with errors.open("w") as log:
            options = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": log}
            run = subprocess.Popen(
                [*command, "train", f"--workdir={folder}/run", *flags], **options
            )
            try:
                run.wait(seconds)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGTERM)
            finally:
                code = _ended(run)
        log = Path(folder, "run", "metrics.jsonl")
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        if not lines:
            raise RuntimeError(
                f"train ended with {code} and logged no step: {errors.read_text()[-2000:]}"
            )
        found = {"steps": lines[-1]["step"], "loss": lines[-1]["loss"], "exit_code": code}
        evaluate = [
            *command,
            "evaluate",
            f"--workdir={folder}/run",
            "--split=test",
            "--method=greedy",
        ]
        done = subprocess.run(evaluate, cwd=ROOT, capture_output=True, text=True, timeout=300)
        if done.returncode:
            return found | {"failed": done.stderr[-2000:]}
        score = re.search(r"^bleu_tokenized +([\d.]+)", done.stdout, re.MULTILINE)
        signature = re.search(
            r"^bleu_tokenized: sacreBLEU signature (\S+)", done.stdout, re.MULTILINE
        )
        return found | {"test_bleu": float(score.group(1)), "signature": signature.group(1)}


def _ended(run: subprocess.Popen) -> int:
    """Returns the exit code of a process, which is killed if it runs for another minute."""
    try:
        return run.wait(60)
    except subprocess.TimeoutExpired:
        run.kill()
        return run.wait()


def data_files(split: str) -> tuple[str, ...]:
    """Returns the globs of the English and the German file of a split of `multi30k_tok`."""
    return tuple(f"multi30k/tok/{split}.lc.norm.tok.{language}*" for language in ("en", "de"))


def estimate(sizes: Sizes, model: str, name: str) -> Result:
    """Returns the estimate of `flaxformer-lite plan` for a step on one device.

    The step is compiled on the CPU of this machine.
    """
    from flaxformer_lite.system import runtime
    from flaxformer_lite.training import plan, topology

    topology.prepare(name)
    size = train_step.SIZES[model]
    config = train_step.config_of(size, "bfloat16")
    data = dataclasses.replace(
        config.data, vocab_size=size.vocabulary, tokens_per_batch=size.rows * size.length
    )
    runtime.start()
    target = plan.target(dataclasses.replace(config, data=data), name, 1)
    (found,) = plan.plan(dataclasses.replace(config, data=data), target)
    compiler = target.compiler or "a CPU's"
    if found.memory is None:
        return {"device": name, "compiler": compiler, "lack": found.shortage}
    return {"device": name, "compiler": compiler, "gb": found.memory.total / 1e9}


def decoding(sizes: Sizes) -> Result:
    """Returns tokens a second, for sentences of 20 source tokens and 32 generated ones."""
    import jax

    from benchmarks import decode
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.config import DecodeConfig, ModelConfig
    from flaxformer_lite.decoding.decoder import Decoder
    from flaxformer_lite.model.transformer import build_model
    from flaxformer_lite.training import meshes, parallel

    model = build_model(ModelConfig(dtype="bfloat16", **sizes.decoder))
    most = max(sizes.sentences)
    shape = (most, decode.SOURCE)
    ids = (
        np.random.default_rng(0)
        .integers(4, sizes.decoder["vocab_size"] - 1, size=shape)
        .astype(np.int32)
    )
    mesh = meshes.make_mesh(-1)
    params = parallel.MeshMode(mesh).make_state(
        lambda: model.init(jax.random.key(0), ids[:1], ids[:1])["params"]
    )
    limits = {"min_length": decode.NEW, "max_extra_length": decode.NEW - decode.SOURCE - 1}
    methods = {"greedy": {"method": "greedy"}, "beam 4": {"method": "beam", "beam_size": 4}}
    runs = {}
    for name, method in methods.items():
        for count in sizes.sentences:
            options = {"rows": count, "sharding": parallel.decoding_shardings(mesh)}
            decoder = Decoder(model, DecodeConfig(**limits, **method), **options)
            runs[f"{name}, {count} sentences"] = functools.partial(
                decoder, params, list(ids[:count])
            )
    first = {}

    def compile(name: str) -> None:
        first[name] = _seconds(runs[name])

    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(compile, runs))
    found = {}
    for name, run in runs.items():
        seconds, tokens = [_seconds(run) for _ in range(sizes.rounds)], sum(map(len, run()))
        found[name] = {
            "tokens_a_second": tokens / statistics.median(seconds),
            "ms": _spread([1e3 * each for each in seconds]),
            "seconds_with_compiling": first[name],
        }
    return found


PARTS = {
    "device": device,
    "attention": attention,
    "smoke": smoke,
    "decoding": decoding,
    "multi30k": multi30k,
}
MODELS = ("base", "big")  # further parts, run by `training`
TOGETHER = (  # parts that run in parallel, since they are not timed
    ("device",),
    ("attention", "smoke"),
    ("base",),
    ("decoding",),
    ("big",),
    ("multi30k",),
)
# Parts that use the device in this package's code: each has its own process.
CHILDREN = {"device", "attention", "decoding", "estimate"}


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _child(part: str, sizes: Sizes, *more: str, **environment: str) -> Result:
    """Returns the result of a part, computed in its own process."""
    command = [sys.executable, "-m", "benchmarks.accelerator", "--part", part, *more]
    command += ["--rehearse"] if sizes is TINY else []
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{part} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(part: str, sizes: Sizes, accelerator: str | None = None) -> Result:
    """Returns the result of a part with its seconds, or its traceback if it failed."""
    started = time.monotonic()
    try:
        if part in MODELS:
            found = training(sizes, getattr(sizes, part), accelerator)
        else:
            found = _child(part, sizes) if part in CHILDREN else PARTS[part](sizes)
    except Exception:  # is reported, and the next part runs
        found = {"failed": traceback.format_exc()[-3000:]}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def lines_of(found: Result, indent: str = "") -> list[str]:
    """Returns a result as text, one line a figure."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict) and set(value) == {"median", "lowest", "highest"}:
            value = f"{value['median']:.4g} ({value['lowest']:.4g} to {value['highest']:.4g})"
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *lines_of(value, indent + "  ")] if value else []
        else:
            lines.append(f"{indent}{name}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return lines


def figures_of(found: Result, prefix: str = "") -> dict[str, Any]:
    """Returns the numbers of a result by their path, such as 'base, ours, ms_a_step'."""
    spread, flat = {"median", "lowest", "highest"}, {}
    for name, value in found.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and set(value) == spread:
            flat[path] = {"value": value["median"], "low": value["lowest"]}
            flat[path] |= {"high": value["highest"], "n": FULL.rounds}
        elif isinstance(value, dict):
            flat |= figures_of(value, f"{path}, ")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[path] = value
    return flat


def main() -> None:
    """Runs the parts; prints and writes their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file to write, with a text file beside it; default: in runs/, named after the "
        "device",
    )
    names = [*PARTS, *MODELS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="run only these parts"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=360,
        help="time limit of all parts, after which `multi30k` is skipped",
    )
    parser.add_argument("--rehearse", action="store_true", help="use tiny sizes")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    figures.add_flag(parser)
    arguments = parser.parse_args()
    sizes = TINY if arguments.rehearse else FULL
    if arguments.part:
        part, *more = arguments.part
        with contextlib.redirect_stdout(sys.stderr):
            found = (PARTS | {"estimate": estimate})[part](sizes, *more)
        return print(json.dumps(found))
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several processes share the device
    result = {"command": "python -m benchmarks.accelerator " + " ".join(sys.argv[1:])}
    result |= {"date": datetime.date.today().isoformat(), "cores": os.cpu_count()}
    output, accelerator = arguments.output, None
    started = time.monotonic()
    for together in TOGETHER:
        parts = [part for part in together if part in arguments.only or part == "device"]
        if (
            parts == ["multi30k"]
            and (left := arguments.seconds - (time.monotonic() - started)) < LEFT
        ):
            result["multi30k"] = {
                "skipped": f"{left:.0f} of {arguments.seconds:.0f} seconds were left"
            }
            parts = []
        with ThreadPoolExecutor(len(together)) as pool:
            run = functools.partial(measured, sizes=sizes, accelerator=accelerator)
            result |= zip(parts, pool.map(run, parts), strict=True)
        accelerator = result["device"].get("accelerator")
        kind = result["device"].get("kind", "unknown").lower().replace(" ", "-")
        output = output or figures.OUTPUT / f"accelerator-{kind}.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=2) + "\n")
        output.with_suffix(".txt").write_text("\n".join(lines_of(result)) + "\n")
        print("\n".join(lines_of({part: result[part] for part in parts})), flush=True)
    figures.write(arguments.json, figures_of(result))


if __name__ == "__main__":
    main()
