"""The files that the config's paths match, the names of their texts, and their fingerprint."""

import dataclasses
import gzip
import json
import os

import pytest

from flaxformer_lite.data.sources import builders, own_text
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.field_rules import OWN_TEXT


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path / "data"


def write(folder, **files):
    """Writes files with these texts; '__' in a name is a dot."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def own(kind="parallel_text", *, names=(), labels=None, **files):
    return OwnText(kind, files, names, labels, longest_line=101, faults="refuse")


def identity(text, record):
    corpora = own_text.corpora(text)
    return builders.fingerprint(text, corpora, own_text.digests(corpora, record))


def test_the_kinds_are_those_of_the_config():
    assert tuple(own_text.FORMS) == OWN_TEXT


def test_a_pair_of_globs_is_matched_by_the_names(here):
    write(here, b2__en="", b10__en="", c__en="", b10__de="", c__de="", b2__de="")
    (here / "folder.en").mkdir()
    corpus = own_text.corpora(own(train=("*.en", "*.de")))["train"]
    assert corpus.rows == (("b10.en", "b10.de"), ("b2.en", "b2.de"), ("c.en", "c.de"))
    assert (corpus.form, corpus.fields, corpus.longest_line) == ("lines", ("en", "de"), 101)


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        (("en/*", "de/*"), (("en/1.txt", "de/1.txt"), ("en/2.txt.gz", "de/2.txt"))),
        (("x-*-english", "x_*.de"), (("x-1-english", "x_1.de"), ("x-11-english", "x_11.de"))),
        (("x/*/*",), (("x/c++/1.tsv",), ("x/c-/1.tsv",))),  # one side: any names are valid
        (("*.en", "*.de"), (("c++.en", "c++.de"), ("c.en", "c.de"), ("c_.en", "c_.de"))),
        (("one.*", "other"), (("one.en", "other"),)),  # one file a side: any names are valid
        (("*.en", "*.de"), (("news.en", "news.de"), ("news.extra.en", "news.extra.de"))),
        # the two sides sort differently
        (("*.en", "*.de"), (("train.dev.en", "train.dev.de"), ("train.en", "train.de"))),
        (
            ("en_de/*/*.en", "en_de/*/*.de"),
            (("en_de/a/x.en", "en_de/a/x.de"), ("en_de/b/x.en", "en_de/b/x.de")),
        ),
    ],
)
def test_paired_files_may_differ_in_the_common_prefix_and_suffix_of_a_side(here, patterns, rows):
    for path in (here / name for row in rows for name in row):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert own_text.corpora(own(train=patterns))["train"].rows == rows


@pytest.mark.parametrize(
    ("moved", "to", "named"),
    [
        ("a1.en", "a0.en", "a0.en"),
        ("a3.de", "a0.de", "a3.en"),
        ("a3.de", "a-1.de", "a3.en"),
        ("a2.en", "a.3.en", "a"),
    ],
)
def test_a_pair_of_globs_with_unmatched_names_is_refused(here, moved, to, named):
    write(here, a1__en="", a2__en="", a3__en="", a1__de="", a2__de="", a3__de="")
    (here / moved).rename(here / to)
    with pytest.raises(ValueError) as caught:
        own_text.corpora(own(train=("*.en", "*.de")))
    message = str(caught.value)
    expected = "config.data.train_files: expected the same file names on both sides, except for"
    assert message.startswith(expected)
    assert f"; {named}" in message


def test_a_path_with_glob_characters_matches_an_existing_file_of_this_name(here):
    write(here, **{"a[1]__en": "", "a1__en": "", "a1__de": ""})
    assert own_text.corpora(own(train=("a[1].en", "a[1].de")))["train"].rows == (
        ("a[1].en", "a1.de"),
    )


@pytest.mark.parametrize(
    ("kind", "paths", "names", "form", "fields"),
    [
        ("parallel_text", ("a.en", "a.de"), (), "lines", ("en", "de")),
        ("parallel_text", ("a.en.gz", "a.de"), (), "lines", ("en", "de")),
        # the suffixes decide which side is which
        ("parallel_text", ("a.en", "a.de"), ("de", "en"), "lines", ("en", "de")),
        ("parallel_text", ("a.src", "a.ref"), (), "lines", ("src", "ref")),
        ("parallel_text", ("a.src", "a.ref"), ("en", "de"), "lines", ("en", "de")),
        ("parallel_text", ("a.txt", "b.txt"), (), "lines", ("source", "target")),
        ("parallel_text", ("a.txt", "b.txt"), ("en", "de"), "lines", ("en", "de")),
        ("parallel_text", ("left", "right"), (), "lines", ("source", "target")),
        ("parallel_text", ("mixed?.*", "left.*"), (), "lines", ("source", "target")),
        ("parallel_text", ("a.tsv",), (), "tsv", ("source", "target")),
        ("parallel_text", ("a.tsv",), ("de", "en"), "tsv", ("de", "en")),
        ("parallel_text", ("two.jsonl",), (), "jsonl", ("sv", "fi")),
        ("parallel_text", ("two.jsonl",), ("fi", "sv"), "jsonl", ("sv", "fi")),
        ("parallel_text", ("three.jsonl.gz",), ("fi", "id"), "jsonl", ("fi", "id")),
        ("plain_text", ("a.en",), (), "lines", ("text",)),
        ("plain_text", ("two.jsonl",), ("fi",), "jsonl", ("fi",)),
        ("plain_text", ("two.jsonl",), ("fi", "sv"), "jsonl", ("fi", "sv")),
        ("labelled_text", ("a.tsv",), (), "tsv", ("label", "text")),
        ("labelled_text", ("two.jsonl",), (), "jsonl", ("label", "text")),
        ("labelled_text", ("two.jsonl",), ("fi", "sv"), "jsonl", ("label", "fi", "sv")),
    ],
)
def test_form_and_languages_come_from_file_names_and_keys(here, kind, paths, names, form, fields):
    write(
        here,
        a__en="",
        a__de="",
        a__src="",
        a__ref="",
        a__txt="",
        b__txt="",
        a__tsv="",
        left="",
        right="",
    )
    write(here, mixed1__en="", mixed2__fr="", left__mixed1__en="", left__mixed2__fr="")
    write(here, two__jsonl='{"sv": "ett", "fi": "yksi"}\n')
    (here / "a.en.gz").write_bytes(gzip.compress(b""))
    (here / "three.jsonl.gz").write_bytes(
        gzip.compress(b'{"id": "7", "sv": "ett", "fi": "yksi"}\n')
    )
    corpus = own_text.corpora(own(kind, names=names, train=paths))["train"]
    assert (corpus.form, corpus.fields) == (form, fields)


def test_splits_may_have_different_forms_and_orders_of_the_same_languages(here):
    write(here, a__en="", a__de="", b__de="", b__en="", c__jsonl='{"de": "eins", "en": "one"}')
    found = own_text.corpora(
        own(train=("a.en", "a.de"), validation=("b.de", "b.en"), test=("c.jsonl",))
    )
    assert [corpus.fields for corpus in found.values()] == [
        ("en", "de"),
        ("de", "en"),
        ("de", "en"),
    ]


@pytest.mark.parametrize(
    ("kind", "names", "files", "words"),
    [
        (
            "parallel_text",
            (),
            {"train": ("a.en", "no.de")},
            r"train_files: there is no file 'no\.de' \(relative to /",
        ),
        ("parallel_text", (), {"test": ("a.en", "*.fr")}, r"test_files: there is no file '\*\.fr'"),
        (
            "parallel_text",
            (),
            {"test": ("folder", "a.en")},
            r"test_files: there is no file 'folder'",
        ),
        (
            "parallel_text",
            (),
            {"train": ("*.en", "*.de")},
            r"train_files: .*both sides, \*\.en has 2 and \*\.de has 1",
        ),
        (
            "parallel_text",
            (),
            {"train": ("a.en", "a.de", "b.en")},
            r"train_files: .* takes a pair of paths, or one",
        ),
        (
            "parallel_text",
            (),
            {"train": ("a.en",)},
            r"train_files: expected columns \(\.tsv\) or a table \(\.csv\) or JSON .*got a\.en",
        ),
        (
            "parallel_text",
            (),
            {"train": ("a.tsv", "b.tsv")},
            r"train_files: expected plain lines .* for a pair of",
        ),
        (
            "parallel_text",
            (),
            {"train": ("*.[tj]s*",)},
            r"train_files: .* all in one form, got b\.tsv, .*three\.jsonl; \.gz",
        ),
        (
            "parallel_text",
            (),
            {"train": ("three.jsonl",)},
            r"languages: the first line of .* keys id, sv, fi; name the",
        ),
        (
            "parallel_text",
            (),
            {"train": ("bad.jsonl",)},
            r"languages: the first line of bad\.jsonl has the keys none;",
        ),
        (
            "parallel_text",
            ("de", "en"),
            {"train": ("a.en", "folder/d.txt")},
            r"languages: de, en would read a\.en as 'de'; name them in the order of the files",
        ),
        (
            "parallel_text",
            ("en", "kind"),
            {"train": ("a.tsv",)},
            r"languages: 'kind' cannot be the name of a text",
        ),
        (
            "parallel_text",
            ("en", "d/e"),
            {"train": ("a.tsv",)},
            r"languages: 'd/e' cannot be the name of a text",
        ),
        (
            "parallel_text",
            (),
            {"train": ("a.en", "a.de"), "test": ("a.tsv",)},
            r"languages: train_files have en and de, test_files have source and target; name",
        ),
        (
            "plain_text",
            (),
            {"train": ("a.en", "a.de")},
            r"train_files: plain_text takes one path, which may be",
        ),
        (
            "plain_text",
            (),
            {"train": ("a.tsv",)},
            r"train_files: expected plain lines .* or JSON Lines .* got a\.tsv",
        ),
        (
            "plain_text",
            ("a", "b"),
            {"train": ("a.en",)},
            r"text_features: a\.en has one text a line; leave it unset",
        ),
        (
            "labelled_text",
            (),
            {"train": ("a.en",)},
            r"train_files: expected columns .* or JSON Lines .* got a\.en",
        ),
        (
            "labelled_text",
            ("a", "b"),
            {"train": ("a.tsv",)},
            r"text_features: a\.tsv has one text a line",
        ),
        (
            "labelled_text",
            ("label",),
            {"train": ("three.jsonl",)},
            r"text_features: 'label' cannot be the name",
        ),
    ],
)
def test_files_that_do_not_match_each_other_or_their_kind_are_refused_with_the_field(
    here, kind, names, files, words
):
    write(here, a__en="", b__en="", a__de="", a__tsv="", b__tsv="", bad__jsonl="[1]")
    write(here, three__jsonl='{"id": "7", "sv": "ett", "fi": "yksi"}')
    (here / "folder").mkdir()
    (here / "folder" / "d.txt").touch()
    with pytest.raises(ValueError, match=rf"^config\.data\.{words}"):
        own_text.corpora(own(kind, names=names, **files))


def test_labels_are_the_sorted_ones_of_well_formed_lines_in_the_training_split(here):
    write(
        here, a__tsv="b\tone\n\na\ttwo\nb\tthree\n\ud7ff\t \n10\tfour\n9\tfive", b__tsv="other\tone"
    )
    found = own_text.corpora(own("labelled_text", train=("a.tsv",), test=("b.tsv",)))
    assert builders.label_names(found) == ("10", "9", "a", "b")
    with pytest.raises(
        ValueError, match=r"^config\.data\.train_files: labelled_text takes its labels"
    ):
        builders.label_names({"test": found["test"]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("good\ta\ngood\tb\n", r"expected two labels or more, got good\.$"),
        (
            "good,a\nbad,b\n",
            r"got none; the first malformed line has wrong columns at a\.tsv:1 "
            r"\(1, expected 2: label, text\)\.$",
        ),
        ("", r"expected two labels or more, got none\.$"),
    ],
)
def test_fewer_than_2_labels_are_refused_with_the_first_malformed_line(here, text, words):
    write(here, a__tsv=text)
    with pytest.raises(ValueError, match=rf"^a\.tsv: .*{words}"):
        builders.label_names(own_text.corpora(own("labelled_text", train=("a.tsv",))))


def test_over_10_000_labels_are_refused(here):
    write(here, a__tsv="".join(f"text {i}\tlabel\n" for i in range(builders.MOST_LABELS + 1)))
    with pytest.raises(
        ValueError, match=r"^a\.tsv: over 10,000 different labels; put the label first"
    ):
        builders.label_names(own_text.corpora(own("labelled_text", train=("a.tsv",))))


def test_a_fingerprint_changes_if_and_only_if_the_examples_do(here, tmp_path):
    write(here, a__en="one\n", a__de="eins\n", b__en="two\n", b__de="zwei\n")
    base = own(train=("a.en", "a.de"), test=("b.en", "b.de"))
    seen = {"base": identity(base, tmp_path / "record")}

    def note(what, text):
        seen[what] = identity(text, tmp_path / "record")
        assert list(seen.values()).count(seen[what]) == 1, what

    note("other files", dataclasses.replace(base, files=base.files | {"test": ("a.en", "a.de")}))
    note(
        "sides the other way round",
        dataclasses.replace(base, files=base.files | {"test": ("b.de", "b.en")}),
    )
    note("no test files", own(train=("a.en", "a.de")))
    note("another split", own(train=("a.en", "a.de"), validation=("b.en", "b.de")))
    note("more files", dataclasses.replace(base, files=base.files | {"train": ("?.en", "?.de")}))
    note("a limit", dataclasses.replace(base, longest_line=103))
    note("malformed lines dropped", dataclasses.replace(base, faults="drop"))
    note("another kind", own("plain_text", train=("a.en",)))
    note("labels", own("plain_text", train=("a.en",), labels=("x",)))
    write(here, a__en="One\n")
    note("another letter", base)
    write(here, a__en="one\n")
    (here / "c.en").write_text("one\n")  # the same in a file of another name
    assert (
        identity(
            dataclasses.replace(base, files=base.files | {"train": ("c.en", "a.de")}),
            tmp_path / "r",
        )
        == seen["base"]
    )
    # a record that cannot be written
    assert identity(base, tmp_path / "nowhere" / "record") == seen["base"]
    assert len(seen["base"]) == 20 and not (tmp_path / "nowhere").exists()


def test_only_a_file_that_has_changed_recently_is_read_again(here, tmp_path, monkeypatch):
    reads, digest, record = [], own_text.file_digest, tmp_path / "record"
    monkeypatch.setattr(own_text, "file_digest", lambda path: reads.append(path) or digest(path))
    monkeypatch.setattr(own_text.time, "time", lambda: (here / "a").stat().st_ctime + waited)
    write(here, a="one\n")
    corpora = own_text.corpora(own("plain_text", train=("a",)))

    waited = own_text.SETTLED - 0.5
    first = own_text.digests(corpora, record)
    assert own_text.digests(corpora, record) == first and len(reads) == 2 and not record.exists()
    waited = own_text.SETTLED + 0.5
    for _ in range(3):
        assert own_text.digests(corpora, record) == first
    assert len(reads) == 3 and list(json.loads(record.read_text())) == [str(here / "a")]

    times = (here / "a").stat()
    (here / "a").write_text("two\n")  # the same size, and the same mtime below
    os.utime(here / "a", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (here / "a").stat().st_mtime_ns == times.st_mtime_ns and (
        here / "a"
    ).stat().st_size == times.st_size
    second = own_text.digests(corpora, record)
    assert second != first and len(reads) == 4
    assert second == {"a": digest("a")}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"x": 7}', '{"x": []}', "null", '{"%s": ["no", "such"]}']
)
def test_a_malformed_record_is_ignored(here, tmp_path, text):
    write(here, a="one\n")
    (tmp_path / "record").write_text(text.replace("%s", str(here / "a")))
    corpora = own_text.corpora(own("plain_text", train=("a",)))
    assert own_text.digests(corpora, tmp_path / "record") == {"a": own_text.file_digest("a")}


def test_a_file_that_changes_while_it_is_read_is_refused(here, tmp_path, monkeypatch):
    write(here, a="one\n")

    def slow(path):
        write(here, a="one\ntwo\n")
        return "digest"

    monkeypatch.setattr(own_text, "file_digest", slow)
    with pytest.raises(ValueError, match=r"^a: it changes while it is read"):
        own_text.digests(own_text.corpora(own("plain_text", train=("a",))), tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_files_are_the_same_by_their_contents_and_order():
    then = {"a": "1", "b": "2", "c": "2"}
    assert own_text.changed(then, {"x": "1", "y": "2", "z": "2"}) == []
    assert own_text.changed(then, {"a": "1", "b": "3", "c": "2"}) == ["b"]
    assert own_text.changed(then, {"a": "1", "b": "2"}) == ["c"]
    assert own_text.changed(then, {"b": "2", "a": "1", "c": "2"}) == ["a", "b", "c"]
    assert own_text.changed(then, {"a": "1", "b": "2", "c": "2", "d": "7"}) == ["d"]
    assert own_text.changed(then, {"y": "2"}, some=True) == []
    assert own_text.changed(then, {"y": "3"}, some=True) == ["y"]


@pytest.mark.parametrize(
    ("named", "place"),
    [
        ("base/a.en", "base/a.en"),  # relative to a parent of the folder of the run
        ("base/a.en", "runs/a.en"),
        ("/old/place/base/a.en", "base/a.en"),  # the end of an absolute path
        ("/old/place/base/a.en", "runs/W/a.en"),
        ("/old/base/*.en", "base/a.en"),
    ],
)
def test_files_that_moved_with_the_run_are_found_near_it(named, place, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = tmp_path / "new" / place
    found.parent.mkdir(parents=True)
    found.write_text("one\n")
    run = tmp_path / "new" / "runs" / "W"
    texts = dataclasses.replace(own("plain_text", train=(named,)), beside=run)
    assert own_text.corpora(texts)["train"].rows == ((str(found),),)
    with pytest.raises(own_text.MissingFile, match=r"--config\.data\.train_files\.$"):
        own_text.corpora(own("plain_text", train=(named,)))


def test_a_file_where_the_config_names_it_comes_before_those_near_the_run(here, tmp_path):
    write(here, a="one\n")
    (tmp_path / "a").write_text("another\n")
    texts = dataclasses.replace(own("plain_text", train=("a",)), beside=tmp_path / "W")
    assert own_text.corpora(texts)["train"].rows == (("a",),)


def test_a_glob_that_matches_a_file_and_its_compressed_copy_is_refused(tmp_path):
    for name in ("a.en", "a.en.gz"):
        (tmp_path / name).write_bytes(b"one\n")
    with pytest.raises(ValueError, match=r"matches both .*a\.en and .*a\.en\.gz; remove one"):
        own_text.corpora(own("plain_text", train=(str(tmp_path / "a.en*"),)))
    packed = str(tmp_path / "a.en.gz")
    assert own_text.corpora(own("plain_text", train=(packed,)))["train"].rows == ((packed,),)
