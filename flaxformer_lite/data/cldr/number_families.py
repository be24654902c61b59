"""Families of phrases with a number: measures, amounts of money, percentages, plain numbers.

All values are decimals, so the printed number is exactly the sampled one and plural forms agree
with it.
"""

import datetime
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Literal

from babel import Locale
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

from flaxformer_lite.data.cldr.family import LENGTHS, Family, Length, has_unit, unambiguous

LIVE_CURRENCIES = datetime.date(2024, 1, 1)  # a fixed day, so the list does not depend on the clock
UNITS = """
    acceleration-meter-per-square-second angle-degree angle-radian area-acre area-hectare
    area-square-foot area-square-kilometer area-square-meter area-square-mile
    consumption-liter-per-100-kilometer consumption-mile-per-gallon digital-bit digital-byte
    digital-gigabit digital-gigabyte digital-kilobyte digital-megabyte digital-petabyte
    digital-terabyte electric-ampere electric-milliampere electric-ohm electric-volt
    energy-calorie energy-joule energy-kilocalorie energy-kilojoule energy-kilowatt-hour
    frequency-gigahertz frequency-hertz frequency-kilohertz frequency-megahertz
    graphics-megapixel graphics-pixel length-astronomical-unit length-centimeter length-foot
    length-inch length-kilometer length-light-year length-meter length-mile length-millimeter
    length-nanometer length-nautical-mile length-yard light-lux mass-carat mass-gram
    mass-kilogram mass-milligram mass-ounce mass-pound mass-tonne power-gigawatt
    power-horsepower power-kilowatt power-megawatt power-watt pressure-atmosphere pressure-bar
    pressure-hectopascal pressure-kilopascal speed-kilometer-per-hour speed-knot
    speed-meter-per-second speed-mile-per-hour temperature-celsius temperature-fahrenheit
    temperature-kelvin volume-barrel volume-centiliter volume-cubic-centimeter volume-cubic-foot
    volume-cubic-kilometer volume-cubic-meter volume-cup volume-gallon volume-liter
    volume-milliliter volume-pint volume-tablespoon volume-teaspoon
""".split()


def _sample_number(rng: random.Random, digits: int, decimals: int) -> Decimal:
    """Returns a number of 1 to `digits` digits and 0 to `decimals` decimals, uniform in each count.

    The last decimal is not 0. The number is at least 2, because Babel lacks the singular of some
    units.
    """
    decimals = rng.randint(0, decimals)
    whole = rng.randrange(2, 10 ** rng.randint(1, digits))
    fraction = 10 * rng.randrange(10 ** (decimals - 1)) + rng.randint(1, 9) if decimals else 0
    return Decimal(whole * 10**decimals + fraction).scaleb(-decimals)


def render_measure(length: Length, value: tuple[str, Decimal], locale: Locale) -> str:
    """Returns a (unit, number) as text; `length` is one of LENGTHS."""
    unit, number = value
    return format_unit(number, unit, length, locale=locale)


def _two_of(length: Length, locale: Locale, unit: str) -> str:
    return format_unit(2, unit, length, locale=locale)


def measures(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of numbers with a unit, spelled out or as a symbol."""
    units = [unit for unit in UNITS if has_unit(unit, source) and has_unit(unit, target)]
    for length in LENGTHS:
        units = unambiguous(units, partial(_two_of, length, source))
    styles = [partial(render_measure, length) for length in LENGTHS]
    return [(lambda rng: (rng.choice(units), _sample_number(rng, 4, 1)), styles)] if units else []


def shared_currencies(source: Locale, target: Locale, name: Callable[[str], str]) -> list[str]:
    """Returns the live currencies of both locales with an unambiguous `name` in the source."""
    used = {
        code
        for territory in map(str, Locale("en").territories)
        for code in get_territory_currencies(territory, LIVE_CURRENCIES, LIVE_CURRENCIES)
    }
    return unambiguous(sorted(used & set(source.currencies) & set(target.currencies)), name)


def _money(currencies: Sequence[str], format_type: Literal["name", "standard"]) -> list[Family]:
    def sample(rng: random.Random) -> tuple[Decimal, str]:
        currency = rng.choice(currencies)
        decimals = get_currency_precision(currency)
        return Decimal(rng.randrange(1, 10 ** rng.randint(3, 8))).scaleb(-decimals), currency

    def style(value: tuple[Decimal, str], locale: Locale) -> str:
        return format_currency(*value, locale=locale, format_type=format_type)

    return [(sample, [style])] if currencies else []


def money(source: Locale, target: Locale) -> list[Family]:
    """Returns the families of amounts with a currency symbol.

    In at least half of the phrases the symbol differs from the currency's code.
    """
    name = partial(get_currency_symbol, locale=source)
    codes = shared_currencies(source, target, name)
    with_symbol = [code for code in codes if name(code) != code]
    return _money(with_symbol, "standard") + _money(codes, "standard")


def money_in_words(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of amounts with the name of a currency, all decimals printed."""
    name = partial(get_currency_name, locale=source)
    return _money(shared_currencies(source, target, name), "name")


def _exact(render: Callable[..., str], number: Decimal, locale: Locale) -> str:
    return render(number, locale=locale, decimal_quantization=False)


def sample_compact(rng: random.Random) -> Decimal:
    """Returns a number of at most 3 significant digits.

    Every locale prints such a number in full with 2 digits after its point.
    """
    return Decimal(rng.randrange(100, 1000) * 10 ** rng.randint(1, 12))


def _compact(length: Length, number: Decimal, locale: Locale) -> str:
    return format_compact_decimal(number, format_type=length, locale=locale, fraction_digits=2)


def numbers(source: Locale, target: Locale) -> list[Family]:
    """Returns the families of percentages, long numbers, and compact ones such as '1.2 million'."""
    return [
        (lambda rng: _sample_number(rng, 3, 2).scaleb(-2), [partial(_exact, format_percent)]),
        (lambda rng: _sample_number(rng, 9, 3), [partial(_exact, format_decimal)]),
        (sample_compact, [partial(_compact, length) for length in LENGTHS]),
    ]
