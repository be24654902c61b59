"""Figures show their arrays: curves, cells and labels are read back from matplotlib's artists."""

import itertools
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from flaxformer_lite.plotting import attention_page, fonts, plots
from flaxformer_lite.plotting.attention_page import AttentionMap


def attention(layers: int, heads: int, queries: int, keys: int) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(keys), size=(layers, heads, queries))


def sinusoidal(length: int, d_model: int) -> np.ndarray:
    angle_LD = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angle_LD), np.cos(angle_LD)], axis=-1).reshape(length, d_model)


def panel_of(figure: Figure, title: str) -> Axes:
    (panel,) = (panel for panel in figure.axes if panel.get_title() == title)
    return panel


def points(line: Line2D) -> list[list[float | None]]:
    """Returns the points of a curve, a gap as None."""
    return [
        [None if np.isnan(value) else value for value in point]
        for point in line.get_xydata().tolist()
    ]


def curves(panel: Axes) -> dict[str, list[list[float | None]]]:
    return {line.get_label(): points(line) for line in panel.lines}


def words(labels: list) -> list[str]:
    return [label.get_text() for label in labels]


def record(step: int, split: str = "train", **values: float | None) -> dict:
    return {"step": step, "split": split, **values}


RUN = [
    record(3, loss=7.0, bleu=None),
    record(5, loss=None),
    record(11, loss=2.0),
    record(11, "validation", loss=3.0),
]
LONG = ["a token that is far too long to be shown", "漢字", "$5 and $6", "\u202f", "<s>"]
FIGURES = {
    "attention_grid": lambda: plots.attention_grid(
        attention(2, 3, 7, 5), list("abcdefg"), LONG, title="a $1 title for $2"
    ),
    "positions": lambda: plots.positions(
        {"sinusoidal": sinusoidal(31, 22), "learned": sinusoidal(31, 22) / 7}
    ),
    "position_scores": lambda: plots.position_scores(
        np.arange(-3, 4), {n: np.ones((5, 7)) for n in "abc"}
    ),
    "codes_that_fail": lambda: plots.codes_that_fail(sinusoidal(31, 22)),
    "schedule": lambda: plots.schedule({"paper": np.arange(1, 12) / 1009, "linear": np.ones(7)}),
    "metrics": lambda: plots.metrics(
        {"first": RUN, "second": [record(7, "test", loss=2.0, bleu=13.0)]}
    ),
    "scores_over_length": lambda: plots.scores_over_length(
        {"alibi": {7: [0.5, 1.0], 5: [1.0]}, "rotary": {7: [0.25], 11: [0.0]}},
        trained_up_to=7,
        ylabel="exact match",
    ),
    "scores_over_steps": lambda: plots.scores_over_steps(
        {"train": {1000: [0.5, 1.0], 10: [0.25]}, "validation": {10: [0.0]}},
        ylabel="accuracy",
        log_steps=True,
    ),
    "costs_over_length": lambda: plots.costs_over_length(
        {
            name: {"attention": {7: [3, 2, 5], 5: [1]}, "a recurrent layer": {5: [2, 8]}}
            for name in "abcde"
        }
    ),
    "confusion": lambda: plots.confusion(
        np.array([[1009, 1], [0, 7]]), ["a rather long name", "another"]
    ),
}
SLOW = FIGURES.keys() - {"attention_grid", "schedule", "metrics", "confusion"}
every_figure = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FIGURES],
)


@every_figure
def test_a_figure_is_saved_as_png_and_svg_with_the_same_bytes_each_time(name, tmp_path):
    folder = tmp_path / "new" / "folder"
    written = []
    for _ in range(2):
        paths = plots.save(FIGURES[name](), folder, name)
        assert (
            paths == [folder / f"{name}.png", folder / f"{name}.svg"]
            and sorted(folder.iterdir()) == paths
        )
        written.append([path.read_bytes() for path in paths])
    assert written[0] == written[1]
    png, svg = written[0]
    assert png.startswith(b"\x89PNG") and b"<svg" in svg and b"<dc:date>" not in svg


