"""Bad input ends with one line that says what was expected, exit code 2, and nothing left behind."""

import os
import shutil
import sys

import pytest
import runs

from flaxformer_lite import __main__, runtime

NO_WORKDIR = "--workdir=never_made"


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Runs a command in this process, in an empty folder, and returns its one message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runtime, "start", lambda: None)  # a process of its own would; here it would change the tests'
    monkeypatch.setattr(__main__, "exit_now", sys.exit)  # the real one ends the process without a word to Python

    def run(*arguments: str) -> str:
        before = runs.files_below(tmp_path)
        with pytest.raises(SystemExit) as ended:
            __main__.main(list(arguments))
        out, err = capfd.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert len(runs.error_lines(err)) == 1, err
        assert runs.files_below(tmp_path) == before
        return runs.error_lines(err)[0]

    return run


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.model.num_head=4", "config.model.num_head: there is no such field; did you mean 'num_heads'"),
        ("--config.modle.num_heads=4", "config.modle: there is no such field; did you mean 'model'"),
        ("--config.model.d_model=wide", "config.model.d_model: expected int, got 'wide'"),
        ("--config.train.label_smoothing=1.5", "config.train.label_smoothing: expected at least 0 and less than 1"),
        ("--config.model.num_heads=7", "config.model.num_heads: 7 heads do not divide d_model = 64"),
        ("--config.model.position=sinusodal", "config.model.position: 'sinusodal' is not a choice; did you mean"),
        ("--config.parallel.data=9", "config.parallel.data: 9 devices asked for, there are 8"),
        ("--config.data.dataset=cldr_translate/en-xx", "config.data.dataset: cannot open 'cldr_translate/en-xx'"),
        ("--config.data.dataset=no_such_thing", "config.data.dataset: cannot open 'no_such_thing'"),
        ("--config.data.train_split=trian", "config.data: cldr_translate/en-de has no split 'trian'; it has train"),
        ("--config.data.source_language=fr", "config.data.source_language: cldr_translate/en-de has en and de"),
        ("--config.data.vocab_size=60000", "config.data.vocab_size: no tokenizer of 60000 pieces fits this text"),
        ("--config.data.vocab_size=many", "config.data.vocab_size: expected int, got 'many'"),
        ("--no_such_flag=1", "no_such_flag"),
        ("--config=no_such_config", "--config=no_such_config: no such file and no shipped config"),
        ("surplus", "'surplus': expected only flags"),
    ],
)
def test_a_wrong_flag_of_train_is_refused_by_name(refused, flag, words):
    assert words in refused("train", *runs.flags(), NO_WORKDIR, flag)


def test_a_batch_that_the_devices_cannot_share_is_refused(refused):
    message = refused("train", *runs.flags({"parallel.data": 8, "data.rows_multiple": 12}), NO_WORKDIR)
    assert "config.data.rows_multiple: 12 rows cannot be split evenly over 8 devices" in message


def test_an_odd_width_is_refused_with_sinusoidal_positions_and_says_what_to_do(refused):
    message = refused("train", *runs.flags(), NO_WORKDIR, "--config.model.d_model=63", "--config.model.num_heads=7")
    assert "config.model.d_model: sinusoidal positions" in message
    assert "make it even, or use model.position='learned'" in message


def test_a_config_file_that_fails_is_named_with_its_line(refused, tmp_path):
    (tmp_path / "mine.py").write_text("def get_config():\n    return 1 / 0\n")
    assert "mine.py:2: ZeroDivisionError" in refused("train", "--config=mine.py", NO_WORKDIR)


