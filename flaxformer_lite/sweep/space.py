"""What a sweep tries: a file in, and out come its points, each with the config that it stands for.

SWEEP = {"objective": "bleu", "seeds": (0, 1, 2)}     # fields of `Settings`

def get_config():                                     # what all points have in common
    ...
def points(config):                                   # either a list of the points,
    return [{"model.num_heads": heads} for heads in (1, 4, 8)]
def suggest(trial, config):                           # or how a point is chosen, by Optuna's calls
    config.model.num_heads = trial.suggest_categorical("heads", [1, 4, 8])
"""

import copy
import dataclasses
import itertools
import random
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.config import CHOICES, Config, did_you_mean
from flaxformer_lite.system.errors import InputError

SAMPLERS, PRUNERS = ("grid", "random", "tpe"), ("none", "median", "halving")
MOST_CHECKED = 512  # points of a space that are checked before the first one trains; of a larger one as many at random
PER_RUN = ("train.seed", "data.seed")  # set to each of `Settings.seeds`


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a sweep is run and compared: what `SWEEP` in its file may set."""

    objective: str = "loss"  # metric of the validation split; a point's is that of its best evaluation
    direction: str | None = None  # 'minimize' or 'maximize'; None: as is better for the objective
    seeds: tuple[int, ...] = (0,)  # of initialisation, dropout and the order of the data: a run of each point for each
    columns: tuple[str, ...] = ()  # other metrics of that evaluation, for the report
    sampler: str = "grid"  # how `suggest` is answered: 'grid': every combination; 'random'; 'tpe': Bergstra 2011
    trials: int | None = None  # 'random', 'tpe': how many points
    sampler_seed: int = 0  # 'random', 'tpe'
    pruner: str = "none"  # 'median': a point worse than half of the others at the same step ends;
    # 'halving': only the best third goes on, to three times as many steps (Jamieson 2016)

    @property
    def minimizes(self) -> bool:
        """Whether less is better."""
        return (self.direction or ("minimize" if self.objective in LESS_IS_BETTER else "maximize")) == "minimize"


LESS_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
METRICS = (*CHOICES["train.best_metric"], "perplexity", "bits_per_byte")
COLUMNS = ("point", "changes", "state", "seeds", "best_step", "parameters", "tokens_per_second", "minutes", *METRICS)
SCALARS = (bool, int, float, str, type(None))  # types that Optuna's storage and JSON hold alike


@dataclasses.dataclass(frozen=True)
class Point:
    """One config of a sweep."""

    params: dict[str, Any]  # what tells it from others: fields, or the names that were given to `suggest_...`
    config: Config
    label: str = ""  # what tells it from the config of all points, as one line
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # further columns of the report


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep's file, read."""

    file: Path
    base: Config
    settings: Settings
    points: list[Point] | None  # None: they are suggested one after another
    checked: list[Point]  # every point, or a sample of them
    _space: Callable[[Any], Point]

    def suggested(self, trial: Any) -> Point:
        """The point that `suggest` makes of the trial's answers."""
        return self._space(trial)


