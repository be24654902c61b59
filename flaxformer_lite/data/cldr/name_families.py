"""Families of phrases made of names: lists of countries and lists of languages."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from babel import Locale
from babel.languages import get_official_languages
from babel.lists import format_list

from flaxformer_lite.data.cldr.family import Family, unambiguous

Conjunction = Literal["standard", "or"]
CONJUNCTIONS: tuple[Conjunction, ...] = "standard", "or"
# unions, pseudo-locales, 'unknown region'
NOT_COUNTRIES = {"EU", "EZ", "QO", "UN", "XA", "XB", "ZZ"}


def _lists(codes: Sequence[str], names: Callable[[Locale], Any]) -> list[Family]:
    def sample(rng: random.Random) -> list[str]:
        return rng.sample(codes, rng.randint(1, 3))

    def style(conjunction: Conjunction, chosen: Sequence[str], locale: Locale) -> str:
        return format_list([names(locale)[code] for code in chosen], conjunction, locale=locale)

    styles = [partial(style, conjunction) for conjunction in CONJUNCTIONS]
    return [(sample, styles)] if len(codes) > 2 else []


def countries(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of lists of 1 to 3 countries and territories, joined by 'and' or 'or'."""
    shared = set(source.territories) & set(target.territories) - NOT_COUNTRIES
    codes = sorted(code for code in shared if len(code) == 2)
    return _lists(
        unambiguous(codes, source.territories.__getitem__), lambda locale: locale.territories
    )


def languages(source: Locale, target: Locale) -> list[Family]:
    """Returns the family of lists of 1 to 3 languages, joined by 'and' or 'or'.

    The languages have a two-letter code or an official status. A language with the same name as a
    country in the source locale is left out: 'Nauru' would have two targets.
    """
    official = {
        name.split("_")[0]
        for territory in map(str, Locale("en").territories)
        for name in get_official_languages(territory, regional=True, de_facto=True)
    }
    taken = set(source.territories.values())
    shared = set(source.languages) & set(target.languages)
    codes = [
        code
        for code in sorted(shared)
        if (len(code) == 2 or code in official) and source.languages[code] not in taken
    ]
    return _lists(unambiguous(codes, source.languages.__getitem__), lambda locale: locale.languages)
