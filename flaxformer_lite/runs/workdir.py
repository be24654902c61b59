"""The folder of a run: its files, its lock, and the settings that a resumed run may change."""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flaxformer_lite import config as config_lib
from flaxformer_lite.field_rules import FIXED_BY_WEIGHTS
from flaxformer_lite.fields import Config, DataConfig
from flaxformer_lite.system.errors import InputError, NotWritten
from flaxformer_lite.system.storage import (
    NO_LOCKS,
    absolute,
    check_bucket,
    check_utf8,
    in_bucket,
    is_copied,
    make_folder,
    nearest_existing,
    on_disk,
    place,
    remove_tree,
    why_unwritable,
    write_whole,
)

RETRIES = 9  # of creating a folder that another process may remove
# of `data`: how a run before these fields reads its texts
OF_OLD_RUNS = {"normalization": "none", "quoted": False}
LOCK_TIMEOUT = 120.0  # seconds that a training waits for another one in its folder


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths below the folder `path`."""

    path: Path

    @property
    def logs(self) -> Path:
        """The folder on disk to which process 0 writes the log; a bucket cannot append to files."""
        return on_disk(self.path, "logs")

    @property
    def config(self) -> Path:
        """The resolved config, as JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """The log, with a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model."""
        return self.path / "tokenizer.model"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, with a folder for each step."""
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """The source of imported weights, as JSON; does not exist for other runs."""
        return self.path / "imported.json"

    @property
    def init(self) -> Path:
        """The origin of the first parameters, as JSON; does not exist for random ones."""
        return self.path / "init.json"

    @property
    def init_table(self) -> Path:
        """A table of the first parameters: where each comes from."""
        return self.path / "init.txt"

    @property
    def log(self) -> Path:
        """The `metrics.jsonl` that process 0 appends to."""
        return self.logs / self.metrics.name

    @property
    def profile(self) -> Path:
        """The trace of some steps, for TensorBoard and XProf; part of the log."""
        return self.logs / "profile"

    @property
    def samples(self) -> Path:
        """The generated texts of each evaluation, and the scored translations with their scores."""
        return self.path / "samples"

    def fetch_logs(self) -> None:
        """Replaces the log on this disk by that of the bucket, unless the former continues it.

        If the bucket has none, the log is empty.
        """
        if self.logs == self.path:
            return
        published = self.metrics.read_bytes() if self.metrics.exists() else b""
        if published and self.log.exists() and self.log.read_bytes().startswith(published):
            return
        remove_tree(self.logs)
        self.logs.mkdir(parents=True)
        if published:
            self.log.write_bytes(published)

    def publish_logs(self) -> None:
        """Copies the changed files of the log to the bucket; logs a warning if that fails."""
        if self.logs == self.path:
            return
        metrics_first = lambda file: (file.name != self.metrics.name, file)  # noqa: E731
        for file in sorted(self.logs.rglob("*"), key=metrics_first):
            copy = self.path / file.relative_to(self.logs)
            try:
                if file.is_file() and not is_copied(file, copy):
                    write_whole(copy, file.read_bytes())
            except Exception as error:  # a network failure must not stop training
                logging.warning("%s: not copied from %s now: %s", copy, file, error)

    def write_sample(self, name: str, text: str) -> None:
        """Writes `samples/<name>`, or warns of a failing bucket or of a folder with this name."""
        try:
            write_whole(self.samples / name, text)
        except OSError as error:
            if not (in_bucket(self.path) or isinstance(error, NotWritten)):
                raise
            logging.warning("%s: not written: %s", self.samples / name, error)


def new_path(config_name: str) -> Path:
    """Returns a folder under `runs/` named after the config and the time, to the second."""
    return Path("runs") / f"{config_name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def has_run(path: Path) -> bool:
    """Whether `path` is the workdir of a run.

    Raises:
      InputError: it is in a bucket that cannot be read.
    """
    path = place(path)
    if in_bucket(path):
        check_bucket(path)
    return Workdir(path).config.is_file()


def read_config(path: Path) -> Config:
    """Returns the resolved config that a run has saved.

    Raises:
      InputError: the folder or the run does not exist, or its config cannot be read.
    """
    file = Workdir(place(path)).config
    check_utf8(place(path))
    if not has_run(path):
        raise InputError(
            "expected the workdir of a run, but it has no config.json; check --workdir.",
            where=str(path),
        )
    try:
        saved = json.loads(file.read_text())
        for name, value in OF_OLD_RUNS.items():
            saved["data"].setdefault(name, value)
        return config_lib.resolve(saved)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{file}: cannot be read as a config: {reason}; put the run's own config.json back."
        ) from error


def check(path: Path, config: Config) -> None:
    """Raises InputError if `path` cannot be the workdir of `config`; creates nothing.

    An existing run may only resume with changes of `MAY_DIFFER_ON_RESUME`. Imported weights before
    the first step allow every change that keeps the model.
    """
    path = place(path)
    check_utf8(path)
    if in_bucket(path):
        check_bucket(path)
    else:
        _check_folder(path)
    if Workdir(path).config.exists():
        untrained = is_untrained(path)
        if untrained and config.data.dataset == DataConfig().dataset:
            raise InputError(
                f"config.data.dataset: expected what the imported weights in {path} are to "
                f"learn, and {config.data.dataset!r} is the default; name it, for example "
                "parallel_text with data.train_files."
            )
        for name, old, new in config_lib.differences(read_config(path), config):
            may_differ = name.startswith(config_lib.MAY_DIFFER_ON_RESUME)
            if not (name not in FIXED_BY_WEIGHTS if untrained else may_differ):
                raise InputError(
                    f"config.{name}: the run in {path} has {old!r}, and this start asks for "
                    f"{new!r}; leave it as it was, or use a new --workdir."
                )


def is_untrained(path: Path) -> bool:
    """Whether `path` contains imported weights, and no checkpoint of a later step.

    Raises:
      InputError: there are no checkpoints at all.
    """
    paths = Workdir(place(path))
    if not paths.imported.exists():
        return False
    entries = paths.checkpoints.iterdir() if paths.checkpoints.exists() else ()
    steps = {entry.name for entry in entries if entry.name.isdecimal()}
    if not steps:
        raise InputError(
            f"{paths.checkpoints}: the imported weights are gone; import them again, to a new "
            "--workdir."
        )
    return steps == {"0"}


def has_checkpoint(path: Path) -> bool:
    """Whether the workdir `path` has a checkpoint; in a bucket it may be unfinished."""
    folder = Workdir(place(path)).checkpoints
    entries = folder.iterdir() if folder.exists() else ()
    return any(entry.name.isdecimal() for entry in entries)


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"--workdir={path}: expected a folder, but it is a file; choose another.")
    run = Workdir(path)
    folders = (run.checkpoints, run.samples)
    for entry in (run.config, run.metrics, run.tokenizer, *folders):
        if entry.exists() and entry.is_dir() != (entry in folders):
            one, other = ("file", "folder") if entry.is_dir() else ("folder", "file")
            raise InputError(
                f"{entry}: expected a {one}, but it is a {other}; remove it, or use another folder."
            )
    if why_unwritable(path):
        raise InputError(
            f"--workdir={path}: {nearest_existing(path)} cannot be written to; choose another "
            "folder."
        )


def same_result(path: Path, config: Config) -> bool:
    """Whether the test line of a finished run in `path` is still its result with `config`.

    It is not if `train.average`, the external metric or the decoding have changed. Every process
    must call this before one of them saves the new config.
    """
    if not Workdir(place(path)).config.exists():
        return False
    changed = [name for name, _, _ in config_lib.differences(read_config(path), config)]
    of_result = ("decode.", "train.average", "train.metric_command", "train.metric_name")
    return not any(name.startswith(of_result) for name in changed)


def create(path: Path, config: Config) -> Workdir:
    """Creates the folder and saves `config` in it atomically.

    Raises:
      InputError: the folder cannot be created or written to.
    """
    workdir = Workdir(place(path))
    try:
        make_folder(workdir.samples)
        write_whole(workdir.config, json.dumps(config_lib.to_dict(config), indent=2) + "\n")
        workdir.fetch_logs()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"--workdir={path}: cannot be written to: {reason}; choose another folder."
        ) from error
    return workdir


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Locks the workdir `path` for this training; a workdir in a bucket, on this machine only.

    Waits `LOCK_TIMEOUT` seconds for another training: a scheduler may restart a run while the old
    process still saves. Creates the folder, and removes it if it stays empty. On a disk without
    locks other trainings are not excluded.

    Raises:
      InputError: another training still has the lock, or the folder cannot be created.
    """
    workdir = Workdir(absolute(path))
    file = (
        workdir.logs / ".lock"
        if workdir.logs == workdir.path
        else workdir.logs.with_name(f"{workdir.logs.name}.lock")
    )
    created: list[Path] = []
    try:
        lock = _lock(file, path, created)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"--workdir={path}: cannot be written to: {reason}; choose another folder."
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)
        for folder in created:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock(file: Path, workdir: Path, created: list[Path]) -> int:
    """Opens and locks `file`, until it is closed or the process dies; appends new folders."""
    start, warned, lost = time.monotonic(), False, 0
    while time.monotonic() - start <= LOCK_TIMEOUT:
        created += [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # another process removed the folder in between
            if lost == RETRIES:
                raise
            lost += 1
            continue
        if _try_lock(file, opened):
            return opened
        os.close(opened)
        if not warned and time.monotonic() - start > 2:
            logging.warning(
                "%s: another process is training in it; waiting for that to end", workdir
            )
            warned = True
        time.sleep(0.2)
    raise InputError(
        f"--workdir={workdir}: another process is training in it; wait for that or stop it, or use "
        "a new --workdir."
    )


def _try_lock(file: Path, opened: int) -> bool:
    """Locks `opened` if no other process has the lock and it still is `file`; whether it did.

    On a disk without locks it does nothing, and returns True.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return True
        os.close(opened)
        raise
    with contextlib.suppress(FileNotFoundError):  # the last owner of the lock removed the file
        return os.path.samestat(os.fstat(opened), file.stat())
    return False
