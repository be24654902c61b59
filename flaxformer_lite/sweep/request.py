"""The options of the command `sweep`."""

from pathlib import Path
from typing import NamedTuple


class SweepRequest(NamedTuple):
    """A sweep's file, its folder, and how its points are run."""

    file: Path
    overrides: list[str]  # '--config.section.field=value', for all points
    workdir: Path
    jobs: int  # points at a time
    gpus: list[str]  # one GPU for each job, the only one visible to it
    storage: str | None  # URL of a database
    study: str  # the study's name in the database
    worker: bool  # joins a sweep that another worker has started
    retry_failed: bool
    submit: int  # number of workers to submit to Slurm instead of running points here; 0: none
    cluster: str
    cluster_options: dict[str, str]
