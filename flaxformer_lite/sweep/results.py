"""The folder of a sweep, and the results read from it, without the study or the sweep's file.

S/sweep.json                 the sweep's settings, base config and points
S/points/0003/config.py      the point's config, for `train --config`
S/points/0003/point.json     the point's parameters and notes, and its final state
S/points/0003/seed0/         the workdir of a run; seed0.log: its output
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

STARTED = "begun"  # has a folder but no final state; the folder does not show if a worker runs it
ENDED = (COMPLETE, PRUNED, FAILED)
NOT_METRICS = ("step", "split", "seconds", "parameters")  # other fields of a line of the log


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of one training run."""

    seed: int
    best_step: int
    values: dict[str, float]  # metrics of the validation split at `best_step`
    tokens_per_second: float | None  # median of the logged steps
    seconds: float  # total, over all starts


@dataclasses.dataclass(frozen=True)
class Row:
    """A point with its state and results."""

    number: int
    params: dict[str, Any]
    label: str
    notes: dict[str, Any]
    state: str = WAITING
    reason: str = ""
    runs: tuple[RunResult, ...] = ()

    def mean(self, metric: str) -> float:
        """Returns the mean over the seeds; NaN if no run has the metric."""
        values = self._values(metric)
        return statistics.fmean(values) if values else math.nan

    def spread(self, metric: str) -> float:
        """Returns the sample standard deviation over the seeds; NaN for fewer than two runs."""
        values = self._values(metric)
        return statistics.stdev(values) if len(values) > 1 else math.nan

    def _values(self, metric: str) -> list[float]:
        return [run.values[metric] for run in self.runs if metric in run.values]


class SweepFolder:
    """The files of a sweep."""

    def __init__(self, path: Path):
        self.path = path
        self.record, self.report = path / "sweep.json", path / "report"

    def point(self, number: int) -> "PointFolder":
        """Returns the folder of a point."""
        return PointFolder(self.path / "points" / f"{number:04}")

    def create_or_join(self, sweep: Sweep, *, database: str | None = None) -> str:
        """Writes sweep.json, or checks that it is of the same sweep; returns the sweep's id.

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
            "points": None if sweep.points is None else [_as_dict(p) for p in sweep.points],
        }
        text = _as_json(record)
        record = json.loads(text)
        try:
            if not self.record.exists():
                self._create(text)
            known = self.read()
            self._check_same(known, record, sweep.file)
            record["id"] = known["id"]
            if record != known:
                write_whole(self.record, _as_json(record))
        except OSError as error:
            raise InputError(
                f"--workdir={self.path}: cannot be written to: {error.strerror}."
            ) from error
        return known["id"]

    def _create(self, record: str) -> None:
        """Makes the folder with sweep.json, unless another worker writes that file first."""
        path = self.path
        if path.exists() and (not path.is_dir() or any(map(_is_foreign, path.iterdir()))):
            raise InputError(
                f"--workdir={path}: expected a new folder or that of a sweep; choose another."
            )
        path.mkdir(parents=True, exist_ok=True)
        write_new(self.record, record)

    def _check_same(self, known: dict[str, Any], record: dict[str, Any], file: Path) -> None:
        if known["database"] != record["database"]:
            before, now = _study_place(known), _study_place(record)
            raise InputError(
                f"--storage: the sweep in {self.path} has its points in {before}, and this start "
                f"names {now}; name the same, or use a new --workdir."
            )
        free = ("id", "file", "settings.trials", *(f"base.{name}" for name in PER_RUN))
        changed = [name for name in _changes(known, record) if name not in free]
        if changed:
            raise InputError(
                f"{file}: {changed[0]} differs from the sweep in {self.path}; restore the value, "
                "or use a new --workdir."
            )

    def read(self) -> dict[str, Any]:
        """Returns the contents of sweep.json; raises InputError if it cannot be read."""
        try:
            return json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path}: expected the folder of a sweep, but sweep.json: {error}"
            ) from error

    def settings(self) -> Settings:
        """Returns the sweep's settings."""
        given = self.read()["settings"]
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        return Settings(**values)

    def rows(self) -> list[Row]:
        """Returns every point that is listed or was started."""
        settings, listed = self.settings(), self.read()["points"] or []
        started = [
            int(entry.name)
            for entry in (self.path / "points").glob("[0-9]*")
            if entry.name.isdecimal() and (entry / "point.json").exists()  # no copy of a point
        ]
        rows = []
        for number in sorted({*range(len(listed)), *started}):
            folder = self.point(number)
            record = folder.read()
            fields = {"state": STARTED, **record} if record else listed[number]
            rows.append(Row(number, runs=folder.runs(settings), **fields))
        return rows


