"""Random inputs of four kinds for the commands and the Python API, each with one clear end.

    JAX_PLATFORMS=cpu PYTHONPATH=.:tests/support python tests/support/fuzzing.py --inputs=10000

An input ends with exit code 0, or with exactly one `error: ` message and 2, or 1 where that is
documented; never with a traceback, and nothing half-written is left. An input is a function of the
seed, its kind and its number, so `--kind=lines --first=17 --inputs=1` repeats one.
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import io
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # before the import of jax; pytest has its own
    os.environ["JAX_PLATFORMS"] = "cpu"
    _FOLDER = os.environ.get("FUZZING_FOLDER") or tempfile.mkdtemp(prefix="flaxformer_lite_")
    os.environ["TFDS_DATA_DIR"] = f"{_FOLDER}/tfds"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{_FOLDER}/compiled"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import fuzzed
import jax
import runs

from flaxformer_lite import classify, generate, train, translate
from flaxformer_lite.cli import commands, train_flags
from flaxformer_lite.config import Config
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import preparation
from flaxformer_lite.field_rules import OWN_TEXT
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError, is_of_a_path
from flaxformer_lite.training.checkpoint import DAMAGED

# Two steps and two checkpoints of a model that compiles quickly.
TINY = {
    **runs.TINY,
    **{f"data.{split}_split": split for split in pipeline.ROLES},
    "model.max_length": 64,
    "data.vocab_size": 300,
    "data.tokens_per_batch": 512,
    "train.num_steps": 2,
    "train.eval_every": 1,
    "train.checkpoint_every": 1,
    "parallel.data": 1,
}
KINDS_OF_RUN = {
    "translate": {"data.dataset": "parallel_text"},
    "classify": {"data.dataset": "labelled_text", "model.architecture": "encoder_classifier"},
    "generate": {"data.dataset": "plain_text", "model.architecture": "decoder_lm"},
}
HALF_WRITTEN = re.compile(r"\.partial$|\.new$|orbax-checkpoint-tmp|(^|/)incomplete\.")
DOCUMENTED_AS_1 = re.compile(r"error: (out of memory|.*(not finite|diverged|cannot be written))")
API = {"translate": ["__call__", "stream", "n_best"]}  # of the others only __call__
LONGEST = 300  # seconds that one input may take


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None
    out: bytes
    err: str


def command(*arguments: str, stdin: bytes = b"") -> Ended:
    """Runs a command in this process, with everything that it writes to descriptor 2 captured."""
    out, kept = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), (sys.stdin, sys.stdout)
    sys.stdin, sys.stdout = io.TextIOWrapper(io.BytesIO(stdin)), out
    try:
        with _captured() as err:
            try:
                commands.main(list(arguments))
                code = None
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                traceback.print_exc()
                code = None
    finally:
        sys.stdin, sys.stdout = kept
    return Ended(code, out.buffer.getvalue(), err[0])


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Yields a list that holds all of standard error, also what libraries write, at the end."""
    found, saved, kept = [], os.dup(2), sys.stderr
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")
        try:
            yield found
        finally:
            sys.stderr.close()
            sys.stderr = kept
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            found.append(file.read().decode(errors="replace"))


def wrong_end(ended: Ended) -> str | None:
    """Returns why the end of a command is wrong; None if it is right."""
    errors = runs.error_lines(ended.err)
    if "Traceback (most recent call last)" in ended.err:
        return f"a traceback, exit code {ended.code}: {ended.err[-3000:]}"
    if ended.code == 0:
        return f"exit code 0 and an error: {ended.err[-500:]}" if errors else None
    if ended.code not in (1, 2) or len(errors) != 1:
        return f"exit code {ended.code} and {len(errors)} errors: {ended.err[-1000:]}"
    if ended.code == 1 and not DOCUMENTED_AS_1.match(errors[0]):
        return f"exit code 1: {errors[0]}"
    return f"an empty message: {errors[0]!r}" if len(errors[0]) < len("error: ") + 8 else None


