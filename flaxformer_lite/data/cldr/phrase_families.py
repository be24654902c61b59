"""Phrases that say the same thing in two locales, rendered by Babel from the Unicode CLDR.

A phrase starts as a value: a date, an amount, three countries. A *style* is a function (value, locale) -> text
that renders it in either locale. A *family* is a way to draw values with the styles that suit them, and a *kind*
of phrase is one family or more.

A source text has one target. Where two styles of one value read the same in the source ('May 5, 2024' is long
and medium), the first-named style gives the target, whichever of them was drawn. Values are drawn so that the
source holds all that the target shows: years come from one century, a compact number prints all its digits.
"""

import contextlib
import datetime
import difflib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import cache, partial
from typing import Any, NamedTuple

from babel import Locale
from babel.core import get_cldr_version
from babel.dates import TIMEDELTA_UNITS, format_timedelta
from babel.languages import get_official_languages
from babel.lists import format_list
from babel.localedata import locale_identifiers
from babel.numbers import (
    format_compact_decimal,
    format_currency,
    format_decimal,
    format_percent,
    get_currency_name,
    get_currency_precision,
    get_currency_symbol,
    get_territory_currencies,
)
from babel.units import format_unit

from flaxformer_lite.system.errors import InputError

CORPUS = 1  # raise it with every change that alters a phrase or the order of phrases
# The version freezes the text: it holds the CLDR's and it seeds every draw.
VERSION = ".".join([str(CORPUS), *f"{get_cldr_version()}.0".split(".")[:2]])

ONE_CENTURY = datetime.datetime(1950, 1, 1), datetime.datetime(2050, 1, 1)  # two digits name the year
LIVE_CURRENCIES = datetime.date(2024, 1, 1)  # those in use that day, not on the day of the run
NOT_COUNTRIES = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}  # unions, pseudo-locales, 'unknown region'
LENGTHS = "long", "short"
COMPOUND_LIMITS = {"year": 99, "month": 11, "week": 3, "day": 6, "hour": 23, "minute": 59, "second": 59}
UNITS = """
    acceleration-meter-per-square-second angle-degree angle-radian area-acre area-hectare area-square-foot
    area-square-kilometer area-square-meter area-square-mile consumption-liter-per-100-kilometer
    consumption-mile-per-gallon digital-bit digital-byte digital-gigabit digital-gigabyte digital-kilobyte
    digital-megabyte digital-petabyte digital-terabyte electric-ampere electric-milliampere electric-ohm
    electric-volt energy-calorie energy-joule energy-kilocalorie energy-kilojoule energy-kilowatt-hour
    frequency-gigahertz frequency-hertz frequency-kilohertz frequency-megahertz graphics-megapixel
    graphics-pixel length-astronomical-unit length-centimeter length-foot length-inch length-kilometer
    length-light-year length-meter length-mile length-millimeter length-nanometer length-nautical-mile
    length-yard light-lux mass-carat mass-gram mass-kilogram mass-milligram mass-ounce mass-pound mass-tonne
    power-gigawatt power-horsepower power-kilowatt power-megawatt power-watt pressure-atmosphere
    pressure-bar pressure-hectopascal pressure-kilopascal speed-kilometer-per-hour speed-knot
    speed-meter-per-second speed-mile-per-hour temperature-celsius temperature-fahrenheit temperature-kelvin
    volume-barrel volume-centiliter volume-cubic-centimeter volume-cubic-foot volume-cubic-kilometer
    volume-cubic-meter volume-cup volume-gallon volume-liter volume-milliliter volume-pint volume-tablespoon
    volume-teaspoon
""".split()

Style = Callable[[Any, Locale], str]
Draw = Callable[[random.Random], Any]
Family = tuple[Draw, list[Style]]


class Phrase(NamedTuple):
    """The same value in two locales, and its kind."""

    kind: str
    source: str
    target: str


