"""Phrases in many languages, each labelled with its locale.

Values are sampled and rendered as in `phrase_families`, in the styles that consist of words. Every
value is rendered in all locales. A text that two locales share does not identify its language, and
is left out.
"""

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from babel import Locale

from flaxformer_lite.data.cldr import (
    date_families,
    name_families,
    number_families,
    phrase_families,
)
from flaxformer_lite.data.cldr.family import Family, Style

CORPUS = 1  # raise it with every change that alters a phrase or the order of phrases
# One version means one text: it contains the CLDR's version, and it is part of every random seed.
VERSION = ".".join([str(CORPUS), *phrase_families.VERSION.split(".")[1:]])

# Eight scripts and many close relatives: da nb sv, cs sk pl, ru uk bg, es pt it ro, de nl, ja zh.
LOCALES = "ar bg cs da de el en es fi fr hi hu it ja ko nb nl pl pt ro ru sk sv uk zh".split()
# If Babel has no word for a unit, it prints the identifier.
UNIT = re.compile("|".join(["duration-", *number_families.UNITS]))


class Phrase(NamedTuple):
    """A text, its kind, and its locale."""

    kind: str
    text: str
    label: str


def phrases(*counts: int) -> tuple[list[list[Phrase]], int]:
    """Returns disjoint corpora: corpus i has `counts[i]` phrases of each kind in each locale.

    Within a corpus, kinds and locales alternate. The result depends only on VERSION and the
    arguments. All texts are distinct.

    Returns:
      The corpora, and the number of texts left out because locales share them.
    """
    corpora, seen, shared = [], set(), 0
    for number, count in enumerate(counts):
        columns: list[list[Phrase]] = []
        for kind, families in KINDS.items():
            rng = random.Random(f"{VERSION} {number} {kind}")
            found: dict[str, list[Phrase]] = {label: [] for label in LOCALES}
            for texts in _renderings(rng, families(Locale("en"))):
                times = Counter(texts.values())
                shared += sum(times[text] > 1 for text in texts.values())
                for label, text in texts.items():
                    if times[text] == 1 and text not in seen and len(found[label]) < count:
                        seen.add(text)
                        found[label].append(Phrase(kind, text, label))
                if all(len(column) == count for column in found.values()):
                    break
            columns += found.values()
        corpora.append([phrase for turn in zip(*columns, strict=True) for phrase in turn])
    return corpora, shared


def _renderings(rng: random.Random, families: Sequence[Family]) -> Iterator[dict[str, str]]:
    """Yields, without end, one value in one style as {locale: text}.

    A locale without words for the value is missing.
    """
    locales = {label: Locale.parse(label) for label in LOCALES}
    while True:
        sample, styles = rng.choice(families)
        value, style = sample(rng), rng.choice(styles)
        texts = {}
        for label, locale in locales.items():
            with contextlib.suppress(LookupError):
                texts[label] = style(value, locale)
        yield texts


def _wordiest(styles: Sequence[Style], is_code: Callable[[Any, str], bool]) -> Style:
    """Returns a style that renders with the first of `styles` for which a locale has words.

    The returned style raises LookupError if the locale has words for none of them.

    Args:
      is_code: (value, text) -> whether the text has a code in place of a word.
    """

    def render(value: Any, locale: Locale) -> str:
        for style in styles:
            text = style(value, locale)
            if not is_code(value, text):
                return text
        raise LookupError(value)

    return render


def _holds_unit(value: Any, text: str) -> bool:
    return UNIT.search(text) is not None


def _holds_currency(value: tuple[Any, str], text: str) -> bool:
    return value[1] in text


def dates(english: Locale) -> list[Family]:
    """Returns the family of days with the name of the month, with and without the weekday."""
    return [(sample, styles[:2]) for sample, styles in date_families.dates(english, english)]


def durations(english: Locale) -> list[Family]:
    """Returns the families of '3 hours and 20 minutes' and '5 days ago'."""
    return [
        (sample, [_wordiest(styles, _holds_unit)])
        for sample, styles in date_families.durations(english, english)
    ]


def measures(english: Locale) -> list[Family]:
    """Returns the family of numbers with a unit, spelled out if the locale has a word for it."""
    return [
        (sample, [_wordiest(styles, _holds_unit)])
        for sample, styles in number_families.measures(english, english)
    ]


def money_in_words(english: Locale) -> list[Family]:
    """Returns the family of amounts with the name of a currency."""
    return [
        (sample, [_wordiest(styles, _holds_currency)])
        for sample, styles in number_families.money_in_words(english, english)
    ]


def names(english: Locale) -> list[Family]:
    """Returns the families of 1 to 3 countries, or languages, joined by 'and' or 'or'."""
    return name_families.countries(english, english) + name_families.languages(english, english)


KINDS: dict[str, Callable[[Locale], list[Family]]] = {
    "date": dates,
    "duration": durations,
    "measure": measures,
    "money_in_words": money_in_words,
    "names": names,
}
