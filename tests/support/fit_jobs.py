"""Fits several runs: `fit_jobs.py JOBS FLAGS`, where JOBS is a JSON list of [workdir, changes]."""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import runs

from flaxformer_lite.cli import parser, train_flags
from flaxformer_lite.system import runtime
from flaxformer_lite.training import processes

if __name__ == "__main__":
    jobs, *flags = sys.argv[1:]
    runtime.start()
    processes.initialize(*train_flags.parse_train(["--config=smoke", *flags]).processes)
    code = 0
    for workdir, changes in json.loads(jobs):
        code = code or runs.fit(Path(workdir), changes)
    parser.exit_now(code)
