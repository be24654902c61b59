"""The flags of each command become a typed request, and wrong flags are refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from flaxformer_lite import config as config_lib
from flaxformer_lite.cli import commands
from flaxformer_lite.cli.run_flags import (
    PLOTS,
    parse_classify,
    parse_evaluate,
    parse_generate,
    parse_plot,
    parse_translate,
)
from flaxformer_lite.cli.score_flags import parse_score
from flaxformer_lite.cli.train_flags import parse_train
from flaxformer_lite.config import DecodeConfig, differences, resolve
from flaxformer_lite.config_files import find_config, load_config
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import WINDOW
from flaxformer_lite.system.errors import InputError

SETTINGS = ("tokenized", "lowercase", "ter", "symbols")
CONFIG_FILE = """from flaxformer_lite.config import default_config

def get_config():
    config = default_config()
    config.model.num_heads = 4
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CONFIG_FILE)
    return file


def test_train_uses_the_named_config_the_overrides_and_the_workdir(config_file, tmp_path):
    request = parse_train(
        [f"--config={config_file}", "--config.train.seed=3", f"--workdir={tmp_path / 'run'}"]
    )
    assert (request.config.model.num_heads, request.config.train.seed) == (4, 3)
    assert request.workdir == tmp_path / "run" and request.processes == (None, None, None)
    assert not (tmp_path / "run").exists()


def test_train_without_flags_uses_the_default_config_in_a_new_folder():
    request = parse_train([])
    assert request.config == resolve(load_config(find_config("default")))
    assert request.workdir is None
    assert request.new_workdir.parent == Path("runs") and request.new_workdir.name.startswith(
        "default-"
    )


def test_train_in_the_workdir_of_a_run_uses_its_config_unless_another_is_named(tmp_path):
    config = resolve({"model": {"d_ff": 1031, "d_head": 67}})
    (tmp_path / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    flag = f"--workdir={tmp_path}"
    assert parse_train([flag]).config == config
    longer = parse_train([flag, "--config.train.num_steps=7", "--config.optim.clip_norm=2"]).config
    assert differences(config, longer) == [
        ("optim.clip_norm", None, 2.0),
        ("train.num_steps", 100_000, 7),
    ]
    assert parse_train([flag, "--config=smoke"]).config == resolve(
        load_config(find_config("smoke"))
    )


def test_train_with_several_processes_has_the_address_their_number_and_its_index():
    flags = ["--coordinator_address=localhost:1234", "--num_processes=3", "--process_id=2"]
    assert parse_train(flags).processes == ("localhost:1234", 3, 2)


def test_a_contradiction_between_overrides_is_refused():
    with pytest.raises(
        ValueError, match=r"^config\.model\.num_heads: 7 heads do not divide d_model = 128"
    ):
        parse_train(["--config.model.num_heads=7"])


def test_evaluate_uses_the_test_split_by_default():
    assert parse_evaluate(["--workdir=w"]) == (
        *(Path("w"), "test", [], {}, False, None, {}, None, {}, {}, {}),
    )
    assert parse_evaluate(["--workdir=w", "--beam_size=3", "--alpha=1"]).decode == {
        "beam_size": 3,
        "alpha": 1.0,
    }
    assert parse_evaluate(["--workdir=w", "--split=validation"]).split == "validation"
    flags = [
        "--references=a,b",
        "--bootstrap=1000",
        "--bootstrap_seed=7",
        "--output=o",
        "--average=none",
        "--metric_command=own",
    ]
    resampling = {"bootstrap": 1000, "seed": 7}
    references = [Path("a"), Path("b")]
    expected = (
        Path("w"),
        "test",
        references,
        resampling,
        False,
        None,
        {},
        Path("o"),
        {"average": "none"},
        {},
        {"metric_command": "own"},
    )
    assert parse_evaluate(["--workdir=w", *flags]) == expected


def test_evaluate_accepts_where_the_files_of_the_run_are_now_and_no_other_field():
    files = ["--config.data.test_files=a,b", "--config.data.train_files", "('c d', 'e')"]
    request = parse_evaluate(["--workdir=w", *files])
    assert request.files == {"test": ("a", "b"), "train": ("c d", "e")}
    with pytest.raises(
        InputError, match=r"^config\.data\.seed: evaluate takes the config of the run"
    ):
        parse_evaluate(["--workdir=w", "--config.data.seed=1"])


def test_score_accepts_files_without_a_workdir():
    assert parse_score(["--hypotheses=h", "--references=a", "--references=b"]).references == [
        Path("a"),
        Path("b"),
    ]
    files, settings = ["--hypotheses=h", "--references=a,b"], dict.fromkeys(SETTINGS, False)
    both = [Path("a"), Path("b")]
    assert parse_score(files) == ([Path("h")], both, None, None, settings, None, {}, None, None)
    request = parse_score([*files, "--tokenized", "--bootstrap=99", "--baseline=c"])
    settings |= {"tokenized": True}
    resampled = {"bootstrap": 99}
    assert request == ([Path("h")], both, None, None, settings, Path("c"), resampled, None, None)


@pytest.mark.parametrize(
    ("names", "flags", "language"),
    [
        (("a/hyp.zh", "ref.zh"), (), "zh"),
        (("hyp.zh.gz", "ref.zh"), (), "zh"),
        (("hyp.zh", "ref.en"), (), None),
        (("hyp", "ref"), (), None),
        (("hyp.zh", "ref.zh"), ("--language=th",), "th"),
    ],
)
def test_the_language_of_scored_files_is_given_or_the_end_of_their_names(names, flags, language):
    hypotheses, references = names
    request = parse_score([f"--hypotheses={hypotheses}", f"--references={references}", *flags])
    assert (request.language, request.tokenizer) == (language, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--tokenized", "--tokenize=zh"),
            "^--tokenize: chooses BLEU's tokenizer, and --tokenized",
        ),
        (
            ("--tokenized", "--language=zh"),
            "^--language: chooses BLEU's tokenizer, and --tokenized",
        ),
        (("--tokenize=char", "--language=zh"), "^--language: chooses the tokenizer, as --tokenize"),
    ],
)
def test_two_flags_that_choose_the_tokenizer_exclude_each_other(flags, message):
    with pytest.raises(InputError, match=message):
        parse_score(["--hypotheses=h", "--references=r", *flags])


