"""The references of CLDR phrases follow from the values that the phrases say."""

import datetime
import itertools
import random
from decimal import Decimal

import pytest
from babel import Locale

from flaxformer_lite.data.cldr import phrase_alignments, phrase_families

MOMENT = datetime.datetime(1987, 6, 5, 15, 4, 3)


@pytest.mark.parametrize("target", ["de", "fr"])
def test_the_phrases_are_those_of_the_dataset(target):
    kinds = phrase_alignments.KINDS
    phrases = phrase_families.phrases("en", target, per_kind=101)
    expected = {tuple(phrase) for phrase in phrases if phrase.kind in kinds}
    found = phrase_alignments.aligned_phrases("en", target, per_kind=101)
    assert {tuple(phrase[:3]) for phrase in found} == expected
    assert len(found) == 101 * len(kinds)


@pytest.mark.parametrize("name", ["en", "de", "es", "ja", "ar", "hi"])
def test_the_segments_joined_are_the_phrase(name):
    locale, other = Locale(name), Locale("it")
    for kind in phrase_alignments.KINDS:
        families = phrase_families.KINDS[kind](locale, other)
        samples = phrase_families.sample_styles(random.Random(1), families, locale, other)
        for value, style, text in itertools.islice(samples, 53):
            parts = phrase_alignments.segments(kind, value, style, locale)
            assert "".join(part for _, part in parts) == text


def reference_of(kind, value, style, target):
    """Returns source, target, and the reference of `value` in a style, from English."""
    locales = Locale("en"), Locale(target)
    chosen = phrase_families.KINDS[kind](*locales)[0][1][style]
    texts = [chosen(value, locale) for locale in locales]
    return *texts, phrase_alignments.reference(kind, value, chosen, *locales)


@pytest.mark.parametrize(
    ("kind", "style", "target", "source", "translation", "sure", "possible"),
    [
        (
            *("date", 0, "de", "Friday, June 5, 1987", "Freitag, 5. Juni 1987"),
            *({(0, 0), (1, 2), (2, 1), (3, 3)}, set()),
        ),
        # the words 'de' say nothing, and a date of one word says all
        (*("date", 1, "es", "June 5, 1987", "5 de junio de 1987"), {(0, 2), (1, 0), (2, 4)}, set()),
        (*("date", 2, "ja", "Jun 5, 1987", "1987/06/05"), {(0, 0), (1, 0), (2, 0)}, set()),
        # 'PM' has no word of its own in '15:04'
        (*("time", 0, "de", "3:04\u202fPM", "15:04"), {(0, 0)}, {(1, 0)}),
        (
            *("date_with_time", 0, "hi", None, "शुक्रवार, 5 जून 1987, 3:04 pm"),
            *({(0, 0), (1, 2), (2, 1), (3, 3), (4, 4), (5, 5)}, set()),
        ),
    ],
)
def test_fields_of_dates_are_linked(kind, style, target, source, translation, sure, possible):
    text, other, reference = reference_of(kind, MOMENT, style, target)
    assert source in (text, None) and other == translation
    assert reference.sure == sure and reference.possible == sure | possible


@pytest.mark.parametrize(
    ("target", "translation", "sure", "possible"),
    [
        ("de", "1.234,5 Quadratkilometer", {(0, 0), (1, 1), (2, 1)}, set()),
        # 2 words for 2: their order is unknown. French separates thousands by a space.
        (
            "fr",
            "1\u202f234,5\xa0kilomètres carrés",
            {(0, 0), (0, 1)},
            {*itertools.product((1, 2), (2, 3))},
        ),
    ],
)
def test_numbers_and_units_are_linked(target, translation, sure, possible):
    value = "area-square-kilometer", Decimal("1234.5")
    text, other, reference = reference_of("measure", value, 0, target)
    assert (text, other) == ("1,234.5 square kilometers", translation)
    assert reference.sure == sure and reference.possible == sure | possible
