"""The phrases are aligned, distinct, and the same on every host with the same version."""

import datetime
import os
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from babel import Locale

from flaxformer_lite.data.cldr import family, name_families, number_families, phrase_families

DAYS = "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split()
MONTHS = (
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()
)


@pytest.fixture(scope="module")
def en_de():
    return phrase_families.phrases("en", "de", per_kind=331)


def of_kind(phrases, kind):
    return [(phrase.source, phrase.target) for phrase in phrases if phrase.kind == kind]


def letters(choice):
    """Returns a kind of one family: letters that are the same in every locale."""
    return lambda source, target: [
        (lambda rng: rng.choice(choice), [lambda letter, locale: letter])
    ]


def digits(text):
    return re.sub(r"\D", "", text).rstrip("0")


def render(kind, value, styles, pick):
    """Returns English and German of `value` in style `pick` of the first family of a kind."""
    locales = Locale("en"), Locale("de")
    first_styles = phrase_families.KINDS[kind](*locales)[0][1][:styles]
    return phrase_families.render_pair(value, first_styles, pick, *locales)


def test_every_slice_of_the_phrases_has_equally_many_of_each_kind(en_de):
    assert len(en_de) == 331 * len(phrase_families.KINDS)
    for start in (0, 7, 1301):
        window = en_de[start : start + 50]
        assert Counter(phrase.kind for phrase in window) == dict.fromkeys(
            phrase_families.KINDS, 50 // len(phrase_families.KINDS)
        )


def test_all_sources_are_distinct(en_de):
    assert len({phrase.source for phrase in en_de}) == len(en_de)


def test_a_source_that_two_kinds_can_generate_belongs_to_the_first(monkeypatch):
    monkeypatch.setattr(
        phrase_families, "KINDS", {"vowel": letters("aeiou"), "letter": letters("aeioubcdfg")}
    )
    phrases = phrase_families.phrases("en", "de", per_kind=5)
    assert "".join(sorted(source for source, _ in of_kind(phrases, "vowel"))) == "aeiou"
    assert "".join(sorted(source for source, _ in of_kind(phrases, "letter"))) == "bcdfg"


def test_rare_phrases_of_a_kind_are_spread_over_all_its_positions(monkeypatch):
    common = [chr(code) for code in range(0x4E00, 0x5E00)]
    families = letters("abcdefghijk")(None, None) + letters(common)(None, None)
    monkeypatch.setattr(phrase_families, "KINDS", {"letter": lambda source, target: families})
    sources = [phrase.source for phrase in phrase_families.phrases("en", "de", per_kind=401)]
    rare = [position for position, source in enumerate(sources) if source in "abcdefghijk"]
    assert len(rare) == 11
    assert max(rare) > 200  # all were sampled among the first 60 or so
    assert min(rare) < 200


def test_a_full_date_in_english_is_the_same_day_in_german(en_de):
    full = [pair for pair in of_kind(en_de, "date") if "day, " in pair[0]]
    assert len(full) > 50
    for source, target in full:
        day = datetime.datetime.strptime(source, "%A, %B %d, %Y")
        assert target == f"{DAYS[day.weekday()]}, {day.day}. {MONTHS[day.month - 1]} {day.year}"


def test_a_short_date_has_a_year_of_two_digits_on_both_sides(en_de):
    short = [pair for pair in of_kind(en_de, "date") if "/" in pair[0]]
    assert len(short) > 50
    for source, target in short:
        month, day, year = source.split("/")
        assert target == f"{int(day):02}.{int(month):02}.{year}"


def test_a_time_of_day_in_english_is_the_same_moment_in_german(en_de):
    with_seconds = [
        pair for pair in of_kind(en_de, "time") if re.fullmatch(r"\d+:\d\d:\d\d.[AP]M", pair[0])
    ]
    assert len(with_seconds) > 50
    for source, target in with_seconds:
        moment = datetime.datetime.strptime(source.replace("\u202f", " "), "%I:%M:%S %p")
        assert target == f"{moment:%H:%M:%S}"


