"""Flags, config files, overrides and files of lines are read correctly, or refused in one line."""

import functools
import gzip
import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.parser import parse, split_overrides
from flaxformer_lite.config import Config, default_config, differences, resolve
from flaxformer_lite.config_files import find_beside, find_config, load_config, override
from flaxformer_lite.lines.whole_files import check_output, read_lines, write_lines
from flaxformer_lite.system.errors import InputError

CONFIG_FILE = """from flaxformer_lite.config import default_config

def get_config():
    config = default_config()
    config.model.num_heads = 4
    return config
"""


def changed(*overrides):
    """Returns the fields that overrides of the default config change, with their new values."""
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
    scan = repo_root / "configs" / "benchmarks" / "scan.py"
    assert find_config("benchmarks/scan").samefile(scan)


def test_the_name_of_a_shipped_config_takes_precedence_over_a_file_and_says_so(
    tmp_path, monkeypatch, capsys, repo_root
):
    monkeypatch.chdir(tmp_path)
    for name in ("smoke", "mine"):
        (tmp_path / name).write_text(CONFIG_FILE)
    assert find_config("smoke").samefile(repo_root / "configs" / "smoke.py")
    note = "note: --config=smoke is the shipped config; the file here is --config=./smoke\n"
    assert capsys.readouterr().err == note
    assert find_config("./smoke") == Path("smoke") and find_config("mine") == Path("mine")
    assert capsys.readouterr().err == ""


def test_a_path_may_start_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(CONFIG_FILE)
    assert find_config("~/mine.py") == tmp_path / "mine.py"
    with pytest.raises(InputError, match=r"^~nobody-of-this-name/x: there is no such user"):
        find_config("~nobody-of-this-name/x")


def test_data_files_are_found_beside_the_config_that_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, names in ((".", ("here.en",)), ("exp/data", ("a.en", "a.de", "b1.en", "b2.en"))):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (tmp_path / folder / name).write_text("text\n")
    config = default_config()
    config.data.train_files = "data/a.en", "data/a.de"
    config.data.validation_files = ("data/b*.en", "here.en")
    config.data.test_files = ("none.en", str(tmp_path / "exp" / "data" / "a.en"))
    find_beside(config, Path("exp"))
    assert config.data.train_files == ("exp/data/a.en", "exp/data/a.de")
    assert config.data.validation_files == ("exp/data/b*.en", "here.en")
    assert config.data.test_files == ("none.en", str(tmp_path / "exp" / "data" / "a.en"))


def test_a_config_file_is_read_again_after_a_change_and_no_cache_is_written(
    config_file, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = config_file.stat()
    assert load_config(config_file).model.num_heads == 4
    config_file.write_text(CONFIG_FILE.replace("num_heads = 4", "num_heads = 2"))
    # the same size and time as before
    os.utime(config_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_config(config_file).model.num_heads == 2
    assert list(config_file.parent.iterdir()) == [config_file]


def test_an_unknown_config_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError) as caught:
        find_config("smoek")
    assert (
        str(caught.value)
        == "--config=smoek: no such file and no shipped config; did you mean 'smoke'?"
    )


def test_a_config_file_is_loaded_by_its_get_config(config_file):
    assert resolve(load_config(config_file)).model.num_heads == 4


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (
            "def get_config():\n    x = 1\n    return x / 0\n",
            3,
            "ZeroDivisionError: division by zero",
        ),
        ("\n\nimport not_a_module\n", 3, "ModuleNotFoundError: No module named 'not_a_module'"),
        ("x = 1\ndef get_config(:\n", 2, "SyntaxError: invalid syntax (mine.py, line 2)"),
        (CONFIG_FILE.replace("num_heads", "num_head.x"), 5, "AttributeError"),
        (
            "def f():\n    raise ValueError\ndef get_config():\n    f()\n",
            2,
            "ValueError: ValueError",
        ),
        (
            "import json\ndef get_config():\n    json.loads('')\n",
            3,
            "JSONDecodeError: Expecting value",
        ),
    ],
)
@pytest.mark.parametrize("relative", [True, False])
def test_a_config_file_that_fails_is_named_with_its_line(
    config_file, text, line, says, relative, monkeypatch
):
    config_file.write_text(text)
    monkeypatch.chdir(config_file.parent)
    file = Path("mine.py") if relative else config_file
    with pytest.raises(ValueError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}:{line}: {says}")
    assert "\n" not in str(caught.value)


