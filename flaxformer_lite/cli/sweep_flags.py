"""Flags of `sweep` and `sweep-report`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from flaxformer_lite import config_files
from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import define_in
from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place


def parse_sweep(arguments: Sequence[str]) -> SweepRequest:
    """Parses the flags of `sweep`.

    Raises:
      InputError: a flag is missing, or has no effect.
    """
    usage = (
        "usage: sweep --sweep=X --workdir=S [--jobs=1] [--gpus=0,1] [--storage=URL] [--worker]\n"
        "       [--submit=8 --cluster_options=slurm_partition=gpu] "
        "[--config.section.field=value ...]"
    )
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, _define, usage=usage)
    _check_installed()
    _check(values)
    options = dict(option.split("=", 1) for option in values.cluster_options if "=" in option)
    if len(options) < len(values.cluster_options):
        raise InputError(
            "--cluster_options: expected name=value, several with commas, got "
            f"{values.cluster_options}."
        )
    workdir = _folder(values.workdir)
    return SweepRequest(
        config_files.find_config(values.sweep, flag="--sweep", kind="sweeps"),
        overrides,
        workdir,
        values.jobs or len(values.gpus) or 1,
        values.gpus,
        values.storage,
        values.study or workdir.absolute().name,
        values.worker,
        values.retry_failed,
        values.submit,
        values.cluster,
        options,
    )


def _define(values: flags.FlagValues) -> None:
    flag = define_in(values)
    flag.string("sweep", None, "sweep file, or the name of a sweep in the package")
    flag.string("workdir", None, "folder of the sweep, on a disk that all workers share")
    jobs = "runs at the same time; default: 1, or one for each of --gpus"
    flag.integer("jobs", None, jobs, lower_bound=1)
    flag.list("gpus", [], "indices of GPUs, as 0,1; each job uses one")
    flag.string("storage", None, "URL of the study's database; default: a file in the workdir")
    flag.string("study", None, "name of the study in the database; default: that of the workdir")
    flag.boolean("worker", False, "join the sweep that another worker started in the workdir")
    flag.boolean("retry_failed", False, "run failed points once more")
    flag.integer("submit", 0, "start this many workers as one Slurm job array", lower_bound=0)
    flag.string("cluster", "slurm", "with --submit: slurm, or local for processes on this machine")
    options = "with --submit: options of submitit, name=value,name=value"
    flag.list("cluster_options", [], options)


def _check(values: flags.FlagValues) -> None:
    """Raises InputError if flags are missing or contradict each other."""
    for name, expected in (("sweep", "a sweep's file"), ("workdir", "a folder for the sweep")):
        if not values[name].value:
            raise InputError(f"--{name}: expected {expected}, got nothing; add --{name}=...")
    if values.gpus and values.jobs not in (None, len(values.gpus)):
        raise InputError(
            f"--jobs: expected {len(values.gpus)}, one for each of --gpus, or nothing; got "
            f"{values.jobs}."
        )
    if values.study is not None and values.storage is None:
        raise InputError(
            "--study: requires --storage=URL; the file in the workdir holds one study."
        )
    if values.retry_failed and values.submit:
        raise InputError(
            "--retry_failed: applies only to a worker in this process; leave out --submit, or this."
        )
    if values.cluster_options and not values.submit:
        raise InputError("--cluster_options: requires --submit=WORKERS.")
    if values.cluster not in ("slurm", "local"):
        raise InputError(f"--cluster: expected slurm or local, got {values.cluster!r}.")
    if values["cluster"].present and not values.submit:
        raise InputError("--cluster: requires --submit=WORKERS.")


def parse_report(arguments: Sequence[str]) -> Path:
    """Returns the argument of `sweep-report`, the folder of a sweep."""
    words: list[str] = []
    parser.parse(arguments, lambda values: None, usage="usage: sweep-report FOLDER", words=words)
    _check_installed()
    if len(words) != 1:
        raise InputError(
            f"sweep-report: expected the folder of a sweep, got {' '.join(words) or 'nothing'}."
        )
    return _folder(words[0])


def _check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise InputError("sweep: needs the extra for sweeps: pip install 'flaxformer_lite[sweep]'.")


def _folder(name: str) -> Path:
    if in_bucket(name):
        raise InputError(
            f"{name}: expected a folder on a disk that all workers see; a sweep cannot be in a "
            "bucket."
        )
    return place(name)
