"""The metric of a program: `train.metric_command` reads files of texts, and prints a number.

A metric that needs a library of its own, such as a learned one, runs in the program's environment.
A program that fails costs the run its number, and nothing else.
"""

import concurrent.futures
import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from flaxformer_lite.checks.metric_checks import metric_words
from flaxformer_lite.fields import TrainConfig
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.storage import absolute, in_bucket
from flaxformer_lite.training.interrupt import Background

POLL_SECONDS = 0.05
MEET_SECONDS = 1.0  # between meetings of the processes; a collective that waits for 60 s fails
TAIL_BYTES = 1 << 16  # of the program's output, which contains its last line
LONGEST_MESSAGE = 200  # characters of the program's own words


class _Failed(Exception):
    """The program has returned no number, for this reason."""


def measure_together(
    train: TrainConfig,
    *,
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    folder: Path | None,
    between: Callable[[], None],
) -> float:
    """Returns `measure` of process 0 in every process of the run.

    Args:
      between: is called in every process each second; its exceptions end the program.
    """
    ended = threading.Event()

    def raise_if_ended() -> None:
        if ended.is_set():
            raise _Failed("the program was ended")

    run = functools.partial(
        measure,
        train,
        sources=sources,
        hypotheses=hypotheses,
        references=references,
        folder=folder,
        while_waiting=raise_if_ended,
    )
    futures = [Background.once(run)] if jax.process_index() == 0 else []
    try:
        while True:
            concurrent.futures.wait(futures, timeout=MEET_SECONDS)
            results = [future.result() for future in futures if future.done()]
            if found := multihost.gather(results)[0]:
                return float(found[0])
            between()
    finally:
        ended.set()
        concurrent.futures.wait(futures)  # the process may end next, and the program with it


def measure(
    train: TrainConfig,
    *,
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    folder: Path | None,
    while_waiting: Callable[[], None],
) -> float:
    """Returns the number that `train.metric_command` prints; NaN if it prints none.

    In that case one line on standard error has the reason.

    Args:
      folder: for the files of the texts, and for the output of the program; None, or one in a
        bucket: a temporary one.
      while_waiting: is called while the program runs; its exceptions end the program.
    """
    assert train.metric_command is not None, "the config has a command"
    texts = {"hypotheses": [hypotheses], "references": references, "sources": [sources]}
    try:
        with _folder(folder) as place:
            files = {name: _written(place, name, each) for name, each in texts.items()}
            words = _with_files(metric_words(train.metric_command), files)
            _run(words, place, seconds=train.metric_seconds, while_waiting=while_waiting)
            return _number(place / "output.txt")
    except _Failed as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    print(
        f"train.metric_command: {reason}; this evaluation has no {train.metric_name}.",
        file=sys.stderr,
        flush=True,
    )
    return math.nan


@contextlib.contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    """Creates the folder of the files; a temporary one is removed at the end."""
    if folder is None or in_bucket(folder):
        with tempfile.TemporaryDirectory(prefix="metric_command-") as name:
            yield Path(name)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield absolute(folder)


def _written(folder: Path, name: str, lists: Sequence[Sequence[str]]) -> list[Path]:
    """Writes each list of texts to a file, one text a line; returns the paths.

    A line end in a text becomes a space.
    """
    paths = []
    for number, texts in enumerate(lists, start=1):
        path = folder / (f"{name}.txt" if len(lists) == 1 else f"{name}.{number}.txt")
        lines = (text.replace("\r", " ").replace("\n", " ") for text in texts)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        paths.append(path)
    return paths


def _with_files(words: Sequence[str], files: Mapping[str, Sequence[Path]]) -> list[str]:
    """Returns the words with paths for placeholders; a word of {references} once for each file."""
    program, *arguments = words
    filled = [program]
    for word in arguments:
        for reference in files["references"] if "{references}" in word else [Path()]:
            paths = {"hypotheses": files["hypotheses"][0], "sources": files["sources"][0]}
            each = word
            for name, path in {**paths, "references": reference}.items():
                each = each.replace(f"{{{name}}}", str(path))
            filled.append(each)
    return filled


def _run(
    words: Sequence[str], folder: Path, *, seconds: float, while_waiting: Callable[[], None]
) -> None:
    """Runs a program to its end, without a shell, with its output in files of `folder`.

    Kills it, and the processes that it has started, after `seconds`.

    Raises:
      _Failed: it cannot start, takes too long, or fails.
    """
    end = time.monotonic() + seconds
    with (folder / "output.txt").open("wb") as output, (folder / "errors.txt").open("wb") as errors:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # so that its children can be killed with it
            )
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise _Failed(f"{words[0]} cannot be started: {reason}") from None
        try:
            while process.poll() is None:
                while_waiting()
                if time.monotonic() > end:
                    raise _Failed(
                        f"{words[0]} ran for more than train.metric_seconds = {seconds:g} s, and "
                        "was killed"
                    )
                time.sleep(POLL_SECONDS)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        said = _last_line(folder / "errors.txt") or "it wrote nothing to standard error"
        raise _Failed(f"{words[0]} failed with code {process.returncode}: {said[:LONGEST_MESSAGE]}")


def _number(path: Path) -> float:
    """Returns the number in the last line of a file; raises _Failed if there is none."""
    line = _last_line(path)
    try:
        value = float(line)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _Failed(f"expected a number in the last line, got {line[:LONGEST_MESSAGE]!r}")
    return value


def _last_line(path: Path) -> str:
    """Returns the last line of a file that is not blank; '' if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
