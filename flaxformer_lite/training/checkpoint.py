"""Checkpoints of a run: Orbax, written in the background, the newest and the best kept, several averaged.

A checkpoint lies in `<directory>/<step>/` and holds named parts, each a tree of arrays, and a JSON record of what
else the run depends on. It is complete or it is not there; one that was damaged later is set aside, and the one
before it is used.
"""

import contextlib
import functools
import inspect
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute, in_bucket, remove_tree

Tree = Any

DAMAGED = ".damaged"
UNFINISHED = ocp.utils.TMP_DIR_SUFFIX  # in the name of what Orbax had not finished writing
HASHED_AT_ONCE = 2**16  # numbers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a line for each thing that is not there, which is no news here."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def hush_remains() -> None:
    """From now on nothing is said of the reads that Orbax gives up when one has failed: hundreds, a page about each.

    They are coroutines, which complain as they are thrown away, answers that find their event loop closed, and
    errors that nobody asks for, since the first was enough.
    """
    of_others = sys.unraisablehook

    def of_all(args: Any) -> None:
        of_orbax = inspect.iscoroutine(args.object) and "orbax" in args.object.cr_code.co_filename
        if not (of_orbax or str(args.exc_value) == "Event loop is closed"):
            of_others(args)

    sys.unraisablehook = of_all
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


Place = tuple[tuple[int, int], ...]  # of a part of an array: where it begins and ends along each dimension


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _parts(x: jax.Array | np.ndarray, *, firsts: bool = False) -> dict[Place, np.ndarray]:
    """The parts of an array that this process holds, each once; `firsts`: of the copies of a part, only the first."""
    if not isinstance(x, jax.Array):
        return {_place((slice(None),) * x.ndim, x.shape): x}
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0 or not firsts]
    return {_place(shard.index, x.shape): np.asarray(shard.data) for shard in shards}


def checksum(tree: Tree) -> int:
    """32 bits of all arrays of `tree`, in order, however they are split over devices: what was read was written.

    Each array's are a sum of hashes of its numbers and their places. Where no process holds all of an array, every
    process has to ask at the same time.
    """
    arrays = jax.tree.leaves(tree)
    held = [_parts(x) for x in arrays]
    if shared := any(sum(part.size for part in parts.values()) < x.size for x, parts in zip(arrays, held, strict=True)):
        held = [_parts(x, firsts=True) for x in arrays]
    sums = [
        sum(_hash(part, place, x.shape) for place, part in parts.items()) % 2**32
        for x, parts in zip(arrays, held, strict=True)
    ]
    if shared:
        sums = multihost_utils.process_allgather(np.array(sums, np.uint32)).sum(axis=0, dtype=np.uint64) % 2**32
    return zlib.crc32(np.array(sums, np.uint32))


