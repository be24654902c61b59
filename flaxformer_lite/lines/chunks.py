"""Splits a text that is too long for the model into chunks, and joins their translations.

A text is split in two, and so is each half, until all chunks fit. The split is near the middle, so
that chunks are of similar size: a chunk of the model's maximal length would leave its translation
no space to be longer. The best available kind of break is used, in this order:

    a sentence   after . ! ? and similar marks
    a clause     after , ; : and similar marks
    a space      but not a no-break space, such as U+00A0
    anywhere     but never inside a grapheme: a letter with its accents, a flag, a family emoji
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

SPACE = r"[^\S\u00a0\u2007\u202f]"  # white space, without no-break spaces
CLOSING = r"[\"'\u2019\u201d\u00bb\u203a)\]}]*"  # closing quotes and brackets stay with the text
CLOSING_WIDE = "[\u300d\u300f\u201d\u2019\uff09\u3011]*"
BREAKS = tuple(
    re.compile(pattern)
    for pattern in (
        # Followed by a space: Latin, dandas, Arabic, Ethiopic and others. Without a space: Chinese,
        # Japanese, Burmese, Khmer.
        rf"[.!?\u2026\u061f\u06d4\u0589\u0964\u0965\u1362]{CLOSING}(?={SPACE})"
        rf"|[\u3002\uff01\uff1f\uff61\u104b\u17d4]{CLOSING_WIDE}",
        rf"[,;:\u2013\u2014\u060c\u061b\u1363]{CLOSING}(?={SPACE})"
        rf"|[\u3001\uff0c\uff1b\uff1a\u104a]{CLOSING_WIDE}",
        rf"(?<!{SPACE})(?={SPACE})",
    )
)
# Scripts without spaces between words, and their punctuation: Thai, Lao, Burmese, Khmer, CJK.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff]"
)
JOINER = "\u200d"


class Segment(NamedTuple):
    """A chunk of a text, without the spaces at the splits."""

    text: str
    within_word: bool = False  # whether the split before it divided a word: no space on joining


def cut(text: str, fits: Callable[[str], bool]) -> list[Segment]:
    """Returns `text` as chunks that fit; a single character that does not fit is kept.

    Chunks of white space are left out, so a long line of white space has no chunk.
    """
    if fits(text):
        return [Segment(text)]
    breaks = (_nearest_middle(text, pattern) for pattern in BREAKS)
    position = next(filter(None, breaks), None) or _anywhere(text)
    if position is None:
        return [Segment(text)]
    before, after = text[:position].rstrip(), text[position:].lstrip()
    first, second = (cut(part, fits) if part else [] for part in (before, after))
    divided = before + after == text and not (
        UNSPACED.match(text[position - 1]) or UNSPACED.match(text[position])
    )
    if first and second:
        second[0] = second[0]._replace(within_word=divided)
    return first + second


def join(texts: Sequence[str], segments: Sequence[Segment]) -> str:
    """Returns the output texts of all chunks as one text.

    A space separates them, unless the script has no spaces or the split divided a word.
    """
    joined = ""
    for text, segment in zip(texts, segments, strict=True):
        bare = (
            not joined
            or not text
            or segment.within_word
            or UNSPACED.match(joined[-1])
            or UNSPACED.match(text[0])
        )
        joined += text if bare else f" {text}"
    return joined


def _nearest_middle(text: str, pattern: re.Pattern[str]) -> int | None:
    """Returns the end of the match nearest to the middle of `text`; None without an inner match."""
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    positions = (match.end() for match in pattern.finditer(text))
    inner = (p for p in positions if start < p < end)
    return min(inner, key=lambda p: abs(2 * p - len(text)), default=None)


def _anywhere(text: str) -> int | None:
    """Returns the border of two graphemes nearest to the middle; None if there is only one."""
    return next((p for p in _outwards(len(text)) if _between_characters(text, p)), None)


def _outwards(length: int) -> Iterator[int]:
    """Yields 1 to length - 1, from the middle outwards."""
    middle = length // 2
    for distance in range(middle + 1):
        yield from (
            p for p in dict.fromkeys((middle - distance, middle + distance)) if 0 < p < length
        )


def _between_characters(text: str, position: int) -> bool:
    """Whether `position` is a border of two graphemes, by the main rules of Unicode Annex 29."""
    left, right = text[position - 1], text[position]
    if (
        JOINER in (left, right)
        or unicodedata.category(right).startswith("M")
        or "\U0001f3fb" <= right <= "\U0001f3ff"
    ):
        return False
    if "\u1100" <= left <= "\u11ff" and "\u1160" <= right <= "\u11ff":  # parts of a Korean syllable
        return False
    if _is_regional(left) and _is_regional(right):  # a flag is two of these
        run = re.search("[\U0001f1e6-\U0001f1ff]*$", text[:position])
        return run is None or len(run[0]) % 2 == 0
    return (left, right) != ("\r", "\n")


def _is_regional(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
