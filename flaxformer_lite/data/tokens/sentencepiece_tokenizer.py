"""SentencePiece: trains models of the kinds 'unigram' and 'bpe', and uses those of others."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2, sentencepiece_pb2

from flaxformer_lite.data.tokens.any_tokenizer import (
    IdOrder,
    cut_at_end,
    mapping_name,
    special_names,
)
from flaxformer_lite.data.tokens.normalization import normalized, normalized_spans
from flaxformer_lite.data.tokens.offsets import composed, of_bytes
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole

# SentencePiece replaces a space with U+2581, so a U+2581 in the text would be decoded as a space.
# It is escaped with a private-use character, which also escapes itself.
SPACE_MARK, ESCAPE = "\u2581", "\uf8ff"
# The trained model depends on the number of threads, so the number is fixed.
TRAINING_THREADS = 2


def train(sentences: Iterable[str], path: Path, **options: Any) -> None:
    """Writes the model file of `trained` at `path`, atomically."""
    write_whole(path, trained(sentences, **options))


def trained(
    sentences: Iterable[str],
    *,
    vocab_size: int,
    kind: str,
    vocab_limit: str = "hard",
    character_coverage: float | None = None,
) -> bytes:
    """Returns the model file of a tokenizer trained on `sentences`. Section 5.1.

    Training is deterministic.

    Args:
      vocab_size: number of pieces, including 4 special tokens and 256 bytes. A digit is always its
        own piece, so that numbers are copied and not memorised.
      kind: 'unigram' or 'bpe'.
      vocab_limit: 'soft': sentences with fewer pieces than `vocab_size` get all that they have.
      character_coverage: as `data.character_coverage`.

    Raises:
      InputError: there are no sentences, their characters are more than `vocab_size`, they have
        fewer pieces under the 'hard' limit, or `kind` is one that is only imported.
    """
    if kind not in ("unigram", "bpe"):
        raise InputError(
            f"config.data.tokenizer: {kind!r} comes with a model (flaxformer-lite import) and is "
            "not trained; use 'unigram' or 'bpe'."
        )
    texts = [escape(text) for text in sentences]
    if not any(texts):
        raise InputError("The tokenizer got no text to train on: the training split has no words.")
    if character_coverage is None:
        character_coverage = 1.0 if len(set("".join(texts))) < vocab_size // 4 else 0.9995
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            hard_vocab_limit=vocab_limit == "hard",
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            split_digits=True,
            character_coverage=character_coverage,
            max_sentence_length=1 << 20,
            num_threads=TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _refusal(str(error), vocab_size, character_coverage) from error
    return model.getvalue()


def _refusal(reason: str, vocab_size: int, coverage: float) -> InputError:
    """Returns the refusal of SentencePiece in terms of the config."""
    if found := re.search(r"to a value <= (\d+)", reason):
        what = (
            f"this text has at most {int(found[1]):,} pieces, got {vocab_size:,}; lower it, or set "
            "data.vocab_limit='soft', which takes all of them."
        )
    elif found := re.search(r"required_chars\. \d+ vs (\d+)", reason):
        what = (
            f"the characters of this text, the 256 bytes and the special tokens are "
            f"{int(found[1]):,} pieces, got {vocab_size:,}; raise it, or lower "
            f"data.character_coverage = {coverage:g}, so that rare characters are written as bytes."
        )
    else:
        last = reason.strip().splitlines()[-1]
        what = f"no tokenizer of {vocab_size:,} pieces fits this text: {last}"
    return InputError(what, where="config.data.vocab_size")


def escape(text: str) -> str:
    """Returns `text` with U+2581 escaped."""
    return text.replace(ESCAPE, ESCAPE + "0").replace(SPACE_MARK, ESCAPE + "1")


def unescape(text: str) -> str:
    """Returns the inverse of `escape`."""
    return text.replace(ESCAPE + "1", SPACE_MARK).replace(ESCAPE + "0", ESCAPE)


def open_model(content: bytes) -> sentencepiece.SentencePieceProcessor:
    """Returns the SentencePiece model with these bytes; raises InputError if they are not one."""
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(content)  # the constructor ignores empty bytes
    except RuntimeError as error:
        raise InputError(str(error)) from error
    return model


def special_ids(model: sentencepiece.SentencePieceProcessor) -> list[int]:
    """Returns a model's ids of PAD, BOS, EOS and UNK; -1 for each that it lacks."""
    return [model.pad_id(), model.bos_id(), model.eos_id(), model.unk_id()]


def kind_of(content: bytes) -> str:
    """Returns 'unigram' or 'bpe' of a model with our special ids, else 'sentencepiece'."""
    kinds = {1: "unigram", 2: "bpe"}  # TrainerSpec.ModelType; 3: words, 4: characters
    is_ours = special_ids(open_model(content)) == [PAD, BOS, EOS, UNK]
    kind = kinds.get(_proto(content).trainer_spec.model_type)
    return kind if is_ours and kind is not None else "sentencepiece"


def piece_spans(model: sentencepiece.SentencePieceProcessor, text: str) -> list[tuple[int, int]]:
    """Returns the characters of `text`, (start, end), that each of its pieces covers.

    Each of the bytes of a character covers the character.
    """
    messages: Any = sentencepiece_pb2
    found = messages.SentencePieceText.FromString(model.encode(text, out_type="serialized_proto"))
    offsets = [(piece.begin, piece.end) for piece in found.pieces]
    is_byte = [model.is_byte(piece.id) for piece in found.pieces]
    for at in reversed(range(len(offsets) - 1)):
        # SentencePiece assigns a character to the last of its bytes.
        if is_byte[at] and is_byte[at + 1] and offsets[at][0] == offsets[at][1]:
            offsets[at] = offsets[at + 1]
    return of_bytes(text, offsets)


