"""The documentation: its blocks of code and the comments on them, and the generated reference."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import blocks
import generate_reference
import run_blocks
from blocks import PageError, find_blocks, substitute

from flaxformer_lite import fields
from flaxformer_lite.cli import commands

PAGE = """# Title
```bash
echo one
echo two
```
1. A list:
   ```python
   if True:
       print(1)
   ```
````{note}
```python
x = 2
```
````
```{code-block} json
{}
```
```text
flaxformer-lite no
```
"""


def blocks_of(text):
    return list(find_blocks(text, "page.md"))


def test_the_blocks_of_a_page_are_found_with_their_lines_in_lists_and_in_directives():
    found = [(block.line, block.language, block.code) for block in blocks_of(PAGE)]
    assert found == [
        (3, "bash", "echo one\necho two\n"),
        (8, "python", "if True:\n    print(1)\n"),
        (13, "python", "x = 2\n"),
    ]


def test_comments_above_a_block_change_it_prepare_it_or_exempt_it():
    text = (
        "<!-- run first: mkdir a -->\n<!-- run with: s/1600/5/ -->\n<!-- run with: s/5/7/ -->\n"
        "```bash\ntrain --steps=1600\n```\n<!-- not run: needs a GPU -->\n\n"
        "```bash\nnvidia-smi\n```\n"
    )
    first, second = blocks_of(text)
    assert (first.code, first.first, first.not_run) == ("train --steps=7\n", ("mkdir a",), None)
    assert first.printed == "train --steps=1600\n"
    assert (second.not_run, second.line) == ("needs a GPU", 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```sh\nls\n```\n", "page.md:1: expected a block ```bash, got ```sh"),
        ("```{code-block} python\n1\n```\n", "page.md:1: expected a block ```python"),
        ("<!-- not run: why -->\ntext\n```bash\nls\n```\n", "page.md:1: expected a block"),
        ("<!-- run with: s/a/b/ -->\n```text\na\n```\n", "page.md:1: expected a block"),
        ("<!-- run first: ls -->\n", "page.md:1: expected a block"),
        ("<!-- run with: s/x/y/ -->\n```bash\nls\n```\n", "page.md:1: s/x/y/ replaces nothing"),
        ("<!-- run with: y/x/y/ -->\n```bash\nls\n```\n", "page.md:1: expected s/OLD/NEW/"),
        ("<!-- not run: -->\n```bash\nls\n```\n", "page.md:1: expected text after 'not run'"),
        (
            "<!-- run first: ls -->\n<!-- not run: why -->\n```bash\nls\n```\n",
            "page.md:1: has no effect",
        ),
        ("```bash\nls\n", "page.md:1: expected a closing fence"),
        ("<!-- not run: a\nreason -->\n```bash\nls\n```\n", "page.md:1: a comment for the runner"),
    ],
)
def test_a_comment_or_a_block_that_would_be_skipped_by_mistake_is_refused(text, says):
    with pytest.raises(PageError) as caught:
        blocks_of(text)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("s/a.b/X/", "X a.b\nX axb"),  # literal text, once a line
        ("s/a.b/X/g", "X X\nX axb"),
        ("s/ax./X/", "a.b a.b\na.b X"),  # a regular expression
        (r"s/ axb/\nnew/", "a.b a.b\na.b\nnew"),
        (r"s|a.b|r\|s|", "r|s a.b\nr|s axb"),
    ],
)
def test_a_replacement_is_that_of_sed(command, expected):
    assert substitute("a.b a.b\na.b axb", command, where="here") == expected


def test_notebooks_are_not_run_as_pages():
    assert blocks.is_notebook("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n# A\n")
    assert not blocks.is_notebook("---\ntitle: A\n---\nfile_format: mystnb\n")


def test_the_runner_lists_the_pages_of_this_repository_without_builds(repo_root):
    names = run_blocks.pages(repo_root)
    assert names[0] == "README.md" and "docs/reference/errors.md" in names
    assert not [name for name in names if "_build" in name]


def outcome_of(text, folder):
    folder.mkdir()
    return run_blocks.run_page(blocks_of(text), folder)


def test_blocks_of_a_page_run_in_order_in_one_folder_and_python_keeps_its_variables(tmp_path):
    text = (
        "<!-- run first: echo early > log -->\n```bash\necho 3 > number\n```\n"
        "```python\nx = int(open('number').read())\n```\n```bash\necho bash >> log\n```\n"
        "```python\nopen('log', 'a').write(str(x + 4))\n```\n"
    )
    outcome = outcome_of(text, tmp_path / "page")
    assert (outcome.failed, outcome.run) == (None, 4), outcome.failure
    assert (tmp_path / "page" / "log").read_text() == "early\nbash\n7"


@pytest.mark.parametrize(
    ("block", "line", "prints"),
    [
        ("```bash\necho before; false\necho after\n```\n", 5, "before\n"),
        ("```bash\nfalse | cat\n```\n", 5, ""),
        ("```bash\necho $unset\n```\n", 5, "unset: unbound variable"),
        ("```python\nprint('seen')\n1 / 0\n```\n", 5, 'File "page.md", line 6, in <module>'),
        ("```python\nimport os; os._exit(0)\n```\n", 5, ""),
        ("```python\nraise SystemExit(0)\n```\n", 5, "SystemExit"),
        ("<!-- run first: false -->\n```python\n1\n```\n", 6, ""),
    ],
)
def test_a_failing_block_ends_its_page_and_is_reported(block, line, prints, tmp_path):
    outcome = outcome_of(
        f"```bash\ntrue\n```\n{block}```bash\ntouch never\n```\n", tmp_path / "page"
    )
    assert outcome.failed.line == line and outcome.run == 1 and prints in outcome.failure
    assert "after" not in outcome.failure and not (tmp_path / "page" / "never").exists()
    report = run_blocks.describe_failure(outcome)
    assert report.startswith(f"page.md:{line}: a block of ") and outcome.failed.printed in report
    assert outcome.failure in report


def test_the_exit_code_is_1_if_a_page_fails_and_0_if_none_does(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_blocks, "prepare", lambda folder, names: folder.mkdir())
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("```bash\ntrue\n```\n<!-- not run: slow -->\n```bash\nfalse\n```\n")
    bad.write_text("```bash\nfalse\n```\n")
    assert run_blocks.main([str(good)]) == 0
    assert "1 pages, 1 blocks run, 0 failed, 1 not run" in capsys.readouterr().out
    assert run_blocks.main([str(good), str(bad)]) == 1
    assert f"{bad}:2: a block of bash failed" in capsys.readouterr().out


def test_only_the_runs_that_a_page_mentions_are_trained():
    def needed(code, language="bash"):
        return run_blocks.needed_runs(blocks_of(f"```{language}\n{code}\n```\n"))

    assert needed("translate --workdir=runs/first") == ["first"]
    assert needed("load('runs/lm')", "python") == ["lm"]
    assert needed("ls runs/firstborn") == []
    assert needed("for run in runs/*; do true; done") == list(run_blocks.RUNS)


# The reference.


def test_the_generated_pages_are_up_to_date(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # argparse and absl wrap help texts to the terminal
    assert generate_reference.main(["--check"]) == 0


def test_a_page_that_differs_from_the_code_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate_reference, "REFERENCE", tmp_path)
    assert generate_reference.main([]) == 0 and generate_reference.main(["--check"]) == 0
    page = tmp_path / "config.md"
    page.write_text(page.read_text().replace("`d_model` | `512`", "`d_model` | `513`"))
    assert generate_reference.main(["--check"]) == 1
    assert "docs/reference/config.md: out of date" in capsys.readouterr().err


def test_the_reference_has_every_command_and_every_field():
    assert generate_reference.PARSERS.keys() == commands.COMMANDS.keys()
    assert generate_reference.SECTIONS.keys() == fields.Config.__dataclass_fields__.keys()
    page = generate_reference.config_page()
    for section, field in fields.Config.__dataclass_fields__.items():
        table = page.split(f"\n## {section}\n")[1].split("\n## ")[0]
        names = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
        assert names == field.default_factory.__dataclass_fields__.keys()


def test_the_text_of_a_comment_becomes_markdown():
    assert generate_reference.markdown("'a|b' of d_model * 2; None: a_ file.jsonl") == (
        "`a|b` of `d_model` \\* 2; `None`: `a_` `file.jsonl`"
    )
    assert generate_reference.table(["x"], [["`a|b`"]]).endswith("| `a\\|b` |")
