"""The normalisation of texts before they are tokenised, by the choices of `data.normalization`."""

import re
import unicodedata
from typing import Literal

# zero-width space, word joiner, byte order mark; not the joiners that Persian and emoji need
ZERO_WIDTH = "\u200b\u2060\ufeff"


def normalized(text: str, kind: str) -> str:
    """Returns `text` normalised by a choice of `data.normalization`.

    'whitespace' removes ZERO_WIDTH and white space at both ends, and makes any run of white space,
    no-break spaces included, one space. 'nfc' and 'nfkc' do this after Unicode's NFC or NFKC.
    """
    if kind == "none":
        return text
    if kind != "whitespace":
        text = unicodedata.normalize("NFC" if kind == "nfc" else "NFKC", text)
    return " ".join(re.sub(f"[{ZERO_WIDTH}]", "", text).split())


def normalized_spans(text: str, kind: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns `normalized` and, for each of its characters, (start, end) of its part of `text`."""
    spans = [(at, at + 1) for at in range(len(text))]
    if kind == "none":
        return text, spans
    characters = list(zip(text, spans, strict=True))
    if kind != "whitespace" and not text.isascii():
        form: Literal["NFC", "NFKC"] = "NFC" if kind == "nfc" else "NFKC"
        characters = [
            (character, span)
            for span in _independent_parts(text, form)
            for character in unicodedata.normalize(form, text[slice(*span)])
        ]
    kept: list[tuple[str, tuple[int, int]]] = []
    for character, (start, end) in characters:
        if character in ZERO_WIDTH:
            continue
        if not character.isspace():
            kept.append((character, (start, end)))
        elif kept and kept[-1][0] == " ":  # all spaces of a run become one
            kept[-1] = (" ", (kept[-1][1][0], end))
        elif kept:
            kept.append((" ", (start, end)))
    if kept and kept[-1][0] == " ":
        kept.pop()
    return "".join(character for character, _ in kept), [span for _, span in kept]


def _independent_parts(text: str, form: Literal["NFC", "NFKC"]) -> list[tuple[int, int]]:
    """Returns the parts of `text`, (start, end), that Unicode normalises independently.

    A part starts at a character that does not combine with those before it.
    """
    apart: Literal["NFD", "NFKD"] = "NFD" if form == "NFC" else "NFKD"
    starts = [
        at
        for at, character in enumerate(text)
        if at == 0 or unicodedata.combining(unicodedata.normalize(apart, character)[0]) == 0
    ]
    parts: list[tuple[int, int]] = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        if parts:  # such as the 2 parts of a Korean syllable
            first = parts[-1][0]
            before, after = (
                unicodedata.normalize(form, part) for part in (text[first:start], text[start:end])
            )
            if unicodedata.normalize(form, text[first:end]) != before + after:
                parts[-1] = (first, end)
                continue
        parts.append((start, end))
    return parts


def normalizing_code(kind: str) -> str:
    """Returns the lines of Python that normalise `text`, for the cards of exports; may be empty."""
    lines = {
        "none": [],
        "whitespace": ["import re"],
    }.get(kind, ["import re, unicodedata", f'text = unicodedata.normalize("{kind.upper()}", text)'])
    if lines:
        lines = [*lines, 'text = " ".join(re.sub("[\\u200b\\u2060\\ufeff]", "", text).split())']
    return "".join(f"{line}\n" for line in lines)
