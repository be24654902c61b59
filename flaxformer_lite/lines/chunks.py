"""A text that is too long cut into segments, and what was made of them joined: pure, and it knows no model.

A text is cut in two where it hurts least, and so is each half until all fit: near the middle, so that segments are of
like size and none is nearly as long as the model takes, which would leave its translation no room to be longer. Where
it hurts least is, in this order,

    a sentence   after . ! ? and the like
    a clause     after , ; : and the like
    a space      but not at one that forbids a break, such as U+00A0
    anywhere     but never inside what a reader takes for one character: a letter with its accents, a flag, a family
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

SPACE = r"[^\S\u00a0\u2007\u202f]"  # but those that forbid a break
CLOSING = r"[\"'\u2019\u201d\u00bb\u203a)\]}]*"  # belongs to what it closes
CLOSING_WIDE = "[\u300d\u300f\u201d\u2019\uff09\u3011]*"
BREAKS = tuple(
    re.compile(pattern)
    for pattern in (
        # With a space after it: Latin and others; without: Chinese, Japanese, Burmese, Khmer. Dandas, Arabic, Ethiopic.
        rf"[.!?\u2026\u061f\u06d4\u0589\u0964\u0965\u1362]{CLOSING}(?={SPACE})"
        rf"|[\u3002\uff01\uff1f\uff61\u104b\u17d4]{CLOSING_WIDE}",
        rf"[,;:\u2013\u2014\u060c\u061b\u1363]{CLOSING}(?={SPACE})|[\u3001\uff0c\uff1b\uff1a\u104a]{CLOSING_WIDE}",
        rf"(?<!{SPACE})(?={SPACE})",
    )
)
# Scripts that put no space between words, and their punctuation: Thai and Lao, Burmese, Khmer, CJK.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff9f"
    "\U00020000-\U0003ffff]"
)
JOINER = "\u200d"


class Segment(NamedTuple):
    """A part of a text, without the spaces at its cuts."""

    text: str
    within_word: bool = False  # whether the cut before it divided a word, so that no space belongs there


def cut(text: str, fits: Callable[[str], bool]) -> list[Segment]:
    """`text` whole if it fits, or in segments that do; a single character that does not fit stays.

    Segments of white space alone are left out: a long line of nothing else has none.
    """
    if fits(text):
        return [Segment(text)]
    place = next(filter(None, (_nearest_middle(text, pattern) for pattern in BREAKS)), None) or _anywhere(text)
    if place is None:
        return [Segment(text)]
    before, after = text[:place].rstrip(), text[place:].lstrip()
    first, second = (cut(part, fits) if part else [] for part in (before, after))
    divided = before + after == text and not (UNSPACED.match(text[place - 1]) or UNSPACED.match(text[place]))
    if first and second:
        second[0] = second[0]._replace(within_word=divided)
    return first + second


def join(texts: Sequence[str], segments: Sequence[Segment]) -> str:
    """What was made of each segment in one text: with a space between, unless the script has none or a word was cut."""
    joined = ""
    for text, segment in zip(texts, segments, strict=True):
        bare = not joined or not text or segment.within_word
        bare = bare or UNSPACED.match(joined[-1]) or UNSPACED.match(text[0])
        joined += text if bare else f" {text}"
    return joined


def _nearest_middle(text: str, pattern: re.Pattern) -> int | None:
    """The end of the match that is nearest to the middle of `text`, with something on both sides of it."""
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    places = (match.end() for match in pattern.finditer(text))
    return min((p for p in places if begin < p < end), key=lambda p: abs(2 * p - len(text)), default=None)


def _anywhere(text: str) -> int | None:
    """The place between two characters nearest to the middle; None: it is one character."""
    return next((p for p in _outwards(len(text)) if _between_characters(text, p)), None)


def _outwards(length: int) -> Iterator[int]:
    """1 to length - 1, from the middle outwards."""
    middle = length // 2
    for distance in range(middle + 1):
        yield from (p for p in dict.fromkeys((middle - distance, middle + distance)) if 0 < p < length)


def _between_characters(text: str, place: int) -> bool:
    """Whether no character reaches over `place`: by the rules of Unicode Annex 29 that matter where text is cut."""
    left, right = text[place - 1], text[place]
    if JOINER in (left, right) or unicodedata.category(right).startswith("M") or "\U0001f3fb" <= right <= "\U0001f3ff":
        return False
    if "\u1100" <= left <= "\u11ff" and "\u1160" <= right <= "\u11ff":  # parts of a Korean syllable
        return False
    if _is_regional(left) and _is_regional(right):  # a flag is two of these
        run = re.search("[\U0001f1e6-\U0001f1ff]+$", text[:place])[0]
        return len(run) % 2 == 0
    return (left, right) != ("\r", "\n")


def _is_regional(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
