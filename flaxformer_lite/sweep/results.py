"""The folder of a sweep, and what it tells: each point's runs, measured, without the study or the sweep's file.

S/sweep.json                 what is swept, as every start and every worker must have it
S/points/0003/config.py      a point, as `train --config` takes it
S/points/0003/point.json     its parameters and notes, and how it has ended
S/points/0003/seed0/         the workdir of a run; seed0.log: what it printed
"""

import dataclasses
import json
import math
import statistics
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flaxformer_lite.runs import metrics_log
from flaxformer_lite.sweep.space import PER_RUN, Point, Settings, Sweep, scalar
from flaxformer_lite.sweep.study import COMPLETE, FAILED, PRUNED, WAITING
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_new, write_whole

BEGUN = "begun"  # by a worker, of which this folder does not tell whether it is at work
ENDED = (COMPLETE, PRUNED, FAILED)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What one training came to."""

    seed: int
    best_step: int
    values: dict[str, float]  # metrics of the validation split at `best_step`
    tokens_per_second: float | None  # median of the logged steps
    seconds: float  # of all its starts


@dataclasses.dataclass(frozen=True)
class Row:
    """A point, and what is known of it."""

    number: int
    params: dict[str, Any]
    label: str
    notes: dict[str, Any]
    state: str = WAITING
    reason: str = ""
    runs: tuple[RunResult, ...] = ()

    def mean(self, metric: str) -> float:
        """Over the seeds; NaN where none has it."""
        values = self._values(metric)
        return statistics.fmean(values) if values else math.nan

    def spread(self, metric: str) -> float:
        """The standard deviation over the seeds, of the population they are a sample of; NaN for fewer than two."""
        values = self._values(metric)
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def _values(self, metric: str) -> list[float]:
        return [run.values[metric] for run in self.runs if metric in run.values]


class SweepFolder:
    """Paths below the folder of a sweep."""

    def __init__(self, path: Path):
        self.path = path
        self.record, self.report = path / "sweep.json", path / "report"

    def point(self, number: int) -> "PointFolder":
        """The folder of a point."""
        return PointFolder(self.path / "points" / f"{number:04}")

    def begin(self, sweep: Sweep, *, database: str | None = None) -> str:
        """Writes down what is swept, and returns what names this sweep alone.

        Args:
          database: the name of the study, if it is in a database.

        Raises:
          InputError: the folder holds something else, or cannot be written to.
        """
        record = {
            "id": uuid.uuid4().hex,
            "database": database,
            "file": str(sweep.file),
            "settings": dataclasses.asdict(sweep.settings),
            "base": dataclasses.asdict(sweep.base),
            "points": None if sweep.points is None else [_plain(point) for point in sweep.points],
        }
        text = json.dumps(record, indent=1) + "\n"
        record = json.loads(text)
        try:
            if not self.record.exists():
                if self.path.exists() and (not self.path.is_dir() or any(map(_is_strange, self.path.iterdir()))):
                    raise InputError(
                        f"--workdir={self.path}: expected a new folder or that of a sweep; choose another."
                    )
                self.path.mkdir(parents=True, exist_ok=True)
                write_new(self.record, text)
            known = self.read()
            self._check_same(known, record, sweep.file)
            if record | {"id": known["id"]} != known:
                write_whole(self.record, json.dumps(record | {"id": known["id"]}, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"--workdir={self.path}: cannot be written to: {error.strerror}.") from error
        return known["id"]

    def _check_same(self, known: dict[str, Any], record: dict[str, Any], file: Path) -> None:
        if known["database"] != record["database"]:
            where = [f"the study {each['database']!r} of a database" if each["database"] else "its own file" for each in
                     (known, record)]  # fmt: skip
            raise InputError(
                f"--storage: the sweep in {self.path} has its points in {where[0]}, and this start names {where[1]}; "
                "name the same, or use a new --workdir."
            )
        free = ("id", "file", "settings.trials", *(f"base.{name}" for name in PER_RUN))
        changed = [name for name in _changes(known, record) if name not in free]
        if changed:
            raise InputError(
                f"{file}: {changed[0]} is not what the sweep in {self.path} was begun with; "
                "put it back, or use a new --workdir."
            )

    def read(self) -> dict[str, Any]:
        """What is swept. Raises InputError if that cannot be read."""
        try:
            return json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path}: expected the folder of a sweep, but sweep.json: {error}") from error

    def settings(self) -> Settings:
        """How the sweep is run and compared."""
        given = self.read()["settings"]
        return Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

    def rows(self) -> list[Row]:
        """Every point that is listed or was begun."""
        settings, listed = self.settings(), self.read()["points"] or []
        found = [int(entry.name) for entry in (self.path / "points").glob("[0-9]*") if (entry / "point.json").exists()]
        rows = []
        for number in sorted({*range(len(listed)), *found}):
            begun = self.point(number).read()
            known = {"state": BEGUN, **begun} if begun else listed[number]
            rows.append(Row(number, runs=self.point(number).runs(settings), **known))
        return rows


@dataclasses.dataclass(frozen=True)
class PointFolder:
    """Paths below the folder of a point."""

    path: Path

    def workdir(self, seed: int) -> Path:
        """Of the run with this seed."""
        return self.path / f"seed{seed}"

    def log(self, seed: int) -> Path:
        """What that run printed."""
        return self.path / f"seed{seed}.log"

    @property
    def config(self) -> Path:
        """A config file."""
        return self.path / "config.py"

    def write(self, point: Point, **known: Any) -> None:
        """Writes down the point and what is known of it: `state` and `reason`."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "point.json", json.dumps({**_plain(point), **known}, indent=1) + "\n")

    def forget_end(self) -> None:
        """The point has not ended after all."""
        known = self.read()
        if known is not None:
            kept = {name: value for name, value in known.items() if name not in ("state", "reason")}
            write_whole(self.path / "point.json", json.dumps(kept, indent=1) + "\n")

    def read(self) -> dict[str, Any] | None:
        """What `write` was given, or None."""
        file = self.path / "point.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def runs(self, settings: Settings) -> tuple[RunResult, ...]:
        """Of every run that has been evaluated."""
        found = (read_run(self.workdir(seed), seed, settings) for seed in settings.seeds)
        return tuple(run for run in found if run is not None)

    def result(self, seed: int, settings: Settings) -> dict[str, float] | None:
        """The metrics of one run's best evaluation, if there is one."""
        run = read_run(self.workdir(seed), seed, settings)
        return run and run.values


