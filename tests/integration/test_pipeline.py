"""From the config to batches: the data of each architecture, and the shapes of its batches."""

from pathlib import Path

import numpy as np
import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.cldr import languages
from flaxformer_lite.data.sources import builders
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.tokens import subwords, tokenizer
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS, EOS, PAD
from flaxformer_lite.system.errors import InputError

TEXTS = [
    f"{word} {number}"
    for number in range(23)
    for word in ("one", "größer", "seven of them", "long " * 9)
]
ARCHITECTURES = ["encoder_decoder", "encoder_classifier", "decoder_lm"]


def make_config(architecture, **data):
    config = default_config()
    config.model.architecture = architecture
    config.data.update(
        dict(vocab_size=286, buckets=(13, 37), tokens_per_batch=222, rows_multiple=2) | data
    )
    return resolve(config)


def make_examples(architecture, texts=TEXTS):
    label = np.arange(len(texts), dtype=np.int32) % 5
    return {
        "encoder_decoder": Examples(source=texts, target=texts[4:] + texts[:4]),
        "encoder_classifier": Examples(source=texts, label=label),
        "decoder_lm": Examples(target=texts),
    }[architecture]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    tokenizer.train(TEXTS, path, vocab_size=286, kind="unigram")
    return Tokenizer(path)


