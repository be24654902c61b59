"""Tokenizers: a SentencePiece model shared by source and target, or the two models of Marian."""

import hashlib
import io
import itertools
import json
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from flaxformer_lite.data.tokens.normalization import normalized
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import read_whole, write_whole

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


def escape(text: str) -> str:
    """Returns `text` with U+2581 escaped."""
    return text.replace(ESCAPE, ESCAPE + "0").replace(SPACE_MARK, ESCAPE + "1")


def unescape(text: str) -> str:
    """Returns the inverse of `escape`."""
    return text.replace(ESCAPE + "1", SPACE_MARK).replace(ESCAPE + "0", ESCAPE)


def load(path: Path, normalization: str = "none") -> "AnyTokenizer":
    """Returns the tokenizer in the file `path`; raises InputError if it contains none.

    `normalization`: of sources, see `normalized`; Marian's models have their own.
    """
    is_archive = path.is_file() and read_whole(path)[:2] == b"PK"
    return MarianTokenizer(path) if is_archive else Tokenizer(path, normalization)


def open_model(content: bytes) -> sentencepiece.SentencePieceProcessor:
    """Returns the SentencePiece model with these bytes; raises InputError if they are not one."""
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(content)  # the constructor ignores empty bytes
    except RuntimeError as error:
        raise InputError(str(error)) from error
    return model


def model_kind(content: bytes) -> str:
    """Returns the kind of a tokenizer by the bytes of its file: 'unigram', 'bpe' or 'marian'."""
    if content[:2] == b"PK":
        return "marian"
    kinds = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}  # TrainerSpec.ModelType
    return kinds[_proto(content).trainer_spec.model_type]


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
    """A trained model for both sides. Encoded ids have no start or end symbol."""

    def __init__(self, path: Path, normalization: str = "none"):
        """Raises InputError if `path` is not a SentencePiece model."""
        self.normalization = normalization  # of sources
        try:
            model = path.read_bytes()
            self._pieces = open_model(model)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: expected a SentencePiece model, got {error}") from error
        self.content = model
        self.vocab_size: int = self._pieces.vocab_size()
        self.fingerprint: str = hashlib.sha256(model).hexdigest()

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        changes = side == "source" and self.normalization != "none"
        return f"{self.fingerprint} {self.normalization}" if changes else self.fingerprint

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


