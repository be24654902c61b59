"""Workflows, forms, CITATION.cff, CHANGELOG.md, the Dockerfile and the page on installation agree.

They agree with each other and with pyproject.toml.
"""

import importlib.util
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
import runs
import yaml

import flaxformer_lite

JOBS = {
    "checks": {"lint", "tests"},
    "docs": {"build", "publish"},
    "nightly": {"newest-jax"},
    "release": {"checks", "build", "test", "publish", "release"},
}
# The permissions of jobs beyond reading the repository.
PERMISSIONS = {
    ("docs", "publish"): {"pages": "write", "id-token": "write"},
    ("release", "publish"): {"id-token": "write"},
    ("release", "release"): {"contents": "write"},
}
STATES_VERSION = ("pyproject.toml", "flaxformer_lite/__init__.py", "CITATION.cff", "CHANGELOG.md")
REPORTED = ("versions", "command", "config", "happened", "expected")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff")


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project(repo_root) -> dict:
    return tomllib.loads(text(repo_root / "pyproject.toml"))["project"]


@pytest.fixture(scope="module")
def workflows(repo_root) -> dict[str, dict]:
    files = (repo_root / ".github/workflows").glob("*.yml")
    return {file.stem: yaml.safe_load(text(file)) for file in files}


@pytest.fixture(scope="module")
def release_notes(repo_root):
    spec = importlib.util.spec_from_file_location(
        "release_notes", repo_root / ".github/release_notes.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps(workflow: dict) -> list[dict]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def commands(workflow: dict) -> str:
    return "\n".join(step.get("run", "") for step in steps(workflow))


def documents(root: Path) -> list[Path]:
    """The files that a reader of the repository or the site sees, and the workflows."""
    pages = [path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts]
    found = [*pages, *(root / ".github").rglob("*.*"), *(root / name for name in DOCUMENTS)]
    return [path for path in found if path.suffix in (".md", ".yml", ".cff")]


def test_each_workflow_has_its_jobs(workflows):
    assert {name: set(workflow["jobs"]) for name, workflow in workflows.items()} == JOBS
    for name, workflow in workflows.items():
        for job in workflow["jobs"].values():
            needs = job.get("needs", [])
            assert ({needs} if isinstance(needs, str) else set(needs)) <= JOBS[name]


def test_a_workflow_may_only_read_but_for_the_jobs_that_publish(workflows):
    found = {
        (name, job): content["permissions"]
        for name, workflow in workflows.items()
        for job, content in workflow["jobs"].items()
        if "permissions" in content
    }
    assert found == PERMISSIONS
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in workflows.values())


def test_jobs_have_limits_and_actions_a_major_version(workflows):
    for workflow in workflows.values():
        assert "group" in workflow["concurrency"]
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job or job["uses"].startswith("./.github/workflows/")
        for step in steps(workflow):
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step.get("uses", "a/b@v1"))


def test_workflows_test_the_oldest_and_the_newest_python(workflows, project):
    minors = [
        int(line.rpartition(".")[2])
        for line in project["classifiers"]
        if re.search(r":: 3\.\d+$", line)
    ]
    extremes = [f"3.{min(minors)}", f"3.{max(minors)}"]
    assert project["requires-python"] == f">={extremes[0]}"
    for name, job in (("checks", "tests"), ("release", "test")):
        assert workflows[name]["jobs"][job]["strategy"]["matrix"]["python"] == extremes
    versions = [step.get("with", {}).get("python-version") for step in steps(workflows["docs"])]
    assert extremes[1] in versions


def test_workflows_run_the_commands_of_contributing(workflows, repo_root):
    contributing = text(repo_root / "CONTRIBUTING.md")
    build = "python -m sphinx -W --keep-going -b html docs docs/_build/html"
    assert build in commands(workflows["docs"]) and f".venv/bin/{build}" in contributing
    assert ".ci/run" in commands(workflows["checks"])
    assert "python -m pytest -q" in commands(workflows["nightly"])
    assert "python .github/release_notes.py" in commands(workflows["release"])
    assert "python .github/release_notes.py v" in contributing


