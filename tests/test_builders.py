"""The TFDS datasets: frozen by their versions, prepared once, by whoever comes first and survives."""

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

from flaxformer_lite.data import builders, cldr, languages

# sha256 of the lines "split kind source target" of en-de in their order, for each version there has been.
DIGESTS = {"1.47.0": "d17fd5351b02a42c701b449f7b7c6c780a593ad1054fe07d41c1a72d0733e87c"}
# The same for cldr_language, lines "split kind text label".
LANGUAGE_DIGESTS = {"1.47.0": "44c40f22da3f64431cf20084c5e3ed5c71d6c8aa173534c775a1709a82bb7b30"}

# For processes of their own: a corpus of 20 held-out and 40 training examples.
SMALL = """
import functools, os, signal, sys
from flaxformer_lite.data import builders, cldr
cldr.phrases = functools.partial(cldr.phrases, per_kind=8)
builders.HELD_OUT = 20
builders.OF_A_LANGUAGE = {"validation": 1, "train": 2}
builder = builders.cldr_translate("en-de", data_dir=sys.argv[1])
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """The full default corpus: split -> list of (kind, source, target)."""
    builder = builders.cldr_translate(data_dir=tmp_path_factory.mktemp("tfds"))
    builders.prepare(builder)
    return {split: read(builder, split) for split in ("train", "validation", "test")}


@pytest.fixture(scope="session")
def language_corpus(tmp_path_factory):
    """The full corpus of cldr_language: split -> list of (kind, text, label)."""
    builder = builders.cldr_language(data_dir=tmp_path_factory.mktemp("tfds"))
    builders.prepare(builder)
    return {split: read_language(builder, split) for split in ("train", "validation", "test")}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cldr, "phrases", functools.partial(cldr.phrases, per_kind=8))
    monkeypatch.setattr(builders, "HELD_OUT", 20)


def examples_of(builder, split):
    source = builder.as_data_source(split=split)
    return source.__getitems__(list(range(len(source))))


def read(builder, split):
    keys = ("kind", *builders.locales_of(builder.builder_config.name))
    return [tuple(example[key].decode() for key in keys) for example in examples_of(builder, split)]


def read_language(builder, split):
    names = builder.info.features["label"].names
    return [
        (example["kind"].decode(), example["text"].decode(), names[example["label"]])
        for example in examples_of(builder, split)
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
    """The digest of every file that holds examples, by its path."""
    files = sorted(Path(folder).rglob("*array_record*"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_the_sizes_are_those_that_were_promised(corpus):
    assert {split: len(examples) for split, examples in corpus.items()} == {
        "train": 100_000,
        "validation": 2_000,
        "test": 2_000,
    }


def test_no_source_phrase_is_in_two_splits_nor_twice_in_one(corpus):
    sources = [source for examples in corpus.values() for _, source, _ in examples]
    assert len(set(sources)) == len(sources)


def test_every_kind_is_in_every_split_in_equal_parts(corpus):
    for examples in corpus.values():
        counts = Counter(kind for kind, _, _ in examples)
        assert counts == dict.fromkeys(cldr.KINDS, len(examples) // len(cldr.KINDS))
        assert min(counts.values()) >= 150


def assert_frozen(corpus, version, digests):
    if version not in digests:
        pytest.skip(f"no digest is recorded for {version}, which holds another version of the CLDR")
    lines = "\n".join("\t".join((split, *example)) for split, examples in corpus.items() for example in examples)
    assert hashlib.sha256(lines.encode()).hexdigest() == digests[version], (
        f"The phrases of version {version} have changed, so scores on it are no longer comparable. If the change is "
        "meant, raise CORPUS where VERSION is, and record the digest of the new version beside the old one; never "
        "replace one. If nothing here has changed, Babel renders this CLDR in another way than it did."
    )


def test_the_corpus_is_the_one_that_its_version_names(corpus):
    assert_frozen(corpus, cldr.VERSION, DIGESTS)


def test_the_corpus_of_languages_is_the_one_that_its_version_names(language_corpus):
    assert_frozen(language_corpus, languages.VERSION, LANGUAGE_DIGESTS)


def test_the_corpus_of_languages_has_the_sizes_that_were_promised_and_all_labels_and_kinds_alike(language_corpus):
    sizes = {"train": 47_000, "validation": 2_000, "test": 2_000}
    assert {split: len(examples) for split, examples in language_corpus.items()} == sizes
    for examples in language_corpus.values():
        each = len(examples) // (len(languages.LOCALES) * len(languages.KINDS))
        counts = Counter((kind, label) for kind, _, label in examples)
        assert counts == {(kind, label): each for kind in languages.KINDS for label in languages.LOCALES}


def test_no_text_has_two_languages_or_is_in_two_splits_or_comes_twice(language_corpus):
    texts = [text for examples in language_corpus.values() for _, text, _ in examples]
    assert len(set(texts)) == len(texts)


def test_the_dataset_of_languages_is_known_to_tfds_and_its_labels_are_the_locales(tmp_path):
    builder = builders.tfds.builder("cldr_language", data_dir=tmp_path)
    assert builder.info.features["label"].names == languages.LOCALES
    assert builder.info.supervised_keys == ("text", "label")
    assert builders.cldr_language(data_dir=tmp_path).info.full_name == f"cldr_language/{languages.VERSION}"


def test_the_phrases_of_a_split_are_those_of_the_generator_in_its_order(small, tmp_path):
    builder = builders.cldr_translate("sv-fi", data_dir=tmp_path)
    builders.prepare(builder)
    phrases = [tuple(phrase) for phrase in cldr.phrases("sv", "fi")]
    assert read(builder, "validation") + read(builder, "test") + read(builder, "train") == phrases
    assert len(phrases) == 80


def test_the_same_version_has_the_same_bytes_whatever_the_host(tmp_path):
    hosts = ({"PYTHONHASHSEED": "0", "TZ": "UTC"}, {"PYTHONHASHSEED": "97", "TZ": "Asia/Kathmandu", "LC_ALL": "C"})
    program = "builders.prepare(builder)\nbuilders.prepare(builders.cldr_language(data_dir=sys.argv[1]))"
    runs = [start(program, tmp_path / str(n), **host) for n, host in enumerate(hosts)]
    assert [run.communicate() for run in runs] == [("", "")] * 2  # and TFDS says nothing
    first, second = (digests(tmp_path / str(n)) for n in range(2))
    assert len(first) == 3 + 2
    assert first == second


def test_two_processes_that_start_at_once_prepare_the_dataset_once(tmp_path):
    program = """
