"""Workers started by a scheduler: one Slurm job array, through submitit."""

import os
import sys

from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.system.errors import InputError


def submit(request: SweepRequest) -> str:
    """Submits `request.submit` workers, each as `sweep --worker`; returns their job ids as text.

    Raises:
      InputError: submitit or the scheduler is missing, or rejects an option.
    """
    try:
        import submitit
    except ImportError as error:
        raise InputError(
            "--submit: needs the extra for sweeps: pip install 'flaxformer_lite[sweep]'."
        ) from error
    command = worker_command(request)
    options = {
        name: int(value) if value.isdecimal() else value
        for name, value in request.cluster_options.items()
    }
    # Slurm sends this signal before a time limit or a preemption. On SIGTERM a worker's runs save
    # their state, and the worker releases its points.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    try:
        executor = submitit.AutoExecutor(
            folder=request.workdir.absolute() / "cluster", cluster=request.cluster
        )
        executor.update_parameters(name="flaxformer_lite", **options)
        with executor.batch():
            jobs = [
                executor.submit(submitit.helpers.CommandFunction(command))
                for _ in range(request.submit)
            ]
    except Exception as error:  # from the scheduler's commands, or for an unknown option
        raise InputError(f"--submit: {request.cluster} rejected the jobs: {error}") from error
    ids = ", ".join(job.job_id for job in jobs)
    return f"{len(jobs)} workers: jobs {ids}; their logs: {executor.folder}"


def worker_command(request: SweepRequest) -> list[str]:
    """Returns the command line of one worker of the sweep."""
    command = [sys.executable, "-m", "flaxformer_lite", "sweep", "--worker"]
    command += [f"--sweep={request.file.absolute()}", f"--workdir={request.workdir.absolute()}"]
    command += [f"--jobs={request.jobs}", *request.overrides]
    if request.gpus:
        command += [f"--gpus={','.join(request.gpus)}"]
    if request.storage:
        command += [f"--storage={request.storage}", f"--study={request.study}"]
    return command
