"""Error rates of sequences of symbols, in percent; lower is better.

A text is a sequence of symbols with spaces between them. An edit inserts, deletes or substitutes
one symbol (Levenshtein 1966). The literature has these names for the two rates:

- `symbol_error_rate`: edits over reference symbols, summed over all texts. Phone error rate (PER)
  if the symbols are phones, word error rate (WER) if they are words, as in speech recognition,
  character error rate (CER) if they are characters.
- `sequence_error_rate`: share of texts that are not exactly right. Word error rate (WER) in
  grapheme-to-phoneme conversion, whose texts are words. 100 minus it is the accuracy of SCAN.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from flaxformer_lite.system.errors import InputError

LENGTH = "length"  # in place of the names of groups: ranges of lengths
FIRST_RANGE = 4  # symbols: 1 to 4, then 5 to 8, 9 to 16 and so on
MOST_CELLS = 2**16  # symbols of a batch of pairs, padding included; larger ones are no faster


def range_of(length: int) -> str:
    """Returns the range of lengths of a text, such as '5-8 symbols'; the bounds are powers of 2."""
    if not length:
        return "0 symbols"
    high = FIRST_RANGE
    while high < length:
        high *= 2
    return f"{1 if high == FIRST_RANGE else high // 2 + 1}-{high} symbols"


class Edits(NamedTuple):
    """The edits from each text to the nearest of its references."""

    edits_N: np.ndarray
    length_N: np.ndarray  # symbols of that reference


def symbols_of(text: str) -> list[str]:
    """Returns the symbols of a text: its parts between spaces, without empty ones."""
    return [symbol for symbol in text.split(" ") if symbol]


def symbol_error_rate(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Returns edits over reference symbols, in percent; may exceed 100.

    Args:
      references: as for `nearest_edits`.
    """
    return quotient(*rates(hypotheses, references)["symbol_error_rate"])


def sequence_error_rate(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Returns the share of texts whose symbols are those of no reference, in percent.

    Args:
      references: as for `nearest_edits`.
    """
    return quotient(*rates(hypotheses, references)["sequence_error_rate"])


def rates(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns both rates by name, as numerators and denominators of each text, (N,) and (N,)."""
    edits_N, length_N = nearest_edits(hypotheses, references)
    return {
        "symbol_error_rate": (100.0 * edits_N, length_N.astype(np.float64)),
        "sequence_error_rate": (100.0 * (edits_N > 0), np.ones(len(edits_N))),
    }


def quotient(numerator_N: np.ndarray, denominator_N: np.ndarray) -> float:
    """Returns the quotient of the sums; NaN if the denominators sum to 0."""
    total = denominator_N.sum()
    return float(numerator_N.sum() / total) if total else float("nan")


def nearest_edits(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Edits:
    """Returns the edits to the nearest reference of each text; of equally near ones the shortest.

    Args:
      references: 1 or more sequences, each with a text for every hypothesis.

    Raises:
      InputError: there are no references, or not as many texts as hypotheses.
    """
    counts = [len(texts) for texts in references]
    if not counts or {*counts} != {len(hypotheses)}:
        raise InputError(
            f"the references: expected 1 or more lists of {len(hypotheses)} texts, as many as "
            f"there are hypotheses, got lists of {counts}."
        )
    written = [symbols_of(text) for text in hypotheses]
    wanted = [[symbols_of(text) for text in texts] for texts in references]
    edits_RN = np.array([edit_distances(written, texts) for texts in wanted])
    length_RN = np.array([[len(symbols) for symbols in texts] for texts in wanted], np.int64)
    nearest_N = np.lexsort((length_RN, edits_RN), axis=0)[0]  # by edits, then by length
    rows_N = np.arange(len(written))
    return Edits(edits_RN[nearest_N, rows_N], length_RN[nearest_N, rows_N])


def edit_distances(first: Sequence[Sequence[str]], second: Sequence[Sequence[str]]) -> np.ndarray:
    """Returns the fewest edits that change each sequence of `first` to that of `second`; (N,)."""
    number_of: dict[str, int] = {}
    ids = [
        [
            np.array([number_of.setdefault(s, len(number_of)) for s in each], np.int32)
            for each in side
        ]
        for side in (first, second)
    ]
    distance_N = np.zeros(len(first), np.int64)
    differ = [n for n, (a, b) in enumerate(zip(*ids, strict=True)) if not np.array_equal(a, b)]
    for chosen in _batches(differ, [max(len(a), len(b)) for a, b in zip(*ids, strict=True)]):
        distance_N[chosen] = _distances(*([side[n] for n in chosen] for side in ids))
    return distance_N


def _batches(numbers: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the numbers of sequences of similar length, at most MOST_CELLS symbols a batch."""
    batch: list[int] = []
    for number in sorted(numbers, key=lambda n: lengths[n]):
        if batch and (len(batch) + 1) * lengths[number] > MOST_CELLS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _distances(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the edit distance of each pair by dynamic programming (Wagner 1974); (N,).

    Row i of the table of a pair has the distances from the first i symbols of `first` to each
    prefix of `second`. The rows of all pairs are computed together. Padding is right of, or below,
    the cell that holds a pair's distance, and does not affect it.
    """
    first_NS, second_NT = _padded(first), _padded(second)
    last_N, column_N = ([len(each) for each in side] for side in (first, second))
    rows_N, offset_T = np.arange(len(first)), np.arange(second_NT.shape[1] + 1, dtype=np.int32)
    row_NT = np.tile(offset_T, (len(first), 1))  # from no symbols: insert all of them
    distance_N = row_NT[rows_N, column_N]
    for i in range(first_NS.shape[1]):
        substituted_NT = row_NT[:, :-1] + (second_NT != first_NS[:, i : i + 1])
        row_NT = row_NT + 1  # the new symbol is deleted
        row_NT[:, 1:] = np.minimum(row_NT[:, 1:], substituted_NT)
        # inserts: the least of any cell to the left, plus the columns in between
        row_NT = np.minimum.accumulate(row_NT - offset_T, axis=1) + offset_T
        ends_N = np.equal(last_N, i + 1)
        distance_N[ends_N] = row_NT[rows_N, column_N][ends_N]
    return distance_N


def _padded(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sequences as rows, padded with -1."""
    padded_NL = np.full((len(sequences), max(map(len, sequences))), -1, np.int32)
    for row_L, each in zip(padded_NL, sequences, strict=True):
        row_L[: len(each)] = each
    return padded_NL
