"""The folder of one run: what lies where in it, and what a second start may change."""

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
from flaxformer_lite.config import Config, DataConfig
from flaxformer_lite.fields import FIXED_BY_WEIGHTS
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import (
    NO_LOCKS,
    absolute,
    check_bucket,
    in_bucket,
    make_folder,
    on_disk,
    place,
    remove_tree,
    what_exists,
    why_unwritable,
    write_whole,
)

STEP_LOGGED = b'"split": "train"'
TRIES = 9  # to make a folder that somebody else may be taking away; some can be made by nobody
PATIENCE = 120.0  # seconds that a training waits for another one in its folder


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths below the folder `path`."""

    path: Path

    @property
    def logs(self) -> Path:
        """Where process 0 writes the log: the folder itself, or on its disk for a bucket, which takes no additions."""
        return on_disk(self.path, "logs")

    @property
    def config(self) -> Path:
        """The resolved config, JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        """The SentencePiece model."""
        return self.path / "tokenizer.model"

    @property
    def checkpoints(self) -> Path:
        """One folder a step."""
        return self.path / "checkpoints"

    @property
    def imported(self) -> Path:
        """Where the weights of step 0 came from, JSON, if they came from elsewhere."""
        return self.path / "imported.json"

    @property
    def log(self) -> Path:
        """The `metrics.jsonl` that process 0 adds to."""
        return self.logs / self.metrics.name

    @property
    def profile(self) -> Path:
        """A trace of some steps, for TensorBoard and XProf; part of the log."""
        return self.logs / "profile"

    @property
    def samples(self) -> Path:
        """What the model wrote at each evaluation, one file each; translations that were scored, beside the scores."""
        return self.path / "samples"

    def fetch_logs(self) -> None:
        """The log on this disk begins as the bucket has it, unless it is the same and goes on."""
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
        """Copies to the bucket what of the log has changed; what cannot be copied now is told, and stays on disk."""
        if self.logs == self.path:
            return
        for file in sorted(self.logs.rglob("*"), key=lambda file: (file.name != self.metrics.name, file)):
            copy = self.path / file.relative_to(self.logs)
            try:
                if file.is_file() and not (copy.exists() and copy.stat().length == file.stat().st_size):
                    write_whole(copy, file.read_bytes())
            except Exception as error:  # of the network, of credentials, of the server: no reason to stop training
                logging.warning("%s: not copied from %s now: %s", copy, file, error)

    def write_sample(self, name: str, text: str) -> None:
        """Writes `samples/<name>`; where a bucket does not take it, that is told, and is no reason to stop training."""
        try:
            write_whole(self.samples / name, text)
        except OSError as error:
            if not in_bucket(self.path):
                raise
            logging.warning("%s: not written: %s", self.samples / name, error)


def new_path(config_name: str) -> Path:
    """A folder under `runs/` named after the config and the time, to the second."""
    return Path("runs") / f"{config_name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def has_run(path: Path) -> bool:
    """Whether `path` is the workdir of a run. Raises InputError if it is in a bucket that cannot be read."""
    path = place(path)
    if in_bucket(path):
        check_bucket(path)
    return Workdir(path).config.is_file()


def read_config(path: Path) -> Config:
    """The resolved config that a run has saved.

    Raises:
      InputError: there is no such folder or run, or its config cannot be read.
    """
    file = Workdir(place(path)).config
    if not has_run(path):
        raise InputError(f"{path}: expected the workdir of a run, but it has no config.json; check --workdir.")
    try:
        return config_lib.resolve(json.loads(file.read_text()))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{file}: cannot be read as a config: {error}") from error


def check(path: Path, config: Config) -> None:
    """Raises InputError if `path` cannot be the workdir of `config`; creates nothing.

    A run that exists may go on with another `MAY_DIFFER_ON_RESUME`, and with nothing else changed; imported weights
    that no step has changed yet may be trained in any way, as the model that they are.
    """
    path = place(path)
    if in_bucket(path):
        check_bucket(path)
    else:
        _check_folder(path)
    if Workdir(path).config.exists():
        untrained = is_untrained(path)
        if untrained and config.data.dataset == DataConfig().dataset:
            raise InputError(
                f"config.data.dataset: expected what the imported weights in {path} are to learn, and "
                f"{config.data.dataset!r} is the default; name it, for example parallel_text with data.train_files."
            )
        for name, old, new in config_lib.differences(read_config(path), config):
            free = name not in FIXED_BY_WEIGHTS if untrained else name.startswith(config_lib.MAY_DIFFER_ON_RESUME)
            if not free:
                raise InputError(
                    f"config.{name}: the run in {path} has {old!r}, and this start asks for {new!r}; "
                    "leave it as it was, or use a new --workdir."
                )


def is_untrained(path: Path) -> bool:
    """Whether `path` holds imported weights, and no checkpoint of a later step.

    Raises:
      InputError: the weights are gone, and no checkpoint is there.
    """
    paths = Workdir(place(path))
    if not paths.imported.exists():
        return False
    entries = paths.checkpoints.iterdir() if paths.checkpoints.exists() else ()
    steps = {entry.name for entry in entries if entry.name.isdecimal()}
    if not steps:
        raise InputError(f"{paths.checkpoints}: the imported weights are gone; import them again, to a new --workdir.")
    return steps == {"0"}


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"--workdir={path}: expected a folder, but it is a file; choose another name.")
    if why_unwritable(path):
        raise InputError(f"--workdir={path}: {what_exists(path)} cannot be written to; choose another folder.")


