"""The groups of a corpus, such as its languages or ranges of length, and the mean of their scores.

`scoring.scores_by_group` computes the scores.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flaxformer_lite.scores.symbols import LENGTH, range_of, symbols_of
from flaxformer_lite.system.errors import InputError


class GroupScores(NamedTuple):
    """The scores of a group."""

    sentences: int
    values: dict[str, float]  # as in `scoring.Scores`


def names_of_groups(references: Sequence[Sequence[str]], groups: Sequence[str]) -> Sequence[str]:
    """Returns the name of each sentence's group; `groups` of 'length' are ranges of length."""
    if groups != LENGTH:
        return groups
    return [range_of(len(symbols_of(text))) for text in references[0]]


def members_of_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the indices of the sentences of each group, in the order of the names.

    Numbers in names are ordered by their value, so 5-8 is before 17-32.

    Raises:
      InputError: a name is empty.
    """
    members: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if not name.strip():
            raise InputError(
                f"the groups: line {index + 1}: expected the name of a group, got none."
            )
        members.setdefault(name, []).append(index)
    return {name: members[name] for name in sorted(members, key=_order)}


def macro_mean(found: Mapping[str, GroupScores]) -> dict[str, float]:
    """Returns the mean of each score over the groups, which all have the same weight.

    A group without a score, NaN, is left out.
    """
    values = [group.values for group in found.values()]
    finite = {
        name: [each[name] for each in values if math.isfinite(each[name])] for name in values[0]
    }
    return {name: sum(x) / len(x) if x else math.nan for name, x in finite.items()}


def _order(name: str) -> list[str | int]:
    """Returns the sort key of a name: its texts and numbers in turn."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]
