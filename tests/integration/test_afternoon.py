"""The tutorial's example of a new position scheme, applied to a copy, tested and trained."""

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
SUPPORT = Path(__file__).parent.parent / "support"
DIFF = (SUPPORT / "add_a_position_scheme.diff").read_text(encoding="utf-8")
PAGE = "docs/tutorials/position_scheme.md"


def changed_files() -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", DIFF, re.MULTILINE)


def run_in(folder: Path, *words: str) -> str:
    """Runs Python on the copy in `folder`; returns its standard output."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def changed_copy(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the checkout with the new scheme."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed; it applies the diff")
    folder = tmp_path_factory.mktemp("afternoon") / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("flaxformer_lite", "configs", "tests"):
        shutil.copytree(repo_root / name, folder / name, ignore=ignored)
    shutil.copy(repo_root / "pyproject.toml", folder)
    # git must not find a repository above the folder
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=folder, env=env, input=DIFF, capture_output=True, text=True
    )
    assert applied.returncode == 0, (
        "tests/support/add_a_position_scheme.diff: does not apply; update it, and what "
        f"{PAGE} says about it: {applied.stderr}"
    )
    imported = run_in(folder, "-c", "import flaxformer_lite as f; print(f.__file__)")
    assert imported.startswith(str(folder))
    return folder


def test_a_new_scheme_changes_three_files_in_at_most_forty_lines():
    assert SCHEME not in CHOICES["model.position"]
    files = [
        "flaxformer_lite/field_rules.py",
        "flaxformer_lite/model/positions.py",
        "tests/unit/test_positions.py",
    ]
    assert sorted(changed_files()) == files
    assert 0 < len(re.findall(r"^\+(?!\+\+ )", DIFF, re.MULTILINE)) <= 40


def test_the_tutorial_includes_the_whole_diff(repo_root):
    page = repo_root / PAGE
    block = r"^```\{literalinclude\} (\S+)\n:language: diff\n```$"  # no option that cuts the file
    included = re.findall(block, page.read_text(encoding="utf-8"), re.MULTILINE)
    files = [(page.parent / path).resolve() for path in included]
    assert files == [(SUPPORT / "add_a_position_scheme.diff").resolve()], (
        f"{PAGE}: expected one literalinclude, of the whole diff, got {included}"
    )


def test_the_tutorial_runs_the_function_of_the_diff(repo_root):
    """The page executes a copy, as the package does not have the new scheme."""
    added = "\n".join(re.findall(r"^\+(?!\+\+ )(.*)$", DIFF, re.MULTILINE))
    function = re.search(rf"^def {SCHEME}\(.*?(?=\n\n\n)", added, re.MULTILINE | re.DOTALL)[0]
    page = (repo_root / PAGE).read_text(encoding="utf-8")
    assert f"{function}\n```" in page, f"{PAGE}: expected a code cell that ends with:\n{function}"


@pytest.mark.slow
def test_the_tests_of_all_schemes_include_the_new_one_and_pass(changed_copy):
    """They cover its definition, packed rows, causality, and decoding with a cache."""
    files = [f"tests/unit/test_{name}.py" for name in ("positions", "shapes", "decoding")]
    words = ["-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", "-k", SCHEME]
    # The cases of a new scheme may be in the slow suite.
    output = run_in(changed_copy, *words, "-m", "not compilers", *files)
    passed = re.findall(r"^tests/unit/test_(\w+)\.py::(\w+).* PASSED", output, re.MULTILINE)
    assert {file for file, _ in passed} == {"positions", "shapes", "decoding"}
    own = {name for file, name in passed if file == "positions" and SCHEME in name}
    assert len(own) == 1 and len(passed) > 10


@pytest.mark.slow
def test_the_new_scheme_trains_and_translates(changed_copy, tmp_path):
    changes = {
        **runs.TINY,
        "model.position": SCHEME,
        "train.num_steps": STEPS,
        "train.decode_examples": 3,
    }
    # this checkout, without the diff
    with pytest.raises(ValueError, match=f"'{SCHEME}' is not a choice"):
        runs.small_config(changes)
    words = ["-m", "flaxformer_lite", "train", *runs.flags(changes)]
    run_in(changed_copy, *words, f"--workdir={tmp_path / 'run'}")
    losses = runs.losses(tmp_path / "run")
    assert list(losses) == list(range(1, STEPS + 1))
    assert sum(list(losses.values())[-5:]) < sum(list(losses.values())[:5])
    samples = (tmp_path / "run" / "samples" / f"{STEPS}.txt").read_text(encoding="utf-8")
    assert samples.count("translation  ") == 3