@every_figure
def test_no_artist_is_beyond_the_edges_of_its_figure(name):
    figure = FIGURES[name]()
    with matplotlib.rc_context(plots.STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height


def test_a_figure_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    figure = FIGURES["schedule"]()
    before = [path.read_bytes() for path in plots.save(figure, tmp_path, "a")]

    def half(file, **options):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(OSError, match="no space left"):
        plots.save(figure, tmp_path, "a")
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == before


def test_only_the_warning_about_a_missing_glyph_is_silenced(tmp_path, monkeypatch):
    figure = FIGURES["attention_grid"]()
    with (
        matplotlib.rc_context(plots.STYLE),
        pytest.warns(UserWarning, match="Glyph .* missing from font"),
    ):
        figure.draw_without_rendering()
    plots.save(figure, tmp_path, "a")  # any warning would be an error here
    monkeypatch.setattr(
        figure,
        "savefig",
        lambda *args, **options: warnings.warn("another", UserWarning, stacklevel=1),
    )
    with pytest.raises(UserWarning, match="another"):
        plots.save(figure, tmp_path, "a")


def test_text_in_svg_stays_text_and_a_dollar_sign_is_no_formula(tmp_path):
    _, svg = plots.save(FIGURES["attention_grid"](), tmp_path, "a")
    for text in ("a $1 title for $2", "$5␣and␣$6", "漢字", "⟨202F⟩", "&lt;s&gt;", "a␣token␣that␣…"):
        assert f">{text}</text>" in svg.read_text(encoding="utf-8")


def test_the_settings_of_matplotlib_do_not_change(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.save(FIGURES["metrics"](), tmp_path, "a")
    assert dict(matplotlib.rcParams) == before


def test_neither_pyplot_nor_jax_is_imported():
    code = (
        "import sys, flaxformer_lite.plotting.plots; sys.exit(bool({'matplotlib.pyplot', 'jax'} "
        "& sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_grid_has_a_heat_map_for_each_layer_and_head_on_one_scale():
    weights_NHTS = attention(2, 3, 7, 5)
    queries = list("abcdefg")
    figure = plots.attention_grid(weights_NHTS, queries, LONG, title="a title")
    panels = [panel for panel in figure.axes if panel.images]
    for panel, weights_TS in zip(panels, weights_NHTS.reshape(6, 7, 5), strict=True):
        (image,) = panel.images
        np.testing.assert_array_equal(image.get_array(), weights_TS)
        assert image.get_clim() == (0, 1)
    titles = [panel.get_title() for panel in panels]
    assert titles == ["head 0", "head 1", "head 2", "", "", ""]
    layers = [panel.get_ylabel() for panel in panels]
    assert layers == ["layer 0", "", "", "layer 1", "", ""]
    keys = ["a␣token␣that␣…", "漢字", "$5␣and␣$6", "⟨202F⟩", "<s>"]
    rows = [words(panel.get_yticklabels()) for panel in panels]
    assert rows == [queries, [], [], queries, [], []]
    assert [words(panel.get_xticklabels()) for panel in panels] == [[], [], [], keys, keys, keys]


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (13, 13),
        (127, 64),
        *(pytest.param(n, k, marks=pytest.mark.slow) for n, k in [(3, 3), (61, 61), (509, 64)]),
    ],
)
def test_labels_stay_legible_and_some_are_left_out_if_they_would_overlap(tokens, shown):
    names = [str(i) for i in range(tokens)]
    figure = plots.attention_grid(attention(1, 1, tokens, 2), names, ["x", "y"], title="")
    labels = figure.axes[0].get_yticklabels()
    assert len(labels) == shown
    assert words(labels) == names[:: -(-tokens // shown)]
    with matplotlib.rc_context(plots.STYLE):
        figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in labels]
    assert labels[0].get_fontsize() >= 4
    assert all(upper.y0 > lower.y0 for upper, lower in itertools.pairwise(boxes))
    distance = (boxes[0].y0 - boxes[-1].y0) / (shown - 1) * 72 / figure.dpi  # in points
    assert distance > labels[0].get_fontsize()


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("▁Montag", "▁Montag"),
        (" a b", "␣a␣b"),
        ("\n\t", "↵⇥"),
        ("1\u202f000\u00a0€", "1⟨202F⟩000⟨00A0⟩€"),
        ("\u200b\ud800", "⟨200B⟩⟨D800⟩"),
        ("", "⟨⟩"),
        ("<&>", "<&>"),
    ],
)
def test_every_character_of_a_token_is_visible(token, shown):
    assert attention_page.visible(token) == shown


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 7, 5), (2, 3, 5, 5)])
def test_weights_that_do_not_fit_the_tokens_are_refused(shape):
    with pytest.raises(
        ValueError, match=r"cross: expected finite weights \(layers, heads, 5, 7\), got"
    ):
        AttentionMap("cross", list("abcde"), list("fghijkl"), np.zeros(shape))


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="expected finite weights"):
        AttentionMap("cross", ["a"], ["b"], np.full((1, 1, 1, 1), np.nan))


