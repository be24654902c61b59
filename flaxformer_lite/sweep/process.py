"""One run of a point, in a process of its own: what it takes of the machine, and how it ends, is its own affair."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

STOPPED = (143, 130, -signal.SIGTERM, -signal.SIGINT)  # a signal has ended the run: it can go on
TRAIN = (sys.executable, "-m", "flaxformer_lite.cli.sweep_child")
PATIENCE = 120.0  # seconds that a run has to save what it has


class Run:
    """A training that has been started. It ends with this process, however this one ends."""

    def __init__(self, arguments: Sequence[str], *, log: Path, lock: Path, env: Mapping[str, str]):
        """
        Args:
          arguments: of `train`.
          log: gets what it prints, after what is there.
          lock: held while it runs; a run of the same folder that still ends is waited for.
          env: variables beside those of this process.
        """
        self.log, self._said_before = log, log.stat().st_size if log.exists() else 0
        self._stopping: float | None = None
        theirs, self._lifeline = os.pipe()
        command = [*TRAIN, str(theirs), str(lock), *arguments]
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs],
                    start_new_session=True,  # Ctrl-C in a terminal is for the sweep, which tells its runs
                )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(theirs)

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs; negative for the signal that killed it."""
        code = self._process.poll()
        if code is None and self._stopping is not None and time.monotonic() - self._stopping > PATIENCE:
            self._process.kill()
        if code is not None:
            self._let_go()
        return code

    def stop(self) -> None:
        """Asks it to save and stop."""
        if self._stopping is None and self.code is None:
            self._stopping = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait()
        self._let_go()

    def _let_go(self) -> None:
        """Closes the pipe of a process that has ended, once."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def reason(self) -> str:
        """Why it has failed: its last message, and its exit code."""
        said = self.log.read_bytes()[self._said_before :] if self.log.exists() else b""
        lines = said.decode(errors="replace").splitlines()
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        last = told or [line for line in lines if line.strip()] or ["it said nothing"]
        if self.code < 0:
            name = signal.Signals(-self.code).name
            short = ", as a system does that is short of memory" if -self.code == signal.SIGKILL else ""
            return f"killed by {name}{short}; see {self.log}"
        return f"{last[-1]} (exit code {self.code}; see {self.log})"
