"""A sweep's file: its settings, and its points, each with a config.

SWEEP = {"objective": "bleu", "seeds": (0, 1, 2)}     # fields of `Settings`

def get_config():                                     # the base config of all points
    ...
def points(config):                                   # either a list of the points,
    return [{"model.num_heads": heads} for heads in (1, 4, 8)]
def suggest(trial, config):                           # or how a point is sampled, by Optuna's calls
    config.model.num_heads = trial.suggest_categorical("heads", [1, 4, 8])
"""

import copy
import dataclasses
import random
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.field_rules import CHOICES, LOWER_IS_BETTER, OF_TEXT
from flaxformer_lite.fields import Config
from flaxformer_lite.sweep.walk import SCALARS, Walk
from flaxformer_lite.system.errors import InputError, did_you_mean

SAMPLERS, PRUNERS = ("grid", "random", "tpe"), ("none", "median", "halving")
# Number of points of a space that are checked before training; a larger space is sampled.
MOST_CHECKED = 512
PER_RUN = ("train.seed", "data.seed")  # set to each of `Settings.seeds`


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a sweep is run and compared: the fields that `SWEEP` in its file may set."""

    # metric of the validation split; a point's value is that of its best evaluation
    objective: str = "loss"
    direction: str | None = None  # 'minimize' or 'maximize'; None: as is better for the objective
    # of initialisation, dropout and the order of the data: each point has one run for each seed
    seeds: tuple[int, ...] = (0,)
    columns: tuple[str, ...] = ()  # other metrics of the best evaluation, for the report
    # values for `suggest`: 'grid': every combination; 'random'; 'tpe': Bergstra 2011
    sampler: str = "grid"
    trials: int | None = None  # 'random', 'tpe': number of points
    sampler_seed: int = 0  # 'random', 'tpe'
    pruner: str = "none"  # 'median': a point worse than half of the others at the same step ends;
    # 'halving': only the best third continues, to 3 times as many steps (Jamieson 2016)

    @property
    def minimizes(self) -> bool:
        """Whether a lower objective is better."""
        default = "minimize" if self.objective in LOWER_IS_BETTER else "maximize"
        return (self.direction or default) == "minimize"


METRICS = (*CHOICES["train.best_metric"], "perplexity", *OF_TEXT)
CHOICES_OF_SETTINGS = {
    "objective": METRICS,
    "sampler": SAMPLERS,
    "pruner": PRUNERS,
    "direction": (None, "minimize", "maximize"),
}
COLUMNS = (  # of the report
    "point",
    "changes",
    "state",
    "seeds",
    "best_step",
    "parameters",
    "tokens_per_second",
    "minutes",
    *METRICS,
)


@dataclasses.dataclass(frozen=True)
class Point:
    """One config of a sweep."""

    # the values that distinguish it, by config field or by the name given to `suggest_...`
    params: dict[str, Any]
    config: Config
    label: str = ""  # the differences from the base config, in one line
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # more columns of the report


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The contents of a sweep's file."""

    file: Path
    base: Config
    settings: Settings
    points: list[Point] | None  # None: sampled one after another
    checked: list[Point]  # all points, or a sample of them
    _space: Callable[[Any], Point]

    def suggested(self, trial: Any) -> Point:
        """Returns the point that `suggest` makes from the trial's values."""
        return self._space(trial)


