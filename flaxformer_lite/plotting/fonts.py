"""Chooses installed fonts for the characters that matplotlib's own font lacks."""

import contextlib
import sys
from collections.abc import Iterable

from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text

NAMED = 8  # characters that the warning names


def choose(figures: Iterable[Figure]) -> None:
    """Adds installed fonts to the texts of figures, for characters that their own font lacks.

    The fewest that suffice are added. Prints to standard error, in one line for all figures, which
    characters no installed font has.
    """
    texts = [text for figure in figures for text in figure.findobj(Text)]
    own = font_manager.findfont(font_manager.FontProperties())
    shown = filter(str.isprintable, {character for text in texts for character in text.get_text()})
    lacking = set(shown) - _characters(own)
    if not lacking:
        return
    fonts = {name: lacking & _characters(path) for name, path in sorted(_installed().items())}
    chosen: list[str] = []
    while any(fonts.values()):
        chosen.append(max(fonts, key=lambda name: len(fonts[name])))
        lacking = lacking - fonts[chosen[-1]]
        fonts = {name: has & lacking for name, has in fonts.items()}
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *chosen])
    if lacking:
        named = " ".join(sorted(lacking)[:NAMED])
        more = f" and {len(lacking) - NAMED:,} more characters" if len(lacking) > NAMED else ""
        print(
            f"warning: no installed font has {named}{more}, so the .png files show boxes; install "
            "a font, such as Google's Noto (on Debian and Ubuntu: fonts-noto-cjk for Chinese, "
            "Japanese and Korean, fonts-noto for all other languages).",
            file=sys.stderr,
        )


def _installed() -> dict[str, str]:
    """Returns the upright file of each font by its name.

    Fonts that were installed after matplotlib made its list are in it. The Last Resort font, which
    has a box for every character, is not.
    """
    fonts = font_manager.fontManager
    for path in set(font_manager.findSystemFonts()) - {str(font.fname) for font in fonts.ttflist}:
        with contextlib.suppress(Exception):  # matplotlib's list leaves out these, too
            fonts.addfont(path)
    listed = [font for font in fonts.ttflist if not font.name.startswith("Last Resort")]
    listed.sort(key=lambda f: (f.style == "normal", f.weight == 400, f.stretch == "normal"))
    return {font.name: font.fname for font in listed}


def _characters(path: str) -> set[str]:
    """Returns the characters of a font; none if it cannot be read or has bitmaps only."""
    with contextlib.suppress(OSError, RuntimeError):  # removed, or damaged
        font = font_manager.get_font(path)
        return set(map(chr, font.get_charmap())) if font.scalable else set()
    return set()
