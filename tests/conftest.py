"""What holds for every test: 8 fake CPU devices, folders of its own, strict shapes.

The environment is set before jax is imported, and the processes that a test starts inherit it.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

_FOLDER = tempfile.mkdtemp(prefix="flaxformer_lite_tests_")
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{_FOLDER}/compile_cache")
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


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small translator that was never stopped; tests read it and leave it as it is."""
    import runs

    workdir = tmp_path_factory.mktemp("finished") / "run"
    process = runs.run(*runs.flags(), f"--workdir={workdir}", module=None)
    assert process.returncode == 0, process.stderr
    (workdir.parent / "stderr.txt").write_text(process.stderr, encoding="utf-8")
    return workdir


@pytest.fixture(scope="session")
def finished_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small classifier, as `finished_run`."""
    import runs

    workdir = tmp_path_factory.mktemp("classifier") / "run"
    assert runs.fit(workdir, runs.CLASSIFIER) == 0
    return workdir


@pytest.fixture(scope="session")
def finished_language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a small language model, as `finished_run`."""
    import runs

    workdir = tmp_path_factory.mktemp("language_model") / "run"
    assert runs.fit(workdir, runs.LANGUAGE_MODEL) == 0
    return workdir
