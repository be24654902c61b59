"""pyproject.toml: version, extras, bounds, the console script."""

import importlib.metadata
import re
import tomllib

import pytest

import flaxformer_lite


@pytest.fixture(scope="module")
def project(repo_root) -> dict:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_version_is_the_same_everywhere(project, repo_root):
    version = flaxformer_lite.__version__
    assert project["version"] == version
    assert importlib.metadata.version("flaxformer-lite") == version
    assert f"## [{version}]" in (repo_root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_extras_exist(project):
    assert project["optional-dependencies"].keys() >= {
        "cuda",
        "tpu",
        "sweep",
        "test",
        "dev",
        "bench",
    }


def test_every_requirement_has_a_lower_bound_and_only_orbax_an_upper_one(project):
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    others = [
        line
        for line in project["dependencies"] + extras
        if not line.startswith(f"{project['name']}[")
    ]
    assert others
    for requirement in others:
        upper = ",<1" if requirement.startswith("orbax-checkpoint") else ""
        assert re.fullmatch(rf"[\w-]+(\[[\w-]+\])?>=\d+(\.\d+)+{upper}", requirement), requirement


def test_the_console_script_calls_the_main_function():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="flaxformer-lite")
    assert script.value == "flaxformer_lite.__main__:main"
    assert callable(script.load())