def read_run(workdir: Path, seed: int, settings: Settings) -> RunResult | None:
    """What the log of a run tells; None before its first evaluation. Of equal evaluations the later counts."""
    lines = metrics_log.read_metrics(workdir / "metrics.jsonl")
    evaluated = evaluations(lines, settings.objective)
    if not evaluated:
        return None
    sign = -1 if settings.minimizes else 1
    best_step = max(evaluated, key=lambda step: (sign * evaluated[step], step))
    (best,) = (line for line in lines if line["split"] == "validation" and line["step"] == best_step)
    rates = [line["tokens_per_second"] for line in lines if line["split"] == "train" and line.get("tokens_per_second")]
    values = {name: value for name, value in best.items() if name not in NOT_METRICS and value is not None}
    seconds = max(line.get("seconds", 0.0) for line in lines)
    return RunResult(seed, best_step, values, statistics.median(rates) if rates else None, seconds)


NOT_METRICS = ("step", "split", "seconds", "parameters")


def evaluations(lines: list[dict[str, Any]], metric: str) -> dict[int, float]:
    """Step to `metric` of the validation split, where it is a number."""
    return {
        line["step"]: line[metric] for line in lines if line["split"] == "validation" and line.get(metric) is not None
    }


def _is_strange(entry: Path) -> bool:
    """Whether it is something else than what another worker is about to write."""
    return not entry.name.startswith("sweep.json")


def _plain(point: Point) -> dict[str, Any]:
    params = {name: scalar(value) for name, value in point.params.items()}
    return {"params": params, "label": point.label, "notes": point.notes}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of what differs, 'base.model.d_model' or 'points.3.params...'."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = old.get(name), new.get(name)
        if isinstance(before, list) and isinstance(after, list) and before and isinstance(before[0], dict):
            before, after = dict(enumerate(before)), dict(enumerate(after))
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}")
    return found
