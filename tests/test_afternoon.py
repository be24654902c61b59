"""The README's example of a new position scheme, applied to a copy: small, proved by tests, trained and decoding."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from flaxformer_lite.config import CHOICES

SCHEME, STEPS = "log_bias", 20
DIFF = Path(__file__).with_name("add_a_position_scheme.diff").read_text(encoding="utf-8")


def changed_files() -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", DIFF, re.MULTILINE)


def run_in(folder: Path, *words: str) -> str:
    """A Python command on the copy in `folder`; returns its standard output."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def changed_copy(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the new scheme in it."""
    if shutil.which("git") is None:
        pytest.skip("there is no git here to apply the diff with")
    folder = tmp_path_factory.mktemp("afternoon") / "copy"
    for name in ("flaxformer_lite", "configs", "tests"):
        shutil.copytree(repo_root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo_root / "pyproject.toml", folder)
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # what lies above is no concern of git's
    applied = subprocess.run(["git", "apply", "-"], cwd=folder, env=env, input=DIFF, capture_output=True, text=True)
    assert applied.returncode == 0, (
        f"bring tests/add_a_position_scheme.diff and the README up to date: {applied.stderr}"
    )
    assert run_in(folder, "-c", "import flaxformer_lite as f; print(f.__file__)").startswith(str(folder))
    return folder


def test_a_new_scheme_is_a_function_a_branch_a_word_and_a_test():
    assert SCHEME not in CHOICES["model.position"]
    files = ["flaxformer_lite/fields.py", "flaxformer_lite/model/positions.py", "tests/test_positions.py"]
    assert sorted(changed_files()) == files
    assert 0 < len(re.findall(r"^\+(?!\+\+ )", DIFF, re.MULTILINE)) <= 40


def test_the_readme_shows_the_whole_of_it(repo_root):
    assert f"```diff\n{DIFF}```" in (repo_root / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tests_of_all_schemes_take_the_new_one_in_by_its_name_and_hold(changed_copy):
    """Its definition, packed rows, causality, and decoding with a cache as without."""
    files = [f"tests/test_{name}.py" for name in ("positions", "shapes", "generate")]
    words = ["-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-k", SCHEME, *files]
    passed = re.findall(r"^tests/test_(\w+)\.py::(\w+).* PASSED", run_in(changed_copy, *words), re.MULTILINE)
    assert {file for file, _ in passed} == {"positions", "shapes", "generate"}
    own = [name for file, name in passed if file == "positions" and SCHEME in name]
    assert len(own) == 1 and len(passed) > 10


@pytest.mark.slow
def test_the_new_scheme_trains_and_translates(changed_copy, tmp_path):
    changes = {**runs.TINY, "model.position": SCHEME, "train.num_steps": STEPS, "train.decode_examples": 3}
    with pytest.raises(ValueError, match=f"'{SCHEME}' is not a choice"):  # where the diff is not applied
        runs.small_config(changes)
    run_in(changed_copy, "-m", "flaxformer_lite", "train", *runs.flags(changes), f"--workdir={tmp_path / 'run'}")
    losses = runs.losses(tmp_path / "run")
    assert list(losses) == list(range(1, STEPS + 1))
    assert sum(list(losses.values())[-5:]) < sum(list(losses.values())[:5])
    samples = (tmp_path / "run" / "samples" / f"{STEPS}.txt").read_text(encoding="utf-8")
    assert samples.count("translation  ") == 3
