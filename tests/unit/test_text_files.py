"""Custom text files: lines that are cleaned, malformed lines, refused files; 100 at once."""

import functools
import gzip
import io
import json
import re
import tracemalloc
from collections import Counter

import pytest

from flaxformer_lite.data.sources import text_files
from flaxformer_lite.data.sources.text_files import LINE_SORTS, SORTS, Corpus, CorpusCounts, check

LONGEST = 61
TOO_LONG, NOT_UTF8, COLUMNS, NOT_JSON, NO_KEY, NO_TEXT, CONTROL, SEPARATOR, UNKNOWN = LINE_SORTS

# Lines, and the expected outcome of each: a sort of fault, or the text of a well-formed line.
LINES = [
    (b"k\xe4se", NOT_UTF8),
    (b"cut \xe2\x82", NOT_UTF8),
    (b"overlong \xc0\xaf", NOT_UTF8),
    (b"surrogate \xed\xa0\x80", NOT_UTF8),
    (b"\xff\xfeU\x00T\x00F\x00", NOT_UTF8),
    (b"nul \x00", CONTROL),
    (b"\x1b[1mbold", CONTROL),
    (b"delete \x7f", CONTROL),
    ("privat \x9f".encode(), CONTROL),
    ("a\u2028b".encode(), SEPARATOR),
    ("a\u2029b".encode(), SEPARATOR),
    ("a\x85b".encode(), SEPARATOR),
    (b"form\x0cfeed", SEPARATOR),
    (b"vertical\x0btab", SEPARATOR),
    (b"lone\rreturn", SEPARATOR),
    (b"file\x1cgroup", SEPARATOR),
    (b"", NO_TEXT),
    (b" ", NO_TEXT),
    ("\u3000\u00a0".encode(), NO_TEXT),
    (b"\r", NO_TEXT),  # with the LF after it, an empty line
    (b"x" * (LONGEST + 1), TOO_LONG),
    (b"x" * 1_000_000, TOO_LONG),
    (b"windows\r", "windows"),
    (b"x" * LONGEST + b"\r", "x" * LONGEST),
    (b"x" * LONGEST, "x" * LONGEST),
    ("\u00a0100\u202f€ \ufeff".encode(), "\u00a0100\u202f€ \ufeff"),
]
TSV = [
    (b"one column", COLUMNS),
    (b"one\ttwo\tthree", COLUMNS),
    (b"", COLUMNS),
    (b"one\t", NO_TEXT),
    (b" \ttwo", NO_TEXT),
    (b"one\t\xe9", NOT_UTF8),
    ("one\ttwo\x85".encode(), SEPARATOR),
    (b"one\ttwo\x01", CONTROL),
    (b"x" * LONGEST + b"\ttwo", TOO_LONG),
    (b"\t", NO_TEXT),
    *((line + b"\ttwo", outcome) for line, outcome in LINES if outcome in SORTS),
    (b"one\ttwo\r", ("one", "two")),
    (b'"one\ttwo"', ('"one', 'two"')),  # quotes are text
]
JSONL = [
    (b"{", NOT_JSON),
    (b"", NOT_JSON),
    (b"one", NOT_JSON),
    (b'{"en": "one", "de": "two"', NOT_JSON),
    (b'["one", "two"]', NOT_JSON),
    (b"null", NOT_JSON),
    (b'{"en": "one", "de": "two"} more', NOT_JSON),
    (b'{"en": "one"}', NO_KEY),
    (b'{"en": "one", "De": "two"}', NO_KEY),
    (b'{"en": "one", "de": null}', NO_KEY),
    (b'{"en": "one", "de": 2}', NO_KEY),
    (b'{"en": true, "de": "two"}', NO_KEY),
    (b'{"en": "one", "de": ["two"]}', NO_KEY),
    (b'{"en": "one", "de": ""}', NO_TEXT),
    (b'{"en": "\\n", "de": "two"}', NO_TEXT),
    (b'{"en": "\\u00a0 ", "de": "two"}', NO_TEXT),
    (b'{"en": "one", "de": "two\\nlines"}', SEPARATOR),
    (b'{"en": "one\\u2028", "de": "two"}', SEPARATOR),
    (b'{"en": "one", "de": "two\\u0085"}', SEPARATOR),
    (b'{"en": "\\u0000", "de": "two"}', CONTROL),
    (b'{"en": "one", "de": "\\u001b[1mtwo"}', CONTROL),
    (b'{"en": "\\ud800", "de": "two"}', NOT_UTF8),
    (b'{"en": "\xe9", "de": "two"}', NOT_UTF8),
    (b'{"en": "one", "de": "' + b"x" * LONGEST + b'"}', TOO_LONG),
    (b'{"en": "one", "de": "two"}\r', ("one", "two")),
    (b'{"id": 7, "de": "zw\\u00f6lf\\t", "en": "one"}', ("one", "zwölf\t")),
]


