"""Child processes of benchmarks: they find the checkout's packages, and end with their parent."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
GRACE = 60  # seconds for a training to write its checkpoint
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def environment(**more: str) -> dict[str, str]:
    """Returns the variables of a child, which finds the checkout's packages from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path} | more


def call(words: Sequence[str], variables: Mapping[str, str]) -> int:
    """Returns the exit code of a command, run in the checkout.

    If a signal stops this process, the command and all processes that it started end first.
    """
    with _signals_raise():
        child = subprocess.Popen(words, cwd=ROOT, env=variables, start_new_session=True)
        try:
            return child.wait()
        finally:
            if child.returncode is None:
                _end(child)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Lets signals raise SystemExit with the exit code of a shell."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(leader: subprocess.Popen) -> None:
    """Ends the leader's group: asks it to, and kills the rest after GRACE or another signal."""
    try:
        os.killpg(leader.pid, signal.SIGTERM)
        ends = time.monotonic() + GRACE
        while _runs(leader) and time.monotonic() < ends:
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def _runs(leader: subprocess.Popen) -> bool:
    """Returns whether a process of the leader's group is left."""
    leader.poll()  # an ended process stays in its group until its parent has asked
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True
