"""The characters of a text that each of its tokens covers, and the word that each token is in.

text    Ab cde
tokens  ▁Ab  ▁  c  de           of a SentencePiece model
spans   0-2  2-3  3-4  4-6      characters of the text
words   0    1    1    1        a space belongs to the word after it
"""

import re
from collections.abc import Sequence

import numpy as np

from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.offsets import Span


def spans(tokenizer: AnyTokenizer, text: str, side: str = "source") -> list[Span]:
    """Returns the characters of the raw `text` that each token of `encode` covers, in order.

    Starts and ends never decrease. 2 spans are disjoint, unless their tokens are parts of the same
    character, such as its bytes: both then contain this character. A token that stands for no
    character, such as a space that the tokenizer puts in front of the text, has an empty span.
    """
    start_N, end_N = np.array(tokenizer.spans(text, side=side), np.int64).reshape(-1, 2).T
    start_N = np.maximum.accumulate(start_N)
    end_N = np.maximum(np.maximum.accumulate(end_N), start_N)
    return list(zip(start_N.tolist(), end_N.tolist(), strict=True))


def spans_of_piece(tokenizer: AnyTokenizer, text: str, *, is_start: bool) -> list[Span]:
    """Returns the spans of the ids that `store.encode_pieces` returns for a piece of a target.

    Args:
      is_start: whether the piece is the start of a text. Another one is encoded after a line end,
        unless a token spans both.
    """
    if is_start:
        return spans(tokenizer, text, "target")
    line_end, row = tokenizer.encode(["\n", "\n" + text], side="target", threads=1)
    if not np.array_equal(row[: len(line_end)], line_end):
        return spans(tokenizer, text, "target")
    after = spans(tokenizer, "\n" + text, "target")[len(line_end) :]
    return [(max(0, start - 1), end - 1) for start, end in after]


def words(text: str) -> list[Span]:
    """Returns the characters of each word of `text`; white space separates words."""
    return [found.span() for found in re.finditer(r"\S+", text)]


def word_of(tokens: Sequence[Span], words: Sequence[Span]) -> np.ndarray:
    """Returns the number of the word that each token is in, int64; -1 if there are no words.

    It is the first word that the span overlaps. A token that overlaps none, such as a space, is in
    the next word; after the last word it is in the last one.
    """
    start_N = np.array(tokens, np.int64).reshape(-1, 2)[:, 0]
    end_K = np.array(words, np.int64).reshape(-1, 2)[:, 1]
    return np.minimum(np.searchsorted(end_K, start_N, side="right"), len(end_K) - 1)