def corpus(*rows, form="lines", fields=("en", "de"), labels=None):
    rows = tuple(tuple(map(str, paths)) for paths in rows)
    return Corpus(rows, form, fields, LONGEST, labels and tuple(labels))


def planted(folder):
    """Returns three splits with the lines above, their well-formed examples, and all faults."""
    expected, faults = {}, Counter()
    left, right, expected["train"] = (
        [b"\xef\xbb\xbffirst"],
        [b"\xef\xbb\xbferstes"],
        [("first", "erstes")],
    )
    for number, (line, outcome) in enumerate(2 * LINES):
        side = number >= len(LINES)
        for lines, damaged, clean in ((left, not side, b"one"), (right, side, b"eins")):
            lines += [line if damaged else clean, f"{number}".encode()]  # and a good one after each
        if outcome in SORTS:
            faults[
                "train", f"{folder}/train.{'de' if side else 'en'}:{len(left) - 1}", outcome
            ] += 1
        else:
            expected["train"].append((outcome, "eins") if not side else ("one", outcome))
        expected["train"].append((f"{number}", f"{number}"))
    (folder / "train.en").write_bytes(b"\n".join(left))  # the last line without its end
    (folder / "train.de").write_bytes(b"\n".join(right) + b"\n")
    for split, name, cases, good in (
        ("validation", "more.tsv", TSV, b"one\ttwo"),
        ("test", "more.jsonl", JSONL, b'{"en": "one", "de": "two"}'),
    ):
        lines, expected[split] = [good], [("one", "two")]
        for line, outcome in cases:
            lines += [line, good]
            if outcome in SORTS:
                faults[split, f"{folder}/{name}:{len(lines) - 1}", outcome] += 1
            expected[split] += [("one", "two")] if outcome in SORTS else [outcome, ("one", "two")]
        (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    corpora = {
        "train": corpus((folder / "train.en", folder / "train.de")),
        "validation": corpus((folder / "more.tsv",), form="tsv"),
        "test": corpus((folder / "more.jsonl",), form="jsonl"),
    }
    return corpora, expected, faults


def read(corpora):
    """Returns, for each split, the texts of the well-formed examples."""
    return {
        split: [e.texts for e in examples if e.texts is not None]
        for split, examples in corpora.items()
    }


def test_each_of_100_planted_faults_is_found_with_its_line_and_sort(tmp_path):
    corpora, expected, faults = planted(tmp_path)
    assert faults.total() == 100 and {sort for _, _, sort in faults} == set(SORTS[:8])
    assert read(corpora) == expected
    found = Counter(
        (split, fault.where, fault.sort)
        for split, examples in corpora.items()
        for e in examples
        for fault in e.faults
    )
    assert found == faults


def test_a_listing_names_each_of_100_faults_and_its_counts_add_up(tmp_path):
    corpora, expected, faults = planted(tmp_path)
    listing = io.StringIO()
    found = check(corpora, listing)
    *lines, train, validation, test = listing.getvalue().splitlines()
    assert Counter(tuple(line.split("\t")[:2]) for line in lines) == Counter(
        (where, sort) for _, where, sort in faults
    )
    for split, line in (("train", train), ("validation", validation), ("test", test)):
        of_split = Counter(sort for name, _, sort in faults.elements() if name == split)
        assert found[split].faults == of_split
        assert (
            found[split].examples == len(expected[split]) + of_split.total()
        )  # each malformed example has one fault in these files
        assert sum(found[split].shards) == len(expected[split])
        sorts = ", ".join(f"{of_split[sort]} {sort}" for sort in SORTS if of_split[sort])
        assert (
            line
            == f"{split}: {of_split.total()} of {found[split].examples} examples are malformed: "
            f"{sorts}"
        )


def test_an_error_locates_each_of_100_faults_and_explains_the_first_3_of_each_sort(tmp_path):
    corpora, _, faults = planted(tmp_path)
    with pytest.raises(ValueError) as caught:
        check(corpora, None)
    message = str(caught.value)
    assert "\n" not in message and message.endswith("list them all with data.faults=drop.")
    sorts, named = "|".join(SORTS), Counter()
    for split, listed in re.findall(r"(\w+): \d+ of .*? They are: (.*?)\. (?=\w+: |Fix)", message):
        pattern = rf"(?:^|; )({sorts}) at (.*?)(?=; (?:{sorts}) at |$)"
        for sort, places in re.findall(pattern, listed):
            for path, lines in re.findall(rf"({tmp_path}/\S+?):([\d,]*\d)", places):
                named.update((split, f"{path}:{line}", sort) for line in lines.split(","))
    assert named == faults
    for split in corpora:
        for sort in SORTS:
            places = [where for name, where, fault in faults if (name, fault) == (split, sort)]
            assert (f"{len(places)} {sort}" in message) == bool(places)
            for number, where in enumerate(places):
                assert (f"{where} (" in message) == (number < 3), (where, sort)
    assert f"not UTF-8 at {tmp_path}/train.en:2 (byte 0xe4 at byte 2), " in message
    assert f"no such key at {tmp_path}/more.jsonl:" in message


def test_an_error_locates_100_faults_of_a_sort_and_counts_the_rest(tmp_path):
    (tmp_path / "a").write_bytes(b"one\n" + b"\n" * 100)
    with pytest.raises(
        ValueError,
        match=rf"a:3 \(empty\), {tmp_path}/a:4 \(empty\), {tmp_path}/a:5,6,7,.*,101\. Fix ",
    ):
        check({"train": corpus((tmp_path / "a",), fields=("text",))}, None)
    (tmp_path / "a").write_bytes(b"one\n" + b"\n" * 1334)
    with pytest.raises(
        ValueError, match=r"a:4 \(empty\), \S+/a:5,6,7,\S*,101, 1,234 elsewhere\. Fix "
    ):
        check({"train": corpus((tmp_path / "a",), fields=("text",))}, None)


def test_an_example_with_a_malformed_line_on_each_side_is_one_example_with_two_faults(tmp_path):
    (tmp_path / "a").write_bytes(b"one\n\n")
    (tmp_path / "b").write_bytes(b"eins\n\xff\n")
    (good, bad) = corpus((tmp_path / "a", tmp_path / "b"))
    assert good == (("one", "eins"), ()) and bad.texts is None
    assert [(fault.sort, fault.where) for fault in bad.faults] == [
        (NO_TEXT, f"{tmp_path}/a:2"),
        (NOT_UTF8, f"{tmp_path}/b:2"),
    ]
    found = CorpusCounts()
    found.add(good)
    found.add(bad)
    assert found.counts() == "1 of 2 examples are malformed: 1 not UTF-8, 1 no text"


@pytest.mark.parametrize("form", ["tsv", "jsonl"])
def test_an_unknown_label_is_a_fault_and_a_number_is_a_label(tmp_path, form):
    labels = [" good ", "7", "bad one"]
    lines = {
        "tsv": [f"{label}\ttext" for label in labels],
        "jsonl": [
            json.dumps({"text": "text", "label": 7 if label == "7" else label}) for label in labels
        ],
    }[form]
    (tmp_path / "a").write_text("\n".join(lines))
    examples = list(
        corpus((tmp_path / "a",), form=form, fields=("label", "text"), labels=["good", "bad", "7"])
    )
    assert [e.texts for e in examples] == [("good", "text"), ("7", "text"), None]
    assert examples[2].faults == [(UNKNOWN, f"{tmp_path}/a:3", "'bad one'")]


def test_rows_of_files_are_read_in_order_and_lines_are_numbered_in_each_file(tmp_path):
    for name, text in (("a1", "1\n2\n"), ("a2", "3\n\n"), ("b1", "I\nII\n"), ("b2", "III\nIV")):
        (tmp_path / name).write_text(text)
    examples = list(corpus((tmp_path / "a1", tmp_path / "b1"), (tmp_path / "a2", tmp_path / "b2")))
    assert [e.texts for e in examples] == [("1", "I"), ("2", "II"), ("3", "III"), None]
    assert examples[3].faults[0].where == f"{tmp_path}/a2:2"


def test_a_byte_order_mark_is_removed_at_the_start_of_every_line_where_cat_leaves_it(tmp_path):
    mark = b"\xef\xbb\xbf"
    for name in "ab":
        (tmp_path / name).write_bytes(mark + b"one\n" + mark + b"t" + mark + b"wo")
    texts = [e.texts for e in corpus((tmp_path / "a",), (tmp_path / "b",), fields=("text",))]
    assert texts == 2 * [("one",), ("t\ufeffwo",)]


@pytest.mark.parametrize("extra", [b"one more", b"one more\n", b"\n", b"1\n2\n3"])
def test_files_with_different_numbers_of_lines_are_refused_with_both_numbers(tmp_path, extra):
    (tmp_path / "a").write_bytes(b"1\n" * 1009)
    (tmp_path / "b").write_bytes(b"1\n" * 1009 + extra)
    (tmp_path / "c").write_bytes(b"1\n" * 1009 + b"1")
    longer = 1009 + (3 if b"3" in extra else 1)
    for listing in (None, io.StringIO()):  # with a listing too, because no example can be dropped
        for one, other, counts in (("a", "b", (1009, longer)), ("b", "a", (longer, 1009))):
            with pytest.raises(ValueError) as caught:
                check({"train": corpus((tmp_path / one, tmp_path / other))}, listing)
            counted = [
                f"{tmp_path / name} has {count:,}"
                for name, count in zip((one, other), counts, strict=True)
            ]
            assert str(caught.value).startswith(
                " and ".join(counted) + " lines: expected the same number in both"
            )
    if longer == 1010:
        assert len(list(corpus((tmp_path / "b", tmp_path / "c")))) == 1010


def damaged_gzip(lines):
    """Returns compressed lines damaged in each way: {name: bytes}."""
    whole = gzip.compress(b"".join(b"%d and some more\n" % i for i in range(lines)))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    return {
        "cut": whole[:-1000],
        "without its end": whole[:-4],
        "flipped": bytes(flipped),
        "with garbage after it": whole + b"garbage",
    }


@pytest.mark.parametrize("how", damaged_gzip(1))
def test_truncated_or_damaged_gzip_is_refused_with_the_last_line_read(tmp_path, how):
    (tmp_path / "a.gz").write_bytes(damaged_gzip(30_011)[how])
    with pytest.raises(
        ValueError,
        match=rf"^{tmp_path}/a\.gz, after line [\d,]+: cannot be read \(.+\); replace it",
    ):
        check({"train": corpus((tmp_path / "a.gz",), fields=("text",))}, io.StringIO())


def test_gzip_is_unpacked_also_in_several_members(tmp_path):
    (tmp_path / "a.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbfone\r\ntw") + gzip.compress(b"o\n\n")
    )
    examples = list(corpus((tmp_path / "a.gz",), fields=("text",)))
    assert [e.texts for e in examples] == [("one",), ("two",), None]


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for name, reason in (("none", "No such file"), (".", "Is a directory")):
        with pytest.raises(ValueError, match=rf"{reason}"):
            list(corpus((tmp_path / name,), fields=("text",)))