def load(file: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads a sweep's file; `overrides`, '--config.section.field=value', change what all points have in common.

    Raises:
      InputError: the file fails or contradicts itself, or a point's config is wrong; the first five such are named.
    """
    module = config_files.load_module(file)
    base = config_files.override(config_files.config_of(module, file), overrides)
    settings = _settings(getattr(module, "SWEEP", {}), file)
    for name, default, value in config_lib.differences(Config(), config_lib.resolve(base)):
        if name in PER_RUN:
            raise InputError(
                f"config.{name}: {value!r} would not be used, as each run has one of SWEEP['seeds'] in place of "
                f"{default!r}; set those in {file}."
            )
    given = [name for name in ("points", "suggest") if hasattr(module, name)]
    if len(given) != 1:
        got = "both" if given else "none"
        raise InputError(f"{file}: expected one of the functions points(config) and suggest(trial, config), got {got}.")
    space = lambda trial: _point_of(module, trial, base, file)  # noqa: E731
    if given == ["points"]:
        if settings.sampler != "grid" or settings.trials is not None:
            raise InputError(f"{file}: SWEEP: sampler and trials go with suggest(trial, config); points() lists all.")
        listed = _listed(module, base, file)
        return Sweep(file, config_lib.resolve(base), settings, listed, listed, space)
    checked, whole = _reachable(space, file)
    if settings.sampler == "grid" and not whole:
        raise InputError(
            f"{file}: SWEEP['sampler']: 'grid' tries every combination, and there are over {MOST_CHECKED} or no end; "
            "give numbers a step=, or set sampler to 'tpe' or 'random' and trials to how many points to try."
        )
    return Sweep(
        file, config_lib.resolve(base), settings, checked if settings.sampler == "grid" else None, checked, space
    )


def _settings(given: Any, file: Path) -> Settings:
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    if not isinstance(given, dict):
        raise InputError(f"{file}: SWEEP: expected a dict with {', '.join(fields)}, got {given!r}.")
    for name in given:
        if name not in fields:
            raise InputError(f"{file}: SWEEP[{name!r}]: there is no such setting{did_you_mean(name, fields)}")
    kinds = {"seeds": int, "columns": str}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    for name, kind in kinds.items():
        value = given.get(name, getattr(Settings, name))
        if not isinstance(value, tuple) or any(type(item) is not kind for item in value):
            raise InputError(f"{file}: SWEEP[{name!r}]: expected a tuple of {kind.__name__}, got {value!r}.")
    settings = Settings(**given)
    choices = {"objective": METRICS, "sampler": SAMPLERS, "pruner": PRUNERS}
    choices["direction"] = (None, "minimize", "maximize")
    for name, valid in choices.items():
        if getattr(settings, name) not in valid:
            raise InputError(f"{file}: SWEEP[{name!r}]: expected one of {valid}, got {getattr(settings, name)!r}.")
    for metric in settings.columns:
        if metric not in METRICS:
            raise InputError(f"{file}: SWEEP['columns']: {metric!r} is no metric{did_you_mean(metric, METRICS)}")
    if not settings.seeds or min(settings.seeds) < 0 or len(set(settings.seeds)) < len(settings.seeds):
        raise InputError(f"{file}: SWEEP['seeds']: expected different numbers from 0 on, got {settings.seeds}.")
    if type(settings.sampler_seed) is not int or settings.sampler_seed < 0:
        raise InputError(f"{file}: SWEEP['sampler_seed']: expected a number from 0 on, got {settings.sampler_seed!r}.")
    counted = type(settings.trials) is int and settings.trials >= 1
    if counted != (settings.sampler != "grid") or (settings.trials is not None and not counted):
        raise InputError(f"{file}: SWEEP['trials']: expected how many points, with sampler 'random' or 'tpe' alone.")
    return settings


def _listed(module: types.ModuleType, base: config_dict.ConfigDict, file: Path) -> list[Point]:
    """What `points(config)` lists; a key without a dot is a note."""
    with config_files.blamed_on(file):
        listed = module.points(_copy(base))
    dicts = isinstance(listed, list) and bool(listed) and all(isinstance(point, dict) for point in listed)
    if not dicts or not all(isinstance(name, str) for point in listed for name in point):
        raise InputError(f"{file}: points(config): expected a list of dicts, field to value, got {listed!r:.80}.")
    varied = list(dict.fromkeys(name for point in listed for name in point if "." in name))
    points, faults = [], []
    for number, point in enumerate(listed):
        config = _copy(base)
        try:
            notes = {name: value for name, value in point.items() if "." not in name}
            _check_notes(notes)
            for name in varied:
                _check_field(config, name)
                if name in point:
                    section, field = name.split(".")
                    config[section][field] = point[name]
            params = {name: _get(config, name) for name in varied}
            own = {name: value for name, value in point.items() if "." in name and value != _get(base, name)}
            points.append(Point(params, config_lib.resolve(config), label(own), notes))
        except (InputError, TypeError) as error:
            faults.append(f"point {number} ({label(point)}): {error}")
    refuse(faults, file)
    return points


def _point_of(module: types.ModuleType, trial: Any, base: config_dict.ConfigDict, file: Path) -> Point:
    """The point that `suggest(trial, config)` makes. Raises InputError that names its answers."""
    config = _copy(base)
    with config_files.blamed_on(file):
        module.suggest(trial, config)
    params = dict(trial.params)
    try:
        resolved = config_lib.resolve(config)
    except InputError as error:
        raise InputError(f"{label(params)}: {error}") from error
    for name in PER_RUN:
        if _get(config, name) != _get(base, name):
            raise InputError(f"{file}: suggest: config.{name} is set by SWEEP['seeds']; leave it out.")
    return Point(params, resolved, label(params))


def _reachable(space: Callable[[Any], Point], file: Path) -> tuple[list[Point], bool]:
    """The points that `suggest` can make, and whether these are all; else ends of ranges and random ones."""
    points, faults, whole, path = [], [], True, []
    choices: dict[str, tuple[Any, ...]] = {}

    def visit(walk: Walk) -> None:
        try:
            points.append(space(walk))
            for name, given in walk.choices.items():
                if choices.setdefault(name, given) != given:
                    raise InputError(
                        f"{name}: has the choices {given} here, and {choices[name]} elsewhere; rename one."
                    )
        except InputError as error:
            faults.append(str(error))

    while path is not None and len(points) + len(faults) < MOST_CHECKED:
        walk = Walk(path)
        visit(walk)
        whole, path = whole and walk.whole, walk.next_path()
    whole = whole and path is None
    for number in range(0 if whole else MOST_CHECKED // 2):
        visit(Walk([], random.Random(number)))
    refuse(faults, file)
    return points, whole


def _check_range(name: str, low: float, high: float, step: float | None, log: bool) -> None:
    """Raises InputError for what Optuna would refuse."""
    if low > high or (step is not None and step <= 0):
        raise InputError(f"{name}: expected a range from a lower to a higher number, got {low} to {high}, step {step}.")
    if log and (low <= 0 or step is not None):
        raise InputError(f"{name}: log=True goes with numbers above 0, and without a step; got {low}, step {step}.")


class Walk:
    """Stands for one of Optuna's trials: answers by `path`, an option's number for each question; then the first.

    Where a range has no end of options its two ends stand for it, or with `rng` any number in it.
    """

    def __init__(self, path: list[int], rng: random.Random | None = None):
        self.params: dict[str, Any] = {}
        self.choices: dict[str, tuple[Any, ...]] = {}  # of each categorical question
        self.whole = True  # whether the options are all that could be answered
        self._path, self._rng, self._counts = path, rng, []

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`: texts, numbers, True, False or None, always the same."""
        if not choices or not all(isinstance(choice, SCALARS) for choice in choices):
            raise InputError(f"{name}: expected texts, numbers, True, False or None to choose from, got {choices!r}.")
        self.choices[name] = tuple(choices)
        return self._answer(name, list(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from `low` to `high`; `log` says only how likely each is."""
        _check_range(name, low, high, step if step != 1 else None, log)
        return self._answer(name, range(low, high + 1, step))

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False):
        """A number from `low` to `high`."""
        _check_range(name, low, high, step, log)
        if step is not None:
            return self._answer(name, [low + i * step for i in range(int((high - low) / step + 1e-9) + 1)])
        self.whole = self.whole and low == high
        if low == high or self._rng is None:
            return self._answer(name, [low, high][: 1 + (low < high)])
        between = low * (high / low) ** self._rng.random() if log else self._rng.uniform(low, high)
        return self._answer(name, [between])

    def next_path(self) -> list[int] | None:
        """The path after this one, the last question's options first; None after the last."""
        path = [*self._path, *[0] * (len(self._counts) - len(self._path))]
        while path and path[-1] + 1 == self._counts[len(path) - 1]:
            path.pop()
        return [*path[:-1], path[-1] + 1] if path else None

    def _answer(self, name: str, options: Sequence[Any]) -> Any:
        if name not in self.params:
            asked = len(self._counts)
            self._counts.append(len(options))
            chosen = self._path[asked] if asked < len(self._path) else 0
            self.params[name] = options[self._rng.randrange(len(options)) if self._rng else chosen]
        return self.params[name]


def _check_notes(notes: dict[str, Any]) -> None:
    for name, value in notes.items():
        if name in COLUMNS:
            raise InputError(f"{name}: the report has a column of this name already; choose another.")
        if type(value) not in SCALARS:
            raise InputError(f"{name}: expected a text or a number for the report, got {value!r}.")


def _check_field(config: config_dict.ConfigDict, name: str) -> None:
    """Raises InputError unless `name` is 'section.field'."""
    section, _, field = name.partition(".")
    if section not in config:
        raise InputError(f"{name}: there is no such section{did_you_mean(section, config.keys())}")
    if field not in config[section]:
        raise InputError(f"{name}: there is no such field{did_you_mean(field, config[section].keys())}")
    if name in PER_RUN:
        raise InputError(f"{name}: is set by SWEEP['seeds']; leave it out.")


def _get(config: config_dict.ConfigDict, name: str) -> Any:
    section, field = name.split(".")
    return config[section][field]


def _copy(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    return copy.deepcopy(config)


def label(params: dict[str, Any]) -> str:
    """Parameters as one line."""
    return ", ".join(f"{name}={value}" for name, value in params.items()) or "as it is"


def scalar(value: Any) -> bool | int | float | str | None:
    """`value` as Optuna's storage can hold it: a tuple becomes text."""
    return value if isinstance(value, SCALARS) else repr(value)


def refuse(faults: list[str], file: Path | str) -> None:
    """Raises InputError that names the first five."""
    if faults:
        more = f"\n... and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise InputError(f"{file}: nothing was trained.\n" + "\n".join(itertools.islice(faults, 5)) + more)


def as_file(point: Config, title: str) -> str:
    """The text of a config file, for `train --config`, that says what differs from the defaults."""
    lines = []
    for name, _, value in config_lib.differences(Config(), point):
        lines.append(f"    config.{name} = {value!r}")
    body = "\n".join(lines)
    title = title.replace("\\", "/").replace('"', "'")  # a label may hold any text
    return (
        f'"""{title}."""\n\nfrom flaxformer_lite.config import default_config\n\n\n'
        f"def get_config():\n    config = default_config()\n{body}\n    return config\n"
    )
