"""Checkpoints of a run by Orbax, written in the background; the newest and the best are kept.

A checkpoint in `<directory>/<step>/` contains named parts, each a tree of arrays, and a JSON record
of the other state of the run. It exists completely or not at all. A damaged checkpoint is renamed,
and the one before it is used.
"""

import contextlib
import errno
import functools
import inspect
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError, NotWritten, raise_unreachable
from flaxformer_lite.system.storage import absolute, free_space, in_bucket, remove_tree
from flaxformer_lite.training.array_sums import Tree, average, checksums

DAMAGED = ".damaged"
UNFINISHED = ocp.utils.TMP_DIR_SUFFIX  # in the names of folders that Orbax is still writing
SECONDS_TO_END = 60  # of a thread of Orbax after another one has failed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax, which logs a line for each optional file that does not exist."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def silence_failed_writes() -> None:
    """Silences the exceptions that threads of Orbax log, a page each; `wait` raises them again."""
    is_other = lambda record: not (record.exc_info and "orbax" in record.pathname)  # noqa: E731
    logging.getLogger("absl").addFilter(is_other)


def _is_of_a_disk(error: Exception) -> bool:
    """Whether a write has failed, by the error or TensorStore's status at the start of its text."""
    statuses = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DATA_LOSS")
    return isinstance(error, OSError) or str(error).startswith(statuses)


@functools.cache
def silence_abandoned_reads() -> None:
    """Silences the reads that Orbax abandons after one has failed: hundreds, with a page each.

    They are coroutines that are never awaited, callbacks to a closed event loop, and exceptions
    that are never retrieved.
    """
    previous = sys.unraisablehook

    def hook(args: Any) -> None:
        of_orbax = inspect.iscoroutine(args.object) and "orbax" in args.object.cr_code.co_filename
        if not (of_orbax or str(args.exc_value) == "Event loop is closed"):
            previous(args)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(
        lambda record: "exception was never retrieved" not in record.getMessage()
    )


def _is_finished(entry: Path) -> bool:
    """Whether a checkpoint is complete: on disk by its name, in a bucket by Orbax's last file."""
    if in_bucket(entry):
        return not entry.is_dir() or ocp.utils.is_checkpoint_finalized(entry)
    return UNFINISHED not in entry.name


