"""The report of a sweep: a table as CSV and Markdown, figures, and the best config as a file."""

import csv
import functools
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flaxformer_lite.checks.vocabularies import follow_tokenizers
from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.data.tokens import tokenizer, two_vocabularies
from flaxformer_lite.field_rules import ERROR_RATES
from flaxformer_lite.fields import Config
from flaxformer_lite.plotting import fonts
from flaxformer_lite.plotting.plots import save
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.sweep import check, sweep_plots
from flaxformer_lite.sweep.importance import importances
from flaxformer_lite.sweep.results import Row, SweepFolder
from flaxformer_lite.sweep.space import Settings
from flaxformer_lite.sweep.study import COMPLETE, FAILED
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place, write_whole

TIMES = ("tokens_per_second", "minutes")  # timings: they differ between any two runs


def write(
    folder: SweepFolder, *, show: Callable[[str], None] = lambda text: None
) -> tuple[str, list[Path]]:
    """Writes `report/` in the sweep's folder; returns the table as Markdown, and the new files.

    Args:
      show: called with the table before any file is written.

    Raises:
      InputError: the folder is not of a sweep, or `report/` cannot be written.
    """
    settings, rows = folder.settings(), folder.rows()
    table = columns(folder, rows, settings)
    best = best_row(rows, settings)
    text = markdown(_for_readers(table, rows), settings, best)
    failed = [
        f"- point {row.number} ({row.label}): {row.reason}" for row in rows if row.state == FAILED
    ]
    if failed:
        text += "\n\nFailed:\n" + "\n".join(failed)
    show(text)
    files = {"results.csv": as_csv(table), "runs.csv": _runs_csv(rows), "results.md": f"{text}\n"}
    if best is not None:
        config = folder.point(best.number).config.read_text(encoding="utf-8")
        files["best.py"] = config.replace('"""Point', '"""The best: point', 1)
    paths = [folder.report / name for name in files]
    try:
        folder.report.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, files.values(), strict=True):
            write_whole(path, content)
        return text, paths + _plot(folder, rows, settings)
    except OSError as error:
        raise InputError(
            f"{folder.report}: cannot be written: {error.strerror or error}."
        ) from error


def best_row(rows: Sequence[Row], settings: Settings) -> Row | None:
    """Returns the complete point with the best mean objective, the first of equal ones."""
    complete = [row for row in rows if row.state == COMPLETE]
    sign = 1 if settings.minimizes else -1
    return min(complete, key=lambda row: sign * row.mean(settings.objective), default=None)


def _with_vocabulary(workdir: Path) -> Config:
    """Returns the config of a run, with the size of its tokenizer if the config only bounds it."""
    config, file = workdir_lib.read_config(workdir), workdir_lib.Workdir(place(workdir)).tokenizer
    if follow_tokenizers(config) and file.is_file():
        return with_vocabulary(config, *two_vocabularies.sizes(tokenizer.load(file)))
    return config


def columns(folder: SweepFolder, rows: Sequence[Row], settings: Settings) -> dict[str, list[Any]]:
    """Returns the columns of the table by name; a missing value is None."""
    count = functools.cache(check.parameter_count)

    def parameters(row: Row) -> int | None:
        workdir = folder.point(row.number).workdir(settings.seeds[0])
        return count(_with_vocabulary(workdir)) if workdir_lib.has_run(workdir) else None

    def mean_over_runs(value: Callable[[Any], float | None]) -> Callable[[Row], float | None]:
        def mean(row: Row) -> float | None:
            every = [value(run) for run in row.runs]
            values = [each for each in every if each is not None]
            return sum(values) / len(values) if values else None

        return mean

    table: dict[str, Callable[[Row], Any]] = {"point": lambda row: row.number}
    for kind in ("notes", "params"):
        for name in dict.fromkeys(name for row in rows for name in getattr(row, kind)):
            table[name] = functools.partial(_entry, kind, name)
    table |= {"state": lambda row: row.state, "seeds": lambda row: len(row.runs)}
    for metric in dict.fromkeys((settings.objective, *settings.columns)):
        table[metric] = functools.partial(_mean, metric)
        if len(settings.seeds) > 1:
            table[f"{metric} ±"] = functools.partial(_spread, metric)
    table |= {
        "best_step": lambda row: " ".join(str(run.best_step) for run in row.runs) or None,
        "parameters": parameters,
        TIMES[0]: mean_over_runs(lambda run: run.tokens_per_second),
        TIMES[1]: lambda row: sum(run.seconds for run in row.runs) / 60 if row.runs else None,
    }
    return {name: [value(row) for row in rows] for name, value in table.items()}