def test_an_error_in_a_file_that_the_config_imports_has_the_line_of_the_import(
    config_file, monkeypatch
):
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
        (
            "mine.py",
            "x = 1\n",
            "AttributeError: module 'config_mine' has no attribute 'get_config'",
        ),
        (
            "mine.py",
            "def get_config():\n    return {}\n",
            "get_config() returned dict, expected a ConfigDict.",
        ),
        ("mine.txt", CONFIG_FILE, "expected a Python file that defines get_config()."),
    ],
)
def test_a_file_without_a_config_is_refused(tmp_path, name, text, says):
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
        ("train.patience=None", None, None),
        ("train.average=None", None, None),
    ],
)
def test_an_override_takes_the_type_of_its_field(argument, field, value):
    assert changed(f"--config.{argument}") == ({} if field is None else {field: value})


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("('a.en','a.de')", ("a.en", "a.de")),
        ("['a b.en', 'a,b.de']", ("a b.en", "a,b.de")),
        ("('a.tsv',)", ("a.tsv",)),
        ("'a.tsv'", ("a.tsv",)),
        ("a.tsv", ("a.tsv",)),
        ("a.en,a.de", ("a.en", "a.de")),
        ("/x/a*.en.gz, ../b?-1.de", ("/x/a*.en.gz", "../b?-1.de")),
        ("my texts/a.tsv", ("my texts/a.tsv",)),
        ("data", ("data",)),
    ],
)
def test_paths_are_a_tuple_or_separated_by_commas(value, paths):
    files = changed("--config.data.dataset=plain_text", f"--config.data.train_files={value}")
    assert files == {"data.dataset": "plain_text", "data.train_files": paths}
    assert changed(f"--config.data.train_files={value}", "--config.data.train_files=") == {}


def test_the_last_of_two_overrides_of_a_field_has_effect():
    both = ("--config.model.d_ff=1031", "--config.train.seed=3", "--config.model.d_ff=1033")
    assert changed(*both) == {"model.d_ff": 1033, "train.seed": 3}


def test_an_override_does_not_change_the_arguments_of_the_program():
    before = list(sys.argv)
    changed("--config.train.seed=3")
    with pytest.raises(ValueError):
        changed("--config.train.seed=x")
    assert sys.argv == before


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            "model.num_head=4",
            "config.model.num_head: there is no such field; did you mean 'num_heads'?",
        ),
        ("modle.num_heads=4", "config.modle: there is no such field; did you mean 'model'?"),
        (
            "=4",
            "config.: there is no such field; valid are data, decode, init, model, optim, "
            "parallel, train.",
        ),
        (
            "model.d_ff.x=4",
            "config.model.d_ff.x: there is no such field; config.model.d_ff has none, its value "
            "is 2048.",
        ),
        ("model.num_heads=four", "config.model.num_heads: expected int, got 'four'."),
        (
            "data.num_buckets=none",
            "config.data.num_buckets: expected int, got 'none'; None is written None.",
        ),
        ("model.num_heads=4.5", "config.model.num_heads: expected int, got '4.5'."),
        ("model.num_heads=", "config.model.num_heads: expected int, got ''."),
        ("model.tie_embeddings=maybe", "config.model.tie_embeddings: expected bool, got 'maybe'."),
        ("optim.clip_norm=x", "config.optim.clip_norm: expected float, got 'x'."),
        ("model=4", "config.model: expected a section with fields, got '4'."),
    ],
)
def test_a_wrong_override_is_refused_with_the_name_of_its_field(argument, says):
    with pytest.raises(ValueError) as caught:
        override(default_config(), [f"--config.{argument}"])
    assert str(caught.value) == says


@pytest.mark.parametrize("value", ["abc", "(8, 1.5)"])
def test_a_tuple_with_a_wrong_item_is_refused_when_the_config_is_resolved(value):
    with pytest.raises(ValueError, match=r"^config\.data\.buckets: expected a tuple of int, got"):
        changed(f"--config.data.buckets={value}")


def test_overrides_are_separated_from_other_arguments_and_may_have_two_parts():
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


