"""A `tokenizer.json` of Hugging Face, used through the library `tokenizers`.

The ids are in our order: PAD, BOS, EOS, UNK, then the file's order. Truncation, padding and special
tokens that the file adds to each text are switched off. Whether `decode` returns the encoded text
depends on the file.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flaxformer_lite.data.tokens.any_tokenizer import (
    SPECIAL,
    IdOrder,
    mapping_name,
    special_names,
)
from flaxformer_lite.data.tokens.normalization import normalized, normalized_spans
from flaxformer_lite.data.tokens.offsets import composed
from flaxformer_lite.system.errors import InputError

# The usual names of PAD, BOS, EOS and UNK; of several, the first that the file has.
NAMES = (
    ("[PAD]", "<pad>"),
    ("[CLS]", "<s>", "<bos>"),
    ("[SEP]", "</s>", "<eos>", "<|endoftext|>"),
    ("[UNK]", "<unk>"),
)
SPACE_MARK = "\u2581"  # a space in pieces
MARKS = {"Ġ": " ", "Ċ": "\n"}  # a space and a newline in pieces of byte-level tokenizers


def library() -> Any:
    """Returns the library `tokenizers`; raises InputError if it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            "'huggingface' needs the extra: pip install 'flaxformer_lite[huggingface]'.",
            where="config.data.tokenizer",
        ) from error
    return tokenizers


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`; special tokens that it lacks are added."""

    kind: str = "huggingface"

    def __init__(self, content: bytes, normalization: str = "none"):
        """Raises InputError if `content` is no `tokenizer.json`, or the library is missing."""
        tokenizers = library()
        try:
            self._theirs = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises `Exception` itself
            raise InputError(f"expected a tokenizer.json, got {error}") from error
        self._theirs.no_truncation()
        self._theirs.no_padding()
        # The name of a special token in a text is text.
        self._theirs.encode_special_tokens = True
        self.content, self.normalization = content, normalization
        self.fingerprint: str = hashlib.sha256(content).hexdigest()
        ids: dict[str, int] = self._theirs.get_vocab(with_added_tokens=True)
        special = [_id_of(names, ids) for names in _names(content)]
        self._order = IdOrder(special, ids.values())
        self.vocab_size: int = len(self._order.theirs_V)
        piece = {number: name for name, number in ids.items()}
        self._pieces = [
            piece.get(int(number), added)
            for number, added in zip(
                self._order.theirs_V,
                [*special_names(ids), *[""] * (self.vocab_size - SPECIAL)],
                strict=True,
            )
        ]
        self._is_byte_level = b'"ByteLevel"' in content

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the file; the library's own pickles forget `encode_special_tokens`."""
        return HuggingFaceTokenizer, (self.content, self.normalization)

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return mapping_name(self.fingerprint, self.normalization, side)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; `threads` 1, or None: as the library."""
        if side == "source":
            texts = [normalized(text, self.normalization) for text in texts]
        options = {"add_special_tokens": False}
        if threads == 1:
            rows = [self._theirs.encode(text, **options) for text in texts]
        else:
            rows = self._theirs.encode_batch(list(texts), **options)
        return [self._order.ours(row.ids) for row in rows]

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers, by the library."""
        text, characters = normalized_spans(
            text, self.normalization if side == "source" else "none"
        )
        return composed(self._theirs.encode(text, add_special_tokens=False).offsets, characters)

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of ids, each up to its first end symbol or padding."""
        theirs = [self._order.theirs(row) for row in rows]
        return [self._theirs.decode(row, skip_special_tokens=False) for row in theirs]

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id as in the file."""
        return list(self._pieces)

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by its name."""
        marks = {SPACE_MARK: " ", **(MARKS if self._is_byte_level else {})}
        table = {ord(mark): text for mark, text in marks.items()}
        return [self._pieces[int(i)].translate(table) for i in ids]

    @property
    def models(self) -> dict[str, bytes]:
        """The tokenizer by the name of its file."""
        return {"tokenizer.json": self.content}


def _names(content: bytes) -> list[tuple[str, ...]]:
    """Returns the possible names of PAD, BOS, EOS and UNK, the model's own unknown token first."""
    model: Mapping[str, Any] = json.loads(content).get("model") or {}
    own = model.get("unk_token")
    if isinstance(model.get("unk_id"), int):  # a unigram model has its number
        own = model["vocab"][model["unk_id"]][0]
    unknown = (own, *NAMES[3]) if isinstance(own, str) else NAMES[3]
    return [*NAMES[:3], unknown]


def _id_of(names: Sequence[str], ids: Mapping[str, int]) -> int:
    """Returns the id of the first name in the vocabulary, or -1."""
    return next((ids[name] for name in names if name in ids), -1)