def left_behind(folder: Path, before: dict[str, bytes], ended: Ended, *, own: str) -> str | None:
    """Returns which files of `folder` a command left.

    It may write below `own` if it succeeds, or has resumed from an earlier checkpoint.
    """
    after = runs.files_below(folder)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    aside = tuple(name.removesuffix(DAMAGED) for name in changed if name.endswith(DAMAGED))
    changed = [name for name in changed if not name.startswith(aside)]  # renamed, with a warning
    if ended.code == 0 or aside:
        changed = [
            name for name in changed if not name.startswith(own) or HALF_WRITTEN.search(name)
        ]
    return f"exit code {ended.code}, and left or changed: {changed[:5]}" if changed else None


def prepared() -> Path:
    """Returns the folder of the prepared datasets of own text."""
    return preparation.data_root() / "text_files"


def prepared_halfway() -> str | None:
    """Returns which files of a failed preparation are left in the folder of the datasets."""
    left = [str(path) for path in prepared().rglob("*") if HALF_WRITTEN.search(str(path))]
    return f"left: {left[:5]}" if left else None


def _check(arguments: list[str]) -> int:
    """As `train`, until everything is checked that is known without the data."""
    request = train_flags.parse_train(arguments)
    train.check(request.config, request.workdir or request.new_workdir)
    return 0


def _load(arguments: list[str]) -> int:
    """As `train`, until the data is loaded and the tokenizer trained."""
    request = train_flags.parse_train(arguments)
    config, _, dataset, _ = train.check(request.config, request.workdir)
    pipeline.load(config, dataset, Path("tokenizer.model"))
    Path("tokenizer.model").unlink()
    return 0


def is_small(config: Config) -> bool:
    """Whether a step of `config` is cheap enough to be tried."""
    model, data, decode = config.model, config.data, config.decode
    widths = (model.d_model, model.d_ff, model.num_heads * (model.d_head or 1), data.vocab_size)
    layers = (model.num_encoder_layers, model.num_decoder_layers, config.train.num_steps)
    return (
        max(widths) <= 2000
        and max(layers) <= 3
        and max(model.max_length, *data.buckets, model.relative_clip) <= 512
        and max(data.tokens_per_batch, decode.tokens_per_batch) <= 50_000
        and max(decode.beam_size, decode.iterations, decode.length_candidates) <= 16
        and max(config.train.decode_examples, decode.max_extra_length) <= 64
        and data.rows_multiple <= 64
        and data.dataset in OWN_TEXT
    )


