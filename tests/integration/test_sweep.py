"""Sweeps from the command line: processes that train, fail, are killed and resumed; the report."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import runs
from conftest import made_once
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flaxformer_lite import config_files
from flaxformer_lite.cli import commands, train_flags
from flaxformer_lite.config import resolve
from flaxformer_lite.sweep import process
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.sweep_report import TIMES

HEAD = """
from flaxformer_lite.config import default_config
SWEEP = {"objective": "loss", "columns": ("accuracy",), **OPTIONS}
def get_config():
    config = default_config()
    config.model.update(d_model=16, num_heads=2, d_ff=24, max_length=64)
    config.model.update(num_encoder_layers=1, num_decoder_layers=1)
    config.data.update(train_split="train[:300]", validation_split="validation[:8]")
    config.data.update(test_split="test[:4]")
    config.data.update(buckets=(64,), tokens_per_batch=512, vocab_size=512)
    config.optim.update(schedule="linear", learning_rate=4e-3, warmup_steps=10)
    config.train.update(num_steps=STEPS, log_every=1, eval_every=10, checkpoint_every=5)
    config.train.update(decode_examples=0)
    return config
"""
HEADS = "def points(config):\n    return [{'model.num_heads': heads} for heads in (1, 2, 4)]\n"
CRASHING = (
    "def points(config):\n"
    "    rates = {'low': 1e-3, 'wild': 1e30, 'high': 1e-2}\n"
    "    return [{'optim.learning_rate': rate, 'row': name} for name, rate in rates.items()]\n"
)
SEES_PROCESSES = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
ONE_DEVICE = {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}


def write_sweep(file: Path, points: str, *, steps: int = 20, **options) -> Path:
    file.write_text(HEAD.replace("STEPS", str(steps)).replace("OPTIONS", repr(options)) + points)
    return file


def start(sweep: Path, folder: Path, *arguments: str, **options) -> subprocess.Popen:
    return runs.start(
        "sweep", f"--sweep={sweep}", f"--workdir={folder}", *arguments, env=ONE_DEVICE, **options
    )


def finish(sweep: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return runs.run("sweep", f"--sweep={sweep}", f"--workdir={folder}", *arguments, env=ONE_DEVICE)


def table(folder: Path) -> list[dict[str, str]]:
    """The rows of results.csv without timings."""
    with (folder / "report" / "results.csv").open(newline="") as file:
        return [
            {name: cell for name, cell in row.items() if name not in TIMES}
            for row in csv.DictReader(file)
        ]


def logged(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.glob("points/*/*/metrics.jsonl")}


def trainings_in(folder: Path) -> set[int]:
    """The ids of the processes that train for the sweep in `folder`.

    Between fork and exec a program that a training starts has the command line of the training.
    """
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, IndexError):  # the process has just ended
            words = entry.read_bytes()
            if b"flaxformer_lite.cli.sweep_child" in words and str(folder).encode() in words:
                stat = entry.with_name("stat").read_text()
                parents[int(entry.parent.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    return {pid for pid, parent in parents.items() if parent not in parents}


@pytest.fixture(scope="module")
def crashed_sweep(tmp_path_factory):
    """A finished sweep of three points; one fails in training."""

    def make(folder):
        sweep = write_sweep(folder.parent / "rates.py", CRASHING)
        done = finish(sweep, folder)
        (folder / "out.txt").write_text(done.stdout)
        (folder / "code.txt").write_text(f"{done.returncode}\n{done.stderr}")

    return made_once(tmp_path_factory, "sweep", make)


ONE_INVALID = (
    "def points(config):\n"
    "    return [{'model.num_heads': 1 if n != 7 else 3, 'n': n} for n in range(12)]\n"
)
INVALID_POINT = (
    "point 7 (model.num_heads=3, n=7): config.model.num_heads: 3 heads do not divide d_model = 16"
)


def test_one_invalid_point_of_twelve_is_reported_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "exit_now", sys.exit)
    sweep = write_sweep(tmp_path / "bad.py", ONE_INVALID)
    with pytest.raises(SystemExit) as ended:
        commands.main(["sweep", f"--sweep={sweep}", f"--workdir={tmp_path / 'S'}"])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in errors
    assert INVALID_POINT in errors
    assert not (tmp_path / "S").exists()


@pytest.mark.slow
def test_a_process_reports_one_invalid_point_of_twelve_before_training(tmp_path):
    done = finish(write_sweep(tmp_path / "bad.py", ONE_INVALID), tmp_path / "S")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert INVALID_POINT in done.stderr
    assert not (tmp_path / "S").exists()


@pytest.mark.slow
def test_a_point_that_cannot_be_computed_is_reported_before_training(tmp_path):
    points = (
        "def points(config):\n    return [{'train.average': None}, {'train.best_metric': 'bleu'}]\n"
    )
    done = finish(
        write_sweep(tmp_path / "bad.py", points, objective="accuracy", columns=()), tmp_path / "S"
    )
    assert (
        done.returncode == 2
        and "point 1 (train.best_metric=bleu): config.train.best_metric" in done.stderr
    )


@pytest.mark.slow
def test_a_crash_costs_one_point_and_the_report_has_the_reason(crashed_sweep):
    rows = {row["row"]: row for row in table(crashed_sweep)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "low": "complete",
        "wild": "failed",
        "high": "complete",
    }
    code, *errors = (crashed_sweep / "code.txt").read_text().splitlines()
    assert code == "1" and any(
        "point 1 (optim.learning_rate=1e+30): failed, step " in line for line in errors
    )
    report = (crashed_sweep / "report" / "results.md").read_text()
    assert (
        "- point 1 (optim.learning_rate=1e+30): step " in report
        and "training has diverged" in report
    )
    assert (crashed_sweep / "out.txt").read_text().startswith("| point | row | changes | state |")


@pytest.mark.slow
def test_the_table_agrees_with_the_logs_of_the_runs(crashed_sweep):
    (low,) = (row for row in table(crashed_sweep) if row["row"] == "low")
    lines = runs.lines_of(crashed_sweep / "points" / "0000" / "seed0", "validation")
    best = min(lines, key=lambda line: (line["loss"], -line["step"]))
    assert float(low["loss"]) == best["loss"] and float(low["accuracy"]) == best["accuracy"]
    assert low["best_step"] == str(best["step"]) and low["optim.learning_rate"] == "0.001"
    workdir = crashed_sweep / "points" / "0000" / "seed0"
    arrays = runs.checkpoint_arrays(workdir, 20)
    assert int(low["parameters"]) == sum(
        a.size for name, a in arrays.items() if name.startswith("params")
    )


@pytest.mark.slow
def test_train_accepts_the_file_of_the_best_config(crashed_sweep):
    file = crashed_sweep / "report" / "best.py"
    config = train_flags.parse_train([f"--config={file}"]).config
    best = min(
        (r for r in SweepFolder(crashed_sweep).rows() if r.runs), key=lambda row: row.mean("loss")
    )
    assert config.optim.learning_rate == best.params["optim.learning_rate"]
    assert config == resolve(
        config_files.load_config(crashed_sweep / "points" / f"{best.number:04}" / "config.py")
    )


@pytest.mark.slow
def test_a_finished_sweep_stays_unchanged_and_a_changed_file_is_refused(crashed_sweep, tmp_path):
    sweep, before = write_sweep(tmp_path / "rates.py", CRASHING), logged(crashed_sweep)
    link = tmp_path / "under another name"  # as on another machine
    link.symlink_to(crashed_sweep)
    again = finish(sweep, link)
    assert again.returncode == 1 and logged(crashed_sweep) == before
    journal = JournalStorage(JournalFileBackend(str(crashed_sweep / "journal.log")))
    assert len(optuna.get_all_study_names(journal)) == 1
    changed = finish(write_sweep(tmp_path / "rates.py", CRASHING, steps=30), crashed_sweep)
    assert (
        changed.returncode == 2
        and "base.train.num_steps differs from the sweep in" in changed.stderr
    )
    assert logged(crashed_sweep) == before


@pytest.mark.slow
def test_the_report_needs_only_the_folder(crashed_sweep):
    text = (crashed_sweep / "report" / "results.md").read_text()
    done = runs.run("sweep-report", str(crashed_sweep))
    assert done.returncode == 0 and done.stdout.startswith(text.rstrip())
    assert {path.name for path in (crashed_sweep / "report").iterdir()} >= {
        "runs.csv",
        "best.py",
        "parallel.png",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--sweep: expected a sweep's file"),
        (["--sweep=warmup"], "--workdir: expected a folder for the sweep"),
        (
            ["--sweep=warmpu", "--workdir=S"],
            "no such file and no shipped config; did you mean 'warmup'?",
        ),
        (
            ["--sweep=warmup", "--workdir=S", "--jobs=3", "--gpus=0,1"],
            "--jobs: expected 2, one for each of --gpus",
        ),
        (["--sweep=warmup", "--workdir=S", "--study=x"], "--study: requires --storage"),
        (
            ["--sweep=warmup", "--workdir=S", "--cluster_options=a=1"],
            "--cluster_options: requires --submit",
        ),
        (
            ["--sweep=warmup", "--workdir=S", "--submit=2", "--cluster_options=gpu"],
            "expected name=value",
        ),
        (
            ["--sweep=warmup", "--workdir=S", "--cluster=local"],
            "--cluster: requires --submit=WORKERS",
        ),
        (
            ["--sweep=warmup", "--workdir=S", "--submit=2", "--cluster=cloud"],
            "--cluster: expected slurm or local",
        ),
        (["--sweep=warmup", "--workdir=gs://b/S"], "a sweep cannot be in a bucket"),
    ],
)
def test_a_command_with_missing_or_unused_flags_is_refused(arguments, message):
    from flaxformer_lite.cli import sweep_flags

    with pytest.raises((ValueError, SystemExit)) as caught:
        sweep_flags.parse_sweep(arguments)
    assert message in str(caught.value)


def test_a_folder_with_other_files_is_refused(tmp_path):
    from flaxformer_lite.sweep import space

    (tmp_path / "S").mkdir()
    (tmp_path / "S" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="expected a new folder or that of a sweep"):
        SweepFolder(tmp_path / "S").create_or_join(
            space.load(write_sweep(tmp_path / "a.py", HEADS))
        )
    with pytest.raises(ValueError, match=r"expected the folder of a sweep, but sweep\.json"):
        SweepFolder(tmp_path / "S").rows()


def test_the_reason_of_a_failure_is_the_last_message_or_the_signal(tmp_path):
    log, reason = tmp_path / "log", process.failure_reason
    assert reason(3, log) == f"no output (exit code 3; see {log})"
    log.write_text("step 1\nerror: too large\nsomething else\n")
    assert reason(2, log) == f"too large (exit code 2; see {log})"
    first = log.stat().st_size
    with log.open("a") as file:
        file.write("Traceback\nKeyError: 3\n")
    assert reason(1, log, first) == f"KeyError: 3 (exit code 1; see {log})"
    assert reason(-9, log) == (
        f"killed by SIGKILL, probably because the machine ran out of memory; see {log}"
    )


@pytest.mark.slow
@SEES_PROCESSES
def test_a_sweep_killed_five_times_gives_the_same_table_bit_for_bit(tmp_path):
    sweep = write_sweep(
        tmp_path / "heads.py", HEADS.replace("(1, 2, 4)", "(1, 2)"), steps=40, seeds=(0, 3)
    )
    assert finish(sweep, tmp_path / "undisturbed").returncode == 0
    folder = tmp_path / "killed"
    # A resumed point runs after the waiting ones.
    for number, step in ((0, 3), (1, 12), (0, 17), (1, 24), (0, 31)):
        workdir = folder / "points" / f"{number:04}" / "seed0"
        with start(sweep, folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as sweeping:
            runs.wait_until(lambda: runs.last_step(workdir) >= step, sweeping, seconds=300)  # noqa: B023
            sweeping.send_signal(signal.SIGKILL)
            sweeping.communicate()
        deadline = time.monotonic() + 20
        while trainings_in(folder):
            assert time.monotonic() < deadline, "a training has outlived its sweep"
            time.sleep(0.05)
    last = finish(sweep, folder)
    assert last.returncode == 0, last.stderr
    assert table(folder) == table(tmp_path / "undisturbed")
    assert len({row["loss"] for row in table(folder)}) == 2, "the points do not differ"
    for path, whole in logged(tmp_path / "undisturbed").items():  # and the same losses in every run
        workdir = Path(path.replace("undisturbed", "killed")).parent
        assert runs.losses(workdir) == runs.losses(Path(path).parent) != {}, whole[:0]


@pytest.mark.slow
@SEES_PROCESSES
def test_a_signal_to_the_sweep_saves_its_runs_and_one_to_a_run_restarts_it(tmp_path):
    sweep, folder = write_sweep(tmp_path / "heads.py", HEADS, steps=400), tmp_path / "S"
    workdir = folder / "points" / "0000" / "seed0"
    with start(sweep, folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as sweeping:
        runs.wait_until(lambda: runs.last_step(workdir) >= 7, sweeping, seconds=300)
        (training,) = trainings_in(folder)
        os.kill(training, signal.SIGTERM)
        log = folder / "points" / "0000" / "seed0.log"
        runs.wait_until(lambda: log.read_text().count("stopped after step") == 1, sweeping)
        reached = runs.last_step(workdir)
        runs.wait_until(lambda: runs.last_step(workdir) > reached, sweeping)
        sweeping.send_signal(signal.SIGTERM)
        _, errors = sweeping.communicate(timeout=120)
    assert sweeping.returncode == 143 and b"to resume, run the same command" in errors
    assert log.read_text().count("stopped after step") == 2 and not trainings_in(folder)
    states = [row.state for row in SweepFolder(folder).rows()]
    assert states == ["begun", "waiting", "waiting"], "a run ended by a signal counts as a result"


@pytest.mark.slow
def test_retry_failed_runs_failed_points_once_more(tmp_path):
    sweep, folder = write_sweep(tmp_path / "rates.py", CRASHING), tmp_path / "S"
    assert finish(sweep, folder).returncode == 1
    before, first = logged(folder), table(folder)
    again = finish(sweep, folder, "--retry_failed")
    assert again.returncode == 1 and "point 1 (optim.learning_rate=1e+30): failed" in again.stderr
    assert "point 0" not in again.stderr and table(folder) == first
    changed = [
        Path(path).parent.parent.name
        for path, text in logged(folder).items()
        if text != before[path]
    ]
    assert changed == ["0001"], "other points were run again, or the failed one was not"


@pytest.mark.slow
def test_a_pruned_point_ends_early_and_is_in_the_table(tmp_path):
    points = (
        "def points(config):\n"
        "    rates = {1e-2: 20, 1.1e-2: 20, 1.2e-2: 20, 1.3e-2: 20, 1e-7: 600}\n"
        "    return [{'optim.learning_rate': rate, 'train.num_steps': steps} for rate, steps in "
        "rates.items()]\n"
    )
    done = finish(write_sweep(tmp_path / "rates.py", points, pruner="median"), tmp_path / "S")
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path / "S")
    assert [row["state"] for row in rows] == ["complete"] * 4 + ["pruned"]
    assert int(rows[4]["best_step"]) < 600
    record = json.loads((tmp_path / "S" / "points" / "0004" / "point.json").read_text())
    assert record["reason"] == "after step 10"


@pytest.mark.slow
@SEES_PROCESSES
def test_concurrent_points_have_one_gpu_each(tmp_path):
    sweep, folder = write_sweep(tmp_path / "heads.py", HEADS, steps=60), tmp_path / "S"
    seen = {}
    with start(
        sweep, folder, "--gpus=4,7", stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as sweeping:

        def both():
            pids = trainings_in(folder)
            for pid in pids:
                try:
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                seen[pid] = [word for word in words if word.startswith(b"CUDA_VISIBLE_DEVICES=")]
            # a process that has just started has no environment yet
            return len(pids) == 2 and all(seen.get(pid) for pid in pids)

        runs.wait_until(both, sweeping)
        _, errors = sweeping.communicate(timeout=300)
    assert sweeping.returncode == 0, errors.decode()
    assert {word for (word,) in seen.values()} == {
        b"CUDA_VISIBLE_DEVICES=4",
        b"CUDA_VISIBLE_DEVICES=7",
    }
    assert [row["state"] for row in table(folder)] == ["complete"] * 3


@pytest.mark.slow
def test_workers_started_by_a_scheduler_share_the_points(tmp_path):
    sweep, folder = write_sweep(tmp_path / "heads.py", HEADS, steps=20), tmp_path / "S"
    done = finish(
        sweep, folder, "--submit=2", "--cluster=local", "--cluster_options=timeout_min=10"
    )
    assert done.returncode == 0 and done.stdout.startswith("2 workers: jobs "), done.stderr
    deadline = time.monotonic() + 240
    while not (folder / "report" / "results.csv").exists() or len(table(folder)) < 3:
        assert time.monotonic() < deadline, [
            path.read_text() for path in (folder / "cluster").rglob("*.err")
        ]
        time.sleep(0.5)
    assert [row["state"] for row in table(folder)] == ["complete"] * 3
