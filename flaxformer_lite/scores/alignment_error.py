"""The alignment error rate (AER) of word alignments. Och and Ney 2003.

With links A, sure reference links S and possible reference links P, which include S:

    precision = |A and P| / |A|    recall = |A and S| / |S|
    AER = 1 - (|A and S| + |A and P|) / (|A| + |S|)

The sizes are summed over all sentence pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flaxformer_lite.scores.word_links import Links, Reference
from flaxformer_lite.system.errors import InputError


class AlignmentScores(NamedTuple):
    """Scores from 0 to 1, or None if their divisor is 0, and the numbers of links."""

    aer: float | None  # lower is better
    precision: float | None
    recall: float | None
    links: int
    sure: int
    possible: int


def alignment_scores(
    hypotheses: Sequence[Links], references: Sequence[Reference]
) -> AlignmentScores:
    """Returns AER, precision and recall of the links of all sentence pairs.

    Raises:
      InputError: the numbers of hypotheses and references differ.
    """
    if len(hypotheses) != len(references):
        raise InputError(
            f"alignments: expected one reference a sentence pair, got {len(hypotheses):,} and "
            f"{len(references):,}; give both for the same pairs."
        )
    possible = [each.possible | each.sure for each in references]
    links = sum(map(len, hypotheses))
    sure = sum(len(each.sure) for each in references)
    in_sure = sum(
        len(found & each.sure) for found, each in zip(hypotheses, references, strict=True)
    )
    in_possible = sum(
        len(found & allowed) for found, allowed in zip(hypotheses, possible, strict=True)
    )
    return AlignmentScores(
        aer=_quotient(links + sure - in_sure - in_possible, links + sure),
        precision=_quotient(in_possible, links),
        recall=_quotient(in_sure, sure),
        links=links,
        sure=sure,
        possible=sum(map(len, possible)),
    )


def _quotient(count: int, total: int) -> float | None:
    return count / total if total else None
