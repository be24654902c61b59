"""A worker: takes points of a sweep, trains them in processes of their own, and tells the study how they went."""

import contextlib
import statistics
import time
from collections.abc import Sequence

from flaxformer_lite.runs import metrics_log
from flaxformer_lite.sweep import check, space
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.process import STOPPED, Run
from flaxformer_lite.sweep.results import ENDED, PointFolder, SweepFolder, evaluations
from flaxformer_lite.sweep.space import Point, Sweep
from flaxformer_lite.sweep.study import AWAY, COMPLETE, FAILED, LEASE, PRUNED, Claim, Study
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training.interrupt import Interrupt

NAP = 0.2  # seconds between looks at the processes
LOOK = 1.0  # seconds between looks at a log, or at the study where nothing is free to run
FRUITLESS = 3  # starts in a row, each ended by a signal and none with a step more, after which a point has failed


class Worker:
    """Runs points of `sweep` in `folder`, as `study` hands them out."""

    def __init__(
        self, sweep: Sweep, folder: SweepFolder, study: Study, *, jobs: int, gpus: Sequence[str], board: Board
    ):
        """
        Args:
          jobs: points at a time.
          gpus: what CUDA_VISIBLE_DEVICES is for each of them; none: as it is.
        """
        self._sweep, self._folder, self._study, self._board = sweep, folder, study, board
        self._free = [{"CUDA_VISIBLE_DEVICES": gpus[job]} if gpus else {} for job in range(jobs)]
        self._active: list[_Active] = []
        self._claimed: Claim | None = None  # what is not yet at work
        self._looked = -LOOK  # when the study was last asked for a point

    def work(self) -> int:
        """Goes on until all points have ended, here or with another worker; returns 0, or a signal's exit code.

        A signal has the runs save what they have; their points are left to whoever comes next.

        Raises:
          InputError: the study's storage has been away for as long as a lease lasts.
        """
        away_since = None
        with Interrupt() as interrupt:
            try:
                while not interrupt.requested:
                    try:
                        if self._look():
                            break
                        if away_since is not None:
                            self._study.states()  # not every look asks the study
                            away_since = None
                    except AWAY as error:
                        self._study.look_anew()
                        if away_since is None:
                            away_since = time.monotonic()
                            self._board.say(f"the study or its folder cannot be used for now: {error}")
                        elif time.monotonic() - away_since > LEASE:
                            raise InputError(f"the study could not be used for {LEASE:.0f} s: {error}") from error
                    time.sleep(NAP)
            finally:
                self._leave()
        return interrupt.exit_code

    def _look(self) -> bool:
        """Starts what can be started and looks after what runs; True once all points have ended.

        Where the storage is away, it can be called again: nothing is noted as done here that the study does not know.
        """
        if self._free and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            if not self._fill() and self._study.ended():
                return True
        for each in list(self._active):
            if each.has_ended():
                if not each.lost:
                    self._tell(each.claim)
                self._active.remove(each)
                self._free.append(each.env)
                self._looked = -LOOK  # the next one starts at once
        self._board.show([each.progress() for each in self._active], self._study.states)
        return False

    def _fill(self) -> bool:
        """Starts points while there is room for more and one to start; returns whether any is at work."""
        while self._free:
            self._claimed = self._claimed or self._study.claim()
            if self._claimed is None:
                break
            claim, folder = self._claimed, self._folder.point(self._claimed.point)
            try:
                point = self._point(claim)
            except InputError as error:  # a corner of the space that no sample has met
                if isinstance(error.__cause__, AWAY):
                    raise error.__cause__ from None
                params = dict(claim.trial.params)
                nothing = Point(params, self._sweep.base, space.label(params))
                folder.write(nothing, state=FAILED, reason=str(error))
            if (folder.read() or {}).get("state") in ENDED:  # or whoever ended it could not tell the study
                self._tell(claim)
            else:
                self._active.append(_Active(claim, point, folder, self._study, self._sweep, self._free[-1]))
                self._free.pop()
            self._claimed = None
        return bool(self._active)

    def _point(self, claim: Claim) -> Point:
        """The point that a claim stands for; the trial gets its parameters."""
        if self._sweep.points is None:
            point = self._sweep.suggested(claim.trial)
            self._study.keep_params(claim)
            if fault := check.fault(point.config, self._sweep.settings):
                raise InputError(fault)
            return point
        point = self._sweep.points[claim.point]
        for name in point.params:
            options = [each.params[name] for each in self._sweep.points if name in each.params]
            claim.trial.suggest_categorical(name, list(dict.fromkeys(map(space.scalar, options))))
        return point

    def _tell(self, claim: Claim) -> None:
        """Tells the study, and whoever watches, how a point has ended."""
        settings, folder = self._sweep.settings, self._folder.point(claim.point)
        known, value = folder.read(), None
        if known["state"] == COMPLETE:
            value = statistics.fmean(run.values[settings.objective] for run in folder.runs(settings))
        self._study.finish(claim, known["state"], value, known["reason"])
        how = f"{settings.objective} {value:.4g}" if value is not None else known["reason"]
        self._board.say(f"point {claim.point} ({known['label']}): {known['state']}, {how}")

    def _leave(self) -> None:
        """Has all runs save and stop, and lets go of their points."""
        for each in self._active:
            each.stop()
        while any(each.is_running() for each in self._active):
            with contextlib.suppress(*AWAY):
                for each in self._active:
                    self._study.renew(each.claim)
            time.sleep(NAP)
        for claim in [each.claim for each in self._active] + ([self._claimed] if self._claimed else []):
            with contextlib.suppress(*AWAY):  # then the lease runs out
                self._study.release(claim)