@pytest.mark.parametrize("lines", [b"", b"\n \n"])
def test_a_split_with_no_example_left_is_refused(tmp_path, lines):
    (tmp_path / "a").write_bytes(lines)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/a: no example for the test split, {len(lines) and 2} of"
    ):
        check({"test": corpus((tmp_path / "a",), fields=("text",))}, io.StringIO())


def test_shards_have_only_well_formed_examples_and_similar_amounts_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SHARD_CHARACTERS", 100)
    (tmp_path / "a").write_text("".join("x" * 7 + "\n" * (1 + (i % 5 == 0)) for i in range(50)))
    found = check({"train": corpus((tmp_path / "a",), fields=("text",))}, io.StringIO())["train"]
    assert found.shards == [15, 15, 15, 5]  # 15 of 7 characters are the first to be 100 or more
    assert found.examples == 60 and found.faulty == 10


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("repeats", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_memory_is_independent_of_the_file_size_and_the_longest_line(tmp_path, repeats, suffix):
    path = tmp_path / f"a{suffix}"
    fast_gzip = functools.partial(gzip.open, compresslevel=1)
    with (fast_gzip if suffix else open)(path, "wb") as file:
        for _ in range(repeats):
            file.write(b"x" * 3_000_000 + b"\n" + b"some text and more\n" * 1000)
    tracemalloc.start()
    try:
        found = check({"train": corpus((path,), fields=("text",))}, io.StringIO())["train"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.examples, found.faulty) == (repeats * 1001, repeats)
    assert peak < 8_000_000 < repeats * 3_000_000  # the file


def test_the_nested_texts_of_hugging_face_are_read(tmp_path):
    lines = [
        '{"translation": {"en": "one", "de": "eins"}, "id": 7}',
        '{"en": "two", "de": "zwei", "translation": "no object"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    examples = Corpus(((str(tmp_path / "a.jsonl"),),), "jsonl", ("en", "de"), 1000)
    assert [example.texts for example in examples] == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_once_with_what_to_do(encoding, tmp_path):
    (tmp_path / "a").write_bytes("\ufeffone\ntwo\n".encode(encoding))
    message = (
        rf"^{tmp_path}/a: expected UTF-8, got UTF-16; convert it with iconv -f UTF-16 -t UTF-8\.$"
    )
    with pytest.raises(ValueError, match=message):
        check({"train": corpus((tmp_path / "a",), fields=("text",))}, io.StringIO())