generate = builders._generate
builders._generate = lambda builder: (print("generates"), generate(builder))
print("starts", flush=True)
builders.prepare(builder)
print(builder.info.splits["train"].num_examples)
"""
    with builders._locked(builders.cldr_translate("en-de", data_dir=tmp_path)):  # so that both find nothing there
        runs = [start(program, tmp_path) for _ in range(2)]
        assert [run.stdout.readline() for run in runs] == ["starts\n"] * 2
        time.sleep(0.3)
        assert not digests(tmp_path)
    outputs = [run.communicate(timeout=30) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert sorted(output.split() for output, _ in outputs) == [["40"], ["generates", "40"]]


def test_a_killed_preparation_does_not_disturb_the_next_one(small, tmp_path):
    program = """
def die(self, phrases):
    yield 0, {"en": "one", "de": "eins", "kind": "number"}
    os.kill(os.getpid(), signal.SIGKILL)
builders.CldrTranslate._generate_examples = die
builders.prepare(builder)
"""
    run = start(program, tmp_path)
    assert run.wait(timeout=30) == -signal.SIGKILL
    run.communicate()
    assert len(list(tmp_path.rglob("incomplete.*"))) == 1
    builder = builders.cldr_translate("en-de", data_dir=tmp_path)
    builders.prepare(builder)
    assert len(read(builder, "train")) == 40
    assert not list(tmp_path.rglob("incomplete.*"))


def test_a_folder_that_is_no_dataset_is_named_and_left_as_it_is(small, tmp_path):
    builder = builders.cldr_translate("en-de", data_dir=tmp_path)
    mine = Path(builder.data_dir) / "mine"
    mine.mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"Expected a dataset in {builder.data_dir}.*dataset_info"):
        builders.prepare(builder)
    assert mine.exists()


def test_a_prepared_dataset_is_read_without_a_lock_or_a_write(small, tmp_path):
    early, late = (builders.cldr_translate("en-de", data_dir=tmp_path) for _ in range(2))
    builders.prepare(early)
    (lock,) = tmp_path.glob(".*.lock")
    assert lock.name == f".cldr_translate.en-de.{cldr.VERSION}.lock"
    lock.unlink()
    builders.prepare(late)  # it was made before the data was there
    assert late.info.splits["train"].num_examples == 40
    assert not list(tmp_path.glob(".*.lock"))


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set(tmp_path):
    (tmp_path / "file").write_text("in the way")
    builder = builders.cldr_translate("en-de", data_dir=tmp_path / "file")
    with pytest.raises(ValueError, match=r"Cannot write .*/file .*TFDS_DATA_DIR"):
        builders.prepare(builder)


def test_a_full_disk_is_reported_with_its_folder(tmp_path, monkeypatch):
    def no_space(builder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(builders, "_generate", no_space)
    with pytest.raises(ValueError, match=rf"en-de/{cldr.VERSION} to {tmp_path} \(No space left on device\)"):
        builders.prepare(builders.cldr_translate("en-de", data_dir=tmp_path))


@pytest.mark.parametrize("pair", ["en", "en-de-fr", "pt-BR-zh", "", "en_de"])
def test_a_malformed_pair_is_refused_with_the_form_that_is_expected(pair):
    with pytest.raises(ValueError, match=f"<source>-<target>.*got '{pair}'"):
        builders.cldr_translate(pair)


@pytest.mark.parametrize(("pair", "message"), [("en-de_AAT", "nearest is 'de_AT'"), ("de-de", "two different locales")])
def test_a_pair_that_is_not_two_locales_is_refused_before_anything_is_written(pair, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        builders.cldr_translate(pair, data_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_default_pair_is_english_to_german_and_known_to_tfds(tmp_path):
    builder = builders.tfds.builder("cldr_translate", data_dir=tmp_path)
    assert builder.builder_config.name == "en-de"
    assert builders.cldr_translate(data_dir=tmp_path).info.full_name == builder.info.full_name
    assert builder.info.supervised_keys == ("en", "de")
