"""Settings of all tests: 8 fake CPU devices, temporary folders, strict shapes.

The environment is set before the import of jax; processes that a test starts inherit it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
os.environ["JAX_PLATFORMS"] = "cpu"

_FOLDER = tempfile.mkdtemp(prefix="flaxformer_lite_tests_")
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# A cache for each test process: JAX writes entries in place, so others could read incomplete ones.
# Many tests compile the same program, so programs of 0.1 seconds are cached.
_CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{_FOLDER}/compile_cache")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE + os.environ.get("PYTEST_XDIST_WORKER", "")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TFDS_DATA_DIR", f"{_FOLDER}/tfds")

import jax  # noqa: E402  (the environment above must come first)

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """Compiles without optimization, in half the time, for programs that run a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def kept_programs() -> dict[str, bool]:
    """Whether the jitted functions of a module may keep optimized programs."""
    return {"optimized": False}


@pytest.fixture
def quickly_compiled_if_plain(
    request: pytest.FixtureRequest, kept_programs: dict[str, bool]
) -> None:
    """Compiles a plain test as `quickly_compiled`, and a slow one with all optimizations.

    Users run optimized programs, whose rounding and fusions are others, so they are tested too; the
    plain suite has no time to compile them.
    """
    optimized = request.node.get_closest_marker("slow") is not None
    if kept_programs["optimized"] != optimized:
        jax.clear_caches()  # JAX would use a program again that was compiled for the other kind
        kept_programs["optimized"] = optimized
    if not optimized:
        request.getfixturevalue("quickly_compiled")


@pytest.fixture(params=["plain", pytest.param("optimized", marks=pytest.mark.slow)])
def also_optimized(quickly_compiled_if_plain: None) -> None:
    """Runs a test in the slow suite too, with optimized programs."""


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of this repository."""
    return Path(__file__).resolve().parent.parent


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """Returns a copy of a workdir that only the first test process creates, by `make`."""
    from flaxformer_lite.system import storage

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{name}_once"
    folder.mkdir(exist_ok=True)
    with storage.locked(folder / "lock"):
        if not (folder / "made").exists():
            shutil.rmtree(folder / "run", ignore_errors=True)  # of a failed attempt
            make(folder / "run")
            (folder / "made").write_text(str(folder / "run"))  # last, with its path
    # A copy for each process, as tests write into it.
    return shutil.copytree(folder, own / name) / "run"


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small translator, trained without a stop; tests must not change it."""
    import runs

    def make(workdir: Path) -> None:
        process = runs.run(*runs.flags(), f"--workdir={workdir}", module=None)
        assert process.returncode == 0, process.stderr
        (workdir.parent / "stderr.txt").write_text(process.stderr, encoding="utf-8")

    return made_once(tmp_path_factory, "finished", make)


def fitted(tmp_path_factory: pytest.TempPathFactory, name: str, changes: dict[str, object]) -> Path:
    """Returns the workdir of a finished run, trained in this process."""
    import runs

    def make(workdir: Path) -> None:
        # Its bits must not depend on the test that needs it first.
        unoptimized = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        assert runs.fit(workdir, changes) == 0
        jax.config.update("jax_disable_most_optimizations", unoptimized)

    return made_once(tmp_path_factory, name, make)


@pytest.fixture(scope="session")
def finished_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small classifier, see `finished_run`."""
    import runs

    return fitted(tmp_path_factory, "classifier", runs.CLASSIFIER)


@pytest.fixture(scope="session")
def finished_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small language model, see `finished_run`."""
    import runs

    return fitted(tmp_path_factory, "language_model", runs.LANGUAGE_MODEL)
