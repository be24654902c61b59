"""Checks of the arguments of the Python API, so that a wrong type is one clear message."""

import numbers
import os
from collections.abc import Iterable, Iterator, Mapping

from flaxformer_lite.system.errors import InputError


def texts(given: object, *, name: str = "texts", item: str = "text") -> list[str]:
    """Returns the texts of a list or another iterable, each without its line end (LF or CRLF).

    Args:
      name, item: the names of the argument and of one of its items in error messages.

    Raises:
      InputError: `given` is one text or no iterable, or an item is no text of Unicode characters.
    """
    return list(each_text(given, name=name, item=item))


def each_text(given: object, *, name: str = "texts", item: str = "text") -> Iterator[str]:
    """Yields the texts as `texts` returns them, read one at a time.

    Raises InputError: at once if `given` is no iterable of texts, about an item when reached.
    """
    if isinstance(given, str):
        raise InputError(
            f"expected a list of texts, got one text; pass [{given[:20]!r}].", where=name
        )
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise InputError(f"expected a list of texts, got {_kind(given)}.", where=name)
    return _checked(given, item)


def _checked(given: Iterable[object], item: str) -> Iterator[str]:
    for number, text in enumerate(given, start=1):
        where = f"{item} {number}"
        if not isinstance(text, str):
            raise InputError(f"expected a text (str), got {_kind(text)}.", where=where)
        text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"expected Unicode characters, got half of a surrogate pair, "
                f"U+{ord(text[error.start]):04X}, at character {error.start + 1}; decode the bytes "
                "as UTF-8 before.",
                where=where,
            ) from error
        yield text


def whole_number(given: object, *, name: str, least: int = 1) -> int:
    """Returns `given`, an int of `least` or more; raises InputError if it is not one."""
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < least:
        raise InputError(f"expected a whole number, {least} or more, got {given!r}.", where=name)
    return int(given)


def folders(given: object, *, name: str) -> list[str]:
    """Returns the paths of one folder, or of a list of folders; raises InputError for others."""
    given = [given] if isinstance(given, str | bytes | os.PathLike) else given
    if not isinstance(given, Iterable):
        raise InputError(f"expected a list of folders, got {_kind(given)}.", where=name)
    return [folder(each, name=name) for each in given]


def folder(given: object, *, name: str) -> str:
    """Returns the path of a folder; raises InputError if it is no path, or empty."""
    if not isinstance(given, str | bytes | os.PathLike) or not os.fsdecode(given):
        raise InputError(f"expected the path of a folder, got {_kind(given)}.", where=name)
    return os.fsdecode(given)


def text_lists(given: object, *, name: str) -> dict[str, list[str]]:
    """Returns lists of texts by their name; raises InputError for anything else."""
    if not isinstance(given, Mapping):
        raise InputError(f"expected lists of texts by name, got {_kind(given)}.", where=name)
    if unnamed := [key for key in given if not isinstance(key, str)]:
        raise InputError(f"expected a name (str), got {_kind(unnamed[0])}.", where=name)
    return {key: texts(each, name=f"{name}[{key!r}]") for key, each in given.items()}


def _kind(value: object) -> str:
    return "None" if value is None else f"{value!r:.40} ({type(value).__name__})"
