"""The TFDS datasets are frozen by their versions and prepared once, also after a killed process."""

import dataclasses
import errno
import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data.cldr import languages, phrase_families
from flaxformer_lite.data.sources import builders, preparation, text_files
from flaxformer_lite.data.sources.own_text import OwnText

# SHA-256 of the lines "split kind source target" of en-de, in order, for each version so far.
DIGESTS = {
    "1.47.0": "d17fd5351b02a42c701b449f7b7c6c780a593ad1054fe07d41c1a72d0733e87c",
    "1.49.0": "c5c528e2beca62130d053981663d66cea0f63968df76583a289647d0dad86afd",
}
# The same for cldr_language, with lines "split kind text label".
LANGUAGE_DIGESTS = {
    "1.47.0": "44c40f22da3f64431cf20084c5e3ed5c71d6c8aa173534c775a1709a82bb7b30",
    "1.49.0": "159e5b099193c2195da88cfdfc9739345282c0b8c22de65f22dddf532d086b81",
}

# For child processes: a corpus of 2 x 20 held-out and 40 training examples.
SMALL = """
import functools, os, signal, sys
from flaxformer_lite.data.cldr import phrase_families
from flaxformer_lite.data.sources import builders, preparation
phrase_families.phrases = functools.partial(phrase_families.phrases, per_kind=8)
builders.HELD_OUT = 20
builders.OF_A_LANGUAGE = {"validation": 1, "train": 2}
builder = builders.cldr_translate("en-de", data_dir=sys.argv[1])
"""


@pytest.fixture(scope="session")
def corpus():
    """The full default corpus, prepared once: split -> list of (kind, source, target)."""
    builder = builders.cldr_translate(data_dir=os.environ["TFDS_DATA_DIR"])
    preparation.prepare(builder)
    return {split: read(builder, split) for split in ("train", "validation", "test")}


@pytest.fixture(scope="session")
def language_corpus():
    """The full corpus of cldr_language: split -> list of (kind, text, label)."""
    builder = builders.cldr_language(data_dir=os.environ["TFDS_DATA_DIR"])
    preparation.prepare(builder)
    return {split: read_language(builder, split) for split in ("train", "validation", "test")}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(
        phrase_families, "phrases", functools.partial(phrase_families.phrases, per_kind=8)
    )
    monkeypatch.setattr(builders, "HELD_OUT", 20)


def examples_of(builder, split):
    source = builder.as_data_source(split=split)
    return source.__getitems__(list(range(len(source))))


def features_of(builder, split):
    """The raw features of each example; 4 times faster than `examples_of` for a full corpus."""
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    records = builder.as_data_source(split=split, deserialize_method=raw).data_source
    for record in records.__getitems__(list(range(len(records)))):
        yield tf_example_pb2.Example.FromString(record).features.feature


def text_of(features, name):
    return features[name].bytes_list.value[0].decode()


def read(builder, split):
    keys = ("kind", *builders.locales_of(builder.builder_config.name))
    return [tuple(text_of(e, key) for key in keys) for e in features_of(builder, split)]


def read_language(builder, split):
    names = builder.info.features["label"].names
    return [
        (text_of(e, "kind"), text_of(e, "text"), names[e["label"].int64_list.value[0]])
        for e in features_of(builder, split)
    ]


