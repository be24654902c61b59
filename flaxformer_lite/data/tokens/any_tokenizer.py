"""The interface of all tokenizers, the order of their ids, and rows of ids."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from flaxformer_lite.fields import BOS, EOS, PAD, UNK

SPECIAL = 4  # the number of special tokens: PAD, BOS, EOS and UNK


class AnyTokenizer(Protocol):
    """Maps texts to ids and back. A `side` is 'source' or 'target'; ids have no start or end."""

    content: bytes  # of its file
    kind: str  # a choice of `data.tokenizer`
    vocab_size: int  # special tokens included
    fingerprint: str  # SHA-256 of what determines the ids of a text

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; `threads` None: one a core."""

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), of each id; use `spans.spans`."""

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of target ids, each up to its first end symbol or padding."""

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id in the notation of its kind; no 2 are equal."""

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by name, such as '<s>'."""

    @property
    def models(self) -> dict[str, bytes]:
        """The files that other programs tokenise with, by their names."""


def pad_rows(rows: list[np.ndarray], length: int, *, end: bool = True) -> np.ndarray:
    """Returns int32 (len(rows), length): each row's ids, the end symbol, and padding.

    An empty row becomes all padding.

    Args:
      end: whether to add the end symbol; False for the prefix of a text.
    """
    padded = np.full((len(rows), length), PAD, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        if len(ids):
            row[: len(ids)] = ids
            row[len(ids)] = EOS if end else PAD
    return padded


def cut_at_end(row: np.ndarray) -> np.ndarray:
    """Returns the ids of `row` before its first end symbol or padding."""
    ends = np.flatnonzero((row == EOS) | (row == PAD))
    return row[: ends[0]] if len(ends) else row


def mapping_name(fingerprint: str, normalization: str, side: str) -> str:
    """Returns `made_by` of a tokenizer that normalises only sources."""
    changes = side == "source" and normalization != "none"
    return f"{fingerprint} {normalization}" if changes else fingerprint


class IdOrder:
    """The order of our ids over those of another library: PAD, BOS, EOS, UNK, then its order."""

    def __init__(self, special: Sequence[int], ids: Iterable[int]):
        """
        Args:
          special: the library's ids of PAD, BOS, EOS and UNK; -1 if it lacks one, which is added.
          ids: all ids of the library.
        """
        assert len(special) == SPECIAL, "one id for each special token"
        self.theirs_V = np.array([*special, *sorted(set(ids) - set(special))], np.int64)
        self._ours = np.full(self.theirs_V.max() + 1, UNK, np.int32)
        self._ours[self.theirs_V[SPECIAL:]] = np.arange(SPECIAL, len(self.theirs_V))

    def ours(self, ids: Sequence[int]) -> np.ndarray:
        """Returns our ids, int32, of a text; a special token of the library is UNK in a text."""
        return self._ours[np.asarray(ids, np.int64)]

    def theirs(self, row: np.ndarray) -> list[int]:
        """Returns the library's ids of a row up to its end, without tokens that it lacks."""
        ours = cut_at_end(np.asarray(row))
        theirs = self.theirs_V[ours[ours != BOS]]
        return [int(i) for i in theirs if i >= 0]


def special_names(taken: Iterable[str]) -> list[str]:
    """Returns the names of PAD, BOS, EOS and UNK; one that is taken gets a number: '<s 1>'."""
    others, names = set(taken), []
    for name in ("<pad>", "<s>", "</s>", "<unk>"):
        numbered = (f"{name[:-1]} {n}>" if n else name for n in range(len(others) + 1))
        names.append(next(each for each in numbered if each not in others))
    return names
