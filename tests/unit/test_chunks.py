"""A long text is split at the best break, never inside a character, and loses only spaces."""

import re

import numpy as np
import pytest

from flaxformer_lite.lines.chunks import Segment, cut, join


def at_most(length):
    return lambda text: len(text) <= length


def cut_to(text, length):
    return [segment.text for segment in cut(text, at_most(length))]


def test_a_text_that_fits_is_one_chunk_even_if_it_is_empty_or_white_space():
    for text in ("", " ", "A b. C d.", " a, b "):
        assert cut(text, at_most(11)) == [Segment(text)]


def test_a_text_is_split_in_two_near_its_middle_until_all_chunks_fit():
    text = "One two. Three four. Five six. Seven eight."
    assert cut_to(text, 30) == ["One two. Three four.", "Five six. Seven eight."]
    assert cut_to(text, 21) == ["One two. Three four.", "Five six.", "Seven eight."]


@pytest.mark.parametrize(
    ("text", "length", "parts"),
    [
        # a sentence before a clause
        ("Aa, b c d e f g h i. Jj", 21, ["Aa, b c d e f g h i.", "Jj"]),
        ("aa bb cc dd, ee", 13, ["aa bb cc dd,", "ee"]),  # a clause before a space
        ("aaaaaaaaa bb", 11, ["aaaaaaaaa", "bb"]),  # a space before a word
        ("abcdefg", 4, ["abc", "defg"]),
        # no break inside a number
        ("It is 3.14 or 2,718 all in all", 20, ["It is 3.14 or", "2,718 all in all"]),
        # closing quotes and brackets stay with their text
        ('He said "No." Then he went', 20, ['He said "No."', "Then he went"]),
        ("So?! (Yes, yes.) Go on", 18, ["So?! (Yes, yes.)", "Go on"]),
        # not at a no-break space
        ("12\xa0000\xa0000 km\xa0h and", 15, ["12\xa0000\xa0000", "km\xa0h and"]),
        ("我今天去。他明天去。", 6, ["我今天去。", "他明天去。"]),
        ("「我今天去。」他说明天去。", 8, ["「我今天去。」", "他说明天去。"]),
        ("我今天去，他明天去", 5, ["我今天去，", "他明天去"]),
        ("यह है। वह है।", 8, ["यह है।", "वह है।"]),
        ("هل هذا؟ نعم هذا", 9, ["هل هذا؟", "نعم هذا"]),
    ],
)
def test_a_split_prefers_sentences_to_clauses_to_spaces(text, length, parts):
    assert cut_to(text, length) == parts


@pytest.mark.parametrize(
    "character",
    [
        "e\u0301",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f44d\U0001f3fd",
        "\U0001f1e9\U0001f1ea",
        "\u1112\u1161\u11ab",
        "\u0915\u093f",
        "\u2764\ufe0f",
        "\r\n",
    ],
    ids=["accent", "family", "skin", "flag", "syllable", "vowel sign", "variation", "line end"],
)
def test_no_split_is_inside_a_grapheme(character):
    size = len(character)
    assert size > 1
    for count in range(1, 6):
        parts = cut(character * count, at_most(1))
        if character != "\r\n":  # white space, which is lost at a split
            assert parts == [Segment(character, within_word=i > 0) for i in range(count)]
    assert [part.text for part in cut(f"ab{character}cd", at_most(1))][1:2] == ["b"]


def test_all_other_characters_are_kept_in_order_and_every_chunk_fits():
    rng = np.random.default_rng(3)
    letters = [*"abcé\u0301 .,;!?。，字漢 \xa0\n", "\U0001f1e9\U0001f1ea"]
    for length in rng.integers(1, 199, 97):
        text = "".join(rng.choice(letters, length))
        parts = cut_to(text, 13)
        assert re.sub(r"\s", "", "".join(parts)) == re.sub(r"\s", "", text)
        assert all(0 < len(part) <= 13 for part in parts)


def test_a_long_line_of_white_space_has_no_chunk():
    assert cut(" " * 9, at_most(8)) == []
    assert join([], []) == ""


def test_a_line_of_many_chunks_is_split_without_deep_recursion():
    text = "word " * 20_000 + "w" * 9_001
    parts = cut_to(text, 100)
    assert 1100 < len(parts) < 2300 and max(map(len, parts)) <= 100


def joined(texts, long_text, length):
    segments = cut(long_text, at_most(length))
    assert len(segments) == len(texts)
    return join(texts, segments)


def test_outputs_of_chunks_are_joined_with_a_space_if_script_and_split_need_one():
    assert joined(["Eins.", "Zwei."], "One one. Two two.", 9) == "Eins. Zwei."
    # the script of the output decides
    assert joined(["一。", "二。"], "One one. Two two.", 9) == "一。二。"
    assert joined(["One.", "Two."], "我今天去。他明天去。", 6) == "One. Two."
    # no word was divided: the script has no spaces
    assert joined(["I go to", "day"], "我今天去他明天去", 4) == "I go to day"
    assert joined(["ABC", "DEFG"], "abcdefg", 4) == "ABCDEFG"  # a word was divided
    assert joined(["", "Zwei."], "One one. Two two.", 9) == "Zwei."
    assert joined(["Eins.", ""], "One one. Two two.", 9) == "Eins."
