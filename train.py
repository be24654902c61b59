"""Trains a config: `python train.py [--config=X] [--workdir=W] [--config.section.field=value ...]`.

Without flags, trains `configs/default.py` in a new folder under `runs/`. With the workdir of a run
that was stopped, resumes from its newest checkpoint. `python train.py --help` lists the flags.
"""

import sys

from flaxformer_lite.cli.commands import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