def test_a_list_may_hold_files_with_commas_and_the_streams_are_dashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").write_text("")
    (tmp_path / "W,1").mkdir()
    flags = ["--hypotheses=h", "--references=a,b", "--references=c,d"]
    assert parse_score(flags).references == [Path("a,b"), Path("c"), Path("d")]
    request = parse_translate(
        ["--workdir=w", "--ensemble=W,1", "--ensemble=W,2", "--input=-", "--output=-"]
    )
    assert request.model == {"ensemble": ["W,1", "W", "2"]}
    assert request.job.input is None and request.job.output is None


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        commands.main(["--version"])
    name, number = capsys.readouterr().out.split()
    assert (ended.value.code, name) == (0, "flaxformer-lite") and number[0].isdecimal()


def test_every_path_may_start_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    flags = ["--workdir=~/w", "--input=~/in", "--output=~/out"]
    request, home = parse_translate(flags), Path("/home/me")
    assert (request.workdir, request.job.input) == (home / "w", home / "in")
    assert request.job.output == home / "out"
    assert (
        parse_plot(["attention", "--text=a", "--workdir=w", "--output=~/zz"]).output == home / "zz"
    )
    assert parse_score(["--hypotheses=~/h", "--references=~/r"]).references == [home / "r"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--references=a",
            "--hypotheses: expected the file of translations, got nothing; add --hypotheses=FILE.",
        ),
        (
            "--hypotheses=h",
            "--references: expected the files to compare with, got nothing; add --references=FILE.",
        ),
        ("--hypotheses=h --references=a --baseline=b", "--baseline: requires --bootstrap"),
        (
            "--hypotheses=h --references=a --bootstrap_seed=3",
            "--bootstrap_seed: requires --bootstrap",
        ),
    ],
)
def test_a_wrong_flag_of_score_is_refused(arguments, says):
    with pytest.raises(ValueError) as caught:
        parse_score(arguments.split())
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "flag", ["--bootstrap=39", "--bootstrap=many", "--bootstrap=99 --bootstrap_seed=-1"]
)
def test_too_few_resamples_or_an_invalid_seed_end_with_2_and_one_line(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_score(["--hypotheses=h", "--references=a", *flag.split()])
    assert caught.value.code == 2
    assert "bootstrap" in capsys.readouterr().err


@pytest.mark.parametrize(
    "parser", [parse_evaluate, parse_generate, parse_translate, parse_classify]
)
def test_every_command_on_a_run_accepts_average_and_parameters(parser):
    assert parser(["--workdir=w"]).model == {}
    given = {"average": "best:3", "parameters": "raw"}
    assert (
        parser(["--workdir=w", *(f"--{name}={value}" for name, value in given.items())]).model
        == given
    )
    with pytest.raises(
        ValueError, match=r"^--average: expected last:N or best:N, such as last:5, got 'last'"
    ):
        parser(["--workdir=w", "--average=last"])
    with pytest.raises(SystemExit):
        parser(["--workdir=w", "--parameters=best"])


@pytest.mark.parametrize(
    "parser", [parse_evaluate, parse_generate, parse_translate, parse_classify]
)
def test_every_command_on_a_run_accepts_an_ensemble(parser):
    for flags in (["--ensemble=a,b/c"], ["--ensemble=a", "--ensemble=b/c"]):
        assert parser(["--workdir=w", *flags]).model == {"ensemble": ["a", "b/c"]}
    for nothing in ("", "a,,b"):
        with pytest.raises(
            ValueError, match=rf"^--ensemble: expected folders of runs, .* got {nothing!r}"
        ):
            parser(["--workdir=w", f"--ensemble={nothing}"])


@pytest.mark.parametrize(
    "parser", [parse_evaluate, parse_generate, parse_translate, parse_classify]
)
def test_every_command_on_a_run_accepts_a_number_of_devices_that_share_a_model(parser):
    assert parser(["--workdir=w", "--tensor=2"]).model == {"tensor": 2}
    with pytest.raises(SystemExit):
        parser(["--workdir=w", "--tensor=0"])


def test_translate_and_classify_use_files_or_the_standard_streams():
    for parser in (parse_translate, parse_classify):
        assert parser(["--workdir=w"])[:2] == (Path("w"), LineJob())
        request = parser(
            ["--workdir=w", "--input=a", "--output=b", "--window=7", "--restart", "--noprogress"]
        )
        assert request[:2] == (Path("w"), LineJob(Path("a"), Path("b"), 7, True, False))
        assert parser(["--workdir=w", "--progress"]).job == LineJob(progress=True)
        command = parser.__name__.removeprefix("parse_")
        assert (request.settings["command"], request.settings["--window"]) == (command, 7)
        with pytest.raises(ValueError, match=r"^--restart: requires --output=FILE"):
            parser(["--workdir=w", "--restart"])


def test_translate_accepts_a_prefix_and_n_best_and_uses_the_settings_of_the_run_by_default():
    own = {"prefix": None, "n_best": None, "long": "refuse"}
    assert parse_translate(["--workdir=w"])[2:] == (own, {}, {})
    request = parse_translate(
        ["--workdir=w", "--prefix=a b", "--n_best=3", "--method=beam", "--alpha=1"]
    )
    assert request[2:] == (
        own | {"prefix": "a b", "n_best": 3},
        {"method": "beam", "alpha": 1.0},
        {},
    )
    assert request.settings == {
        "command": "translate",
        "--window": WINDOW,
        "--prefix": "a b",
        "--n_best": 3,
        "--long": "refuse",
    }
    assert parse_translate(["--workdir=w", "--long=split"]).lines == own | {"long": "split"}
    with pytest.raises(ValueError, match=r"^--workers: removed; set JAX_NUM_CPU_DEVICES=2 instead"):
        parse_translate(["--workdir=w", "--workers=2"])


def test_generate_makes_one_text_without_a_prompt_by_default():
    assert parse_generate(["--workdir=w"]) == (Path("w"), "", 1, {}, None, {})
    request = parse_generate(["--workdir=w", "--prompt=a b", "--count=3", "--output=o"])
    assert request == (Path("w"), "a b", 3, {}, Path("o"), {})


@pytest.mark.parametrize("parser", [parse_translate, parse_generate])
def test_commands_that_decode_accept_every_field_of_decode_by_its_name_and_type(parser):
    values = {
        "method": "sample",
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "epsilon": 0.125,
        "seed": 11,
        "max_extra_length": 0,
    }
    values |= {
        "beam_size": 3,
        "beam_groups": 3,
        "diversity": 0.25,
        "alpha": 0.25,
        "min_length": 5,
        "no_repeat_ngram": 2,
        "tokens_per_batch": 97,
    }
    values |= {"forbidden": "a b"}
    values |= {"iterations": 4, "length_candidates": 3, "penalty": "power"}
    assert values.keys() == {field.name for field in dataclasses.fields(DecodeConfig)}
    flags = [f"--{name}={value}" for name, value in values.items()]
    read = values | {"forbidden": ("a b",)}
    assert parser(["--workdir=w", *flags]).decode == read
    for name, value in values.items():
        assert parser(["--workdir=w", f"--{name}={value}"]).decode == {name: read[name]}


@pytest.mark.parametrize(
    ("parser", "flag"),
    [
        *((parse_generate, flag) for flag in ("--count=0", "--count=-1", "--count=two")),
        *(
            (parse_translate, flag)
            for flag in ("--n_best=0", "--n_best=-1", "--n_best=two", "--long=cut")
        ),
        *((parser, "--window=0") for parser in (parse_translate, parse_classify)),
        *(
            (parser, flag)
            for parser in (parse_generate, parse_translate)
            for flag in ("--top_k=1.5", "--alpha=long")
        ),
    ],
)
def test_a_wrong_number_for_a_command_that_decodes_ends_with_2_and_one_line(parser, flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parser(["--workdir=w", flag])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and flag.partition("=")[0].strip("-") in shown.err
        and shown.err.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("attention --workdir=w --text=abc", ("attention", ["w"], "abc", "w/plots")),
        ("attention --workdir w --text abc --output o", ("attention", ["w"], "abc", "o")),
        ("positions --workdir=w", ("positions", ["w"], "", "w/plots")),
        ("schedule --output=o --workdir=w", ("schedule", ["w"], "", "o")),
        ("metrics --workdir=w", ("metrics", ["w"], "", "w/plots")),
        ("metrics a", ("metrics", ["a"], "", "a/plots")),
        ("metrics a b --output=o c", ("metrics", ["a", "b", "c"], "", "o")),
        ("metrics --output=o a b", ("metrics", ["a", "b"], "", "o")),
        ("metrics a --output o b", ("metrics", ["a", "b"], "", "o")),
        ("metrics --workdir w", ("metrics", ["w"], "", "w/plots")),
    ],
)
def test_plot_accepts_a_kind_and_a_folder_or_several_for_metrics(arguments, expected):
    kind, folders, text, output = expected
    assert parse_plot(arguments.split()) == (
        kind,
        [Path(folder) for folder in folders],
        text,
        Path(output),
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "",
            "plot: expected one of attention, positions, schedule, metrics, got 'nothing' "
            "(--help lists the flags)",
        ),
        (
            "--workdir=w",
            "plot: expected one of attention, positions, schedule, metrics, got 'nothing'",
        ),
        (
            "atention --workdir=w",
            "plot: expected one of attention, positions, schedule, metrics, got 'atention'",
        ),
        ("attention --text=abc", "--workdir: expected the folder of a run, got nothing"),
        ("metrics", "--workdir: expected the folder of a run, got nothing"),
        (
            "metrics a --workdir=w",
            "plot metrics: name the folders one after another, or one by --workdir, not both.",
        ),
        ("attention --workdir=w", "--text: expected the text to read, got nothing"),
        ("attention --workdir=w --text=", "--text: expected the text to read, got nothing"),
        ("positions --workdir=w --text=abc", "--text: applies only to plot attention"),
        ("metrics a --text=abc", "--text: applies only to plot attention"),
    ],
)
def test_a_wrong_plot_command_is_refused(arguments, says):
    with pytest.raises(ValueError) as caught:
        parse_plot(arguments.split())
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    "arguments", ["schedule w", "attention w --text=abc", "metrics a --no_such_flag"]
)
def test_an_extra_word_or_flag_of_plot_ends_with_2_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_plot(arguments.split())
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("kind", [[], *([kind] for kind in PLOTS)], ids=str)
def test_the_help_of_plot_shows_all_kinds(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_plot([*kind, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in PLOTS) and "--output" in shown


@pytest.mark.parametrize(
    "parser", [parse_evaluate, parse_generate, parse_translate, parse_classify]
)
def test_a_command_on_a_run_without_a_workdir_is_refused(parser):
    with pytest.raises(ValueError, match=r"^--workdir: expected the folder of a run, got nothing"):
        parser([])
