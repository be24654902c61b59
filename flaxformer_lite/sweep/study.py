"""Who runs which point: a study in Optuna's storage, a file or a database, that many workers share.

A point is one of Optuna's trials, or several: each attempt at it. A worker holds an attempt by a lease, which it renews
while it lives. Another worker that has seen no renewal for `LEASE` seconds, or finds the worker's lock file let go,
which the system does when a process dies, enqueues the next attempt. That goes on where the last one stood, in the same
folder. Two workers may enqueue it at once: of attempts with the same number the first in the study counts.
"""

import contextlib
import dataclasses
import fcntl
import logging
import os
import socket
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import locked

LEASE = 120.0  # seconds without a sign of life after which a point is another worker's to take up
RENEWAL = 30.0  # seconds between signs of life
ATTEMPTS = 3  # at opening the storage, a second apart
JOURNAL = "journal.log"
BOOT = Path("/proc/sys/kernel/random/boot_id")
MACHINE = f"{socket.gethostname()} {BOOT.read_text().strip() if BOOT.exists() else ''}"
COMPLETE, PRUNED, FAILED, RUNNING, WAITING = "complete", "pruned", "failed", "running", "waiting"
AWAY = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError, OSError)  # the storage, for now
ENDED = {TrialState.COMPLETE: COMPLETE, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}


@dataclasses.dataclass
class Claim:
    """A point that this worker holds."""

    point: int
    trial: optuna.Trial
    renewed: float  # when, by `time.monotonic()`
    beats: int = 0