class MarianTokenizer:
    """The two SentencePiece models and the vocabulary of a Marian model on Hugging Face.

    The file is a ZIP archive, made by `pack`, of the original models and vocabularies and the names
    of the special pieces. Our ids are Marian's ids in another order: PAD, BOS, EOS and UNK first. A
    model that starts decoding with its padding gets a separate BOS, so that no id has two meanings.
    The models normalise texts, so decoding need not return the encoded text.
    """

    SIDES = ("source", "target")

    def __init__(self, path: Path):
        """Raises InputError if `path` is not an archive of `pack`."""
        try:
            self.content = path.read_bytes()
            with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
                self.files: dict[str, bytes] = {
                    name: archive.read(name) for name in archive.namelist()
                }
            self.special: dict[str, str] = json.loads(self.files["special.json"])
            self._models = {side: open_model(self.files[f"{side}.spm"]) for side in self.SIDES}
            self.vocabulary = {
                side: json.loads(self.files[self._vocabulary_file(side)]) for side in self.SIDES
            }
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path}: expected the tokenizer of a Marian model, got {error}"
            ) from error
        self.fingerprint: str = hashlib.sha256(self.content).hexdigest()
        self.theirs = {side: their_ids(self.vocabulary[side], self.special) for side in self.SIDES}
        self.vocab_size: int = max(map(len, self.theirs.values()))
        self._id, self._piece = {}, {}
        for side in self.SIDES:
            of_theirs = {number: piece for piece, number in self.vocabulary[side].items()}
            named = [of_theirs[number] for number in self.theirs[side]]
            named[BOS] = start_piece(self.vocabulary[side], self.special)
            self._id[side] = {piece: number for number, piece in enumerate(named)}
            self._piece[side] = named + [f"<none {n}>" for n in range(self.vocab_size - len(named))]

    def _vocabulary_file(self, side: str) -> str:
        return f"{side}_vocab.json" if f"{side}_vocab.json" in self.files else "vocab.json"

    @staticmethod
    def pack(path: Path, files: Mapping[str, bytes], special: Mapping[str, str]) -> None:
        """Writes the archive, atomically.

        Args:
          files: 'source.spm', 'target.spm', 'vocab.json', and 'target_vocab.json' if the sides have
            different vocabularies.
          special: the pieces for 'pad', 'start', 'eos' and 'unk'.
        """
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in {**files, "special.json": json.dumps(special).encode()}.items():
                # without a time, so that the same files give the same bytes
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        write_whole(path, content.getvalue())

    def made_by(self, side: str) -> str:
        """Returns a string that identifies the mapping from a text to its ids."""
        return f"{self.fingerprint} {side}"

    def encode(
        self, texts: Sequence[str], *, side: str = "source", threads: int | None = None
    ) -> list[np.ndarray]:
        """Returns an int32 array of ids for each text; a piece outside the vocabulary is UNK.

        A text may start with a code such as '>>deu<<', the target language of a multilingual model.
        """
        options: dict[str, Any] = {} if threads is None else {"num_threads": threads}
        number = self._id[side]
        coded = [_language_code(text) for text in texts]
        rows = self._models[side].encode([text for _, text in coded], out_type=str, **options)
        rows = [[*codes, *row] for (codes, _), row in zip(coded, rows, strict=True)]
        return [np.asarray([number.get(piece, UNK) for piece in row], np.int32) for row in rows]

    def vocabulary_of(self, side: str) -> list[str]:
        """Returns the piece of each id in SentencePiece's notation."""
        return self._piece[side]

    @property
    def models(self) -> dict[str, bytes]:
        """The SentencePiece models by the names of their files."""
        return {f"{side}.spm": self.files[f"{side}.spm"] for side in self.SIDES}

    def table(self) -> tuple[dict[str, tuple[int, float]], list[int]]:
        """Raises InputError: subword sampling needs one model with a piece for each byte."""
        raise InputError(
            "config.data.subword_sampling: an imported tokenizer cuts a text in one way; set it "
            "to 0."
        )

    def pieces(self, ids: Iterable[int], *, side: str = "source") -> list[str]:
        """Returns the text of each id with its spaces; a special symbol by name, such as '<s>'."""
        return [self._piece[side][int(i)].replace(SPACE_MARK, " ") for i in ids]

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """Returns the texts of rows of target ids, each up to its first end symbol or padding."""
        pieces = [
            [self._piece["target"][int(i)] for i in cut_at_end(np.asarray(row))] for row in rows
        ]
        return [
            self._models["target"].decode_pieces(row).replace(SPACE_MARK, " ").strip()
            for row in pieces
        ]


def their_ids(vocabulary: Mapping[str, int], special: Mapping[str, str]) -> list[int]:
    """Returns the Marian id for each of our ids: PAD, BOS, EOS, UNK, then the rest in its order.

    BOS is the start piece of the decoder, which may also be its PAD or EOS.
    """
    start = special["start"] if special["start"] in vocabulary else special["pad"]
    first = [vocabulary[piece] for piece in (special["pad"], start, special["eos"], special["unk"])]
    return first + sorted(set(vocabulary.values()) - set(first))


def start_piece(vocabulary: Mapping[str, int], special: Mapping[str, str]) -> str:
    """Returns the name of BOS: the model's own, or an unused one if it is also another symbol."""
    if special["start"] in vocabulary and special["start"] not in (
        special["pad"],
        special["eos"],
        special["unk"],
    ):
        return special["start"]
    names = itertools.chain(["<s>"], (f"<start {number}>" for number in itertools.count()))
    return next(name for name in names if name not in vocabulary)


def _language_code(text: str) -> tuple[list[str], str]:
    """Returns the code at the start of `text` as a list of 0 or 1, and the rest of the text."""
    end = text.find("<<") if text.startswith(">>") else -1
    return ([], text) if end < 0 else ([text[: end + 2]], text[end + 2 :])


AnyTokenizer = Tokenizer | MarianTokenizer
