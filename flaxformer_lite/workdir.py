"""The folder of one run: what lies where in it, and what a second start may change."""

import contextlib
import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

from flaxformer_lite import config as config_lib
from flaxformer_lite.config import Config


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths below the folder `path`."""

    path: Path

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
    def profile(self) -> Path:
        """A trace of some steps, for TensorBoard and XProf."""
        return self.path / "profile"

    @property
    def samples(self) -> Path:
        """What the model wrote at each evaluation, one file each; translations that were scored, beside the scores."""
        return self.path / "samples"


def new_path(config_name: str) -> Path:
    """A folder under `runs/` named after the config and the time, to the second."""
    return Path("runs") / f"{config_name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def read_config(path: Path) -> Config:
    """The resolved config that a run has saved.

    Raises:
      ValueError: there is no such folder or run, or its config cannot be read.
    """
    file = Workdir(Path(path)).config
    if not file.is_file():
        raise ValueError(f"{path}: expected the workdir of a run, but it has no config.json; check --workdir.")
    try:
        return config_lib.resolve(json.loads(file.read_text()))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: cannot be read as a config: {error}") from error


def check(path: Path, config: Config) -> None:
    """Raises ValueError if `path` cannot be the workdir of `config`; creates nothing.

    A run that exists may go on with another `MAY_DIFFER_ON_RESUME`, and with nothing else changed.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--workdir={path}: expected a folder, but it is a file; choose another name.")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or _read_only(existing):
        raise ValueError(f"--workdir={path}: {existing} cannot be written to; choose another folder.")
    if Workdir(path).config.exists():
        for name, old, new in config_lib.differences(read_config(path), config):
            if not name.startswith(config_lib.MAY_DIFFER_ON_RESUME):
                raise ValueError(
                    f"config.{name}: the run in {path} has {old!r}, and this start asks for {new!r}; "
                    "leave it as it was, or use a new --workdir."
                )


def same_result(path: Path, config: Config) -> bool:
    """Whether a run in `path` that has ended is the result that `config` asks for, and not to be measured anew.

    Which parameters are averaged and how texts are written may change afterwards; every process must read the old
    config before one of them saves the new.
    """
    if not Workdir(path).config.exists():
        return False
    changed = [name for name, _, _ in config_lib.differences(read_config(path), config)]
    return not any(name == "train.average" or name.startswith("decode.") for name in changed)


def _read_only(folder: Path) -> bool:
    """Whether the file system refuses new entries, which the permissions of a folder do not tell."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def create(path: Path, config: Config) -> Workdir:
    """Makes the folder and saves `config` in it, whole or not at all.

    Raises:
      ValueError: the folder cannot be made or written to.
    """
    workdir = Workdir(Path(path))
    try:
        workdir.samples.mkdir(parents=True, exist_ok=True)
        write_whole(workdir.config, json.dumps(config_lib.to_dict(config), indent=2) + "\n")
    except OSError as error:
        raise ValueError(f"--workdir={path}: cannot be written to: {error.strerror}; choose another folder.") from error
    return workdir


@contextlib.contextmanager
def untouched_if_refused(path: Path) -> Iterator[None]:
    """Takes back what the block makes at `path` if it raises ValueError before it logs: bad input leaves nothing."""
    workdir = Workdir(Path(path).absolute())
    inside = (workdir.tokenizer, workdir.config, workdir.samples, workdir.checkpoints)
    missing = [entry for entry in (*inside, workdir.path, *workdir.path.parents) if not entry.exists()]
    begun = workdir.metrics.exists()
    config = None if workdir.config in missing else workdir.config.read_text(encoding="utf-8")
    try:
        yield
    except ValueError:
        for entry in missing if begun or not workdir.metrics.exists() else ():
            with contextlib.suppress(OSError):  # it was not made, or holds something else
                entry.rmdir() if entry.is_dir() else entry.unlink()
        if config is not None:
            write_whole(workdir.config, config)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes `text` at `path` by a rename, so that no reader sees a part of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
