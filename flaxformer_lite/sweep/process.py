"""One training run of a sweep in a process of its own, so that a crash cannot end the sweep."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STOPPED = (143, 130, -signal.SIGTERM, -signal.SIGINT)  # ended by a signal: the run can resume
TRAIN = (sys.executable, "-m", "flaxformer_lite.cli.sweep_child")
PATIENCE = 120.0  # seconds that a stopped run has to save its state before it is killed


class Run:
    """A started training process. It ends when this process ends, even if this one is killed."""

    def __init__(self, arguments: Sequence[str], *, log: Path, lock: Path, env: Mapping[str, str]):
        """
        Args:
          arguments: of `train`.
          log: the process appends its output to this file.
          lock: held while the process runs; it first waits for an earlier run of the same folder.
          env: variables to add to those of this process.
        """
        self.log, self._log_start = log, log.stat().st_size if log.exists() else 0
        self._stop_time: float | None = None
        child_end, lifeline = os.pipe()
        self._lifeline: int | None = lifeline
        command = [*TRAIN, str(child_end), str(lock), *arguments]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[child_end],
                    # Ctrl-C in a terminal goes to the sweep only, which then stops its runs.
                    start_new_session=True,
                )
        except OSError:
            os.close(lifeline)
            raise
        finally:
            os.close(child_end)

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs, negative for the signal that killed it."""
        code = self._process.poll()
        if (
            code is None
            and self._stop_time is not None
            and time.monotonic() - self._stop_time > PATIENCE
        ):
            self._process.kill()
        if code is not None:
            self._close_lifeline()
        return code

    def stop(self) -> None:
        """Sends SIGTERM: the run saves its state and ends."""
        if self._stop_time is None and self.code is None:
            self._stop_time = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once, and waits for its end."""
        self._process.kill()
        self._process.wait()
        self._close_lifeline()

    def reason(self) -> str:
        """Returns why the run has failed, from its exit code and its part of the log."""
        code = self.code
        assert code is not None, "the run has not ended"
        return failure_reason(code, self.log, self._log_start)

    def _close_lifeline(self) -> None:
        """Closes this end of the pipe, if it is still open."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def failure_reason(code: int, log: Path, log_start: int = 0) -> str:
    """Returns the last error message of a failed process, or the signal that killed it.

    Args:
      code: exit code, negative for a signal.
      log_start: the process's output starts at this byte of the log.
    """
    if code < 0:
        name = signal.Signals(-code).name
        cause = ", probably because the machine ran out of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{cause}; see {log}"
    output = log.read_bytes()[log_start:] if log.exists() else b""
    lines = output.decode(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    messages = errors or [line for line in lines if line.strip()] or ["no output"]
    return f"{messages[-1]} (exit code {code}; see {log})"
