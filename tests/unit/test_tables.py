"""Tables, .tsv and .csv: quotes, headers, malformed records, and warnings about them."""

import gzip
import hashlib
import io
import json
import logging
import re

import pytest

from flaxformer_lite.data.sources import builders, own_text, text_files
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.sources.text_files import COLUMNS, NOT_UTF8, SEPARATOR, TOO_LONG
from flaxformer_lite.system.errors import InputError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(files, kind="parallel_text", *, names=(), **fields):
    """Returns the texts of {file name: its content}, one file a split."""
    for name, content in files.items():
        with (gzip.open if name.endswith(".gz") else open)(name, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    splits = dict(zip(("train", "validation"), ((name,) for name in files), strict=False))
    return OwnText(kind, splits, names, None, longest_line=101, faults="refuse", **fields)


def read(content, name="a.csv", **options):
    """Returns the corpus of one file and its examples."""
    corpus = own_text.corpora(own({name: content}, **options))["train"]
    return corpus, list(corpus)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "A.CSV"])
def test_a_csv_is_read_by_its_header_with_quotes_as_a_spreadsheet_writes_them(name):
    content = b'\xef\xbb\xbf"en",,de\r\n"hello, you",1,"say ""hallo"", du"\r\none,"a\r\nb",eins\r\n'
    corpus, examples = read(content, name, names=("de", "en"))
    assert corpus.fields == ("de", "en")
    assert [each.texts for each in examples] == [
        ('say "hallo", du', "hello, you"),
        ("eins", "one"),
    ]


@pytest.mark.parametrize(
    ("options", "fields", "texts"),
    [
        ({}, ("source", "target"), [("de", "en"), ('"a, b"', "c")]),
        (dict(header=True), ("de", "en"), [('"a, b"', "c")]),
        (dict(quoted=True), ("source", "target"), [("de", "en"), ("a, b", "c")]),
        (dict(header=True, quoted=True, names=("en", "de")), ("de", "en"), [("a, b", "c")]),
        # a header of other names, as the suffixes of a pair of files
        (dict(header=True, quoted=True, names=("x", "y")), ("x", "y"), [("a, b", "c")]),
    ],
)
def test_header_and_quotes_of_a_tsv_are_what_the_config_says(options, fields, texts):
    corpus, examples = read('de\ten\n"a, b"\tc\n', "a.tsv", **options)
    assert (corpus.fields, [each.texts for each in examples]) == (fields, texts)


def test_a_csv_without_a_header_has_its_columns_in_order_and_one_without_quotes_is_lines():
    corpus, examples = read("one,eins\ntwo,zwei\n", names=("en", "de"), header=False)
    assert [each.texts for each in examples] == [("one", "eins"), ("two", "zwei")]
    corpus, examples = read('"one",1\n', kind="plain_text", quoted=False)
    assert (corpus.form, [each.texts for each in examples]) == ("lines", [('"one",1',)])


@pytest.mark.parametrize(
    ("kind", "names", "texts"),
    [
        ("labelled_text", (), ("good", "one, two")),
        ("labelled_text", ("title", "text"), ("good", "T", "one, two")),
        ("plain_text", (), ("one, two",)),
        ("plain_text", ("title",), ("T",)),
    ],
)
def test_labels_and_texts_are_found_by_the_names_of_json_lines(kind, names, texts):
    _, (example,) = read('title,text,label\nT,"one, two", good\n', kind=kind, names=names)
    assert example.texts == texts


def test_each_file_of_a_glob_has_a_header_and_may_have_another_order(here):
    (here / "1.csv").write_text("en,de\none,eins\n")
    (here / "2.csv").write_text("de,en\nzwei,two\n")
    texts = OwnText("parallel_text", {"train": ("*.csv",)}, (), None, 101, "refuse")
    corpus = own_text.corpora(texts)["train"]
    assert [each.texts for each in corpus] == [("one", "eins"), ("two", "zwei")]
    (here / "2.csv").write_text("fr,en\nzwei,two\n")
    with pytest.raises(InputError, match=r"^2\.csv:1: the header has no column 'de', but fr, en;"):
        list(corpus)


