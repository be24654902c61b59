"""Whatever a user gets wrong: one message, exit code 2, and nothing left behind."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import runs

from flaxformer_lite import __main__ as program


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., str]:
    """Runs a command in this process; returns its error message after checking what all of them have in common."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(program, "exit_now", end)

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            program.main(list(arguments))
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert out == "" and "Traceback" not in err
        (error,) = runs.error_lines(err)
        assert err.splitlines()[-1] == error
        return error

    return refused


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder under runs/ would be seen."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.fixture
def nothing_left(tmp_path: Path):
    """Compares everything below `tmp_path` before and after the test."""
    before: dict[str, bytes] = {}

    def begin() -> None:
        before.update(runs.files_below(tmp_path))

    begin()
    yield begin
    assert runs.files_below(tmp_path) == before


WRONG_CONFIGS = [
    ("config.model.d_modle=64", ["config.model.d_modle", "no such field", "did you mean 'd_model'"]),
    ("config.modl.d_model=64", ["config.modl", "did you mean 'model'"]),
    ("config.model.d_model=wide", ["config.model.d_model", "expected int", "'wide'"]),
    ("config.model.dropout=yes", ["config.model.dropout", "expected float"]),
    ("config.data.buckets=32", ["config.data.buckets", "expected tuple"]),
    ("config.model.num_heads=7", ["config.model.num_heads", "7 heads do not divide d_model = 64"]),
    ("config.train.num_steps=0", ["config.train.num_steps", "expected 1 or more, got 0"]),
    ("config.parallel.mode=ddp", ["config.parallel.mode", "'ddp' is not a choice"]),
    ("config.parallel.data=9", ["config.parallel.data", "9 devices asked for, there are 8"]),
    ("config.parallel.data=3", ["config.data.rows_multiple", "8 rows cannot be split evenly over 3 devices"]),
    ("config.data.dataset=no_such_dataset/x", ["config.data.dataset", "cannot open 'no_such_dataset/x'"]),
    ("config.data.dataset=cldr_translate/en-xx", ["xx"]),
    ("config.data.dataset=cldr_translate/en", ["<source>-<target>"]),
    ("config.data.source_language=fr", ["config.data.source_language", "en and de", "'fr'"]),
    ("config.data.train_split=trian", ["config.data", "no split 'trian'", "train"]),
    ("config.data.test_split=tset", ["config.data", "no split 'tset'", "validation"]),
    ("config.data.vocab_size=100000", ["config.data.vocab_size", "100000 pieces"]),
    ("config.model.vocab_size=1000", ["config.model.vocab_size"]),
]


@pytest.mark.parametrize(("flag", "parts"), WRONG_CONFIGS, ids=[flag for flag, _ in WRONG_CONFIGS])
def test_a_wrong_config_is_refused_by_the_fields_name(command, nothing_left, tmp_path, flag, parts):
    error = command("train", "--config=smoke", f"--workdir={tmp_path / 'new' / 'run'}", f"--{flag}")
    assert all(part in error for part in parts), error


def test_an_odd_width_with_sinusoidal_positions_is_refused(command, nothing_left):
    error = command("train", "--config=smoke", "--config.model.d_model=63", "--config.model.num_heads=7")
    assert "config.model.d_model" in error and "even width, got 63" in error and "learned" in error


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["'trian'", "did you mean 'train'"]),
        (["train", "--config=smok"], ["--config=smok", "did you mean 'smoke'"]),
        (["train", "--confg=smoke"], ["confg"]),
        (["train", "smoke"], ["'smoke'", "expected only flags"]),
        (["train", "--num_processes=two"], ["num_processes", "two"]),
        (["train", "--num_processes=2"], ["go together: give all three"]),
        (["evaluate"], ["--workdir"]),
        (["translate", "--workdir=nowhere"], ["nowhere", "no config.json"]),
        (["evaluate", "--workdir=nowhere"], ["nowhere", "no config.json"]),
        (["translate", "--workdir=nowhere", "--input=none.txt"], ["none.txt", "No such file"]),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused(command, nothing_left, arguments, parts):
    if arguments[0] == "translate" and len(arguments) == 2:
        arguments = [*arguments, f"--input={os.devnull}"]
    error = command(*arguments)
    assert all(part in error for part in parts), error


