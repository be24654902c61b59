"""Word alignments as links of tokens, to train on."""

import numpy as np

from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.spans import spans, word_of, words
from flaxformer_lite.scores.word_links import fault_of, links_of
from flaxformer_lite.system.errors import InputError

FACTOR = 1 << 16  # a link of tokens is FACTOR x target position + source position, below 2^32


def token_links(tokenizer: AnyTokenizer, source: str, target: str, line: str) -> np.ndarray:
    """Returns the links of tokens, uint32, sorted: each token of a linked word with each of its.

    Args:
      line: the links of the words of both texts.

    Raises:
      InputError: the line is malformed, or has a link of a word that a text does not have.
    """
    if (what := fault_of(source, target, line)) is not None:
        raise InputError(f"config.data: the dataset has a wrong alignment, {line!r:.60}: {what}.")
    links = links_of(line, where="alignment")
    if not links:
        return np.empty(0, np.uint32)
    source_S, target_T = (
        word_of(spans(tokenizer, text, side), words(text))
        for text, side in ((source, "source"), (target, "target"))
    )
    linked = np.zeros((len(words(target)), len(words(source))), bool)
    for i, j in links:
        linked[j, i] = True
    target_L, source_L = np.nonzero(linked[target_T][:, source_S])
    return (FACTOR * target_L + source_L).astype(np.uint32)


def fill(links: np.ndarray, row_L: np.ndarray, *, rows: int, length: int) -> np.ndarray:
    """Returns the links of the tokens of each row, bool (rows, target length, source length).

    Args:
      links: of all rows, as of `token_links`.
      row_L: the row of each link.
    """
    linked_BTS = np.zeros((rows, length, length), bool)
    target_L, source_L = np.divmod(links.astype(np.int64), FACTOR)
    linked_BTS[row_L, target_L, source_L] = True
    return linked_BTS
