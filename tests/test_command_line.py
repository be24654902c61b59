"""Flags, config files and overrides in; requests out, or one line that says what was wrong."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from flaxformer_lite import command_line
from flaxformer_lite import config as config_lib
from flaxformer_lite.command_line import (
    PLOTS,
    find_config,
    load_config,
    override,
    parse,
    parse_evaluate,
    parse_generate,
    parse_plot,
    parse_text,
    parse_train,
    read_lines,
    split_overrides,
    write_lines,
)
from flaxformer_lite.config import Config, DecodeConfig, default_config, differences, resolve

CONFIG_FILE = """from flaxformer_lite.config import default_config

def get_config():
    config = default_config()
    config.model.num_heads = 4
    return config
"""


def changed(*overrides):
    """The fields that overrides of the default config change, with their new values."""
    config = resolve(override(default_config(), overrides))
    return {name: new for name, _, new in differences(Config(), config)}


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(CONFIG_FILE)
    return file


def test_a_shipped_config_is_found_by_its_name_and_any_file_by_its_path(repo_root, config_file):
    assert find_config("smoke").samefile(repo_root / "configs" / "smoke.py")
    assert find_config(str(config_file)) == config_file


def test_a_path_wins_over_the_name_of_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").write_text(CONFIG_FILE)
    assert find_config("smoke") == Path("smoke")


def test_a_config_that_is_nowhere_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError) as caught:
        find_config("smoek")
    assert str(caught.value) == "--config=smoek: no such file and no shipped config; did you mean 'smoke'?"


def test_a_config_file_is_loaded_by_its_get_config(config_file):
    assert resolve(load_config(config_file)).model.num_heads == 4


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("def get_config():\n    x = 1\n    return x / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("\n\nimport not_a_module\n", 3, "ModuleNotFoundError: No module named 'not_a_module'"),
        ("x = 1\ndef get_config(:\n", 2, "SyntaxError: invalid syntax (mine.py, line 2)"),
        (CONFIG_FILE.replace("num_heads", "num_head.x"), 5, "AttributeError"),
        ("def f():\n    raise ValueError\ndef get_config():\n    f()\n", 2, "ValueError: ValueError"),
        ("import json\ndef get_config():\n    json.loads('')\n", 3, "JSONDecodeError: Expecting value"),
    ],
)
@pytest.mark.parametrize("relative", [True, False])
def test_a_config_file_that_fails_is_named_with_its_line(config_file, text, line, says, relative, monkeypatch):
    config_file.write_text(text)
    monkeypatch.chdir(config_file.parent)
    file = Path("mine.py") if relative else config_file
    with pytest.raises(ValueError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{line}: {says}")
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_file_that_the_config_imports_is_told_with_the_line_of_the_import(config_file, monkeypatch):
    (config_file.parent / "imported_by_mine.py").write_text("\n\n\n\n\nx = (\n")
    config_file.write_text("x = 1\nimport imported_by_mine\n")
    monkeypatch.syspath_prepend(str(config_file.parent))
    with pytest.raises(ValueError) as caught:
        load_config(config_file)
    assert str(caught.value).startswith(f"{config_file}:2: SyntaxError: ")
    assert "imported_by_mine.py, line 6" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mine.py", "x = 1\n", "AttributeError: module 'config_mine' has no attribute 'get_config'"),
        ("mine.py", "def get_config():\n    return {}\n", "get_config() returned dict, expected a ConfigDict."),
        ("mine.txt", CONFIG_FILE, "expected a Python file that defines get_config()."),
    ],
)
def test_a_file_that_gives_no_config_is_refused(tmp_path, name, text, says):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file)) and str(caught.value).endswith(says)


@pytest.mark.parametrize(
    ("argument", "field", "value"),
    [
        ("model.num_heads=4", "model.num_heads", 4),
        ("model.dropout=0.25", "model.dropout", 0.25),
        ("model.dropout=0", "model.dropout", 0.0),
        ("optim.learning_rate=2e-3", "optim.learning_rate", 0.002),
        ("model.tie_embeddings=false", "model.tie_embeddings", False),
        ("model.position=learned", "model.position", "learned"),
        ("data.buckets=(16, 48)", "data.buckets", (16, 48)),
        ("data.buckets=16,48", "data.buckets", (16, 48)),
        ("data.train_split=train[:10%]", "data.train_split", "train[:10%]"),
        ("data.dataset=a=b", "data.dataset", "a=b"),
        ("model.d_head=32", "model.d_head", 32),
        ("optim.clip_norm=1", "optim.clip_norm", 1.0),
        ("data.source_language=de", "data.source_language", "de"),
        ("train.patience=7", "train.patience", 7),
        ("parallel.data=-1", None, None),
    ],
)
def test_an_override_takes_the_type_of_its_field(argument, field, value):
    assert changed(f"--config.{argument}") == ({} if field is None else {field: value})


def test_of_two_overrides_of_a_field_the_last_wins_and_others_stay():
    both = ("--config.model.d_ff=1031", "--config.train.seed=3", "--config.model.d_ff=1033")
    assert changed(*both) == {"model.d_ff": 1033, "train.seed": 3}


def test_an_override_leaves_the_arguments_of_the_program_alone():
    before = list(sys.argv)
    changed("--config.train.seed=3")
    with pytest.raises(ValueError):
        changed("--config.train.seed=x")
    assert sys.argv == before


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("model.num_head=4", "config.model.num_head: there is no such field; did you mean 'num_heads'?"),
        ("modle.num_heads=4", "config.modle: there is no such field; did you mean 'model'?"),
        ("=4", "config.: there is no such field; valid are data, decode, model, optim, parallel, train."),
        (
            "model.d_ff.x=4",
            "config.model.d_ff.x: there is no such field; config.model.d_ff has none, its value is 2048.",
        ),
        ("model.num_heads=four", "config.model.num_heads: expected int, got 'four'."),
        ("model.num_heads=4.5", "config.model.num_heads: expected int, got '4.5'."),
        ("model.num_heads=", "config.model.num_heads: expected int, got ''."),
        ("model.tie_embeddings=maybe", "config.model.tie_embeddings: expected bool, got 'maybe'."),
        ("optim.clip_norm=x", "config.optim.clip_norm: expected float, got 'x'."),
        ("model=4", "config.model: expected ConfigDict, got '4'."),
    ],
)
def test_a_wrong_override_is_refused_by_the_name_of_its_field(argument, says):
    name = argument if argument.startswith("=") else f"{argument}"
    with pytest.raises(ValueError) as caught:
        override(default_config(), [f"--config.{name}"])
    assert str(caught.value) == says


@pytest.mark.parametrize("value", ["abc", "(8, 1.5)"])
def test_a_tuple_of_what_is_no_number_is_refused_when_it_is_resolved(value):
    with pytest.raises(ValueError, match=r"^config\.data\.buckets: expected a tuple of int, got"):
        changed(f"--config.data.buckets={value}")


def test_overrides_are_told_from_other_arguments_and_may_stand_in_two_parts():
    arguments = [
        "--config=smoke",
        "--config.a.b=1",
        "--workdir",
        "w",
        "--config.a.c",
        "2",
        "-config.d=x y",
        "--config.e",
    ]
    assert split_overrides(arguments) == (
        ["--config.a.b=1", "--config.a.c=2", "-config.d=x y", "--config.e="],
        ["--config=smoke", "--workdir", "w"],
    )


def define(values):
    flags.DEFINE_string("workdir", None, "a folder", flag_values=values)
    flags.DEFINE_integer("number", None, "a number", flag_values=values)


def test_flags_are_parsed_in_either_form():
    for arguments in (["--workdir=w", "--number=7"], ["--workdir", "w", "--number", "7"]):
        values = parse(arguments, define, usage="usage")
        assert (values.workdir, values.number) == ("w", 7)


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_shows_usage_and_flags_and_ends_with_0(argument, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--workdir=w", argument], define, usage="usage: me")
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: me\n") and "--workdir" in shown.out and "a folder" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--wrokdir=w"], "wrokdir"),
        (["--number=seven"], "seven"),
        (["--workdir"], "workdir"),
        (["folder"], "'folder': expected only flags"),
    ],
)
def test_a_wrong_flag_ends_with_2_and_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments, define, usage="usage: me")
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err.startswith("error: ")
        and shown.err.endswith("(--help lists the flags)\n") | ("lists them" in shown.err)
    )
    assert says in shown.err and shown.err.count("\n") == 1


def test_training_takes_the_named_config_the_overrides_and_the_folder(config_file, tmp_path):
    request = parse_train([f"--config={config_file}", "--config.train.seed=3", f"--workdir={tmp_path / 'run'}"])
    assert (request.config.model.num_heads, request.config.train.seed) == (4, 3)
    assert request.workdir == tmp_path / "run" and request.processes == (None, None, None)
    assert not (tmp_path / "run").exists()


def test_training_without_flags_takes_the_default_config_into_a_new_folder():
    request = parse_train([])
    assert request.config == resolve(load_config(find_config("default")))
    assert request.workdir is None
    assert request.new_workdir.parent == Path("runs") and request.new_workdir.name.startswith("default-")


def test_training_in_the_folder_of_a_run_takes_its_config_unless_another_is_named(tmp_path):
    config = resolve({"model": {"d_ff": 1031, "d_head": 67}})
    (tmp_path / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    flag = f"--workdir={tmp_path}"
    assert parse_train([flag]).config == config
    longer = parse_train([flag, "--config.train.num_steps=7", "--config.optim.clip_norm=2"]).config
    assert differences(config, longer) == [("optim.clip_norm", None, 2.0), ("train.num_steps", 100_000, 7)]
    assert parse_train([flag, "--config=smoke"]).config == resolve(load_config(find_config("smoke")))


def test_training_in_several_processes_is_told_where_they_meet():
    flags = ["--coordinator_address=localhost:1234", "--num_processes=3", "--process_id=2"]
    assert parse_train(flags).processes == ("localhost:1234", 3, 2)


def test_a_contradiction_between_overrides_is_refused():
    with pytest.raises(ValueError, match=r"^config\.model\.num_heads: 7 heads do not divide d_model = 128"):
        parse_train(["--config.model.num_heads=7"])


def test_evaluating_needs_a_folder_and_takes_the_test_split_unless_told():
    assert parse_evaluate(["--workdir=w"]) == (Path("w"), "test")
    assert parse_evaluate(["--workdir=w", "--split=validation"]) == (Path("w"), "validation")


def test_translating_and_classifying_read_and_write_files_or_the_standard_streams():
    for command in ("translate", "classify"):
        assert parse_text(["--workdir=w"], command) == (Path("w"), None, None)
        paths = parse_text(["--workdir=w", "--input=a", "--output=b"], command)
        assert paths == (Path("w"), Path("a"), Path("b"))


def test_generating_writes_one_text_of_nothing_as_the_run_would_unless_told():
    assert parse_generate(["--workdir=w"]) == (Path("w"), "", 1, {}, None)
    request = parse_generate(["--workdir=w", "--prompt=a b", "--count=3", "--output=o"])
    assert request == (Path("w"), "a b", 3, {}, Path("o"))


def test_generating_takes_every_field_of_decoding_by_its_name_and_type():
    values = {"method": "sample", "temperature": 0.5, "top_k": 7, "top_p": 0.75, "seed": 11, "max_extra_length": 0}
    assert values.keys() == {field.name for field in dataclasses.fields(DecodeConfig)}
    flags = [f"--{name}={value}" for name, value in values.items()]
    assert parse_generate(["--workdir=w", *flags]).decode == values
    for name, value in values.items():
        assert parse_generate(["--workdir=w", f"--{name}={value}"]).decode == {name: value}


@pytest.mark.parametrize("flag", ["--count=0", "--count=-1", "--count=two", "--top_k=1.5", "--temperature=hot"])
def test_a_wrong_number_for_generating_ends_with_2_and_one_line(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_generate(["--workdir=w", flag])
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and flag.partition("=")[0].strip("-") in shown.err and shown.err.count("\n") == 1


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
def test_plotting_takes_a_kind_and_a_folder_or_for_metrics_several(arguments, expected):
    kind, folders, text, output = expected
    assert parse_plot(arguments.split()) == (kind, [Path(folder) for folder in folders], text, Path(output))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "plot: expected one of attention, positions, schedule, metrics, got 'nothing' (--help tells more)"),
        ("--workdir=w", "plot: expected one of attention, positions, schedule, metrics, got 'nothing'"),
        ("atention --workdir=w", "plot: expected one of attention, positions, schedule, metrics, got 'atention'"),
        ("attention --text=abc", "--workdir: expected the folder of a run, got nothing"),
        ("metrics", "--workdir: expected the folder of a run, got nothing"),
        ("metrics a --workdir=w", "plot metrics: name the folders one after another, or one by --workdir, not both."),
        ("attention --workdir=w", "--text: expected the text to read."),
        ("attention --workdir=w --text=", "--text: expected the text to read."),
        ("positions --workdir=w --text=abc", "--text: goes with plot attention."),
        ("metrics a --text=abc", "--text: goes with plot attention."),
    ],
)
def test_what_cannot_be_plotted_is_refused(arguments, says):
    with pytest.raises(ValueError) as caught:
        parse_plot(arguments.split())
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("arguments", ["schedule w", "attention w --text=abc", "metrics a --no_such_flag"])
def test_a_word_or_a_flag_too_many_for_plotting_ends_with_2_and_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_plot(arguments.split())
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize("kind", [[], *([kind] for kind in PLOTS)], ids=str)
def test_help_for_plotting_shows_all_kinds(kind, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_plot([*kind, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in PLOTS) and "--output" in shown


@pytest.mark.parametrize(
    "parser", [parse_evaluate, parse_generate, lambda arguments: parse_text(arguments, "translate")]
)
def test_a_command_on_a_run_without_its_folder_is_refused(parser):
    with pytest.raises(ValueError, match=r"^--workdir: expected the folder of a run, got nothing"):
        parser([])


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\n\n", ["a", ""]),
        (b"\na\n\nb", ["", "a", "", "b"]),
        (b"a\r\n\r\nb\n", ["a", "", "b"]),
        (b"a\rb\r\r\n", ["a\rb\r"]),
        (b"a\x0bb\x0c\x1c\xc2\x85\xe2\x80\xa8c\n", ["a\x0bb\x0c\x1c\x85\u2028c"]),
        (b" 12\xc2\xa0\xe2\x82\xac \n", [" 12\xa0\u20ac "]),
    ],
)
def test_lines_end_at_line_feeds_with_or_without_a_return_and_nothing_else_is_taken_away(
    tmp_path, monkeypatch, raw, lines
):
    (tmp_path / "in").write_bytes(raw)
    assert read_lines(tmp_path / "in") == lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert read_lines(None) == lines


def test_a_line_that_is_not_utf_8_is_named_with_its_file_and_its_column(tmp_path, monkeypatch):
    raw = b"good\n\nno t\xe9\xe9n\n"
    (tmp_path / "in").write_bytes(raw)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    for path, name in ((tmp_path / "in", tmp_path / "in"), (None, "standard input")):
        with pytest.raises(ValueError) as caught:
            read_lines(path)
        assert str(caught.value).startswith(f"{name}, line 3: expected UTF-8, got byte 0xe9 at column 5;")


@pytest.mark.parametrize("name", ["missing", "."])
def test_an_input_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--input=.*: cannot be read: "):
        read_lines(tmp_path / name)


@pytest.mark.parametrize("lines", [[], [""], ["a", "", "12\xa0\u20ac"], ["a\rb"]])
def test_lines_that_are_written_are_read_again_as_they_were(tmp_path, monkeypatch, lines):
    write_lines(tmp_path / "out", lines)
    assert read_lines(tmp_path / "out") == lines
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    write_lines(None, lines)
    assert raw.getvalue() == (tmp_path / "out").read_bytes()


def test_a_line_end_within_a_line_becomes_a_space_so_that_lines_keep_their_numbers(tmp_path):
    write_lines(tmp_path / "out", ["a\nb", "c"])
    assert read_lines(tmp_path / "out") == ["a b", "c"]


@pytest.mark.parametrize("name", ["missing/out", "folder"])
def test_an_output_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"^--output=.*: cannot be written: "):
        write_lines(tmp_path / name, ["a"])
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_failing_is_one_line_on_standard_error_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.fail("what was wrong")
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: what was wrong\n")


def test_ending_at_once_waits_for_no_thread_and_loses_no_output():
    lines = [
        "import threading, time",
        "from flaxformer_lite import command_line",
        "threading.Thread(target=time.sleep, args=(600,)).start()",
        "print('said', end='')",
        "command_line.exit_now(3)",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "said")
