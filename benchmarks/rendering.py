"""Renders results as Markdown, between two comments in README.md and the pages of docs/:

<!-- results: NAME -->         the table 'main' of results/NAME.json
<!-- results: NAME/TABLE -->   another of its tables
<!-- results: NAME/run -->     how it was measured: command, hardware, date, versions
<!-- results: summary -->      the table of results/summary.json
<!-- results: list -->         all results, one row each
...
<!-- end results -->
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import results
from benchmarks.results import Result, ResultError, Table

ROOT = Path(__file__).parent.parent
START = re.compile(r"^<!-- results: (\S+) -->$", re.MULTILINE)
END = "<!-- end results -->"
UNKNOWN = "not recorded"


def pages(root: Path = ROOT) -> list[Path]:
    """Returns the files that may have blocks."""
    built = root / "docs" / "_build"
    found = sorted((root / "docs").rglob("*.md"))
    return [root / "README.md", *(path for path in found if built not in path.parents)]


def differing(root: Path = ROOT, *, write: bool = False) -> list[Path]:
    """Returns the pages whose blocks differ from the results; with `write`, updates them.

    Raises:
      ResultError: a result is invalid; or a block has no end, or names no result.
    """
    found = results.read_all(root / "results")
    summary = results.read_summary(found, root / "results")
    changed = []
    for path in filter(Path.exists, pages(root)):
        text = path.read_text(encoding="utf-8")
        rendered = render(text, found, summary, path, root=root)
        if rendered != text:
            changed.append(path)
            if write:
                path.write_text(rendered, encoding="utf-8")
    return changed


def render(
    text: str, found: Mapping[str, Result], summary: Table, path: Path, *, root: Path = ROOT
) -> str:
    """Returns the text of a page of the checkout `root` with its blocks filled.

    Raises:
      ResultError: a block has no end, or names no result.
    """
    done, rest = "", text
    while match := START.search(rest):
        before, end, after = rest[match.end() :].partition(END)
        if not end or START.search(before):
            raise ResultError(f"{path}: {match[0]}: expected {END} after it")
        body = block(match[1], found, summary, f"{path}: {match[0]}", root=root)
        done += f"{rest[: match.end()]}\n\n{body}\n\n{END}"
        rest = after
    return done + rest


def block(
    name: str, found: Mapping[str, Result], summary: Table, where: str, *, root: Path = ROOT
) -> str:
    """Returns the Markdown of a block.

    Raises:
      ResultError: there is no such result or table.
    """
    if name == results.SUMMARY:
        return markdown(summary, found, "", where)
    if name == "list":
        return "\n".join(_list(found, root))
    result, _, table = name.partition("/")
    if result not in found:
        raise ResultError(f"{where}: there is no results/{result}.json")
    if table == "run":
        return "\n".join(_run(found[result]))
    if (table or "main") not in found[result].tables:
        raise ResultError(f"{where}: results/{result}.json has no table {table or 'main'!r}")
    return markdown(found[result].tables[table or "main"], found, result, where)


def markdown(table: Table, found: Mapping[str, Result], name: str, where: str) -> str:
    """Returns a table as Markdown."""
    rows = [[results.filled(cell, found, name, where) for cell in row] for row in table.rows]
    lines = [table.columns, ["---"] * len(table.columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("  ", " ") for cells in lines)


def _list(found: Mapping[str, Result], root: Path) -> Iterator[str]:
    yield "| Result | Kind | Headline | Date | Hardware |"
    yield "| --- | --- | --- | --- | --- |"
    for name, result in found.items():
        page = page_of(name, root)
        title = f"[{result.title}]({page.name})" if page else result.title
        headline = results.filled(result.headline, found, name, name)
        date, hardware = result.date or UNKNOWN, result.hardware or UNKNOWN
        yield f"| {title} | {result.kind} | {headline} | {date} | {hardware} |"


def page_of(name: str, root: Path = ROOT) -> Path | None:
    """Returns the page of docs/results that has the block NAME/run, if there is one."""
    for path in sorted((root / "docs" / "results").glob("*.md")):
        if f"<!-- results: {name}/run -->" in path.read_text(encoding="utf-8"):
            return path
    return None


def _run(result: Result) -> Iterator[str]:
    commands = ", ".join(f"`{command}`" for command in result.commands)
    again = f"`python -m benchmarks {result.name}`" if result.kind == "rerun" else result.reason
    versions = result.versions and ", ".join(f"{k} {v}" for k, v in result.versions.items())
    minutes = result.seconds and f"{result.seconds / 60:,.1f} minutes"
    facts = {
        "Command": commands,
        "To repeat it" if result.kind == "rerun" else "Record only": again,
        "It needs": result.needs,
        "Hardware": result.hardware or UNKNOWN,
        "Date and commit": f"{result.date or UNKNOWN}, {result.commit or UNKNOWN}",
        "Versions": versions or UNKNOWN,
        "Seeds": ", ".join(map(str, result.seeds)),
        "Wall-clock": minutes,
        "Scorer": result.signature and f"`{result.signature}`",
        "Spread": result.spread,
        "Note": result.note,
    }
    wrap = textwrap.TextWrapper(
        120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    yield from (wrap.fill(f"- {name}: {fact}") for name, fact in facts.items() if fact)
