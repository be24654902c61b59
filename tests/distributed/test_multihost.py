"""Checks between processes: errors name the process; a dead process ends the others."""

import concurrent.futures
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import runs

import flaxformer_lite
from flaxformer_lite.config import to_dict
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import identity

TRAIN = ["-m", "flaxformer_lite", "train"]
CHANGES = {**runs.TINY, "parallel.data": 1, "parallel.fsdp": 8, "train.keep_newest": 2}


@pytest.fixture
def others_say(monkeypatch):
    """Fakes process 1 of 2, on host b; this process is process 0, on host a."""

    def say(theirs):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(multihost, "gather", lambda mine: [["a", mine[1]], ["b", theirs]])

    return say


def test_equal_values_of_all_processes_are_accepted(others_say):
    others_say({"x": 3})
    multihost.check_same({"x": 3}, "fix it")


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"x": 3, "y": 7}, "y: process 0 on a has 5, process 1 on b has 7; fix it."),
        ({"x": 3}, "y: process 0 on a has 5, process 1 on b has None; fix it."),
        ({"x": 3, "y": 5, "z": 11}, "z: process 0 on a has None, process 1 on b has 11; fix it."),
    ],
)
def test_an_error_names_the_process_that_differs_and_both_values(others_say, theirs, message):
    others_say(theirs)
    with pytest.raises(ValueError) as refused:
        multihost.check_same({"x": 3, "y": 5}, "fix it")
    assert str(refused.value) == message


def test_an_error_of_one_process_is_raised_in_all_with_its_name(others_say):
    others_say("no such dataset.")
    with pytest.raises(ValueError, match=r"^process 1 on b: no such dataset\.$"):
        multihost.together(lambda: 3)

    def refuse():
        raise InputError("too long.")

    others_say(None)
    assert multihost.together(lambda: 3) == 3
    with pytest.raises(ValueError, match=r"^process 0 on a: too long\.$"):
        multihost.together(refuse)


def test_a_bug_keeps_its_type_in_its_process_and_stops_the_others(others_say):
    def fail():
        raise ValueError("invalid literal for int()")

    others_say(None)
    with pytest.raises(ValueError, match=r"^invalid literal") as raised:
        multihost.together(fail)
    assert type(raised.value) is ValueError
    others_say("invalid literal for int()")
    with pytest.raises(multihost.Refused, match=r"^process 1 on b: invalid literal"):
        multihost.together(lambda: 3)


def test_nested_errors_name_the_process_once(others_say):
    others_say("no such dataset.")
    with pytest.raises(multihost.Refused, match=r"^process 1 on b: no such dataset\.$"):
        multihost.together(lambda: multihost.together(lambda: 3))


def test_an_error_of_process_0_alone_is_raised_in_all(others_say):
    others_say(None)
    with pytest.raises(
        multihost.Refused, match=r"^process 0 on a: \[Errno 28\] No space left: 'ids'$"
    ):
        multihost.by_process_0(lambda: (_ for _ in ()).throw(OSError(28, "No space left", "ids")))


def test_errors_name_different_data_tokenizers_and_versions(others_say):
    data = SimpleNamespace(tokenizer=SimpleNamespace(fingerprint="t"), fingerprint="mine")
    dataset, config = SimpleNamespace(contents={"a.en": "f"}), runs.small_config()
    for name, theirs in (("tokenizer", "other"), ("data", "other"), ("a.en", "other")):
        others_say({"tokenizer": "t", "data": "mine", "a.en": "f"} | {name: theirs})
        with pytest.raises(
            ValueError,
            match=rf"^{name}: process 0 on a has '.*', process 1 on b has 'other'; give every",
        ):
            identity.of(data, dataset, config)
    known = {
        f"config.{s}.{n}": v for s, values in to_dict(config).items() for n, v in values.items()
    }
    others_say(known | {"flaxformer_lite": flaxformer_lite.__version__, "jax": "0.0.1"})
    with pytest.raises(
        ValueError,
        match=rf"^jax: process 0 on a has '{jax.__version__}', process 1 on b has '0\.0\.1'",
    ):
        multihost.check_config(config)


def test_a_single_process_passes_all_checks(tmp_path):
    assert multihost.gather([2, "x"]) == [[2, "x"]]
    multihost.check_config(runs.small_config())
    multihost.check_workdir(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):
        multihost.together(lambda: 1 / 0)