def page_data(page: str) -> list[dict]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


def test_a_page_contains_title_tokens_and_weights_in_thousandths():
    weights_NHTS = attention(2, 3, 5, 7)
    tokens = ["</script>", "<!--", "\u2028", '"', "{{title}}"], list("abcdefg")
    page = attention_page.html_page(
        [AttentionMap("cross & more", *tokens, weights_NHTS)], title="<b> {{data}}"
    )
    (data,) = page_data(page)
    assert data["name"] == "cross & more"
    assert (
        data["queries"] == ["</script>", "<!--", "⟨2028⟩", '"', "{{title}}"]
        and data["keys"] == tokens[1]
    )
    assert np.array(data["weights"]).dtype == int
    np.testing.assert_allclose(np.array(data["weights"]) / 1000, weights_NHTS, atol=0.000501)
    assert "<title>&lt;b&gt; {{data}}</title>" in page


def test_a_page_is_self_contained():
    page = attention_page.html_page(
        [AttentionMap("cross", ["a"], ["b"], np.ones((1, 1, 1, 1)))], title="a"
    )
    assert not re.search(r"https?:|//\w+\.|@import|url\(", page)
    assert re.findall(r'\b(?:src|href)="([^"]*)"', page) == ["data:,"]


def test_figures_of_positions_show_all_values_some_dimensions_and_dot_products():
    code_LD = sinusoidal(31, 22)
    figure = plots.positions({"learned": code_LD / 7, "sinusoidal": code_LD})
    (image,) = panel_of(figure, "sinusoidal: all values").images
    np.testing.assert_array_equal(image.get_array(), code_LD.T)
    for name, dimensions in curves(panel_of(figure, "sinusoidal: single dimensions")).items():
        np.testing.assert_array_equal(
            dimensions, np.stack([np.arange(31), code_LD[:, int(name)]], axis=1)
        )
    products = curves(panel_of(figure, "sinusoidal: similarity"))
    assert products.keys() == {"7", "15", "23"}
    frequencies = 10000.0 ** (-np.arange(0, 22, 2) / 22)
    for position, points in products.items():
        distance, product = np.array(points).T
        np.testing.assert_array_equal(distance, np.arange(31) - int(position))
        # sin a sin b + cos a cos b = cos(a - b), a function of the distance
        np.testing.assert_allclose(
            product, np.cos(distance[:, None] * frequencies).sum(axis=1), atol=1e-9
        )


def test_scores_over_the_distance_have_a_curve_for_each_head():
    distance_L = np.arange(-2, 3)
    slope_HL = -np.array([[0.5], [0.25], [0.125]]) * abs(distance_L)
    figure = plots.position_scores(distance_L, {"alibi": slope_HL, "t5_bias": slope_HL + 1})
    assert curves(panel_of(figure, "t5_bias")) == {
        str(head): np.stack([distance_L, slope_HL[head] + 1], axis=1).tolist() for head in range(3)
    }
    assert len({tuple(line.get_color()) for line in panel_of(figure, "alibi").lines}) == 3


def test_the_raw_index_is_unbounded():
    assert plots.raw_index(5).tolist() == [[0], [1], [2], [3], [4]]


def test_the_normalised_index_ends_at_1_and_its_step_depends_on_the_length():
    for length in (2, 3, 17):
        np.testing.assert_allclose(
            np.diff(plots.normalised_index(length)[:, 0]), 1 / (length - 1), rtol=1e-5
        )
        assert plots.normalised_index(length)[[0, -1], 0].tolist() == [0, 1]
    assert plots.normalised_index(1).tolist() == [[0]]


