"""A tokenizer for each side, behind the interface of one: characters in, phones out.

The file is a ZIP archive of the files of both tokenizers, not compressed, so that the same
tokenizers have the same bytes with every version of zlib.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flaxformer_lite.checks.vocabularies import SIDES, Sizes
from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.system.errors import InputError

MEMBERS = {side: f"{side}/tokenizer.model" for side in SIDES}


class TwoVocabularies:
    """The tokenizers of source and target. Decoded ids are of the target."""

    kind: str = "two"

    def __init__(self, source: AnyTokenizer, target: AnyTokenizer):
        self.source, self.target = source, target
        self.content: bytes = packed({"source": source.content, "target": target.content})
        self.vocab_size: int = source.vocab_size  # see `sizes`
        both = f"{source.fingerprint} {target.fingerprint}"
        self.fingerprint: str = hashlib.sha256(both.encode()).hexdigest()

    def made_by(self, side: str) -> str:
        """Returns that of the tokenizer of `side`: runs with this one share the stored ids."""
        return tokenizer_of(self, side).made_by(side)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; `threads` None: one a core."""
        return tokenizer_of(self, side).encode(texts, side=side, threads=threads)

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers."""
        return tokenizer_of(self, side).spans(text, side=side)

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of target ids, each up to its first end symbol or padding."""
        return self.target.decode(rows)

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id of a side in the notation of its kind."""
        return tokenizer_of(self, side).vocabulary_of(side)

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by name, such as '<s>'."""
        return tokenizer_of(self, side).pieces(ids, side=side)

    @property
    def models(self) -> dict[str, bytes]:
        """The files that other programs tokenise with: 'source.tokenizer.model', ..."""
        return {**models_of(self, "source"), **models_of(self, "target")}


def packed(files: Mapping[str, bytes]) -> bytes:
    """Returns the file of `TwoVocabularies`; `files`: those of its tokenizers, by side."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for side in SIDES:  # ZipInfo without a time, so that the bytes depend on the files alone
            archive.writestr(zipfile.ZipInfo(MEMBERS[side]), files[side])
    return content.getvalue()


def unpacked(content: bytes) -> dict[str, bytes] | None:
    """Returns the files of both tokenizers by side; None if `content` is another file.

    Raises:
      InputError: the archive is damaged.
    """
    if content[:2] != b"PK":
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if not set(MEMBERS.values()) & set(archive.namelist()):
                return None  # the tokenizer of a Marian model
            return {side: archive.read(name) for side, name in MEMBERS.items()}
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise InputError(f"expected the tokenizers of source and target, got {error}") from error


def tokenizer_of(tokenizer: AnyTokenizer, side: str) -> AnyTokenizer:
    """Returns the tokenizer of 'source' or 'target'; a tokenizer of both sides is both."""
    if isinstance(tokenizer, TwoVocabularies):
        return tokenizer.source if side == "source" else tokenizer.target
    return tokenizer


def models_of(tokenizer: TwoVocabularies, side: str) -> dict[str, bytes]:
    """Returns the part of `models` that belongs to a side."""
    models = tokenizer_of(tokenizer, side).models
    return {f"{side}.{name}": content for name, content in models.items()}


def sizes(tokenizer: AnyTokenizer) -> Sizes:
    """Returns the arguments of `config.with_vocabulary`: (size, size of the target or None)."""
    if isinstance(tokenizer, TwoVocabularies):
        return tokenizer.source.vocab_size, tokenizer.target.vocab_size
    return tokenizer.vocab_size, None
