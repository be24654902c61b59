"""A point while this worker runs it: one training process after another, one for each seed."""

import time

from flaxformer_lite.runs import metrics_log
from flaxformer_lite.sweep import space
from flaxformer_lite.sweep.process import STOPPED, Run
from flaxformer_lite.sweep.results import PointFolder, evaluations
from flaxformer_lite.sweep.space import Point, Sweep
from flaxformer_lite.sweep.study import COMPLETE, FAILED, PRUNED, Claim, Study
from flaxformer_lite.system.storage import write_whole

LOG_INTERVAL = 1.0  # seconds between two reads of a run's log
# A point has failed after this number of starts in a row that a signal ended before a new step.
FRUITLESS_STARTS = 3


class ActivePoint:
    """Runs the seeds of a point, reports its evaluations, and writes its final state.

    Attributes:
      claim: of the point.
      env: variables for its processes.
      lost: whether another worker has taken over the point.
    """

    def __init__(
        self,
        claim: Claim,
        point: Point,
        folder: PointFolder,
        study: Study,
        sweep: Sweep,
        env: dict[str, str],
    ):
        self.claim, self.env, self.lost = claim, env, False
        self._point, self._folder, self._study = point, folder, study
        self._settings, self._seeds = sweep.settings, list(sweep.settings.seeds)
        self._reported: set[int] = set()  # steps whose evaluation the study has
        self._checked, self._log_size = -LOG_INTERVAL, -1
        self._step = self._first_step = self._fruitless = 0
        self._best: float | None = None
        self._pruned = self._finished = False
        folder.write(point)
        title = f"Point {claim.point} of the sweep {sweep.file.stem}: {point.label}"
        write_whole(folder.config, space.as_file(point.config, title))
        self._run: Run | None = None
        self._start()

    def _start(self) -> Run:
        """Starts the run of the next seed; after an OSError the next `has_ended` tries again."""
        self._run = None
        seed, self._log_size, self._first_step = self._seeds[0], -1, self._step
        arguments = [f"--config={self._folder.config}", f"--workdir={self._folder.workdir(seed)}"]
        arguments += [f"--config.{name}={seed}" for name in space.PER_RUN]
        # Each run is one process, even if a pod or Slurm reports several to the worker.
        arguments += ["--num_processes=1"]
        lock = self._folder.path / "lock"
        self._run = run = Run(arguments, log=self._folder.log(seed), lock=lock, env=self.env)
        return run

    def stop(self) -> None:
        """Makes the run save its state and end."""
        if self._run is not None:
            self._run.stop()

    def is_running(self) -> bool:
        """Whether a process is running."""
        return self._run is not None and self._run.code is None

    def progress(self) -> tuple[int, str]:
        """Returns the point's number, and its progress in one line."""
        steps = self._point.config.train.num_steps
        seed = f"seed {self._seeds[0]}, " if len(self._settings.seeds) > 1 else ""
        best = "" if self._best is None else f", {self._settings.objective} {self._best:.4g}"
        return self.claim.point, f"{self._point.label}: {seed}step {self._step}/{steps}{best}"

    def has_ended(self) -> bool:
        """Checks on the run; returns True once the point has a final state or is `lost`."""
        if self._finished or self.lost:
            return True
        run = self._start() if self._run is None else self._run
        code = run.code
        if code is None and time.monotonic() - self._checked < LOG_INTERVAL:
            return False
        self._checked = time.monotonic()
        if not self._study.renew(self.claim):
            self.lost = True
            run.kill()
            return True
        self._read_log()
        return code is not None and self._run_ended(run, code)

    def _run_ended(self, run: Run, code: int) -> bool:
        """Ends the point, or starts its next run, after a run has ended with exit code `code`."""
        if self._pruned:
            return self._end(PRUNED, f"after step {max(self._reported)}")
        if code in STOPPED and self._fruitless < FRUITLESS_STARTS:
            self._fruitless = 0 if self._step > self._first_step else self._fruitless + 1
            self._start()
            return False
        if code:
            return self._end(FAILED, run.reason())
        objective = self._settings.objective
        if objective not in (self._folder.result(self._seeds[0], self._settings) or {}):
            return self._end(FAILED, f"no evaluation has a finite {objective}; see {run.log}")
        if len(self._seeds) == 1:
            return self._end(COMPLETE)
        self._seeds.pop(0)
        self._step = self._fruitless = 0
        self._start()
        return False

    def _read_log(self) -> None:
        """Reads the run's log if it has grown; reports new evaluations of the first seed."""
        file = self._folder.workdir(self._seeds[0]) / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        if size == self._log_size:
            return
        lines = metrics_log.read_metrics(file)
        self._step = max((line["step"] for line in lines if line["split"] == "train"), default=0)
        evaluated = evaluations(lines, self._settings.objective)
        if evaluated:
            self._best = (min if self._settings.minimizes else max)(evaluated.values())
        if self._seeds[0] == self._settings.seeds[0]:
            self._report(evaluated)
        self._log_size = size

    def _report(self, evaluated: dict[int, float]) -> None:
        """Reports new evaluations to the pruner, and stops the run if the point is pruned."""
        for step, value in evaluated.items():
            if step not in self._reported and not self._pruned:
                prune = self._study.report(self.claim, step, value)
                self._reported.add(step)
                if prune and step < self._point.config.train.num_steps:
                    self._pruned = True
                    self.stop()

    def _end(self, state: str, reason: str = "") -> bool:
        """Writes the final state to the folder; returns True.

        The worker reports it to the study afterwards. If it dies in between, the next worker finds
        the state in the folder, and reports it without a run.
        """
        self._folder.write(self._point, state=state, reason=reason)
        self._finished = True
        return True