def test_numbers_and_amounts_keep_all_their_digits(en_de):
    for kind in ("number", "measure", "money", "money_in_words", "duration"):
        for source, target in of_kind(en_de, kind):
            # 'liters per 100 kilometers' is part of the unit, the years of a currency, in
            # parentheses, of its name.
            if "100" not in source:
                texts = [re.sub(r"\(.*?\)", "", text) for text in (source, target)]
                assert digits(texts[0]) == digits(texts[1]), (source, target)


def test_most_amounts_have_two_decimals(en_de):
    for kind in ("money", "money_in_words"):
        amounts = [target for _, target in of_kind(en_de, kind)]
        assert sum(bool(re.search(r"\d,\d\d\b", amount)) for amount in amounts) > 0.7 * len(amounts)


def test_a_date_that_is_both_long_and_medium_has_the_long_target():
    in_may, in_june = datetime.datetime(2024, 5, 3), datetime.datetime(2024, 6, 3)
    assert (
        render("date", in_may, 4, 2)
        == render("date", in_may, 4, 1)
        == ("May 3, 2024", "3. Mai 2024")
    )
    assert render("date", in_june, 4, 2) == ("Jun 3, 2024", "03.06.2024")


def test_a_language_with_the_name_of_a_country_is_left_out():
    locale = Locale("en")
    assert locale.languages["na"] == locale.territories["NR"] == "Nauru"
    ((sample, _),) = name_families.languages(locale, Locale("de"))
    rng = random.Random(0)
    sampled = {code for _ in range(3001) for code in sample(rng)}
    assert "na" not in sampled
    assert len(sampled) > 200


def test_lists_have_more_than_200_different_names_and_measures_more_than_40_units():
    rng, locales = random.Random(1), (Locale("en"), Locale("de"))
    for kind, least in (("countries", 200), ("languages", 200)):
        ((sample, _),) = phrase_families.KINDS[kind](*locales)
        sampled = [sample(rng) for _ in range(3001)]
        assert len({code for codes in sampled for code in codes}) > least
        assert {len(codes) for codes in sampled} == {1, 2, 3}
    ((sample, _),) = number_families.measures(*locales)
    assert len({sample(rng)[0] for _ in range(3001)}) > 40


def test_a_union_of_countries_is_not_among_the_countries():
    locale, rng = Locale("en"), random.Random(2)
    ((sample, _),) = name_families.countries(locale, Locale("de"))
    sampled = {locale.territories[code] for _ in range(3001) for code in sample(rng)}
    assert {"Europe", "European Union", "Eurozone", "United Nations", "Unknown Region"}.isdisjoint(
        sampled
    )
    assert {"Germany", "Åland Islands"} <= sampled


def test_the_currencies_are_those_of_a_fixed_day(monkeypatch):
    def name(code):
        return Locale("en").currencies[code]

    assert "DEM" not in number_families.shared_currencies(Locale("en"), Locale("de"), name)
    monkeypatch.setattr(number_families, "LIVE_CURRENCIES", datetime.date(1990, 1, 1))
    assert "DEM" in number_families.shared_currencies(Locale("en"), Locale("de"), name)


def test_a_currency_with_the_symbol_of_an_earlier_one_is_left_out():
    names = {"USD": "$", "CAD": "$", "EUR": "€"}
    assert family.unambiguous(names, names.get) == ["USD", "EUR"]


@pytest.mark.parametrize(
    "pair", ["de-en", "sv-fi", "fr-ja", "pt_BR-zh_Hant", "ar-he", "ru-hi", "th-ko"]
)
def test_other_pairs_of_locales_have_every_kind(pair):
    phrases = phrase_families.phrases(*pair.split("-"), per_kind=23)
    assert {phrase.kind for phrase in phrases} == set(phrase_families.KINDS)
    assert len({phrase.source for phrase in phrases}) == 23 * len(phrase_families.KINDS)


