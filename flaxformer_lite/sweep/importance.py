"""The importance of each parameter of a sweep for its objective, by Optuna's evaluator."""

from collections.abc import Sequence
from typing import Any

import optuna


def importances(
    points: Sequence[tuple[dict[str, Any], float]], *, minimize: bool
) -> dict[str, float]:
    """Returns each parameter's share in the variation of the objective.

    Only parameters with several values count; parameters that some points lack are left out.
    """
    options = {
        name: list(dict.fromkeys(params[name] for params, _ in points if name in params))
        for name in points[0][0]
    }
    distributions = {
        name: _distribution(values) for name, values in options.items() if len(values) > 1
    }
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # no lines of its own in a report
    study = optuna.create_study(direction="minimize" if minimize else "maximize")
    for params, value in points:
        given = {name: params[name] for name in distributions if name in params}
        kinds = {name: distributions[name] for name in given}
        study.add_trial(optuna.trial.create_trial(params=given, distributions=kinds, value=value))
    return optuna.importance.get_param_importances(study)


def _distribution(values: list[Any]) -> optuna.distributions.BaseDistribution:
    """Returns a range of numbers, logarithmic over more than a factor of 10, or categories."""
    numbers = all(type(value) in (int, float) for value in values)
    if not numbers or min(values) == max(values):
        return optuna.distributions.CategoricalDistribution(values)
    low, high = min(values), max(values)
    log = low > 0 and high / low > 10
    if all(type(value) is int for value in values):
        return optuna.distributions.IntDistribution(low, high, log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)
