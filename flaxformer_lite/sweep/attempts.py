"""The attempts at a sweep's points: which point and which attempt each of Optuna's trials is.

The user attributes of a trial: `point` and `attempt`, from 0; `surplus` for a trial beyond the last
point; `asked` if its parameters are complete; `lease` and `reason`. A trial that was sampled rather
than enqueued has no `point` at first: its point follows from the order of the trials.
"""

from collections.abc import Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

Place = tuple[int, int]  # (point, attempt)


def first_attempts(history: Sequence[FrozenTrial]) -> dict[int, Place]:
    """Returns (point, 0) by trial number for each first attempt.

    Surplus trials, which two workers requested at once beyond the last point, are left out, as a
    larger sweep may follow.
    """
    first = [
        trial
        for trial in history
        if not trial.user_attrs.get("attempt") and not trial.user_attrs.get("surplus")
    ]
    return {trial.number: (trial.user_attrs.get("point", n), 0) for n, trial in enumerate(first)}


def all_attempts(history: Sequence[FrozenTrial]) -> dict[int, Place]:
    """Returns (point, attempt) by trial number, without surplus trials."""
    later = {
        trial.number: (trial.user_attrs["point"], trial.user_attrs["attempt"])
        for trial in history
        if trial.user_attrs.get("attempt")
    }
    return first_attempts(history) | later


def latest(history: Sequence[FrozenTrial], points: int) -> dict[int, FrozenTrial]:
    """Returns the trial of the last attempt at each point below `points`, in their order.

    Of several trials for the same attempt the first counts.
    """
    found, places = {}, all_attempts(history)
    for number in sorted(places, key=lambda number: (places[number][1], -number)):
        found[places[number][0]] = history[number]
    return {point: found[point] for point in sorted(found) if point < points}


def is_duplicate(place: Place, trial: int, history: Sequence[FrozenTrial]) -> bool:
    """Whether a trial with a lower number than `trial` is the attempt `place` already."""
    return any(other == place for number, other in all_attempts(history).items() if number < trial)


def enqueue_next(study: optuna.Study, trial: FrozenTrial) -> None:
    """Enqueues the next attempt at a trial's point, with the same parameters if they are complete.

    The new trial is added before the old one ends, so that no crash loses the point.
    """
    point, attempt = all_attempts(study.get_trials(deepcopy=False))[trial.number]
    params = trial.system_attrs.get("fixed_params", {})
    if trial.user_attrs.get("asked"):
        params = params | trial.params
    study.enqueue_trial(params, user_attrs={"point": point, "attempt": attempt + 1})
    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