@dataclasses.dataclass(frozen=True)
class PointFolder:
    """The files of a point."""

    path: Path

    def workdir(self, seed: int) -> Path:
        """The workdir of the run with this seed."""
        return self.path / f"seed{seed}"

    def log(self, seed: int) -> Path:
        """The output of the run with this seed."""
        return self.path / f"seed{seed}.log"

    @property
    def config(self) -> Path:
        """The config file."""
        return self.path / "config.py"

    @property
    def _record(self) -> Path:
        return self.path / "point.json"

    def write(self, point: Point, **end: Any) -> None:
        """Writes point.json; `end` holds `state` and `reason` once the point has ended."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self._record, _as_json({**_as_dict(point), **end}))

    def clear_state(self) -> None:
        """Removes the final state from point.json, if there is one."""
        record = self.read()
        if record is not None:
            kept = {name: record[name] for name in record if name not in ("state", "reason")}
            write_whole(self._record, _as_json(kept))

    def read(self) -> dict[str, Any] | None:
        """Returns the contents of point.json, or None."""
        file = self._record
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def runs(self, settings: Settings) -> tuple[RunResult, ...]:
        """Returns the result of every run that has been evaluated."""
        found = (read_run(self.workdir(seed), seed, settings) for seed in settings.seeds)
        return tuple(run for run in found if run is not None)

    def result(self, seed: int, settings: Settings) -> dict[str, float] | None:
        """Returns the metrics of a run's best evaluation, or None."""
        run = read_run(self.workdir(seed), seed, settings)
        return None if run is None else run.values


def read_run(workdir: Path, seed: int, settings: Settings) -> RunResult | None:
    """Returns the result of a run from its log; None before its first evaluation.

    Of evaluations with the same objective the last counts.
    """
    lines = metrics_log.read_metrics(workdir / "metrics.jsonl")
    evaluated = evaluations(lines, settings.objective)
    if not evaluated:
        return None
    sign = -1 if settings.minimizes else 1
    best_step = max(evaluated, key=lambda step: (sign * evaluated[step], step))
    (best,) = (
        line for line in lines if line["split"] == "validation" and line["step"] == best_step
    )
    rates = [
        line["tokens_per_second"]
        for line in lines
        if line["split"] == "train" and line.get("tokens_per_second")
    ]
    values = {
        name: value for name, value in best.items() if name not in NOT_METRICS and value is not None
    }
    seconds = max(line.get("seconds", 0.0) for line in lines)
    return RunResult(seed, best_step, values, statistics.median(rates) if rates else None, seconds)


def evaluations(lines: list[dict[str, Any]], metric: str) -> dict[int, float]:
    """Returns `metric` of the validation split by step, without evaluations that lack it."""
    return {
        line["step"]: line[metric]
        for line in lines
        if line["split"] == "validation" and line.get(metric) is not None
    }


def _is_foreign(entry: Path) -> bool:
    """Whether a file is not one that another worker writes as it creates the sweep."""
    return not entry.name.startswith("sweep.json")


def _study_place(record: Mapping[str, Any]) -> str:
    name = record["database"]
    return f"the study {name!r} of a database" if name else "its own file"


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _as_dict(point: Point) -> dict[str, Any]:
    params = {name: scalar(value) for name, value in point.params.items()}
    return {"params": params, "label": point.label, "notes": point.notes}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns the names of the differences, as 'base.model.d_model' or 'points.3.params...'."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        before, after = _numbered(old.get(name)), _numbered(new.get(name))
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changes(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}")
    return found


def _numbered(value: Any) -> Any:
    """Returns a list of dicts as a dict from number to dict, and any other value unchanged."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    return dict(enumerate(value)) if is_list else value
