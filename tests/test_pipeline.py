"""From the config to batches: what each architecture reads, and the shapes that it may count on."""

import numpy as np
import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.data import builders, languages, pipeline, tokenizer
from flaxformer_lite.data.examples import Examples
from flaxformer_lite.data.tokenizer import BOS, Tokenizer

TEXTS = [f"{word} {number}" for number in range(23) for word in ("one", "größer", "seven of them", "long " * 9)]
ARCHITECTURES = ["encoder_decoder", "encoder_classifier", "decoder_lm"]


def make_config(architecture, **data):
    config = default_config()
    config.model.architecture = architecture
    config.data.update(dict(vocab_size=286, buckets=(13, 37), tokens_per_batch=222, rows_multiple=2) | data)
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
def test_batches_have_the_arrays_shapes_and_types_that_are_known_before(tokens, architecture, packing, names):
    config = make_config(architecture, packing=packing)
    split = pipeline.make_split(make_examples(architecture), tokens, config)
    batches = pipeline.batches(split)
    assert len(batches) == split.plan.steps_per_epoch > 2
    for step in range(len(batches)):
        struct = pipeline.batch_struct(config, *split.plan.shape(step))
        assert set(struct) == names
        assert {name: (x.shape, x.dtype) for name, x in batches[step].items()} == {
            name: (x.shape, x.dtype) for name, x in struct.items()
        }
    assert set(split.plan.shapes()) == set(pipeline.possible_shapes(config))
    assert len(split.plan.shapes()) == (1 if packing else 2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_ids_of_a_split_are_those_of_its_texts_and_only_a_text_to_classify_has_a_start_symbol(tokens, architecture):
    examples = make_examples(architecture)
    split = pipeline.make_split(examples, tokens, make_config(architecture))
    start = [BOS] if architecture == "encoder_classifier" else []
    for texts, ids in ((examples.source, split.tokens.source), (examples.target, split.tokens.target)):
        assert (texts is None) == (ids is None)
        for text, row in zip(texts or [], ids or [], strict=True):
            assert row.dtype == np.int32
            assert row.tolist() == [*start, *tokens.encode([text])[0].tolist()]
    assert split.texts is examples
    assert (split.tokens.label is None) == (architecture != "encoder_classifier")


def test_the_start_symbol_of_a_text_to_classify_counts_in_its_length(tokens):
    ids = len(tokens.encode(["seven of them 7"])[0])
    for architecture, needed in (("decoder_lm", ids + 1), ("encoder_classifier", ids + 2)):
        examples = make_examples(architecture, ["one", "seven of them 7"])
        for bucket, too_long in ((needed, 0), (needed - 1, 1)):
            split = pipeline.make_split(examples, tokens, make_config(architecture, buckets=(bucket,)))
            assert split.plan.too_long == too_long


def test_a_text_without_a_token_can_be_classified(tokens):
    split = pipeline.make_split(make_examples("encoder_classifier", ["", "one"]), tokens, make_config(ARCHITECTURES[1]))
    assert split.plan.usable.tolist() == [0, 1]


@pytest.mark.parametrize("packing", [False, True])
def test_the_bytes_of_a_split_are_those_of_the_targets_that_are_used(tokens, packing):
    texts = ["größer", "", "long " * 99, "one"]
    split = pipeline.make_split(Examples(target=texts), tokens, make_config("decoder_lm", packing=packing))
    assert (split.plan.empty, split.plan.too_long) == (1, 1)
    assert split.text_bytes() == 8 + 3


@pytest.fixture
def small_language(monkeypatch, tmp_path):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    monkeypatch.setattr(builders, "OF_A_LANGUAGE", {"validation": 1, "test": 1, "train": 3})
    return tmp_path


def test_a_classifier_is_given_all_that_it_reads_from_the_config_alone(small_language):
    config = make_config("encoder_classifier", dataset="cldr_language", vocab_size=1500, tokenizer="bpe")
    data = pipeline.load(config, pipeline.open_dataset(config), small_language / "tokenizer.model")
    assert data.label_names == languages.LOCALES
    assert (len(data.train.tokens), len(data.validation.texts)) == (375, 125)
    assert data.train.texts is None
    assert data.tokenizer.vocab_size == 1500
    assert np.bincount(data.train.tokens.label).tolist() == [15] * 25
    assert set(data.validation.texts.kind) == set(languages.KINDS)


def test_the_config_says_which_texts_and_which_language_come_first():
    lm = pipeline.open_dataset(make_config("decoder_lm", source_language="de"))
    assert lm._target == ("de", "en")
    assert pipeline.open_dataset(make_config("decoder_lm", text_features="de"))._target == ["de"]
    assert pipeline.open_dataset(make_config("encoder_decoder", source_language="de")).languages == ("de", "en")


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
