"""What holds for every test: 8 fake CPU devices, folders of its own, strict shapes.

The environment is set before jax is imported, and the processes that a test starts inherit it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

_FOLDER = tempfile.mkdtemp(prefix="flaxformer_lite_tests_")
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# One for each process of the tests, as JAX writes an entry in place, and another process could read half of it. What
# takes a tenth of a second to compile is in it: many tests make the same program.
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{_FOLDER}/compile_cache")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE + os.environ.get("PYTEST_XDIST_WORKER", "")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TFDS_DATA_DIR", f"{_FOLDER}/tfds")

import jax  # noqa: E402  (the environment above must come first)

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """For programs that run a few times on a few numbers: they are compiled without optimisation, in half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A copy of the workdir that the first process of the tests which needs it makes by `make`; others wait for it."""
    from flaxformer_lite.system import storage

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{name}_once"
    folder.mkdir(exist_ok=True)
    with storage.locked(folder / "lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder / "run", ignore_errors=True)  # what one that failed has left
            make(folder / "run")
            (folder / "made").write_text(str(folder / "run"))  # last, and where it was
    # What one process writes into it, such as an evaluation, no other one sees.
    return shutil.copytree(folder, own / name) / "run"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small translator that was never stopped; tests read it and leave it as it is."""
    import runs

    def make(workdir: Path) -> None:
        process = runs.run(*runs.flags(), f"--workdir={workdir}", module=None)
        assert process.returncode == 0, process.stderr
        (workdir.parent / "stderr.txt").write_text(process.stderr, encoding="utf-8")

    return made_once(tmp_path_factory, "finished", make)


def fitted(tmp_path_factory: pytest.TempPathFactory, name: str, changes: dict[str, object]) -> Path:
    """As `finished_run`, of another shape."""
    import runs

    def make(workdir: Path) -> None:
        assert runs.fit(workdir, changes) == 0

    return made_once(tmp_path_factory, name, make)


@pytest.fixture(scope="session")
def finished_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small classifier, as `finished_run`."""
    import runs

    return fitted(tmp_path_factory, "classifier", runs.CLASSIFIER)


@pytest.fixture(scope="session")
def finished_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small language model, as `finished_run`."""
    import runs

    return fitted(tmp_path_factory, "language_model", runs.LANGUAGE_MODEL)
