"""The report of a sweep's folder: the tables, the best config, and the figures."""

import csv
import io
import json
import math
import shutil
import statistics

import pytest

from flaxformer_lite import config_files
from flaxformer_lite.config import resolve
from flaxformer_lite.sweep import space, sweep_plots, sweep_report
from flaxformer_lite.sweep.results import Row, RunResult, SweepFolder, read_run
from flaxformer_lite.sweep.space import Settings

SWEEP = """
from flaxformer_lite.config import default_config
SWEEP = {"objective": "bleu", "seeds": (0, 5), "columns": ("loss",)}
def get_config():
    return default_config()
def points(config):
    return [
        {"row": "thin | small", "model.d_ff": 64},
        {"row": "wide", "model.d_ff": 4096, "data.buckets": (16, 40)},
        {"row": "broken", "model.d_ff": 128},
        {"row": "never started", "model.d_ff": 256},
    ]
"""


def log(workdir, evaluations, rates=(100.0, 300.0, 200.0)):
    """Writes the log of a run with the validation metrics `evaluations`, by step."""
    workdir.mkdir(parents=True)
    lines = [
        {"step": n, "split": "train", "seconds": 1.0 + n, "loss": 9.0, "tokens_per_second": rate}
        for n, rate in enumerate(rates)
    ]
    lines += [
        {"step": step, "split": "validation", "seconds": 60.0, **values}
        for step, values in evaluations.items()
    ]
    # ignored: not the validation split
    lines.append({"step": 1, "split": "test", "seconds": 90.0, "bleu": 99.0, "loss": 0.1})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    """An unfinished sweep of four points and two seeds."""
    file = tmp_path / "widths.py"
    file.write_text(SWEEP)
    sweep, found = space.load(file), SweepFolder(tmp_path / "S")
    found.create_or_join(sweep)
    for number, scores in ((0, (11.0, 13.5)), (1, (20.0, 23.0)), (2, (50.0,))):
        point = found.point(number)
        ended = (
            {"state": "complete"} if number < 2 else {"state": "failed", "reason": "out of memory"}
        )
        point.write(sweep.points[number], **ended)
        point.config.write_text(
            space.as_file(sweep.points[number].config, f"Point {number} of the sweep widths")
        )
        for seed, score in zip((0, 5), scores, strict=False):
            evaluations = {
                10: {"bleu": 1.0, "loss": 5.0},
                20: {"bleu": score, "loss": 4.0 - number},
            }
            log(point.workdir(seed), {**evaluations, 30: {"bleu": score - 0.5, "loss": 0.5}})
    return found


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_results_csv_has_mean_and_spread_of_the_best_evaluations(folder):
    sweep_report.write(folder)
    thin, wide, broken, waiting = rows_of((folder.report / "results.csv").read_text())
    assert [row["state"] for row in (thin, wide, broken, waiting)] == [
        "complete",
        "complete",
        "failed",
        "waiting",
    ]
    assert float(thin["bleu"]) == 12.25 and float(wide["bleu"]) == 21.5
    assert float(thin["bleu ±"]) == statistics.stdev([11.0, 13.5])
    assert float(wide["loss"]) == 3.0, "not of the evaluation with the best objective"
    assert (thin["best_step"], thin["seeds"], broken["seeds"], waiting["seeds"]) == (
        "20 20",
        "2",
        "1",
        "0",
    )
    assert float(thin["tokens_per_second"]) == 200.0 and float(thin["minutes"]) == 2 * 90 / 60
    assert waiting["bleu"] == waiting["best_step"] == "" and broken["bleu ±"] == ""
    assert wide["data.buckets"] == "(16, 40)" and thin["data.buckets"] == "(32, 64, 128, 256)"


def test_the_markdown_table_has_labels_the_best_in_bold_and_reasons_of_failures(folder):
    text, _ = sweep_report.write(folder)
    lines = text.splitlines()
    assert lines[0].startswith(
        "| point | row | changes | state | seeds | bleu | loss | best step | parameters |"
    )
    assert lines[2].startswith(
        "| 0 | thin \\| small | model.d_ff=64 | complete | 2 | 12.25 ± 1.768 | "
    )
    assert "| **21.5 ± 2.121** |" in lines[3] and "data.buckets=(16, 40)" in lines[3]
    assert text.endswith("Failed:\n- point 2 (model.d_ff=128): out of memory")
    assert (folder.report / "results.md").read_text() == text + "\n"


def test_the_best_is_the_complete_point_whose_mean_is_best(folder):
    sweep_report.write(folder)
    best = resolve(config_files.load_config(folder.report / "best.py"))
    assert (best.model.d_ff, best.data.buckets) == (4096, (16, 40))
    assert (
        (folder.report / "best.py")
        .read_text()
        .startswith('"""The best: point 1 of the sweep widths."""')
    )


def test_runs_csv_has_one_line_for_each_run(folder):
    sweep_report.write(folder)
    runs = rows_of((folder.report / "runs.csv").read_text())
    assert [(row["point"], row["seed"], float(row["bleu"])) for row in runs] == [
        ("0", "0", 11.0), ("0", "5", 13.5), ("1", "0", 20.0), ("1", "5", 23.0), ("2", "0", 50.0)
    ]  # fmt: skip


