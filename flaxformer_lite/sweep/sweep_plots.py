"""Figures of a sweep, from its parameters and objectives."""

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
    """Plots one line for each point over the parameters and the objective; the best is darkest."""
    axes = [*params[0], objective]
    columns = [[point[name] for point in params] for name in params[0]] + [list(scores)]
    heights, ticks = zip(*map(_on_axis, columns), strict=True)
    figure, (panel,) = new_panels(1, columns=1, width=max(6, 1.6 * len(axes)), height=4.2)
    panel.grid(visible=False)
    order = np.argsort(scores)[:: 1 if minimize else -1]  # the best first
    rank = np.empty(len(scores))
    rank[order] = np.linspace(0.9, 0.15, len(scores))
    shades = matplotlib.colormaps["Blues"]
    for point in order[::-1]:
        panel.plot(
            range(len(axes)),
            [height[point] for height in heights],
            color=shades(rank[point]),
            linestyle="-",
        )
    for number, labels in enumerate(ticks):
        panel.axvline(number, color="#444444", linewidth=0.8)
        for height, text in labels:
            panel.annotate(
                text, (number, height), xytext=(3, 1), textcoords="offset points", fontsize=7
            )
    panel.set_xticks(range(len(axes)), axes, rotation=20, ha="right", rotation_mode="anchor")
    panel.set_yticks([])
    return figure


@matplotlib.rc_context(STYLE)
def by_parameter(
    params: Sequence[Mapping[str, Any]], scores: Sequence[float], objective: str
) -> Figure:
    """Plots the objective over each parameter, with a dot for each point."""
    figure, panels = new_panels(len(params[0]), columns=3, width=3.4, height=2.6)
    for name, panel in zip(params[0], panels, strict=True):
        values = [point[name] for point in params]
        if _are_numbers(values) and len(set(values)) > 1:
            panel.plot(values, scores, ".", color=COLOURS[0], markersize=7)
            if min(values) > 0 and max(values) / min(values) > 10:
                panel.set_xscale("log")
        else:
            names = sorted({str(value) for value in values})
            positions = [names.index(str(value)) for value in values]
            panel.plot(positions, scores, ".", color=COLOURS[0], markersize=7)
            panel.set_xticks(
                range(len(names)), names, rotation=20, ha="right", rotation_mode="anchor"
            )
        panel.set(xlabel=name, ylabel=objective)
    return figure


@matplotlib.rc_context(STYLE)
def importance(shares: Mapping[str, float], objective: str) -> Figure:
    """Plots each parameter's share in the variation of the objective, the largest on top."""
    names = sorted(shares, key=shares.__getitem__)
    figure, (panel,) = new_panels(1, columns=1, width=6, height=0.35 * len(names) + 1)
    panel.barh(names, [shares[name] for name in names], color=COLOURS[0])
    panel.set(xlabel=f"importance for {objective}", xlim=(0, 1))
    panel.grid(visible=False, axis="y")
    return figure


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


def _on_axis(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Returns the height of each value on an axis from 0 to 1, and the axis's tick labels."""
    if not _are_numbers(values):
        names = sorted({str(value) for value in values})
        heights = np.linspace(0, 1, len(names)) if len(names) > 1 else np.array([0.5])
        ticks = list(zip(heights, names, strict=True))
        return [heights[names.index(str(value))] for value in values], ticks
    low, high = min(values), max(values)
    if low == high:
        return [0.5] * len(values), [(0.5, f"{low:.4g}")]
    scale = np.log if low > 0 and high / low > 10 else np.asarray
    heights = (scale(np.array(values, float)) - scale(low)) / (scale(high) - scale(low))
    height_of = dict(zip(values, heights, strict=True))
    labelled = sorted(height_of)[:: max(1, len(height_of) // 6)]
    return list(heights), [(height_of[value], f"{value:.4g}") for value in labelled]
