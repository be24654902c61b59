"""Tokenizers without a model: characters, words, symbols between spaces, or bytes.

Their file is JSON: the kind, and the symbols in the order of their ids.

    {"kind": "char", "symbols": ["e", " ", "n"]}
"""

import collections
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flaxformer_lite.data.tokens.any_tokenizer import (
    SPECIAL,
    cut_at_end,
    mapping_name,
    special_names,
)
from flaxformer_lite.data.tokens.normalization import normalized, normalized_spans
from flaxformer_lite.data.tokens.offsets import composed
from flaxformer_lite.fields import BOS, UNK
from flaxformer_lite.system.errors import InputError

UNKNOWN = "<unk>"  # as a word of a text, this is the unknown token and no symbol of its own
SHOWN = 60  # characters of a text in an error


def words(text: str) -> list[str]:
    """Returns the words of `text`, split at spaces; a newline is a word of its own."""
    return re.findall(r"\n|[^ \n]+", text)


def joined_words(found: Iterable[str]) -> str:
    """Returns words with one space between 2 of them, and none beside a newline."""
    return re.sub(" ?\n ?", "\n", " ".join(found))


def between_spaces(text: str) -> list[str]:
    """Returns the symbols of `text`, which one space separates."""
    return text.split(" ") if text else []


SPLIT: dict[str, Callable[[str], list[str]]] = {
    "char": list,
    "word": words,
    "spaces": between_spaces,
}
JOIN: dict[str, Callable[[Iterable[str]], str]] = {
    "char": "".join,
    "word": joined_words,
    "spaces": " ".join,
}


def counted(texts: Iterable[str], *, kind: str, vocab_size: int | None = None) -> bytes:
    """Returns the file of a tokenizer with the symbols of `texts`, the most frequent first.

    Equally frequent symbols are in the order of their code points.

    Args:
      kind: 'char', 'word', 'spaces', or 'byte', which has no symbols to count.
      vocab_size: the most symbols, 4 special tokens included; None: all.

    Raises:
      InputError: the texts have no symbols; or a text of the kind 'spaces' has an empty one.
    """
    if kind == "byte":
        return json.dumps({"kind": kind}).encode()
    split, counts = SPLIT[kind], collections.Counter[str]()
    for text in texts:
        symbols = split(text)
        if kind == "spaces" and "" in symbols:
            raise _empty_symbol(text)
        counts.update(symbols)
    counts.pop(UNKNOWN, None)
    if not counts:
        raise InputError("The tokenizer got no text to train on: the training split has no words.")
    ranked = sorted(counts, key=lambda symbol: (-counts[symbol], symbol))
    most = None if vocab_size is None else vocab_size - SPECIAL
    return json.dumps({"kind": kind, "symbols": ranked[:most]}, ensure_ascii=False).encode()