class Fuzzer:
    """Tries inputs in `folder`, which holds a tiny run of each kind."""

    def __init__(self, folder: Path):
        self.root, self.sandbox = folder, folder / "sandbox"
        self.api: dict[str, object] = {}
        self.changes: dict[str, dict[str, object]] = {}
        for name, changes in KINDS_OF_RUN.items():
            (folder / "text").mkdir(exist_ok=True, parents=True)
            text = fuzzed.whole_corpus(random.Random(0), changes["data.dataset"], folder / "text")
            self.changes[name] = TINY | changes | text
            if not (folder / name).exists():
                assert runs.fit(folder / name, self.changes[name]) == 0
        self.prepared = set(prepared().glob("*"))

    @contextlib.contextmanager
    def in_process(self) -> Iterator[None]:
        """Lets commands run in this process, with the trained models loaded once."""
        kept = (runtime.start, commands.exit_now, Path.cwd())
        modules = {"translate": translate, "classify": classify, "generate": generate}
        loads = {name: module.load for name, module in modules.items()}
        runtime.start, commands.exit_now = (lambda: None), sys.exit
        commands.COMMANDS.update({"_check": _check, "_load": _load})
        for name, module in modules.items():
            self.api[name] = module.load(self.root / name)
            module.load = self._loaded(name, module.load)
        try:
            yield
        finally:
            for name, module in modules.items():
                module.load = loads[name]
            del commands.COMMANDS["_check"], commands.COMMANDS["_load"]
            runtime.start, commands.exit_now = kept[:2]
            os.chdir(kept[2])

    def _loaded(self, name: str, load):
        """Returns `load`, but with the models of the folder loaded once."""

        @functools.wraps(load)
        def once(workdir, **options):
            known = not options and Path(workdir) == self.root / name
            return self.api[name] if known else load(workdir, **options)

        return once

    def try_one(self, kind: str, number: int, seed: int) -> tuple[str, str | None]:
        """Returns the description of an input, and why its end is wrong, if it is."""
        shutil.rmtree(self.sandbox, ignore_errors=True)
        self.sandbox.mkdir()
        os.chdir(self.sandbox)
        random_ = random.Random(f"{seed} {kind} {number}")
        return getattr(self, f"_{kind}")(random_)

    def _end(self, *arguments: str, stdin: bytes = b"", own: str = "W") -> str | None:
        before = runs.files_below(self.sandbox)
        ended = command(*arguments, stdin=stdin)
        left = left_behind(self.sandbox, before, ended, own=own)
        return wrong_end(ended) or left or prepared_halfway()

    def _config(self, rng: random.Random) -> tuple[str, str | None]:
        changes = self.changes[rng.choice(["translate", "translate", *KINDS_OF_RUN])]
        flags = runs.flags(changes)
        if rng.random() < 0.3:
            Path("config.py").write_text(
                fuzzed.config_file(rng, changes), encoding="utf-8", errors="surrogatepass"
            )
            flags = ["--config=config.py"]
        given = fuzzed.overrides(rng)
        name = "_check"
        with contextlib.suppress(Exception, SystemExit), _captured():
            config = train_flags.parse_train([*flags, *given]).config
            name = rng.choices(["_check", "_load", "train"], [92, 5, 3])[0]
            name = name if is_small(config) else "_check"
        return f"{name} {flags[0]} {given}", self._end(name, *flags, *given, "--workdir=W/run")

    def _corpora(self, rng: random.Random) -> tuple[str, str | None]:
        dataset, files = fuzzed.corpus(rng, self.sandbox)
        names = {changes["data.dataset"]: name for name, changes in KINDS_OF_RUN.items()}
        changes = TINY | KINDS_OF_RUN[names[dataset]]
        changes |= {f"data.{split}_files": names for split, names in files.items()}
        changes |= {"data.vocab_size": rng.choice([280, 300, 400])}
        changes |= {"data.faults": rng.choice(["refuse", "drop"])}
        changes |= {"data.longest_line": rng.choice([50, 100_000])}
        if dataset == "parallel_text" and rng.random() < 0.5:
            changes["data.languages"] = "en,de"
        name = rng.choices(["_load", "train"], [98, 2])[0]
        flags = [*runs.flags(changes), "--workdir=W/run"]
        wrong = self._end(name, *flags, own="W")
        described = f"{name} {dataset} {files} {changes['data.faults']}"
        for made in set(prepared().glob("*")) - self.prepared:
            shutil.rmtree(made, ignore_errors=True)
        return described, wrong

    def _lines(self, rng: random.Random) -> tuple[str, str | None]:
        name = rng.choice(list(KINDS_OF_RUN))
        if rng.random() < 0.5:
            return self._objects(rng, name)
        text, flags = fuzzed.lines(rng), []
        if name == "generate":
            # An argument of a process has no NUL, and bytes that are no UTF-8 as surrogates.
            prompt = os.fsdecode(text.replace(b"\0", b"")[:200])
            flags = [f"--prompt={prompt}", f"--count={rng.choice([1, 2, 0, -1])}"]
            text = b""
        elif rng.random() < 0.5:
            Path("in").write_bytes(text)
            flags = ["--input=in", *rng.choice([[], ["--output=F"], ["--output=F.gz"]])]
        if name == "translate":
            flags += rng.choice([[], ["--long=split"], ["--window=1"], ["--prefix=Der"]])
        elif name == "classify":
            flags += rng.choice([[], ["--window=1"]])
        wrong = self._end(name, f"--workdir={self.root / name}", *flags, stdin=text, own="F")
        if wrong and "--window=1" in flags and re.search(r"changed: \['F(\.gz)?\.partial'", wrong):
            wrong = None  # the whole windows before the refused line are kept
        return f"{name} {flags} {text[:300]!r}", wrong

    def _objects(self, rng: random.Random, name: str) -> tuple[str, str | None]:
        methods = API.get(name, ["__call__"])
        method = "load" if rng.random() < 0.1 else rng.choice(methods)
        given = fuzzed.value(rng)
        options = fuzzed.options(rng, name, method)
        described = f"{name}.{method}({given!r:.300}, {options!r:.300})"
        with _captured() as err:
            try:
                if method == "load":
                    module = sys.modules[f"flaxformer_lite.{name}"]
                    workdir = self.root / name if rng.random() < 0.7 else given
                    module.load(workdir, **options)
                else:
                    list(getattr(self.api[name], method)(given, **options))
                wrong = None
            except InputError as error:
                wrong = None if str(error).strip() else "an empty message"
            except BaseException as error:
                # The commands print one message about a path of a user that cannot be.
                of_a_path = isinstance(error, OSError) and is_of_a_path(error)
                wrong = None if of_a_path else traceback.format_exc()[-3000:]
        if "Traceback" in err[0]:
            wrong = wrong or err[0][-2000:]
        return described, wrong

    def _folders(self, rng: random.Random) -> tuple[str, str | None]:
        name = rng.choice(list(KINDS_OF_RUN))
        shutil.copytree(self.root / name, self.sandbox / "W")
        damage = [fuzzed.damage(rng, self.sandbox / "W") for _ in range(rng.choice([1, 1, 2, 3]))]
        done = rng.choice([name, name, "evaluate", "train", "train"])
        flags = {"evaluate": ["--split=validation"], "generate": ["--prompt=A"]}.get(done, [])
        if done == "train" and rng.random() < 0.3:
            flags = ["--config.train.num_steps=3"]
        wrong = self._end(done, "--workdir=W", *flags, stdin=rng.choice([b"", b"", b"two days\n"]))
        return f"{done} {flags} {name} {damage}", wrong