def phrases(source: str, target: str, *, per_kind: int = 10_400) -> list[Phrase]:
    """Renders `per_kind` phrases of each kind, in turn, so that every slice holds all kinds alike.

    The result depends on VERSION and the arguments alone. No source text comes twice. A kind of which the CLDR
    has not enough in both locales is left out; between 'en' and any of 140 languages, 'de' among them, none is.

    Raises:
      InputError: as `parse_locales`, or the locales share no more than half of the kinds.
    """
    locales = parse_locales(source, target)
    columns: dict[str, list[Phrase]] = {}
    seen: set[str] = set()
    for kind, families in KINDS.items():
        rng = random.Random(f"{VERSION} {source}-{target} {kind}")
        found: dict[str, Phrase] = {}
        for text, translation in itertools.islice(_draws(rng, families(*locales), *locales), 20 * per_kind):
            if text and translation and text not in seen:
                found.setdefault(text, Phrase(kind, text, translation))
            if len(found) == per_kind:
                seen.update(found)
                columns[kind] = list(found.values())
                rng.shuffle(columns[kind])  # what is rare, like a list of one name, was drawn out early
                break
    if 2 * len(columns) <= len(KINDS):
        raise InputError(
            f"Expected two locales that share more than half of the kinds {', '.join(KINDS)}; of {source!r} and "
            f"{target!r} the CLDR has enough for {', '.join(columns) or 'none'}: take one with fuller data."
        )
    return [phrase for turn in zip(*columns.values(), strict=True) for phrase in turn]


def parse_locales(source: str, target: str) -> tuple[Locale, Locale]:
    """The two Babel locales of exactly these names.

    Raises:
      InputError: there is none of that name; the message has the nearest ones. Or both are the same.
    """
    names = {known.lower(): known for known in sorted(locale_identifiers())}
    for name in (source, target):
        if name not in names.values():
            near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
            hint = " or ".join(repr(names[match]) for match in near) or "a name like 'en' or 'pt_BR'"
            raise InputError(f"Unknown locale {name!r}: expected one of the CLDR; nearest is {hint}.")
    if source == target:
        raise InputError(f"Expected two different locales, got {source!r} twice; take another target.")
    return Locale.parse(source), Locale.parse(target)


def _draws(rng: random.Random, families: Iterable[Family], source: Locale, target: Locale) -> Iterator[tuple[str, str]]:
    """Source and target texts without end, or none where the CLDR has no data for any style."""
    families = [(draw, usable) for draw, styles in families if (usable := _usable(draw, styles, source, target))]
    while families:
        draw, styles = rng.choice(families)
        yield _render(draw(rng), styles, rng.randrange(len(styles)), source, target)


def _usable(draw: Draw, styles: list[Style], *locales: Locale) -> list[Style]:
    """The styles that all locales have data for: Babel raises a KeyError where a pattern is missing."""
    usable = []
    for style in styles:
        with contextlib.suppress(LookupError):
            for locale in locales:
                style(draw(random.Random(0)), locale)
            usable.append(style)
    return usable


def _render(value: Any, styles: list[Style], pick: int, source: Locale, target: Locale) -> tuple[str, str]:
    """Renders `value` in style `pick`, or in the first style that reads the same in the source."""
    text = styles[pick](value, source)
    first = next((style for style in styles[:pick] if style(value, source) == text), styles[pick])
    return text, first(value, target)


# Dates and times. Babel's patterns are applied directly: its format_* functions would shift to a time zone.


def _date(style: str, moment: datetime.datetime, locale: Locale) -> str:
    return locale.date_formats[style].apply(moment, locale)


def _time(style: str, moment: datetime.datetime, locale: Locale) -> str:
    return locale.time_formats[style].apply(moment, locale)


def _skeleton(fields: str, moment: datetime.datetime, locale: Locale) -> str:
    return locale.datetime_skeletons[fields].apply(moment, locale)


def _joined(date: Style, time: Style, moment: datetime.datetime, locale: Locale) -> str:
    pattern = locale.datetime_formats["full"].replace("'", "")
    return pattern.replace("{0}", time(moment, locale)).replace("{1}", date(moment, locale))


