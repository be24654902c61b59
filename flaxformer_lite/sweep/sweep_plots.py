"""Pictures of a sweep: parameters and objectives in, a figure out."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from flaxformer_lite.plotting.plots import COLOURS, STYLE, new_panels


@matplotlib.rc_context(STYLE)
def parallel_coordinates(
    params: Sequence[Mapping[str, Any]], scores: Sequence[float], objective: str, *, minimize: bool
) -> Figure:
    """A line for each point over an axis for each parameter and the objective; the better, the darker."""
    axes = [*params[0], objective]
    columns = [[point[name] for point in params] for name in params[0]] + [list(scores)]
    places, ticks = zip(*map(_on_axis, columns), strict=True)
    figure, (panel,) = new_panels(1, columns=1, width=max(6, 1.6 * len(axes)), height=4.2)
    panel.grid(visible=False)
    order = np.argsort(scores)[:: 1 if minimize else -1]  # the best first
    rank = np.empty(len(scores))
    rank[order] = np.linspace(0.9, 0.15, len(scores))
    shades = matplotlib.colormaps["Blues"]
    for point in order[::-1]:
        panel.plot(range(len(axes)), [place[point] for place in places], color=shades(rank[point]), linestyle="-")
    for number, marks in enumerate(ticks):
        panel.axvline(number, color="#444444", linewidth=0.8)
        for place, text in marks:
            panel.annotate(text, (number, place), xytext=(3, 1), textcoords="offset points", fontsize=7)
    panel.set_xticks(range(len(axes)), axes, rotation=20, ha="right", rotation_mode="anchor")
    panel.set_yticks([])
    return figure


@matplotlib.rc_context(STYLE)
def by_parameter(params: Sequence[Mapping[str, Any]], scores: Sequence[float], objective: str) -> Figure:
    """The objective over each parameter, a dot for each point."""
    figure, drawn = new_panels(len(params[0]), columns=3, width=3.4, height=2.6)
    for name, panel in zip(params[0], drawn, strict=True):
        values = [point[name] for point in params]
        if _are_numbers(values) and len(set(values)) > 1:
            panel.plot(values, scores, ".", color=COLOURS[0], markersize=7)
            if min(values) > 0 and max(values) / min(values) > 10:
                panel.set_xscale("log")
        else:
            names = sorted({str(value) for value in values})
            panel.plot([names.index(str(value)) for value in values], scores, ".", color=COLOURS[0], markersize=7)
            panel.set_xticks(range(len(names)), names, rotation=20, ha="right", rotation_mode="anchor")
        panel.set(xlabel=name, ylabel=objective)
    return figure


@matplotlib.rc_context(STYLE)
def importance(shares: Mapping[str, float], objective: str) -> Figure:
    """How much of the objective's variation each parameter accounts for, the largest on top."""
    names = sorted(shares, key=shares.get)
    figure, (panel,) = new_panels(1, columns=1, width=6, height=0.35 * len(names) + 1)
    panel.barh(names, [shares[name] for name in names], color=COLOURS[0])
    panel.set(xlabel=f"importance for {objective}", xlim=(0, 1))
    panel.grid(visible=False, axis="y")
    return figure


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _on_axis(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Each value's place between 0 and 1, and the marks of the axis."""
    if not _are_numbers(values):
        names = sorted({str(value) for value in values})
        places = np.linspace(0, 1, len(names)) if len(names) > 1 else np.array([0.5])
        return [places[names.index(str(value))] for value in values], list(zip(places, names, strict=True))
    low, high = min(values), max(values)
    if low == high:
        return [0.5] * len(values), [(0.5, f"{low:.4g}")]
    scale = np.log if low > 0 and high / low > 10 else np.asarray
    places = (scale(np.array(values, float)) - scale(low)) / (scale(high) - scale(low))
    marks = dict(zip(values, places, strict=True))
    shown = sorted(marks)[:: max(1, len(marks) // 6)]
    return list(places), [(marks[value], f"{value:.4g}") for value in shown]
