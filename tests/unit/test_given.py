"""Arguments of the Python API: refusals, and line ends that are removed."""

import io
from pathlib import Path

import numpy as np
import pytest

from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError


def test_line_ends_are_removed_and_nothing_else():
    lines = io.StringIO("a\n b \nc\r\n\nlast", newline="")
    assert given.texts(lines) == ["a", " b ", "c", "", "last"]
    assert given.texts(("x\n\n", "y\r", "z\n\r\n")) == ["x\n", "y\r", "z\n"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("Monday", r"^texts: expected a list of texts, got one text; pass \['Monday'\]\.$"),
        (b"Monday", r"^texts: expected a list of texts, got b'Monday' \(bytes\)\.$"),
        (None, r"^texts: expected a list of texts, got None\.$"),
        (7, r"^texts: expected a list of texts, got 7 \(int\)\.$"),
        (["a", None], r"^text 2: expected a text \(str\), got None\.$"),
        (["a", "b", b"c"], r"^text 3: expected a text \(str\), got b'c' \(bytes\)\.$"),
        ([["a"]], r"^text 1: expected a text \(str\), got \['a'\] \(list\)\.$"),
        (
            ["a\ud83d"],
            r"^text 1: expected Unicode characters, got half of a surrogate pair, U\+D83D",
        ),
    ],
)
def test_anything_but_a_list_of_texts_is_one_message(texts, message):
    with pytest.raises(InputError, match=message):
        given.texts(texts)


def test_the_message_names_the_argument():
    with pytest.raises(InputError, match=r"^prompts: expected a list"):
        given.texts("a", name="prompts", item="prompt")
    with pytest.raises(InputError, match=r"^prompt 1: expected a text"):
        given.texts([0], name="prompts", item="prompt")


def test_texts_are_read_one_at_a_time_but_a_wrong_argument_is_refused_at_once():
    def endless():
        yield "a\n"
        raise AssertionError("read ahead")

    assert next(given.each_text(endless())) == "a"
    with pytest.raises(InputError, match=r"^texts: "):
        given.each_text("a")


@pytest.mark.parametrize(
    ("given_folders", "expected"),
    [("a", ["a"]), (b"a", ["a"]), (Path("a"), ["a"]), (["a", Path("b")], ["a", "b"]), ((), [])],
)
def test_one_folder_or_a_list_of_them_is_a_list_of_paths(given_folders, expected):
    assert given.folders(given_folders, name="ensemble") == expected


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (None, r"^ensemble: expected a list of folders, got None\.$"),
        (2.0, r"^ensemble: expected a list of folders, got 2\.0 \(float\)\.$"),
        ([True], r"^ensemble: expected the path of a folder, got True \(bool\)\.$"),
        ([None], r"^ensemble: expected the path of a folder, got None\.$"),
        ("", r"^ensemble: expected the path of a folder, got '' \(str\)\.$"),
    ],
)
def test_anything_but_folders_is_one_message(folders, message):
    with pytest.raises(InputError, match=message):
        given.folders(folders, name="ensemble")


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ("abc", r"^files: expected lists of texts by name, got 'abc' \(str\)\.$"),
        (["a"], r"^files: expected lists of texts by name, got \['a'\] \(list\)\.$"),
        ({1: ["a"]}, r"^files: expected a name \(str\), got 1 \(int\)\.$"),
        ({"test": "a"}, r"^files\['test'\]: expected a list of texts, got one text"),
        ({"test": [1]}, r"^text 1: expected a text \(str\), got 1 \(int\)\.$"),
    ],
)
def test_anything_but_lists_of_texts_by_name_is_one_message(lists, message):
    assert given.text_lists({"test": ("a", "b")}, name="files") == {"test": ["a", "b"]}
    with pytest.raises(InputError, match=message):
        given.text_lists(lists, name="files")


@pytest.mark.parametrize("number", [1, 2, np.int64(3)])
def test_a_whole_number_is_returned_as_an_int(number):
    found = given.whole_number(number, name="n")
    assert found == number and type(found) is int


@pytest.mark.parametrize("number", [0, -1, 2.0, "2", None, True, np.float32(2)])
def test_anything_else_is_one_message(number):
    with pytest.raises(InputError, match=r"^window: expected a whole number, 1 or more, got "):
        given.whole_number(number, name="window")
