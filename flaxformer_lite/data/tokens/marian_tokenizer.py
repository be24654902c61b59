"""The tokenizer of an imported Marian model: two SentencePiece models and a vocabulary."""

import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flaxformer_lite.data.tokens.any_tokenizer import cut_at_end
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import SPACE_MARK, open_model, piece_spans
from flaxformer_lite.fields import BOS, UNK
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole


class MarianTokenizer:
    """The two SentencePiece models and the vocabulary of a Marian model on Hugging Face.

    The file is a ZIP archive, made by `pack`, of the original models and vocabularies and the names
    of the special pieces. Our ids are Marian's ids in another order: PAD, BOS, EOS and UNK first. A
    model that starts decoding with its padding gets a separate BOS, so that no id has two meanings.
    The models normalise texts, so decoding need not return the encoded text.
    """

    SIDES = ("source", "target")
    kind: str = "marian"

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

    def spans(self, text: str, *, side: str = "source") -> list[tuple[int, int]]:
        """Returns the characters of `text`, (start, end), that each id covers."""
        codes, rest = _language_code(text)
        start = len(text) - len(rest)
        found = piece_spans(self._models[side], rest)
        return [*((0, start) for _ in codes), *((start + a, start + b) for a, b in found)]

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
