"""Word alignments as text: the lines of Pharaoh's format, `0-0 1-2`.

A link `2-1` is between source word 2 and target word 1, counted from 0; words are split at white
space. References also have possible links, `2p1` or `2:1`, beside the sure ones `2-1` (Och and Ney
2003).
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flaxformer_lite.system.errors import InputError

Links = frozenset[tuple[int, int]]  # (source word, target word), from 0
LINK = re.compile(r"(\d{1,9})([-p:])(\d{1,9})", re.ASCII)
SURE = "-"
ALIGNMENT = "alignment"  # a feature with this name has the links of the words of an example


class Reference(NamedTuple):
    """The links of a sentence pair by a person: all possible ones include the sure ones."""

    sure: Links
    possible: Links


def line_of(links: Iterable[tuple[int, int]]) -> str:
    """Returns the line of some links, in the order of the source words; empty without links."""
    return " ".join(f"{source}-{target}" for source, target in sorted(set(links)))


def links_of(line: str, *, where: str) -> Links:
    """Returns the links of a line.

    Args:
      where: the name of the line in the error, such as 'dev.align, line 3'.

    Raises:
      InputError: a part of the line is no link `2-1`.
    """
    reference = reference_of(line, where=where)
    if reference.sure != reference.possible:
        raise InputError(
            f"{where}: expected links such as 2-1, got a possible link, which only references "
            "have; write it with '-', or leave it out."
        )
    return reference.sure


def reference_of(line: str, *, where: str) -> Reference:
    """Returns the sure and the possible links of a line; a link may be both.

    Args:
      where: as of `links_of`.

    Raises:
      InputError: a part of the line is no link.
    """
    sure, possible = set(), set()
    for part in line.split():
        found = LINK.fullmatch(part)
        if found is None:
            raise InputError(
                f"{where}: expected links such as 2-1, or 2p1 for a possible one in a reference, "
                f"got {part!r}; words are counted from 0."
            )
        link = int(found[1]), int(found[3])
        possible.add(link)
        if found[2] == SURE:
            sure.add(link)
    return Reference(frozenset(sure), frozenset(possible))


def all_links(lines: Sequence[str], *, name: str) -> list[Links]:
    """Returns the links of each line of a file; `name`: of the file. Raises as `links_of`."""
    return [links_of(line, where=f"{name}, line {n}") for n, line in enumerate(lines, start=1)]


def references(lines: Sequence[str], *, name: str) -> list[Reference]:
    """Returns the references of the lines of a file; `name`: of the file. Raises as `links_of`."""
    return [reference_of(line, where=f"{name}, line {n}") for n, line in enumerate(lines, start=1)]


def fault_of(source: str, target: str, line: str) -> str | None:
    """Returns why a line is no alignment of two texts; None if it is one."""
    try:
        links = links_of(line, where="the line")
    except InputError as error:
        return str(error)
    counts = len(source.split()), len(target.split())
    for i, j in sorted(links):
        if i >= counts[0] or j >= counts[1]:
            return f"link {i}-{j} of {counts[0]} source words and {counts[1]} target words, from 0"
    return None
