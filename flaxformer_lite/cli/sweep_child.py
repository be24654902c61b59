"""`python -m flaxformer_lite.cli.sweep_child PIPE LOCK ...`: runs `train ...` for a sweep.

The process ends when the other end of PIPE is closed. The operating system closes it when the
sweep's process dies for any reason. A run must not outlive its sweep: the next start of the sweep
trains in the same folder.
"""

import os
import sys
import threading
from pathlib import Path

from flaxformer_lite.cli import commands
from flaxformer_lite.system import storage


def main() -> None:
    """Trains while the sweep runs, with the folder's lock held."""
    pipe, lock, *arguments = sys.argv[1:]
    threading.Thread(target=_exit_with_sweep, args=(int(pipe),), daemon=True).start()
    with storage.locked(Path(lock)):
        commands.main(["train", *arguments])


def _exit_with_sweep(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(137)  # at once, as SIGKILL would; checkpoints are complete at any time


if __name__ == "__main__":
    main()
