"""Published results: files are valid, tables agree with them, and a wrong figure is found."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import processes, rendering, rerun, results, train_config
from benchmarks.results import Figure, Quantity, ResultError

SMALL = {
    "name": "small",
    "title": "A small result",
    "measures": "Nothing.",
    "kind": "rerun",
    "reason": None,
    "needs": None,
    "commands": ["python -m benchmarks.attention_memory --longest=64 --shortest=64 --repeats=1"],
    "commit": "abc1234",
    "date": "2026-11-28",
    "seeds": [0, 1],
    "hardware": "7 cores of a CPU that nobody has",
    "versions": {"jax": "0"},
    "seconds": 3.0,
    "signature": None,
    "spread": "2 seeds",
    "note": None,
    "headline": "{score} BLEU",
    "quantities": {
        "BLEU": {
            "unit": "",
            "digits": 1,
            "on_hardware": False,
            "absolute": 0.5,
            "relative": 0.0,
        },
        "ms": {"unit": "ms", "digits": 0, "on_hardware": True, "absolute": 0.0, "relative": 0.1},
    },
    "figures": {
        "score": {"quantity": "BLEU", "value": 41.0, "low": 40.0, "high": 42.0, "n": 2},
        "step": {"quantity": "ms", "value": 1234.0, "low": None, "high": None, "n": 5},
    },
    "tables": {"main": {"columns": ["What", "Figure"], "rows": [["BLEU", "{score}"]]}},
}
PAGE = "# Page\n\n<!-- results: small -->\n<!-- end results -->\n\ntext\n"


def changed(**fields):
    """Returns SMALL, deeply copied, with other fields: `figures__score__value=1`."""
    data = json.loads(json.dumps(SMALL))
    for path, value in fields.items():
        *parents, last = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        place[last] = value
    return data


@pytest.fixture
def tree(tmp_path):
    """A checkout with one result, a summary and a page whose table is rendered."""
    (tmp_path / "results").mkdir()
    (tmp_path / "docs" / "results").mkdir(parents=True)
    write(tmp_path, SMALL)
    summary = {"columns": ["What", "Result"], "rows": [["Small", "{small/score:value}"]]}
    (tmp_path / "results" / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "README.md").write_text(PAGE)
    rendering.differing(tmp_path, write=True)
    return tmp_path


def write(tree, data):
    (tree / "results" / "small.json").write_text(json.dumps(data))


def small(tmp_path, **fields):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(changed(**fields)))
    return results.read(path)


def test_every_published_result_is_valid_and_has_a_page(repo_root):
    found = results.read_all(repo_root / "results")
    results.read_summary(found, repo_root / "results")
    assert found
    without = [name for name in found if rendering.page_of(name, repo_root) is None]
    assert without == []


def test_every_command_of_a_result_names_a_benchmark_or_a_program(repo_root):
    for result in results.read_all(repo_root / "results").values():
        for line in result.commands:
            program, *words = line.split()
            assert program in rerun.PROGRAMS
            if words[:1] == ["-m"]:
                assert (repo_root / f"{words[1].replace('.', '/')}.py").is_file(), line


def test_the_tables_of_the_readme_and_the_documentation_agree_with_the_results(repo_root):
    assert rendering.differing(repo_root) == []


def test_every_figure_of_a_record_is_shown(repo_root):
    for result in results.read_all(repo_root / "results").values():
        text = json.dumps(dataclasses.asdict(result)["tables"])
        shown = {match["figure"] for match in results.REFERENCE.finditer(text)}
        assert result.kind == "rerun" or result.figures.keys() == shown


def test_every_commit_of_a_result_is_in_the_history(repo_root):
    git = ["git", "-C", str(repo_root)]
    shallow = [*git, "rev-parse", "--is-shallow-repository"]
    if not shutil.which("git") or not (repo_root / ".git").exists():
        pytest.skip("no checkout of git")
    if subprocess.run(shallow, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("a shallow clone")
    for result in results.read_all(repo_root / "results").values():
        for commit in [result.commit, *re.findall(r"commit ([0-9a-f]{7,40})", result.note or "")]:
            words = [*git, "merge-base", "--is-ancestor", commit, "HEAD"]
            assert commit is None or subprocess.run(words).returncode == 0, result.name


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"colour": "red"}, "colour", "unknown"),
        ({"seeds": "0"}, "seeds", "expected list"),
        ({"seconds": True}, "seconds", "expected float"),
        ({"kind": "guess"}, "kind", "expected 'rerun' or 'record'"),
        ({"kind": "record"}, "reason", "expected one for a record"),
        ({"name": "other"}, "name", "expected 'small'"),
        ({"commit": None}, "note", "expected the reason for null in ['commit']"),
        ({"figures__score__value": 42.1}, "figures.score", "42.1 is not from 40.0 to 42.0"),
        ({"figures__score__low": None}, "figures.score", "expected low and high, or neither"),
        ({"figures__score__quantity": "chrF"}, "figures.score.quantity", "no quantity 'chrF'"),
        ({"figures__score__n": 0}, "figures.score.n", "expected 1 or more"),
        ({"figures__score__seed": 0}, "figures.score.seed", "unknown"),
        ({"figures__score__value": float("nan")}, "figures.score.value", "expected float"),
        ({"tables__main__rows": [["BLEU"]]}, "tables.main.rows: row 1", "expected 2 cells, got 1"),
    ],
)
def test_an_invalid_file_is_refused_by_its_name_and_field(tmp_path, change, field, message):
    with pytest.raises(ResultError) as refusal:
        small(tmp_path, **change)
    assert str(refusal.value).startswith(f"{tmp_path / 'small.json'}: {field}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize("key", SMALL)
def test_no_key_may_be_missing(tmp_path, key):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({name: value for name, value in SMALL.items() if name != key}))
    with pytest.raises(ResultError, match=f"{key}: missing"):
        results.read(path)


@pytest.mark.parametrize("cell", ["{speed}", "{score:median}", "{large/score}"])
def test_a_cell_that_names_no_figure_is_refused(tree, cell):
    write(tree, changed(tables__main__rows=[["BLEU", cell]]))
    with pytest.raises(ResultError) as refusal:
        results.read_all(tree / "results")
    where = f"{tree / 'results' / 'small.json'}: tables.main.rows: row 1: "
    assert str(refusal.value) == f"{where}{cell} names no figure"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{score}", "41.0 (40.0 to 42.0)"),
        ("{score:value} and {score:range}", "41.0 and 40.0 to 42.0"),
        ("{small/score:low} {score:high}", "40.0 42.0"),
        ("{step} ms", "1,234 ms"),
    ],
)
def test_references_become_numbers(tmp_path, text, expected):
    assert results.filled(text, {"small": small(tmp_path)}, "small", "") == expected


@pytest.mark.parametrize("part", ["low", "high", "range"])
def test_a_range_that_was_not_recorded_is_refused(tmp_path, part):
    cell = f"{{step:{part}}}"
    with pytest.raises(ResultError, match=r"page: {step:.*: the range .* was not recorded"):
        results.filled(cell, {"small": small(tmp_path)}, "small", "page")


@pytest.mark.parametrize("text", [None, "{"])
def test_a_summary_that_cannot_be_read_is_refused(tree, text):
    path = tree / "results" / "summary.json"
    path.write_text(text) if text else path.unlink()
    with pytest.raises(ResultError, match=r"summary\.json: expected a JSON file"):
        rendering.differing(tree)


def test_negative_digits_round_to_tens(tmp_path):
    result = small(tmp_path, quantities__ms__digits=-2)
    assert results.filled("{step}", {"small": result}, "small", "") == "1,200"


def test_a_written_file_reads_as_the_same_result(tmp_path):
    result = small(tmp_path)
    (tmp_path / "small.json").unlink()
    assert results.read(results.write(result, tmp_path)) == result
    assert [path.name for path in tmp_path.iterdir()] == ["small.json"]


def test_rendering_fills_a_block_and_leaves_the_rest_of_a_page(tree):
    text = (tree / "README.md").read_text()
    assert text.startswith("# Page\n\n<!-- results: small -->\n") and text.endswith("text\n")
    assert "| BLEU | 41.0 (40.0 to 42.0) |" in text
    assert rendering.differing(tree) == []


def test_the_list_links_to_the_pages_of_its_own_checkout(tree):
    (tree / "docs" / "results" / "mine.md").write_text(
        "<!-- results: small/run -->\n<!-- end results -->\n"
    )
    (tree / "README.md").write_text("<!-- results: list -->\n<!-- end results -->\n")
    rendering.differing(tree, write=True)
    assert "| [A small result](mine.md) | rerun |" in (tree / "README.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/results/page.md"])
def test_a_figure_that_is_changed_by_hand_in_a_page_is_found(tree, name):
    page = tree / name
    shutil.copy(tree / "README.md", page) if name != "README.md" else None
    assert rendering.differing(tree) == []
    page.write_text(page.read_text().replace("41.0 (40.0", "41.9 (40.0"))
    assert rendering.differing(tree) == [page]
    rendering.differing(tree, write=True)
    assert "41.0 (40.0" in page.read_text()


def test_a_figure_that_is_changed_in_a_file_is_found_in_the_pages(tree):
    write(tree, changed(figures__score__value=41.5))
    assert rendering.differing(tree) == [tree / "README.md"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- end results -->", "", "expected <!-- end results -->"),
        ("results: small", "results: large", "there is no results/large.json"),
        ("results: small", "results: small/second", "has no table 'second'"),
    ],
)
def test_a_block_that_cannot_be_filled_is_refused(tree, old, new, message):
    page = tree / "README.md"
    page.write_text(page.read_text().replace(old, new))
    with pytest.raises(ResultError, match=message) as refusal:
        rendering.differing(tree)
    assert str(page) in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "within"), [(39.4, False), (39.5, True), (42.5, True), (42.6, False), (41.2, True)]
)
def test_a_new_figure_is_within_the_spread_widened_by_the_tolerance(value, within):
    quantity = Quantity("", 1, on_hardware=False, absolute=0.45, relative=0.0)
    published = Figure("BLEU", 41.0, 40.0, 42.0, 2)
    assert rerun.Comparison("score", quantity, published, value, "").within is within


def test_times_on_other_hardware_are_shown_but_not_compared(tmp_path):
    measured = {"score": {"value": 41.0}, "step": {"value": 5000.0}}
    result = small(tmp_path)
    score, step = rerun.compare(result, measured, "another machine")
    assert score.verdict == "within"
    assert step.verdict == "not comparable: other hardware" and not step.fails
    _, step = rerun.compare(result, measured, result.hardware)
    assert step.verdict == "OUTSIDE" and not step.fails  # a time is never a reason to fail


def test_phrases_of_another_babel_are_not_compared(tmp_path):
    result = small(tmp_path, versions={"babel": "2.1.0"})
    score, _ = rerun.compare(result, {"score": {"value": 0.0}}, "")
    assert score.verdict.startswith("not comparable: phrases of Babel") and not score.fails


def test_a_run_that_agrees_ends_with_0_and_a_falsified_figure_with_1(tree, monkeypatch, capsys):
    name, read_all = "reference 64 MiB", results.read_all
    # The one real run.
    measured = rerun.run(read_all(tree / "results")["small"], [], tree / "output")
    monkeypatch.setattr(results, "read_all", lambda: read_all(tree / "results"))
    monkeypatch.setattr(rerun, "run", lambda result, flags, output: measured)
    memory = {"unit": "MiB", "digits": 5, "on_hardware": False, "absolute": 0.0, "relative": 0.1}
    for factor, code, verdict in ((1, 0, "within"), (1.2, 1, "OUTSIDE")):
        value = factor * measured[name]["value"]
        figure = {"quantity": "memory", "value": value, "low": None, "high": None, "n": 1}
        write(
            tree,
            changed(
                quantities={"memory": memory}, figures={name: figure}, tables={}, headline="memory"
            ),
        )
        assert command.main(["small"]) == code
        assert verdict in capsys.readouterr().out


def test_saved_figures_replace_the_published_ones_with_today_s_facts(tmp_path):
    figure = {"value": 41.3, "low": 41.0, "high": 41.6, "n": 3}
    result = small(tmp_path)
    facts = {"seconds": 7.0, "commit": "abc1235"}
    new = rerun.updated(result, {"score": figure, "step": figure, "more": figure}, **facts)
    assert new.figures["score"] == Figure("BLEU", 41.3, 41.0, 41.6, 3)
    assert set(new.figures) == set(result.figures)
    assert (new.hardware, new.seconds, new.commit) == (rerun.hardware(), 7.0, "abc1235")
    assert {"jax", "numpy"} <= new.versions.keys() and new.versions["jax"] != "0"
    with pytest.raises(ResultError, match="not measured: step"):
        rerun.updated(result, {"score": figure}, **facts)


@pytest.fixture
def checkout(tree, monkeypatch):
    """The tree as a checkout of git, whose results are measured without a run."""
    git = ["git", "-C", str(tree), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    (tree / "code.py").write_text("")
    (tree / ".gitignore").write_text("/runs/\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "First"]):
        subprocess.run([*git, *words], check=True)
    read_all, write = results.read_all, results.write
    monkeypatch.setattr(rerun, "ROOT", tree)
    monkeypatch.setattr(results, "read_all", lambda: read_all(tree / "results"))
    monkeypatch.setattr(results, "write", lambda result: write(result, tree / "results"))
    monkeypatch.setattr(rerun.publish, "__defaults__", (tree,))
    return tree


def measured_with(monkeypatch, value, stop=False):
    """Lets a run write its output, with `value` for each figure; returns the files found before."""
    found = []

    def run(result, flags, output):
        found.append(sorted(path.name for path in output.iterdir()) if output.exists() else None)
        output.mkdir(parents=True, exist_ok=True)
        (output / "layer_cost.png").write_text(f"{value}")
        if stop:
            raise SystemExit(143)
        return {
            name: {"value": value, "low": value, "high": value, "n": 1} for name in result.figures
        }

    monkeypatch.setattr(rerun, "run", run)
    return found


def test_a_finished_comparison_is_measured_again_and_a_stopped_one_continues(
    checkout, monkeypatch, capsys
):
    for stop, before in ((False, None), (True, None), (False, ["layer_cost.png", "seconds"])):
        found = measured_with(monkeypatch, 41.0, stop)
        if stop:
            with pytest.raises(SystemExit):
                command.main(["small"])
        else:
            assert command.main(["small"]) == 0
        assert found == [before]
        assert ("continues the unfinished comparison" in capsys.readouterr().out) == bool(before)


def test_only_save_changes_published_files(checkout, monkeypatch):
    plot, file = checkout / "docs" / "results" / "layer_cost.png", checkout / "results/small.json"
    before = file.read_text()
    measured_with(monkeypatch, 41.5)
    command.main(["small"])
    assert not plot.exists() and file.read_text() == before
    assert command.main(["small", "--save"]) == 0
    assert plot.read_text() == "41.5"
    saved = results.read(file)
    assert saved.figures["score"].value == 41.5 and saved.commit == rerun.commit()


def test_nothing_is_saved_without_a_commit_of_the_code(checkout, monkeypatch, capsys):
    found, clean = measured_with(monkeypatch, 41.0), rerun.commit()
    (checkout / "README.md").write_text("changed")
    assert rerun.commit() == clean
    (checkout / "code.py").write_text("changed")
    assert rerun.commit() == f"{clean}-dirty"
    assert command.main(["small", "--save"]) == 2
    assert "commit the changed files first" in capsys.readouterr().err
    monkeypatch.setattr(rerun, "ROOT", checkout / "results")  # a folder of another checkout
    assert command.main(["small", "--save"]) == 2
    assert "is not a checkout of git" in capsys.readouterr().err
    assert found == []


@pytest.mark.parametrize("line", ["make figures", ""])
def test_a_command_of_another_program_is_refused(tmp_path, line):
    with pytest.raises(ResultError, match="expected a command of python or flaxformer-lite"):
        rerun.run(small(tmp_path, commands=[line]), [], tmp_path)


def test_a_seed_without_a_score_does_not_shift_those_of_the_others():
    runs = {3: {"bleu": 1.0}, 5: {}, 8: {"bleu": 2.0}}
    found = train_config.over_seeds(runs)
    assert (found["bleu, seed 3"], found["bleu, seed 8"]) == (1.0, 2.0)
    assert "bleu, seed 5" not in found and found["bleu"]["value"] == 1.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_the_processes_that_it_started(number):
    sleeps = "import time; print('ready', flush=True); time.sleep(600)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeps!r}])"
    calls = f"""
