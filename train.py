"""Trains a config: `python train.py [--config=configs/x.py] [--workdir=W] [--config.section.field=value ...]`.

Without flags: `configs/default.py`, into a new folder under `runs/`. With the workdir of a run that was stopped, it
goes on from the newest checkpoint. `python train.py --help` lists the flags.
"""

import sys

from flaxformer_lite.cli.commands import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
