"""The stored ids are those of the tokenizer, are found at the next start, and never incomplete."""

import dataclasses
import functools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from flaxformer_lite.data.cldr import phrase_families
from flaxformer_lite.data.sources import builders
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import store, tokenizer
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS

TEXTS = [
    f"{word} {number}" for number in range(23) for word in ("one", "größer", "seven of them", "")
]


@dataclasses.dataclass
class Texts:
    """A reader of texts in memory that counts the examples it has read."""

    folder: object
    source: list = dataclasses.field(default_factory=lambda: TEXTS)
    target: list = dataclasses.field(default_factory=lambda: TEXTS[4:] + TEXTS[:4])
    columns: dict = dataclasses.field(
        default_factory=lambda: {"source": ("", "en"), "target": ("", "de")}
    )
    files: tuple = (("train", 0, 92, 7919, 1),)
    name: str = "texts/en-de"
    split: str = "train"
    part: None = None  # its examples are no pieces of whole files
    read: int = 0

    def __len__(self):
        return len(self.source)

    def __call__(self, numbers):
        self.read += len(numbers)
        label = np.array([i % 5 for i in numbers], np.int32) if "label" in self.columns else None
        return Examples([self.source[i] for i in numbers], [self.target[i] for i in numbers], label)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    tokenizer.train(TEXTS, path, vocab_size=285, kind="unigram")
    return Tokenizer(path)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def as_lists(columns):
    return {name: [row.tolist() for row in rows] for name, rows in columns.items()}


def expected(tokens, reader=None):
    reader = reader or Texts(None)
    return {
        name: [ids.tolist() for ids in tokens.encode(getattr(reader, name))]
        for name in ("source", "target")
    }


def stored_in(folder):
    return sorted(path.name for path in (folder / "tokens").iterdir() if path.name != ".lock")


def test_the_second_start_reads_no_text_and_finds_the_ids_of_the_first(tokens, folder, monkeypatch):
    first, second = Texts(folder), Texts(folder)
    made = store.tokenised(first, tokens)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("tokenised again"))
    found = store.tokenised(second, tokens)
    monkeypatch.undo()
    assert (first.read, second.read) == (len(TEXTS), 0)
    assert as_lists(made) == as_lists(found) == expected(tokens)
    assert {rows.values.dtype for rows in found.values()} == {np.dtype(np.uint16)}
    assert all(rows.offsets.dtype == np.int64 for rows in found.values())
    assert len(stored_in(folder)) == 2


def test_texts_are_read_a_few_at_a_time(tokens, folder, monkeypatch):
    requested = []
    monkeypatch.setattr(store, "READ_AT_ONCE", 7)
    read = Texts.__call__
    monkeypatch.setattr(
        Texts,
        "__call__",
        lambda self, numbers: requested.append(len(numbers)) or read(self, numbers),
    )
    assert as_lists(store.tokenised(Texts(folder), tokens)) == expected(tokens)
    assert set(requested) == {7, len(TEXTS) % 7} and sum(requested) == len(TEXTS)


def test_ids_too_large_for_16_bits_have_32(tokens, folder, monkeypatch):
    monkeypatch.setattr(tokens, "vocab_size", 2**16 + 1)
    wide = store.tokenised(Texts(folder), tokens)
    assert {rows.values.dtype for rows in wide.values()} == {np.dtype(np.uint32)}
    assert as_lists(wide) == expected(tokens)


def test_labels_are_stored_and_classified_texts_start_with_their_start_symbol(tokens, folder):
    reader = Texts(folder, columns={"source": ("", "text"), "label": ("", "label")})
    columns = store.tokenised(reader, tokens, start=(BOS,))
    assert columns["label"].values.tolist() == [i % 5 for i in range(len(TEXTS))]
    assert as_lists(columns)["source"] == [[BOS, *ids] for ids in expected(tokens)["source"]]
    assert as_lists(store.tokenised(reader, tokens))["source"] == expected(tokens)["source"]
    assert reader.read == 2 * len(TEXTS)