def _read(folder: Path, like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Reads the arrays of this process and the record, without verifying the checksums.

    It does not wait for other processes, which a process with a damaged file would never join.
    """
    items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    items["record"] = ocp.args.JsonRestore()
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    silence_abandoned_reads()
    try:
        with (
            _quiet(),
            ocp.Checkpointer(
                ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
            ) as reader,
        ):
            read = reader.restore(folder, args=ocp.args.Composite(**items))
        record = {**read["record"]}
        # Records of the first version have no checksums, but their step.
        if not isinstance(record.get("checksum", None if "step" not in record else {}), dict):
            raise ValueError("the record is not the one that was written")
        return {name: read[name] for name in like}, read["record"]
    except Exception as error:  # a damaged file may cause any exception
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        raise_unreachable(folder, cause)
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        if isinstance(cause, ValueError) and (file := _not_json(folder)):
            reason = [f"{file} is not JSON"]
        raise InputError(f"{folder}: damaged checkpoint: {reason[0]:.200}") from error


def _not_json(folder: Path) -> str | None:
    """Returns the first file of a checkpoint that should be JSON and is not, relative to it."""
    for pattern in ("*/metadata", "*/_METADATA", "*/array_metadatas/process_*"):
        for file in sorted(folder.glob(pattern)):
            try:
                json.loads(file.read_bytes())
            except (ValueError, IsADirectoryError):
                return os.fspath(file.relative_to(folder))
    return None


def _refuse(folder: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise InputError(
            f"{folder}: damaged checkpoint: the contents of {wrong[0]!r} are not those that were "
            "written"
        )


class NewestAndBest:
    """Orbax preservation policy: keeps the `newest` checkpoints, and the `best` by score.

    `scores` maps steps to scores, higher is better; the later of equal scores is better. It is read
    when a checkpoint is saved, so the score of a checkpoint may be added after it is written. A
    checkpoint of a step that is not `due` is kept while it is the newest, and does not count, so
    that a stopped and resumed run keeps the same checkpoints as a run without a stop.
    """

    def __init__(
        self, *, newest: int, best: int, scores: dict[int, float], due: Callable[[int], bool]
    ):
        self.newest, self.best, self.scores, self.due = newest, best, scores, due

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns a bool for each of Orbax's checkpoint infos, oldest first."""
        del context
        steps = [info.step for info in checkpoints]
        newest = [step for step in steps if self.due(step)][-self.newest :] + steps[-1:]
        kept = set(newest) | set(best_first(steps, self.scores)[: self.best])
        return [step in kept for step in steps]


def best_first(steps: Sequence[int], scores: dict[int, float]) -> list[int]:
    """Returns the `steps` that have a score, the highest first; the later of equal scores first."""
    return sorted(
        (step for step in steps if step in scores),
        key=lambda step: (scores[step], step),
        reverse=True,
    )


class Checkpoints:
    """The checkpoints below a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        keep_newest: int = 1,
        keep_best: int = 1,
        scores: dict[int, float] | None = None,
        due: Callable[[int], bool] = lambda step: True,
        read_only: bool = False,
    ):
        """
        Args:
          scores: step to score, higher is better; the caller updates it. None: no scores.
          due: whether a checkpoint is scheduled at a step.
        """
        self.directory = absolute(directory)
        self.scores, self.due = {} if scores is None else scores, due
        options = ocp.CheckpointManagerOptions(
            preservation_policy=NewestAndBest(
                newest=keep_newest, best=keep_best, scores=self.scores, due=due
            ),
            enable_async_checkpointing=True,
            create=not read_only,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,  # Orbax warns about 1 in a reader
        )
        if not read_only and jax.process_index() == 0:
            for entry in self._entries():
                if not _is_finished(entry):  # a process was killed while writing it
                    remove_tree(entry)
        self._bytes: int | None = None  # of the newest checkpoint
        silence_failed_writes()
        silence_abandoned_reads()
        try:
            with self._writing():
                self._manager = ocp.CheckpointManager(self.directory, options=options)
        except NotWritten:
            raise
        except Exception as error:  # Orbax reads the metadata of all steps
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise InputError(
                f"{self.directory}: the metadata of a checkpoint is damaged: {reason[0]:.200}; "
                "restore the folder from a copy, or use a new --workdir."
            ) from error

    def _entries(self) -> list[Path]:
        """Returns the files and folders; none if the directory does not exist."""
        return list(self.directory.iterdir()) if self.directory.exists() else []

    def steps(self) -> list[int]:
        """Returns the steps with a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """Returns the step of the best score, else the newest; None without a checkpoint."""
        ranked = best_first(self.steps(), self.scores) or self.steps()[-1:]
        return ranked[0] if ranked else None

    def steps_of(self, which: str, count: int, *, or_fewer: bool = False) -> list[int]:
        """Returns the 'last' `count` scheduled steps or the 'best', oldest first.

        Raises:
          InputError: fewer are kept, unless `or_fewer`.
        """
        if which == "last":
            steps, field = [step for step in self.steps() if self.due(step)][-count:], "keep_newest"
        else:
            steps, field = best_first(self.steps(), self.scores)[:count], "keep_best"
        if len(steps) < count and not or_fewer:
            scored = " with a score" if which == "best" else ""
            raise InputError(
                f"{self.directory}: {which}:{count} needs {count} checkpoints{scored}, and "
                f"{len(steps)} are kept; ask for fewer, or train with train.{field}={count} or "
                "more."
            )
        return sorted(steps)

    def save(self, step: int, parts: dict[str, Tree], record: dict[str, Any]) -> None:
        """Starts writing `parts`, of any sharding, and `record` (JSON), unless the step exists."""
        if step in self._manager.all_steps():
            return
        sums = checksums(parts, record)
        items = {name: ocp.args.StandardSave(tree) for name, tree in parts.items()}
        items["record"] = ocp.args.JsonSave({**record, "checksum": sums})
        self._bytes = sum(x.nbytes for x in jax.tree.leaves(parts))
        with self._writing():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Returns the parts of `step` and the record.

        Args:
          like: the abstract parts to read, with shapes, types and shardings.

        Raises:
          InputError: in every process, if one of them cannot read it or a checksum is wrong.
        """
        folder = self.directory / str(step)
        parts, record = multihost.together(lambda: _read(folder, like))
        sums = checksums(parts, record)
        wrong = [
            name
            for name, written in record.get("checksum", sums).items()
            if sums.get(name, written) != written
        ]
        multihost.together(lambda: _refuse(folder, wrong))
        return parts, record

    def restore_average(
        self, steps: Sequence[int], like: dict[str, Tree]
    ) -> tuple[dict[str, Tree], dict[str, Any]]:
        """Returns the mean of the parts of `steps`, and the record of the last; see `restore`.

        The message about a damaged checkpoint says which folders to remove.
        """
        records = []

        def read(step: int) -> dict[str, Tree]:
            try:
                parts, record = self.restore(step, like)
            except InputError as error:
                raise InputError(f"{error}; {self._without(step, like)}") from error
            records.append(record)
            return parts

        if len(steps) == 1:
            return read(steps[0]), records[0]
        return average(read(step) for step in steps), records[-1]

    def _without(self, damaged: int, like: dict[str, Tree]) -> str:
        """Returns what to remove so that the next best checkpoint that can be read is used."""
        steps = [step for step in reversed(self.steps()) if step != damaged]
        folders, ranked = [f"{self.directory / str(damaged)}"], best_first(steps, self.scores)
        for step in [*ranked, *(step for step in steps if step not in ranked)]:
            try:
                self.restore(step, like)
            except InputError:
                folders.append(f"{self.directory / str(step)}")
                continue
            return f"remove {' and '.join(folders)}; then step {step}, which is intact, is used."
        return "no other can be read: restore the folder from a copy, or use a new --workdir."

    def restore_newest(
        self, like: dict[str, Tree]
    ) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Returns the newest readable checkpoint, or None if there are no checkpoints.

        Logs a warning for each unreadable one, and renames it to `<step>.damaged`.

        Raises:
          InputError: there are checkpoints, but none can be read; they are left as they are.
        """
        problems = {}
        for step in reversed(self.steps()):
            try:
                restored = self.restore(step, like)
            except InputError as error:
                problems[step] = str(error)
                continue
            self._set_aside(list(problems))
            for problem in problems.values():
                logging.warning(
                    "%s; it is renamed to end in %s, and step %d is used.", problem, DAMAGED, step
                )
            return restored
        names = [entry.name for entry in self._entries() if _is_finished(entry)]
        unknown = sorted(name for name in names if not name.endswith(DAMAGED))
        if unknown and not problems:
            problems[-1] = (
                f"{self.directory}: expected checkpoints, found only {', '.join(unknown[:3])}"
            )
        if problems:
            raise InputError(
                "; ".join(problems.values())
                + ". No other checkpoint is left: restore the folder from a copy, or use a new "
                "--workdir."
            )
        return None

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        multihost.barrier("every process has read the damaged checkpoints")
        if jax.process_index() == 0:
            for step in steps:
                aside = self.directory / f"{step}{DAMAGED}"
                remove_tree(aside)
                (self.directory / str(step)).rename(aside)
        multihost.barrier("the damaged checkpoints are renamed")
        self._manager.reload()

    def wait(self) -> None:
        """Waits until everything is written; raises NotWritten if something cannot be."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits as `wait`, and ends the background threads."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises NotWritten if Orbax cannot write, now or in the background since the last call.

        The incomplete checkpoint is removed, so that its space is free.
        """
        try:
            with _quiet():
                yield
        except Exception as error:
            if not _is_of_a_disk(error):
                raise
            for thread in threading.enumerate():  # they may write other arrays of the checkpoint
                if type(thread).__module__.startswith("orbax."):
                    with contextlib.suppress(Exception):  # `join` raises what the thread has raised
                        thread.join(timeout=SECONDS_TO_END)
            for entry in self._entries():
                if not _is_finished(entry) and jax.process_index() == 0:
                    remove_tree(entry)
            full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
            reason = os.strerror(errno.ENOSPC) if full else str(error).splitlines()[0][:200]
            raise NotWritten(
                f"{self.directory}: a checkpoint cannot be written: {reason}; "
                f"{free_space(self.directory, self._bytes)}: it resumes from the newest checkpoint."
            ) from error