def test_the_same_folder_gives_the_same_files_again(folder):
    _, paths = sweep_report.write(folder)
    before = {path: path.read_bytes() for path in paths}
    assert {path.name for path in paths} >= {"parallel.png", "parameters.svg", "importance.png"}
    sweep_report.write(folder)
    assert {path: path.read_bytes() for path in paths} == before


def test_a_copy_of_a_point_is_no_point(folder):
    before = [row.number for row in folder.rows()]
    shutil.copytree(folder.path / "points" / "0000", folder.path / "points" / "0000.bak")
    assert [row.number for row in folder.rows()] == before
    shutil.rmtree(folder.path / "points" / "0000.bak")


def test_the_table_is_shown_even_if_it_cannot_be_saved(folder):
    (folder.path / "report").write_text("taken")
    shown = []
    with pytest.raises(ValueError, match=rf"^{folder.path}/report: cannot be written: "):
        sweep_report.write(folder, show=shown.append)
    assert shown[0].startswith("| point |")


def test_a_run_has_no_result_before_an_evaluation_and_the_last_of_equal_ones(tmp_path):
    settings = Settings(objective="loss")
    log(tmp_path / "new", {})
    assert (
        read_run(tmp_path / "new", 0, settings) is None
        and read_run(tmp_path / "none", 0, settings) is None
    )
    log(tmp_path / "even", {10: {"loss": 2.0}, 20: {"loss": 2.0}, 30: {"loss": None}})
    assert read_run(tmp_path / "even", 0, settings).best_step == 20


def test_the_mean_of_no_runs_and_the_spread_of_one_run_are_nan():
    empty = Row(0, {}, "", {})
    one = Row(0, {}, "", {}, runs=(RunResult(0, 10, {"loss": 2.5}, None, 1.0),))
    assert (
        math.isnan(empty.mean("loss"))
        and math.isnan(one.spread("loss"))
        and one.mean("loss") == 2.5
    )


def test_a_sweep_without_notes_shows_its_parameters_and_without_results_no_figures(tmp_path):
    file = tmp_path / "heads.py"
    file.write_text(
        "from flaxformer_lite.config import default_config as get_config\n"
        "def suggest(trial, config):\n    config.model.num_heads = "
        "trial.suggest_categorical('heads', [1, 8])\n"
    )
    folder = SweepFolder(tmp_path / "S")
    folder.create_or_join(space.load(file))
    text, paths = sweep_report.write(folder)
    assert text.splitlines()[0].startswith("| point | heads | state | seeds | loss |")
    assert text.splitlines()[2:] == [
        f"| {n} | {heads} | waiting | 0 |  |  |  |  |  |" for n, heads in ((0, 1), (1, 8))
    ]
    assert {path.name for path in paths} == {"results.csv", "runs.csv", "results.md"}


PARAMS = [{"heads": heads, "rate": rate, "scheme": scheme} for heads, rate, scheme in
          ((1, 1e-4, "rotary"), (2, 1e-3, "none"), (4, 1e-2, "none"))]  # fmt: skip


def test_parallel_coordinates_have_one_line_for_each_point():
    figure = sweep_plots.parallel_coordinates(PARAMS, [3.0, 1.0, 2.0], "loss", minimize=True)
    (panel,) = figure.axes
    lines = [line for line in panel.lines if len(line.get_xdata()) == 4]
    assert len(lines) == 3 and [text.get_text() for text in panel.get_xticklabels()] == [
        "heads",
        "rate",
        "scheme",
        "loss",
    ]
    best = lines[-1]  # plotted last, over the others
    assert list(best.get_ydata()) == pytest.approx([1 / 3, 0.5, 0.0, 0.0])
    assert sum(best.get_color()[:3]) < sum(lines[0].get_color()[:3]), "the best is not the darkest"


def test_each_parameter_has_a_panel_with_one_dot_for_each_point():
    figure = sweep_plots.by_parameter(PARAMS, [3.0, 1.0, 2.0], "loss")
    heads, rate, scheme = figure.axes
    assert list(heads.lines[0].get_xdata()) == [1, 2, 4] and list(heads.lines[0].get_ydata()) == [
        3.0,
        1.0,
        2.0,
    ]
    assert rate.get_xscale() == "log" and heads.get_xscale() == "linear"
    assert [text.get_text() for text in scheme.get_xticklabels()] == ["none", "rotary"]
    assert list(scheme.lines[0].get_xdata()) == [1, 0, 0]


def test_the_most_important_parameter_is_on_top():
    (panel,) = sweep_plots.importance({"heads": 0.1, "rate": 0.7, "scheme": 0.2}, "loss").axes
    assert [text.get_text() for text in panel.get_yticklabels()] == ["heads", "scheme", "rate"]
    assert [bar.get_width() for bar in panel.patches] == [0.1, 0.2, 0.7]