def start(program, folder, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", SMALL + program, str(folder)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(folder):
    """Returns the digest of every file of examples, by its path."""
    files = sorted(Path(folder).rglob("*array_record*"))
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def test_the_splits_have_their_documented_sizes(corpus):
    assert {split: len(examples) for split, examples in corpus.items()} == {
        "train": 100_000,
        "validation": 2_000,
        "test": 2_000,
    }


def test_all_source_phrases_of_all_splits_are_distinct(corpus):
    sources = [source for examples in corpus.values() for _, source, _ in examples]
    assert len(set(sources)) == len(sources)


def test_every_split_has_equally_many_phrases_of_each_kind(corpus):
    for examples in corpus.values():
        counts = Counter(kind for kind, _, _ in examples)
        assert counts == dict.fromkeys(
            phrase_families.KINDS, len(examples) // len(phrase_families.KINDS)
        )
        assert min(counts.values()) >= 150


def assert_frozen(corpus, version, digests):
    if version not in digests:
        pytest.skip(f"no digest is recorded for {version}, with another version of the CLDR")
    lines = "\n".join(
        "\t".join((split, *example)) for split, examples in corpus.items() for example in examples
    )
    assert hashlib.sha256(lines.encode()).hexdigest() == digests[version], (
        f"The phrases of version {version} have changed, so scores on it are no longer "
        "comparable. If the change is intended, raise CORPUS next to VERSION, and add the digest "
        "of the new version; never replace one. If nothing here has changed, Babel renders this "
        "version of the CLDR differently."
    )


def test_the_corpus_has_the_digest_of_its_version(corpus):
    assert_frozen(corpus, phrase_families.VERSION, DIGESTS)


def test_the_corpus_of_languages_has_the_digest_of_its_version(language_corpus):
    assert_frozen(language_corpus, languages.VERSION, LANGUAGE_DIGESTS)


def test_the_corpus_of_languages_has_its_documented_sizes_and_is_balanced(language_corpus):
    sizes = {"train": 47_000, "validation": 2_000, "test": 2_000}
    assert {split: len(examples) for split, examples in language_corpus.items()} == sizes
    for examples in language_corpus.values():
        each = len(examples) // (len(languages.LOCALES) * len(languages.KINDS))
        counts = Counter((kind, label) for kind, _, label in examples)
        assert counts == {
            (kind, label): each for kind in languages.KINDS for label in languages.LOCALES
        }


def test_all_texts_of_the_corpus_of_languages_are_distinct(language_corpus):
    texts = [text for examples in language_corpus.values() for _, text, _ in examples]
    assert len(set(texts)) == len(texts)


def test_the_dataset_of_languages_is_registered_with_tfds_and_its_labels_are_the_locales(tmp_path):
    builder = builders.tfds.builder("cldr_language", data_dir=tmp_path)
    assert builder.info.features["label"].names == languages.LOCALES
    assert builder.info.supervised_keys == ("text", "label")
    assert (
        builders.cldr_language(data_dir=tmp_path).info.full_name
        == f"cldr_language/{languages.VERSION}"
    )


def test_the_splits_are_the_generated_phrases_in_order(small, tmp_path):
    builder = builders.cldr_translate("sv-fi", data_dir=tmp_path)
    preparation.prepare(builder)
    phrases = [tuple(phrase) for phrase in phrase_families.phrases("sv", "fi")]
    assert read(builder, "validation") + read(builder, "test") + read(builder, "train") == phrases
    assert len(phrases) == 80


def test_the_same_version_has_the_same_bytes_on_every_host(tmp_path):
    hosts = (
        {"PYTHONHASHSEED": "0", "TZ": "UTC"},
        {"PYTHONHASHSEED": "97", "TZ": "Asia/Kathmandu", "LC_ALL": "C"},
    )
    program = """
preparation.prepare(builder)
preparation.prepare(builders.cldr_language(data_dir=sys.argv[1]))
"""
    runs = [start(program, tmp_path / str(n), **host) for n, host in enumerate(hosts)]
    assert [run.communicate() for run in runs] == [("", "")] * 2  # TFDS prints nothing
    first, second = (digests(tmp_path / str(n)) for n in range(2))
    assert len(first) == 3 + 2
    assert first == second


def test_two_processes_that_start_at_once_prepare_the_dataset_once(tmp_path):
    program = """
generate = preparation.generate
preparation.generate = lambda builder: (print("generates"), generate(builder))
print("starts", flush=True)
preparation.prepare(builder)
print(builder.info.splits["train"].num_examples)
"""
    # so that both find no dataset
    with preparation.dataset_lock(builders.cldr_translate("en-de", data_dir=tmp_path)):
        runs = [start(program, tmp_path) for _ in range(2)]
        assert [run.stdout.readline() for run in runs] == ["starts\n"] * 2
        time.sleep(0.3)
        assert not digests(tmp_path)
    outputs = [run.communicate(timeout=30) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sorted(output.split() for output, _ in outputs) == [["40"], ["generates", "40"]]


def test_the_next_preparation_succeeds_after_a_killed_one(small, tmp_path):
    program = """
def die(self, phrases):
    yield 0, {"en": "one", "de": "eins", "kind": "number"}
    os.kill(os.getpid(), signal.SIGKILL)
builders.CldrTranslate._generate_examples = die
preparation.prepare(builder)
"""
    run = start(program, tmp_path)
    assert run.wait(timeout=30) == -signal.SIGKILL
    run.communicate()
    assert len(list(tmp_path.rglob("incomplete.*"))) == 1
    builder = builders.cldr_translate("en-de", data_dir=tmp_path)
    preparation.prepare(builder)
    assert len(read(builder, "train")) == 40
    assert not list(tmp_path.rglob("incomplete.*"))


def test_an_existing_folder_without_a_dataset_is_refused_and_kept(small, tmp_path):
    builder = builders.cldr_translate("en-de", data_dir=tmp_path)
    mine = Path(builder.data_dir) / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(
        ValueError, match=rf"Expected a dataset in {builder.data_dir}.*dataset_info"
    ):
        preparation.prepare(builder)
    assert mine.exists()


def test_a_prepared_dataset_is_read_without_a_lock_file(small, tmp_path):
    early, late = (builders.cldr_translate("en-de", data_dir=tmp_path) for _ in range(2))
    preparation.prepare(early)
    (lock,) = tmp_path.glob(".*.lock")
    assert lock.name == f".cldr_translate.en-de.{phrase_families.VERSION}.lock"
    lock.unlink()
    preparation.prepare(late)  # this builder was made before the data existed
    assert late.info.splits["train"].num_examples == 40
    assert not list(tmp_path.glob(".*.lock"))


def test_an_unwritable_folder_is_reported_with_the_variable_to_set(tmp_path):
    (tmp_path / "file").write_text("in the way")
    builder = builders.cldr_translate("en-de", data_dir=tmp_path / "file")
    with pytest.raises(ValueError, match=r"Cannot write .*/file .*TFDS_DATA_DIR"):
        preparation.prepare(builder)


def test_a_full_disk_is_reported_with_its_folder(tmp_path, monkeypatch):
    def no_space(builder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparation, "generate", no_space)
    with pytest.raises(
        ValueError,
        match=rf"en-de/{phrase_families.VERSION} to {tmp_path} \(No space left on device\)",
    ):
        preparation.prepare(builders.cldr_translate("en-de", data_dir=tmp_path))


@pytest.mark.parametrize("pair", ["en", "en-de-fr", "pt-BR-zh", "", "en_de"])
def test_a_malformed_pair_is_refused_with_the_expected_form(pair):
    with pytest.raises(ValueError, match=f"<source>-<target>.*got '{pair}'"):
        builders.cldr_translate(pair)


@pytest.mark.parametrize(
    ("pair", "message"), [("en-de_AAT", "nearest is 'de_AT'"), ("de-de", "two different locales")]
)
def test_a_pair_that_is_not_two_locales_is_refused_before_anything_is_written(
    pair, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        builders.cldr_translate(pair, data_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_default_pair_is_english_to_german_and_registered_with_tfds(tmp_path):
    builder = builders.tfds.builder("cldr_translate", data_dir=tmp_path)
    assert builder.builder_config.name == "en-de"
    assert builders.cldr_translate(data_dir=tmp_path).info.full_name == builder.info.full_name
    assert builder.info.supervised_keys == ("en", "de")


# Custom text.

OWN = """
from flaxformer_lite.data.sources.own_text import OwnText
kind, files, labels = "parallel_text", {"train": ("a.en", "a.de")}, None
builder, _ = builders.own_texts(OwnText(kind, files, (), labels, 100, "refuse"), sys.argv[1])
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A pair of files for training and one for testing, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("a.en", "two\none\n"),
        ("a.de", "zwei\neins\n"),
        ("b.en", "three"),
        ("b.de", "drei"),
    ):
        (tmp_path / name).write_text(text)
    files = {"train": ("a.en", "a.de"), "test": ("b.en", "b.de")}
    return OwnText("parallel_text", files, names=(), labels=None, longest_line=100, faults="refuse")


def own_examples(builder, split="train"):
    return [
        {k: v.decode() if isinstance(v, bytes) else int(v) for k, v in e.items()}
        for e in examples_of(builder, split)
    ]


def test_pairs_of_files_become_a_translation_dataset_in_the_order_of_their_lines(own, tmp_path):
    builder, contents = builders.own_texts(own, tmp_path / "tfds")
    preparation.prepare(builder)
    assert own_examples(builder) == [{"en": "two", "de": "zwei"}, {"en": "one", "de": "eins"}]
    assert own_examples(builder, "test") == [{"en": "three", "de": "drei"}]
    assert isinstance(builder.info.features, builders.tfds.features.Translation)
    assert builder.info.supervised_keys == ("en", "de")
    assert contents == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in contents
    }
    assert list(contents) == ["a.en", "a.de", "b.en", "b.de"]
    assert not list(tmp_path.rglob("faults*"))


def test_a_prepared_dataset_is_opened_again_with_the_same_features(own, tmp_path):
    first, _ = builders.own_texts(own, tmp_path / "tfds")
    preparation.prepare(first)
    before = digests(tmp_path / "tfds")
    second, _ = builders.own_texts(own, tmp_path / "tfds")
    preparation.prepare(second)
    assert (
        Path(second.data_dir) == Path(first.data_dir)
        and second.info.full_name == first.info.full_name
    )
    assert own_examples(second) == own_examples(first)
    assert second.info.supervised_keys == ("en", "de")
    assert digests(tmp_path / "tfds") == before and len(before) == 2


def test_changed_files_make_another_dataset_next_to_the_old_one(own, tmp_path):
    first, _ = builders.own_texts(own, tmp_path / "tfds")
    preparation.prepare(first)
    (tmp_path / "a.de").write_text("zwei\nEins\n")
    second, _ = builders.own_texts(own, tmp_path / "tfds")
    preparation.prepare(second)
    assert second.data_dir != first.data_dir
    assert (own_examples(first)[1]["de"], own_examples(second)[1]["de"]) == ("eins", "Eins")


def test_plain_and_labelled_texts_become_datasets_with_their_labels_in_order(own, tmp_path):
    # TFDS strips spaces around a name
    (tmp_path / "a.tsv").write_text("bad\tone\n good\ttwo\nbad \tthree\n")
    labelled = dataclasses.replace(own, kind="labelled_text", files={"train": ("a.tsv",)})
    builder, _ = builders.own_texts(labelled, tmp_path / "tfds")
    preparation.prepare(builder)
    for same in (builder, builders.own_texts(labelled, tmp_path / "tfds")[0]):
        assert same.info.features["label"].names == ["bad", "good"]
        assert [(e["label"], e["text"]) for e in own_examples(same)] == [
            (0, "one"),
            (1, "two"),
            (0, "three"),
        ]
        assert same.info.supervised_keys == ("text", "label")
    # the labels of a trained classifier, in its order
    learnt = dataclasses.replace(labelled, labels=("good", "other", "bad"))
    builder, _ = builders.own_texts(learnt, tmp_path / "tfds")
    preparation.prepare(builder)
    assert builder.info.features["label"].names == ["good", "other", "bad"]
    assert [e["label"] for e in own_examples(builder)] == [2, 0, 2]
    plain = dataclasses.replace(own, kind="plain_text", files={"train": ("a.*n",)})
    builder, _ = builders.own_texts(plain, tmp_path / "tfds")
    preparation.prepare(builder)
    assert own_examples(builder) == [{"text": "two"}, {"text": "one"}]


def test_malformed_lines_are_refused_without_a_trace_or_dropped_with_a_note_at_each_start(
    own, tmp_path, capfd
):
    (tmp_path / "a.en").write_bytes(b"two\n\n\xffthree\nfour\x00\nfive")
    (tmp_path / "a.de").write_bytes(b"zwei\n\ndrei\nvier\nf\xc3\xbcnf")
    builder, _ = builders.own_texts(own, tmp_path / "tfds")
    with pytest.raises(
        ValueError,
        match=r"^train: 3 of 5 examples are malformed: 1 not UTF-8, 2 no text, 1 control ch",
    ):
        preparation.prepare(builder)
    assert not [
        path
        for path in (tmp_path / "tfds").rglob("*")
        if path.is_file() and not path.name.startswith(".")
    ]

    dropping = dataclasses.replace(own, faults="drop")
    folder = ""
    for _ in range(2):
        builder, _ = builders.own_texts(dropping, tmp_path / "tfds")
        preparation.prepare(builder)
        assert own_examples(builder) == [{"en": "two", "de": "zwei"}, {"en": "five", "de": "fünf"}]
        folder = folder or Path(builder.data_dir)
    assert builder.info.splits["train"].num_examples == 2
    out, err = capfd.readouterr()
    counts = "train: 3 of 5 examples are malformed: 1 not UTF-8, 2 no text, 1 control character"
    assert (out, err) == ("", 2 * f"parallel_text, {counts}; left out, see {folder}/faults.txt\n")
    assert (folder / "faults.txt").read_text().splitlines() == [
        "a.en:2\tno text\tempty",
        "a.de:2\tno text\tempty",
        "a.en:3\tnot UTF-8\tbyte 0xff at byte 1",
        "a.en:4\tcontrol character\tU+0000 at character 5",
        counts,
        "test: 0 of 1 examples are malformed",
    ]


def test_long_text_is_written_to_several_files_and_read_in_order(own, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "SHARD_CHARACTERS", 40)
    texts = [f"{i} tokens" for i in range(31)]
    (tmp_path / "a.en").write_text("\n".join(texts))
    builder, _ = builders.own_texts(
        dataclasses.replace(own, kind="plain_text", files={"train": ("a.en",)}), tmp_path / "t"
    )
    preparation.prepare(builder)
    assert len(digests(tmp_path / "t")) == len(builder.info.splits["train"].shard_lengths) > 5
    assert [e["text"] for e in own_examples(builder)] == texts
    assert [e["text"] for e in own_examples(builder, "train[7:19]")] == texts[7:19]


def test_a_file_that_changes_between_check_and_write_is_refused_without_a_trace(
    own, tmp_path, monkeypatch
):
    builder, _ = builders.own_texts(own, tmp_path / "tfds")
    check = text_files.check

    def check_then_change(*arguments):
        found = check(*arguments)
        (tmp_path / "a.de").write_text("zwei\nEins\n")
        return found

    monkeypatch.setattr(text_files, "check", check_then_change)
    with pytest.raises(ValueError, match="parallel_text: a file has changed while it was read"):
        preparation.prepare(builder)
    assert not digests(tmp_path / "tfds") and not list((tmp_path / "tfds").rglob("incomplete*"))


@pytest.mark.slow  # the same for `cldr_translate` is in the plain suite
def test_two_processes_prepare_custom_text_once_also_after_a_killed_process(own, tmp_path):
    dying = """
def die(self, split):
    yield 0, b""
    os.kill(os.getpid(), signal.SIGKILL)
builders.TextFiles.records = die
preparation.prepare(builder)
"""
    run = start(OWN + dying, tmp_path / "tfds")
    assert run.wait(timeout=30) == -signal.SIGKILL
    run.communicate()
    assert len(list(tmp_path.rglob("incomplete.*"))) == 1
    program = """
generate = preparation.generate
preparation.generate = lambda builder: (print("generates"), generate(builder))
print("starts", flush=True)
preparation.prepare(builder)
print(builder.info.splits["train"].num_examples)
"""
    builder, _ = builders.own_texts(
        dataclasses.replace(own, files={"train": own.files["train"]}), tmp_path / "tfds"
    )
    with preparation.dataset_lock(builder):
        runs = [start(OWN + program, tmp_path / "tfds") for _ in range(2)]
        assert [run.stdout.readline() for run in runs] == ["starts\n"] * 2
    outputs = [run.communicate(timeout=30) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sorted(output.split() for output, _ in outputs) == [["2"], ["generates", "2"]]
    assert not list(tmp_path.rglob("incomplete.*"))