def test_the_other_direction_finds_the_ids_of_both_languages(tokens, folder):
    store.tokenised(Texts(folder), tokens)
    reverse = Texts(folder, source=Texts(None).target, target=Texts(None).source)
    reverse.columns = {"source": ("", "de"), "target": ("", "en")}
    assert as_lists(store.tokenised(reverse, tokens)) == expected(tokens, reverse)
    assert reverse.read == 0 and len(stored_in(folder)) == 2


OTHERS = {
    "files": dict(files=(("train", 0, 92, 7919, 2),)),
    "part of the files": dict(files=(("train", 1, 92, 7919, 1),)),
    "features": dict(columns={"source": ("", "fr"), "target": ("", "it")}),
    "join": dict(columns={"source": ("\n", "en"), "target": ("\n", "de")}),
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_other_data_is_tokenised_again(tokens, folder, changes):
    store.tokenised(Texts(folder), tokens)
    other = Texts(folder, source=TEXTS[::-1], **changes)
    assert as_lists(store.tokenised(other, tokens)) == expected(tokens, other)
    assert other.read == len(TEXTS) and len(stored_in(folder)) == 4


def test_another_tokenizer_tokenises_again(tokens, folder, tmp_path):
    tokenizer.train(TEXTS, tmp_path / "other", vocab_size=285, kind="bpe")
    other = Tokenizer(tmp_path / "other")
    assert expected(other) != expected(tokens)
    store.tokenised(Texts(folder), tokens)
    assert as_lists(store.tokenised(Texts(folder), other)) == expected(other)
    assert as_lists(store.tokenised(Texts(folder), tokens)) == expected(tokens)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "ids cut short": ("ids", cut),
    "offsets cut short": ("offsets", cut),
    "another offset": ("offsets", flip),
    "index cut short": ("index.json", cut),
    "no ids": ("ids", os.unlink),
    "no index": ("index.json", os.unlink),
    "an index of something else": (
        "index.json",
        lambda file: file.write_text(json.dumps({"rows": 92})),
    ),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES.keys())
def test_incomplete_ids_are_made_again(tokens, folder, name, damage):
    store.tokenised(Texts(folder), tokens)
    damaged = folder / "tokens" / stored_in(folder)[0]
    damage(damaged / name)
    reader = Texts(folder)
    assert as_lists(store.tokenised(reader, tokens)) == expected(tokens)
    assert reader.read == len(TEXTS)
    assert as_lists(store.tokenised(Texts(folder), tokens)) == expected(tokens)
    assert len(stored_in(folder)) == 2 and sorted(path.name for path in damaged.iterdir()) == [
        "ids",
        "index.json",
        "offsets",
    ]


KILLED = """
import os, pickle, signal, sys
from flaxformer_lite.data.tokens import store

reader, tokens = pickle.load(open(sys.argv[1], "rb"))
store.READ_AT_ONCE = 10

class Deadly(type(reader)):
    def __call__(self, numbers):
        if self.read >= 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(numbers)

reader.__class__ = Deadly
store.tokenised(reader, tokens)
"""


def test_the_partial_ids_of_a_killed_writer_are_not_used_and_the_next_one_removes_them(
    tokens, folder, tmp_path
):
    (tmp_path / "job").write_bytes(pickle.dumps((Texts(folder), tokens)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "job")], env=environment)
    assert died.returncode == -signal.SIGKILL
    (left,) = stored_in(folder)
    assert left.startswith(".partial-")
    reader = Texts(folder)
    assert as_lists(store.tokenised(reader, tokens)) == expected(tokens) and reader.read == len(
        TEXTS
    )
    assert len(stored_in(folder)) == 2 and left not in stored_in(folder)


def test_an_error_while_reading_is_raised_and_leaves_nothing(tokens, folder, monkeypatch):
    monkeypatch.setattr(
        Texts, "__call__", lambda *_: (_ for _ in ()).throw(KeyError("no such text"))
    )
    with pytest.raises(KeyError, match="no such text"):
        store.tokenised(Texts(folder), tokens)
    assert stored_in(folder) == []


