"""Whole files as texts: every character is kept, slices count characters, ids are those of a text.

The text of these tests has blank lines, spaces at the ends of lines, tabs, CRLF and non-ASCII
characters.
"""

import numpy as np
import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import own_text, whole_texts
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import EOS, PAD
from flaxformer_lite.system.errors import InputError

SCENE = "KING:\nWhat say you,  my lord?\n\n\tExit, größer\r\n  Enter 3 of them. \u2028Seven ▁ men\n"
TEXT = "\n" + SCENE * 29 + "no line end"
OTHER = "Another text,\nof two lines.\n" * 31


def config_of(folder, **data):
    config = default_config()
    config.model.update(architecture="decoder_lm", max_length=67)
    config.data.update(dataset="plain_text", whole_files=True, windows=67, tokens_per_batch=670)
    config.data.update(train_files=(f"{folder}/*.txt",), vocab_size=350, vocab_limit="soft")
    config.data.update({"train_split": "train[:90%]", "rows_multiple": 5} | data)
    for role in ("validation", "test"):
        config.data[f"{role}_split"] = data.get(f"{role}_split", "train[90%:]")
    return resolve(config)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """A tokenizer of each kind."""
    made = {}
    for kind in ("bpe", "unigram"):
        path = tmp_path_factory.mktemp(kind) / "tokenizer.model"
        lines = (TEXT + OTHER).splitlines(keepends=True)
        tokenizer.train(lines, path, vocab_size=350, kind=kind, vocab_limit="soft")
        made[kind] = Tokenizer(path)
    return made