@pytest.mark.parametrize(
    ("record", "lines", "sort"),
    [
        (b'"one\nmore",two', 2, SEPARATOR),
        (b'"one\r\nmore\n",two', 3, SEPARATOR),
        (b'"one\n"more,two', 2, COLUMNS),
        (b'"one"more,two', 1, COLUMNS),
        (b"one,two,three", 1, COLUMNS),
        (b"one", 1, COLUMNS),
        (b"", 1, COLUMNS),
        (b"one\rmore,two", 1, SEPARATOR),
        (b"one,\xff", 1, NOT_UTF8),
        (b'"' + b"x" * 200 + b'",two', 1, TOO_LONG),
        (b'"' + b"x" * 60 + b"\n" + b"x" * 60 + b'",two', 2, TOO_LONG),
    ],
)
def test_a_malformed_record_is_one_fault_and_the_next_one_is_read(record, lines, sort):
    corpus, examples = read(b"en,de\na,b\n" + record + b'\n"c",d\n""e,f')
    good, bad, other, last = examples
    assert (good.texts, bad.texts, other.texts, last.texts) == (("a", "b"), None, ("c", "d"), None)
    assert [(fault.sort, fault.where) for fault in bad.faults] == [(sort, "a.csv:3")]
    assert last.faults[0].where == f"a.csv:{4 + lines}"
    with pytest.raises(InputError, match=r"^train: 2 of 4 examples are malformed: .*data\.faults"):
        text_files.check({"train": corpus}, None)
    listing = io.StringIO()
    assert text_files.check({"train": corpus}, listing)["train"].shards == [2]
    assert listing.getvalue().startswith(f"a.csv:3\t{sort}\t")


def test_a_quote_that_is_never_closed_is_a_fault_at_its_first_line():
    _, examples = read('en,de\na,b\n"c,d\ne,f\n')
    assert [each.texts for each in examples] == [("a", "b"), None]
    assert examples[1].faults[0][:2] == (COLUMNS, "a.csv:3")
    assert "in lines 3 to 4" in examples[1].faults[0].what


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("", {}, r"a\.csv:1: expected a header, the names of the columns, got nothing;"),
        (",\n", {}, r"a\.csv:1: expected a header, .*got '', '';"),
        ("\n", {}, r"a\.csv:1: expected a header, .*got an empty line;"),
        ('"en,de\n', {}, r"a\.csv:1: expected a header, .*got unexpected end of data;"),
        ("en;de\n", {}, r"a\.csv:1: expected commas between the columns of a \.csv, .*'en;de'"),
        ("en,\n", {}, r"config\.data\.languages: .* has the columns en, ; name the two"),
        ("en,en\n", {}, r"config\.data\.languages: .* has the columns en, en; name the two"),
        ("a,b,c\n", {}, r"config\.data\.languages: .* has the columns a, b, c; name the two"),
        ("Hi you,Hallo\n", {}, r"config\..* columns Hi you, Hallo; .* data\.header=False if it is"),
        ("a,b,c\n", dict(names=("a", "x")), r"a\.csv:1: the header has no column 'x', but a, b"),
        ("en,de,en\n", dict(names=("en", "de")), r"a\.csv:1: the header has 2 columns 'en', but"),
        ("a,text\n", dict(kind="labelled_text"), r"a\.csv:1: the header has no column 'label'"),
    ],
)
def test_a_header_that_does_not_name_the_columns_is_refused_with_what_it_has(
    content, options, words
):
    with pytest.raises(InputError, match=rf"^{words}"):
        read(content, **options)


@pytest.mark.parametrize(
    ("name", "kind", "form"),
    [
        ("A.TSV", "parallel_text", "tsv"),
        ("A.JsonL", "labelled_text", "jsonl"),
        ("A.CSV", "plain_text", "csv"),
        ("A.TSV", "plain_text", "lines"),
        ("A.JSONL", "plain_text", "lines"),
    ],
)
def test_names_in_capitals_are_of_the_same_form_where_they_were_not_plain_lines(name, kind, form):
    assert read("text\n", name, kind=kind)[0].form == form