@pytest.mark.parametrize(
    ("architecture", "packing", "names"),
    [
        ("encoder_decoder", False, {"source", "target", "row"}),
        ("encoder_classifier", False, {"source", "label", "row"}),
        ("decoder_lm", False, {"target", "row"}),
        ("decoder_lm", True, {"target", "target_segment", "row"}),
        ("encoder_decoder", True, {"source", "source_segment", "target", "target_segment", "row"}),
    ],
)
def test_batches_have_the_predicted_arrays_shapes_and_types(tokens, architecture, packing, names):
    config = make_config(architecture, packing=packing)
    split = pipeline.make_split(make_examples(architecture), tokens, config)
    batches = split.batches()
    assert len(batches) == split.plan.steps_per_epoch > 2
    for step in range(len(batches)):
        struct = loader.batch_struct(config, *split.plan.shape(step))
        assert set(struct) == names
        assert {name: (x.shape, x.dtype) for name, x in batches[step].items()} == {
            name: (x.shape, x.dtype) for name, x in struct.items()
        }
    assert set(split.plan.shapes()) == set(loader.possible_shapes(config))
    assert len(split.plan.shapes()) == (1 if packing else 2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_are_those_of_the_texts_with_a_start_symbol_only_for_a_classifier(tokens, architecture):
    examples = make_examples(architecture)
    split = pipeline.make_split(examples, tokens, make_config(architecture))
    start = [BOS] if architecture == "encoder_classifier" else []
    for texts, ids in (
        (examples.source, split.tokens.source),
        (examples.target, split.tokens.target),
    ):
        assert (texts is None) == (ids is None)
        for text, row in zip(texts or [], ids or [], strict=True):
            assert row.dtype == np.int32
            assert row.tolist() == [*start, *tokens.encode([text])[0].tolist()]
    assert split.texts is examples
    assert (split.tokens.label is None) == (architecture != "encoder_classifier")


def test_the_start_symbol_of_a_classified_text_counts_in_its_length(tokens):
    ids = len(tokens.encode(["seven of them 7"])[0])
    for architecture, needed in (("decoder_lm", ids + 1), ("encoder_classifier", ids + 2)):
        examples = make_examples(architecture, ["one", "seven of them 7"])
        for bucket, too_long in ((needed, 0), (needed - 1, 1)):
            split = pipeline.make_split(
                examples, tokens, make_config(architecture, buckets=(bucket,))
            )
            assert split.plan.too_long == too_long


def test_a_text_without_a_token_can_be_classified(tokens):
    split = pipeline.make_split(
        make_examples("encoder_classifier", ["", "one"]), tokens, make_config(ARCHITECTURES[1])
    )
    assert split.plan.usable.tolist() == [0, 1]


@pytest.mark.parametrize("packing", [False, True])
def test_text_bytes_count_only_the_usable_targets(tokens, packing):
    texts = ["größer", "", "long " * 99, "one"]
    split = pipeline.make_split(
        Examples(target=texts), tokens, make_config("decoder_lm", packing=packing)
    )
    assert (split.plan.empty, split.plan.too_long) == (1, 1)
    assert split.text_bytes == 8 + 3


@pytest.fixture
def small_language(monkeypatch, tmp_path):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    monkeypatch.setattr(builders, "OF_A_LANGUAGE", {"validation": 1, "test": 1, "train": 3})
    return tmp_path


def test_the_data_of_a_classifier_comes_from_the_config_alone(small_language):
    config = make_config(
        "encoder_classifier", dataset="cldr_language", vocab_size=1500, tokenizer="bpe"
    )
    data = pipeline.load(config, pipeline.open_dataset(config), small_language / "tokenizer.model")
    assert data.label_names == languages.LOCALES
    assert (len(data.train.tokens), len(data.validation.tokens)) == (375, 125)
    assert data.train.texts is data.validation.texts is None
    assert data.tokenizer.vocab_size == 1500
    assert np.bincount(data.train.tokens.label).tolist() == [15] * 25
    kinds = pipeline.read_split(
        pipeline.open_dataset(config), "validation", data.tokenizer, config
    ).texts.kind
    assert set(kinds) == set(languages.KINDS)


def test_a_tokenizer_of_an_earlier_start_is_refused_if_the_text_gives_another_now(small_language):
    config = make_config(
        "encoder_classifier", dataset="cldr_language", vocab_size=1500, tokenizer="bpe"
    )
    dataset, path = pipeline.open_dataset(config), small_language / "tokenizer.model"
    given, other = pipeline.load(config, dataset, path).tokenizer, small_language / "other.model"
    assert (
        pipeline.load(config, dataset, path, verify=True).tokenizer.fingerprint == given.fingerprint
    )
    tokenizer.train(dataset.read("test").texts(), other, vocab_size=1500, kind="bpe")
    content = other.read_bytes()
    with pytest.raises(
        ValueError,
        match=r"other\.model: differs from the tokenizer that the text of 'train' gives now, "
        ".* or delete it",
    ):
        pipeline.load(config, dataset, other, verify=True)
    assert other.read_bytes() == content
    assert pipeline.load(config, dataset, other).tokenizer.fingerprint != given.fingerprint


def test_the_config_selects_the_texts_and_the_first_language():
    lm = pipeline.open_dataset(make_config("decoder_lm", source_language="de"))
    assert lm.text_names == ("de", "en")
    lm = pipeline.open_dataset(make_config("decoder_lm", text_features="de"))
    assert lm.text_names == ("de",)
    translation = pipeline.open_dataset(make_config("encoder_decoder", source_language="de"))
    assert translation.languages == ("de", "en")


def test_a_test_split_without_labels_is_refused_before_the_training(small_language, monkeypatch):
    config = make_config("encoder_classifier", dataset="cldr_language", vocab_size=1500)
    dataset = pipeline.open_dataset(config)

    def check(split):
        if split == "test":
            raise ValueError("config.data: split 'test' has no labels")

    monkeypatch.setattr(dataset, "check_split", check)
    with pytest.raises(ValueError, match="has no labels"):
        pipeline.load(config, dataset, small_language / "tokenizer.model")
    assert not (small_language / "tokenizer.model").exists()


class Numbered:
    """A reader of numbered texts that records the requested numbers."""

    part = None  # of whole files

    def __init__(self, number, *columns):
        self.number, self.columns, self.requested = number, dict.fromkeys(columns, ("", "text")), []

    def __len__(self):
        return self.number

    def __call__(self, numbers):
        self.requested += list(numbers)
        sides = {
            side: [f"{side} {i}" for i in numbers]
            for side in ("source", "target")
            if side in self.columns
        }
        return Examples(**sides)


@pytest.mark.parametrize("columns", [("source", "target"), ("source", "label"), ("target",)])
@pytest.mark.parametrize("number", [0, 1, 7, 499, 500, 501, 997])
def test_the_vocabulary_is_trained_on_evenly_spaced_sources_and_targets(columns, number):
    reader = Numbered(number, *columns)
    every = [f"{side} {i}" for side in columns if side != "label" for i in range(number)]
    expected = [every[i * len(every) // 499] for i in range(499)] if len(every) > 499 else every
    assert subwords.vocabulary_texts(reader, 499) == expected
    assert len(reader.requested) == len(expected)


def test_the_config_sets_the_number_of_texts_for_the_vocabulary(small_language, monkeypatch):
    trained_on = []
    monkeypatch.setattr(tokenizer, "trained", lambda texts, **_: trained_on.append(texts) or b"")
    for sample in (97, 100_000):
        config = make_config(
            "encoder_classifier", dataset="cldr_language", vocabulary_sample=sample
        )
        with pytest.raises(ValueError, match="expected a SentencePiece model"):
            path = small_language / f"none{sample}.model"
            pipeline.load(config, pipeline.open_dataset(config), path)
    assert [len(texts) for texts in trained_on] == [97, 375]


@pytest.fixture
def read_counts(monkeypatch):
    """The number of examples read as text, by split."""
    counts = {}
    read = Reader.__call__

    def counting(reader, numbers):
        counts[reader.split] = counts.get(reader.split, 0) + len(numbers)
        return read(reader, numbers)

    monkeypatch.setattr(Reader, "__call__", counting)
    return counts


def test_the_second_start_tokenises_nothing_and_has_the_same_data(
    small_language, read_counts, monkeypatch
):
    config = make_config(
        "encoder_classifier", dataset="cldr_language", vocab_size=1500, tokenizer="bpe"
    )
    loads = []
    for start in range(2):
        with monkeypatch.context() as patch:
            if start == 1:
                patch.setattr(Tokenizer, "encode", None)
            loads.append(
                pipeline.load(
                    config, pipeline.open_dataset(config), small_language / "tokenizer.model"
                )
            )
        # the vocabulary, the ids, and a label
        assert read_counts.pop("train") == (375 + 375 + 1 if start == 0 else 1)
        assert read_counts == dict.fromkeys(("validation", "test"), 125 + 1 if start == 0 else 1)
        read_counts.clear()
    assert isinstance(loads[1].validation.tokens.source.values.base, np.memmap)
    validations = [data.validation for data in loads]
    validations.append(
        pipeline.read_split(pipeline.open_dataset(config), "validation", loads[0].tokenizer, config)
    )
    ids, labels = (
        [getattr(split.tokens, name) for split in validations] for name in ("source", "label")
    )
    assert [[row.tolist() for row in rows] for rows in ids] == 3 * [
        [row.tolist() for row in ids[0]]
    ]
    assert [label.tolist() for label in labels] == 3 * [labels[0].tolist()]
    assert [split.plan.steps_per_epoch for split in validations] == 3 * [
        validations[0].plan.steps_per_epoch
    ]
    first, second = (data.train for data in loads)
    assert loads[0].fingerprint == loads[1].fingerprint
    assert first.tokens.source.values.tolist() == second.tokens.source.values.tolist()
    assert isinstance(second.tokens.source.values.base, np.memmap) and second.texts is None
    in_memory = pipeline.read_split(
        pipeline.open_dataset(config), "train", loads[0].tokenizer, config
    )
    assert [ids.tolist() for ids in in_memory.tokens.source] == [
        ids.tolist() for ids in first.tokens.source
    ]
    assert in_memory.tokens.label.tolist() == first.tokens.label.tolist()
    for step in range(first.plan.steps_per_epoch):
        one, other = (split.batches()[step] for split in (in_memory, first))
        assert {name: x.tolist() for name, x in one.items()} == {
            name: x.tolist() for name, x in other.items()
        }


def test_text_bytes_are_the_same_with_texts_in_memory_and_read_from_files(small_language, tokens):
    config = make_config("decoder_lm", dataset="cldr_language", buckets=(13, 24))
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    stored, in_memory = (
        make(dataset, "train", tokens, config)
        for make in (pipeline.stored_split, pipeline.read_split)
    )
    assert 0 < stored.plan.too_long < len(stored.tokens)
    assert stored.texts is None and stored.text_bytes == in_memory.text_bytes > 0


@pytest.mark.parametrize(
    ("architecture", "packing"),
    [
        ("decoder_lm", True),
        pytest.param("encoder_classifier", False, marks=pytest.mark.slow),
        pytest.param("decoder_lm", False, marks=pytest.mark.slow),
    ],
)
def test_subwords_are_sampled_in_each_epoch_and_only_for_training(
    small_language, architecture, packing
):
    changes = dict(
        dataset="cldr_language",
        tokenizer="bpe",
        vocab_size=1500,
        buckets=(20, 40),
        tokens_per_batch=160,
    )
    changes |= dict(subword_sampling=0.1)
    config, usual = (
        make_config(architecture, packing=packing, **data)
        for data in (changes, changes | {"subword_sampling": 0.0})
    )
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    tokenizer.train(
        dataset.read("train").texts(), small_language / "model", vocab_size=1500, kind="bpe"
    )
    tokens = Tokenizer(small_language / "model")
    split, plain = (pipeline.stored_split(dataset, "train", tokens, c) for c in (config, usual))
    assert (
        plain.drawing is None
        and pipeline.read_split(dataset, "train", tokens, config).drawing is None
    )
    assert split.plan.usable.tolist() == plain.plan.usable.tolist()
    assert sum(split.plan.tokens) > sum(plain.plan.tokens)  # planned with longer texts
    batches, again = (split.batches(num_steps=2 * split.plan.steps_per_epoch) for _ in range(2))
    name, texts = (
        ("source" if architecture == "encoder_classifier" else "target"),
        dataset.read("train"),
    )
    ids_of_epochs = []
    for epoch in range(2):
        by_text = {}
        for step in range(
            epoch * split.plan.steps_per_epoch, (epoch + 1) * split.plan.steps_per_epoch
        ):
            batch = batches[step]
            examples = np.concatenate(split.plan.batch(step)[1])
            ends = np.flatnonzero(batch[name].ravel() == EOS)
            ids = np.split(batch[name].ravel(), ends + 1)[:-1]
            by_text |= {
                int(i): [x for x in row.tolist() if x not in (PAD, BOS, EOS)]
                for i, row in zip(examples, ids, strict=True)
            }
            if step % 5 == 0:
                assert {n: x.tolist() for n, x in again[step].items()} == {
                    n: x.tolist() for n, x in batch.items()
                }
        assert sorted(by_text) == split.plan.usable.tolist()
        expected = getattr(texts, name)
        assert tokens.decode([by_text[i] for i in by_text]) == [expected[i] for i in by_text]
        ids_of_epochs.append(by_text)
    first, second = ids_of_epochs
    assert np.mean([first[i] != second[i] for i in first]) > 0.3
    # in one epoch, only few do not fit
    many = split.batches(num_steps=15 * split.plan.steps_per_epoch)
    for step in range(15 * split.plan.steps_per_epoch):
        many[step]
    assert 0 < many.not_fitting < 0.3 * many.sampled


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """Pairs of 30 lines in a and 10 in b."""
    for name, count in (("a", 30), ("b", 10)):
        for side in ("en", "de"):
            lines = [
                f"{side} {name} {i} {WORDS[i % 7]} and {WORDS[i * i % 7]} {i * 7}"
                for i in range(count)
            ]
            (tmp_path / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path / "tfds"))
    return tmp_path


A, B = ("a.en", "a.de"), ("b.en", "b.de")
WORDS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            dict(test_split="train[:9]"),
            r"validation_split: 'validation' reads data\.validation_files, which are not set",
        ),
        (
            dict(validation_files=B),
            r"test_split: 'test' reads data\.test_files, which are not set; set them, or",
        ),
        (
            dict(validation_files=B, validation_split="train[-9:]", test_split="train[:9]"),
            r"validation_files: data\.validation_split = 'train\[-9:\]' does not read these files;",
        ),
    ],
)
def test_a_split_without_files_and_files_without_a_split_are_refused_before_preparation(
    own_files, data, words
):
    config = make_config("encoder_decoder", dataset="parallel_text", train_files=A, **data)
    with pytest.raises(ValueError, match=rf"^config\.data\.{words}"):
        pipeline.load(config, pipeline.open_dataset(config), own_files / "tokenizer.model")
    assert not list(own_files.rglob("dataset_info.json"))  # the next test finds one


