"""Pairs of phrases with the same meaning in two locales, rendered by Babel from the Unicode CLDR.

A phrase starts as a value: a date, an amount, three countries. A *style* is a function (value,
locale) -> text. A *family* is a sampler of values with the styles that suit them. A *kind* of
phrase is one family or more.

A source text has one target. Two styles of one value can read the same in the source: 'May 5, 2024'
is both long and medium. The first style in the family's list then gives the target, whichever of
the two was sampled. Values are sampled such that the source contains everything that the target
shows: years come from one century, and a compact number prints all its digits.
"""

import contextlib
import difflib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from babel import Locale
from babel.core import get_cldr_version
from babel.localedata import locale_identifiers

from flaxformer_lite.data.cldr.date_families import dates, dates_with_time, durations, times
from flaxformer_lite.data.cldr.family import Family, Sampler, Style
from flaxformer_lite.data.cldr.name_families import countries, languages
from flaxformer_lite.data.cldr.number_families import measures, money, money_in_words, numbers
from flaxformer_lite.system.errors import InputError

CORPUS = 1  # raise it with every change that alters a phrase or the order of phrases
# One version means one text: it contains the CLDR's version, and it is part of every random seed.
VERSION = ".".join([str(CORPUS), *f"{get_cldr_version()}.0".split(".")[:2]])

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


class Phrase(NamedTuple):
    """The same value in two locales, and its kind."""

    kind: str
    source: str
    target: str


def phrases(source: str, target: str, *, per_kind: int = 10_400) -> list[Phrase]:
    """Returns `per_kind` phrases of each kind, in turn, so that every slice has an equal mix.

    The result depends only on VERSION and the arguments. All source texts are distinct. A kind is
    left out if the CLDR has too few phrases of it in both locales. Between 'en' and 140 languages,
    'de' among them, no kind is left out.

    Raises:
      InputError: as `parse_locales`, or the locales share no more than half of the kinds.
    """
    locales = parse_locales(source, target)
    columns: dict[str, list[Phrase]] = {}
    seen: set[str] = set()
    for kind, families in KINDS.items():
        rng = random.Random(f"{VERSION} {source}-{target} {kind}")
        found: dict[str, Phrase] = {}
        samples = sample_styles(rng, families(*locales), *locales)
        for value, style, text in itertools.islice(samples, 20 * per_kind):
            translation = style(value, locales[1])
            if text and translation and text not in seen:
                found.setdefault(text, Phrase(kind, text, translation))
            if len(found) == per_kind:
                seen.update(found)
                columns[kind] = list(found.values())
                # Short phrases, such as a list of one name, run out and so come early.
                rng.shuffle(columns[kind])
                break
    if 2 * len(columns) <= len(KINDS):
        raise InputError(
            f"Expected two locales that share more than half of the kinds {', '.join(KINDS)}; "
            f"between {source!r} and {target!r} the CLDR has enough phrases for "
            f"{', '.join(columns) or 'none'}: choose a locale with fuller data."
        )
    return [phrase for turn in zip(*columns.values(), strict=True) for phrase in turn]


def parse_locales(source: str, target: str) -> tuple[Locale, Locale]:
    """Returns the two Babel locales with exactly these names.

    Raises:
      InputError: a name is unknown; the message lists the nearest ones. Or both are the same.
    """
    names = {known.lower(): known for known in sorted(locale_identifiers())}
    for name in (source, target):
        if name not in names.values():
            near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
            nearest = " or ".join(repr(names[match]) for match in near)
            nearest = nearest or "a name like 'en' or 'pt_BR'"
            raise InputError(
                f"Unknown locale {name!r}: expected one of the CLDR; nearest is {nearest}."
            )
    if source == target:
        raise InputError(
            f"Expected two different locales, got {source!r} for both; choose another target."
        )
    return Locale.parse(source), Locale.parse(target)


def sample_styles(
    rng: random.Random, families: Iterable[Family], source: Locale, target: Locale
) -> Iterator[tuple[Any, Style, str]]:
    """Yields values with a style and the source text; none if the CLDR has no data for any style.

    The style is the first in the family's list with this source text.
    """
    families = [
        (sample, usable)
        for sample, styles in families
        if (usable := usable_styles(sample, styles, source, target))
    ]
    while families:
        sample, styles = rng.choice(families)
        value = sample(rng)
        text, style = _first_equal(value, styles, rng.randrange(len(styles)), source)
        yield value, style, text


def usable_styles(sample: Sampler, styles: Sequence[Style], *locales: Locale) -> list[Style]:
    """Returns the styles that all locales have data for; Babel raises KeyError for the others."""
    usable = []
    for style in styles:
        with contextlib.suppress(LookupError):
            for locale in locales:
                style(sample(random.Random(0)), locale)
            usable.append(style)
    return usable


def render_pair(
    value: Any, styles: Sequence[Style], pick: int, source: Locale, target: Locale
) -> tuple[str, str]:
    """Returns source and target of `value` in style `pick`, or in the first equal in the source."""
    text, style = _first_equal(value, styles, pick, source)
    return text, style(value, target)


def _first_equal(
    value: Any, styles: Sequence[Style], pick: int, source: Locale
) -> tuple[str, Style]:
    """Returns the source text of `value` in style `pick`, and the first style with this text."""
    text = styles[pick](value, source)
    return text, next(
        (style for style in styles[:pick] if style(value, source) == text), styles[pick]
    )
