"""The dataset of ListOps: values of expressions, lengths, distinct texts, bytes and names."""

import ast
import itertools
import re

import numpy as np
import pytest

from flaxformer_lite import config_files
from flaxformer_lite.cli import train_flags
from flaxformer_lite.config import resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import listops, preparation
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.system.errors import InputError

MOST = 61
SMALL = {"train": 97, "validation": 13, "test": 17}


def sampled(count, most=MOST):
    return list(itertools.islice(listops.expressions(most), count))


def by_numpy(text):
    """Returns the value of an expression that Python evaluates, with NumPy's functions."""
    functions = {
        "MIN": lambda *values: np.min(values),
        "MAX": lambda *values: np.max(values),
        "MED": lambda *values: int(np.median(values)),
        "SM": lambda *values: np.sum(values) % 10,
    }
    code = re.sub(r" (?=\])", "", text).replace("]", ")").replace(" ", ",")
    return eval(re.sub(r"\[(\w+),", r"\1(", code), functions)


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "data_root", lambda: tmp_path)
    monkeypatch.setattr(listops, "data_root", lambda: tmp_path)
    monkeypatch.setattr(listops, "SIZES", SMALL)
    dataset = Dataset(f"listops/{MOST}", architecture="encoder_classifier")
    dataset.prepare()
    return dataset


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("[MIN 7 [SM 9 8 6 ] ]", 3),
        ("[MED 3 4 ]", 3),  # 3.5, rounded down
        ("[MED 9 1 6 2 ]", 4),  # between 2 and 6
        ("[MED 9 1 6 ]", 6),
        ("[SM [SM 5 5 ] [MAX 0 0 ] ]", 0),
    ],
)
def test_the_value_of_an_expression_is_that_of_its_operators(text, value):
    assert listops.value_of(text) == by_numpy(text) == value


def test_the_values_of_random_expressions_are_those_of_numpy():
    texts = sampled(211)
    values = [listops.value_of(text) for text in texts]
    assert values == [by_numpy(text) for text in texts]
    assert set(values) == set(range(10))


@pytest.mark.parametrize("text", ["[MAX 1 2", "1 2", "[MAX ]", "[MED ]", "]", "[SUM 1 2 ]", ""])
def test_a_text_that_is_not_one_expression_has_no_value(text):
    with pytest.raises(ValueError):
        listops.value_of(text)


def test_expressions_have_a_quarter_of_the_most_symbols_to_the_most_and_up_to_10_arguments():
    texts = sampled(2003)
    lengths = [len(text.split(" ")) for text in texts]
    # The bounds are reached, and not exceeded.
    assert (min(lengths), max(lengths)) == (MOST // 4, MOST)
    arguments, levels = set(), 0
    for text in texts:
        counts = []
        for symbol in text.split(" "):
            if symbol == listops.END:
                arguments.add(counts.pop())
            if counts and symbol not in listops.OPERATORS:
                counts[-1] += 1
            if symbol in listops.OPERATORS:
                counts.append(0)
            levels = max(levels, len(counts) + 1)
    assert arguments == set(range(2, 11))
    assert levels <= 10
    used = {symbol for text in texts for symbol in text.split(" ")}
    assert used == {*listops.OPERATORS, listops.END, *listops.DIGITS}


def test_no_more_levels_than_10_are_nested_in_long_expressions():
    def levels(text):
        changes = [1 if x[0] == "[" else -1 if x == "]" else 0 for x in text.split(" ")]
        return 1 + max(itertools.accumulate(changes))

    assert max(map(levels, sampled(53, most=997))) == 10


def test_expressions_are_distinct_and_the_same_each_time():
    assert sampled(499) == sampled(499)
    assert len(set(sampled(499))) == 499
    assert sampled(7, most=59) != sampled(7)


def test_the_splits_have_their_sizes_and_share_no_text(dataset):
    parts = {split: dataset.read(split) for split in SMALL}
    assert {split: len(part) for split, part in parts.items()} == SMALL
    texts = [text for part in parts.values() for text in part.source]
    assert texts == sampled(sum(SMALL.values()))
    labels = [label for part in parts.values() for label in part.label]
    assert labels == [by_numpy(text) for text in texts]
    assert dataset.label_names == [str(digit) for digit in range(10)]


def test_the_sizes_are_those_of_long_range_arena():
    assert listops.SIZES == {"train": 96_000, "validation": 2_000, "test": 2_000}


def test_the_bytes_of_the_dataset_do_not_vary(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "SIZES", SMALL)
    contents = []
    for folder in ("first", "second"):
        builder = listops.builder(str(MOST), tmp_path / folder)
        preparation.prepare(builder)
        assert builder.info.full_name == f"listops/{MOST}/1.0.0"
        contents.append([path.read_bytes() for path in sorted(builder.data_path.glob("*array*"))])
    assert contents[0] == contents[1] and len(contents[0]) == len(SMALL)


def test_the_config_reads_every_expression_with_a_vocabulary_of_its_symbols(dataset, tmp_path):
    loaded = config_files.load_config(config_files.find_config("benchmarks/listops"))
    loaded.data.dataset = f"listops/{MOST}"
    config = resolve(loaded)
    data = pipeline.load(config, dataset, tmp_path / "tokenizer.model")
    assert data.train.plan.too_long + data.train.plan.empty == 0
    assert set(data.tokenizer.vocabulary_of("source")[4:]) == {
        *(*listops.OPERATORS, listops.END),
        *listops.DIGITS,
    }


def test_the_longest_expressions_of_the_config_fit_its_batches_and_its_model():
    config = resolve(config_files.load_config(config_files.find_config("benchmarks/listops")))
    most = listops.most_symbols(config.data.dataset.partition("/")[2])
    # With the start and the end symbol.
    assert config.data.buckets[-1] == config.model.max_length == most + 2


def test_the_command_for_one_gpu_is_a_config_of_32_texts_of_2000_symbols():
    file = config_files.find_config("benchmarks/listops")
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    flags = re.findall(r"--config\.\S+(?=\s)", docstring.split("One GPU")[1] + "\n")
    config = train_flags.parse_train(["--config=benchmarks/listops", *flags]).config
    assert len(flags) == 15
    assert config.data.dataset == "listops/2000"
    assert config.data.buckets == (2002,) and config.model.max_length == 2002
    assert config.data.tokens_per_batch == 32 * 2002


@pytest.mark.parametrize("name", ["15", "4001", "0256", "x", "-64"])
def test_a_length_that_cannot_be_is_refused_with_the_bounds(name):
    with pytest.raises(InputError, match=rf"16 to 4,000, such as .*; got '{name}'"):
        Dataset(f"listops/{name}", architecture="encoder_classifier")