def as_csv(table: dict[str, list[Any]]) -> str:
    """Returns the columns as CSV, with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return out.getvalue()


def markdown(table: dict[str, list[Any]], settings: Settings, best: Row | None) -> str:
    """Returns the columns as Markdown: mean ± spread in one cell, the best objective in bold."""
    shown: dict[str, list[str]] = {}
    for name, values in table.items():
        if name.endswith(" ±"):
            continue
        cells = [_cell(name, value) for value in values]
        for row, spread in enumerate(table.get(f"{name} ±", ())):
            cells[row] += f" ± {_cell(name, spread)}" if spread is not None else ""
        if name == settings.objective and best is not None:
            row = table["point"].index(best.number)
            cells[row] = f"**{cells[row]}**"
        shown[name.replace("_", " ") if name in (*TIMES, "best_step") else name] = cells
    lines = [shown.keys(), ["---"] * len(shown), *zip(*shown.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in ERROR_RATES:
        return f"{value:.2f} %"
    if name.startswith(("accuracy", "exact_match")):
        return f"{100 * value:.2f} %"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if name == "parameters" else str(value).replace("|", "\\|")


def _entry(kind: str, name: str, row: Row) -> Any:
    return getattr(row, kind).get(name)


def _mean(metric: str, row: Row) -> float | None:
    return _number(row.mean(metric))


def _spread(metric: str, row: Row) -> float | None:
    return _number(row.spread(metric))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _for_readers(table: dict[str, list[Any]], rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Returns the table, with a column `changes` for the parameters if points have notes."""
    if not any(row.notes for row in rows):
        return table
    shown: dict[str, list[Any]] = {}
    for name, values in table.items():
        if name == "state":
            shown["changes"] = [row.label for row in rows]
        if not any(name in row.params for row in rows):
            shown[name] = values
    return shown


def _runs_csv(rows: Sequence[Row]) -> str:
    """Returns one line for each run: point, seed, and all metrics of its best evaluation."""
    runs = [(row, run) for row in rows for run in row.runs]
    metrics = list(dict.fromkeys(name for _, run in runs for name in run.values))
    table: dict[str, list[Any]] = {
        "point": [row.number for row, _ in runs],
        "seed": [run.seed for _, run in runs],
    }
    table["best_step"] = [run.best_step for _, run in runs]
    table |= {name: [run.values.get(name) for _, run in runs] for name in metrics}
    table[TIMES[0]] = [run.tokens_per_second for _, run in runs]
    table["seconds"] = [run.seconds for _, run in runs]
    return as_csv(table)


def _plot(folder: SweepFolder, rows: Sequence[Row], settings: Settings) -> list[Path]:
    """Writes the figures: parallel coordinates, objective over parameters, their importance."""
    complete = [row for row in rows if row.state == COMPLETE]
    names = [
        name
        for name in dict.fromkeys(n for r in complete for n in r.params)
        if _varies(complete, name)
    ]
    if len(complete) < 2 or not names:
        return []
    params = [{name: row.params.get(name) for name in names} for row in complete]
    scores = [row.mean(settings.objective) for row in complete]
    figures = {
        "parallel": sweep_plots.parallel_coordinates(
            params, scores, settings.objective, minimize=settings.minimizes
        ),
        "parameters": sweep_plots.by_parameter(params, scores, settings.objective),
    }
    shares = importances(list(zip(params, scores, strict=True)), minimize=settings.minimizes)
    if shares:
        figures["importance"] = sweep_plots.importance(shares, settings.objective)
    fonts.choose(figures.values())
    return [path for name, figure in figures.items() for path in save(figure, folder.report, name)]


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row.params.get(name)) for row in rows}) > 1
