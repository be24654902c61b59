"""`python -m flaxformer_lite.cli.sweep_child PIPE LOCK ...`: `train ...`, ended when the other end of PIPE is closed.

The system closes it when the sweep that started the run dies, however it dies. No run goes on without its sweep: the
next start of the sweep would train in the same folder.
"""

import os
import sys
import threading
from pathlib import Path

from flaxformer_lite.cli import commands
from flaxformer_lite.system import storage


def main() -> None:
    """Trains while the sweep lives, alone in its folder."""
    pipe, lock, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with, args=(int(pipe),), daemon=True).start()
    with storage.locked(Path(lock)):
        commands.main(["train", *arguments])


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(137)  # at once, as SIGKILL would: checkpoints are whole at any time


if __name__ == "__main__":
    main()
