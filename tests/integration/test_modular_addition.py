"""The dataset of modular addition: every pair once, mirrored pairs together, one symbol each."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from flaxformer_lite import config_files
from flaxformer_lite.config import resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import modular_addition, preparation
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.system.errors import InputError

MODULUS = 13


def read(dataset, split):
    examples = dataset.read(split)
    return list(zip(examples.source, examples.label, strict=True))


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "data_root", lambda: tmp_path)
    monkeypatch.setattr(modular_addition, "data_root", lambda: tmp_path)
    dataset = Dataset(f"modular_addition/{MODULUS}", architecture="encoder_classifier")
    dataset.prepare()
    return dataset


def test_every_pair_of_numbers_is_there_once_with_its_sum_modulo_the_number(dataset):
    symbols = [modular_addition.symbol(number) for number in range(MODULUS)]
    expected = {
        f"{symbols[a]}+{symbols[b]}": (a + b) % MODULUS
        for a in range(MODULUS)
        for b in range(MODULUS)
    }
    examples = read(dataset, "pairs")
    assert len(examples) == len(expected) == MODULUS**2
    assert dict(examples) == expected
    assert dataset.label_names == [str(number) for number in range(MODULUS)]


def test_a_slice_has_every_label_and_shares_at_most_one_sum_with_the_rest(dataset):
    train, validation = read(dataset, "pairs[:40%]"), read(dataset, "pairs[40%:]")
    assert {label for _, label in train} == set(range(MODULUS))
    unordered = [{frozenset(text) for text, _ in part} for part in (train, validation)]
    assert len(set.intersection(*unordered)) <= 1
    assert [text for text, _ in train] != sorted(text for text, _ in train)


def test_each_number_is_one_piece_of_the_smallest_vocabulary(dataset, tmp_path):
    texts = [text for text, _ in read(dataset, "pairs")]
    tokenizer.train(texts, tmp_path / "model", vocab_size=MODULUS + 2 + 260, kind="bpe")
    pieces = tokenizer.load(tmp_path / "model")
    assert {len(ids) for ids in pieces.encode(texts)} == {4}  # start, number, plus, number
    assert len(np.unique(np.concatenate(pieces.encode(texts)))) == MODULUS + 2


def test_the_grokking_config_reads_every_sum_in_batches_of_512_rows_of_6_tokens(tmp_path):
    config = resolve(config_files.load_config(config_files.find_config("grokking")))
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    data = pipeline.load(config, dataset, tmp_path / "tokenizer.model")
    splits = (data.train, data.validation)
    assert [split.plan.too_long + split.plan.empty for split in splits] == [0, 0]
    assert sum(len(split.tokens) for split in splits) == 97**2
    assert data.train.plan.shapes() == [(512, 6)]
    assert data.tokenizer.vocab_size == config.data.vocab_size


def test_the_dataset_is_registered_and_its_bytes_do_not_vary(tmp_path):
    contents = []
    for folder in ("first", "second"):
        builder = tfds.builder("modular_addition", data_dir=tmp_path / folder)
        builder = modular_addition.builder(builder.builder_config.name, tmp_path / folder)
        preparation.prepare(builder)
        assert builder.info.full_name == "modular_addition/97/1.0.0"
        contents.append([path.read_bytes() for path in sorted(builder.data_path.glob("*array*"))])
    assert contents[0] == contents[1] and len(contents[0]) == 1


@pytest.mark.parametrize("name", ["1", "1001", "097", "x", "-3"])
def test_a_modulus_that_cannot_be_is_refused_with_the_bounds(name):
    with pytest.raises(InputError, match=rf"2 to 1,000, such as .*; got '{name}'"):
        Dataset(f"modular_addition/{name}", architecture="encoder_classifier")