def test_a_workdir_that_is_a_file_is_refused(refused, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "--workdir=taken: expected a folder, but it is a file" in refused("train", *runs.flags(), "--workdir=taken")


def test_a_workdir_below_a_file_is_refused(refused, tmp_path):
    (tmp_path / "taken").write_text("mine")
    assert "cannot be written to" in refused("train", *runs.flags(), "--workdir=taken/run")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc takes no new folder from anybody; other systems have none")
def test_a_workdir_that_cannot_be_written_is_refused(refused):
    assert "--workdir=/proc/run" in refused("train", *runs.flags(), "--workdir=/proc/run")


def test_the_workdir_of_another_config_is_refused_with_both_values(refused, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    message = refused("train", *runs.flags(), "--workdir=run", "--config.model.dropout=0.25")
    assert "config.model.dropout: the run in run has 0.1, and this start asks for 0.25" in message


def test_a_workdir_with_another_tokenizer_is_refused(refused, finished_run, tmp_path):
    from flaxformer_lite.data import tokenizer

    shutil.copytree(finished_run, tmp_path / "run")
    texts = [f"{word} {number}" for number in range(300) for word in ("alpha", "beta", "gamma", "delta")]
    path = tmp_path / "run" / "tokenizer.model"
    path.unlink()
    tokenizer.train(texts, path, vocab_size=300, kind="bpe")
    assert "tokenizer" in refused("train", *runs.flags({"train.num_steps": 60}), "--workdir=run")
    path.unlink()
    tokenizer.train(texts[::-1] + ["another"] * 50, path, vocab_size=300, kind="bpe")
    assert "tokenizer" in refused("translate", "--workdir=run")


def test_a_checkpoint_folder_with_garbage_in_it_is_refused_and_left_as_it_is(refused, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints" / "24").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "24" / "notes.txt").write_text("garbage")
    message = refused("train", *runs.flags(), "--workdir=run")
    assert "checkpoints/24: damaged checkpoint" in message
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "24")
    (tmp_path / "run" / "checkpoints" / "notes.txt").write_text("garbage")
    assert "expected checkpoints, found only notes.txt" in refused("train", *runs.flags(), "--workdir=run")


def test_input_that_is_not_utf8_is_named_by_file_and_line(refused, finished_run, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("one\nzwei\nk\xe4se\n".encode("latin-1"))
    message = refused("translate", f"--workdir={finished_run}", "--input=latin1.txt", "--output=out.txt")
    assert "latin1.txt, line 3: expected UTF-8, got byte 0xe4 at column 2" in message


def test_a_sentence_that_the_model_cannot_take_is_refused_by_its_line(refused, finished_run, tmp_path):
    (tmp_path / "in.txt").write_text("one\n" + "1 " * 200 + "\n")
    message = refused("translate", f"--workdir={finished_run}", "--input=in.txt", "--output=out.txt")
    assert "line 2: " in message
    assert "the model takes at most 127" in message


def test_an_input_or_output_that_cannot_be_opened_is_named(refused, finished_run, tmp_path):
    (tmp_path / "in.txt").write_text("one\n")
    assert "--input=none.txt" in refused("translate", f"--workdir={finished_run}", "--input=none.txt")
    message = refused("translate", f"--workdir={finished_run}", "--input=in.txt", "--output=no/such/folder/out.txt")
    assert "--output=no/such/folder/out.txt" in message


@pytest.mark.parametrize("command", ["translate", "evaluate"])
def test_a_workdir_without_a_run_is_refused(refused, command, tmp_path):
    assert "--workdir: expected the folder of a run" in refused(command)
    (tmp_path / "empty").mkdir()
    assert "empty: expected the workdir of a run, but it has no config.json" in refused(command, "--workdir=empty")


def test_a_run_without_a_checkpoint_yet_is_refused(refused, finished_run, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(finished_run / name, tmp_path / "run" / name)
    assert "there is no checkpoint yet" in refused("translate", "--workdir=run")


def test_an_unknown_split_of_evaluate_is_refused(refused, finished_run):
    assert "no split 'dev'" in refused("evaluate", f"--workdir={finished_run}", "--split=dev")


def test_an_unknown_command_names_the_nearest(refused):
    assert "'trian': no such command; did you mean 'train'" in refused("trian")


def test_a_real_process_says_the_same_and_exits_with_2(tmp_path):
    process = runs.run(*runs.flags(), "--config.model.num_heads=7", f"--workdir={tmp_path / 'run'}", module=None)
    assert process.returncode == 2
    assert process.stderr.startswith("error: config.model.num_heads: 7 heads do not divide d_model = 64")
    assert process.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
