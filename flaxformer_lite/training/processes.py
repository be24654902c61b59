"""How the processes of a run find each other."""

import os
import re

import jax

from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError

HEARTBEAT_TIMEOUT = 30  # seconds; then a process counts as dead, and the others end


def initialize(address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Connects this process with the other processes of the run.

    They are found by the three flags, or else by the environment of a TPU pod or a Slurm step.
    Without any of these, or with `num_processes` = 1 alone, the run has one process.

    Raises:
      InputError: only some of the three flags are given, or one is invalid.
    """
    given = [flag is not None for flag in (address, num_processes, process_id)]
    if num_processes == 1 and sum(given) == 1:
        return
    if address is not None and num_processes is not None and process_id is not None:
        _check(address, num_processes, process_id)
        if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            address, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT
        )
    elif any(given):
        raise InputError(
            "--coordinator_address, --num_processes and --process_id go together: give all three."
        )
    elif _is_slurm_step_of_many() or is_tpu_host():
        # JAX detects the address and the numbers
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)


def _check(address: str, num_processes: int, process_id: int) -> None:
    """Raises InputError if a flag is invalid."""
    if not re.fullmatch(r".+:\d+", address):
        raise InputError(
            f"--coordinator_address: expected HOST:PORT of process 0, got {address!r}."
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise InputError(
            f"--process_id: expected 0 to --num_processes - 1, got {process_id} of "
            f"{num_processes} processes."
        )


def _is_slurm_step_of_many() -> bool:
    """Whether srun has started several tasks; a batch script itself is 1 task."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def is_tpu_host() -> bool:
    """Whether this machine has a TPU that JAX may use."""
    platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
    return "tpu" in platforms and runtime.has_tpu()
