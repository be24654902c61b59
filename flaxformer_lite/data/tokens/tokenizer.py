"""Reads the tokenizer in a file, whatever its kind; the kinds are the choices of `data.tokenizer`.

unigram, bpe        `Tokenizer`, a SentencePiece model that we train
marian              `MarianTokenizer`, that of an imported model
char, word, spaces  `SymbolTokenizer`
byte                `ByteTokenizer`
sentencepiece       `GivenModel`, a SentencePiece model of another program
huggingface         `HuggingFaceTokenizer`, a tokenizer.json

`TwoVocabularies` has one of these, except that of Marian, for each side.
"""

from pathlib import Path

from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer, cut_at_end, pad_rows
from flaxformer_lite.data.tokens.huggingface_tokenizer import HuggingFaceTokenizer
from flaxformer_lite.data.tokens.marian_tokenizer import MarianTokenizer
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import (
    GivenModel,
    Tokenizer,
    kind_of,
    open_model,
    train,
    trained,
)
from flaxformer_lite.data.tokens.symbol_tokenizer import ByteTokenizer, SymbolTokenizer, parsed
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies, unpacked
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import read_whole

__all__ = [
    "AnyTokenizer",
    "ByteTokenizer",
    "GivenModel",
    "HuggingFaceTokenizer",
    "MarianTokenizer",
    "SymbolTokenizer",
    "Tokenizer",
    "TwoVocabularies",
    "cut_at_end",
    "load",
    "model_kind",
    "open_model",
    "pad_rows",
    "train",
    "trained",
]


def load(path: Path, normalization: str = "none") -> AnyTokenizer:
    """Returns the tokenizer in the file `path`; raises InputError if it contains none.

    `normalization`: of sources, see `normalized`; Marian's models have their own.
    """
    content = read_whole(path) if path.is_file() else b""
    try:
        files = unpacked(content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if files is None:
        return _opened(path, content, normalization)
    source = _opened(path, files["source"], normalization)
    return TwoVocabularies(source, _opened(path, files["target"], "none"))


def _opened(path: Path, content: bytes, normalization: str) -> AnyTokenizer:
    """Returns the tokenizer of one vocabulary with these bytes; `path` is named in errors."""
    try:
        kind = model_kind(content)
        if kind in ("char", "word", "spaces"):
            return SymbolTokenizer(content, normalization)
        if kind == "byte":
            return ByteTokenizer(content, normalization)
        if kind == "huggingface":
            return HuggingFaceTokenizer(content, normalization)
        if kind == "sentencepiece":
            return GivenModel(content, normalization)
    except InputError as error:
        if error.where:  # a missing library
            raise
        if content[:1] == b"{":
            raise InputError(f"{path}: {error}") from error
        kind = ""  # no SentencePiece model either: the constructor names the file
    return MarianTokenizer(path) if kind == "marian" else Tokenizer(path, normalization, content)


def model_kind(content: bytes) -> str:
    """Returns the kind of a tokenizer, a choice of `data.tokenizer`, by the bytes of its file.

    Raises:
      InputError: they are no tokenizer.
    """
    if content[:2] == b"PK":
        return "marian"
    if content[:1] == b"{":
        found = parsed(content)
        return "huggingface" if found is None else str(found["kind"])
    return kind_of(content)
