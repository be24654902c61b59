"""Phrases in many languages, each with the locale that it is written in.

Values are drawn and rendered as in `cldr`, in the styles that consist of words. Every value is rendered in all
locales: a text that two of them share says nothing about its language, and is left out.
"""

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from babel import Locale

from flaxformer_lite.data.cldr import phrase_families
from flaxformer_lite.data.cldr.phrase_families import Family, Style

CORPUS = 1  # raise it with every change that alters a phrase or the order of phrases
# The version freezes the text: it holds the CLDR's and it seeds every draw.
VERSION = ".".join([str(CORPUS), *phrase_families.VERSION.split(".")[1:]])

# Eight scripts and many close relatives: da nb sv, cs sk pl, ru uk bg, es pt it ro, de nl, ja zh.
LOCALES = "ar bg cs da de el en es fi fr hi hu it ja ko nb nl pl pt ro ru sk sv uk zh".split()
UNIT = re.compile("|".join(["duration-", *phrase_families.UNITS]))  # Babel prints the code of what it has no word for


class Phrase(NamedTuple):
    """A text, its kind, and the locale that it is written in."""

    kind: str
    text: str
    label: str


def phrases(*counts: int) -> tuple[list[list[Phrase]], int]:
    """Corpora without a common text, each of `counts[i]` phrases of each kind in each locale, in turn.

    The result depends on VERSION and the arguments alone. No text comes twice.

    Returns:
      The corpora, and how many texts were left out because locales share them.
    """
    corpora, seen, shared = [], set(), 0
    for number, count in enumerate(counts):
        columns = []
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
    """Values without end, each in one style in all locales that have the words for it: {locale: text}."""
    locales = {label: Locale.parse(label) for label in LOCALES}
    while True:
        draw, styles = rng.choice(families)
        value, style = draw(rng), rng.choice(styles)
        texts = {}
        for label, locale in locales.items():
            with contextlib.suppress(LookupError):
                texts[label] = style(value, locale)
        yield texts


def _wordiest(styles: Sequence[Style], is_code: Callable[[Any, str], bool]) -> Style:
    """The first of `styles` that a locale has words for; `is_code(value, text)` says where it has none.

    What is returned raises LookupError where the locale has words for none of them.
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
    """Days with the name of the month, with and without that of the weekday."""
    return [(draw, styles[:2]) for draw, styles in phrase_families.dates(english, english)]


def durations(english: Locale) -> list[Family]:
    """'3 hours and 20 minutes', '5 days ago'."""
    return [(draw, [_wordiest(styles, _holds_unit)]) for draw, styles in phrase_families.durations(english, english)]


def measures(english: Locale) -> list[Family]:
    """A number with its unit, spelled out where the locale does that."""
    return [(draw, [_wordiest(styles, _holds_unit)]) for draw, styles in phrase_families.measures(english, english)]


def money_in_words(english: Locale) -> list[Family]:
    """Amounts with the name of a currency."""
    return [
        (draw, [_wordiest(styles, _holds_currency)])
        for draw, styles in phrase_families.money_in_words(english, english)
    ]


def names(english: Locale) -> list[Family]:
    """One to three countries, or languages, joined by 'and' or 'or'."""
    return phrase_families.countries(english, english) + phrase_families.languages(english, english)


KINDS: dict[str, Callable[[Locale], list[Family]]] = {
    "date": dates,
    "duration": durations,
    "measure": measures,
    "money_in_words": money_in_words,
    "names": names,
}