def test_examples_of_evaluation_that_are_trained_on_too_are_counted(own_files, caplog):
    for side in ("en", "de"):  # 3 whole pairs, and a source with another target
        a, b = (Path(f"{name}.{side}").read_text().splitlines() for name in "ab")
        b[1], b[4], b[5] = a[7], a[7], a[0]
        b[8] = a[2] if side == "en" else b[8]
        Path(f"b.{side}").write_text("".join(f"{line}\n" for line in b))
    config = make_config(
        "encoder_decoder",
        dataset="parallel_text",
        train_files=A,
        validation_files=B,
        test_split="validation[:2]",
        vocab_size=290,
    )
    pipeline.load(config, pipeline.open_dataset(config), own_files / "tokenizer.model")
    messages = [record.getMessage() for record in caplog.records if record.name == "root"]
    assert messages == [
        f"config.data.{role}_split: {count} examples are in train too, word for word: scores on "
        "them are too good."
        for role, count in (("validation", "3 of 10"), ("test", "1 of 2"))
    ]


def test_a_slice_of_too_few_examples_says_so(own_files):
    config = make_config(
        "encoder_decoder",
        dataset="parallel_text",
        train_files=A,
        validation_files=B,
        test_split="validation[:5%]",
    )
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    message = r"^config\.data: 'validation\[:5%\]' of .* has no example; take a larger slice"
    with pytest.raises(InputError, match=message):
        dataset.reader("validation[:5%]")
    message = r"^config\.data: 'train\[:700\]' of .*: the split has \d+ examples; change .*\[:700\]"
    with pytest.raises(InputError, match=message):
        dataset.reader("train[:700]")


def test_an_overlap_of_training_and_evaluation_data_is_logged(own_files, caplog):
    files = dict(dataset="parallel_text", train_files=A, test_files=B, vocab_size=290)
    for split in ("train[:-5]", "train"):
        config = make_config(
            "encoder_decoder", **files, train_split=split, validation_split="train[-5:]"
        )
        dataset = pipeline.open_dataset(config)
        pipeline.load(config, dataset, own_files / f"{split}.model")
    assert len(list(own_files.rglob("dataset_info.json"))) == 1
    (message,) = [record.getMessage() for record in caplog.records if record.name == "root"]
    assert message.startswith(
        "config.data.validation_split: train[-5:] has 5 examples that train has too: the model is "
    )
    assert [
        dataset.shared("train[10:20]", other)
        for other in ("train[15:]", "train[20:]", "train[12:14]", "test")
    ] == [5, 0, 2, 0]
