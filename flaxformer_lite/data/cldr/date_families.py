"""Families of phrases with dates, times and durations.

Babel's patterns are applied directly, because its format_* functions convert to a time zone.
"""

import datetime
import math
import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from babel import Locale
from babel.dates import TIMEDELTA_UNITS, format_timedelta
from babel.lists import format_list
from babel.units import format_unit

from flaxformer_lite.data.cldr.family import LENGTHS, Family, Length, Style, has_unit

# Within one century, two digits identify the year.
ONE_CENTURY = datetime.datetime(1950, 1, 1), datetime.datetime(2050, 1, 1)
COMPOUND_LIMITS = {
    "year": 99,
    "month": 11,
    "week": 3,
    "day": 6,
    "hour": 23,
    "minute": 59,
    "second": 59,
}


def render_date(style: str, moment: datetime.datetime, locale: Locale) -> str:
    """Returns the day in a date style of the locale: full, long, medium or short."""
    return locale.date_formats[style].apply(moment, locale)


def render_time(style: str, moment: datetime.datetime, locale: Locale) -> str:
    """Returns the time of day in a time style of the locale."""
    return locale.time_formats[style].apply(moment, locale)


def render_skeleton(fields: str, moment: datetime.datetime, locale: Locale) -> str:
    """Returns a moment in the locale's pattern with these fields, such as 'Bhm'."""
    return locale.datetime_skeletons[fields].apply(moment, locale)


def render_joined(date: Style, time: Style, moment: datetime.datetime, locale: Locale) -> str:
    """Returns a date and a time in the locale's pattern that joins them."""
    pattern = locale.datetime_formats["full"].replace("'", "")
    return pattern.replace("{0}", time(moment, locale)).replace("{1}", date(moment, locale))


def _sample_moment(rng: random.Random) -> datetime.datetime:
    start, end = ONE_CENTURY
    seconds = (end - start) // datetime.timedelta(seconds=1)
    return start + datetime.timedelta(seconds=rng.randrange(seconds))


def dates(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of days from 1950 to 2049, in the four date styles of a locale."""
    styles = [partial(render_date, style) for style in ("full", "long", "medium", "short")]
    return [(_sample_moment, styles)]


def times(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of times of day.

    The styles are with and without seconds, with words such as 'in the morning', and after a
    weekday.
    """
    styles = [partial(render_time, style) for style in ("short", "medium")]
    styles += [partial(render_skeleton, fields) for fields in ("Bhm", "EBhm", "EHm")]
    return [(_sample_moment, styles)]


def dates_with_time(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of phrases with a weekday, a date and a time of day."""
    full, brief = partial(render_date, "full"), partial(render_skeleton, "yMMMEd")
    minutes, seconds = partial(render_time, "short"), partial(render_time, "medium")
    parts = ((full, minutes), (full, seconds), (brief, minutes))
    return [(_sample_moment, [partial(render_joined, *pair) for pair in parts])]


@cache
def _time_span(length: Length, unit: str, count: int, locale: Locale) -> str:
    return format_unit(count, f"duration-{unit}", length, locale=locale)


def _compound(length: Length, parts: Sequence[tuple[str, int]], locale: Locale) -> str:
    spans = [_time_span(length, *part, locale) for part in parts]
    return format_list(spans, "standard", locale=locale)


@cache
def _relative(length: Length, value: tuple[Any, int], locale: Locale) -> str:
    unit, seconds = value
    spell = partial(
        format_timedelta,
        seconds,
        granularity=unit,
        threshold=math.inf,
        add_direction=True,
        locale=locale,
    )
    try:
        return spell(format=length)
    except KeyError:  # some locales abbreviate only some units
        return spell(format="long")


def _sample_compound(rng: random.Random) -> list[tuple[str, int]]:
    limits = list(COMPOUND_LIMITS.items())
    length = rng.randint(1, 3)
    start = rng.randrange(len(limits) - length + 1)
    return [(unit, rng.randint(1, limit)) for unit, limit in limits[start : start + length]]


def _sample_relative(rng: random.Random) -> tuple[str, int]:
    unit, seconds = rng.choice(TIMEDELTA_UNITS)
    count = rng.randrange(1, 10 ** rng.randint(1, 3))
    return unit, rng.choice((-1, 1)) * count * seconds


def durations(source: Locale, target: Locale) -> list[Family]:
    """Returns the families of '5 days ago' or 'in 2 years', and of '3 hours and 20 minutes'."""
    families: list[Family] = [
        (_sample_relative, [partial(_relative, length) for length in LENGTHS])
    ]
    if all(
        has_unit(f"duration-{unit}", locale)
        for unit in COMPOUND_LIMITS
        for locale in (source, target)
    ):
        families.append((_sample_compound, [partial(_compound, length) for length in LENGTHS]))
    return families