def test_the_binary_code_has_the_lowest_digit_first():
    code_LD = plots.binary_code(11, 4)
    assert code_LD.shape == (11, 4)
    assert (code_LD @ 2.0 ** np.arange(4)).tolist() == list(range(11))
    # from 7 to 8 every digit changes
    assert code_LD[7].tolist() == [1, 1, 1, 0] and code_LD[8].tolist() == [0, 0, 0, 1]


def test_a_binary_code_with_too_few_digits_is_refused():
    assert len(plots.binary_code(8, 3)) == 8
    with pytest.raises(ValueError, match="3 bits count 8 positions, got 9"):
        plots.binary_code(9, 3)


def test_codes_that_fail_are_above_the_sizes_of_their_steps():
    length = 29
    figure = plots.codes_that_fail(sinusoidal(length, 6))
    above, below = np.array(figure.axes[:4]), np.array(figure.axes[4:])
    assert [panel.get_title().splitlines()[0] for panel in above] == [
        "raw index",
        "normalised index",
        "binary code",
        "sinusoidal",
    ]
    assert all(len(panel.get_title().splitlines()) == 2 for panel in above)
    steps = [[np.array(line.get_ydata()) for line in panel.lines] for panel in below]
    np.testing.assert_allclose(steps[0], 1)
    assert [len(line) for line in steps[1]] == [length // 4 - 1, length - 1]
    np.testing.assert_allclose(steps[1][0], 1 / (length // 4 - 1), rtol=1e-5)
    np.testing.assert_allclose(steps[1][1], 1 / (length - 1), rtol=1e-5)
    # from p to p + 1, the trailing ones of p and the next digit change
    changed = [len(f"{p:b}") - len(f"{p:b}".rstrip("1")) + 1 for p in range(length - 1)]
    np.testing.assert_allclose(steps[2][0], np.sqrt(changed), rtol=1e-6)
    assert max(changed) == 5 and steps[2][0].max() == pytest.approx(5**0.5)  # all digits at once
    np.testing.assert_allclose(steps[3][0], steps[3][0][0], rtol=1e-6)


def test_the_first_update_of_a_schedule_is_step_1():
    figure = plots.schedule({"paper": np.array([0.25, 0.5]), "linear": np.array([1.0, 0.5, 0.0])})
    assert curves(figure.axes[0]) == {
        "paper": [[1, 0.25], [2, 0.5]],
        "linear": [[1, 1.0], [2, 0.5], [3, 0.0]],
    }


def test_each_metric_has_a_panel_with_a_curve_for_each_run_and_split():
    runs = {
        "first": [
            *(
                record(3, loss=7.0, grad_norm=2.0),
                record(5, loss=None, grad_norm=1.0),
                record(7, loss=5.0),
            ),
            record(7, "validation", loss=4.0, bleu=11.0),
            {
                **record(7, "test", loss=3.0, **{"exact_match/date": 1.0}),
                "parameters": "average of steps 5, 7",
            },
        ],
        "second": [record(2, loss=1.0, mfu=None)],  # a metric without any value has no panel
    }
    figure = plots.metrics(runs)
    assert [panel.get_title() for panel in figure.axes] == ["loss", "bleu", "grad norm"]
    plotted = [
        (line.get_color(), line.get_marker(), points(line))
        for line in panel_of(figure, "loss").lines
    ]
    first, second = plots.COLOURS[:2]
    assert [curve for curve in plotted if curve[2]] == [
        (first, ".", [[3, 7.0], [5, None], [7, 5.0]]),
        (first, "o", [[7, 4.0]]),
        (first, "*", [[7, 3.0]]),
        (second, ".", [[2, 1.0]]),
    ]
    (legend,) = figure.legends
    assert words(legend.get_texts()) == ["first", "second", "train", "validation", "test"]


def test_metrics_are_plotted_over_steps_or_over_minutes():
    run = [record(3, loss=7.0, seconds=90.0), record(5, loss=5.0, seconds=150.0)]
    for over, at in (("step", [3, 5]), ("minutes", [1.5, 2.5])):
        (panel,) = plots.metrics({"a": run}, over=over).axes
        assert panel.get_xlabel() == over
        assert [points(line) for line in panel.lines if points(line)] == [
            [[at[0], 7.0], [at[1], 5.0]]
        ]


def test_runs_without_a_metric_are_refused():
    with pytest.raises(ValueError, match="There are no metrics in first, second"):
        plots.metrics({"first": [], "second": [record(3, **{"exact_match/date": 1.0})]})


def test_scores_over_length_are_the_mean_of_the_seeds_in_a_band_from_lowest_to_highest():
    figure = FIGURES["scores_over_length"]()
    (panel,) = figure.axes
    plotted = curves(panel)
    assert plotted["alibi"] == [[5, 1.0], [7, 0.75]]
    assert plotted["rotary"] == [[7, 0.25], [11, 0.0]]
    assert plotted["trained up to 7"] == [[7, 0], [7, 1]]
    band = panel.collections[0].get_paths()[0].vertices
    assert {tuple(corner) for corner in band} == {(5, 1.0), (7, 0.5), (7, 1.0)}


def test_scores_over_steps_are_the_mean_of_the_seeds_over_steps_that_may_be_logarithmic():
    (panel,) = FIGURES["scores_over_steps"]().axes
    assert curves(panel) == {
        "train": [[10, 0.25], [1000, 0.75]],
        "validation": [[10, 0.0]],
    }
    assert (panel.get_xscale(), panel.get_xlabel()) == ("log", "step")
    (linear,) = plots.scores_over_steps({"train": {10: [0.25]}}, ylabel="accuracy").axes
    assert linear.get_xscale() == "linear"


def test_costs_over_length_are_medians_in_a_band_from_lowest_to_highest_one_colour_a_layer():
    figure = FIGURES["costs_over_length"]()
    assert [panel.get_title() for panel in figure.axes] == list("abcde")
    for panel in figure.axes:
        assert curves(panel) == {"attention": [[5, 1], [7, 3]], "a recurrent layer": [[5, 5]]}
        assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
        band = panel.collections[0].get_paths()[0].vertices
        assert {tuple(corner) for corner in band} == {(5, 1), (7, 2), (7, 5)}
        assert [line.get_color() for line in panel.lines] == list(plots.COLOURS[:2])
    (legend,) = figure.legends
    assert words(legend.get_texts()) == ["attention", "a recurrent layer"]


def test_a_confusion_table_shows_counts_and_shares_of_the_row():
    figure = plots.confusion(np.array([[3, 1, 0], [0, 0, 0], [1009, 0, 1009]]), ["a", "b", "c"])
    panel = figure.axes[0]
    (image,) = panel.images
    assert image.get_array().tolist() == [[0.75, 0.25, 0], [0, 0, 0], [0.5, 0, 0.5]]
    assert (
        words(panel.texts)[:3] == ["3\n75%", "1\n25%", "0\n0%"]
        and words(panel.texts)[6] == "1,009\n50%"
    )
    assert words(panel.get_xticklabels()) == words(panel.get_yticklabels()) == ["a", "b", "c"]
    assert (panel.get_ylabel(), panel.get_xlabel()) == ("true", "predicted")


def test_letters_that_the_font_lacks_are_drawn_with_others_or_named_in_one_line(
    tmp_path, monkeypatch, capsys
):
    """Of matplotlib's own fonts DejaVu Serif has U+1D15, and none has 漢 and 字."""
    own = Path(matplotlib.get_data_path())
    entries = [f for f in font_manager.fontManager.ttflist if own in Path(f.fname).parents]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", entries)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    tokens = ["a", "\u1d15"]
    one, other, plain = (
        plots.attention_grid(np.zeros((1, 1, 2, 2)), tokens, shown, title="")
        for shown in (tokens, ["漢", "字"], tokens)
    )
    fonts.choose([plain])
    assert capsys.readouterr().err == ""
    with matplotlib.rc_context(plots.STYLE):
        plain.draw_without_rendering()  # any warning would be an error here
    fonts.choose([one, other])
    (line,) = capsys.readouterr().err.splitlines()
    assert "no installed font has 字 漢, so the .png files show boxes; install" in line
    _, svg = plots.save(other, tmp_path, "a")
    assert ">漢</text>" in svg.read_text(encoding="utf-8")