def with_pieces(content: bytes, pieces: Sequence[tuple[str, float]]) -> bytes:
    """Returns a SentencePiece model with more pieces, (text, score), after its own."""
    model = _proto(content)
    for piece, score in pieces:
        model.pieces.add(piece=piece, score=score)
    model.trainer_spec.vocab_size = len(model.pieces)
    extended: bytes = model.SerializeToString(deterministic=True)
    return extended


def open_without_prefix(content: bytes) -> sentencepiece.SentencePieceProcessor:
    """Returns the model with these bytes; it adds no space in front of a text."""
    model = _proto(content)
    model.normalizer_spec.add_dummy_prefix = False
    return open_model(model.SerializeToString(deterministic=True))


def _proto(content: bytes) -> Any:
    """Returns a SentencePiece model as a protocol buffer."""
    open_model(content)  # raises InputError if it is none
    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto.FromString(content)


class Tokenizer:
    """A model that `trained` made. Encoded ids have no start or end symbol."""

    def __init__(self, path: Path, normalization: str = "none", content: bytes | None = None):
        """Raises InputError if `path` is not a SentencePiece model.

        `content`: the model; None: the bytes of `path`.
        """
        self.normalization = normalization  # of sources
        try:
            model = path.read_bytes() if content is None else content
            self._pieces = open_model(model)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected a SentencePiece model, got {error}") from error
        self.content = model
        self.kind = kind_of(model)
        self.vocab_size: int = self._pieces.vocab_size()
        self.fingerprint: str = hashlib.sha256(model).hexdigest()

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return mapping_name(self.fingerprint, self.normalization, side)

    def prepared(self, text: str, side: str) -> str:
        """Returns a text as SentencePiece reads it: normalised if it is a source, and escaped."""
        return escape(normalized(text, self.normalization) if side == "source" else text)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; `threads` None: one a core."""
        options: dict[str, Any] = {} if threads is None else {"num_threads": threads}
        prepared = [self.prepared(text, side) for text in texts]
        return [np.asarray(ids, np.int32) for ids in self._pieces.encode(prepared, **options)]

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers."""
        text, of_text = normalized_spans(text, self.normalization if side == "source" else "none")
        escaped = [
            span for character, span in zip(text, of_text, strict=True) for _ in escape(character)
        ]
        return composed(piece_spans(self._pieces, escape(text)), escaped)

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id in SentencePiece's notation."""
        return [self._pieces.id_to_piece(i) for i in range(self.vocab_size)]

    @property
    def models(self) -> dict[str, bytes]:
        """The SentencePiece models by the names of their files."""
        return {"tokenizer.model": self._pieces.serialized_model_proto()}

    def table(self) -> tuple[dict[str, tuple[int, float]], list[int]]:
        """Returns {piece: (id, score)} of all pieces of text, and the ids of the 256 bytes."""
        special = (
            self._pieces.is_control,
            self._pieces.is_unknown,
            self._pieces.is_unused,
            self._pieces.is_byte,
        )
        ids = [
            i for i in range(self.vocab_size) if not any(is_special(i) for is_special in special)
        ]
        pieces = {self._pieces.id_to_piece(i): (i, self._pieces.get_score(i)) for i in ids}
        return pieces, [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by name, such as '<s>'."""
        return [unescape(self._pieces.id_to_piece(int(i)).replace(SPACE_MARK, " ")) for i in ids]

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of ids, each up to its first end symbol or padding."""
        return [unescape(self._pieces.decode(cut_at_end(np.asarray(row)).tolist())) for row in rows]


class GivenModel:
    """A SentencePiece model that other programs made, of any type and with any special ids.

    Our ids are PAD, BOS, EOS, UNK, then its pieces in its order; a special token that it lacks is
    added. It normalises texts by its own rules, so decoding need not return the encoded text.
    """

    kind: str = "sentencepiece"

    def __init__(self, content: bytes, normalization: str = "none"):
        """Raises InputError if `content` is not a SentencePiece model."""
        self._model = model = open_model(content)
        self.content, self.normalization = content, normalization
        # Not that of its bytes alone: `Tokenizer` maps the same bytes to other ids.
        self.fingerprint: str = hashlib.sha256(b"sentencepiece " + content).hexdigest()
        special = special_ids(model)
        self._order = IdOrder(special, range(model.vocab_size()))
        self.vocab_size: int = len(self._order.theirs_V)
        theirs = [int(i) for i in self._order.theirs_V]
        taken = [model.id_to_piece(i) for i in range(model.vocab_size())]
        added = special_names(taken)
        self._pieces = [taken[i] if i >= 0 else added[n] for n, i in enumerate(theirs)]

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return mapping_name(self.fingerprint, self.normalization, side)

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; `threads` None: one a core."""
        options: dict[str, Any] = {} if threads is None else {"num_threads": threads}
        if side == "source":
            texts = [normalized(text, self.normalization) for text in texts]
        return [self._order.ours(ids) for ids in self._model.encode(list(texts), **options)]

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers."""
        text, of_text = normalized_spans(text, self.normalization if side == "source" else "none")
        return composed(piece_spans(self._model, text), of_text)

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of ids, each up to its first end symbol or padding."""
        return [self._model.decode(self._order.theirs(row)) for row in rows]

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id in SentencePiece's notation."""
        return list(self._pieces)

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by name, such as '<s>'."""
        return [self._pieces[int(i)].replace(SPACE_MARK, " ") for i in ids]

    @property
    def models(self) -> dict[str, bytes]:
        """The SentencePiece model by the name of its file."""
        return {"tokenizer.model": self.content}
