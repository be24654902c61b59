"""Runs the commands of a result again, and compares the new figures with the published ones.

A comparison has its own folder of output, named after the commit. The folder is renamed at the end,
so a comparison that was stopped continues, and a finished one starts from nothing the next time.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, processes
from benchmarks.results import Figure, Quantity, Result, ResultError

ROOT = processes.ROOT
PROGRAMS = {
    "python": [sys.executable],
    "flaxformer-lite": [sys.executable, "-m", "flaxformer_lite"],
}

# Files of the output that `--save` copies, and the folder of each.
PUBLISHED = {
    "accelerator-*.json": "results/raw",
    "layer_cost.png": "docs/results",
    "position_lengths/position_lengths.png": "docs/results",
    "grokking/grokking.png": "docs/results",
    "optimizers/optimizers.png": "docs/results",
}
# No command reads these paths, so `--save` may find them changed.
WITHOUT_EFFECT = ("results", "docs", "README.md")
SECONDS = "seconds"  # file of the output: time of the parts that were stopped
PACKAGES = ("jax", "flax", "numpy")  # whose versions every saved result records


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A published figure, its new value, and whether that is within the spread."""

    name: str
    quantity: Quantity
    published: Figure
    measured: float | None  # None: the run does not measure it
    obstacle: str  # the reason why they cannot be compared, or ''

    @property
    def within(self) -> bool:
        """Whether the new value is from `low` to `high`, each widened by the tolerances."""
        low, high = limits(self.published, self.quantity)
        return self.measured is not None and low <= self.measured <= high

    @property
    def fails(self) -> bool:
        """Whether a figure that does not depend on the hardware is outside its spread."""
        compared = self.measured is not None and not self.obstacle
        return compared and not self.quantity.on_hardware and not self.within

    @property
    def verdict(self) -> str:
        """One or two words for the last column."""
        if self.measured is None:
            return "not measured"
        if self.obstacle:
            return f"not comparable: {self.obstacle}"
        return "within" if self.within else "OUTSIDE"


def limits(figure: Figure, quantity: Quantity) -> tuple[float, float]:
    """Returns the lowest and the highest value that agree with a published figure."""
    margin = quantity.absolute + quantity.relative * abs(figure.value)
    rounding = 0.5 * 10.0**-quantity.digits + 1e-9  # published figures may be rounded
    low, high = (figure.value if x is None else x for x in (figure.low, figure.high))
    return low - margin - rounding, high + margin + rounding


def run(result: Result, flags: Sequence[str], output: Path) -> dict[str, Any]:
    """Returns the figures that the commands measure now, by name.

    Args:
      flags: passed to each command.
      output: the folder of runs and plots.

    Raises:
      ResultError: it is a record, or a command fails.
    """
    if result.kind == "record":
        raise ResultError(
            f"{result.name} is a record and cannot be measured again: {result.reason}"
        )
    commands = {command: _words(command, result.name) for command in result.commands}
    variables = processes.environment(**{figures.OUTPUT_VARIABLE: str(output)})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (command, words) in enumerate(commands.items()):
            file = Path(folder) / f"{number}.json"
            code = processes.call([*words, *flags, f"--json={file}"], variables)
            if code:
                needs = f"; it needs {result.needs}" if result.needs else ""
                raise ResultError(f"{command} ended with {code}{needs}")
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def _words(command: str, name: str) -> list[str]:
    program, *words = shlex.split(command) or [""]
    if program not in PROGRAMS:
        raise ResultError(f"{name}: {command!r}: expected a command of {' or '.join(PROGRAMS)}")
    return [*PROGRAMS[program], *words]


def compare(result: Result, measured: Mapping[str, Any], here: str) -> list[Comparison]:
    """Returns a comparison for each published figure.

    Args:
      measured: figures by name, as `run` returns them.
      here: the hardware of the new figures.
    """

    def obstacle(quantity: Quantity) -> str:
        hardware = "other hardware" if quantity.on_hardware and here != result.hardware else ""
        return other_data(result) or hardware

    return [
        Comparison(
            name,
            result.quantity(name),
            figure,
            measured[name]["value"] if name in measured else None,
            obstacle(result.quantity(name)),
        )
        for name, figure in result.figures.items()
    ]


