"""A sweep's file: its points, its error messages, and the enumeration of a search space."""

import os
import random
import re

import pytest

from flaxformer_lite import config_files
from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.sweep import command, space
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.space import Settings
from flaxformer_lite.sweep.walk import Walk

HEAD = """from flaxformer_lite.config import default_config
def get_config():
    return default_config()
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text, *overrides):
        file = tmp_path / "a_sweep.py"
        file.write_text(HEAD + text)
        return space.load(file, overrides)

    return load_text


def test_a_listed_point_is_the_base_config_with_its_own_changes(load):
    sweep = load(
        "def points(config):\n    return [{'model.num_heads': 4, 'row': 'few'}, {'model.d_ff': "
        "64, 'row': 'thin'}]\n",
        "--config.model.d_model=256",
    )
    few, thin = sweep.points
    assert few.config == resolve({"model": {"d_model": 256, "num_heads": 4}})
    assert thin.config == resolve({"model": {"d_model": 256, "d_ff": 64}})
    # every point has a value for each field that any point sets
    assert few.params == {"model.num_heads": 4, "model.d_ff": 2048}
    assert (few.label, few.notes) == ("model.num_heads=4", {"row": "few"})
    assert sweep.checked == sweep.points and sweep.settings == Settings()


def test_a_point_without_changes_has_the_label_as_it_is(load):
    (same,) = load("def points(config):\n    return [{'model.num_heads': 8}]\n").points
    assert same.label == "as it is"


def test_a_grid_has_every_combination_and_dependent_parameters_only_where_they_apply(load):
    sweep = load(
        "def suggest(trial, config):\n"
        "    config.model.position = trial.suggest_categorical('position', ['rotary', "
        "'relative', 'none'])\n"
        "    if config.model.position == 'relative':\n"
        "        config.model.relative_clip = trial.suggest_int('clip', 2, 8, step=3)\n"
        "    config.model.dropout = trial.suggest_float('dropout', 0.1, 0.3, step=0.2)\n"
    )
    positions = [
        (p.config.model.position, p.config.model.relative_clip, p.config.model.dropout)
        for p in sweep.points
    ]
    clips = [("relative", clip) for clip in (2, 5, 8)]
    expected = [
        (*kind, drop)
        for kind in [("rotary", 16), *clips, ("none", 16)]
        for drop in (0.1, 0.1 + 0.2)
    ]
    assert positions == expected
    assert sweep.points[0].params == {"position": "rotary", "dropout": 0.1}


@pytest.mark.parametrize(
    "most",
    [
        220,  # half of them are random
        pytest.param(space.MOST_CHECKED, marks=pytest.mark.slow),
    ],
)
def test_a_continuous_space_is_checked_at_its_ends_and_at_random_points(load, most, monkeypatch):
    monkeypatch.setattr(space, "MOST_CHECKED", most)
    sweep = load(
        "SWEEP = {'sampler': 'random', 'trials': 3}\n"
        "def suggest(trial, config):\n"
        "    config.optim.learning_rate = trial.suggest_float('rate', 1e-4, 1e-2, log=True)\n"
        "    config.model.num_heads = trial.suggest_categorical('heads', [1, 8])\n"
    )
    assert sweep.points is None
    rates = {
        (point.config.optim.learning_rate, point.config.model.num_heads) for point in sweep.checked
    }
    assert {(rate, heads) for rate in (1e-4, 1e-2) for heads in (1, 8)} <= rates
    between = [rate for rate, _ in rates if 1e-4 < rate < 1e-2]
    # uniform in the logarithm
    assert len(between) > 100 and 0.3 < sum(rate < 1e-3 for rate in between) / len(between) < 0.7


def test_points_of_the_same_config_are_named_and_trained_once(load, tmp_path, capsys):
    sweep = load(
        "def points(config):\n"
        "    rates = (1e-3, 1e-3, config.optim.learning_rate, 2e-3)\n"
        "    listed = [{'optim.learning_rate': rate, 'n': n} for n, rate in enumerate(rates)]\n"
        "    return [*listed, {'data.buckets': config.data.buckets}]\n"
    )
    once = command.each_once(sweep, SweepFolder(tmp_path / "S"))
    assert [point.notes.get("n") for point in once.points] == [0, 2, 3]
    assert once.checked == once.points
    notes = capsys.readouterr().err.splitlines()
    assert [note.split(" (")[0] for note in notes] == ["note: point 1", "note: point 4"]
    assert "has the config of point 2 (" in notes[1] and notes[1].endswith("; it is trained once")


def test_a_sweep_of_an_older_version_keeps_its_equal_points(load, tmp_path, capsys):
    sweep = load("def points(config):\n    return [{'optim.b1': 0.5}, {'optim.b1': 0.5}]\n")
    folder = SweepFolder(tmp_path / "S")
    folder.create_or_join(sweep, database=None)
    assert command.each_once(sweep, folder) is sweep and not capsys.readouterr().err


@pytest.mark.parametrize("most", [16, pytest.param(space.MOST_CHECKED, marks=pytest.mark.slow)])
def test_a_grid_over_a_continuous_range_is_refused(load, most, monkeypatch):
    monkeypatch.setattr(space, "MOST_CHECKED", most)
    text = (
        "def suggest(trial, config):\n"
        "    config.model.dropout = trial.suggest_float('drop', 0.0, 0.3)\n"
    )
    with pytest.raises(
        ValueError, match=r"a_sweep.py: SWEEP\['sampler'\]: 'grid' tries every combination"
    ):
        load(text)


def test_the_first_five_invalid_points_are_named_and_the_others_counted(load):
    with pytest.raises(ValueError) as caught:
        load(
            "def points(config):\n    return [{'model.num_heads': heads} for heads in range(1, "
            "12)]\n"
        )
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("a_sweep.py: nothing was trained.")
    assert lines[0].startswith(
        "point 2 (model.num_heads=3): config.model.num_heads: 3 heads do not divide d_model"
    )
    assert [re.match(r"point (\d+)", line)[1] for line in lines[:-1]] == ["2", "4", "5", "6", "8"]
    assert lines[-1] == "... and 2 more"


def test_an_invalid_suggested_point_is_named_by_its_values(load):
    with pytest.raises(
        ValueError, match=r"\nheads=3: config.model.num_heads: 3 heads do not divide"
    ):
        load(
            "def suggest(trial, config):\n    config.model.num_heads = "
            "trial.suggest_categorical('heads', [2, 3])\n"
        )


POINTS = "def points(config):\n    return [{}]\n"
INVALID = [
    ("", "expected one of the functions points(config) and suggest(trial, config)"),
    (POINTS + "def suggest(trial, config): pass\n", "expected one of the functions"),
    (
        "SWEEP = {'objectiv': 'loss'}\n" + POINTS,
        "SWEEP['objectiv']: there is no such setting; did you mean 'objective'?",
    ),
    ("SWEEP = {'objective': 'speed'}\n" + POINTS, "SWEEP['objective']: expected one of ('loss',"),
    (
        "SWEEP = {'direction': 'up'}\n" + POINTS,
        "SWEEP['direction']: expected one of (None, 'minimize'",
    ),
    ("SWEEP = {'seeds': 3}\n" + POINTS, "SWEEP['seeds']: expected a tuple of int, got 3"),
    (
        "SWEEP = {'seeds': (1, 1)}\n" + POINTS,
        "SWEEP['seeds']: expected different numbers from 0 on, got (1, 1)",
    ),
    (
        "SWEEP = {'columns': 'bleu'}\n" + POINTS,
        "SWEEP['columns']: expected a tuple of str, got 'bleu'",
    ),
    (
        "SWEEP = {'columns': ('blue',)}\n" + POINTS,
        "SWEEP['columns']: 'blue' is no metric; did you mean 'bleu'?",
    ),
    ("SWEEP = {'sampler': 'tpe'}\n" + POINTS, "SWEEP['trials']: expected the number of points"),
    ("SWEEP = {'trials': 5}\n" + POINTS, "SWEEP['trials']: expected the number of points"),
    (
        "SWEEP = {'sampler': 'tpe', 'trials': 5}\n" + POINTS,
        "SWEEP: sampler and trials require suggest",
    ),
    (
        "SWEEP = {'sampler_seed': 1.5}\n" + POINTS,
        "SWEEP['sampler_seed']: expected a number from 0 on, got 1.5",
    ),
    ("SWEEP = ['loss']\n" + POINTS, "SWEEP: expected a dict with objective"),
    ("def points(config):\n    return []\n", "points(config): expected a list of dicts"),
    (
        "def points(config):\n    return {'model.d_ff': 3}\n",
        "points(config): expected a list of dicts",
    ),
    (
        "def points(config):\n    return [1 / 0]\n",
        "a_sweep.py:5: ZeroDivisionError: division by zero",
    ),
    (
        "def points(config):\n    return [{'modl.d_ff': 3}]\n",
        "modl.d_ff: there is no such section; did you mean 'model'?",
    ),
    (
        "def points(config):\n    return [{'model.dff': 3}]\n",
        "model.dff: there is no such field; did you mean 'd_ff'?",
    ),
    ("def points(config):\n    return [{'model.d_ff': 'wide'}]\n", "point 0 (model.d_ff=wide): "),
    (
        "def points(config):\n    return [{'train.seed': 3}]\n",
        "train.seed: is set by SWEEP['seeds']; leave it out",
    ),
    (
        "def get_config():\n    config = default_config()\n    config.train.seed = 7\n    return "
        "config\n" + POINTS,
        "config.train.seed: 7 would not be used: each run has one of SWEEP['seeds']",
    ),
    (
        "def points(config):\n    return [{'loss': 3}]\n",
        "loss: the report has a column of this name already",
    ),
    (
        "def points(config):\n    return [{'n': (3,)}]\n",
        "n: expected a string or a number for the report, got (3,)",
    ),
    ("def points(config):\n    return [{1: 3}]\n", "points(config): expected a list of dicts"),
    (
        "def suggest(trial, config):\n    trial.suggest_categorical('a', [(1,)])\n",
        "a: expected strings, numbers, True",
    ),
    (
        "def suggest(trial, config):\n    trial.suggest_int('a', 0, 9, log=True)\n",
        "a: log=True requires numbers above 0",
    ),
    (
        "def suggest(trial, config):\n    trial.suggest_int('a', 9, 0)\n",
        "a: expected a range from a lower to a higher",
    ),
    (
        "def suggest(trial, config):\n    a = trial.suggest_categorical('a', [1, 2])\n"
        "    trial.suggest_categorical('b', [a])\n",
        "b: has the choices (2,) here, and (1,) elsewhere; rename one",
    ),
    (
        "def suggest(trial, config):\n    config.data.seed = 3\n",
        "config.data.seed is set by SWEEP['seeds']",
    ),
    (
        "def suggest(trial, config):\n    trial.suggest_number('a', 3)\n",
        "a_sweep.py:5: AttributeError: 'Walk' object",
    ),
]


@pytest.mark.parametrize(("text", "message"), INVALID, ids=[m[:40] for _, m in INVALID])
def test_an_invalid_file_is_refused_with_the_place_of_the_error(load, text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(text)
    assert "a_sweep.py" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "minimizes"),
    [
        ({}, True),
        ({"objective": "perplexity"}, True),
        ({"objective": "bleu"}, False),
        ({"objective": "symbol_error_rate"}, True),
        ({"objective": "sequence_error_rate"}, True),
        ({"objective": "bleu", "direction": "minimize"}, True),
        ({"direction": "maximize"}, False),
    ],
)
def test_the_direction_follows_from_the_objective_unless_it_is_set(given, minimizes):
    assert Settings(**given).minimizes == minimizes


def test_a_walk_gives_a_parameter_one_value_and_visits_all_combinations():
    values, path = [], []
    while path is not None:
        walk = Walk(path)
        first = walk.suggest_categorical("a", "xy"), walk.suggest_int("b", 1, 3)
        values.append(first)
        assert walk.suggest_categorical("a", "xy") == first[0] and walk.whole
        path = walk.next_path()
    assert values == [(a, b) for a in "xy" for b in (1, 2, 3)]


def test_a_random_walk_stays_in_its_ranges_and_a_range_of_one_number_is_finite():
    walk = Walk([], random.Random(3))
    assert 0.5 <= walk.suggest_float("a", 0.5, 0.7) <= 0.7 and not walk.whole
    single = Walk([])
    assert single.suggest_float("a", 0.5, 0.5) == 0.5 and single.whole


def test_a_point_saved_as_a_file_loads_as_the_same_config(load, tmp_path):
    (point,) = load(
        "def points(config):\n    return [{'data.buckets': (16, 40), 'optim.clip_norm': 0.5, "
        "'model.d_head': None}]\n"
    ).points
    file = tmp_path / "point.py"
    file.write_text(space.as_file(point.config, "A point"))
    assert resolve(config_files.load_config(file)) == point.config != resolve(default_config())


def test_a_label_may_hold_any_text(tmp_path):
    file = tmp_path / "point.py"
    title = r'Point 3: files=C:\new\"x\N"""' + os.fsdecode(b" of sweep \xff")  # not UTF-8
    file.write_text(space.as_file(resolve(default_config()), title), encoding="utf-8")
    assert resolve(config_files.load_config(file)) == resolve(default_config())


@pytest.mark.parametrize(("name", "file"), sorted(config_files.shipped_configs("sweeps").items()))
def test_a_shipped_sweep_loads_and_names_its_command(name, file):
    assert len(space.load(file).points) >= 7
    assert f"Command   flaxformer-lite sweep --sweep={name}" in file.read_text(encoding="utf-8")


def test_the_rows_of_table_3_keep_the_ratios_of_the_paper():
    sweep = space.load(
        config_files.find_config("table3", kind="sweeps"), ["--config.model.d_model=256"]
    )
    rows = {point.notes["row"]: point.config.model for point in sweep.points}
    assert len(rows) == 20
    # d_head is 16 in the paper, for d_model = 512
    assert (rows["(A) h=32"].num_heads, rows["(A) h=32"].d_head) == (32, 8)
    assert (rows["(C) N=8"].num_encoder_layers, rows["(C) d=1024"].d_model) == (4, 512)
    assert (rows["big"].d_ff, rows["big"].num_heads, rows["big"].dropout) == (2048, 16, 0.3)
    assert rows["(E) learned"].position == "learned" and rows["base"].position == "sinusoidal"