def _draw_moment(rng: random.Random) -> datetime.datetime:
    start, end = ONE_CENTURY
    return start + datetime.timedelta(seconds=rng.randrange((end - start) // datetime.timedelta(seconds=1)))


def dates(source: Locale, target: Locale) -> list[Family]:
    """Days from 1950 to 2049 in the four styles of a locale."""
    return [(_draw_moment, [partial(_date, style) for style in ("full", "long", "medium", "short")])]


def times(source: Locale, target: Locale) -> list[Family]:
    """Times of day: with and without seconds, in words like 'in the morning', and after a weekday."""
    styles = [partial(_time, style) for style in ("short", "medium")]
    return [(_draw_moment, styles + [partial(_skeleton, fields) for fields in ("Bhm", "EBhm", "EHm")])]


def dates_with_time(source: Locale, target: Locale) -> list[Family]:
    """A weekday, a date and a time of day."""
    full, brief = partial(_date, "full"), partial(_skeleton, "yMMMEd")
    minutes, seconds = partial(_time, "short"), partial(_time, "medium")
    styles = [partial(_joined, *parts) for parts in ((full, minutes), (full, seconds), (brief, minutes))]
    return [(_draw_moment, styles)]


@cache
def _time_span(length: str, unit: str, count: int, locale: Locale) -> str:
    return format_unit(count, f"duration-{unit}", length, locale=locale)


def _compound(length: str, parts: Sequence[tuple[str, int]], locale: Locale) -> str:
    return format_list([_time_span(length, *part, locale) for part in parts], "standard", locale=locale)


@cache
def _relative(length: str, value: tuple[str, int], locale: Locale) -> str:
    unit, seconds = value
    spell = partial(format_timedelta, seconds, granularity=unit, threshold=math.inf, add_direction=True, locale=locale)
    try:
        return spell(format=length)
    except KeyError:  # where a locale abbreviates some units only
        return spell(format="long")


def _draw_compound(rng: random.Random) -> list[tuple[str, int]]:
    limits = list(COMPOUND_LIMITS.items())
    length = rng.randint(1, 3)
    start = rng.randrange(len(limits) - length + 1)
    return [(unit, rng.randint(1, limit)) for unit, limit in limits[start : start + length]]


def _draw_relative(rng: random.Random) -> tuple[str, int]:
    unit, seconds = rng.choice(TIMEDELTA_UNITS)
    count = rng.randrange(1, 10 ** rng.randint(1, 3))
    return unit, rng.choice((-1, 1)) * count * seconds


def durations(source: Locale, target: Locale) -> list[Family]:
    """'3 hours and 20 minutes', and '5 days ago' or 'in 2 years'."""
    families: list[Family] = [(_draw_relative, [partial(_relative, length) for length in LENGTHS])]
    if all(_has_unit(f"duration-{unit}", locale) for unit in COMPOUND_LIMITS for locale in (source, target)):
        families.append((_draw_compound, [partial(_compound, length) for length in LENGTHS]))
    return families


# Numbers. Decimals throughout: what is drawn is what is printed, and plural forms follow it.


def _draw_number(rng: random.Random, digits: int, places: int) -> Decimal:
    """Up to `digits` before the point and `places` after it, each count as likely; the last decimal is not 0.

    From 2 up, because Babel misses the singular of some units.
    """
    places = rng.randint(0, places)
    whole = rng.randrange(2, 10 ** rng.randint(1, digits))
    fraction = 10 * rng.randrange(10 ** (places - 1)) + rng.randint(1, 9) if places else 0
    return Decimal(whole * 10**places + fraction).scaleb(-places)


def _unit(length: str, value: tuple[str, Decimal], locale: Locale) -> str:
    unit, number = value
    return format_unit(number, unit, length, locale=locale)


def _has_unit(unit: str, locale: Locale) -> bool:
    """Whether the locale has words for `unit`; Babel would print its identifier instead."""
    return all(unit not in format_unit(2, unit, length, locale=locale) for length in LENGTHS)


def measures(source: Locale, target: Locale) -> list[Family]:
    """A number with its unit, spelled out or as a symbol."""
    units = [unit for unit in UNITS if _has_unit(unit, source) and _has_unit(unit, target)]
    for length in LENGTHS:
        units = _unambiguous(units, lambda unit, length=length: format_unit(2, unit, length, locale=source))
    styles = [partial(_unit, length) for length in LENGTHS]
    return [(lambda rng: (rng.choice(units), _draw_number(rng, 4, 1)), styles)] if units else []


def _currencies(source: Locale, target: Locale, name: Callable[[str], str]) -> list[str]:
    """The currencies in use that both locales know, and whose `name` in the source means one of them only."""
    used = {
        code
        for territory in Locale("en").territories
        for code in get_territory_currencies(territory, LIVE_CURRENCIES, LIVE_CURRENCIES)
    }
    return _unambiguous(sorted(used & set(source.currencies) & set(target.currencies)), name)


def _money(currencies: Sequence[str], format_type: str) -> list[Family]:
    def draw(rng: random.Random) -> tuple[Decimal, str]:
        currency = rng.choice(currencies)
        places = get_currency_precision(currency)
        return Decimal(rng.randrange(1, 10 ** rng.randint(3, 8))).scaleb(-places), currency

    def style(value: tuple[Decimal, str], locale: Locale) -> str:
        return format_currency(*value, locale=locale, format_type=format_type)

    return [(draw, [style])] if currencies else []


def money(source: Locale, target: Locale) -> list[Family]:
    """Amounts with the symbol of a currency, to the last cent; half of the symbols are more than the code."""
    name = partial(get_currency_symbol, locale=source)
    codes = _currencies(source, target, name)
    with_symbol = [code for code in codes if name(code) != code]
    return _money(with_symbol, "standard") + _money(codes, "standard")


def money_in_words(source: Locale, target: Locale) -> list[Family]:
    """Amounts with the name of a currency, to the last cent."""
    return _money(_currencies(source, target, partial(get_currency_name, locale=source)), "name")


def _exact(render: Callable[..., str], number: Decimal, locale: Locale) -> str:
    return render(number, locale=locale, decimal_quantization=False)


def _draw_compact(rng: random.Random) -> Decimal:
    """Three digits at most, which every locale can print in full by two digits after its point."""
    return Decimal(rng.randrange(100, 1000) * 10 ** rng.randint(1, 12))


def _compact(length: str, number: Decimal, locale: Locale) -> str:
    return format_compact_decimal(number, format_type=length, locale=locale, fraction_digits=2)


def numbers(source: Locale, target: Locale) -> list[Family]:
    """Percentages, large numbers in digits, and compact ones like '1.2 million' or '1.2M'."""
    return [
        (lambda rng: _draw_number(rng, 3, 2).scaleb(-2), [partial(_exact, format_percent)]),
        (lambda rng: _draw_number(rng, 9, 3), [partial(_exact, format_decimal)]),
        (_draw_compact, [partial(_compact, length) for length in LENGTHS]),
    ]


# Lists of names.


def _unambiguous(codes: Iterable[str], name: Callable[[str], str]) -> list[str]:
    """Those of `codes` whose `name` no earlier code has."""
    by_name: dict[str, str] = {}
    for code in codes:
        by_name.setdefault(name(code), code)
    return list(by_name.values())


def _lists(codes: Sequence[str], names: Callable[[Locale], Any]) -> list[Family]:
    def draw(rng: random.Random) -> list[str]:
        return rng.sample(codes, rng.randint(1, 3))

    def style(conjunction: str, chosen: Sequence[str], locale: Locale) -> str:
        return format_list([names(locale)[code] for code in chosen], conjunction, locale=locale)

    styles = [partial(style, conjunction) for conjunction in ("standard", "or")]
    return [(draw, styles)] if len(codes) > 2 else []


def countries(source: Locale, target: Locale) -> list[Family]:
    """One to three countries and territories, joined by 'and' or 'or'."""
    shared = set(source.territories) & set(target.territories) - NOT_COUNTRIES
    codes = sorted(code for code in shared if len(code) == 2)
    return _lists(_unambiguous(codes, source.territories.get), lambda locale: locale.territories)


def languages(source: Locale, target: Locale) -> list[Family]:
    """One to three languages with a two-letter code or an official status, joined by 'and' or 'or'.

    Without those that are called like a country in the source: 'Nauru' would have two targets.
    """
    official = {
        name.split("_")[0]
        for territory in Locale("en").territories
        for name in get_official_languages(territory, regional=True, de_facto=True)
    }
    taken = set(source.territories.values())
    shared = set(source.languages) & set(target.languages)
    codes = [
        code for code in sorted(shared) if (len(code) == 2 or code in official) and source.languages[code] not in taken
    ]
    return _lists(_unambiguous(codes, source.languages.get), lambda locale: locale.languages)


KINDS: dict[str, Callable[[Locale, Locale], list[Family]]] = {
    "date": dates,
    "time": times,
    "date_with_time": dates_with_time,
    "duration": durations,
    "measure": measures,
    "money": money,
    "money_in_words": money_in_words,
    "number": numbers,
    "countries": countries,
    "languages": languages,
}
