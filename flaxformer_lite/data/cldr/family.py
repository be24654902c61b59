"""The type of a family of phrases: a sampler of values, and the styles that render a value."""

import random
from collections.abc import Callable, Iterable
from typing import Any

from babel import Locale

Style = Callable[[Any, Locale], str]
Sampler = Callable[[random.Random], Any]
Family = tuple[Sampler, list[Style]]

LENGTHS = "long", "short"


def unambiguous(codes: Iterable[str], name: Callable[[str], str]) -> list[str]:
    """Returns the codes whose `name` differs from the name of every earlier code."""
    by_name: dict[str, str] = {}
    for code in codes:
        by_name.setdefault(name(code), code)
    return list(by_name.values())
