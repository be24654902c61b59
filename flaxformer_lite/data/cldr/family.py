"""The type of a family of phrases, a sampler of values and styles that render one; helpers."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from babel import Locale
from babel.units import format_unit

Style = Callable[[Any, Locale], str]
Sampler = Callable[[random.Random], Any]
Family = tuple[Sampler, Sequence[Style]]
Length = Literal["long", "short"]

LENGTHS: tuple[Length, ...] = "long", "short"


def unambiguous(codes: Iterable[str], name: Callable[[str], str]) -> list[str]:
    """Returns the codes whose `name` differs from the name of every earlier code."""
    by_name: dict[str, str] = {}
    for code in codes:
        by_name.setdefault(name(code), code)
    return list(by_name.values())


def has_unit(unit: str, locale: Locale) -> bool:
    """Whether the locale has words for `unit`; otherwise Babel prints the identifier."""
    return all(unit not in format_unit(2, unit, length, locale=locale) for length in LENGTHS)
