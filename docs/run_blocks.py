"""Runs the code blocks of README.md and of the pages in docs/, as a reader would paste them.

`python docs/run_blocks.py` runs all pages, two at a time; `docs/run_blocks.py PAGE ...` some of
them, `--list` prints the blocks. Each page has a fresh folder with finished tiny runs and small
text files, in which its blocks run in order: bash by `bash -euo pipefail`, Python in one process
that keeps its variables. `docs/blocks.py` describes the comments that change or exempt a block.
Pages that are notebooks are executed by Sphinx and not here.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from blocks import Block, PageError, is_notebook, read_page

ROOT = Path(__file__).resolve().parent.parent
MOST_SECONDS = 300  # of one block
TRAIN = "flaxformer-lite train --workdir=runs/{name} --config={config}"
SMALL = (
    "--config.model.d_model=32 --config.model.d_ff=64 --config.model.max_length=128 "
    "--config.data.vocab_size=600 --config.data.buckets='(64,)' --config.train.log_every=1 "
    "--config.train.num_steps=6 --config.train.eval_every=3 --config.train.checkpoint_every=3 "
    "--config.optim.warmup_steps=3 --config.train.decode_examples=4 "
    "--config.data.train_split='train[:1000]' --config.data.validation_split='validation[:50]' "
    "--config.data.test_split='test[:50]'"
)
# The commands that train each finished run.
RUNS = {
    "first": TRAIN.format(name="first", config="smoke")
    + " --config.data.tokenizer=bpe --config.train.eval_every=10 --config.train.keep_newest=5"
    " --config.train.keep_best=5",
    "lm": TRAIN.format(name="lm", config="lm")
    + f" {SMALL} --config.model.num_decoder_layers=2 --config.data.tokens_per_batch=512",
    "classifier": TRAIN.format(name="classifier", config="classifier")
    + f" {SMALL} --config.model.num_encoder_layers=2 --config.data.vocab_size=1200",
    "masked": TRAIN.format(name="masked", config="mask_predict")
    + f" {SMALL} --config.model.num_encoder_layers=1 --config.model.num_decoder_layers=1",
}
# 300, 50 and 50 pairs of phrases, and five sources.
MAKE_TEXTS = """
from pathlib import Path
from flaxformer_lite.data.cldr.phrase_families import phrases

pairs = [(phrase.source, phrase.target) for phrase in phrases("en", "de", per_kind=60)]
pairs = list(dict(pairs).items())[::-1]
assert len(pairs) >= 405, len(pairs)
for split, count in (("train", 300), ("val", 50), ("test", 50), ("input", 5)):
    part = [pairs.pop() for _ in range(count)]
    names = ["input.txt"] if split == "input" else [f"{split}.en", f"{split}.de"]
    for side, name in enumerate(names):
        Path(name).write_text("".join(f"{pair[side]}\\n" for pair in part), encoding="utf-8")
"""
# Executes the blocks that arrive as lines of JSON, and answers each with a line on descriptor 3.
PYTHON = """
import json, os, sys, traceback

answers = os.fdopen(3, "w")
namespace = {"__name__": "__main__"}
for line in sys.stdin:
    block = json.loads(line)
    source = "\\n" * (block["line"] - 1) + block["code"]
    try:
        exec(compile(source, block["page"], "exec"), namespace)
        failed = False
    except BaseException:
        traceback.print_exc()
        failed = True
    sys.stdout.flush()
    sys.stderr.flush()
    print(json.dumps(failed), file=answers, flush=True)
"""


class Outcome(NamedTuple):
    """The result of running a page."""

    page: str
    run: int
    seconds: float
    output: str  # of every block
    failed: Block | None = None
    failure: str = ""  # the output of that block


def pages(root: Path = ROOT) -> list[str]:
    """Returns README.md and the pages of docs/ that are not notebooks, by their path from root."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    names = [path.relative_to(root).as_posix() for path in found]
    return [
        name
        for name, path in zip(names, found, strict=True)
        if "_build/" not in name and not is_notebook(path.read_text(encoding="utf-8"))
    ]


