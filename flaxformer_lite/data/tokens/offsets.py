"""Spans of characters: those of one form of a text as spans of another form."""

from collections.abc import Sequence

import numpy as np

Span = tuple[int, int]  # the first character, and the one after the last


def composed(tokens: Sequence[Span], characters: Sequence[Span]) -> list[Span]:
    """Returns spans of a text as spans of the text that it was made from.

    Args:
      tokens: spans of the new text.
      characters: for each character of the new text, its span of the old text.
    """
    end = characters[-1][1] if characters else 0
    return [
        (characters[first][0], characters[stop - 1][1])
        if first < stop
        else ((characters[first][0],) * 2 if first < len(characters) else (end, end))
        for first, stop in tokens
    ]


def of_bytes(text: str, offsets: Sequence[Span]) -> list[Span]:
    """Returns spans of the UTF-8 bytes of `text` as spans of its characters."""
    first_L = np.cumsum([0, *(len(character.encode()) for character in text)])
    start_N, end_N = np.array(offsets, np.int64).reshape(-1, 2).T
    start_N = np.searchsorted(first_L, start_N, side="right") - 1
    end_N = np.searchsorted(first_L, end_N, side="left")
    return list(zip(start_N.tolist(), end_N.tolist(), strict=True))
