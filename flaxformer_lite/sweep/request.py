"""The options of a sweep."""

from pathlib import Path
from typing import NamedTuple


class SweepRequest(NamedTuple):
    """The sweep's file, its folder, and how its points are run."""

    file: Path
    overrides: list[str]  # '--config.section.field=value', for all points
    workdir: Path
    jobs: int
    gpus: list[str]  # a job for each, which sees it alone
    storage: str | None  # URL of a database
    study: str  # the study's name in it
    worker: bool  # joins a sweep that was begun elsewhere
    retry_failed: bool
    submit: int  # workers that Slurm is to run in place of this process; 0: none
    cluster: str
    cluster_options: dict[str, str]