def environment(root: Path = ROOT) -> dict[str, str]:
    """Returns the environment of blocks: this Python, the checkout's package, a CPU."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    python_path = [str(root), os.environ.get("PYTHONPATH", "")]
    return {
        "JAX_PLATFORMS": "cpu",
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
    }


def bash(code: str, folder: Path, log: Path) -> bool:
    """Runs bash in a folder, appends its output to `log`, and returns whether it succeeded."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", code],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return child.wait(MOST_SECONDS) == 0
        except subprocess.TimeoutExpired:
            output.write(f"\nnot finished after {MOST_SECONDS} s\n".encode())
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and its background processes
            child.wait()


class PythonProcess:
    """A Python process in a folder that executes blocks one after another."""

    def __init__(self, folder: Path, log: Path):
        reads, writes = os.pipe()
        # Descriptor 3 is the other end of the pipe, whatever its number is in this process.
        script = (
            f'exec "$0" -u -c "$1" 3>&{writes} {writes}>&-'
            if writes != 3
            else 'exec "$0" -u -c "$1"'
        )
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                ["bash", "-c", script, sys.executable, PYTHON],
                cwd=folder,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writes,),
                start_new_session=True,
            )
        os.close(writes)
        self._answers = os.fdopen(reads)

    def run(self, block: Block) -> bool:
        """Executes a block, and returns whether it succeeded."""
        request = {"page": block.page, "line": block.line, "code": block.code}
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._answers.readline)
            try:
                line = answer.result(MOST_SECONDS)
            except concurrent.futures.TimeoutError:
                self.close()
                return False
        return line.strip() == "false"

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._answers.close()


def run_page(blocks: Sequence[Block], folder: Path) -> Outcome:
    """Runs the blocks of a page in a folder, up to the first that fails."""
    start, run, process, output = time.monotonic(), 0, None, ""
    log = folder.parent / f"{folder.name}.log"
    try:
        for block in blocks:
            if block.not_run:
                continue
            log.write_bytes(b"")
            succeeded = all(bash(command, folder, log) for command in block.first)
            if succeeded and block.language == "python":
                process = process or PythonProcess(folder, log)
                succeeded = process.run(block)
            elif succeeded:
                succeeded = bash(block.code, folder, log)
            printed = log.read_text(encoding="utf-8", errors="replace")
            output += f"--- {block.page}:{block.line}\n{block.code}---\n{printed}"
            if not succeeded:
                return Outcome(block.page, run, time.monotonic() - start, output, block, printed)
            run += 1
    finally:
        if process:
            process.close()
    return Outcome(blocks[0].page, run, time.monotonic() - start, output)


def prepare(folder: Path, names: Sequence[str]) -> None:
    """Makes the small texts and trains the finished runs in a folder; those there are kept.

    Raises:
      RuntimeError: a command failed.
    """
    link_checkout(folder)

    def make(task: tuple[str, str]) -> None:
        name, command = task
        log = folder / f"{name}.log"
        log.write_bytes(b"")
        if not bash(command, folder, log):
            output = log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"preparing {name} failed: {command}\n{output}")

    if not (folder / "input.txt").exists():
        make(("texts", f"python - <<'EOF'\n{MAKE_TEXTS}\nEOF\n"))
    missing = [name for name in names if not (folder / f"{name}.done").exists()]
    tasks = [(name, f"rm -rf runs/{name}; {RUNS[name]}; touch {name}.done") for name in missing]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(make, tasks))