def test_every_extra_that_is_installed_somewhere_exists(project, repo_root):
    installed = {
        extra
        for path in documents(repo_root)
        for group in re.findall(r"'(?:\.|flaxformer[-_]lite)\[([\w,-]+)\]'", text(path))
        for extra in group.split(",")
    }
    assert {"cuda", "docs", "types"} <= installed
    assert installed <= project["optional-dependencies"].keys()


def test_the_page_on_installation_lists_every_extra(project, repo_root):
    page = text(repo_root / "docs/install.md")
    table = re.search(r"\| Extra \| Adds \|\n(.*?)\n\n", page, re.DOTALL)[1]
    listed = re.findall(r"^\| `([\w-]+)` \| \S", table, re.MULTILINE)
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_the_address_of_the_repository_is_a_placeholder_in_one_place(project, repo_root):
    assert project["urls"] == {"Repository": "https://github.com/OWNER/flaxformer_lite"}
    for path in documents(repo_root):
        assert "github.com/OWNER" not in text(path), path
        assert "/flaxformer_lite.git" not in text(path), path


def test_all_files_state_the_version(release_notes, repo_root):
    version = flaxformer_lite.__version__
    assert release_notes.stated_versions(repo_root) == dict.fromkeys(STATES_VERSION, version)
    minor = version.rpartition(".")[0]
    assert f"Newest release ({minor})" in text(repo_root / "SECURITY.md")