KINDS = {"config": 0.4, "corpora": 0.15, "lines": 0.35, "folders": 0.1}  # shares of the inputs


def shares(inputs: int) -> dict[str, int]:
    """Returns how many of the inputs are of each kind."""
    return {kind: round(inputs * share) for kind, share in KINDS.items()}


def fuzz(
    fuzzer: Fuzzer, counts: dict[str, int], *, seed: int = 0, first: int = 0, seconds: float = 1e9
) -> tuple[collections.Counter, list[str]]:
    """Tries `counts` inputs of each kind, in turns; returns how many, and what ended wrongly."""
    end, tried, wrong = time.monotonic() + seconds, collections.Counter(), []
    turns = sorted(
        (number / count, kind, number) for kind, count in counts.items() for number in range(count)
    )
    with fuzzer.in_process():
        for _, kind, number in turns:
            if time.monotonic() > end:
                break
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            start = time.monotonic()
            described, problem = fuzzer.try_one(kind, first + number, seed)
            tried[kind] += 1
            tried[f"seconds of {kind}"] += time.monotonic() - start
            if problem:
                wrong.append(f"{kind} {first + number} of seed {seed}: {described}\n{problem}")
                print(wrong[-1], flush=True)
            if sum(tried[each] for each in KINDS) % 250 == 0:
                print(dict(tried), flush=True)
                jax.clear_caches()  # or the memory grows with every model
    faulthandler.cancel_dump_traceback_later()
    return tried, wrong


def main() -> None:
    """Tries the inputs that the flags say, and prints how many ended wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="default: all, in turns")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seconds", type=float, default=1e9)
    flags = parser.parse_args()
    counts = shares(flags.inputs) if flags.kind is None else {flags.kind: flags.inputs}
    runtime.quiet_libraries()
    limits = {"seed": flags.seed, "first": flags.first, "seconds": flags.seconds}
    tried, wrong = fuzz(Fuzzer(Path(_FOLDER)), counts, **limits)
    print(f"{dict(tried)}\n{len(wrong)} wrong")
    os.chdir("/")
    if "FUZZING_FOLDER" not in os.environ:
        shutil.rmtree(_FOLDER, ignore_errors=True)
    sys.stdout.flush()
    os._exit(bool(wrong))  # without waiting for threads


if __name__ == "__main__":
    main()