class _Active:
    """A point that is being run: its seeds one after another."""

    def __init__(
        self, claim: Claim, point: Point, folder: PointFolder, study: Study, sweep: Sweep, env: dict[str, str]
    ):
        self.claim, self.env, self.lost = claim, env, False
        self._point, self._folder, self._study, self._settings = point, folder, study, sweep.settings
        self._seeds = list(self._settings.seeds)
        self._told: set[int] = set()  # steps whose evaluation the study knows
        self._looked, self._size = -LOOK, -1
        self._step = self._begun_at = self._fruitless = 0
        self._best: float | None = None
        self._hopeless = self._through = False
        folder.write(point)
        title = f"Point {claim.point} of the sweep {sweep.file.stem}: {point.label}"
        write_whole(folder.config, space.as_file(point.config, title))
        self._run: Run | None = None
        self._start()

    def _start(self) -> None:
        """Starts the run of the next seed; what cannot be started now is tried again at the next look."""
        self._run = None
        seed, self._size, self._begun_at = self._seeds[0], -1, self._step
        arguments = [f"--config={self._folder.config}", f"--workdir={self._folder.workdir(seed)}"]
        arguments += [f"--config.{name}={seed}" for name in space.PER_RUN]
        arguments += ["--num_processes=1"]  # also where a pod or Slurm tells of more: these run points of their own
        lock = self._folder.path / "lock"
        self._run = Run(arguments, log=self._folder.log(seed), lock=lock, env=self.env)

    def stop(self) -> None:
        """Asks the run to save and stop."""
        if self._run is not None:
            self._run.stop()

    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._run is not None and self._run.code is None

    def progress(self) -> tuple[int, str]:
        """The point, and how far it is."""
        steps = self._point.config.train.num_steps
        seed = f"seed {self._seeds[0]}, " if len(self._settings.seeds) > 1 else ""
        best = "" if self._best is None else f", {self._settings.objective} {self._best:.4g}"
        return self.claim.point, f"{self._point.label}: {seed}step {self._step}/{steps}{best}"

    def has_ended(self) -> bool:
        """Looks after the run; True once the point is through, which its folder then tells, or `lost` to another."""
        if self._through or self.lost:
            return True
        if self._run is None:
            self._start()
        code = self._run.code
        if code is None and time.monotonic() - self._looked < LOOK:
            return False
        self._looked = time.monotonic()
        if not self._study.renew(self.claim):
            self.lost = True
            self._run.kill()
            return True
        self._read_log()
        return code is not None and self._is_through(code)

    def _is_through(self, code: int) -> bool:
        """What becomes of the point, a run of which has ended with `code`."""
        if self._hopeless:
            return self._end(PRUNED, f"after step {max(self._told)}")
        if code in STOPPED and self._fruitless < FRUITLESS:
            self._fruitless = 0 if self._step > self._begun_at else self._fruitless + 1
            self._start()
            return False
        if code:
            return self._end(FAILED, self._run.reason())
        if self._settings.objective not in (self._folder.result(self._seeds[0], self._settings) or {}):
            return self._end(FAILED, f"no evaluation has a finite {self._settings.objective}; see {self._run.log}")
        if len(self._seeds) == 1:
            return self._end(COMPLETE)
        self._seeds.pop(0)
        self._step = self._fruitless = 0
        self._start()
        return False

    def _read_log(self) -> None:
        """What the run has logged since the last look; the first seed's evaluations go to the pruner."""
        file = self._folder.workdir(self._seeds[0]) / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        if size == self._size:
            return
        lines = metrics_log.read_metrics(file)
        self._step = max((line["step"] for line in lines if line["split"] == "train"), default=0)
        evaluated = evaluations(lines, self._settings.objective)
        if evaluated:
            self._best = (min if self._settings.minimizes else max)(evaluated.values())
        first = self._seeds[0] == self._settings.seeds[0]
        for step, value in evaluated.items() if first else ():
            if step not in self._told and not self._hopeless:
                hopeless = self._study.report(self.claim, step, value)
                self._told.add(step)
                if hopeless and step < self._point.config.train.num_steps:
                    self._hopeless = True
                    self._run.stop()
        self._size = size

    def _end(self, state: str, reason: str = "") -> bool:
        """Written before the study is told: if this process dies in between, nothing is left to do but to tell it."""
        self._folder.write(self._point, state=state, reason=reason)
        self._through = True
        return True