def copy_of(root: Path, target: Path) -> Path:
    for name in STATES_VERSION:
        (target / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(root / name, target / name)
    return target


def test_release_notes_are_the_section_of_the_tag(release_notes, repo_root):
    version = flaxformer_lite.__version__
    notes = release_notes.notes(f"v{version}", repo_root)
    assert notes and "## [" not in notes
    assert f"\n\n{notes}\n\n## [" in text(repo_root / "CHANGELOG.md")


@pytest.mark.parametrize("name", STATES_VERSION)
def test_a_tag_is_refused_if_a_file_states_another_version(
    release_notes, repo_root, tmp_path, name
):
    root, version = copy_of(repo_root, tmp_path), flaxformer_lite.__version__
    assert release_notes.notes(f"v{version}", root)
    changed = text(root / name).replace(version, "7.7.7", 1)
    (root / name).write_text(changed, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{re.escape(name)} has 7\.7\.7"):
        release_notes.notes(f"v{version}", root)


@pytest.mark.parametrize("tag", ["v7.7.7", flaxformer_lite.__version__, "v"])
def test_a_tag_of_another_version_is_refused(release_notes, repo_root, tag):
    with pytest.raises(ValueError, match=f"^tag {tag}: expected v"):
        release_notes.notes(tag, repo_root)


def test_a_section_without_a_date_or_a_text_is_refused(release_notes):
    dated = "## [1.2.3] - 2026-02-03\n\nA.\n\n## [1.2.2] - 2026-02-01\n\nB.\n"
    assert release_notes.section(dated, "1.2.3") == "A."
    assert release_notes.section(dated, "1.2.2") == "B."
    for wrong in (dated.replace(" - 2026-02-03", ""), dated.replace("A.", "")):
        with pytest.raises(ValueError, match=r"expected text below '## \[1\.2\.3\]"):
            release_notes.section(wrong, "1.2.3")


def test_the_changelog_has_an_unreleased_section_and_dates(repo_root):
    headings = re.findall(r"^## (.*)$", text(repo_root / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    dates = [
        re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", each)[1] for each in headings[1:]
    ]
    assert dates == sorted(dates, reverse=True)
    citation = yaml.safe_load(text(repo_root / "CITATION.cff"))
    assert str(citation["date-released"]) == dates[0]


def test_the_citation_has_what_the_format_requires(project, repo_root):
    citation = yaml.safe_load(text(repo_root / "CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]
    assert citation["authors"] == [{"name": "The flaxformer_lite authors"}]
    assert citation["message"] and "flaxformer_lite" in citation["title"]


def test_forms_have_fields_and_the_bug_report_those_that_are_needed(repo_root):
    folder = repo_root / ".github/ISSUE_TEMPLATE"
    forms = {file.stem: yaml.safe_load(text(file)) for file in folder.glob("*.yml")}
    assert forms.pop("config") == {"blank_issues_enabled": False}
    assert forms.keys() == {"bug", "feature", "question"}
    for form in forms.values():
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any(field.get("validations", {}).get("required") for field in fields)
    ids = tuple(field.get("id") for field in forms["bug"]["body"] if "id" in field)
    assert ids == REPORTED


def test_the_line_of_the_bug_report_prints_the_versions(repo_root, capsys):
    form = text(repo_root / ".github/ISSUE_TEMPLATE/bug.yml")
    _, flag, code = shlex.split(re.search(r"`(python -c .*)`", form)[1])
    assert flag == "-c"
    exec(code, {})
    printed = capsys.readouterr().out
    assert f"flaxformer_lite {flaxformer_lite.__version__}\n" in printed
    assert "jaxlib:" in printed and "python:" in printed


def test_the_pull_request_template_asks_for_tests_changelog_docs_and_figures(repo_root):
    items = re.findall(
        r"^- \[ \] (.*)$", text(repo_root / ".github/pull_request_template.md"), re.M
    )
    for word in ("test", "CHANGELOG", "documentation", "measured"):
        assert any(word in item for item in items), word


def instructions(root: Path) -> list[tuple[str, str]]:
    """The keyword and the rest of each instruction of the Dockerfile."""
    joined = text(root / "Dockerfile").replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_container_does_the_job_of_the_first_command_of_the_readme(repo_root):
    (command,) = [rest for keyword, rest in instructions(repo_root) if keyword == "CMD"]
    job = " ".join(json.loads(command))
    assert job.startswith("python train.py ")
    trained = re.search(r"python train\.py.*$", text(repo_root / "README.md"), re.MULTILINE)[0]
    assert trained == job


def test_the_container_has_the_files_that_a_wheel_is_built_of(project, repo_root):
    copied = {
        source.rstrip("/")
        for keyword, rest in instructions(repo_root)
        if keyword == "COPY"
        for source in rest.split()[:-1]
    }
    hatch = tomllib.loads(text(repo_root / "pyproject.toml"))["tool"]["hatch"]
    wheel = hatch["build"]["targets"]["wheel"]
    needed = {project["readme"], *project["license-files"], *wheel["packages"]}
    needed |= {"pyproject.toml", "train.py", *wheel["force-include"]}
    assert copied == needed
    ignored = text(repo_root / ".dockerignore").splitlines()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == needed


def test_the_container_is_for_any_extra_and_a_user_without_root_rights(project, repo_root):
    found = instructions(repo_root)
    assert ("ARG", 'EXTRA=""') in found and ("USER", "1000") in found
    keywords = [keyword for keyword, _ in found]
    assert keywords.index("USER") > max(i for i, each in enumerate(keywords) if each == "RUN")
    python = dict(rest.split("=") for keyword, rest in found if keyword == "ARG")["PYTHON"]
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]


@pytest.mark.slow
def test_a_run_of_another_version_resumes_without_a_warning(tmp_path, monkeypatch, capfd):
    changes = {**runs.TINY, "train.num_steps": 2, "train.checkpoint_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(flaxformer_lite, "__version__", "0.1.0")
        runs.fit(tmp_path, changes)
    first = runs.losses(tmp_path)
    capfd.readouterr()
    runs.fit(tmp_path, changes | {"train.num_steps": 3})
    losses = runs.losses(tmp_path)
    assert first.keys() == {1, 2} and losses.keys() == {1, 2, 3}
    assert {step: losses[step] for step in first} == first
    assert "0.1.0" not in "".join(capfd.readouterr())