def link_checkout(folder: Path) -> None:
    """Links the launcher and the configs of the checkout into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.py", "configs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def page_folder(prepared: Path, folder: Path) -> Path:
    """Returns a new folder with the links, texts and runs of the prepared one."""
    link_checkout(folder)
    for path in prepared.iterdir():
        if path.is_file() and path.suffix not in (".log", ".done") and path.name != "train.py":
            shutil.copy(path, folder)
    if (prepared / "runs").exists():
        shutil.copytree(prepared / "runs", folder / "runs")
    return folder


def needed_runs(blocks: Sequence[Block]) -> list[str]:
    """Returns the names of the finished runs that the blocks mention; all if one has `runs/*`."""
    code = "\n".join("\n".join((*block.first, block.code)) for block in blocks if not block.not_run)
    return [name for name in RUNS if re.search(rf"runs/({name}\b|\*|\$)", code)]


def run_all(by_page: dict[str, list[Block]], work: Path, prepared: Path) -> Iterator[Outcome]:
    """Yields the outcome of each page; two pages run at a time."""

    def run_one(blocks: list[Block]) -> Outcome:
        folder = page_folder(prepared, work / blocks[0].page.replace("/", "-"))
        return run_page(blocks, folder)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        longest_first = sorted(by_page.values(), key=lambda blocks: -len(blocks))
        futures = [pool.submit(run_one, blocks) for blocks in longest_first]
        for future in concurrent.futures.as_completed(futures):
            yield future.result()


def describe_failure(outcome: Outcome) -> str:
    """Returns the page, the line, the block and the output of a failure."""
    block = outcome.failed
    changed = "" if block.code == block.printed else f"run as:\n{block.code}"
    first = "".join(f"run first: {command}\n" for command in block.first)
    return (
        f"{block.page}:{block.line}: a block of {block.language} failed\n{first}{block.printed}"
        f"{changed}printed:\n{outcome.failure[-8000:]}"
    )


def list_blocks(blocks: Sequence[Block]) -> None:
    """Prints the blocks, one a line."""
    for block in blocks:
        note = f"  (not run: {block.not_run})" if block.not_run else ""
        first_line = block.code.strip().splitlines()[0] if block.code.strip() else ""
        print(f"{block.page}:{block.line}: {block.language}: {first_line}{note}")


def report(outcomes: Sequence[Outcome], blocks: Sequence[Block], seconds: float) -> None:
    """Prints the slowest pages, the blocks that were not run, and the summary."""
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[:8]:
        print(f"{outcome.seconds:6.1f} s  {outcome.page} ({outcome.run} blocks)")
    exempt = [block for block in blocks if block.not_run]
    list_blocks(exempt)
    failed = sum(outcome.failed is not None for outcome in outcomes)
    run = sum(outcome.run for outcome in outcomes)
    print(
        f"{len(outcomes)} pages, {run} blocks run, {failed} failed, {len(exempt)} not run, "
        f"{seconds:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns its exit code: 1 if a block fails or cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="Markdown files; default: all")
    parser.add_argument("--list", action="store_true", help="print the blocks and run none")
    parser.add_argument("--show", action="store_true", help="print the output of every block")
    help_prepared = "folder of the finished runs, kept for the next call; default: a temporary one"
    parser.add_argument("--prepared", type=Path, metavar="DIR", help=help_prepared)
    options = parser.parse_args(arguments)
    names = options.pages or pages()
    try:
        by_page = {
            name: read_page(Path(name) if options.pages else ROOT / name, name) for name in names
        }
    except (PageError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    blocks = [block for blocks in by_page.values() for block in blocks]
    if options.list:
        list_blocks(blocks)
        return 0
    return run_pages(by_page, blocks, options.prepared, options.show)


def run_pages(
    by_page: dict[str, list[Block]], blocks: list[Block], prepared: Path | None, show: bool
) -> int:
    """Runs pages in a temporary folder, prints failures and the summary; returns the exit code."""
    start, outcomes = time.monotonic(), []
    by_page = {page: found for page, found in by_page.items() if any(not b.not_run for b in found)}
    with tempfile.TemporaryDirectory(prefix="run_blocks-") as temporary:
        work = Path(temporary)
        prepared = (prepared or work / "prepared").resolve()
        try:
            prepare(prepared, needed_runs(blocks))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"prepared in {time.monotonic() - start:.0f} s", flush=True)
        for outcome in run_all(by_page, work, prepared):
            outcomes.append(outcome)
            if show:
                print(outcome.output, flush=True)
            if outcome.failed:
                print(f"\n{describe_failure(outcome)}", flush=True)
    report(outcomes, blocks, time.monotonic() - start)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
