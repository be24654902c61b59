"""Scores of the groups of a corpus, such as its languages or ranges of length, and their mean."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

from flaxformer_lite import scoring
from flaxformer_lite.symbol_scores import LENGTH, range_of, symbols_of
from flaxformer_lite.system.errors import InputError


class GroupScores(NamedTuple):
    """The scores of a group."""

    sentences: int
    values: dict[str, float]  # as in `scoring.Scores`


def scores_by_group(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    groups: Sequence[str],
    **settings: Unpack[scoring.SettingsGiven],
) -> dict[str, GroupScores]:
    """Returns the scores of each group by its name, in the order of the names.

    Numbers in names are ordered by their value, so 5-8 is before 17-32.

    Args:
      groups: the name of each sentence's group, or 'length': ranges of the length of the first
        references, in symbols.
      references, settings: as for `scoring.score`.

    Raises:
      InputError: as `scoring.score`; or there are not as many names as sentences, or one is empty.
    """
    if groups == LENGTH:
        groups = [range_of(len(symbols_of(text))) for text in references[0]]
    scoring.check_counts({"the hypotheses": len(hypotheses), "the groups": len(groups)})
    for number, name in enumerate(groups, start=1):
        if not name.strip():
            raise InputError(f"the groups: line {number}: expected the name of a group, got none.")
    members: dict[str, list[int]] = {}
    for number, name in enumerate(groups):
        members.setdefault(name, []).append(number)
    found = {}
    for name in sorted(members, key=_order):
        chosen, *others = (
            [texts[number] for number in members[name]] for texts in (hypotheses, *references)
        )
        found[name] = GroupScores(len(chosen), scoring.score(chosen, others, **settings).values)
    return found


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
