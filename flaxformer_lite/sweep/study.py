"""The study of a sweep, which its workers share: it assigns points, and keeps their results.

The study is in Optuna's storage: a journal file or a database. Each attempt at a point is one of
Optuna's trials. A worker holds an attempt by a lease, which it renews while it runs. Another worker
enqueues the next attempt if it has seen no renewal for `LEASE` seconds, or if the worker's lock
file is unlocked: the operating system unlocks it when the process dies. The next attempt resumes in
the same folder. Two workers may enqueue the same attempt at once: the first in the study counts.
"""

import contextlib
import dataclasses
import fcntl
import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from flaxformer_lite.sweep import attempts, study_storage
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import locked

LEASE = 120.0  # seconds without a renewal after which another worker may run the point
RENEWAL = 30.0  # seconds between renewals
BOOT = Path("/proc/sys/kernel/random/boot_id")
MACHINE = f"{socket.gethostname()} {BOOT.read_text().strip() if BOOT.exists() else ''}"
COMPLETE, PRUNED, FAILED, RUNNING, WAITING = "complete", "pruned", "failed", "running", "waiting"
ENDED = {TrialState.COMPLETE: COMPLETE, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """The study's name and storage, and how its points are sampled and pruned."""

    name: str
    points: int  # number of points of the sweep
    sweep: str = ""  # id of the sweep; a study belongs to one sweep
    storage: str | None = None  # URL of a database; None: the journal in the sweep's folder
    minimize: bool = True
    sampler: str = "grid"  # 'grid' (points given to `Study.add`), 'random' or 'tpe'
    seed: int = 0  # of the sampler
    pruner: str = "none"  # 'none', 'median' or 'halving'
    first_step: int = 1  # step of the first evaluation, where 'halving' starts
    concurrent: bool = False  # whether several points run at a time


@dataclasses.dataclass
class Claim:
    """A point that this worker holds."""

    point: int
    trial: optuna.Trial
    renewed: float  # time of the last renewal, by `time.monotonic()`
    renewals: int = 0


class Study:
    """One worker's connection to the study."""

    def __init__(self, folder: Path, options: StudyOptions):
        """Opens the study of the sweep in `folder`, or creates it.

        Raises:
          InputError: the storage cannot be used, or its study of this name belongs to another
            sweep.
        """
        self._options = options
        self._storage, self._study = _open(folder, options)
        # trial number -> (its last lease seen, when that lease was first seen)
        self._seen: dict[int, tuple[Any, float]] = {}
        self._claimed: set[int] = set()  # numbers of the trials that `claim` has returned
        self._workers = folder / "workers"
        self._workers.mkdir(parents=True, exist_ok=True)
        self._owner = uuid.uuid4().hex
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(locked(self._lock_file(self._owner)))

    def close(self) -> None:
        """Releases the worker's lock and closes the storage."""
        self._lock.close()
        study_storage.close_storage(self._storage)
        self._lock_file(self._owner).unlink(missing_ok=True)

    def add(self, points: Sequence[dict[str, Any]]) -> None:
        """Enqueues the points, numbered in this order, that are not in the study yet."""
        known = {trial.user_attrs.get("point") for trial in self._trials()}
        for number, params in enumerate(points):
            if number not in known:
                self._study.enqueue_trial(params, user_attrs={"point": number, "attempt": 0})

    def claim(self) -> Claim | None:
        """Returns the next point to run, now held by this worker; None if there is none."""
        while True:
            self._reclaim()
            history = self._trials()
            first = attempts.first_attempts(history)
            waiting = any(trial.state == TrialState.WAITING for trial in history)
            if not waiting and (
                self._options.sampler == "grid" or len(first) >= self._options.points
            ):
                return None
            trial = self._study.ask()
            place = attempts.all_attempts(self._trials())[trial.number]
            claim = Claim(place[0], trial, time.monotonic())
            self._write_lease(claim)
            if claim.point < self._options.points and not attempts.is_duplicate(
                place, trial.number, self._trials()
            ):
                # The seed depends on the point's number only, so that a killed and resumed sweep
                # samples the same points.
                self._study.sampler = self._make_sampler(claim.point)
                self._claimed.add(trial.number)
                trial.set_user_attr(
                    "point", claim.point
                )  # fixed, whatever other workers request later
                return claim
            trial.set_user_attr("surplus", True)
            self._study.tell(trial, state=TrialState.FAIL)

    def keep_params(self, claim: Claim) -> None:
        """Marks the trial's parameters as complete: further attempts at the point get the same."""
        claim.trial.set_user_attr("asked", True)

    def renew(self, claim: Claim) -> bool:
        """Renews the lease if it is due; returns False if this worker no longer holds the point."""
        if time.monotonic() - claim.renewed < RENEWAL:
            return True
        try:
            self._write_lease(claim)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    def report(self, claim: Claim, step: int, value: float) -> bool:
        """Records the objective after `step`; returns True if the point should be pruned."""
        # The error means that another worker holds the point; `renew` then returns False.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            claim.trial.report(value, step)
            return claim.trial.should_prune()
        return False

    def finish(
        self, claim: Claim, state: str, value: float | None = None, reason: str = ""
    ) -> None:
        """Records the final state: 'complete' with a value, 'pruned', or 'failed' with a reason.

        Does nothing if the trial has ended already, or another worker holds the point.
        """
        trial_states = {name: trial_state for trial_state, name in ENDED.items()}
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if reason:
                claim.trial.set_user_attr("reason", reason)
            values = value if state == COMPLETE else None
            self._study.tell(claim.trial, values, state=trial_states[state], skip_if_finished=True)

    def release(self, claim: Claim) -> None:
        """Enqueues another attempt at the point, for this worker or another one."""
        attempts.enqueue_next(self._study, self._trials()[claim.trial.number])

    def failed(self) -> list[int]:
        """Returns the numbers of the failed points."""
        return [number for number, (state, _) in self.states().items() if state == FAILED]

    def retry(self, point: int) -> None:
        """Enqueues another attempt at a point."""
        attempts.enqueue_next(self._study, self._latest()[point])

    def restart_lease_timers(self) -> None:
        """Lets every lease run for its whole time from now on, as after an outage."""
        self._seen.clear()

    def ended(self) -> bool:
        """Whether every point has a final state."""
        states = self.states()
        return len(states) == self._options.points and all(
            state in ENDED.values() for state, _ in states.values()
        )

    def states(self) -> dict[int, tuple[str, str]]:
        """Returns (state, reason of a failure) by point, for the points in the study."""
        found = {}
        for number, trial in self._latest().items():
            running = RUNNING if trial.state == TrialState.RUNNING else WAITING
            found[number] = ENDED.get(trial.state, running), trial.user_attrs.get("reason", "")
        return found

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _latest(self) -> dict[int, FrozenTrial]:
        return attempts.latest(self._trials(), self._options.points)

    def _reclaim(self) -> None:
        """Enqueues another attempt at the points of workers that are gone."""
        for point, trial in self._latest().items():
            if trial.state == TrialState.RUNNING and not self._is_held(trial):
                logging.warning("point %d: its worker is gone; the point is run again", point)
                attempts.enqueue_next(self._study, trial)

    def _is_held(self, trial: FrozenTrial) -> bool:
        """Whether a worker still holds the trial's lease."""
        lease = trial.user_attrs.get("lease")
        if lease is not None:
            owner, _, machine = lease
            if owner == self._owner:
                return trial.number in self._claimed
            if machine == MACHINE and self._is_unlocked(owner):
                return False
        seen = self._seen.get(trial.number)
        if seen is None or seen[0] != lease:
            seen = self._seen[trial.number] = lease, time.monotonic()
        return time.monotonic() - seen[1] < LEASE

    def _is_unlocked(self, owner: str) -> bool:
        """Whether the lock file of a worker on this machine is unlocked.

        Locks of other machines may be invisible here, so their files prove nothing.
        """
        try:
            with self._lock_file(owner).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
        except OSError:  # locked, or in another folder
            return False

    def _write_lease(self, claim: Claim) -> None:
        claim.renewals += 1
        claim.trial.set_user_attr("lease", [self._owner, claim.renewals, MACHINE])
        claim.renewed = time.monotonic()

    def _lock_file(self, owner: str) -> Path:
        return self._workers / f"{owner}.lock"

    def _make_sampler(self, point: int) -> optuna.samplers.BaseSampler:
        seed = (self._options.seed + 1_000_003 * point) % 2**32
        if self._options.sampler == "tpe":
            # Univariate: a multivariate sampler would choose all parameters when the trial starts,
            # before the number of the point is known.
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=False, constant_liar=self._options.concurrent
            )
        return optuna.samplers.RandomSampler(seed=seed)


def _open(folder: Path, options: StudyOptions) -> tuple[optuna.storages.BaseStorage, optuna.Study]:
    """Returns the storage and the study; raises InputError if it belongs to another sweep."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruners: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "none": optuna.pruners.NopPruner,
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
        "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(
            min_resource=options.first_step, reduction_factor=3
        ),
    }

    def create(storage: optuna.storages.BaseStorage) -> optuna.Study:
        return optuna.create_study(
            storage=storage,
            study_name=options.name,
            direction="minimize" if options.minimize else "maximize",
            pruner=pruners[options.pruner](),
            load_if_exists=True,
        )

    storage, study = study_storage.open_study(folder, options.storage, create)
    if study.user_attrs.setdefault("sweep", options.sweep) != options.sweep:
        where = study_storage.without_password(str(options.storage or folder))
        raise InputError(
            f"--study={options.name}: the study in {where} belongs to another sweep; choose "
            "another name."
        )
    study.set_user_attr("sweep", options.sweep)
    return storage, study