def other_data(result: Result) -> str:
    """Returns how the data differ from the published result's, or ''.

    The embedded datasets are made from the CLDR of the installed Babel.
    """
    published = (result.versions or {}).get("babel")
    here = importlib.metadata.version("babel") if published else None
    same = here is None or here.split(".")[:2] == published.split(".")[:2]
    return "" if same else f"phrases of Babel {here}, not {published}"


def table(comparisons: Sequence[Comparison]) -> str:
    """Returns a line for each figure: published, allowed, measured, verdict."""
    rows = [["figure", "published", "allowed", "measured", "verdict"]]
    for each in comparisons:
        digits = max(0, each.quantity.digits) + 1
        low, high = limits(each.published, each.quantity)
        new = "-" if each.measured is None else f"{each.measured:,.{digits}f}"
        published = f"{each.published.value:,.{digits - 1}f} {each.quantity.unit}".strip()
        allowed = f"{low:,.{digits}f} to {high:,.{digits}f}" if not each.obstacle else "-"
        rows.append([each.name, published, allowed, new, each.verdict])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def updated(
    result: Result, measured: Mapping[str, Any], *, seconds: float, commit: str | None
) -> Result:
    """Returns the result with the new figures, and with date, hardware and versions of now.

    Raises:
      ResultError: a published figure was not measured.
    """
    if missing := result.figures.keys() - measured.keys():
        raise ResultError(f"{result.name}: not measured: {', '.join(sorted(missing))}")
    new = {name: Figure(old.quantity, **measured[name]) for name, old in result.figures.items()}
    names = dict.fromkeys([*PACKAGES, *(result.versions or ())])
    versions = {name: importlib.metadata.version(name) for name in names}
    return dataclasses.replace(
        result,
        figures=new,
        commit=commit,
        date=datetime.date.today().isoformat(),
        hardware=hardware(),
        versions=versions,
        seconds=round(seconds, 1),
        note=None,
    )


def commit() -> str | None:
    """Returns the short hash of the checkout, with '-dirty' if files differ from it.

    Returns None outside a repository, and in a folder of another one.
    """
    if _git("rev-parse", "--show-cdup") != "":
        return None
    differ = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_except())
    short = _git("rev-parse", "--short", "HEAD")
    return short and short + ("-dirty" if differ else "")


def _except() -> list[str]:
    return [f":(exclude){path}" for path in WITHOUT_EFFECT]


def _git(*words: str) -> str | None:
    """Returns the output of a command of git, or None if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def clean_commit() -> str:
    """Returns the short hash of the commit that holds the code.

    Raises:
      ResultError: no commit does.
    """
    here = commit()
    if here is None:
        raise ResultError(f"--save: records the commit, and {ROOT} is not a checkout of git")
    if here.endswith("-dirty"):
        raise ResultError("--save: records the commit; commit the changed files first")
    return here


def hardware() -> str:
    """Returns '2 cores of AMD EPYC', or the name of the GPU that the driver lists first."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    if gpus:
        return f"{len(gpus)} x {gpus[0].strip()}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else 'an unknown CPU'}"


def output_of(result: Result, flags: Sequence[str]) -> Path:
    """Returns the folder of a comparison; one that was stopped at the same commit had the same."""
    parts = [result.name, *filter(None, [commit()]), *flags]
    return ROOT / "runs" / "benchmarks" / "-".join(parts).replace("/", "_")


def timed_run(
    result: Result, flags: Sequence[str], output: Path
) -> tuple[dict[str, Any], float, Path]:
    """Returns the figures of a run, its seconds and its folder, which is renamed after the run.

    The seconds include those of the parts that were stopped.
    """
    spent = output / SECONDS
    before = float(spent.read_text()) if spent.exists() else 0.0
    if output.exists():
        print(f"{result.name}: continues the unfinished comparison in {output}", flush=True)
    started = time.monotonic()
    try:
        found = run(result, flags, output)
    finally:
        seconds = before + time.monotonic() - started
        if output.exists():
            spent.write_text(f"{seconds:.1f}\n")
    if output.exists():
        output = output.rename(f"{output}-{datetime.datetime.now():%Y%m%dT%H%M%S.%f}")
    return found, seconds, output


def publish(output: Path, root: Path = ROOT) -> list[Path]:
    """Copies the plots and the raw output of a run to the documentation; returns the new files."""
    return [
        Path(shutil.copy(path, root / folder))
        for pattern, folder in PUBLISHED.items()
        for path in sorted(output.glob(pattern))
    ]
