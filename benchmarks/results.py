"""Published results: reads, checks and writes the files `results/NAME.json`.

A file is one `Result`. Its keys are the fields of the dataclasses below, all of them required and
no others allowed. Cells of tables, and the headline, are text with references to figures:

    {all}              99.1 (98.8 to 99.4), or 99.1 if it was measured once
    {all:value}        99.1; also {all:low}, {all:high} and {all:range}, which is 98.8 to 99.4
    {baseline/all}     a figure of results/baseline.json
"""

import dataclasses
import json
import math
import os
import re
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent.parent / "results"
SUMMARY = "summary"  # results/summary.json: a table of references to the other files
REFERENCE = re.compile(r"\{(?:(?P<result>\w+)/)?(?P<figure>[^{}:]+)(?::(?P<part>\w+))?\}")
PARTS = ("value", "low", "high", "range", "all")
EXPLAINED = ("commit", "date", "hardware", "versions", "seconds")  # null needs a note
T = TypeVar("T")


class ResultError(ValueError):
    """A file of results is invalid; the message names the file and the field."""


@dataclasses.dataclass(frozen=True)
class Quantity:
    """The unit of several figures, and the tolerance for a second measurement."""

    unit: str
    digits: int  # after the decimal point, in tables; -3: rounded to thousands
    on_hardware: bool  # depends on the hardware: times, rates, memory of a process
    absolute: float  # tolerance, in the unit
    relative: float  # tolerance, as a share of the figure; the two are added


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured number: the mean over seeds, or the median of timings."""

    quantity: str  # a key of `Result.quantities`
    value: float
    low: float | None  # null, like `high`: n measurements whose range was not recorded
    high: float | None
    n: int  # seeds, or repeats


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text, in which references stand for figures."""

    columns: list[str]
    rows: list[list[str]]


@dataclasses.dataclass(frozen=True)
class Result:
    """A published result."""

    name: str  # the file's
    title: str
    measures: str  # one sentence
    kind: str  # 'rerun': by `python -m benchmarks NAME`; 'record': cannot be repeated so
    reason: str | None  # of a record: why it cannot be repeated
    needs: str | None  # data, hardware or packages that are not part of the project
    commands: list[str]  # each adds figures
    commit: str | None
    date: str | None
    seeds: list[int]
    hardware: str | None
    versions: dict[str, str] | None
    seconds: float | None  # of all commands together
    signature: str | None  # of the scorer
    spread: str  # the meaning of `low` and `high`, and the reason for the tolerances
    note: str | None
    headline: str
    quantities: dict[str, Quantity]
    figures: dict[str, Figure]
    tables: dict[str, Table]  # 'main' and others

    def quantity(self, figure: str) -> Quantity:
        """Returns the quantity of a figure."""
        return self.quantities[self.figures[figure].quantity]


def read(path: Path) -> Result:
    """Returns the checked result of a file; references to other files are checked by `read_all`.

    Raises:
      ResultError: the file is invalid.
    """
    result = _typed(Result, _parsed(path), f"{path}: ")
    nested = {"quantities": Quantity, "figures": Figure, "tables": Table}
    typed = {
        field: {
            name: _typed(cls, each, f"{path}: {field}.{name}.")
            for name, each in getattr(result, field).items()
        }
        for field, cls in nested.items()
    }
    result = dataclasses.replace(result, **typed)
    _check(result, path)
    return result


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: expected a JSON file: {error}") from error


def _typed(cls: type[T], data: Any, where: str) -> T:
    """Returns `data` as a dataclass, if its keys and the types of its values are those of `cls`."""
    hints = typing.get_type_hints(cls)
    if not isinstance(data, dict):
        raise ResultError(f"{where}expected an object with {', '.join(hints)}, got {data!r}")
    for name in hints.keys() - data.keys():
        raise ResultError(f"{where}{name}: missing")
    for name in data.keys() - hints.keys():
        raise ResultError(f"{where}{name}: unknown; expected {', '.join(hints)}")
    for name, hint in hints.items():
        kinds = [typing.get_origin(each) or each for each in typing.get_args(hint) or [hint]]
        kinds = [typing.get_origin(hint)] if typing.get_origin(hint) in (list, dict) else kinds
        kinds += [int] if float in kinds else []
        value = data[name]
        right = isinstance(value, tuple(kinds)) and (not isinstance(value, bool) or bool in kinds)
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ResultError(f"{where}{name}: expected {wanted}, got {value!r}")
    return cls(**data)