def ended(processes: list[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Waits for the processes; returns the exit code and standard error of each."""
    try:
        # In parallel, as a process with a full pipe waits.
        with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
            errors = list(
                pool.map(lambda process: process.communicate(timeout=seconds)[1], processes)
            )
        return [
            (process.returncode, err.decode())
            for process, err in zip(processes, errors, strict=True)
        ]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def start(*arguments: str, **options) -> list[subprocess.Popen]:
    """Starts 2 processes of a run."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return runs.processes(2, *runs.flags(CHANGES), *arguments, script=TRAIN, **pipes, **options)


@pytest.mark.slow
def test_different_configs_of_two_processes_are_an_error_with_field_and_host(tmp_path):
    own = [["--config.optim.learning_rate=0.25"], ["--config.optim.learning_rate=0.5"]]
    processes = start(f"--workdir={tmp_path / 'run'}", own=own)
    for code, err in ended(processes, seconds=120):
        assert code == 2
        (line,) = runs.error_lines(err)
        assert (
            "config.optim.learning_rate: process 0 on " in line
            and "has 0.25, process 1 on " in line
        )
        assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_that_do_not_share_a_folder_fail_within_half_a_minute(tmp_path):
    own = [[f"--workdir={tmp_path / name}"] for name in ("mine", "yours")]
    processes = start(own=own)
    for code, err in ended(processes, seconds=120):
        assert code == 2
        (line,) = runs.error_lines(err)
        assert (
            "process 1 on " in line
            and "does not see what process 0 on " in line
            and "--workdir=" in line
        )
    assert not (tmp_path / "mine").exists() and not (tmp_path / "yours").exists()


def step_of(workdir: Path) -> int:
    """Returns the last logged step; 0 if there is no log yet."""
    return runs.last_step(workdir) if (workdir / "metrics.jsonl").exists() else 0


FORTY = ["--config.train.num_steps=40", "--config.train.eval_every=20"]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of 2 processes without interruption."""
    workdir = tmp_path_factory.mktemp("never_killed") / "run"
    assert [code for code, _ in ended(start(f"--workdir={workdir}", *FORTY), seconds=300)] == [0, 0]
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_with_a_message_and_the_run_resumes_exactly(
    victim, never_killed, tmp_path
):
    """The other ends within a minute, and the losses of the resumed run are the same."""
    killed = tmp_path / "killed"
    processes = start(f"--workdir={killed}", *FORTY)
    runs.wait_until(lambda: step_of(killed) >= 11, processes[0], seconds=300)
    processes[victim].send_signal(signal.SIGKILL)
    ((code, err),) = ended([processes[1 - victim]], seconds=60)
    processes[victim].communicate()
    assert code not in (0, 143, 130)
    assert "most likely another process of this run has ended" in err or "another task died" in err
    assert 11 <= step_of(killed) < 40
    assert [code for code, _ in ended(start(f"--workdir={killed}", *FORTY), seconds=300)] == [0, 0]
    assert runs.losses(killed) == runs.losses(never_killed)


@pytest.mark.slow
def test_a_wrong_tokenizer_found_by_process_0_ends_both_with_the_reason(never_killed, tmp_path):
    """As of a run that was killed before its first checkpoint, with texts that changed since."""
    workdir, config = shutil.copytree(never_killed, tmp_path / "run"), runs.small_config(CHANGES)
    shutil.rmtree(workdir / "checkpoints")
    other = pipeline.open_dataset(config).read("train[300:1500]").texts()
    kind, size = config.data.tokenizer, config.data.vocab_size
    (workdir / "tokenizer.model").write_bytes(tokenizer.trained(other, vocab_size=size, kind=kind))
    for code, err in ended(start(f"--workdir={workdir}", *FORTY), seconds=120):
        assert code == 2
        (line,) = runs.error_lines(err)
        assert line.startswith("error: process 0 on ") and line.count("process 0 on ") == 1
        assert "tokenizer.model: differs from the tokenizer that the text of 'train[:300]'" in line


@pytest.mark.slow
def test_a_checkpoint_that_one_process_cannot_read_is_skipped_by_both(never_killed, tmp_path):
    """Each process reads its shards, and only one shard is damaged."""
    damaged = shutil.copytree(never_killed, tmp_path / "damaged")
    (folder,) = (damaged / "checkpoints" / "40" / "params").glob("ocdbt.process_1/d")
    for part in folder.iterdir():
        part.write_bytes(bytes(byte ^ 1 for byte in part.read_bytes()))
    for code, err in ended(start(f"--workdir={damaged}", *FORTY), seconds=300):
        assert code == 0, err
        (warning,) = [line for line in err.splitlines() if line.startswith("WARNING: ")]
        assert "process 1 on " in warning and "/checkpoints/40: damaged checkpoint: " in warning
        assert warning.endswith("it is renamed to end in .damaged, and step 32 is used.")
    assert {entry.name for entry in (damaged / "checkpoints").iterdir()} == {
        "20",
        "32",
        "40",
        "40.damaged",
    }
    assert runs.losses(damaged) == runs.losses(never_killed)


@pytest.mark.slow
def test_two_processes_start_from_another_run_as_one_process_does(never_killed, tmp_path):
    changes = {"train.num_steps": 4, "train.eval_every": 4, "init.run": str(never_killed)}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    two, one = tmp_path / "two", tmp_path / "one"
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # as users run them
    processes = start(f"--workdir={two}", *flags, env=optimized)
    assert [code for code, _ in ended(processes, seconds=300)] == [0, 0]
    assert runs.fit(one, {**CHANGES, **changes}) == 0
    assert runs.losses(two) == pytest.approx(runs.losses(one), rel=1e-5)
    assert (two / "init.json").read_bytes() == (one / "init.json").read_bytes()
    assert runs.losses(two)[1] < runs.losses(never_killed)[1]