def _hash(part: np.ndarray, place: Place, shape: tuple[int, ...]) -> int:
    """The sum of the hashes of the numbers of a part of an array of `shape`."""
    if part.ndim > 1 and part.size > HASHED_AT_ONCE and len(part) > 1:  # in pieces that stay in a processor's cache
        middle, ((begin, end), *rest) = len(part) // 2, place
        halves = (part[:middle], (begin, begin + middle)), (part[middle:], (begin + middle, end))
        return sum(_hash(half, (where, *rest), shape) for half, where in halves)
    number = np.zeros([1] * part.ndim, np.uint32)  # of each element, in the order of the whole array
    for axis, (begin, end) in enumerate(place):
        along = np.arange(begin, end, dtype=np.uint32) * np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number = number + np.expand_dims(along, [other for other in range(part.ndim) if other != axis])
    words = (
        np.ascontiguousarray(part).view(f"u{min(4, part.itemsize)}").reshape(*part.shape, max(1, part.itemsize // 4))
    )
    mixed = (words ^ (number * np.uint32(0x9E3779B1))[..., None]) * np.uint32(0x85EBCA6B)
    return int((mixed ^ (mixed >> np.uint32(15))).sum(dtype=np.uint64))


def average(trees: Iterable[Tree]) -> Tree:
    """The mean of each array over `trees`, of the array's own type and split as it is; one tree at a time is in memory.

    It is added up in NumPy in float64, so that the mean of equal arrays is that array. Section 6.1.
    """
    total, count = None, 0
    for tree in trees:
        count += 1
        if total is None:
            like = jax.tree.map(_struct, tree)
            total = [jax.tree.map(lambda part: np.array(part, np.float64), _parts(x)) for x in jax.tree.leaves(tree)]
        else:
            _add(total, tree)
        del tree  # before the next one is read
    means = iter(total)

    def mean(struct: jax.ShapeDtypeStruct) -> jax.Array | np.ndarray:
        parts = {place: (sums / count).astype(struct.dtype) for place, sums in next(means).items()}
        if struct.sharding is None:
            return next(iter(parts.values()))
        callback = lambda index: parts[_place(index, struct.shape)]  # noqa: E731
        return jax.make_array_from_callback(struct.shape, struct.sharding, callback)

    return jax.tree.map(mean, like)


def _add(total: list[dict[Place, np.ndarray]], tree: Tree) -> None:
    for sums, x in zip(total, jax.tree.leaves(tree), strict=True):
        for place, part in _parts(x).items():
            sums[place] += part


def _struct(x: jax.Array | np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def is_due(step: int, *, num_steps: int, eval_every: int, checkpoint_every: int) -> bool:
    """Whether the schedule has a checkpoint at `step`; one of another step was saved because of a signal."""
    return step > 0 and (step % eval_every == 0 or step % checkpoint_every == 0 or step == num_steps)


def _is_finished(entry: Path) -> bool:
    """Whether all of it was written; in a bucket, where nothing can be renamed at once, Orbax's last file tells."""
    if in_bucket(entry):
        return not entry.is_dir() or ocp.utils.is_checkpoint_finalized(entry)
    return UNFINISHED not in entry.name


def _read(folder: Path, like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
    """`Checkpoints.restore` without its check, of what this process needs; it does not wait for other processes.

    As one that meets a damaged file would not come to where the others wait.
    """
    items = {name: ocp.args.StandardRestore(tree) for name, tree in like.items()}
    items["record"] = ocp.args.JsonRestore()
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    hush_remains()
    try:
        with _quiet(), ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as reader:
            read = reader.restore(folder, args=ocp.args.Composite(**items))
        return {name: read[name] for name in like}, read["record"]
    except Exception as error:  # whatever a damaged file makes a reader raise
        cause = error
        while cause.__cause__:
            cause = cause.__cause__
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        raise InputError(f"{folder}: damaged checkpoint: {reason[0]:.200}") from error


def _refuse(folder: Path, wrong: Sequence[str]) -> None:
    if wrong:
        raise InputError(f"{folder}: damaged checkpoint: the arrays of {wrong[0]!r} are not the ones that were written")


class NewestAndBest:
    """Orbax preservation policy: the newest `newest` checkpoints and the `best` of highest score, ties to the later.

    `scores` maps a step to how good its parameters are, higher is better. It is read when a checkpoint is saved, so
    a checkpoint may be written first and scored afterwards. One of a step that is not `due` is kept as long as it is
    the newest of all and takes nobody's place, so that a run that was stopped keeps what one never stopped does.
    """

    def __init__(self, *, newest: int, best: int, scores: dict[int, float], due: Callable[[int], bool]):
        self.newest, self.best, self.scores, self.due = newest, best, scores, due

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """One bool for each of Orbax's checkpoint infos, oldest first."""
        del context
        steps = [info.step for info in checkpoints]
        newest = [step for step in steps if self.due(step)][-self.newest :] + steps[-1:]
        kept = set(newest) | set(best_first(steps, self.scores)[: self.best])
        return [step in kept for step in steps]


def best_first(steps: Sequence[int], scores: dict[int, float]) -> list[int]:
    """Those of `steps` that have a score, the highest first; of equal scores the later."""
    return sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step), reverse=True)


class Checkpoints:
    """The checkpoints below one directory."""

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
          scores: step to score, higher is better; the caller's to update. None: there are none.
          due: whether the schedule has a checkpoint at a step.
        """
        self.directory = absolute(directory)
        self.scores, self.due = {} if scores is None else scores, due
        options = ocp.CheckpointManagerOptions(
            preservation_policy=NewestAndBest(newest=keep_newest, best=keep_best, scores=self.scores, due=due),
            enable_async_checkpointing=True,
            create=not read_only,
            read_only=read_only,
        )
        if not read_only and jax.process_index() == 0:
            for entry in self._entries():
                if not _is_finished(entry):  # of a process that was killed
                    remove_tree(entry)
        with _quiet():
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def _entries(self) -> list[Path]:
        """What lies in the directory, if it is there: in a bucket there are no empty folders."""
        return list(self.directory.iterdir()) if self.directory.exists() else []

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The step of the highest score that is still there, else the newest; None without a checkpoint."""
        ranked = best_first(self.steps(), self.scores) or self.steps()[-1:]
        return ranked[0] if ranked else None

    def steps_of(self, which: str, count: int, *, or_fewer: bool = False) -> list[int]:
        """The `count` steps, oldest first, that are the 'last' of the schedule or the 'best'.

        Raises:
          InputError: fewer are kept, and not as many as there are will do.
        """
        if which == "last":
            steps, field = [step for step in self.steps() if self.due(step)][-count:], "keep_newest"
        else:
            steps, field = best_first(self.steps(), self.scores)[:count], "keep_best"
        if len(steps) < count and not or_fewer:
            scored = " with a score" if which == "best" else ""
            raise InputError(
                f"{self.directory}: {which}:{count} needs {count} checkpoints{scored}, and {len(steps)} are kept; "
                f"ask for fewer, or train with train.{field}={count} or more."
            )
        return sorted(steps)

    def save(self, step: int, parts: dict[str, Tree], record: dict[str, Any]) -> None:
        """Starts writing `parts`, held in any way, and `record` (JSON); a step is written once."""
        if step in self._manager.all_steps():
            return
        sums = {name: checksum(tree) for name, tree in parts.items()}
        items = {name: ocp.args.StandardSave(tree) for name, tree in parts.items()}
        items["record"] = ocp.args.JsonSave({**record, "checksum": sums})
        with _quiet():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def restore(self, step: int, like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
        """The parts of `step` that `like` names, with its shapes, types and shardings, and the record.

        Raises:
          InputError: in some process it cannot be read, or is not what was written; then in all.
        """
        folder = self.directory / str(step)
        parts, record = multihost.together(lambda: _read(folder, like))
        sums = {name: checksum(tree) for name, tree in parts.items()}
        wrong = [name for name, written in record.get("checksum", sums).items() if sums.get(name, written) != written]
        multihost.together(lambda: _refuse(folder, wrong))
        return parts, record

    def restore_average(self, steps: Sequence[int], like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
        """As `restore`, the mean of the parts of several steps, and the record of the last.

        Raises:
          InputError: one of them cannot be read, or is not what was written.
        """
        if len(steps) == 1:
            return self.restore(steps[0], like)
        records = []

        def read(step: int) -> dict[str, Tree]:
            parts, record = self.restore(step, like)
            records.append(record)
            return parts

        return average(read(step) for step in steps), records[-1]

    def restore_newest(self, like: dict[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """The newest checkpoint that can be read, or None if there is none at all.

        One that cannot be read is named in a warning, renamed to `<step>.damaged`, and the one before it is tried.

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
                logging.warning("%s; it is renamed to end in %s, and step %d is used.", problem, DAMAGED, step)
            return restored
        names = [entry.name for entry in self._entries() if _is_finished(entry)]
        strange = sorted(name for name in names if not name.endswith(DAMAGED))
        if strange and not problems:
            problems[-1] = f"{self.directory}: expected checkpoints, found only {', '.join(strange[:3])}"
        if problems:
            raise InputError(
                "; ".join(problems.values())
                + ". No other checkpoint is left: restore the folder from a copy, or use a new --workdir."
            )
        return None

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("every process has seen the damage")
        if jax.process_index() == 0:
            for step in steps:
                aside = self.directory / f"{step}{DAMAGED}"
                remove_tree(aside)
                (self.directory / str(step)).rename(aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("the damage is set aside")
        self._manager.reload()

    def wait(self) -> None:
        """Returns when everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        self._manager.close()