def _check(result: Result, path: Path) -> None:
    """Raises ResultError for values that do not fit together."""

    def require(right: bool, field: str, message: str) -> None:
        if not right:
            raise ResultError(f"{path}: {field}: {message}")

    require(result.name == path.stem, "name", f"expected {path.stem!r}, got {result.name!r}")
    require(
        result.kind in ("rerun", "record"),
        "kind",
        f"expected 'rerun' or 'record', got {result.kind!r}",
    )
    require(
        (result.kind == "record") == bool(result.reason),
        "reason",
        "expected one for a record, and only there",
    )
    unknown = [name for name in EXPLAINED if getattr(result, name) is None]
    require(not unknown or bool(result.note), "note", f"expected the reason for null in {unknown}")
    for name, figure in result.figures.items():
        field = f"figures.{name}"
        require(not set(name) & set("{}:/"), field, "expected a name without { } : /")
        require(
            figure.quantity in result.quantities,
            f"{field}.quantity",
            f"no quantity {figure.quantity!r}",
        )
        low, high = figure.low, figure.high
        require((low is None) == (high is None), field, "expected low and high, or neither")
        inside = low is None or low <= figure.value <= high
        require(inside, field, f"{figure.value} is not from {low} to {high}")
        require(figure.n > 0, f"{field}.n", f"expected 1 or more, got {figure.n}")
    for name, table in result.tables.items():
        for number, row in enumerate(table.rows, 1):
            field = f"tables.{name}.rows: row {number}"
            require(
                len(row) == len(table.columns),
                field,
                f"expected {len(table.columns)} cells, got {len(row)}",
            )


def read_all(folder: Path = FOLDER) -> dict[str, Result]:
    """Returns all results by name; every reference in them names a figure.

    Raises:
      ResultError: a file is invalid.
    """
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem != SUMMARY]
    found = {path.stem: read(path) for path in paths}
    for name, result in found.items():
        path = folder / f"{name}.json"
        filled(result.headline, found, name, f"{path}: headline")
        for key, table in result.tables.items():
            for number, row in enumerate(table.rows, 1):
                for cell in row:
                    filled(cell, found, name, f"{path}: tables.{key}.rows: row {number}")
    return found


def read_summary(found: Mapping[str, Result], folder: Path = FOLDER) -> Table:
    """Returns the table of headlines, whose references all name a result.

    Raises:
      ResultError: the file is invalid.
    """
    path = folder / f"{SUMMARY}.json"
    table = _typed(Table, _parsed(path), f"{path}: ")
    for number, row in enumerate(table.rows, 1):
        if len(row) != len(table.columns):
            raise ResultError(f"{path}: row {number}: expected {len(table.columns)} cells")
        for cell in row:
            filled(cell, found, "", f"{path}: row {number}")
    return table


def filled(text: str, found: Mapping[str, Result], name: str, where: str) -> str:
    """Returns `text` with numbers in place of its references.

    Args:
      name: the result whose figures need no 'RESULT/' in front.
      where: file and field, for errors.

    Raises:
      ResultError: there is no such result, figure or part.
    """

    def number(match: re.Match) -> str:
        result = found.get(match["result"] or name)
        part = match["part"] or "all"
        if result is None or match["figure"] not in result.figures or part not in PARTS:
            raise ResultError(f"{where}: {match[0]} names no figure")
        if part in ("low", "high", "range") and result.figures[match["figure"]].low is None:
            raise ResultError(f"{where}: {match[0]}: the range of this figure was not recorded")
        return _text(result, match["figure"], part)

    return REFERENCE.sub(number, text)


def _text(result: Result, name: str, part: str) -> str:
    figure, digits = result.figures[name], result.quantity(name).digits
    numbers = {"value": figure.value, "low": figure.low, "high": figure.high}
    texts = {
        k: f"{round(x, digits):,.{max(digits, 0)}f}" for k, x in numbers.items() if x is not None
    }
    if "low" not in texts:
        return texts["value"]
    spread = f"{texts['low']} to {texts['high']}"
    many = f"{texts['value']} ({spread})" if figure.n > 1 else texts["value"]
    return (texts | {"range": spread, "all": many})[part]


def write(result: Result, folder: Path = FOLDER) -> Path:
    """Writes the file of a result, whole or not at all, and returns its path."""
    path, data = folder / f"{result.name}.json", dataclasses.asdict(result)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
        file.write(_json(data) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path


def _json(data: Mapping[str, Any]) -> str:
    """Returns JSON with a line for each field, quantity, figure and row."""

    def block(value: Any, depth: int) -> str:
        open_fields = depth < 2 and isinstance(value, dict) and value
        rows = isinstance(value, list) and value and isinstance(value[0], list)
        table = isinstance(value, dict) and "rows" in value
        pad, end = "\n" + "  " * (depth + 1), "\n" + "  " * depth
        if (open_fields and not _plain(value)) or table:
            lines = [
                f"{json.dumps(k, ensure_ascii=False)}: {block(v, depth + 1)}"
                for k, v in value.items()
            ]
            return "{" + pad + f",{pad}".join(lines) + end + "}"
        if rows:
            return (
                "["
                + pad
                + f",{pad}".join(json.dumps(v, ensure_ascii=False) for v in value)
                + end
                + "]"
            )
        return json.dumps(value, ensure_ascii=False)

    return block(data, 0)


def _plain(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(each, dict | list) for each in value.values())
