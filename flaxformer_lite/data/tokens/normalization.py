"""Normalisation of source texts, the same in training, translation and exports.

An invisible character that training never saw changes a translation. References and the texts of
language models are not normalised: of those every character counts.
"""

import re
import unicodedata

from flaxformer_lite.fields import OWN_TEXT, Config

# zero-width space, word joiner, byte order mark; not the joiners that Persian and emoji need
ZERO_WIDTH = "\u200b\u2060\ufeff"


def normalized(text: str, kind: str) -> str:
    """Returns `text` normalised by one of the choices of `data.normalization`.

    'whitespace' removes ZERO_WIDTH and white space at both ends, and makes any run of white space,
    no-break spaces included, one space. 'nfc' and 'nfkc' do this after Unicode's NFC or NFKC.
    """
    if kind == "none":
        return text
    if kind != "whitespace":
        text = unicodedata.normalize(kind.upper(), text)
    return " ".join(re.sub(f"[{ZERO_WIDTH}]", "", text).split())


def chosen(config: Config) -> str:
    """Returns `data.normalization`, or its default: 'whitespace' for sources of custom text."""
    data, architecture = config.data, config.model.architecture
    if data.normalization is not None:
        return data.normalization
    has_source = architecture != "decoder_lm" and data.tokenizer != "marian"
    return "whitespace" if has_source and data.dataset in OWN_TEXT else "none"


def python_code(kind: str) -> str:
    """Returns the lines of Python that normalise `text`, for the cards of exports; may be empty."""
    lines = {
        "none": [],
        "whitespace": ["import re"],
    }.get(kind, ["import re, unicodedata", f'text = unicodedata.normalize("{kind.upper()}", text)'])
    if lines:
        lines = [*lines, 'text = " ".join(re.sub("[\\u200b\\u2060\\ufeff]", "", text).split())']
    return "".join(f"{line}\n" for line in lines)
