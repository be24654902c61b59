"""Figures of attention, positions, schedules, runs and scores, made from arrays.

No display is needed: pyplot and its global state are not used. Layers, heads and tokens are
counted from 0, as in the arrays.
"""

import io
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rcsetup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flaxformer_lite.plotting.attention_page import visible
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import make_folder, place, write_whole

# Okabe and Ito's palette, safe for colour-blind readers, without its yellow, too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.prop_cycle": rcsetup.cycler(linestyle=["-", "--", ":"]) * rcsetup.cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "flaxformer_lite",  # deterministic ids
    "text.parse_math": False,  # a dollar sign in a token is a dollar sign
}

Figures = Mapping[str, Figure]  # by the names of their files
SPLITS: dict[str, dict[str, Any]] = {  # line style of the curves of each split
    "train": {"linestyle": "-", "linewidth": 0.8, "marker": ".", "markersize": 2},
    "validation": {"linestyle": "-", "linewidth": 1.6, "marker": "o", "markersize": 4},
    "test": {"linestyle": "none", "marker": "*", "markersize": 11, "markeredgecolor": "white"},
}


@matplotlib.rc_context(STYLE)
def attention_grid(
    weights_NHTS: np.ndarray, query_tokens: Sequence[str], key_tokens: Sequence[str], *, title: str
) -> Figure:
    """Returns a heat map for each layer (row) and head (column), on one scale from 0 to 1."""
    layers, heads, queries, keys = weights_NHTS.shape
    height, width = (min(4.5, max(1.4, 0.1 * tokens)) for tokens in (queries, keys))  # of a panel
    figure = Figure(figsize=(width * heads + 2, height * layers + 1.6), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    for (layer, head), panel in np.ndenumerate(panels):
        image = _heat_map(panel, weights_NHTS[layer, head], cmap="Blues", vmin=0, vmax=1)
        panel.tick_params(length=0)
        _label_tokens(panel.xaxis, key_tokens if layer == layers - 1 else [], width, rotation=90)
        _label_tokens(panel.yaxis, query_tokens if head == 0 else [], height)
        panel.set(
            title=f"head {head}" if layer == 0 else "", ylabel=f"layer {layer}" if head == 0 else ""
        )
    figure.suptitle(title)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    figure.colorbar(image, ax=panels, label="weight", aspect=30, fraction=0.25 / heads, pad=0.01)
    return figure


@matplotlib.rc_context(STYLE)
def positions(codes: Mapping[str, np.ndarray]) -> Figure:
    """Returns a row for each scheme: all values, some dimensions, dot products over the distance.

    Args:
      codes: name of the scheme to its position vectors (L, D).
    """
    figure = Figure(figsize=(12, 2.9 * len(codes)), layout="constrained")
    rows = figure.subplots(len(codes), 3, squeeze=False)
    for (values, lines, products), (name, code_LD) in zip(rows, codes.items(), strict=True):
        length, d_model = code_LD.shape
        image = _heat_map(values, code_LD.T, cmap="RdBu_r", norm=matplotlib.colors.CenteredNorm())
        figure.colorbar(image, ax=values, pad=0.02)
        values.set(title=f"{name}: all values", xlabel="position", ylabel="dimension")
        # From the fastest sinusoid to the middle one; slower ones hardly change over a sentence.
        for dimension in sorted({d_model // 2 * i // 3 for i in range(4)}):
            lines.plot(code_LD[:, dimension], label=dimension)
        lines.set(title=f"{name}: single dimensions", xlabel="position", ylabel="value")
        _legend_beside(lines, "dimension")
        # Thinner and thinner, so that curves which coincide are all visible.
        at = (length // 4, length // 2, 3 * length // 4)
        for linewidth, position in zip((3.2, 1.8, 0.8), at, strict=True):
            distance_L, product_L = np.arange(length) - position, code_LD @ code_LD[position]
            products.plot(distance_L, product_L, linewidth=linewidth, label=position)
        products.set(
            title=f"{name}: similarity", xlabel="distance from the position", ylabel="dot product"
        )
        _legend_beside(products, "position")
    return figure


@matplotlib.rc_context(STYLE)
def position_scores(distance_L: np.ndarray, curves: Mapping[str, np.ndarray]) -> Figure:
    """Returns a panel for each scheme that acts on scores, with a line for each head.

    Args:
      distance_L: of the key from the query.
      curves: name of the scheme to its biases (H, L).
    """
    figure, panels = new_panels(len(curves), columns=2, width=5, height=3)
    for panel, (name, curve_HL) in zip(panels, curves.items(), strict=True):
        colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(curve_HL)))
        for head, (curve_L, colour) in enumerate(zip(curve_HL, colours, strict=True)):
            panel.plot(distance_L, curve_L, "-", color=colour, label=head)
        panel.set(title=name, xlabel="distance of the key from the query")
        _legend_beside(panel, "head")
    return figure


def raw_index(length: int) -> np.ndarray:
    """Returns the position itself, which is unbounded: (L, 1)."""
    return np.arange(length, dtype=np.float32)[:, None]


def normalised_index(length: int) -> np.ndarray:
    """Returns the position divided by the last one, 0 to 1: (L, 1).

    A step is 1 / (L - 1), so its size depends on the length.
    """
    return raw_index(length) / max(1, length - 1)


def binary_code(length: int, bits: int) -> np.ndarray:
    """Returns the binary digits of the position, the lowest first: (L, bits).

    Raises:
      ValueError: `length` needs more bits.
    """
    if length > 2**bits:
        raise ValueError(f"{bits} bits count {2**bits} positions, got {length}.")
    return (np.arange(length)[:, None] >> np.arange(bits) & 1).astype(np.float32)


@matplotlib.rc_context(STYLE)
def codes_that_fail(sinusoidal_LD: np.ndarray) -> Figure:
    """Returns 3 codes that do not work and the sinusoidal one, with the sizes of their steps."""
    length = len(sinusoidal_LD)
    normalised = [normalised_index(tokens) for tokens in (max(2, length // 4), length)]
    codes = {
        "raw index\nno bound: it outgrows the embeddings": [raw_index(length)],
        "normalised index\na step depends on the sentence's length": normalised,
        "binary code\nnot smooth: some steps flip all digits": [
            binary_code(length, (length - 1).bit_length())
        ],
        "sinusoidal\nbounded, and all steps are equally long": [sinusoidal_LD],
    }
    figure = Figure(figsize=(15, 5), layout="constrained")
    for (above, below), (title, arrays) in zip(
        figure.subplots(2, len(codes)).T, codes.items(), strict=True
    ):
        for code_LD in arrays:
            if code_LD.shape[1] == 1:
                above.plot(code_LD, ".-", label=f"{len(code_LD)} tokens")
                above.legend()
            else:
                _heat_map(above, code_LD.T, cmap="RdBu_r", vmin=-1, vmax=1)
            below.plot(np.linalg.norm(np.diff(code_LD, axis=0), axis=1))
        above.set(title=title, ylabel="value" if code_LD.shape[1] == 1 else "dimension")
        below.set(
            xlabel="position", ylabel="distance to the next code", ylim=(0, 1.2 * below.dataLim.y1)
        )
    return figure


@matplotlib.rc_context(STYLE)
def schedule(rates_by_name: Mapping[str, np.ndarray]) -> Figure:
    """Returns the curves of learning rates, name to (steps,).

    The first update is step 1, as in section 5.3.
    """
    figure, (panel,) = new_panels(1, columns=1, width=8, height=3.6)
    for name, rates in rates_by_name.items():
        panel.plot(np.arange(1, len(rates) + 1), rates, label=name)
    panel.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    _legend_beside(panel)
    return figure


@matplotlib.rc_context(STYLE)
def metrics(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, over: str = "step") -> Figure:
    """Returns a panel for each metric and a colour for each run; a None leaves a gap.

    Scores of a part of a split, such as `exact_match/date`, are left out.

    Args:
      runs: name to the records of metrics.jsonl.
      over: 'step', or 'minutes', which needs 'seconds' in each record.

    Raises:
      InputError: no record has a metric.
    """
    x_of: Callable[[Mapping[str, Any]], float] = {
        "step": lambda record: record["step"],
        "minutes": lambda record: record["seconds"] / 60,
    }[over]
    records = [record for run in runs.values() for record in run]
    names = _metric_names(records)
    if not names:
        raise InputError(f"There are no metrics in {', '.join(runs) or 'no runs'}.")
    figure, panels = new_panels(len(names), columns=3, width=4, height=2.7)
    colours = dict(zip(runs, itertools.cycle(COLOURS), strict=False))
    for panel, name in zip(panels, names, strict=True):
        for (run, colour), (split, look) in itertools.product(colours.items(), SPLITS.items()):
            points = [(x_of(r), r[name]) for r in runs[run] if r["split"] == split and name in r]
            panel.plot(*np.array(points, float).reshape(-1, 2).T, color=colour, **look)
        panel.set(title=name.replace("_", " "), xlabel=over)
    used = {record["split"] for record in records}
    handles = [
        *(Line2D([], [], color=colour, linewidth=3, label=run) for run, colour in colours.items()),
        *(
            Line2D([], [], color="#666666", label=split, **look)
            for split, look in SPLITS.items()
            if split in used
        ),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(3, len(names)))
    return figure


def _metric_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the metrics that have a value, the loss first."""
    names = {
        name
        for record in records
        for name, value in record.items()
        if "/" not in name and value is not None
    }
    names -= {"step", "seconds", "split", "parameters"}
    return sorted(names, key=lambda name: (name != "loss", name))


@matplotlib.rc_context(STYLE)
def scores_over_length(
    table: Mapping[str, Mapping[int, Sequence[float]]], *, trained_up_to: int, ylabel: str
) -> Figure:
    """Returns a line for the mean of the seeds, with a band from the lowest to the highest.

    Args:
      table: scheme to length to the score of each seed.
    """
    figure, (panel,) = new_panels(1, columns=1, width=8, height=4.2)
    _plot_means(panel, table)
    panel.axvline(
        trained_up_to,
        color="#444444",
        linestyle="--",
        linewidth=1,
        label=f"trained up to {trained_up_to}",
    )
    panel.set(xlabel="length", ylabel=ylabel)
    _legend_beside(panel)
    return figure


@matplotlib.rc_context(STYLE)
def scores_over_steps(
    table: Mapping[str, Mapping[int, Sequence[float]]], *, ylabel: str, log_steps: bool = False
) -> Figure:
    """Returns a line for the mean of the seeds, with a band from the lowest to the highest.

    Args:
      table: name of the line to step to the score of each seed.
      log_steps: whether the axis of the steps is logarithmic.
    """
    figure, (panel,) = new_panels(1, columns=1, width=8, height=4.2)
    _plot_means(panel, table)
    panel.set(xlabel="step", ylabel=ylabel, xscale="log" if log_steps else "linear")
    panel.xaxis.set_major_formatter("{x:,g}")
    _legend_beside(panel)
    return figure


def _plot_means(panel: Axes, table: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    for (name, scores), marker in zip(table.items(), itertools.cycle("osD^vPX"), strict=False):
        places = sorted(scores)
        mean, low, high = ([of(scores[at]) for at in places] for of in (np.mean, np.min, np.max))
        (line,) = panel.plot(places, mean, marker=marker, markersize=4, label=name)
        panel.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


@matplotlib.rc_context(STYLE)
def costs_over_length(panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """Returns lines for medians, with bands from the lowest to the highest, on log-log axes.

    Args:
      panels: title of the panel to layer to length to measurements.
    """
    figure, axes = new_panels(len(panels), columns=3, width=4, height=3.2)
    layers = dict.fromkeys(layer for curves in panels.values() for layer in curves)
    looks = dict(zip(layers, itertools.cycle(zip(COLOURS, "osD^vPX", strict=True)), strict=False))
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        for layer, costs in curves.items():
            colour, marker = looks[layer]
            lengths = sorted(costs)
            median, low, high = (
                [of(costs[length]) for length in lengths] for of in (np.median, np.min, np.max)
            )
            panel.plot(lengths, median, "-", color=colour, marker=marker, markersize=4, label=layer)
            panel.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set(title=title, xlabel="length", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):  # plain numbers: $10^3$ would not be rendered
            axis.set_major_formatter("{x:g}")
    handles = [
        Line2D([], [], color=colour, marker=marker, label=layer)
        for layer, (colour, marker) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


@matplotlib.rc_context(STYLE)
def confusion(counts_CC: np.ndarray, names: Sequence[str]) -> Figure:
    """Returns a confusion matrix, true classes in rows: counts, and shares of the row as shades."""
    share_CC = counts_CC / np.maximum(1, counts_CC.sum(axis=1, keepdims=True))
    figure, (panel,) = new_panels(
        1, columns=1, width=0.62 * len(names) + 3, height=0.62 * len(names) + 2
    )
    image = _heat_map(panel, share_CC, cmap="Blues", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(share_CC):
        text = f"{counts_CC[row, column]:,}\n{share:.0%}"
        colour = "white" if share > 0.5 else "black"
        panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    panel.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    panel.set_yticks(range(len(names)), names)
    panel.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, ax=panel, label="share of the row", fraction=0.05)
    return figure


@matplotlib.rc_context(STYLE)
def save(figure: Figure, folder: str | Path, name: str) -> list[Path]:
    """Writes `name`.png and `name`.svg atomically; the same arrays result in the same bytes."""
    folder = place(folder)
    make_folder(folder)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        image = io.BytesIO()
        with warnings.catch_warnings():
            # A letter that the font lacks is shown as a box.
            warnings.filterwarnings("ignore", r"Glyph .* missing from font", UserWarning)
            figure.savefig(image, format=path.suffix[1:], metadata={"Date": None})
        write_whole(path, image.getvalue())
    return paths


def new_panels(
    count: int, *, columns: int, width: float, height: float
) -> tuple[Figure, list[Axes]]:
    """Returns a figure and its `count` panels of `width` by `height` inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(count)]


def _heat_map(panel: Axes, values: np.ndarray, **scale: Any) -> matplotlib.image.AxesImage:
    panel.grid(visible=False)
    return panel.imshow(values, aspect="auto", interpolation="nearest", **scale)


def _legend_beside(panel: Axes, title: str | None = None) -> None:
    panel.legend(title=title, loc="upper left", bbox_to_anchor=(1, 1))


def _label_tokens(
    axis: matplotlib.axis.Axis, tokens: Sequence[str], inches: float, **look: Any
) -> None:
    """Sets tokens as tick labels of 4 to 8 points, or every k-th token if they do not fit."""
    space = 72 * inches / max(1, len(tokens))  # points a token
    shown = range(0, len(tokens), max(1, round(5 / space + 0.4)))
    labels = [text if len(text := visible(tokens[i])) <= 14 else f"{text[:13]}…" for i in shown]
    axis.set_ticks(shown, labels, fontsize=min(8, max(4, 0.8 * space)), **look)