def test_one_of_simultaneous_writers_writes_and_the_others_find_its_ids(tokens, folder):
    readers, found = [Texts(folder) for _ in range(5)], []
    together = threading.Barrier(len(readers))

    def start(reader):
        together.wait()
        found.append(as_lists(store.tokenised(reader, tokens)))

    threads = [threading.Thread(target=start, args=(reader,)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected(tokens)] * 5
    assert sorted(reader.read for reader in readers) == [0] * 4 + [len(TEXTS)]


def test_ids_of_a_dataset_in_an_unwritable_folder_are_stored_in_the_home_folder(
    tokens, folder, home, caplog
):
    (folder / "tokens").write_text("in the way")
    first, second = Texts(folder), Texts(folder)
    with caplog.at_level(logging.WARNING):
        assert as_lists(store.tokenised(first, tokens)) == expected(tokens)
    assert (
        f"{folder / 'tokens'}: the ids of train of texts/en-de are not stored there" in caplog.text
    )
    assert len(list((home / ".cache/flaxformer_lite/tokens").glob("*/ids"))) == 2
    assert as_lists(store.tokenised(second, tokens)) == expected(tokens) and second.read == 0


def test_ids_stay_in_memory_if_no_folder_is_writable(tokens, folder, home, caplog):
    for path in (folder / "tokens", home):
        path.write_text("in the way")
    for _ in range(2):
        reader = Texts(folder)
        with caplog.at_level(logging.WARNING):
            assert as_lists(store.tokenised(reader, tokens)) == expected(tokens)
        assert reader.read == len(TEXTS)
    assert caplog.text.count("are not stored there") == 4


# Several processes with a real dataset.


@pytest.fixture(scope="module")
def phrases(tmp_path_factory):
    """A reader of 520 phrases."""
    folder = tmp_path_factory.mktemp("tfds")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(folder))
        patched.setattr(
            phrase_families, "phrases", functools.partial(phrase_families.phrases, per_kind=56)
        )
        patched.setattr(builders, "HELD_OUT", 20)
        dataset = Dataset("cldr_translate/en-de")
        dataset.prepare()
        return dataset.reader("train")


def whole(phrases, tokens):
    texts = phrases(range(len(phrases)))
    return {
        name: [ids.tolist() for ids in tokens.encode(getattr(texts, name))]
        for name in ("source", "target")
    }


def without_store(phrases, folder):
    return dataclasses.replace(phrases, folder=folder)


def test_processes_write_the_same_ids_as_one_without_jax_and_without_output(
    tokens, phrases, folder, monkeypatch, caplog, capfd
):
    assert len(phrases) > 300
    monkeypatch.setattr(store.Work, "do", None)  # only child processes can do the work
    columns = store.tokenised(without_store(phrases, folder), tokens, processes=2)
    assert as_lists(columns) == whole(phrases, tokens)
    assert capfd.readouterr() == ("", "") and caplog.text == ""
    modules = "flaxformer_lite.data.sources.datasets, flaxformer_lite.data.tokens.store"
    loaded = f"import sys, {modules}; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True) == "False\n"


def test_if_a_child_process_fails_this_one_does_its_work(
    tokens, phrases, folder, monkeypatch, caplog
):
    # Both children write an error at the same time, each in two writes, as Python does with the
    # message of a SystemExit.
    program = (
        "import os, time; os.write(1, b'7\\n'); os.write(2, b'out of memory'); time.sleep(0.5); "
        "os.write(2, b'\\n'); os._exit(1)"
    )
    monkeypatch.setattr(store, "CHILD", program)
    with caplog.at_level(logging.WARNING):
        columns = store.tokenised(without_store(phrases, folder), tokens, processes=2)
    assert as_lists(columns) == whole(phrases, tokens)
    assert (
        "Tokenising in 2 processes failed (out of memory); continuing in this one." in caplog.text
    )