def same_result(path: Path, config: Config) -> bool:
    """Whether a run in `path` that has ended is the result that `config` asks for, and not to be measured anew.

    Which parameters are averaged and how texts are written may change afterwards; every process must read the old
    config before one of them saves the new.
    """
    if not Workdir(place(path)).config.exists():
        return False
    changed = [name for name, _, _ in config_lib.differences(read_config(path), config)]
    return not any(name == "train.average" or name.startswith("decode.") for name in changed)


def create(path: Path, config: Config) -> Workdir:
    """Makes the folder and saves `config` in it, whole or not at all.

    Raises:
      InputError: the folder cannot be made or written to.
    """
    workdir = Workdir(place(path))
    try:
        make_folder(workdir.samples)
        write_whole(workdir.config, json.dumps(config_lib.to_dict(config), indent=2) + "\n")
        workdir.fetch_logs()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--workdir={path}: cannot be written to: {reason}; choose another folder.") from error
    return workdir


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keeps every other training out of `path`, as far as its disk has locks; of a bucket those on this machine.

    One that is there is waited for `PATIENCE` seconds: a scheduler may start a run anew while the old one still saves.
    The folder is made, and taken away if nothing came into it.

    Raises:
      InputError: another one is still there, or the folder cannot be made.
    """
    workdir = Workdir(absolute(path))
    file = (
        workdir.logs / ".lock" if workdir.logs == workdir.path else workdir.logs.with_name(f"{workdir.logs.name}.lock")
    )
    made: list[Path] = []
    try:
        lock = _lock(file, path, made)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--workdir={path}: cannot be written to: {reason}; choose another folder.") from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)
        for folder in made:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


def _lock(file: Path, workdir: Path, made: list[Path]) -> int:
    """`file`, opened and locked until it is closed, or the process dies however it dies; `made` gets new folders."""
    begun, told, lost = time.monotonic(), False, 0
    while time.monotonic() - begun <= PATIENCE:
        made += [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            if lost == TRIES:
                raise
            lost += 1  # who was there has taken away the folder it had made, between the two
            continue
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in NO_LOCKS:
                return opened
            os.close(opened)
            raise
        else:
            with contextlib.suppress(FileNotFoundError):  # who had it has taken it away meanwhile
                if os.path.samestat(os.fstat(opened), file.stat()):
                    return opened
        os.close(opened)
        if not told and time.monotonic() - begun > 2:
            logging.warning("%s: another process is training in it; waiting for that to end", workdir)
            told = True
        time.sleep(0.2)
    raise InputError(
        f"--workdir={workdir}: another process is training in it; wait for that or stop it, or use a new --workdir."
    )


@contextlib.contextmanager
def untouched_if_refused(path: Path) -> Iterator[None]:
    """Undoes what the block writes at `path` if it raises ValueError before it trains: bad input leaves nothing.

    Once a step is logged, the run has begun, or gone on, as the new config says.
    """
    before = _Before(Workdir(absolute(path)))
    try:
        yield
    except ValueError:
        if not before.has_trained():
            before.restore()
        raise


class _Before:
    """A workdir as it was before a start: what there was, its config, and the length of its log."""

    def __init__(self, workdir: Workdir):
        self._workdir, self._logs_are_new = workdir, not workdir.logs.exists()
        if not self._logs_are_new or workdir.metrics.exists():
            workdir.fetch_logs()  # else what it brings would be taken for new
        made = [workdir.tokenizer, workdir.config]
        if not in_bucket(workdir.path):  # a bucket has no empty folders
            made += [workdir.samples, workdir.checkpoints, workdir.path, *workdir.path.parents]
        self._missing = [entry for entry in made if not entry.exists()]
        self._has_log = workdir.log.exists()
        self._log_size = workdir.log.stat().st_size if self._has_log else 0
        self._steps = self._logged_steps()
        self._config = None if workdir.config in self._missing else workdir.config.read_text(encoding="utf-8")

    def _logged_steps(self) -> int:
        return self._workdir.log.read_bytes().count(STEP_LOGGED) if self._workdir.log.exists() else 0

    def has_trained(self) -> bool:
        """Whether a step has been logged since."""
        return self._logged_steps() > self._steps or (self._workdir.log.exists() and not self._has_log)

    def restore(self) -> None:
        """Removes what is new, and puts the config and the log back."""
        workdir = self._workdir
        for entry in self._missing:
            with contextlib.suppress(OSError):  # it was not made, or holds something else
                entry.rmdir() if entry.is_dir() else entry.unlink()
        if in_bucket(workdir.path) and self._logs_are_new:
            remove_tree(workdir.logs)
        if self._has_log and workdir.log.exists():
            os.truncate(workdir.log, self._log_size)
        if self._config is not None:
            write_whole(workdir.config, self._config)
