"""Workers that a scheduler starts: one array of Slurm's, through submitit."""

import os
import sys

from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.system.errors import InputError


def submit(request: SweepRequest) -> str:
    """Has `request.submit` workers run, each as `sweep --worker` would; returns which jobs they are.

    Raises:
      InputError: submitit or the scheduler is not there, or knows no such option.
    """
    try:
        import submitit
    except ImportError as error:
        raise InputError("--submit: needs the extra for sweeps: pip install 'flaxformer_lite[sweep]'.") from error
    command = [sys.executable, "-m", "flaxformer_lite", "sweep", "--worker", f"--sweep={request.file.absolute()}"]
    command += [f"--workdir={request.workdir.absolute()}", f"--jobs={request.jobs}", *request.overrides]
    if request.gpus:
        command += [f"--gpus={','.join(request.gpus)}"]
    if request.storage:
        command += [f"--storage={request.storage}", f"--study={request.study}"]
    options = {name: int(value) if value.isdecimal() else value for name, value in request.cluster_options.items()}
    # What Slurm sends before a time limit or a preemption: a worker then has its runs save, and leaves its points.
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "TERM"
    try:
        executor = submitit.AutoExecutor(folder=request.workdir.absolute() / "cluster", cluster=request.cluster)
        executor.update_parameters(name="flaxformer_lite", **options)
        with executor.batch():
            jobs = [executor.submit(submitit.helpers.CommandFunction(command)) for _ in range(request.submit)]
    except Exception as error:  # of the scheduler's commands, or for an unknown option
        raise InputError(f"--submit: {request.cluster} did not take it: {error}") from error
    return f"{len(jobs)} workers: jobs {', '.join(job.job_id for job in jobs)}; their logs: {executor.folder}"