def _empty_symbol(text: str) -> InputError:
    """Returns the refusal of a text whose spaces do not separate symbols one by one."""
    at = 0 if text.startswith(" ") else max(text.find("  "), 0) or len(text) - 1
    where = "2 spaces in a row" if "  " in text else "a space at an end"
    start = max(0, at - SHOWN // 2)
    return InputError(
        f"'spaces' needs texts whose symbols are separated by exactly one space, and a training "
        f"text has {where}: {text[start : start + SHOWN]!r}; correct the text, or set "
        "data.tokenizer='word', which ignores such spaces.",
        where="config.data.tokenizer",
    )


def parsed(content: bytes) -> dict[str, Any] | None:
    """Returns the kind and the symbols in a file of `counted`; None if it is another file."""
    try:
        found = json.loads(content)
    except ValueError:
        return None
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind == "byte":
        return {"kind": kind, "symbols": []}
    symbols = found.get("symbols") if isinstance(kind, str) and kind in SPLIT else None
    if not isinstance(symbols, list) or not all(isinstance(each, str) for each in symbols):
        return None
    return {"kind": kind, "symbols": symbols}


class SymbolTokenizer:
    """Characters, words, or symbols between spaces; one that is not listed is UNK.

    `decode` returns the encoded text if all symbols are known; of the kind 'word' only if one space
    separates the words.
    """

    def __init__(self, content: bytes, normalization: str = "none"):
        """Raises InputError if `content` is not the file of such a tokenizer."""
        found = parsed(content)
        if found is None or found["kind"] not in SPLIT or len(set(found["symbols"])) == 0:
            raise InputError("expected a tokenizer of characters, words or symbols")
        symbols: list[str] = found["symbols"]
        if len(set(symbols)) < len(symbols) or "" in symbols or UNKNOWN in symbols:
            raise InputError("expected symbols that are not empty, each of them once")
        self.content, self.normalization = content, normalization
        self.kind: str = found["kind"]
        self.fingerprint: str = hashlib.sha256(content).hexdigest()
        self._pieces = [*special_names(symbols), *symbols]
        self._id = {symbol: number for number, symbol in enumerate(symbols, SPECIAL)}
        self.vocab_size: int = len(self._pieces)

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return mapping_name(self.fingerprint, self.normalization, side)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text, computed in one thread."""
        split, number = SPLIT[self.kind], self._id
        if side == "source":
            texts = [normalized(text, self.normalization) for text in texts]
        return [
            np.array([number.get(symbol, UNK) for symbol in split(text)], np.int32)
            for text in texts
        ]

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers."""
        text, characters = normalized_spans(
            text, self.normalization if side == "source" else "none"
        )
        end, found = 0, list[tuple[int, int]]()
        for symbol in SPLIT[self.kind](text):
            # Of the kind 'spaces', an empty symbol is between 2 spaces or at an end.
            start = end + (self.kind == "spaces" and bool(found))
            start = text.index(symbol, start)
            end = start + len(symbol)
            found.append((start, end))
        return composed(found, characters)

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of ids, each up to its first end symbol or padding."""
        texts = []
        for row in rows:
            ids = cut_at_end(np.asarray(row)).tolist()
            texts.append(JOIN[self.kind](self._pieces[i] for i in ids if i != BOS))
        return texts

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the symbol of each id."""
        return list(self._pieces)

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the symbol of each id; a special symbol by name, such as '<s>'."""
        return [self._pieces[int(i)] for i in ids]

    @property
    def models(self) -> dict[str, bytes]:
        """The tokenizer by the name of its file."""
        return {"tokenizer.model": self.content}


class ByteTokenizer:
    """The bytes of UTF-8: every text has ids, and nothing is trained.

    `decode` replaces bytes that are not UTF-8, which a model may generate, with U+FFFD.
    """

    kind: str = "byte"
    vocab_size: int = SPECIAL + 256

    def __init__(self, content: bytes, normalization: str = "none"):
        """Raises InputError if `content` is not the file of such a tokenizer."""
        found = parsed(content)
        if found is None or found["kind"] != self.kind:
            raise InputError("expected a tokenizer of bytes")
        self.content, self.normalization = content, normalization
        self.fingerprint: str = hashlib.sha256(content).hexdigest()

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return mapping_name(self.fingerprint, self.normalization, side)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text, computed in one thread."""
        if side == "source":
            texts = [normalized(text, self.normalization) for text in texts]
        encoded = (text.encode(errors="replace") for text in texts)  # a surrogate becomes '?'
        return [np.frombuffer(each, np.uint8).astype(np.int32) + SPECIAL for each in encoded]

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the character of `text`, (start, end), that each byte is a part of."""
        text, characters = normalized_spans(
            text, self.normalization if side == "source" else "none"
        )
        return [
            span
            for character, span in zip(text, characters, strict=True)
            for _ in character.encode(errors="replace")
        ]

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of ids, each up to its first end symbol or padding."""
        cut = [cut_at_end(np.asarray(row)) for row in rows]
        bytes_of = [(ids[ids >= SPECIAL] - SPECIAL).astype(np.uint8).tobytes() for ids in cut]
        return [each.decode(errors="replace") for each in bytes_of]

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id: '<0x41>' for the byte of 'A'."""
        return [*special_names(()), *(f"<0x{byte:02X}>" for byte in range(256))]

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the character of each byte of ASCII, and such as '<0xC3>' for any other id."""
        names = self.vocabulary_of(side)
        return [
            chr(i - SPECIAL) if SPECIAL <= i < SPECIAL + 128 else names[i] for i in map(int, ids)
        ]

    @property
    def models(self) -> dict[str, bytes]:
        """The tokenizer by the name of its file."""
        return {"tokenizer.model": self.content}