import os, sys
from benchmarks import processes
processes.call([sys.executable, "-c", {starts!r}], os.environ)"""
    words = [sys.executable, "-c", calls]
    run = subprocess.Popen(words, env=processes.environment(), stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    run.communicate(timeout=30)  # returns when no process has the output open
    assert run.returncode == 128 + number


def test_a_child_finds_the_packages_of_the_checkout_from_any_folder(tmp_path):
    words = [sys.executable, "-c", "import benchmarks; print(*benchmarks.__path__)"]
    done = subprocess.run(
        words, cwd=tmp_path, env=processes.environment(), capture_output=True, text=True
    )
    assert str(processes.ROOT / "benchmarks") in done.stdout


def test_the_list_has_a_line_for_each_result(capsys, repo_root):
    assert command.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [path.stem for path in sorted(Path(repo_root, "results").glob("*.json"))]
    names.remove("summary")
    assert [line.split()[0] for line in lines] == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing: expected render, list, "),
        (["render", "--chekc"], "expected --check or nothing"),
        (["template_baseline", "--save", "--split=validation"], "remove --split=validation"),
        (["plan"], "is a record and cannot be measured again"),
    ],
)
def test_a_command_that_cannot_be_right_ends_with_2(capsys, words, message):
    assert command.main(words) == 2
    assert message in capsys.readouterr().err
