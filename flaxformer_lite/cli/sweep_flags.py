"""The flags of `sweep` and `sweep-report`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from flaxformer_lite import config_files
from flaxformer_lite.cli import parser
from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket


def parse_sweep(arguments: Sequence[str]) -> SweepRequest:
    """Flags of `sweep`.

    Raises:
      InputError: a flag is missing, or would be ignored.
    """

    def define(values: flags.FlagValues) -> None:
        text, number, switch = flags.DEFINE_string, flags.DEFINE_integer, flags.DEFINE_boolean
        text("sweep", None, "a sweep's file, or the name of a shipped one", flag_values=values)
        text("workdir", None, "folder of the sweep, which all workers see", flag_values=values)
        number("jobs", None, "points at a time; default: 1, or one for each GPU", lower_bound=1, flag_values=values)
        flags.DEFINE_list("gpus", [], "numbers of GPUs: each job sees one of them", flag_values=values)
        text("storage", None, "URL of a database for the study; default: a file in the workdir", flag_values=values)
        text("study", None, "name of the study in the database; default: the workdir's", flag_values=values)
        switch("worker", False, "join the sweep in the workdir, which another worker has begun", flag_values=values)
        switch("retry_failed", False, "run points that have failed once more", flag_values=values)
        number("submit", 0, "have Slurm run so many workers, as one array", lower_bound=0, flag_values=values)
        text("cluster", "slurm", "--submit: slurm, or local for processes of this machine", flag_values=values)
        options = "--submit: options of submitit, as slurm_partition=gpu,gpus_per_node=1,timeout_min=600"
        flags.DEFINE_list("cluster_options", [], options, flag_values=values)

    _check_installed()
    usage = (
        "usage: sweep --sweep=X --workdir=S [--jobs=1] [--gpus=0,1] [--storage=URL] [--worker]\n"
        "       [--submit=8 --cluster_options=slurm_partition=gpu] [--config.section.field=value ...]"
    )
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage)
    for name, what in (("sweep", "a sweep's file"), ("workdir", "a folder for the sweep")):
        if not values[name].value:
            raise InputError(f"--{name}: expected {what}, got nothing; add --{name}=...")
    if values.gpus and values.jobs not in (None, len(values.gpus)):
        raise InputError(f"--jobs: expected {len(values.gpus)}, one for each of --gpus, or nothing; got {values.jobs}.")
    if values.study is not None and values.storage is None:
        raise InputError("--study: goes with --storage=URL; the file in the workdir holds one study.")
    if values.retry_failed and values.submit:
        raise InputError("--retry_failed: goes with a worker of this process; leave out --submit, or this.")
    if values.cluster_options and not values.submit:
        raise InputError("--cluster_options: goes with --submit=WORKERS.")
    if values.cluster not in ("slurm", "local"):
        raise InputError(f"--cluster: expected slurm or local, got {values.cluster!r}.")
    if values["cluster"].present and not values.submit:
        raise InputError("--cluster: goes with --submit=WORKERS.")
    options = dict(option.split("=", 1) for option in values.cluster_options if "=" in option)
    if len(options) < len(values.cluster_options):
        raise InputError(f"--cluster_options: expected name=value, several with commas, got {values.cluster_options}.")
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


def parse_report(arguments: Sequence[str]) -> Path:
    """The one word of `sweep-report`: the folder of a sweep."""
    _check_installed()
    words: list[str] = []
    parser.parse(arguments, lambda values: None, usage="usage: sweep-report FOLDER", words=words)
    if len(words) != 1:
        raise InputError(f"sweep-report: expected the folder of a sweep, got {' '.join(words) or 'nothing'}.")
    return _folder(words[0])


def _check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise InputError("sweep: needs the extra for sweeps: pip install 'flaxformer_lite[sweep]'.")


def _folder(name: str) -> Path:
    if in_bucket(name):
        raise InputError(f"{name}: expected a folder on a disk that all workers see; a sweep cannot lie in a bucket.")
    return Path(name)
