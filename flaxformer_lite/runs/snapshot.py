"""Restores a workdir that a refused start has changed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.storage import absolute, in_bucket, remove_tree, write_whole

TRAIN_LINE = b'"split": "train"'


@contextlib.contextmanager
def untouched_if_refused(path: Path) -> Iterator[None]:
    """Restores the workdir `path` if the block raises ValueError before it logs a step."""
    before = _Snapshot(Workdir(absolute(path)))
    try:
        yield
    except ValueError:
        if not before.has_trained():
            before.restore()
        raise


class _Snapshot:
    """The state of a workdir before a start: its files, its config, and the length of its log."""

    def __init__(self, workdir: Workdir):
        self._workdir, self._logs_are_new = workdir, not workdir.logs.exists()
        if not self._logs_are_new or workdir.metrics.exists():
            workdir.fetch_logs()  # otherwise its files would count as new
        created = [workdir.tokenizer, workdir.config, workdir.init, workdir.init_table]
        if not in_bucket(workdir.path):  # a bucket has no empty folders
            created += [workdir.samples, workdir.checkpoints, workdir.path, *workdir.path.parents]
        self._missing = [entry for entry in created if not entry.exists()]
        self._has_log = workdir.log.exists()
        self._log_size = workdir.log.stat().st_size if self._has_log else 0
        self._steps = self._logged_steps()
        had_config = workdir.config not in self._missing
        self._config = workdir.config.read_text(encoding="utf-8") if had_config else None

    def _logged_steps(self) -> int:
        log = self._workdir.log
        return log.read_bytes().count(TRAIN_LINE) if log.exists() else 0

    def has_trained(self) -> bool:
        """Whether a step has been logged since the snapshot."""
        new_log = self._workdir.log.exists() and not self._has_log
        return new_log or self._logged_steps() > self._steps

    def restore(self) -> None:
        """Removes new files, and restores the config and the log."""
        workdir = self._workdir
        for entry in self._missing:
            with contextlib.suppress(OSError):  # it does not exist, or is not empty
                entry.rmdir() if entry.is_dir() else entry.unlink()
        if in_bucket(workdir.path) and self._logs_are_new:
            remove_tree(workdir.logs)
        if self._has_log and workdir.log.exists():
            os.truncate(workdir.log, self._log_size)
        if self._config is not None:
            write_whole(workdir.config, self._config)
