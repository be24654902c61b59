"""A run in a bucket: the real clients of Google Cloud Storage with an emulator on loopback."""

import json
import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import runs
import tensorflow_datasets as tfds
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import create_server

from flaxformer_lite import trained
from flaxformer_lite.cli import run_flags, train_flags
from flaxformer_lite.config import Config
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.runs import metrics_log, snapshot, workdir
from flaxformer_lite.system import storage
from flaxformer_lite.system.storage import place
from flaxformer_lite.training import checkpoint

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The environment of a process that uses the emulator, with an empty bucket and a home."""
    plain_download = objects.download

    def download(request, response, storage, *arguments, **options):
        """Adds the header with the generation of the object, as Google's server does."""
        plain_download(request, response, storage, *arguments, **options)
        if 200 <= response.status < 300:
            names = request.params["bucket_name"], request.params["object_id"]
            response["x-goog-generation"] = storage.get_file_obj(*names)["generation"]

    port, home = runs.free_port(), tmp_path_factory.mktemp("home")
    running = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    running.start()
    address = f"http://127.0.0.1:{port}"
    patched = pytest.MonkeyPatch()
    patched.setattr(objects, "download", download)
    yield {
        "STORAGE_EMULATOR_HOST": address,  # of gcsfs
        "TENSORSTORE_GCS_HTTP_URL": address,  # of Orbax
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # the emulator does not support it
        "HOME": str(home),
    }
    patched.undo()
    running.stop()


