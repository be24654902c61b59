"""The labelled phrases have one label a text, are balanced, and are the same on every host."""

import os
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal

import pytest
from babel import Locale
from babel.numbers import get_currency_name
from babel.units import format_unit

from flaxformer_lite.data.cldr import languages, number_families, phrase_families

MONTHS = (
    "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()
)


@pytest.fixture(scope="module")
def corpora():
    found, shared = languages.phrases(7, 3)
    assert shared > 0
    return found


def texts_of(corpora, kind, label):
    return [
        phrase.text
        for corpus in corpora
        for phrase in corpus
        if (phrase.kind, phrase.label) == (kind, label)
    ]


def family(text_of):
    """Returns a kind with the values 0 to 996 and the texts `text_of(value, locale name)`."""
    return lambda english: [
        (lambda rng: rng.randrange(997), [lambda value, locale: text_of(value, str(locale))])
    ]


def test_every_turn_of_a_corpus_holds_each_kind_in_each_locale_once(corpora):
    turn = [(kind, label) for kind in languages.KINDS for label in languages.LOCALES]
    for corpus, count in zip(corpora, (7, 3), strict=True):
        assert [(phrase.kind, phrase.label) for phrase in corpus] == turn * count


def test_all_texts_of_all_corpora_are_distinct(corpora):
    texts = [phrase.text for corpus in corpora for phrase in corpus]
    assert len(set(texts)) == len(texts)


def test_two_corpora_of_the_same_size_have_different_samples():
    (first, second), _ = languages.phrases(7, 7)
    years = [
        Counter(re.findall(r"\d{4}", phrase.text)[0] for phrase in corpus if phrase.kind == "date")
        for corpus in (first, second)
    ]
    assert years[0] != years[1]


def test_a_text_that_locales_share_is_left_out_of_all_of_them_and_counted(monkeypatch):
    monkeypatch.setattr(languages, "LOCALES", ["da", "de", "nb"])

    def text(value, name):
        return f"{value} {'x' if value % 3 and name != 'de' else name}"

    monkeypatch.setattr(languages, "KINDS", {"number": family(text)})
    (corpus,), shared = languages.phrases(101)
    assert shared > 0 and shared % 2 == 0  # da and nb
    assert Counter(phrase.label for phrase in corpus) == dict.fromkeys(["da", "de", "nb"], 101)
    assert all(phrase.text.endswith(f" {phrase.label}") for phrase in corpus)
    assert {int(phrase.text.split()[0]) % 3 for phrase in corpus if phrase.label == "nb"} == {0}


def test_a_text_that_two_values_render_to_in_two_locales_belongs_to_the_first(monkeypatch):
    monkeypatch.setattr(languages, "LOCALES", ["de", "en"])
    monkeypatch.setattr(
        languages, "KINDS", {"number": family(lambda value, name: str(value + (name == "en")))}
    )
    (corpus,), _ = languages.phrases(301)
    assert len({phrase.text for phrase in corpus}) == len(corpus) == 602


def test_a_locale_without_words_for_a_value_has_no_text_for_it(monkeypatch):
    monkeypatch.setattr(languages, "LOCALES", ["de", "en"])

    def text(value, name):
        if name == "de" and value % 2:
            raise LookupError(value)
        return f"{value} {name}"

    monkeypatch.setattr(languages, "KINDS", {"number": family(text)})
    (corpus,), shared = languages.phrases(53)
    parities = {
        label: {int(p.text.split()[0]) % 2 for p in corpus if p.label == label}
        for label in ("de", "en")
    }
    assert parities == {"de": {0}, "en": {0, 1}} and shared == 0


def test_dates_name_their_month_in_words(corpora):
    dates = texts_of(corpora, "date", "de")
    assert len(dates) == 10
    for text in dates:
        assert re.fullmatch(rf"(\w+tag, |Mittwoch, )?\d\d?\. ({'|'.join(MONTHS)}) \d{{4}}", text)


def test_every_text_has_letters_and_no_text_has_the_identifier_of_a_unit(corpora):
    for corpus in corpora:
        for phrase in corpus:
            assert any(char.isalpha() for char in phrase.text), phrase
            assert not languages.UNIT.search(phrase.text), phrase


def test_a_unit_without_a_long_name_is_rendered_with_its_short_one(monkeypatch):
    def without_a_long_name(number, unit, length, locale):
        """Returns the identifier, as Babel does if a version of the CLDR lacks the name."""
        if (length, str(locale)) == ("long", "zh"):
            return f"{number} {unit}"
        return format_unit(number, unit, length, locale=locale)

    monkeypatch.setattr(number_families, "format_unit", without_a_long_name)
    ((_, (style,)),) = languages.measures(Locale("en"))
    value = "length-meter", Decimal(7)
    assert number_families.render_measure("long", value, Locale("zh")) == "7 length-meter"
    assert [style(value, Locale(name)) for name in ("zh", "en", "de")] == [
        "7米",
        "7 meters",
        "7 Meter",
    ]


def test_a_locale_without_a_name_for_a_currency_has_no_text_with_it():
    ((_, (style,)),) = languages.money_in_words(Locale("en"))
    assert get_currency_name("ZWL", locale="hi") == "ZWL"
    assert style((Decimal(7), "EUR"), Locale("hi")) == "7.00 यूरो"
    with pytest.raises(LookupError):
        style((Decimal(7), "ZWL"), Locale("hi"))


def test_the_phrases_do_not_depend_on_the_host(corpora):
    program = (
        "from flaxformer_lite.data.cldr import languages\n"
        "import sys; sys.stdout.reconfigure(encoding='utf-8')\n"
        "print(*(phrase for corpus in languages.phrases(7, 3)[0] for phrase in corpus), sep='\\n')"
    )
    host = {"PYTHONHASHSEED": "97", "TZ": "Pacific/Apia", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "fr"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | host,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert result.stdout.splitlines() == [str(phrase) for corpus in corpora for phrase in corpus]


def test_another_version_has_other_phrases(corpora, monkeypatch):
    first = {phrase.text for corpus in corpora for phrase in corpus}
    monkeypatch.setattr(languages, "VERSION", f"{languages.CORPUS + 1}.47.0")
    second = {phrase.text for corpus in languages.phrases(7, 3)[0] for phrase in corpus}
    assert len(first & second) < 0.1 * len(first)


def test_the_version_holds_the_corpus_number_and_the_version_of_the_cldr():
    corpus, *rest = languages.VERSION.split(".")
    assert int(corpus) == languages.CORPUS
    assert rest == phrase_families.VERSION.split(".")[1:]
