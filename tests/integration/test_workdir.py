"""The folder of a run: written atomically, locked, and protected against another config."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import threading
from pathlib import Path

import pytest
import runs

from flaxformer_lite import train
from flaxformer_lite.config import (
    MAY_DIFFER_ON_RESUME,
    Config,
    DataConfig,
    ModelConfig,
    differences,
    to_dict,
)
from flaxformer_lite.lines import line_job, line_windows
from flaxformer_lite.runs import snapshot, workdir
from flaxformer_lite.runs.metrics_log import MetricsWriter
from flaxformer_lite.system import storage
from flaxformer_lite.system.errors import InputError


def changed(section: str, **fields) -> Config:
    config = Config()
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **fields)}
    )


def test_the_saved_config_is_read_back(tmp_path):
    config = changed("model", d_model=34, num_heads=2, d_head=17)
    paths = workdir.create(tmp_path / "a" / "run", config)
    assert workdir.read_config(tmp_path / "a" / "run") == config
    assert json.loads(paths.config.read_text()) == json.loads(json.dumps(to_dict(config)))
    assert sorted(path.name for path in paths.path.iterdir()) == ["config.json", "samples"]


def test_a_folder_with_the_name_of_a_sample_is_a_warning_so_that_no_steps_are_lost(
    tmp_path, caplog
):
    paths = workdir.create(tmp_path, Config())
    (paths.samples / "8.txt").mkdir(parents=True)
    paths.write_sample("8.txt", "a text")
    assert "8.txt: cannot be written: a folder has this name; move it away" in caplog.text
    assert runs.files_below(paths.samples) == {"8.txt": b""}  # no partial file


def test_a_csv_of_a_run_from_before_tables_were_read_is_still_plain_lines(tmp_path):
    file, run = tmp_path / "a.csv", tmp_path / "run"
    file.write_text('"one, two"\nthree\n')
    data = DataConfig(dataset="plain_text", train_files=(str(file),), validation_split="train[:1]")
    config = Config(model=ModelConfig(architecture="decoder_lm"), data=data)
    with pytest.raises(InputError, match=r"a\.csv:1: expected commas between the columns"):
        train.check(config, run)[2].prepare()
    paths = workdir.create(run, config)
    saved = json.loads(paths.config.read_text())
    for name in ("header", "quoted", "normalization"):
        del saved["data"][name]
    paths.config.write_text(json.dumps(saved))
    found, _, dataset, _ = train.check(config, run)
    dataset.prepare()
    assert found == workdir.read_config(run) and found.data.quoted is False
    assert dataset.read("train").target == ['"one, two"', "three"]


def test_check_creates_nothing(tmp_path):
    workdir.check(tmp_path / "new" / "run", Config())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "tokenizer.model"])
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name}: expected a file, but it is a folder; remove"):
        workdir.check(tmp_path, Config())


@pytest.mark.parametrize("name", ["checkpoints", "samples"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name}: expected a folder, but it is a file; remove"):
        workdir.check(tmp_path, Config())


def test_a_second_start_with_the_same_config_is_accepted(tmp_path):
    workdir.create(tmp_path, Config())
    workdir.check(tmp_path, Config())


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("parallel", {"mode": "pmap"}),
        ("train", {"num_steps": 7}),
        ("train", {"patience": 3}),
        ("decode", {"max_extra_length": 9}),
    ],
)
def test_a_second_start_may_change_settings_that_do_not_affect_the_steps(tmp_path, section, fields):
    new = changed(section, **fields)
    assert len(differences(Config(), new)) == 1
    assert f"{section}.{next(iter(fields))}".startswith(MAY_DIFFER_ON_RESUME)
    workdir.create(tmp_path, Config())
    workdir.check(tmp_path, new)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("model", {"dropout": 0.25}),
        ("data", {"seed": 5}),
        ("optim", {"b2": 0.9}),
        ("train", {"best_metric": "bleu"}),
    ],
)
def test_any_other_change_is_an_error_with_the_field_and_both_values(tmp_path, section, fields):
    workdir.create(tmp_path, Config())
    name, value = next(iter(fields.items()))
    old_value = getattr(getattr(Config(), section), name)
    words = f"config.{section}.{name}: the run in {tmp_path} has {old_value!r}, .* {value!r}"
    with pytest.raises(ValueError, match=words):
        workdir.check(tmp_path, changed(section, **fields))


def test_an_error_names_a_config_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"d_model": 5')
    with pytest.raises(
        ValueError, match=re.escape(f"{tmp_path / 'config.json'}: cannot be read as a config")
    ):
        workdir.read_config(tmp_path)


def test_a_new_folder_is_named_after_its_config():
    assert re.fullmatch(r"runs/base-\d{8}-\d{6}", str(workdir.new_path("base")))


def test_write_whole_replaces_the_old_file_and_leaves_no_other(tmp_path):
    (tmp_path / "a").write_text("old")
    storage.write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("old")

    def half(path, content):
        with path.open("wb") as file:
            file.write(content[:1])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space left"):
        storage.write_whole(tmp_path / "a", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]


def test_a_failed_start_removes_its_files(tmp_path):
    new = tmp_path / "deep" / "run"
    with pytest.raises(ValueError, match="wrong"), snapshot.untouched_if_refused(new):
        workdir.create(new, Config()).tokenizer.write_text("model")
        raise ValueError("wrong")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_second_start_restores_the_run(tmp_path):
    paths = workdir.create(tmp_path, Config())
    paths.metrics.write_text("{}\n")
    paths.tokenizer.write_text("model")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="wrong"), snapshot.untouched_if_refused(tmp_path):
        workdir.create(tmp_path, changed("train", num_steps=7))
        raise ValueError("wrong")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_failure_after_the_first_logged_step_keeps_the_files(tmp_path):
    new = tmp_path / "run"
    with pytest.raises(ValueError, match="late"), snapshot.untouched_if_refused(new):
        workdir.create(new, Config()).metrics.write_text("{}\n")
        raise ValueError("late")
    assert (new / "config.json").exists()


@pytest.mark.parametrize("split", ["validation", "train"])
def test_a_failure_of_a_resumed_run_keeps_its_config_only_after_a_logged_step(tmp_path, split):
    paths = workdir.create(tmp_path, Config())
    paths.metrics.write_text('{"step": 3, "split": "train"}\n{"step": 3, "split": "test"}\n')
    before = paths.metrics.read_bytes()
    with pytest.raises(ValueError, match="late"), snapshot.untouched_if_refused(tmp_path):
        workdir.create(tmp_path, changed("train", num_steps=7))
        writer = MetricsWriter(paths.logs)
        writer.write(4, split, {"loss": 1.0})
        writer.close()
        raise ValueError("late")
    resumed = split == "train"
    assert (workdir.read_config(tmp_path).train.num_steps == 7) == resumed
    assert (paths.metrics.read_bytes() == before) != resumed


def test_a_locked_folder_excludes_another_training_which_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "LOCK_TIMEOUT", 0.3)
    run = tmp_path / "run"
    refused = pytest.raises(
        ValueError, match=rf"^--workdir={run}: another process is training in it; wait for that or"
    )
    with workdir.exclusive(run):
        workdir.create(run, Config()).metrics.write_text("{}\n")
        with refused, workdir.exclusive(run):
            pass
        with workdir.exclusive(tmp_path / "other"):
            pass
    assert {path.name for path in run.iterdir()} == {"config.json", "metrics.jsonl", "samples"}
    monkeypatch.setattr(workdir, "LOCK_TIMEOUT", 60.0)
    first, ended = contextlib.ExitStack(), []
    first.enter_context(workdir.exclusive(run))
    threading.Timer(1.0, lambda: (ended.append(True), first.close())).start()
    with workdir.exclusive(run):
        assert ended


def test_fit_waits_for_another_training_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "LOCK_TIMEOUT", 0.3)
    with workdir.exclusive(tmp_path / "run"):
        with pytest.raises(ValueError, match="another process is training in it"):
            runs.fit(tmp_path / "run", runs.TINY)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    real_open, removed = os.open, []

    def opened(path, *options):
        if not removed:
            removed.append(path)
            path.parent.rmdir()
        return real_open(path, *options)

    monkeypatch.setattr(os, "open", opened)
    with workdir.exclusive(tmp_path / "run"):
        assert removed and (tmp_path / "run").is_dir()


@pytest.mark.parametrize(
    ("number", "continues"), [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.EIO, False)]
)
def test_a_disk_without_locks_is_used_without_and_other_errors_of_locks_are_raised(
    tmp_path, monkeypatch, number, continues
):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "in.txt").write_text("one\n")
    job = line_job.LineJob(tmp_path / "in.txt", tmp_path / "out.txt")
    run, full = tmp_path / "run", "cannot be written to: Input/output"
    with (
        contextlib.nullcontext() if continues else pytest.raises(ValueError, match=full),
        workdir.exclusive(run),
    ):
        assert run.is_dir()
    with (
        contextlib.nullcontext() if continues else pytest.raises(OSError),
        storage.locked(tmp_path / "lock"),
    ):
        pass
    with (
        contextlib.nullcontext()
        if continues
        else pytest.raises(ValueError, match="cannot be written: Input/output")
    ):
        line_job.run(job, lambda window: line_windows.Answer(window.lines), asked=dict)
        assert (tmp_path / "out.txt").read_text() == "one\n"


def test_a_waiting_training_creates_the_folder_again_if_it_is_removed(tmp_path):
    first = contextlib.ExitStack()
    first.enter_context(workdir.exclusive(tmp_path / "deep" / "run"))
    threading.Timer(0.5, first.close).start()
    with workdir.exclusive(tmp_path / "deep" / "run"):
        assert (tmp_path / "deep" / "run").is_dir()
    assert not (tmp_path / "deep" / "run").exists()


def test_an_error_names_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "taken").write_text("mine")
    path = tmp_path / "taken" / "run"
    with (
        pytest.raises(ValueError, match=rf"^--workdir={path}: cannot be written to: "),
        workdir.exclusive(path),
    ):
        pass


def test_an_empty_folder_is_removed_after_the_block(tmp_path):
    with workdir.exclusive(tmp_path / "deep" / "run"):
        assert (tmp_path / "deep" / "run").is_dir()
    assert list(tmp_path.iterdir()) == []
    with workdir.exclusive(tmp_path / "deep" / "run"):
        (tmp_path / "deep" / "run" / "config.json").write_text("{}")
    assert [path.name for path in (tmp_path / "deep" / "run").iterdir()] == ["config.json"]
