"""SentencePiece pieces shared by source and target: text in, the same text out."""

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from flaxformer_lite.places import write_whole

PAD, BOS, EOS, UNK = 0, 1, 2, 3

# SentencePiece writes a space as U+2581, so one in the text would come back as a space. It is escaped with a
# private-use character, which in turn escapes itself.
SPACE_MARK, ESCAPE = "\u2581", "\uf8ff"
# The result of training depends on how many threads share it, so their number belongs to the recipe.
TRAINING_THREADS = 2


def train(sentences: Iterable[str], path: Path, *, vocab_size: int, kind: str) -> None:
    """Trains on `sentences` and writes the model file at `path`, whole or not at all. Section 5.1.

    Args:
      vocab_size: pieces, with the 4 special tokens and 256 bytes; a digit is always a piece of its own, so that
        numbers are copied and not memorised.
      kind: 'unigram' or 'bpe'.

    Raises:
      ValueError: the sentences cannot fill `vocab_size` pieces, or there are none.
    """
    texts = [escape(text) for text in sentences]
    if not any(texts):
        raise ValueError("The tokenizer got no text to train on: the training split has no words.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            byte_fallback=True,
            split_digits=True,
            character_coverage=1.0 if len(set("".join(texts))) < vocab_size // 4 else 0.9995,
            max_sentence_length=1 << 20,
            num_threads=TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"config.data.vocab_size: no tokenizer of {vocab_size} pieces fits this text: {reason}"
        ) from error
    write_whole(path, model.getvalue())


def pad_rows(rows: list[np.ndarray], length: int, *, end: bool = True) -> np.ndarray:
    """int32 (len(rows), length): each row's ids, the end symbol, and padding; an empty array stays all padding.

    Args:
      end: False leaves out the end symbol, as for the beginning of a text.
    """
    padded = np.full((len(rows), length), PAD, np.int32)
    for row, ids in zip(padded, rows, strict=True):
        if len(ids):
            row[: len(ids)] = ids
            row[len(ids)] = EOS if end else PAD
    return padded


def cut_at_end(row: np.ndarray) -> np.ndarray:
    """The ids of `row` before its first end symbol or padding."""
    ends = np.flatnonzero((row == EOS) | (row == PAD))
    return row[: ends[0]] if len(ends) else row


def escape(text: str) -> str:
    """`text` without U+2581."""
    return text.replace(ESCAPE, ESCAPE + "0").replace(SPACE_MARK, ESCAPE + "1")


def unescape(text: str) -> str:
    """The inverse of `escape`."""
    return text.replace(ESCAPE + "1", SPACE_MARK).replace(ESCAPE + "0", ESCAPE)


class Tokenizer:
    """A trained model: text to ids and back. Ids hold no start or end symbol."""

    def __init__(self, path: Path):
        """Raises ValueError if `path` is no SentencePiece model."""
        try:
            model = path.read_bytes()
            self._pieces = sentencepiece.SentencePieceProcessor()
            self._pieces.LoadFromSerializedProto(model)  # the constructor takes an empty file for no file
        except (OSError, RuntimeError) as error:
            raise ValueError(f"{path}: expected a SentencePiece model, got {error}") from error
        self.vocab_size: int = self._pieces.vocab_size()
        self.fingerprint: str = hashlib.sha256(model).hexdigest()

    def encode(self, texts: Sequence[str], *, threads: int | None = None) -> list[np.ndarray]:
        """One int32 array of ids a text; `threads` share the work, None: as many as there are cores."""
        options = {} if threads is None else {"num_threads": threads}
        return [np.asarray(ids, np.int32) for ids in self._pieces.encode([escape(text) for text in texts], **options)]

    def table(self) -> tuple[dict[str, tuple[int, float]], list[int]]:
        """The id and the score of each piece that texts are cut into, and the ids of the 256 bytes."""
        special = (self._pieces.is_control, self._pieces.is_unknown, self._pieces.is_unused, self._pieces.is_byte)
        ids = [i for i in range(self.vocab_size) if not any(is_special(i) for is_special in special)]
        pieces = {self._pieces.id_to_piece(i): (i, self._pieces.get_score(i)) for i in ids}
        return pieces, [self._pieces.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id by itself, with its spaces; a special symbol by its name, such as '<s>'."""
        return [unescape(self._pieces.id_to_piece(int(i)).replace(SPACE_MARK, " ")) for i in ids]

    def decode(self, rows: Iterable[np.ndarray]) -> list[str]:
        """The texts of rows of ids, each read up to its first end symbol or padding."""
        return [unescape(self._pieces.decode(cut_at_end(np.asarray(row)).tolist())) for row in rows]
