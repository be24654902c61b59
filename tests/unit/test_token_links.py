"""Links of words become links of tokens, in files, in stored ids and in batches."""

import dataclasses
import random

import numpy as np
import pytest

from flaxformer_lite.data.batches.batching import BatchPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens, fingerprint
from flaxformer_lite.data.sources import own_text
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.tokens import token_links
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.symbol_tokenizer import ByteTokenizer, counted
from flaxformer_lite.data.tokens.token_links import FACTOR
from flaxformer_lite.scores.word_links import fault_of
from flaxformer_lite.system.errors import InputError


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer(counted([], kind="byte"))


def test_each_token_of_a_target_word_is_linked_to_all_tokens_of_the_source_words(tokenizer):
    """Bytes are tokens, and a space belongs to the word after it."""
    rng = random.Random(2)
    for _ in range(29):
        words = [["x" * rng.randint(1, 4) for _ in range(rng.randint(1, 5))] for _ in range(2)]
        source, target = (" ".join(side) for side in words)
        of_byte = [
            [n for n, word in enumerate(side) for _ in range(len(word) + (n > 0))] for side in words
        ]
        cells = [(i, j) for i in range(len(words[0])) for j in range(len(words[1]))]
        links = rng.sample(cells, rng.randint(0, len(cells)))
        line = " ".join(f"{i}-{j}" for i, j in links)
        expected = [
            FACTOR * t + s
            for t, j in enumerate(of_byte[1])
            for s, i in enumerate(of_byte[0])
            if (i, j) in links
        ]
        found = token_links.token_links(tokenizer, source, target, line)
        assert found.tolist() == expected and found.dtype == np.uint32


def test_a_line_is_checked_against_the_words_of_both_texts():
    assert fault_of("a b", "c", "1-0 0-0") is None and fault_of("a b", "c", "") is None
    assert fault_of("a b", "c", "2-0") == "link 2-0 of 2 source words and 1 target words, from 0"
    assert "0-1" in fault_of("a b", "c", "0-1")
    assert "'x'" in fault_of("a b", "c", "x") and "possible" in fault_of("a b", "c", "0p0")


def test_a_wrong_link_of_a_dataset_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"^config\.data: .* link 1-0 of 1 source words"):
        token_links.token_links(tokenizer, "a", "b", "1-0")


def test_batches_have_the_links_of_their_rows():
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 11, (37, 2))
    sides = [[rng.integers(4, 19, n) for n in column] for column in lengths.T]
    linked = [rng.random((t, s)) < 0.3 for s, t in lengths]
    rows = [FACTOR * t + s for t, s in map(np.nonzero, linked)]
    links = Ragged.of(rows)
    tokens = Tokens(*map(Ragged.of, sides), alignment=links)
    plan = BatchPlan(*lengths.T, buckets=(7, 11), tokens_per_batch=66, rows_multiple=2)
    seen = 0
    for part in ((0, 2), (1, 2)):
        batches = Batches(tokens, plan, num_steps=plan.steps_per_epoch, part=part)
        for number in range(plan.steps_per_epoch):
            batch, (_, examples) = batches[number], plan.batch(number)
            count, length = batch["source"].shape
            assert batch["alignment"].shape == (count, length, length)
            for row, linked_TS in zip(batch["row"], batch["alignment"], strict=True):
                for example in examples[row]:
                    expected = np.zeros((length, length), bool)
                    t, s = linked[example].shape
                    expected[:t, :s] = linked[example]
                    np.testing.assert_array_equal(linked_TS, expected)
                    seen += 1
                if not len(examples[row]):
                    assert not linked_TS.any()
    assert seen == 37
    others = Tokens(tokens.source, tokens.target, alignment=Ragged.of([*rows[1:], rows[0]]))
    prints = {fingerprint(each, plan) for each in (tokens, others, Tokens(*map(Ragged.of, sides)))}
    assert len(prints) == 3  # a resumed run with other links is refused


@pytest.fixture
def own(tmp_path):
    """Returns the files of two pairs of training files with alignments, and of one without."""
    for name, lines in {
        "train1.en": "a b\nc",
        "train1.de": "d\ne f",
        "train1.align": "0-0 1-0\n",
        "train2.en": "g",
        "train2.de": "h",
        "train2.align": "0-0",
        "dev.en": "i",
        "dev.de": "j",
    }.items():
        (tmp_path / name).write_text(f"{lines}\n")
    return OwnText(
        kind="parallel_text",
        files={
            "train": (f"{tmp_path}/train*.en", f"{tmp_path}/train*.de"),
            "validation": (f"{tmp_path}/dev.en", f"{tmp_path}/dev.de"),
        },
        names=(),
        labels=None,
        longest_line=100,
        faults="refuse",
        alignments={"train": (f"{tmp_path}/train*.align",)},
    )


def test_alignments_are_read_beside_the_files(own):
    found = own_text.corpora(own)
    assert found["train"].fields == ("en", "de", "alignment")
    assert found["validation"].fields == ("en", "de")
    texts = [example.texts for example in found["train"]]
    assert texts == [("a b", "d", "0-0 1-0"), ("c", "e f", ""), ("g", "h", "0-0")]


def test_a_wrong_link_makes_its_line_malformed(own, tmp_path):
    (tmp_path / "train1.align").write_text("0-0\n0-2\n")
    found = [fault for example in own_text.corpora(own)["train"] for fault in example.faults]
    ((sort, where, what),) = found
    assert (sort, where) == ("alignment", f"{tmp_path}/train1.align:2")
    assert what == "link 0-2 of 1 source words and 2 target words, from 0"


def test_a_missing_file_of_alignments_is_named_by_its_own_field(own):
    own = dataclasses.replace(own, alignments={"train": ("nowhere",)})
    with pytest.raises(InputError, match=r"^config\.data\.train_alignments: there is no file"):
        own_text.corpora(own)


def test_a_file_of_alignments_with_other_lines_is_refused(own, tmp_path):
    (tmp_path / "train2.align").write_text("0-0\n\n")
    with pytest.raises(InputError, match=r"train2\.align has 2 lines"):
        list(own_text.corpora(own)["train"])