@pytest.fixture
def tokens(tokenizers):
    return tokenizers["bpe"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def write(folder, **files):
    for name, text in files.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.txt").write_bytes(content)
    return folder


def opened(config):
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    return dataset


def text_of(dataset, split):
    return "".join(dataset.read(split).target)


@pytest.mark.parametrize("content", [
    TEXT, "one", " \n\na", "a\r\n", "a\n" * 7, "ñ" * 100_003, "x" * whole_texts.LONGEST + "\n",
    OTHER * 29,
])  # fmt: skip
def test_the_pieces_of_a_file_are_its_text_and_end_at_its_line_ends(tmp_path, content):
    write(tmp_path, a=content)
    pieces = list(whole_texts.pieces(str(tmp_path / "a.txt")))
    assert "".join(pieces) == content and all(pieces)
    of_lines = [piece for piece in pieces[:-1] if piece.endswith("\n")]
    assert all(0 <= len(piece) - whole_texts.PIECE < 100 for piece in of_lines)
    of_parts = [piece for piece in pieces[:-1] if not piece.endswith("\n")]
    assert all(len(piece.encode()) > whole_texts.LONGEST - 4 for piece in of_parts)
    assert len(pieces) == {OTHER * 29: 7, "ñ" * 100_003: 4}.get(content, len(pieces))


def test_byte_order_marks_at_the_starts_of_lines_are_removed(tmp_path):
    write(tmp_path, a="\ufeffone\n\ufefftwo \ufeff\n")
    assert "".join(whole_texts.pieces(str(tmp_path / "a.txt"))) == "one\ntwo \ufeff\n"


@pytest.mark.parametrize(("content", "message"), [
    (b"one\ntwo \xe9\n", r"a\.txt:2: expected UTF-8, got the byte 0xe9"),
    (b"one\ntwo \xc3", r"a\.txt:2: expected UTF-8, got the byte 0xc3"),
    (b"one\ntw\0o\n", r"a\.txt:2: expected text, got the control character U\+0000 at charac"),
    ("one".encode("utf-16"), r"a\.txt: expected UTF-8, got UTF-16; convert it with iconv"),
    (b"\n \n", r"a\.txt: expected a text, got an empty file; leave it out"),
    (b"\x1f\x8b\x08\0\0\0\0\0\0\3one", r"a\.txt, in line 1: cannot be read"),
])  # fmt: skip
def test_a_file_that_is_no_text_is_refused(tmp_path, content, message):
    write(tmp_path, a=content)
    with pytest.raises(InputError, match=message):
        list(whole_texts.pieces(str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    "bounds",
    ["", "[:90%]", "[90%:]", "[-10%:]", "[:-10%]", "[33%:67%]", "[:1]", "[5:6]", "[-3:]", "[7:-9]"],
)
def test_a_slice_counts_the_characters_of_all_files_joined(tmp_path, tokens, bounds):
    dataset = opened(config_of(write(tmp_path, a=TEXT, b=OTHER)))
    total = len(TEXT + OTHER)
    first, stop = (
        (int(bound[:-1]) * total // 100 if bound.endswith("%") else int(bound)) if bound else None
        for bound in (bounds.strip("[]") or ":").split(":")
    )
    expected = (TEXT + OTHER)[first:stop]
    assert text_of(dataset, f"train{bounds}") == expected
    split = pipeline.read_split(dataset, f"train{bounds}", tokens, config_of(tmp_path))
    assert split.text_characters == len(expected)
    assert split.text_bytes == len(expected.encode())


def test_the_slices_of_nano_gpt_are_the_first_90_percent_and_the_rest(tmp_path):
    """data[:int(n * 0.9)] and data[int(n * 0.9):], for any number of characters."""
    for size in (1003, 1009, 1115):
        folder = tmp_path / str(size)
        folder.mkdir()
        dataset = opened(config_of(write(folder, a=TEXT[:size])))
        assert len(TEXT) > size
        assert text_of(dataset, "train[:90%]") == TEXT[: int(size * 0.9)]
        assert text_of(dataset, "train[90%:]") == TEXT[int(size * 0.9) : size]
        assert dataset.shared("train[:90%]", "train[90%:]") == 0
        assert dataset.shared("train[:500]", "train[400:600]") == 100


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("train[5:5]", "'train[5:5]' is not a part of the 9 characters"),
        ("train[:10]", "'train[:10]' is not a part of the 9 characters"),
        ("train[-10:]", "'train[-10:]' is not a part of the 9 characters"),
        ("train[:1%]", "'train[:1%]' is not a part of the 9 characters"),
        ("train+train", "'train+train' is no slice of whole files; use one split"),
        ("other", "plain_text has no split 'other'; it has train"),
    ],
)
def test_a_slice_without_characters_is_refused(tmp_path, split, message):
    dataset = opened(config_of(write(tmp_path, a="some text")))
    with pytest.raises(InputError) as caught:
        dataset.reader(split)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_ids_of_a_file_are_those_of_its_text_encoded_at_once(tmp_path, tokenizers, kind):
    tokens, config = tokenizers[kind], config_of(write(tmp_path, a=TEXT, b=OTHER))
    split = pipeline.read_split(opened(config), "train", tokens, config)
    whole = tokens.encode([TEXT, OTHER], side="target")
    assert [ids.tolist() for ids in split.tokens.target] == [ids.tolist() for ids in whole]
    by_line = tokens.encode(TEXT.splitlines(keepends=True), side="target")
    assert np.concatenate(by_line).tolist() != whole[0].tolist()  # a space before each line
    assert tokens.decode(list(split.tokens.target)) == [TEXT, OTHER]


def test_a_slice_from_within_a_file_starts_without_a_space_of_the_tokenizer(tmp_path, tokens):
    config = config_of(write(tmp_path, a=TEXT, b=OTHER))
    dataset, start = opened(config), len(TEXT) - 11
    split = pipeline.read_split(dataset, f"train[{start}:]", tokens, config)
    first, second = split.tokens.target
    assert second.tolist() == tokens.encode([OTHER], side="target")[0].tolist()
    assert "".join(tokens.pieces(first)) == "no line end"


def test_the_windows_of_files_have_one_end_symbol_between_two_files(tmp_path, tokens):
    config = config_of(write(tmp_path, a=TEXT, b=OTHER))
    split = pipeline.read_split(opened(config), "train", tokens, config)
    labels = np.concatenate([batch["target"].ravel() for batch in _all(split.batches())])
    one, other = tokens.encode([TEXT, OTHER], side="target")
    assert labels[labels != PAD].tolist() == [*one, EOS, *other]


def test_without_windows_a_file_is_an_example(tmp_path, tokens):
    short = [f"File {number},\nin 2 lines.\n" for number in range(7)]
    folder = write(tmp_path, **{f"f{number}": text for number, text in enumerate(short)})
    config = config_of(folder, windows=None, buckets=(67,), tokens_per_batch=670)
    split = pipeline.stored_split(opened(config), "train", tokens, config)
    (batch,) = _all(split.batches())
    rows = sorted(tokens.decode(list(batch["target"])))
    assert rows == sorted([*short, "", "", ""])
    assert split.text_characters == sum(map(len, short))


def _all(batches):
    return [batches[step] for step in range(len(batches))]


def test_the_stored_ids_of_two_slices_are_kept_apart(tmp_path, tokens):
    config = config_of(write(tmp_path, a=TEXT))
    dataset = opened(config)
    sizes = [
        [len(pipeline.stored_split(dataset, name, tokens, config).tokens.target.values)]
        for _ in range(2)
        for name in ("train[:5]", "train[:19]")
    ]
    assert sizes[0] == sizes[2] != sizes[1] == sizes[3]


class Crossing:
    """Characters as ids, and a token of a line end and a W; `prefix`: an id in front of a text."""

    vocab_size = 300

    def __init__(self, prefix):
        self.prefix = prefix

    def made_by(self, side):
        return f"crossing {self.prefix}"

    def encode(self, texts, *, side, threads=None):
        rows = [[*self.prefix, *map(ord, text.replace("\nW", "\x01"))] for text in texts]
        return [np.array(row, np.int32) % 250 + 4 for row in rows]


def test_a_token_over_a_line_end_is_left_out_if_the_tokenizer_adds_no_space(tmp_path):
    text = "a" * (whole_texts.PIECE - 1) + "\nWhat?"
    config = config_of(write(tmp_path, a=text))
    split = pipeline.read_split(opened(config), "train", Crossing([]), config)
    assert split.tokens.target[0].tolist() == [ord(letter) % 250 + 4 for letter in text]
    with pytest.raises(InputError, match="expected tokens within lines, got one of a line end"):
        pipeline.read_split(opened(config), "train", Crossing([99]), config)


def test_other_files_of_plain_text_are_read_whole_whatever_their_suffix(tmp_path):
    (tmp_path / "a.csv").write_text("text\n1,2\n")
    config = config_of(tmp_path, train_files=(f"{tmp_path}/a.csv",))
    assert text_of(opened(config), "train") == "text\n1,2\n"
    lines = own_text.corpora(
        own_text.OwnText("plain_text", {"train": (f"{tmp_path}/a.csv",)}, (), None, 99, "refuse")
    )
    assert lines["train"].form == "csv"


def warnings_of(caplog):
    """Returns the warnings of the package; TFDS has its own."""
    return [record.getMessage() for record in caplog.records if record.name == "root"]


def test_loading_makes_the_tokenizer_and_the_two_parts_without_a_warning(tmp_path, caplog):
    config = config_of(write(tmp_path, a=TEXT * 2))
    data = pipeline.load(config, pipeline.open_dataset(config), tmp_path / "tokenizer.model")
    assert not warnings_of(caplog)
    assert len(data.train.tokens) == len(data.validation.tokens) == 1
    total = len(TEXT * 2)
    assert data.train.text_characters == total * 90 // 100
    assert data.validation.text_characters == total - total * 90 // 100
    assert data.train.lengths(0)[1].sum() > 0 == data.train.lengths(0)[0].sum()


def test_the_parts_overlap_with_a_warning_of_the_shared_characters(tmp_path, caplog):
    config = config_of(write(tmp_path, a=TEXT * 2), validation_split="train[80%:]")
    pipeline.load(config, pipeline.open_dataset(config), tmp_path / "tokenizer.model")
    (message,) = warnings_of(caplog)
    total = len(TEXT * 2)
    assert (
        f"has {total * 90 // 100 - total * 80 // 100:,} characters that train[:90%] has too"
        in message
    )