@pytest.fixture
def bucket(server, monkeypatch, request):
    """A folder of the bucket for this test."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return place(f"gs://{BUCKET}/{re.sub(r'[^a-z0-9_]', '', request.node.name)}")


def test_a_path_on_disk_is_a_pathlib_path_and_one_in_a_bucket_keeps_its_address():
    assert type(place("a/b")) is type(Path("a/b")) and place("a/b") == Path("a/b")
    assert os.fspath(place("gs://x/y") / "z") == "gs://x/y/z"
    assert (
        os.fspath(place(place("gs://x/y")))
        == os.fspath(storage.absolute(place("gs://x/y")))
        == "gs://x/y"
    )
    assert storage.in_bucket(place("gs://x")) and not storage.in_bucket(Path("gs"))
    assert storage.absolute("a") == Path("a").absolute()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://x/y", "s3://x/y: expected a folder, or gs://BUCKET/FOLDER, got an address of 's3'"),
        (
            Path("gs://x/y"),  # which pathlib shortens
            "gs:/x/y: expected a folder, or gs://BUCKET/FOLDER, got an address of 'gs'",
        ),
        (
            "gs:///y",
            "gs:///y: expected gs://BUCKET/FOLDER, without [ ] * ?, and no folder '.' or '..'",
        ),
        ("gs://x/../y", "gs://x/../y: expected gs://BUCKET/FOLDER, without"),
        ("gs://x/y[1]", "gs://x/y[1]: expected gs://BUCKET/FOLDER, without [ ] * ?"),
    ],
)
def test_an_error_names_another_kind_of_address(address, says):
    with pytest.raises(ValueError) as caught:
        place(address)
    assert says in str(caught.value)


def test_each_folder_of_a_bucket_has_a_separate_folder_on_disk():
    outer, inner = (
        storage.on_disk(place(name), "logs") for name in ("gs://x/runs", "gs://x/runs/a")
    )
    assert inner.parent == outer.parent == Path.home() / ".cache/flaxformer_lite/logs"
    assert storage.on_disk(Path("a"), "logs") == Path("a")


def test_without_the_extra_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"gs://x/y: needs the extra for buckets: pip install 'flaxformer_lite\[gcs\]'",
    ):
        place("gs://x/y")


def test_an_error_names_a_missing_bucket(bucket):
    storage.check_bucket(bucket)
    with pytest.raises(ValueError, match=r"gs://elsewhere/run: there is no bucket 'elsewhere'"):
        workdir.check(place("gs://elsewhere/run"), Config())


def test_an_error_of_the_server_comes_with_advice(bucket, monkeypatch):
    def refuse(path):
        raise PermissionError("401: anonymous caller")

    monkeypatch.setattr(type(bucket), "iterdir", refuse)
    with pytest.raises(
        ValueError, match=r"the bucket 'bucket' cannot be read: 401: anonymous caller; check that"
    ):
        storage.check_bucket(bucket)


def test_a_config_is_read_back_from_a_bucket_and_another_is_an_error(bucket):
    created = workdir.create(bucket, Config())
    assert workdir.read_config(bucket) == Config()
    other = runs.small_config()
    with pytest.raises(ValueError, match=r"config.model.*: the run in gs://bucket/.* has "):
        workdir.check(bucket, other)
    assert [entry.name for entry in created.path.iterdir()] == ["config.json"]


def test_a_failed_start_removes_its_files_from_a_bucket(bucket):
    with pytest.raises(ValueError, match="wrong"), snapshot.untouched_if_refused(bucket):
        workdir.create(bucket, Config())
        raise ValueError("wrong")
    assert not workdir.Workdir(bucket).config.exists()
    assert not workdir.Workdir(bucket).logs.exists()


def test_logs_are_written_on_disk_copied_to_the_bucket_and_fetched_on_another_machine(bucket):
    paths = workdir.create(bucket, Config())
    assert not storage.in_bucket(paths.logs) and paths.logs.is_dir()
    writer = metrics_log.MetricsWriter(paths.logs, publish=paths.publish_logs)
    writer.write(1, "train", {"loss": 2.0})
    assert not paths.metrics.exists()
    writer.flush()
    assert [line["step"] for line in metrics_log.read_metrics(paths.metrics)] == [1]
    writer.write(2, "train", {"loss": 1.0})
    writer.close()
    assert [line["step"] for line in metrics_log.read_metrics(paths.metrics)] == [1, 2]
    assert len(list(bucket.glob("events.*"))) == 1
    shutil.rmtree(paths.logs)
    (paths.logs).mkdir()
    (paths.logs / "metrics.jsonl").write_text("of another run\n")
    workdir.create(bucket, Config())
    assert (paths.logs / "metrics.jsonl").read_bytes() == paths.metrics.read_bytes()
    assert [file.name for file in paths.logs.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_cannot_be_copied_is_kept_with_a_warning(bucket, monkeypatch, caplog):
    paths = workdir.create(bucket, Config())
    (paths.logs / "metrics.jsonl").write_text("{}\n")

    def fail(path, data):
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(bucket), "write_bytes", fail)
    paths.publish_logs()
    assert "metrics.jsonl: not copied from" in caplog.text and "no answer" in caplog.text
    assert (paths.logs / "metrics.jsonl").exists()


def test_lines_that_were_not_copied_are_kept_on_disk_unless_the_bucket_has_others(bucket):
    paths = workdir.create(bucket, Config())
    paths.log.write_text("1\n")
    paths.publish_logs()
    paths.log.write_text("1\n2\n")
    workdir.create(bucket, Config())
    assert paths.log.read_text() == "1\n2\n"
    paths.metrics.write_text("1\n3\n")  # of another machine
    workdir.create(bucket, Config())
    assert paths.log.read_text() == "1\n3\n"


def test_a_sample_that_cannot_be_written_to_a_bucket_is_a_warning(bucket, monkeypatch, caplog):
    paths = workdir.create(bucket, Config())
    monkeypatch.setattr(type(bucket), "write_bytes", lambda path, data: 1 / 0)
    paths.write_sample("8.txt", "a text")
    assert "samples/8.txt: not written: " in caplog.text and "division by zero" in caplog.text
    with pytest.raises(OSError, match="division by zero"):
        storage.write_whole(paths.config, "{}")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_commands_report_a_missing_bucket(bucket, command):
    read = lambda flags: trained.load(run_flags.parse_evaluate(flags).workdir)  # noqa: E731
    parse = {"train": train_flags.parse_train, "evaluate": read}
    with pytest.raises(ValueError, match="gs://elsewhere/run: there is no bucket 'elsewhere'"):
        parse[command](["--workdir=gs://elsewhere/run"])


def test_the_output_of_translate_must_be_on_disk():
    with pytest.raises(ValueError, match=r"--output: expected a file on disk, got gs://x/out\.txt"):
        run_flags.parse_translate(["--workdir=runs/x", "--output=gs://x/out.txt"])


@pytest.mark.slow
def test_checkpoints_in_a_bucket_are_kept_averaged_and_renamed_if_damaged(bucket):
    tree = lambda value: {"params": {"a": jnp.full((3, 5), value), "b": jnp.arange(7.0) * value}}  # noqa: E731
    kept = checkpoint.Checkpoints(bucket / "checkpoints", keep_newest=2)
    for step in (1, 2, 3):
        kept.save(step, tree(float(step)), {"step": step})
        kept.wait()
    assert kept.steps() == [2, 3]
    averaged, _ = kept.restore_average([2, 3], tree(0.0))
    np.testing.assert_array_equal(averaged["params"]["a"], np.full((3, 5), 2.5))
    kept.close()

    for file in (bucket / "checkpoints" / "3" / "params").glob("d/*"):
        file.write_bytes(b"broken")
    again = checkpoint.Checkpoints(bucket / "checkpoints", keep_newest=2)
    parts, record = again.restore_newest(tree(0.0))
    assert record["step"] == 2
    np.testing.assert_array_equal(parts["params"]["a"], np.full((3, 5), 2.0))
    assert sorted(entry.name for entry in (bucket / "checkpoints").iterdir()) == ["2", "3.damaged"]
    again.close()


@pytest.mark.parametrize("next_step", [1, 2])
def test_an_incomplete_first_checkpoint_in_a_bucket_is_removed(bucket, next_step):
    (bucket / "checkpoints" / "1" / "params").mkdir(parents=True, exist_ok=True)
    (bucket / "checkpoints" / "1" / "params" / "part").write_text("half")
    tree = {"params": {"a": jnp.ones(3)}}
    kept = checkpoint.Checkpoints(bucket / "checkpoints")
    assert kept.restore_newest(tree) is None
    kept.save(next_step, tree, {"step": next_step})
    kept.wait()
    assert kept.restore_newest(tree)[1]["step"] == next_step
    assert not (bucket / "checkpoints" / "1" / "params" / "part").exists()
    kept.close()


def test_a_dataset_in_a_bucket_is_copied_once_and_read_from_the_copy(bucket, tmp_path, monkeypatch):
    class Wmt14Translate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en", description="small")]

        def _info(self):
            features, keys = tfds.features.Translation(("de", "en")), ("de", "en")
            options = {"features": features, "supervised_keys": keys, "disable_shuffling": True}
            return tfds.core.DatasetInfo(builder=self, **options)

        def _split_generators(self, manager):
            return {
                "train": enumerate({"de": f"Satz {i}", "en": f"sentence {i}"} for i in range(5))
            }

        def _generate_examples(self):
            raise NotImplementedError  # not called

    Wmt14Translate(
        file_format="array_record", config="de-en", data_dir=tmp_path
    ).download_and_prepare()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            (bucket / file.relative_to(tmp_path)).write_bytes(file.read_bytes())
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", os.fspath(bucket))
    examples = Dataset("wmt14_translate/de-en").read("train")
    assert (examples.source[3], examples.target[3], len(examples.source)) == (
        "Satz 3",
        "sentence 3",
        5,
    )
    with monkeypatch.context() as patched:
        patched.setattr(storage.shutil, "copyfileobj", None)  # nothing is copied again
        assert Dataset("wmt14_translate/de-en").read("train").source == examples.source
    with pytest.raises(
        ValueError,
        match=r"wmt16_translate/de-en': nothing is in gs://bucket/.*/wmt16_translate/de-en",
    ):
        Dataset("wmt16_translate/de-en")
    with pytest.raises(ValueError, match=r"has de-en of it; name one, as in wmt14_translate/de-en"):
        Dataset("wmt14_translate")


@pytest.mark.slow
def test_a_killed_run_in_a_bucket_resumes_and_translates(server, bucket, tmp_path):
    run, on_disk = f"gs://{BUCKET}/run", tmp_path / "run"
    changes = {
        "train.num_steps": 30,
        "train.eval_every": 10,
        "train.checkpoint_every": 5,
        "train.decode_examples": 4,
        "train.log_every": 1,
    }
    flags = runs.flags(changes)
    with runs.started("train", *flags, f"--workdir={run}", env=server) as process:
        logs = (
            Path(server["HOME"]) / ".cache/flaxformer_lite/logs" / f"{BUCKET}%2Frun/metrics.jsonl"
        )
        runs.wait_until(
            lambda: logs.exists() and '"step": 12,' in logs.read_text(), process, seconds=240
        )
        process.kill()
    kept = {entry.name for entry in place(f"{run}/checkpoints").iterdir()}
    assert kept & {"5", "10"}
    shutil.rmtree(Path(server["HOME"]) / ".cache/flaxformer_lite/logs")  # as on another machine
    for folder in (run, on_disk):
        finished = runs.run("train", *flags, f"--workdir={folder}", env=server)
        assert finished.returncode == 0, finished.stderr
    logged = {str(folder): runs.losses(place(folder)) for folder in (run, on_disk)}
    assert logged[run] == logged[str(on_disk)] and list(logged[run]) == list(range(1, 31))
    assert len(list(place(run).glob("events.*"))) == 2  # of 2 starts
    outputs = {}
    for folder in (run, on_disk):
        translated = runs.run(
            "translate", f"--workdir={folder}", input=b"3 June 2024\n12 km\n", env=server
        )
        assert translated.returncode == 0, translated.stderr
        outputs[folder] = translated.stdout
    assert outputs[run] == outputs[on_disk] and outputs[run].strip()
    plotted = runs.run("plot", "metrics", run, env=server)
    assert plotted.returncode == 0, plotted.stderr
    evaluated = runs.run("evaluate", f"--workdir={run}", env=server)
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
def test_two_processes_share_a_run_in_a_bucket_that_one_process_resumes(server, bucket, tmp_path):
    run = f"gs://{BUCKET}/shared"
    changes = {
        **runs.TINY,
        "train.num_steps": 12,
        "train.eval_every": 6,
        "train.checkpoint_every": 6,
    }
    flags = [*runs.flags({**changes, "parallel.data": 8}), f"--workdir={run}"]
    pipes = {"stdout": runs.subprocess.PIPE, "stderr": runs.subprocess.STDOUT}
    processes = runs.processes(
        2, "train", *flags, script=["-m", "flaxformer_lite"], env=server, **pipes
    )
    try:
        output = [process.communicate(timeout=300)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], output
    assert {"6", "12"} <= {entry.name for entry in place(f"{run}/checkpoints").iterdir()}
    assert len(list(place(run).glob("events.*"))) == 1  # of process 0
    longer = {**changes, "train.num_steps": 18}
    resumed = runs.run("train", *runs.flags(longer), f"--workdir={run}", env=server)
    assert resumed.returncode == 0, resumed.stderr
    assert runs.fit(tmp_path / "run", longer) == 0
    assert runs.losses(place(run)) == pytest.approx(runs.losses(tmp_path / "run"), rel=1e-5)
    assert list(runs.losses(place(run))) == list(range(1, 19))
    flags = [*runs.flags(changes), f"--init={run}", f"--workdir={run}-next"]
    started = runs.run("train", *flags, env=server)
    assert started.returncode == 0, started.stderr
    record = json.loads(place(f"{run}-next/init.json").read_text())
    assert (record["run"], record["steps"]) == ("shared", [18])
    first = runs.losses(place(f"{run}-next"))[1]
    assert first < runs.losses(place(run))[6] < runs.losses(place(run))[1]


def test_a_new_folder_appears_complete_or_not_at_all(tmp_path):
    with storage.new_folder(tmp_path / "made/here") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "made/here").exists()
    assert (tmp_path / "made/here/file").read_text() == "whole"
    refused = pytest.raises(
        ValueError, match=f"^{tmp_path}/made/here: expected a name for a new folder"
    )
    with refused, storage.new_folder(tmp_path / "made/here"):
        pass
    with pytest.raises(KeyError), storage.new_folder(tmp_path / "around/other") as folder:
        (folder / "file").write_text("half")
        raise KeyError
    refused = pytest.raises(
        ValueError, match=f"^{tmp_path}/made/here/file/x: cannot be written to: Not a directory"
    )
    with refused, storage.new_folder(tmp_path / "made/here/file/x"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["made"]
