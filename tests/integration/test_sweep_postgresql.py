"""Workers that share a study in a PostgreSQL database: a real server, on loopback."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import runs
from test_sweep import HEADS, SEES_PROCESSES, start, table, trainings_in, write_sweep

from flaxformer_lite.runs import metrics_log
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.study import Study, StudyOptions


def program(name: str) -> str | None:
    """Returns the path of a server program, which Debian does not put on the PATH."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)


class Server:
    """A server with an empty database, at `url`."""

    def __init__(self, folder: Path, user: dict[str, str]):
        self._folder, self._user, self._port = folder, user, runs.free_port()
        self.url = f"postgresql+psycopg://sweeper@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        log, folder = self._folder / "log", self._folder
        where = [
            "-D",
            folder / "data",
            "-p",
            str(self._port),
            "-k",
            folder,
            "-h",
            "127.0.0.1",
            "-c",
            "fsync=off",
        ]
        with log.open("wb") as output:
            options = {"stdout": output, "stderr": output, "cwd": folder, **self._user}
            self._process = subprocess.Popen([program("postgres"), *where], **options)
        deadline = time.monotonic() + 60
        while b"ready to accept connections" not in log.read_bytes():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # ends its sessions too
        self._process.wait(60)


@pytest.fixture(scope="module")
def server():
    if program("initdb") is None or program("postgres") is None:
        pytest.skip("needs PostgreSQL's server: Debian's package postgresql")
    folder = Path(tempfile.mkdtemp(prefix="flaxformer_lite_pg_"))
    user = {"user": "nobody"} if os.getuid() == 0 else {}  # the server refuses to run as root
    if user:
        shutil.chown(folder, "nobody")
    command = [program("initdb"), "-D", folder / "data", "-U", "sweeper", "-A", "trust"]
    made = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=folder, **user
    )
    assert made.returncode == 0, made.stderr.decode()
    started = Server(folder, user)
    started.start()
    try:
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder)


@pytest.fixture
def database(server):
    """The URL of a database."""
    return server.url


@pytest.mark.slow
def test_a_point_is_claimed_once_and_that_of_a_dead_worker_is_run_again(database, tmp_path):
    options = StudyOptions("claims", points=2, storage=database)
    first = Study(tmp_path, options)
    (lock,) = (tmp_path / "workers").iterdir()
    second = Study(tmp_path, options)
    for study in (first, second):
        study.add([{"model.num_heads": 1}, {"model.num_heads": 2}])
    held = first.claim()
    assert (held.point, second.claim().point, first.claim(), second.claim()) == (0, 1, None, None)
    first.close()
    lock.touch()  # present and unlocked, as if the first worker had died
    again = second.claim()
    assert again.point == 0 and not second.ended()
    second.finish(again, "complete", 1.5)
    assert second.states()[0] == ("complete", "")
    second.close()


@pytest.mark.slow
@SEES_PROCESSES
def test_two_workers_never_run_the_same_point_and_that_of_a_killed_one_is_run_again(
    database, tmp_path
):
    sweep = write_sweep(tmp_path / "heads.py", HEADS, steps=120)
    alone, folder = tmp_path / "alone", tmp_path / "S"
    with start(sweep, alone, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as undisturbed:
        _, errors = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, errors.decode()

    joined = f"--storage={database}", "--study=heads"
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    most = 0

    def trained() -> dict[int, str]:
        """Returns the point that each worker trains now; no two train the same."""
        nonlocal most
        points = {}
        for pid in trainings_in(folder):
            with contextlib.suppress(OSError, IndexError):  # the process has just ended
                words = Path(f"/proc/{pid}/cmdline").read_text()
                parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                points[parent] = words.split("--workdir=")[1].split("\0")[0]
        assert len(points) == len(set(points.values())), "two workers train the same point"
        most = max(most, len(points))
        return points

    with start(sweep, folder, *joined, **pipes) as first:
        runs.wait_until(lambda: first.pid in trained(), first)
        with start(sweep, folder, *joined, "--worker", **pipes) as second:

            def half_way() -> bool:
                points = trained()
                return {first.pid, second.pid} <= points.keys() and 10 <= runs.last_step(
                    Path(points[first.pid])
                ) < 90

            runs.wait_until(half_way, first, seconds=400)
            number = int(Path(trained()[first.pid]).parent.name)
            first.send_signal(signal.SIGKILL)
            first.communicate()
            while second.poll() is None:
                trained()
                time.sleep(0.05)
            errors = second.stderr.read().decode()
    assert second.returncode == 0, errors
    assert f"point {number}: its worker is gone; the point is run again" in errors
    assert [row.state for row in SweepFolder(folder).rows()] == ["complete"] * 3
    assert table(folder) == table(alone)
    assert most == 2


@pytest.mark.slow
def test_a_database_that_is_unavailable_for_a_while_costs_no_point(server, tmp_path):
    sweep, folder = write_sweep(tmp_path / "heads.py", HEADS, steps=60), tmp_path / "S"
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with start(sweep, folder, f"--storage={server.url}", "--study=away", **pipes) as sweeping:
        workdir = folder / "points" / "0000" / "seed0"
        runs.wait_until(lambda: runs.last_step(workdir) >= 5, sweeping)

        def ended() -> bool:
            return any(
                line["split"] == "test"
                for line in metrics_log.read_metrics(workdir / "metrics.jsonl")
            )

        server.stop()
        try:
            runs.wait_until(ended, sweeping)
            time.sleep(3)
        finally:
            server.start()
        _, errors = sweeping.communicate(timeout=300)
    assert sweeping.returncode == 0, errors.decode()
    assert errors.count(b"cannot be used for now") == 1 and b"its worker is gone" not in errors
    assert [row.state for row in SweepFolder(folder).rows()] == ["complete"] * 3
