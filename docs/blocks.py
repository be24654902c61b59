"""Finds the code blocks of Markdown pages, and the comments above them that say how to run them.

A block of `bash` or `python` is executable. These comments may stand above it:

    <!-- run with: s/OLD/NEW/ -->   replaces text before the block is run; several apply in order
    <!-- run first: COMMAND -->     runs one line of bash before the block
    <!-- not run: REASON -->        exempts the block
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EXECUTABLE = ("bash", "python")
# Other names of the same languages: a block of one of these would be skipped by mistake.
MISNAMED = {
    **dict.fromkeys(("sh", "shell", "console", "shell-session", "zsh"), "bash"),
    **dict.fromkeys(("py", "python3", "ipython", "pycon", "ipython3"), "python"),
}
# Directives whose content is Markdown have a name that is not in this list.
LITERAL_DIRECTIVES = ("code", "code-block", "code-cell", "eval-rst", "include", "math", "toctree")

_FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*?)\s*$")
_COMMENT = re.compile(r"^[ >]*<!--\s*(?P<name>run with|run first|not run):\s*(?P<text>.*?)\s*-->$")
_OPEN_COMMENT = re.compile(r"^[ >]*<!--\s*(run with|run first|not run):(?!.*-->)")
_SUBSTITUTION = re.compile(r"^s(?P<mark>[/|#,@])(?P<rest>.*)$")


class PageError(ValueError):
    """A page whose blocks or comments cannot be read; the message names the file and the line."""


class Block(NamedTuple):
    """An executable block of a page."""

    page: str
    line: int  # of the first line of code, from 1
    language: str
    printed: str  # the code as the page shows it
    code: str  # the code to run: `printed` with the replacements
    first: tuple[str, ...] = ()  # commands to run before
    not_run: str | None = None  # the reason, if the block is exempt


def read_page(path: Path, name: str) -> list[Block]:
    """Returns the executable blocks of a page.

    Raises:
      PageError: a comment has no block or does not apply, or a language has another name here.
    """
    return list(find_blocks(path.read_text(encoding="utf-8"), name))


def is_notebook(text: str) -> bool:
    """Whether Sphinx executes the page: its front matter names a kernel."""
    front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    return (
        front is not None and re.search(r"^(kernelspec|file_format):", front[1], re.M) is not None
    )


def find_blocks(text: str, page: str) -> Iterator[Block]:
    """Yields the executable blocks of a Markdown text."""
    lines = text.splitlines()
    containers: list[str] = []  # fences of the directives around the current line
    comments: list[tuple[int, str, str]] = []  # line, name, text
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if _OPEN_COMMENT.match(line):
            raise PageError(f"{page}:{number}: a comment for the runner must end on its line")
        if comment := _COMMENT.match(line):
            comments.append((number, comment["name"], comment["text"]))
            continue
        opening = _FENCE.match(line)
        if opening and _closes(opening, containers):
            containers.pop()
            opening = None
        elif opening and _is_container(opening["info"]):
            containers.append(opening["fence"])
            opening = None
        if opening is None:
            if line.strip():
                _refuse_unused(comments, page)
            continue
        content, end = _content(lines, number, opening, page)
        language = _language(opening["info"], page, number)
        if language in EXECUTABLE:
            yield _block(page, number + 1, language, content, comments)
            comments = []
        else:
            _refuse_unused(comments, page)
        number = end
    _refuse_unused(comments, page)


def _closes(opening: re.Match, containers: list[str]) -> bool:
    fence = opening["fence"]
    return (
        not opening["info"]
        and bool(containers)
        and fence[0] == containers[-1][0]
        and len(fence) >= len(containers[-1])
    )


def _is_container(info: str) -> bool:
    directive = re.match(r"\{([\w:-]+)\}", info)
    return directive is not None and directive[1] not in LITERAL_DIRECTIVES


def _content(lines: list[str], start: int, opening: re.Match, page: str) -> tuple[str, int]:
    """Returns the code below an opening fence, and the index of the line after the closing one."""
    indent, fence = opening["indent"], opening["fence"]
    for end in range(start, len(lines)):
        closing = lines[end].strip(" >")
        if closing and set(closing) == {fence[0]} and len(closing) >= len(fence):
            code = [
                line.removeprefix(indent).removeprefix(indent.rstrip()) for line in lines[start:end]
            ]
            return "\n".join(code) + "\n", end + 1
    raise PageError(f"{page}:{start}: expected a closing fence of this block.")


def _language(info: str, page: str, line: int) -> str:
    """Returns the language of a block; the empty string for a directive and for plain text."""
    word = info.split()[0] if info else ""
    of_directive = re.match(r"\{(?:code|code-block)\}\s*(\S*)", info)
    wanted = of_directive[1] if of_directive else word
    expected = MISNAMED.get(wanted, wanted if of_directive and wanted in EXECUTABLE else None)
    if expected:
        raise PageError(f"{page}:{line}: expected a block ```{expected}, got ```{info}.")
    return word


def _block(
    page: str, line: int, language: str, printed: str, comments: list[tuple[int, str, str]]
) -> Block:
    code, first, not_run = printed, [], None
    for number, name, text in comments:
        if not text:
            raise PageError(f"{page}:{number}: expected text after {name!r}.")
        if name == "run with":
            code = substitute(code, text, where=f"{page}:{number}")
        elif name == "run first":
            first.append(text)
        else:
            not_run = text
    if not_run and len(comments) > 1:
        raise PageError(f"{page}:{comments[0][0]}: has no effect, as the block is not run.")
    return Block(page, line, language, printed, code, tuple(first), not_run)


def _refuse_unused(comments: list[tuple[int, str, str]], page: str) -> None:
    for number, name, _ in comments:
        raise PageError(f"{page}:{number}: expected a block of bash or python below {name!r}.")


def substitute(code: str, command: str, *, where: str) -> str:
    r"""Returns the code after `s/OLD/NEW/`, or `s/OLD/NEW/g`; `\n` in NEW is a new line.

    OLD is literal text if the code contains it, else a regular expression. As in sed, the first
    occurrence on each line is replaced, and all with `g`.

    Raises:
      PageError: the command is none of these forms, or replaces nothing.
    """
    if not (form := _SUBSTITUTION.match(command)):
        raise PageError(f"{where}: expected s/OLD/NEW/, got {command}.")
    mark = re.escape(form["mark"])
    parts = re.split(rf"(?<!\\){mark}", form["rest"])
    if len(parts) != 3 or parts[2] not in ("", "g"):
        raise PageError(f"{where}: expected s/OLD/NEW/ or s/OLD/NEW/g, got {command}.")
    old, new = (part.replace("\\" + form["mark"], form["mark"]) for part in parts[:2])
    new = new.replace("\\n", "\n")
    count = 0 if parts[2] else 1
    if old in code:
        changed = [line.replace(old, new, -1 if parts[2] else 1) for line in code.split("\n")]
    else:
        try:
            changed = [re.sub(old, new, line, count=count) for line in code.split("\n")]
        except re.error as error:
            raise PageError(f"{where}: {old} is no regular expression: {error}.") from error
    if (result := "\n".join(changed)) == code:
        raise PageError(f"{where}: {command} replaces nothing in the block.")
    return result