def test_a_workdir_that_is_a_file_or_lies_in_one_is_refused(command, nothing_left, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    nothing_left()
    assert str(file) in command("train", "--config=smoke", f"--workdir={file}")
    assert "cannot be written to" in command("train", "--config=smoke", f"--workdir={file}/run")


@pytest.mark.parametrize("workdir", ["/proc/flaxformer_lite", "/sys/flaxformer_lite/run"])
def test_a_workdir_where_nothing_can_be_written_is_refused(command, nothing_left, workdir):
    error = command("train", "--config=smoke", f"--workdir={workdir}")
    assert workdir in error and "cannot be written to" in error


def test_a_workdir_without_permission_is_refused(command, nothing_left, tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    nothing_left()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)  # permissions do not hold for root
    assert f"{closed} cannot be written to" in command("train", "--config=smoke", f"--workdir={closed / 'run'}")


def test_a_workdir_on_a_read_only_file_system_is_refused(command, nothing_left, tmp_path):
    folder, source = tmp_path / "mounted", tmp_path / "source"
    folder.mkdir()
    source.mkdir()
    nothing_left()
    mount = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    script = f"mount --bind {source} {folder}; mount -o remount,ro,bind {folder}; exec "
    words = [*runs.start_command("train", "--config=smoke", f"--workdir={folder}/run")]
    probe = subprocess.run([*mount, script + "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this system lets nobody mount")
    process = subprocess.run([*mount, script + " ".join(words)], capture_output=True, text=True)
    assert process.returncode == 2
    (error,) = runs.error_lines(process.stderr)
    assert f"{folder} cannot be written to" in error


@pytest.fixture(scope="module")
def small_copy(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run without what these tests never look at."""
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("24", "40", "events.*"))
    return copy


@pytest.fixture
def workdir(small_copy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_copy, tmp_path / "run"))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model.d_ff": 96}, ["config.model.d_ff", "128", "96"]),
        ({"train.seed": 1}, ["config.train.seed", "0", "1"]),
        ({"data.tokenizer": "bpe"}, ["config.data.tokenizer", "'unigram'", "'bpe'"]),
        ({"optim.clip_norm": 1.0}, ["config.optim.clip_norm", "None", "1.0"]),
        ({"data.tokens_per_batch": 512, "train.num_steps": 99}, ["config.data.tokens_per_batch", "1024", "512"]),
    ],
    ids=str,
)
def test_the_workdir_of_another_config_is_refused_with_both_values(command, workdir, nothing_left, change, parts):
    nothing_left()
    error = command("train", *runs.flags(change), f"--workdir={workdir}")
    assert all(part in error for part in parts) and str(workdir) in error


def test_the_workdir_of_another_tokenizer_is_refused_by_every_command(command, workdir, nothing_left):
    from flaxformer_lite.data import tokenizer

    texts = [f"{number} kilometers and {number} miles" for number in range(300)]
    tokenizer.train(texts, workdir / "tokenizer.model", vocab_size=300, kind="bpe")
    nothing_left()
    error = command("train", f"--workdir={workdir}", "--config.train.num_steps=99")
    assert "tokenizer.model" in error
    error = command("evaluate", f"--workdir={workdir}")
    assert "tokenizer" in error


def test_a_tokenizer_that_is_none_is_refused_by_its_path(command, workdir, nothing_left):
    (workdir / "tokenizer.model").write_text("not a tokenizer")
    nothing_left()
    for arguments in (["train"], ["evaluate"], ["translate", f"--input={os.devnull}"]):
        error = command(*arguments, f"--workdir={workdir}")
        assert str(workdir / "tokenizer.model") in error and "SentencePiece" in error


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"d_modl": 3}}', '{"model": 3}'])
def test_a_config_file_of_a_run_that_is_none_is_refused_by_its_path(command, workdir, nothing_left, text):
    (workdir / "config.json").write_text(text)
    nothing_left()
    error = command("train", f"--workdir={workdir}")
    assert str(workdir / "config.json") in error


def test_a_checkpoint_folder_with_only_garbage_is_refused(command, workdir, nothing_left):
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").mkdir()
    (workdir / "checkpoints" / "notes.txt").write_text("garbage")
    nothing_left()
    error = command("train", f"--workdir={workdir}")
    assert str(workdir / "checkpoints") in error and "notes.txt" in error
    error = command("evaluate", f"--workdir={workdir}")
    assert str(workdir) in error


def test_a_new_workdir_with_garbage_for_checkpoints_is_refused_and_left_as_it_is(command, tmp_path, nothing_left):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "new" / "checkpoints" / "notes.txt").write_text("garbage")
    nothing_left()
    assert "notes.txt" in command("train", *runs.flags(), f"--workdir={tmp_path / 'new'}")


def test_checkpoints_that_are_all_damaged_are_refused_and_left_as_they_are(command, workdir, nothing_left):
    shutil.rmtree(workdir / "checkpoints" / "48" / "params")
    nothing_left()
    assert str(workdir / "checkpoints" / "48") in command("train", f"--workdir={workdir}")
    assert str(workdir / "checkpoints" / "48") in command("evaluate", f"--workdir={workdir}")


def test_a_split_that_is_none_is_refused_by_evaluate(command, workdir, nothing_left):
    nothing_left()
    error = command("evaluate", f"--workdir={workdir}", "--split=tset")
    assert "no split 'tset'" in error and "validation" in error


def test_input_that_is_not_utf8_is_refused_by_file_and_line(command, workdir, tmp_path, nothing_left):
    file = tmp_path / "latin1.txt"
    file.write_bytes("3 days\n\nin fünf Tagen\n".encode("latin-1"))
    nothing_left()
    output = tmp_path / "out.txt"
    error = command("translate", f"--workdir={workdir}", f"--input={file}", f"--output={output}")
    assert f"{file}, line 3" in error and "UTF-8" in error and "0xfc" in error


def test_a_sentence_longer_than_the_model_takes_is_refused_by_its_line(command, workdir, tmp_path, nothing_left):
    file = tmp_path / "long.txt"
    file.write_text("3 days\n" + "12 kilometers and " * 40 + "\n")
    nothing_left()
    error = command("translate", f"--workdir={workdir}", f"--input={file}", f"--output={tmp_path / 'out.txt'}")
    assert "line 2" in error and "at most 127" in error and "12 kilometers" in error


def test_an_output_that_cannot_be_written_is_refused(command, workdir, tmp_path, nothing_left):
    nothing_left()
    output = tmp_path / "none" / "out.txt"
    assert str(output) in command("translate", f"--workdir={workdir}", f"--input={os.devnull}", f"--output={output}")


@pytest.mark.parametrize("module", [None, "flaxformer_lite"])
def test_a_real_process_says_it_in_one_line_and_exits_with_2(nothing_left, module):
    arguments = [*([] if module is None else ["train"]), "--config=smoke", "--config.model.d_modle=64"]
    process = runs.run(*arguments, module=module)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.splitlines() == runs.error_lines(process.stderr) and process.stderr.count("\n") == 1


def test_a_real_process_that_fails_after_jax_has_started_says_it_in_one_line(nothing_left, tmp_path):
    process = runs.run("train", *runs.flags({"data.test_split": "tset"}), f"--workdir={tmp_path / 'run'}")
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.splitlines() == runs.error_lines(process.stderr) and process.stderr.count("\n") == 1


def test_a_real_process_refuses_standard_input_that_is_not_utf8(small_copy, nothing_left):
    process = runs.run("translate", f"--workdir={small_copy}", input=b"3 days\n\xff\n")
    assert process.returncode == 2 and process.stdout == ""
    assert "standard input, line 2" in process.stderr and process.stderr.count("\n") == 1


def test_no_command_at_all_prints_the_usage_and_exits_with_2():
    process = runs.run()
    assert process.returncode == 2 and process.stdout.startswith("usage: ") and "translate" in process.stdout
    for arguments in (["--help"], ["train", "--help"]):
        process = runs.run(*arguments)
        assert process.returncode == 0 and "usage: " in process.stdout and process.stderr == ""


def test_a_good_command_line_is_not_refused(finished_run):
    """So that what is refused above is refused for its fault."""
    config = json.loads((finished_run / "config.json").read_text())
    assert config["data"]["tokens_per_batch"] == runs.SMALL["data.tokens_per_batch"]