class Study:
    """One worker's view of a study."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        sweep: str = "",
        points: int,
        storage: str | None = None,
        minimize: bool = True,
        sampler: str = "grid",
        seed: int = 0,
        pruner: str = "none",
        first_step: int = 1,
        together: bool = False,
    ):
        """
        Args:
          folder: of the sweep; its journal is there if no `storage` is named.
          name: of the study, in which the sweep `sweep` alone is.
          points: how many there are to be.
          storage: URL of a database.
          sampler: 'grid', of points that were added, 'random' or 'tpe'.
          pruner: 'none', 'median' or 'halving'.
          first_step: of the first evaluation, where halving begins.
          together: whether several points run at a time.

        Raises:
          InputError: the storage cannot be used, or holds a study of this name that is another sweep's.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners = {
            "none": optuna.pruners.NopPruner,
            "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=4),
            "halving": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=first_step, reduction_factor=3),
        }
        for attempt in range(ATTEMPTS):  # workers that start at once make the tables of a database in each other's way
            try:
                self._storage = _open(folder, storage)
                self._study = optuna.create_study(
                    storage=self._storage,
                    study_name=name,
                    direction="minimize" if minimize else "maximize",
                    pruner=pruners[pruner](),
                    load_if_exists=True,
                )
                break
            except Exception as error:  # of the database's driver, or of the network
                if attempt == ATTEMPTS - 1 or not isinstance(error, AWAY):
                    where = storage or folder / JOURNAL
                    raise InputError(f"--storage={where}: cannot be used: {_first_line(error)}") from error
                time.sleep(1)
        if self._study.user_attrs.setdefault("sweep", sweep) != sweep:
            raise InputError(
                f"--study={name}: in {storage or folder} it belongs to another sweep; choose another name."
            )
        self._study.set_user_attr("sweep", sweep)
        self._count, self._sampler, self._seed, self._together = points, sampler, seed, together
        self._seen: dict[int, tuple[Any, float]] = {}  # number of a trial: its lease, and since when it has been so
        self._handed: set[int] = set()  # numbers of the trials that `claim` has returned
        self._workers = folder / "workers"
        self._workers.mkdir(parents=True, exist_ok=True)
        self._owner = uuid.uuid4().hex
        self._life = contextlib.ExitStack()
        self._life.enter_context(locked(self._lock_file(self._owner)))

    def close(self) -> None:
        """Lets go of what this worker holds."""
        self._life.close()
        if isinstance(self._storage, optuna.storages.RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()
        self._lock_file(self._owner).unlink(missing_ok=True)

    def add(self, points: Sequence[dict[str, Any]]) -> None:
        """Enqueues the points that are not yet in the study, by their number."""
        known = {trial.user_attrs.get("point") for trial in self._trials()}
        for number, params in enumerate(points):
            if number not in known:
                self._study.enqueue_trial(params, user_attrs={"point": number, "attempt": 0})

    def claim(self) -> Claim | None:
        """The next point to run, now held by this worker; None while there is none."""
        while True:
            self._reclaim()
            history = self._trials()
            first = self._first_attempts(history)
            waiting = any(trial.state == TrialState.WAITING for trial in history)
            if not waiting and (self._sampler == "grid" or len(first) >= self._count):
                return None
            trial = self._study.ask()
            place = self._places(self._trials())[trial.number]
            claim = Claim(place[0], trial, time.monotonic())
            self._beat(claim)
            if claim.point < self._count and not self._is_taken(trial.number, place):
                # From the number of the point alone, so that a sweep which was killed goes on as it would have.
                self._study.sampler = self._make_sampler(claim.point)
                self._handed.add(trial.number)
                trial.set_user_attr("point", claim.point)  # whatever others ask for meanwhile
                return claim
            trial.set_user_attr("surplus", True)
            self._study.tell(trial, state=TrialState.FAIL)

    def keep_params(self, claim: Claim) -> None:
        """Another attempt at the point is to have the same parameters: those of its trial are now complete."""
        claim.trial.set_user_attr("asked", True)

    def renew(self, claim: Claim) -> bool:
        """Gives a sign of life, if it is due; False if the point is no longer this worker's."""
        if time.monotonic() - claim.renewed < RENEWAL:
            return True
        try:
            self._beat(claim)
        except optuna.exceptions.UpdateFinishedTrialError:
            return False
        return True

    def report(self, claim: Claim, step: int, value: float) -> bool:
        """Notes the objective after `step`; True if the point has no hope."""
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # then it is another's; `renew` will tell
            claim.trial.report(value, step)
            return claim.trial.should_prune()
        return False

    def finish(self, claim: Claim, state: str, value: float | None = None, reason: str = "") -> None:
        """The point's end: 'complete' with its value, 'pruned', or 'failed' for a reason."""
        ends = {text: state for state, text in ENDED.items()}
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # it is known, or another's
            if reason:
                claim.trial.set_user_attr("reason", reason)
            values = value if state == COMPLETE else None
            self._study.tell(claim.trial, values, state=ends[state], skip_if_finished=True)

    def release(self, claim: Claim) -> None:
        """Leaves the point to whoever comes next, this worker or another."""
        self._retry(self._trials()[claim.trial.number])

    def failed(self) -> list[int]:
        """The points that have."""
        return [number for number, (state, _) in self.states().items() if state == FAILED]

    def retry(self, point: int) -> None:
        """Enqueues a point once more."""
        self._retry(self._latest()[point])

    def look_anew(self) -> None:
        """Nobody's lease runs out before it has been watched for its whole time from now on."""
        self._seen.clear()

    def ended(self) -> bool:
        """Whether every point has, and none is left to begin."""
        states = self.states()
        return len(states) == self._count and all(state in ENDED.values() for state, _ in states.values())

    def states(self) -> dict[int, tuple[str, str]]:
        """Of each point in the study: its state, and the reason if it has failed."""
        found = {}
        for number, trial in self._latest().items():
            state = ENDED.get(trial.state, RUNNING if trial.state == TrialState.RUNNING else WAITING)
            found[number] = state, trial.user_attrs.get("reason", "")
        return found

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _first_attempts(self, history: list[FrozenTrial]) -> dict[int, tuple[int, int]]:
        """Number of a first attempt's trial: (its point, 0). Those that were suggested count in the order of trials.

        What two workers asked for at once beyond the last point is none, if there should be more points later.
        """
        first = [t for t in history if not t.user_attrs.get("attempt") and not t.user_attrs.get("surplus")]
        return {trial.number: (trial.user_attrs.get("point", rank), 0) for rank, trial in enumerate(first)}

    def _places(self, history: list[FrozenTrial]) -> dict[int, tuple[int, int]]:
        """Number of each trial: (its point, which attempt at it, from 0)."""
        again = [trial.user_attrs | {"trial": trial.number} for trial in history if trial.user_attrs.get("attempt")]
        return self._first_attempts(history) | {attrs["trial"]: (attrs["point"], attrs["attempt"]) for attrs in again}

    def _is_taken(self, trial: int, place: tuple[int, int]) -> bool:
        """Whether an earlier trial is the same attempt."""
        return any(each == place for number, each in self._places(self._trials()).items() if number < trial)

    def _latest(self) -> dict[int, FrozenTrial]:
        """The last attempt at each point; of several with the same number the first."""
        history, latest = self._trials(), {}
        places = self._places(history)
        for number in sorted(places, key=lambda number: (places[number][1], -number)):
            latest[places[number][0]] = history[number]
        return {point: latest[point] for point in sorted(latest) if point < self._count}

    def _reclaim(self) -> None:
        """Enqueues what workers hold that are gone."""
        for point, trial in self._latest().items():
            if trial.state == TrialState.RUNNING and not self._is_alive(trial):
                logging.warning("point %d: its worker is gone; it is taken up again", point)
                self._retry(trial)

    def _is_alive(self, trial: FrozenTrial) -> bool:
        lease = trial.user_attrs.get("lease")
        if lease is not None:
            owner, _, machine = lease
            if owner == self._owner:
                return trial.number in self._handed
            if machine == MACHINE and self._let_go(owner):
                return False
        since = self._seen.get(trial.number)
        if since is None or since[0] != lease:
            since = self._seen[trial.number] = lease, time.monotonic()
        return time.monotonic() - since[1] < LEASE

    def _let_go(self, owner: str) -> bool:
        """Whether nobody holds the lock file of a worker of this machine; other machines' locks may not be seen."""
        try:
            with self._lock_file(owner).open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
        except OSError:  # held, or in another folder
            return False

    def _retry(self, trial: FrozenTrial) -> None:
        """The next attempt at the trial's point; first it is there, then the old one ends, so none is ever lost."""
        point, attempt = self._places(self._trials())[trial.number]
        params = trial.system_attrs.get("fixed_params", {}) | (trial.params if trial.user_attrs.get("asked") else {})
        self._study.enqueue_trial(params, user_attrs={"point": point, "attempt": attempt + 1})
        self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _beat(self, claim: Claim) -> None:
        claim.beats += 1
        claim.trial.set_user_attr("lease", [self._owner, claim.beats, MACHINE])
        claim.renewed = time.monotonic()

    def _lock_file(self, owner: str) -> Path:
        return self._workers / f"{owner}.lock"

    def _make_sampler(self, point: int) -> optuna.samplers.BaseSampler:
        seed = (self._seed + 1_000_003 * point) % 2**32
        if self._sampler == "tpe":
            # One parameter after another, as each is asked for, by when the number of the point is known.
            return optuna.samplers.TPESampler(seed=seed, multivariate=False, constant_liar=self._together)
        return optuna.samplers.RandomSampler(seed=seed)


def importances(points: Sequence[tuple[dict[str, Any], float]], *, minimize: bool) -> dict[str, float]:
    """The share of each parameter in how the objective varies, by Optuna's evaluator; of those that all points have."""
    options = {
        name: list(dict.fromkeys(params[name] for params, _ in points if name in params)) for name in points[0][0]
    }
    varied = {name: values for name, values in options.items() if len(values) > 1}
    study = optuna.create_study(direction="minimize" if minimize else "maximize")
    distributions = {name: _distribution(values) for name, values in varied.items()}
    for params, value in points:
        given = {name: params[name] for name in varied if name in params}
        kinds = {name: distributions[name] for name in given}
        study.add_trial(optuna.trial.create_trial(params=given, distributions=kinds, value=value))
    return optuna.importance.get_param_importances(study)


def _distribution(values: list[Any]) -> optuna.distributions.BaseDistribution:
    """Numbers on their line, a logarithmic one if they span more than a factor of 10; all else as categories."""
    numbers = all(type(value) in (int, float) for value in values)
    if not numbers or min(values) == max(values):
        return optuna.distributions.CategoricalDistribution(values)
    low, high = min(values), max(values)
    log = low > 0 and high / low > 10
    if all(type(value) is int for value in values):
        return optuna.distributions.IntDistribution(low, high, log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _open(folder: Path, storage: str | None) -> optuna.storages.BaseStorage:
    if storage is not None:
        return optuna.storages.RDBStorage(storage, engine_kwargs={"pool_pre_ping": True})
    path = folder / JOURNAL
    return optuna.storages.JournalStorage(JournalFileBackend(str(path), JournalLock(path)))


class JournalLock:
    """Lets one process write the journal at a time; the system lets go of it when the process dies.

    A process that died while it wrote has left half a line, which would make the journal unreadable: it is cut off.
    """

    def __init__(self, journal: Path):
        self._journal, self._lock = journal, journal.with_name(f"{journal.name}.lock")
        self._held = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Waits for the lock, and mends the journal."""
        self._held.enter_context(locked(self._lock))
        try:
            with self._journal.open("rb+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if size and file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        except OSError:
            self.release()
            raise
        return True

    def release(self) -> None:
        """Lets go of it."""
        self._held.close()


def _first_line(error: Exception) -> str:
    return ([*str(error).strip().splitlines(), type(error).__name__])[0]
