"""A worker: claims points of a sweep, trains them in separate processes, reports the results."""

import contextlib
import statistics
import time
from collections.abc import Sequence

from flaxformer_lite.sweep import check, space
from flaxformer_lite.sweep.active_point import ActivePoint
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.results import ENDED, SweepFolder
from flaxformer_lite.sweep.space import Point, Sweep
from flaxformer_lite.sweep.study import COMPLETE, FAILED, LEASE, Claim, Study
from flaxformer_lite.sweep.study_storage import UNAVAILABLE
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.interrupt import Interrupt

POLL_INTERVAL = 0.2  # seconds between two checks of the processes
CLAIM_INTERVAL = 1.0  # seconds between two requests for a point if none was free


class Worker:
    """Runs points of `sweep` in `folder`, as `study` assigns them."""

    def __init__(
        self,
        sweep: Sweep,
        folder: SweepFolder,
        study: Study,
        *,
        jobs: int,
        gpus: Sequence[str],
        board: Board,
    ):
        """
        Args:
          jobs: number of points at a time.
          gpus: CUDA_VISIBLE_DEVICES of each job; if empty, the variable stays unchanged.
        """
        self._sweep, self._folder, self._study, self._board = sweep, folder, study, board
        self._free = [{"CUDA_VISIBLE_DEVICES": gpus[job]} if gpus else {} for job in range(jobs)]
        self._active: list[ActivePoint] = []
        self._claimed: Claim | None = None  # a claim whose point has not started yet
        self._last_request = -CLAIM_INTERVAL  # time of the last request for a point

    def work(self) -> int:
        """Runs until all points have ended, here or elsewhere; returns 0, or a signal's exit code.

        After a signal the runs save their state, and the worker releases their points.

        Raises:
          InputError: the study's storage has been unavailable for the length of a lease.
        """
        failing_since = None
        with Interrupt() as interrupt:
            try:
                while not interrupt.requested:
                    try:
                        if self._poll():
                            break
                        if failing_since is not None:
                            self._study.states()  # not every `_poll` uses the storage
                            failing_since = None
                    except UNAVAILABLE as error:
                        self._study.restart_lease_timers()
                        if failing_since is None:
                            failing_since = time.monotonic()
                            self._board.print(
                                f"the study or its folder cannot be used for now: {error}"
                            )
                        elif time.monotonic() - failing_since > LEASE:
                            raise InputError(
                                f"the study could not be used for {LEASE:.0f} s: {error}"
                            ) from error
                    time.sleep(POLL_INTERVAL)
            finally:
                self._stop_all()
        return interrupt.exit_code

    def _poll(self) -> bool:
        """Starts points and checks on the running ones; returns True once all points have ended.

        After an error of the storage it can be called again: it marks nothing as done that the
        study does not have.
        """
        if self._free and time.monotonic() - self._last_request >= CLAIM_INTERVAL:
            self._last_request = time.monotonic()
            if not self._fill() and self._study.ended():
                return True
        for active in list(self._active):
            if active.has_ended():
                if not active.lost:
                    self._report_end(active.claim)
                self._active.remove(active)
                self._free.append(active.env)
                self._last_request = -CLAIM_INTERVAL  # the next point starts at once
        self._board.show([active.progress() for active in self._active], self._study.states)
        return False

    def _fill(self) -> bool:
        """Starts points until no job is free or no point is left; returns whether any runs."""
        while self._free:
            self._claimed = self._claimed or self._study.claim()
            if self._claimed is None:
                break
            claim, folder = self._claimed, self._folder.point(self._claimed.point)
            try:
                point = self._point(claim)
            except InputError as error:  # part of the space that no checked point covers
                if isinstance(error.__cause__, UNAVAILABLE):
                    raise error.__cause__ from None
                params = dict(claim.trial.params)
                invalid = Point(params, self._sweep.base, space.label(params))
                folder.write(invalid, state=FAILED, reason=str(error))
            # The point may also have ended in a worker that died before it reported to the study.
            if (folder.read() or {}).get("state") in ENDED:
                self._report_end(claim)
            else:
                env = self._free[-1]
                active = ActivePoint(claim, point, folder, self._study, self._sweep, env)
                self._active.append(active)
                self._free.pop()
            self._claimed = None
        return bool(self._active)

    def _point(self, claim: Claim) -> Point:
        """Returns the claimed point, and stores its parameters in the trial."""
        if self._sweep.points is None:
            point = self._sweep.suggested(claim.trial)
            self._study.keep_params(claim)
            if error := check.config_error(point.config, self._sweep.settings):
                raise InputError(error)
            return point
        point = self._sweep.points[claim.point]
        for name in point.params:
            options = [each.params[name] for each in self._sweep.points if name in each.params]
            claim.trial.suggest_categorical(name, list(dict.fromkeys(map(space.scalar, options))))
        return point

    def _report_end(self, claim: Claim) -> None:
        """Reports the final state of a point to the study and on the board."""
        settings, folder = self._sweep.settings, self._folder.point(claim.point)
        record, value = folder.read() or {}, None
        if record["state"] == COMPLETE:
            value = statistics.fmean(
                run.values[settings.objective] for run in folder.runs(settings)
            )
        self._study.finish(claim, record["state"], value, record["reason"])
        how = f"{settings.objective} {value:.4g}" if value is not None else record["reason"]
        self._board.print(f"point {claim.point} ({record['label']}): {record['state']}, {how}")

    def _stop_all(self) -> None:
        """Makes all runs save their state and end, and releases their points."""
        for active in self._active:
            active.stop()
        while any(active.is_running() for active in self._active):
            with contextlib.suppress(*UNAVAILABLE):
                for active in self._active:
                    self._study.renew(active.claim)
            time.sleep(POLL_INTERVAL)
        claims = [active.claim for active in self._active]
        if self._claimed is not None:
            claims.append(self._claimed)
        for claim in claims:
            with contextlib.suppress(*UNAVAILABLE):  # otherwise the lease expires
                self._study.release(claim)