def load(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads a sweep's file.

    Args:
      overrides: '--config.section.field=value' arguments that change the base config.

    Raises:
      InputError: the file raises an error or contradicts itself, or the configs of some points are
        invalid; the message names the first five.
    """
    module = config_files.load_module(file)
    base = config_files.override(config_files.config_of(module, file), overrides)
    settings = _read_settings(getattr(module, "SWEEP", {}), file)
    for name, default, value in config_lib.differences(Config(), config_lib.resolve(base)):
        if name in PER_RUN:
            raise InputError(
                f"config.{name}: {value!r} would not be used: each run has one of SWEEP['seeds'] "
                f"in place of {default!r}; set those in {file}."
            )
    given = [name for name in ("points", "suggest") if hasattr(module, name)]
    if len(given) != 1:
        got = "both" if given else "none"
        raise InputError(
            f"{file}: expected one of the functions points(config) and "
            f"suggest(trial, config), got {got}."
        )
    space = lambda trial: _suggested_point(module, trial, base, file)  # noqa: E731
    if given == ["points"]:
        if settings.sampler != "grid" or settings.trials is not None:
            raise InputError(
                f"{file}: SWEEP: sampler and trials require suggest(trial, config); points() "
                "lists all points."
            )
        listed = _listed_points(module, base, file)
        return Sweep(file, config_lib.resolve(base), settings, listed, listed, space)
    checked, whole = _enumerate(space, file)
    is_grid = settings.sampler == "grid"
    if is_grid and not whole:
        raise InputError(
            f"{file}: SWEEP['sampler']: 'grid' tries every combination, and there are over "
            f"{MOST_CHECKED} or infinitely many; give numbers a step=, or set sampler to 'tpe' or "
            "'random' and trials to the number of points."
        )
    points = checked if is_grid else None
    return Sweep(file, config_lib.resolve(base), settings, points, checked, space)


def _read_settings(given: Any, file: Path) -> Settings:
    """Returns the settings of a `SWEEP` dict; raises InputError about its first invalid entry."""
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    if not isinstance(given, dict):
        raise InputError(f"{file}: SWEEP: expected a dict with {', '.join(fields)}, got {given!r}.")
    for name in given:
        if name not in fields:
            raise InputError(
                f"{file}: SWEEP[{name!r}]: there is no such setting{did_you_mean(name, fields)}"
            )
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    for name, kind in (("seeds", int), ("columns", str)):
        value = values.get(name, getattr(Settings, name))
        if not isinstance(value, tuple) or any(type(item) is not kind for item in value):
            raise InputError(
                f"{file}: SWEEP[{name!r}]: expected a tuple of {kind.__name__}, got {value!r}."
            )
    settings = Settings(**values)
    _check_choices(settings, file)
    _check_numbers(settings, file)
    return settings


def _check_choices(settings: Settings, file: Path) -> None:
    for name, valid in CHOICES_OF_SETTINGS.items():
        value = getattr(settings, name)
        if value not in valid:
            raise InputError(f"{file}: SWEEP[{name!r}]: expected one of {valid}, got {value!r}.")
    for metric in settings.columns:
        if metric not in METRICS:
            raise InputError(
                f"{file}: SWEEP['columns']: {metric!r} is no metric{did_you_mean(metric, METRICS)}"
            )


def _check_numbers(settings: Settings, file: Path) -> None:
    seeds, seed, trials = settings.seeds, settings.sampler_seed, settings.trials
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise InputError(
            f"{file}: SWEEP['seeds']: expected different numbers from 0 on, got {seeds}."
        )
    if type(seed) is not int or seed < 0:
        raise InputError(
            f"{file}: SWEEP['sampler_seed']: expected a number from 0 on, got {seed!r}."
        )
    if settings.sampler == "grid":
        is_valid = trials is None
    else:
        is_valid = type(trials) is int and trials >= 1
    if not is_valid:
        raise InputError(
            f"{file}: SWEEP['trials']: expected the number of points if sampler is 'random' or "
            f"'tpe', and None if it is 'grid', got {trials!r}."
        )


def _listed_points(
    module: types.ModuleType, base: config_dict.ConfigDict, file: Path
) -> list[Point]:
    """Returns the points of `points(config)`; a key without a dot is a note."""
    with config_files.blamed_on(file):
        listed = module.points(copy.deepcopy(base))
    valid = isinstance(listed, list) and bool(listed)
    valid = valid and all(
        isinstance(point, dict) and all(isinstance(name, str) for name in point) for point in listed
    )
    if not valid:
        raise InputError(
            f"{file}: points(config): expected a list of dicts, field to value, got {listed!r:.80}."
        )
    varied = list(dict.fromkeys(name for point in listed for name in point if "." in name))
    points, errors = [], []
    for number, point in enumerate(listed):
        try:
            points.append(_listed_point(point, varied, base))
        except (InputError, TypeError) as error:
            errors.append(f"point {number} ({label(point)}): {error}")
    raise_errors(errors, file)
    return points


def _listed_point(listed: dict[str, Any], varied: list[str], base: config_dict.ConfigDict) -> Point:
    """Returns a point with a value for each of the fields `varied`, which some point sets."""
    config = copy.deepcopy(base)
    notes = {name: value for name, value in listed.items() if "." not in name}
    _check_notes(notes)
    for name in varied:
        _check_field(config, name)
        if name in listed:
            section, field = name.split(".")
            config[section][field] = listed[name]
    params = {name: _get(config, name) for name in varied}
    changes = {
        name: value for name, value in listed.items() if "." in name and value != _get(base, name)
    }
    return Point(params, config_lib.resolve(config), label(changes), notes)


def _suggested_point(
    module: types.ModuleType, trial: Any, base: config_dict.ConfigDict, file: Path
) -> Point:
    """Returns the point of `suggest(trial, config)`; an InputError names the trial's values."""
    config = copy.deepcopy(base)
    with config_files.blamed_on(file):
        module.suggest(trial, config)
    params = dict(trial.params)
    try:
        resolved = config_lib.resolve(config)
    except InputError as error:
        raise InputError(f"{label(params)}: {error}") from error
    for name in PER_RUN:
        if _get(config, name) != _get(base, name):
            raise InputError(
                f"{file}: suggest: config.{name} is set by SWEEP['seeds']; leave it out."
            )
    return Point(params, resolved, label(params))


def _enumerate(space: Callable[[Any], Point], file: Path) -> tuple[list[Point], bool]:
    """Returns the points that `suggest` can make, and whether the list is complete.

    An incomplete list holds the ends of continuous ranges, and points sampled at random.
    """
    points: list[Point] = []
    errors: list[str] = []
    whole, path = True, cast(list[int] | None, [])
    choices: dict[str, tuple[Any, ...]] = {}

    def visit(walk: Walk) -> None:
        try:
            points.append(space(walk))
            for name, given in walk.choices.items():
                if choices.setdefault(name, given) != given:
                    raise InputError(
                        f"{name}: has the choices {given} here, and {choices[name]} elsewhere; "
                        "rename one."
                    )
        except InputError as error:
            errors.append(str(error))

    while path is not None and len(points) + len(errors) < MOST_CHECKED:
        walk = Walk(path)
        visit(walk)
        whole, path = whole and walk.whole, walk.next_path()
    whole = whole and path is None
    for seed in range(0 if whole else MOST_CHECKED // 2):
        visit(Walk([], random.Random(seed)))
    raise_errors(errors, file)
    return points, whole


def _check_notes(notes: dict[str, Any]) -> None:
    for name, value in notes.items():
        if name in COLUMNS:
            raise InputError(
                f"{name}: the report has a column of this name already; choose another."
            )
        if type(value) not in SCALARS:
            raise InputError(
                f"{name}: expected a string or a number for the report, got {value!r}."
            )


def _check_field(config: config_dict.ConfigDict, name: str) -> None:
    """Raises InputError unless `name` is 'section.field' of the config."""
    section, _, field = name.partition(".")
    if section not in config:
        raise InputError(f"{name}: there is no such section{did_you_mean(section, config.keys())}")
    if field not in config[section]:
        raise InputError(
            f"{name}: there is no such field{did_you_mean(field, config[section].keys())}"
        )
    if name in PER_RUN:
        raise InputError(f"{name}: is set by SWEEP['seeds']; leave it out.")


def _get(config: config_dict.ConfigDict, name: str) -> Any:
    section, field = name.split(".")
    return config[section][field]


def label(params: dict[str, Any]) -> str:
    """Returns the parameters in one line."""
    return ", ".join(f"{name}={value}" for name, value in params.items()) or "as it is"


def scalar(value: Any) -> bool | int | float | str | None:
    """Returns `value` as Optuna's storage can keep it: a tuple becomes a string."""
    return value if isinstance(value, SCALARS) else repr(value)


def raise_errors(errors: list[str], file: Path | str) -> None:
    """Raises InputError with the first five of `errors`, if there are any."""
    if errors:
        more = f"\n... and {len(errors) - 5} more" if len(errors) > 5 else ""
        raise InputError(f"{file}: nothing was trained.\n" + "\n".join(errors[:5]) + more)


def as_file(point: Config, title: str) -> str:
    """Returns the text of a config file for `train --config`, with the non-default fields."""
    differences = config_lib.differences(Config(), point)
    body = "\n".join(f"    config.{name} = {value!r}" for name, _, value in differences)
    # A label may hold any text, and the name of the sweep's file need not be UTF-8.
    title = title.encode(errors="backslashreplace").decode()
    title = title.replace("\\", "/").replace('"', "'")
    return (
        f'"""{title}."""\n\nfrom flaxformer_lite.config import default_config\n\n\n'
        f"def get_config():\n    config = default_config()\n{body}\n    return config\n"
    )
