"""Reference alignments of CLDR phrases, which follow from the way in which phrases are made.

A phrase is a row of segments. A segment of a date is a field of the CLDR's pattern, such as the day
or the name of the month; the segments of a phrase with a number are the number and the words beside
it. Words of the same segment in both languages are linked. The links are sure if the segment is one
word on either side. Otherwise the order of its words is unknown, and all links are possible.
"""

import datetime
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from babel import Locale
from babel.dates import DateTimeFormat, DateTimePattern, tokenize_pattern

from flaxformer_lite.data.cldr import date_families, phrase_families
from flaxformer_lite.data.cldr.family import Style
from flaxformer_lite.scores.word_links import Reference

WITH_NUMBER = ("measure", "money_in_words", "number")
KINDS = ("date", "time", "date_with_time", *WITH_NUMBER)
NUMBER = re.compile(r"\d(?:[\d.,'’٫٬\s]*\d)?")
# The fields of patterns: the standalone and the 12-hour forms have the name of the others.
FIELDS = {"c": "E", "L": "M", "h": "H", "K": "H", "k": "H", "b": "a", "B": "a"}
PERIOD, HOUR = "a", "H"  # 'PM' has no word in '15:05', but says something of its hour
JOINING = "joining"  # words between a date and a time, 'at'

Segment = tuple[str | None, str]  # its name, None for a literal of the pattern; its text
Words = Mapping[str, list[int]]  # the numbers of the words of each segment


class AlignedPhrase(NamedTuple):
    """The same value in two locales, its kind, and the alignment of the words."""

    kind: str
    source: str
    target: str
    reference: Reference


def aligned_phrases(source: str, target: str, *, per_kind: int = 10_400) -> list[AlignedPhrase]:
    """Returns the phrases of KINDS in `phrase_families.phrases`, with their alignments.

    They are in the order of their sampling, and one kind follows another. A text that occurs in 2
    kinds is in both.

    Args:
      per_kind: as of `phrases`; the most of each kind.

    Raises:
      InputError: a locale is unknown, or both are the same.
    """
    locales = phrase_families.parse_locales(source, target)
    found: list[AlignedPhrase] = []
    for kind in KINDS:
        rng = random.Random(f"{phrase_families.VERSION} {source}-{target} {kind}")
        families = phrase_families.KINDS[kind](*locales)
        samples = phrase_families.sample_styles(rng, families, *locales)
        distinct: dict[str, AlignedPhrase] = {}
        for value, style, text in itertools.islice(samples, 20 * per_kind):
            translation = style(value, locales[1])
            if text and translation and text not in distinct:
                links = reference(kind, value, style, *locales)
                distinct[text] = AlignedPhrase(kind, text, translation, links)
            if len(distinct) == per_kind:
                break
        found += distinct.values()
    return found


def reference(kind: str, value: Any, style: Style, source: Locale, target: Locale) -> Reference:
    """Returns the alignment of `value` in the two locales."""
    source_words, target_words = (
        words_of(segments(kind, value, style, locale)) for locale in (source, target)
    )
    sure: set[tuple[int, int]] = set()
    possible: set[tuple[int, int]] = set()
    for name in source_words.keys() & target_words.keys():
        sides = source_words[name], target_words[name]
        possible |= set(itertools.product(*sides))
        if min(map(len, sides)) == 1:
            sure |= set(itertools.product(*sides))
    period, hour = ((source_words.get(f, []), target_words.get(f, [])) for f in (PERIOD, HOUR))
    if not all(period):
        possible |= {*itertools.product(period[0], hour[1]), *itertools.product(hour[0], period[1])}
    return Reference(frozenset(sure), frozenset(possible))


def words_of(parts: list[Segment]) -> Words:
    """Returns the numbers of the words, from 0, that each kind of segment has a character of."""
    text = "".join(part for _, part in parts)
    names = [name for name, part in parts for _ in part]
    found: dict[str, list[int]] = {}
    for number, word in enumerate(re.finditer(r"\S+", text)):
        for name in {name for name in names[slice(*word.span())] if name is not None}:
            found.setdefault(name, []).append(number)
    return found


def segments(kind: str, value: Any, style: Style, locale: Locale) -> list[Segment]:
    """Returns the segments of `style(value, locale)`; joined, they are that text."""
    if kind in WITH_NUMBER:
        return _around_number(style(value, locale))
    return _of_style(value, style, locale)


def _around_number(text: str) -> list[Segment]:
    """Returns the number, the first one of a text, and the rest; Arabic has words for 2 litres."""
    found = NUMBER.search(text)
    first, stop = (0, 0) if found is None else found.span()
    return [("rest", text[:first]), ("number", text[first:stop]), ("rest", text[stop:])]


def _of_style(moment: datetime.datetime, style: Any, locale: Locale) -> list[Segment]:
    """Returns the segments of a moment in a style of `date_families`."""
    name = style.args[0]
    patterns: dict[Callable[..., str], Callable[[], DateTimePattern]] = {
        date_families.render_date: lambda: locale.date_formats[name],
        date_families.render_time: lambda: locale.time_formats[name],
        date_families.render_skeleton: lambda: locale.datetime_skeletons[name],
    }
    if style.func in patterns:
        return list(_of_pattern(patterns[style.func]().pattern, moment, locale))
    date, time = style.args
    parts = {"{0}": partial(_of_style, moment, time), "{1}": partial(_of_style, moment, date)}
    found: list[Segment] = []
    pattern = locale.datetime_formats["full"].replace("'", "")
    for part in re.split(r"(\{[01]\})", pattern):
        found += parts[part](locale) if part in parts else [(_joining(part), part)]
    return found


def _joining(literal: str) -> str | None:
    return JOINING if any(map(str.isalpha, literal)) else None


def _of_pattern(pattern: str, moment: datetime.datetime, locale: Locale) -> Iterator[Segment]:
    """Yields the fields and the literals of a moment in a pattern of the CLDR."""
    fields = DateTimeFormat(moment, locale)
    for _, part in tokenize_pattern(pattern):
        if isinstance(part, str):
            yield None, part
        else:
            letter, count = part
            yield FIELDS.get(letter, letter), fields[letter * count]