def test_flags_are_parsed_with_an_equals_sign_or_a_space():
    for arguments in (["--workdir=w", "--number=7"], ["--workdir", "w", "--number", "7"]):
        values = parse(arguments, define, usage="usage")
        assert (values.workdir, values.number) == ("w", 7)


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_shows_usage_and_flags_and_ends_with_0(argument, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--workdir=w", argument], define, usage="usage: me")
    assert caught.value.code == 0
    shown = capsys.readouterr()
    assert (
        shown.out.startswith("usage: me\n") and "--workdir" in shown.out and "a folder" in shown.out
    )
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
def test_lines_end_only_at_line_feeds_and_a_return_before_one_is_removed(
    tmp_path, monkeypatch, raw, lines
):
    (tmp_path / "in").write_bytes(raw)
    assert read_lines(tmp_path / "in") == lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert read_lines(None) == lines


def test_a_gzip_file_is_decompressed_or_refused_if_it_is_damaged(tmp_path):
    compressed = gzip.compress(b"a\n\nb")
    (tmp_path / "in.gz").write_bytes(compressed)
    assert read_lines(tmp_path / "in.gz") == ["a", "", "b"]
    (tmp_path / "in.gz").write_bytes(compressed[:-9])
    with pytest.raises(ValueError, match=r"^--references=.*in\.gz: cannot be read: \w+"):
        read_lines(tmp_path / "in.gz", flag="--references")


def test_a_line_that_is_not_utf8_is_refused_with_its_file_and_column(tmp_path, monkeypatch):
    raw = b"good\n\nno t\xe9\xe9n\n"
    (tmp_path / "in").write_bytes(raw)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    for path, name in ((tmp_path / "in", tmp_path / "in"), (None, "standard input")):
        with pytest.raises(ValueError) as caught:
            read_lines(path)
        assert str(caught.value).startswith(
            f"{name}, line 3: expected UTF-8, got byte 0xe9 at column 5;"
        )


@pytest.mark.parametrize("name", ["missing", "."])
def test_an_input_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--input=.*: cannot be read: "):
        read_lines(tmp_path / name)


@pytest.mark.parametrize("lines", [[], [""], ["a", "", "12\xa0\u20ac"], ["a\rb"]])
def test_written_lines_are_read_back_unchanged(tmp_path, monkeypatch, lines):
    write_lines(tmp_path / "out", lines)
    assert read_lines(tmp_path / "out") == lines
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
    write_lines(None, lines)
    assert raw.getvalue() == (tmp_path / "out").read_bytes()


def test_a_line_feed_inside_a_text_becomes_a_space(tmp_path):
    write_lines(tmp_path / "out", ["a\nb", "c"])
    assert read_lines(tmp_path / "out") == ["a b", "c"]
    write_lines(tmp_path / "out", ["a\nb", "c\n"], keep_ends=True)
    assert (tmp_path / "out").read_text() == "a\nb\n---\nc\n\n"


@pytest.mark.parametrize("name", ["missing/out", "folder"])
def test_an_output_that_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for attempt in (functools.partial(write_lines, lines=["a"]), check_output):
        with pytest.raises(
            ValueError, match=r"^--output=.*: cannot be written: (No such file|Is a directory)"
        ):
            attempt(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("closed", "code"), [(True, 0), (False, 1)], ids=["nobody reads", "full"])
def test_output_that_cannot_be_flushed_is_reported_unless_its_pipe_is_closed(closed, code):
    script = "from flaxformer_lite.cli import parser; print('a line'); parser.exit_now(0)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "wb") as pipe,
        open("/dev/full" if not closed else os.devnull, "wb") as full,
    ):
        options = {"stdout": pipe if closed else full, "stderr": subprocess.PIPE, "env": env}
        done = subprocess.run([sys.executable, "-c", script], **options)
    assert done.returncode == code
    message = b"error: standard output: cannot be written: No space left on device.\n"
    assert done.stderr == (b"" if closed else message)


def test_writing_to_a_symbolic_link_writes_to_its_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "below.txt")
    check_output(tmp_path / "link")
    write_lines(tmp_path / "link", ["a"])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "below.txt").read_text() == "a\n"


def test_writing_to_a_named_pipe_keeps_the_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_output(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit((tmp_path / "pipe").read_text)
        write_lines(tmp_path / "pipe", ["a", "b"])
        assert text.result(timeout=60) == "a\nb\n"
    assert (tmp_path / "pipe").is_fifo()


def test_fail_prints_one_line_on_standard_error_and_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        parser.fail("a reason")
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", "error: a reason\n")


def test_exit_now_does_not_wait_for_threads_and_flushes_the_output():
    lines = [
        "import threading, time",
        "from flaxformer_lite.cli import parser",
        "threading.Thread(target=time.sleep, args=(600,)).start()",
        "print('said', end='')",
        "parser.exit_now(3)",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (3, "said")


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_a_closed_standard_stream_is_one_message(closed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, closed, None)
    flag = "--input" if closed == "stdin" else "--output"
    with pytest.raises(InputError, match=rf"^{flag}: standard {flag[2:]} is closed; name a file"):
        read_lines(None) if closed == "stdin" else write_lines(None, ["a"])
    write_lines(tmp_path / "file", ["a"])
    assert read_lines(tmp_path / "file") == ["a"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".GZ"])
def test_an_output_is_compressed_by_its_name_and_read_back(suffix, tmp_path):
    path = tmp_path / f"out{suffix}"
    write_lines(path, ["Grüße", ""])
    assert path.read_bytes() != "Grüße\n\n".encode() and read_lines(path) == ["Grüße", ""]
    path.rename(tmp_path / "out")
    assert read_lines(tmp_path / "out") == ["Grüße", ""]