HEADER = r"config\.data\.header: {}:1 \({}\) looks like the names of columns, and is read as an"
QUOTES = r"config\.data\.quoted: a\.tsv:{} and {} more of the first {} lines have fields in"
TAKEN = r"config\.data\.header: a\.csv:1 \(Hello, Hallo\) is read as the names of the columns; set "


@pytest.mark.parametrize(
    ("name", "content", "options", "patterns"),
    [
        (
            "a.tsv",
            'en\tde\n"hello, you"\t"hallo, du"\n',
            {},
            [HEADER.format(r"a\.tsv", "en, de"), QUOTES.format(2, 0, 2)],
        ),
        ("a.tsv", "Source\ttarget\tid\n", {}, [HEADER.format(r"a\.tsv", "Source, target, id")]),
        ("a.tsv", "text\tlabel\n", dict(kind="labelled_text"), [HEADER.format(".*", ".*")]),
        ("a.tsv", "tok\tsim\n", dict(names=("sim", "tok")), [HEADER.format(".*", "tok, sim")]),
        ("a.tsv", 'a\tb\n"say ""c"""\td\n' * 600, {}, [QUOTES.format(2, 499, "1,000")]),
        ("a.tsv", b"\xff\ten\tde\n", {}, [HEADER.format(r"a\.tsv", r"\?, en, de")]),
        ("a.csv", "Hello,Hallo\n", {}, [TAKEN]),
        ("a.csv", "Hello,Hallo\n", dict(names=("en", "de")), [TAKEN]),
        # declared by the config, and no sign
        ("a.tsv", 'en\tde\n"a, b"\tc\n', dict(header=False, quoted=False), []),
        ("a.tsv", 'en\tde\n"a, b"\tc\n', dict(header=True, quoted=True), []),
        ("a.tsv", '"Yes, sir", he said.\tx\n"Yes, sir"\ty\n', {}, []),
        ("a.tsv", '"Yes"\tx\n5" disk\ty\n', {}, []),
        ("a.tsv", '"Yes, sir"\tx\n' + "y\tz\n" * 100, {}, []),  # 1 of 101
        ("a.tsv", "en\ten\n", {}, []),
        ("a.tsv", "en\tbad\n", dict(kind="labelled_text"), []),
        ("a.tsv", "Hello\tHallo\n", {}, []),
        ("a.csv", "Hello,Hallo\n", dict(header=True), []),
        ("a.csv", "en,de\n", {}, []),
        ("a.csv", "text\n", dict(kind="plain_text"), []),
    ],
)
def test_an_undeclared_header_and_quotes_are_noticed_once_with_file_line_and_field(
    name, content, options, patterns, caplog
):
    files = {name: content, f"second.{name}": content}
    with caplog.at_level(logging.WARNING):
        own_text.corpora(own(files, **options))
    assert len(caplog.messages) == len(patterns)
    for message, pattern in zip(caplog.messages, patterns, strict=True):
        assert re.match(pattern, message)


def test_what_the_config_says_of_a_table_is_another_dataset_and_none_is_the_old_one(here):
    names = [
        builders.identify(texts, own_text.corpora(texts), here)[0]
        for texts in (
            own({"a.tsv": "a\tb\n"}, names=("a", "b"), header=header, quoted=quoted)
            for header, quoted in ((None, None), (False, False), (True, False), (False, True))
        )
    ]
    assert names[0] == names[1] and len(set(names)) == 3
    digest = hashlib.sha256(b"a\tb\n").hexdigest()
    how = (own_text.FORMAT, "parallel_text", None, 101, "refuse")
    old = (how, {"train": ("tsv", ("a", "b"))}, {"train": [[(digest, False)]]})
    fingerprint = hashlib.sha256(json.dumps(old).encode()).hexdigest()[:20]
    assert names[0] == f"parallel_text-{fingerprint}"