def test_a_kind_that_a_locale_has_no_data_for_is_left_out():
    missing = set(phrase_families.KINDS) - {
        phrase.kind for phrase in phrase_families.phrases("en", "mgo", per_kind=23)
    }
    # older versions of the CLDR have no units there either
    assert missing - {"measure"} == {"countries", "languages"}


def test_a_kind_with_too_few_phrases_is_left_out_entirely(monkeypatch):
    kinds = {
        "letter": letters("abc"),
        "date": phrase_families.KINDS["date"],
        "number": phrase_families.KINDS["number"],
    }
    monkeypatch.setattr(phrase_families, "KINDS", kinds)
    assert {phrase.kind for phrase in phrase_families.phrases("en", "de", per_kind=3)} == set(kinds)
    assert {phrase.kind for phrase in phrase_families.phrases("en", "de", per_kind=5)} == {
        "date",
        "number",
    }


def test_a_style_without_data_is_left_out_and_the_other_styles_of_its_family_stay():
    styles = [
        lambda value, locale: {"ja": str(value)}[locale.language],
        lambda value, locale: str(value),
    ]
    sample, usable_styles = number_families.sample_compact, phrase_families.usable_styles
    assert usable_styles(sample, styles, Locale("ja"), Locale("ko")) == styles[1:]
    assert usable_styles(sample, styles, Locale("ja")) == styles


def test_two_locales_that_share_too_few_kinds_are_refused_with_the_kinds_they_share(monkeypatch):
    # 'ann' has none of the last four
    names = "date", "time", "money", "money_in_words", "countries", "languages"
    monkeypatch.setattr(
        phrase_families, "KINDS", {name: phrase_families.KINDS[name] for name in names}
    )
    message = "between 'en' and 'ann' the CLDR has enough phrases for date, time"
    with pytest.raises(ValueError, match=message):
        phrase_families.phrases("en", "ann", per_kind=23)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("pt-br", "'pt_BR'"), ("PT_BR", "'pt_BR'"), ("ja_JPN", "'ja_JP'"), ("", "'en'")],
)
def test_an_unknown_locale_is_refused_with_the_nearest_names(name, nearest):
    with pytest.raises(ValueError, match=f"Unknown locale '{name}'.*nearest is .*({nearest})"):
        phrase_families.phrases(name, "de", per_kind=1)


def test_the_same_locale_on_both_sides_is_refused():
    with pytest.raises(ValueError, match="two different locales, got 'de' for both"):
        phrase_families.phrases("de", "de", per_kind=1)


def test_the_phrases_do_not_depend_on_the_host(en_de):
    program = (
        "from flaxformer_lite.data.cldr import phrase_families\n"
        "import sys; sys.stdout.reconfigure(encoding='utf-8')\n"
        "print(*phrase_families.phrases('en', 'de', per_kind=331), sep='\\n')"
    )
    host = {"PYTHONHASHSEED": "97", "TZ": "Pacific/Apia", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "fr"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | host,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert result.stdout.splitlines() == [str(phrase) for phrase in en_de]


def test_another_version_has_other_phrases(monkeypatch):
    first = {phrase.source for phrase in phrase_families.phrases("en", "de", per_kind=97)}
    assert {phrase.source for phrase in phrase_families.phrases("en", "de", per_kind=97)} == first
    monkeypatch.setattr(phrase_families, "VERSION", f"{phrase_families.CORPUS + 1}.47.0")
    second = {phrase.source for phrase in phrase_families.phrases("en", "de", per_kind=97)}
    assert len(first & second) < 0.1 * len(first)


def test_the_version_holds_the_corpus_number_and_the_version_of_the_cldr():
    corpus, *rest = phrase_families.VERSION.split(".")
    assert int(corpus) == phrase_families.CORPUS
    assert ".".join(rest).startswith(phrase_families.get_cldr_version())
    assert len(rest) == 2
