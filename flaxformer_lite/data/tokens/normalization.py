"""The normalisation of texts before they are tokenised, by the choices of `data.normalization`."""

import re
import unicodedata

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


def normalizing_code(kind: str) -> str:
    """Returns the lines of Python that normalise `text`, for the cards of exports; may be empty."""
    lines = {
        "none": [],
        "whitespace": ["import re"],
    }.get(kind, ["import re, unicodedata", f'text = unicodedata.normalize("{kind.upper()}", text)'])
    if lines:
        lines = [*lines, 'text = " ".join(re.sub("[\\u200b\\u2060\\ufeff]", "", text).split())']
    return "".join(f"{line}\n" for line in lines)
