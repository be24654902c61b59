"""Scores of texts as lines: sums over a file, the surprisal of words, TSV and JSON."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flaxformer_lite.data.tokens.offsets import Span
from flaxformer_lite.data.tokens.spans import word_of, words


class WordScore(NamedTuple):
    """A word of a text, between white space."""

    word: str
    surprisal: float  # bits: -log2 of the probability of its tokens
    tokens: int
    start: int  # its first character in the text
    end: int  # the character after its last


def word_scores(
    text: str, of_tokens: Sequence[Span], log_probs: Sequence[float]
) -> list[WordScore]:
    """Returns the words of a text with their surprisal, from the spans of its tokens."""
    of_words = words(text)
    if not of_words:
        return []
    word_N = word_of(of_tokens, of_words)
    nats_K = np.bincount(word_N, -np.asarray(log_probs, np.float64), len(of_words))
    count_K = np.bincount(word_N, minlength=len(of_words))
    return [
        WordScore(text[start:end], nats / math.log(2), count, start, end)
        for (start, end), nats, count in zip(
            of_words, nats_K.tolist(), count_K.tolist(), strict=True
        )
    ]


@dataclasses.dataclass
class Total:
    """The sums over the texts of a language model."""

    nats: float = 0.0
    tokens: int = 0
    characters: int = 0
    bytes: int = 0  # of UTF-8

    def add(self, text: str, log_probs: Sequence[float]) -> None:
        """Adds a text with the log-probabilities of its tokens."""
        self.nats -= math.fsum(log_probs)
        self.tokens += len(log_probs)
        self.characters += len(text)
        self.bytes += len(text.encode())

    def values(self) -> dict[str, float]:
        """Returns the sums and their quotients, in the units of `evaluate`; nan without a text."""
        nan = math.nan
        mean = self.nats / self.tokens if self.tokens else nan
        return {
            "nats": self.nats,
            "tokens": self.tokens,
            "characters": self.characters,
            "bytes": self.bytes,
            "perplexity": math.exp(mean) if mean < 700 else (math.inf if mean >= 700 else nan),
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else nan,
            "nats_per_character": self.nats / self.characters if self.characters else nan,
        }


def tsv(values: Mapping[str, Any]) -> str:
    """Returns values as columns: floats with 6 decimals; the items of a list with spaces between.

    White space in an item, such as the character of a tokenizer, is written as its bytes: '<0x20>'.
    """
    return "\t".join(
        _number(value) if isinstance(value, int | float) else " ".join(map(_item, value))
        for value in values.values()
    )


def _number(value: float) -> str:
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _item(value: float | str) -> str:
    if not isinstance(value, str):
        return _number(value)
    return "".join(
        "".join(f"<0x{byte:02X}>" for byte in character.encode())
        if character.isspace()
        else character
        for character in value
    )


def jsonl(values: Mapping[str, Any]) -> str:
    """Returns values as an object in JSON; a number that is not finite is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [finite(each) for each in value]
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        return None if is_infinite else value

    found = {name: finite(value) for name, value in values.items()}
    return json.dumps(found, ensure_ascii=False, allow_nan=False)


def surprisal_rows(line: int, found: Iterable[WordScore]) -> list[str]:
    """Returns the rows of a line: line, word number, word and so on."""
    return [
        f"{line}\t{number}\t{word}\t{surprisal:.6f}\t{tokens}\t{start}\t{end}"
        for number, (word, surprisal, tokens, start, end) in enumerate(found, start=1)
    ]
