"""TFDS datasets of texts are read by name for each architecture; others get a clear error."""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.cldr import languages, phrase_families
from flaxformer_lite.data.sources import builders
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import tokenizer

# Small copies of TFDS datasets with the same names, versions, features and folders. A child process
# writes them, because TFDS registers a name once and prints to standard output.
PREPARE = """
import sys
import numpy as np
import tensorflow_datasets as tfds

Text, ClassLabel = tfds.features.Text, tfds.features.ClassLabel
Translation, VariableLanguages = (
    tfds.features.Translation,
    tfds.features.TranslationVariableLanguages,
)


def prepare(name, version, config, features, keys, **splits):
    body = {
        "VERSION": tfds.core.Version(version),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config, description="small")]
        if config
        else [],
        "_info": lambda self: tfds.core.DatasetInfo(
            builder=self,
            supervised_keys=keys,
            disable_shuffling=True,
            features=tfds.features.FeaturesDict(features)
            if isinstance(features, dict)
            else features,
        ),
        "_split_generators": lambda self, manager: {
            s: self._generate_examples(splits[s]) for s in splits
        },
        "_generate_examples": lambda self, examples: enumerate(examples),
    }
    builder = type(name, (tfds.core.GeneratorBasedBuilder,), body, skip_registration=True)
    builder(file_format="array_record", config=config, data_dir=sys.argv[1]).download_and_prepare()


def pairs(count):
    return [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in range(count)]


def translation(name, version, config, languages, **counts):
    example = lambda split, i: {language: f"{split} {language} {i}" for language in languages}
    splits = {split: [example(split, i) for i in range(count)] for split, count in counts.items()}
    prepare(name, version, config, Translation(languages), languages, **splits)


tfds.disable_progress_bar()
prepare(
    "Wmt14Translate",
    "1.0.0",
    "de-en",
    Translation(("de", "en")),
    ("de", "en"),
    train=pairs(7),
    validation=pairs(3),
)
translation("Wmt19Translate", "1.0.0", "zh-en", ("zh", "en"), train=5, validation=2)
translation(
    "TedHrlrTranslate", "1.0.0", "aztr_to_en", ("az_tr", "en"), train=5, validation=3, test=2
)
translation("ParaCrawl", "1.2.0", "ende", ("en", "de"), train=211)
translation("Opus", "0.1.0", "medical", ("de", "en"), train=3)
translation("Flores", "1.2.0", "neen", ("ne", "en"), validation=3, test=2)
talks = [{"en": "one", "de": "eins", "pt-br": "um"}, {"en": "two", "pt-br": "dois"}]
talks += [{"de": ["drei", "3"], "en": "three"}]
prepare(
    "TedMultiTranslate",
    "1.1.0",
    None,
    {"translations": VariableLanguages(("en", "de", "pt-br", "fr")), "talk_name": Text()},
    None,
    train=[{"translations": talk, "talk_name": "x"} for talk in talks],
)
prepare(
    "Bucc",
    "1.0.0",
    "bucc_de",
    {name: Text() for name in ("source_sentence", "target_sentence", "source_id", "target_id")},
    None,
    test=[
        {
            "source_sentence": "Satz",
            "target_sentence": "sentence",
            "source_id": "d7",
            "target_id": "e7",
        }
    ],
)
prepare(
    "Lm1b",
    "1.1.0",
    None,
    {"text": Text()},
    ("text", "text"),
    train=[{"text": f"line {i}"} for i in range(5)],
    test=[{"text": "last"}],
)
prepare(
    "ImdbReviews",
    "1.0.0",
    "plain_text",
    {"text": Text(), "label": ClassLabel(names=["neg", "pos"])},
    ("text", "label"),
    train=[{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}],
    unsupervised=[{"text": "so", "label": -1}],
)
prepare(
    "AgNewsSubset",
    "1.0.0",
    None,
    {
        "label": ClassLabel(names=["World", "Sports", "Business", "Sci/Tech"]),
        "title": Text(),
        "description": Text(),
    },
    ("description", "label"),
    train=[{"label": 3, "title": "Comet seen", "description": "It is bright."}],
)
nli = {"label": ClassLabel(names=["entailment", "neutral", "contradiction"]), "idx": np.int32}
prepare(
    "Glue",
    "2.0.0",
    "mnli",
    {"premise": Text(), "hypothesis": Text()} | nli,
    None,
    train=[{"premise": "It rains.", "hypothesis": "It is wet.", "label": 0, "idx": 0}],
)
prepare(
    "Glue",
    "2.0.0",
    "sst2",
    {"sentence": Text(), "label": ClassLabel(names=["negative", "positive"]), "idx": np.int32},
    None,
    validation=[{"sentence": "fine", "label": 1, "idx": 0}],
    test=[{"sentence": "well", "label": -1, "idx": 0}],
)
prepare(
    "Glue",
    "2.0.0",
    "stsb",
    {"sentence1": Text(), "sentence2": Text(), "label": np.float32, "idx": np.int32},
    None,
    train=[{"sentence1": "a", "sentence2": "b", "label": 2.5, "idx": 0}],
)
prepare(
    "Trec",
    "1.0.0",
    None,
    {
        "label-coarse": ClassLabel(num_classes=6),
        "label-fine": ClassLabel(num_classes=47),
        "text": Text(),
    },
    None,
    train=[{"label-coarse": 0, "label-fine": 0, "text": "Why?"}],
)
prepare(
    "Piqa",
    "1.0.0",
    None,
    {
        "id": Text(),
        "goal": Text(),
        "sol1": Text(),
        "sol2": Text(),
        "label": ClassLabel(num_classes=2),
    },
    None,
    train=[{"id": "x7", "goal": "sweep", "sol1": "broom", "sol2": "spoon", "label": 0}],
)
"""

# Reads datasets with the import of TensorFlow blocked.
READ = """
import importlib.machinery, json, sys


class WithoutTensorFlow(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "tensorflow" else super().find_spec(name, path, target)


found_by = importlib.machinery.PathFinder
sys.meta_path = [WithoutTensorFlow if finder is found_by else finder for finder in sys.meta_path]
from flaxformer_lite.data.sources.datasets import Dataset

for name, split, options in json.loads(sys.argv[1]):
    dataset = Dataset(name, **options)
    dataset.check_split(split)
    examples = dataset.read(split)
    label = None if examples.label is None else examples.label.tolist()
    print(json.dumps([dataset.label_names, examples.source, examples.target, label, examples.kind]))
assert "tensorflow" not in sys.modules
"""

LM, CLASSIFIER = {"architecture": "decoder_lm"}, {"architecture": "encoder_classifier"}
EN, DE = {"source_language": "en"}, {"source_language": "de"}
CRAWLED = {language: [f"train {language} {i}" for i in range(2)] for language in ("en", "de")}
NEWS, NLI = ["World", "Sports", "Business", "Sci/Tech"], ["entailment", "neutral", "contradiction"]
# (name, split, options) -> label names, source, target, labels
READABLE = [
    (("wmt14_translate/de-en", "train[:1]", {}), (None, ["Satz 0"], ["sentence 0"], None)),
    (("wmt14_translate/de-en", "train[:1]", LM), (None, None, ["Satz 0\tsentence 0"], None)),
    (
        ("wmt14_translate/de-en", "train[:1]", LM | {"source_language": "en"}),
        (None, None, ["sentence 0\tSatz 0"], None),
    ),
    (
        ("wmt14_translate/de-en", "train[:1]", LM | {"text_features": "en"}),
        (None, None, ["sentence 0"], None),
    ),
    (("wmt19_translate/zh-en", "train[4:]", {}), (None, ["train zh 4"], ["train en 4"], None)),
    (("wmt19_translate/zh-en", "train[-1:]", EN), (None, ["train en 4"], ["train zh 4"], None)),
    (
        ("ted_hrlr_translate/aztr_to_en", "test[1:]", {}),
        (None, ["test az_tr 1"], ["test en 1"], None),
    ),
    (
        ("ted_hrlr_translate/aztr_to_en", "test[:1]", EN),
        (None, ["test en 0"], ["test az_tr 0"], None),
    ),
    (("para_crawl/ende", "train[:1%]", {}), (None, CRAWLED["en"], CRAWLED["de"], None)),
    (("para_crawl/ende", "train[:1%]", DE), (None, CRAWLED["de"], CRAWLED["en"], None)),
    (("opus/medical", "train[:1]", {}), (None, ["train de 0"], ["train en 0"], None)),
    (("opus/medical", "train[:1]", EN), (None, ["train en 0"], ["train de 0"], None)),
    (("flores/neen", "validation[:1]", EN), (None, ["validation en 0"], ["validation ne 0"], None)),
    (
        ("ted_multi_translate", "train", {"languages": ["de", "en"]}),
        (None, ["eins", "3"], ["one", "three"], None),
    ),
    (
        ("ted_multi_translate", "train", {"languages": ["de", "en"]} | EN),
        (None, ["one", "three"], ["eins", "3"], None),
    ),
    (
        ("ted_multi_translate", "train[1:]", {"languages": ["en", "pt-br"]}),
        (None, ["two"], ["dois"], None),
    ),
    (
        ("ted_multi_translate", "train[:1]", LM | {"languages": ["pt-br", "de"]}),
        (None, None, ["um\teins"], None),
    ),
    (
        ("bucc/bucc_de", "test", {"languages": ["target_sentence", "source_sentence"]}),
        (None, ["sentence"], ["Satz"], None),
    ),
    (("lm1b", "train[60%:]", LM), (None, None, ["line 3", "line 4"], None)),
    (("imdb_reviews", "train", CLASSIFIER), (["neg", "pos"], ["good", "bad"], None, [1, 0])),
    (("imdb_reviews/plain_text", "unsupervised", LM), (None, None, ["so"], None)),
    (("ag_news_subset", "train", CLASSIFIER), (NEWS, ["Comet seen\nIt is bright."], None, [3])),
    (
        ("ag_news_subset", "train", CLASSIFIER | {"text_features": "description, title"}),
        (NEWS, ["It is bright.\nComet seen"], None, [3]),
    ),
    (
        ("ag_news_subset", "train", LM | {"text_features": "title"}),
        (None, None, ["Comet seen"], None),
    ),
    (("glue/mnli", "train", CLASSIFIER), (NLI, ["It rains.\nIt is wet."], None, [0])),
    (("glue/sst2", "validation", CLASSIFIER), (["negative", "positive"], ["fine"], None, [1])),
    (("piqa", "train", CLASSIFIER), (["0", "1"], ["sweep\nbroom\nspoon"], None, [0])),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    subprocess.run([sys.executable, "-c", PREPARE, str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def copies(folder, monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(folder))
    return folder


def test_prepared_datasets_are_read_by_their_tfds_names_without_tensorflow(folder):
    cases = json.dumps([case for case, _ in READABLE])
    environment = os.environ | {"TFDS_DATA_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", READ, cases], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    for (case, expected), (*found, kind) in zip(READABLE, lines, strict=True):
        assert tuple(found) == expected, case
        assert kind is None


def test_the_source_of_a_translation_is_the_first_language_of_its_name(copies):
    dataset = Dataset("wmt14_translate/de-en")
    dataset.prepare()
    texts = dataset.read("train")
    assert dataset.languages == ("de", "en") and dataset.label_names is None
    assert sorted(texts.source) == [f"Satz {i}" for i in range(7)]
    assert [s.split()[1] for s in texts.source] == [t.split()[1] for t in texts.target]
    assert texts.kind is None


def test_source_language_reverses_the_direction(copies):
    dataset = Dataset("wmt14_translate/de-en", source_language="en")
    assert dataset.languages == ("en", "de")
    assert sorted(dataset.read("validation").source) == [f"sentence {i}" for i in range(3)]


def test_a_slice_of_a_split_is_read(copies):
    whole, part = (
        Dataset("wmt14_translate/de-en").read(split).source for split in ("train", "train[2:5]")
    )
    assert len(whole) == 7
    assert part == whole[2:5]


@pytest.mark.parametrize(
    ("languages", "complete"), [(("de", "en"), 2), (("en", "pt-br"), 2), (("de", "pt-br"), 1)]
)
def test_examples_without_one_of_the_two_languages_are_left_out_and_counted(
    copies, languages, complete
):
    for options in ({}, LM):
        examples = Dataset("ted_multi_translate", languages=languages, **options).read("train")
        assert (len(examples), examples.incomplete) == (complete, 3 - complete)
    assert Dataset("wmt14_translate/de-en").read("train").incomplete == 0


def make_config(**data):
    config = default_config()
    config.model.architecture = data.pop("architecture", "encoder_decoder")
    sizes = dict(
        vocab_size=286, tokenizer="bpe", buckets=(37,), tokens_per_batch=74, rows_multiple=2
    )
    config.data.update(sizes | data)
    return resolve(config)


@pytest.mark.parametrize("sides", [("de", "en"), ("de", "pt-br")])
def test_stored_ids_to_evaluate_on_belong_to_the_examples_with_both_languages(
    copies, tmp_path, monkeypatch, sides
):
    config = make_config(
        dataset="ted_multi_translate", languages=sides, validation_split="train[:3]"
    )
    dataset = pipeline.open_dataset(config)
    tokenizer.train(["eins drei um", "one three 3"], tmp_path / "model", vocab_size=286, kind="bpe")
    tokens = tokenizer.Tokenizer(tmp_path / "model")
    for _ in range(2):
        split = pipeline.read_part(dataset, "validation", tokens, config)
        monkeypatch.setattr(tokenizer.Tokenizer, "encode", None)  # all ids are stored by now
        assert split.texts.incomplete > 0
        for side in ("source", "target"):
            assert tokens.decode(getattr(split.tokens, side)) == getattr(split.texts, side)
        assert split.plan.usable.tolist() == list(range(len(split.texts)))


@pytest.mark.parametrize(
    ("data", "source", "target"),
    [
        (
            dict(dataset="para_crawl/ende", validation_split="train[:3]", test_split="train[-1:]"),
            "train en",
            "train de",
        ),
        (
            dict(
                dataset="opus/medical",
                train_split="train[1:]",
                validation_split="train[:1]",
                test_split="train",
            ),
            "train de",
            "train en",
        ),
        (dict(dataset="ted_hrlr_translate/aztr_to_en"), "train az_tr", "train en"),
        (
            dict(
                dataset="wmt19_translate/zh-en",
                validation_dataset="wmt19_translate/zh-en",
                test_split="train[:1]",
            ),
            "train zh",
            "train en",
        ),
    ],
)
def test_the_pipeline_reads_a_prepared_translation_dataset_in_both_directions(
    copies, tmp_path, data, source, target
):
    for reversed_ in (False, True):
        source, target = (target, source) if reversed_ else (source, target)
        config = make_config(**data, source_language=source.split()[1] if reversed_ else None)
        dataset = pipeline.open_dataset(config)
        loaded = pipeline.load(config, dataset, tmp_path / f"{reversed_}.model")
        texts = loaded.train.reader(range(len(loaded.train.reader)))
        assert {text.rsplit(" ", 1)[0] for text in texts.source} == {source}
        assert {text.rsplit(" ", 1)[0] for text in texts.target} == {target}
        assert [text.split()[-1] for text in texts.source] == [
            text.split()[-1] for text in texts.target
        ]
        assert loaded.tokenizer.decode(loaded.train.tokens.source) == texts.source
        assert len(loaded.validation.texts) > 0
        assert loaded.train.batches()[0]["source"].shape == (2, 37)


# Custom text, and other datasets to evaluate on.


@pytest.fixture
def own(copies, tmp_path, monkeypatch):
    """Files of each form in the current folder."""
    monkeypatch.chdir(tmp_path)
    files = {"a.en": "one\ntwo\nthree\n", "a.de": "eins\nzwei\ndrei\n", "b.tsv": "vier\tfour\n"}
    files |= {"c.jsonl": '{"en": "five", "de": "fünf"}\n', "d.txt": "six\nseven\n"}
    files |= {"e.tsv": "World\tone\nSports\ttwo\n", "f.jsonl": '{"text": "good", "label": "pos"}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def opened(**data):
    dataset = pipeline.open_dataset(make_config(**data))
    dataset.prepare()
    return dataset


@pytest.mark.parametrize("reversed_", [False, True])
def test_own_pairs_are_read_in_both_directions_and_in_slices(own, reversed_):
    files = dict(train_files=("a.en", "a.de"), test_files=("c.jsonl",))
    dataset = opened(dataset="parallel_text", **files, source_language="de" if reversed_ else None)
    train, test = dataset.read("train"), dataset.read("test")
    expected = [["one", "two", "three"], ["eins", "zwei", "drei"]]
    assert [train.source, train.target] == (expected[::-1] if reversed_ else expected)
    assert [test.source, test.target] == (
        [["fünf"], ["five"]] if reversed_ else [["five"], ["fünf"]]
    )
    assert dataset.languages == (("de", "en") if reversed_ else ("en", "de"))
    assert dataset.read("train[1:]").source == train.source[1:]
    assert (
        list(dataset.contents) == ["a.en", "a.de", "c.jsonl"]
        and not Dataset("wmt14_translate/de-en").contents
    )


def test_custom_text_without_files_for_a_split_names_the_field_to_set(own):
    dataset = opened(dataset="parallel_text", train_files=("a.en", "a.de"))
    with pytest.raises(
        ValueError,
        match=r"has no split 'test'; it has train, .*; set the data\.\*_files of the missing one",
    ):
        dataset.check_split("test")


def test_plain_files_are_read_by_a_language_model_and_labelled_ones_by_a_classifier(own):
    lm = opened(architecture="decoder_lm", dataset="plain_text", train_files=("d.txt",))
    assert lm.read("train").target == ["six", "seven"]
    lm = opened(
        architecture="decoder_lm",
        dataset="plain_text",
        train_files=("c.jsonl",),
        text_features="de",
    )
    assert lm.read("train").target == ["fünf"]
    lm = opened(
        architecture="decoder_lm",
        dataset="parallel_text",
        train_files=("a.en", "a.de"),
        source_language="de",
    )
    assert lm.read("train[:1]").target == ["eins\tone"]
    lm = opened(architecture="decoder_lm", dataset="labelled_text", train_files=("e.tsv",))
    assert lm.read("train").target == ["one", "two"]
    classifier = opened(
        architecture="encoder_classifier", dataset="labelled_text", train_files=("e.tsv",)
    )
    assert classifier.label_names == ["Sports", "World"]
    examples = classifier.read("train")
    assert (examples.source, examples.label.tolist()) == (["one", "two"], [1, 0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            dict(dataset="plain_text", train_files=("d.txt",)),
            "expected a translation dataset, .*; plain_text is not one",
        ),
        (
            dict(
                architecture="encoder_classifier",
                dataset="parallel_text",
                train_files=("a.en", "a.de"),
            ),
            r".* one ClassLabel, .*; parallel_text has .*en \(Text\)",
        ),
    ],
)
def test_custom_text_that_does_not_match_the_architecture_is_refused(own, data, words):
    with pytest.raises(ValueError, match=rf"^config\.data\.dataset: {words}"):
        opened(**data)


@pytest.mark.parametrize("source_language", [None, "de", "en"])
def test_a_translation_model_is_evaluated_on_other_datasets_in_the_same_direction(
    own, source_language
):
    dataset = opened(
        dataset="wmt14_translate/de-en",
        source_language=source_language,
        validation_dataset="para_crawl/ende",
        validation_split="train[:1]",
        test_dataset="parallel_text",
        test_files=("b.tsv",),
        languages=("de", "en"),
    )
    source = source_language or "de"
    validation, test = (
        dataset.part("validation").read("train[:1]"),
        dataset.part("test").read("test"),
    )
    assert dataset.part("train") is dataset
    assert validation.source == [f"train {source} 0"]
    assert test.source == (["vier"] if source == "de" else ["four"])
    assert dataset.contents == dataset.part("test").contents != {}


def test_the_pipeline_validates_on_the_other_dataset_and_checks_its_splits_before_the_training(
    own, tmp_path
):
    files = dict(train_files=("a.en", "a.de"), validation_files=("c.jsonl",))
    data = dict(
        dataset="parallel_text",
        **files,
        test_dataset="wmt14_translate/de-en",
        test_split="train[:1]",
    )
    config = make_config(**data)
    loaded = pipeline.load(config, pipeline.open_dataset(config), tmp_path / "tokenizer.model")
    assert loaded.validation.texts.source == ["five"]
    config = make_config(**data | {"test_split": "test"})
    with pytest.raises(
        ValueError, match=r"wmt14_translate/de-en has no split 'test'; it has train, validation"
    ):
        pipeline.load(config, pipeline.open_dataset(config), tmp_path / "no.model")
    assert not (tmp_path / "no.model").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            dict(validation_dataset="wmt19_translate/zh-en"),
            r"validation_dataset: wmt19.* has no 'de'; it has zh, en",
        ),
        (dict(test_dataset="lm1b"), r"test_dataset: lm1b has no 'de'; it has text"),
        (
            dict(test_dataset="parallel_text", test_files=("b.tsv",)),
            r"test_dataset: parallel_text has no 'de'; it has source, target",
        ),
        (dict(test_dataset="no_such_thing"), r"test_dataset: cannot open 'no_such_thing'"),
        (
            dict(test_dataset="wmt14_translate/fr-en"),
            r"test_dataset: wmt14_translate/fr-en has no 'de'",
        ),
        (
            dict(test_dataset="parallel_text", test_files=("no.en", "no.de")),
            r"test_dataset: config\.data\.test_files: there is no file 'no\.en'",
        ),
        (
            dict(
                architecture="encoder_classifier",
                dataset="ag_news_subset",
                text_features="title",
                test_dataset="imdb_reviews",
            ),
            r"test_dataset: config\.data\.text_features: imdb_reviews has no text 'title'",
        ),
        (
            dict(
                architecture="encoder_classifier", dataset="glue/sst2", test_dataset="imdb_reviews"
            ),
            r"test_dataset: expected the labels of glue/sst2, negative, positive, "
            r"got imdb_reviews with neg, pos; ",
        ),
        (
            dict(architecture="decoder_lm", dataset="lm1b", test_dataset="wmt14_translate/de-en"),
            r"test_dataset: expected the languages of lm1b, \(none\), "
            r"got wmt14_translate/de-en with de, en; ",
        ),
    ],
)
def test_another_dataset_to_evaluate_on_is_refused_if_its_languages_or_labels_differ(
    own, data, words
):
    with pytest.raises(ValueError, match=rf"^config\.data\.{words}"):
        pipeline.open_dataset(make_config(**{"dataset": "wmt14_translate/de-en"} | data))


def test_a_classifier_is_evaluated_on_custom_text_with_the_labels_of_its_training_data(own, capfd):
    data = dict(
        architecture="encoder_classifier", dataset="imdb_reviews", test_dataset="labelled_text"
    )
    dataset = opened(**data, test_files=("f.jsonl",))
    assert dataset.part("test").read("test").label.tolist() == [1]
    (own / "f.jsonl").write_text(
        '{"text": "good", "label": "positive"}\n{"text": "bad", "label": "neg"}\n'
    )
    with pytest.raises(ValueError, match=r"unknown label at f\.jsonl:1 \('positive'\)"):
        opened(**data, test_files=("f.jsonl",))
    dataset = opened(**data, test_files=("f.jsonl",), faults="drop")
    assert dataset.part("test").read("test").source == ["bad"]
    assert (
        "labelled_text, test: 1 of 2 examples are malformed: 1 unknown label"
        in capfd.readouterr().err
    )


def test_a_language_model_is_evaluated_on_other_texts(own):
    data = dict(
        architecture="decoder_lm",
        dataset="lm1b",
        validation_dataset="plain_text",
        validation_files=("d.txt",),
    )
    assert opened(**data).part("validation").read("validation").target == ["six", "seven"]


def test_labels_are_int32_and_only_of_a_classifier(copies):
    label = Dataset("imdb_reviews", **CLASSIFIER).read("train").label
    assert label.dtype == np.int32 and label.tolist() == [1, 0]
    assert Dataset("imdb_reviews", **LM).read("train").label is None


@pytest.mark.parametrize(
    ("name", "options", "pattern"),
    [
        ("cldr_language", CLASSIFIER, r"[^\t\n]+"),
        ("cldr_language", LM, r"[^\t\n]+"),
        ("cldr_translate/en-de", LM, r"[^\t\n]+\t[^\t\n]+"),
    ],
)
def test_the_kind_of_a_phrase_is_returned_and_is_not_part_of_its_text(
    name, options, pattern, monkeypatch, tmp_path
):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    monkeypatch.setattr(
        phrase_families, "phrases", functools.partial(phrase_families.phrases, per_kind=8)
    )
    monkeypatch.setattr(builders, "HELD_OUT", 20)
    monkeypatch.setattr(builders, "OF_A_LANGUAGE", {"train": 1})
    dataset = Dataset(name, **options)
    dataset.prepare()
    examples = dataset.read("train")
    assert set(examples.kind) == set(
        phrase_families.KINDS if name.startswith("cldr_translate") else languages.KINDS
    )
    assert all(re.fullmatch(pattern, text) for text in examples.texts())


def test_the_kind_is_refused_as_a_text_feature():
    with pytest.raises(
        ValueError, match=r"text_features: cldr_language has no text 'kind'; valid are text\."
    ):
        Dataset("cldr_language", **CLASSIFIER, text_features="kind")


def test_examples_have_the_length_and_the_texts_of_their_present_sides():
    both = Examples(source=["a", "b"], target=["c", "d"])
    assert len(both) == 2 and both.texts() == ["a", "b", "c", "d"]
    source = Examples(source=["a", "b", "c"], label=np.zeros(3, np.int32))
    assert len(source) == 3 and source.texts() == ["a", "b", "c"]
    target = Examples(target=["a"])
    assert len(target) == 1 and target.texts() == ["a"]


def test_a_missing_split_is_refused_with_the_existing_ones(copies):
    with pytest.raises(ValueError, match=r"no split 'dev'; it has train, validation, and slices"):
        Dataset("wmt14_translate/de-en").read("dev")


@pytest.mark.parametrize("method", ["check_split", "read"])
@pytest.mark.parametrize(
    ("name", "split"), [("glue/sst2", "test"), ("imdb_reviews", "unsupervised")]
)
def test_a_split_without_labels_is_refused_for_a_classifier(copies, method, name, split):
    with pytest.raises(
        ValueError, match=rf"{split}.* of {name} has no labels; set config.data.test_split to one"
    ):
        getattr(Dataset(name, **CLASSIFIER), method)(split)


def test_data_prepared_as_tfrecord_is_refused_with_the_command_to_convert_it(copies):
    file = copies / "wmt14_translate/de-en/1.0.0/dataset_info.json"
    info = json.loads(file.read_text())
    try:
        file.write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
        with pytest.raises(
            ValueError,
            match=r"prepared as tfrecord, .*convert_format --dataset_version_dir=.*de-en/1.0.0",
        ):
            Dataset("wmt14_translate/de-en")
    finally:
        file.write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "wmt14_translate/fr-en",
            {},
            r"wmt14_translate/fr-en is not prepared: .*tfds build wmt14_translate/fr-en",
        ),
        (
            "wmt14_translat/de-en",
            {},
            r"cannot open 'wmt14_translat/de-en': .*; did you mean 'wmt14_translate'\?$",
        ),
        (
            "wmt14_translate/de-xx",
            {},
            r"de-xx': BuilderConfig de-xx not found; did you mean 'de-en'\?$",
        ),
        ("wmt14_translate/de-en:9.9.9", {}, r"at version 9\.9\.9, .*; leave out the version\.$"),
        (
            "huggingface:foo/bar",
            {},
            r"datasets of a community cannot be read; name a dataset of TFDS",
        ),
        (
            "",
            {},
            r"cannot open '': .* failed; name a dataset of TFDS .* or one of cldr_translate, ",
        ),
        ("cldr_translate/en-xx", {}, r"cannot open 'cldr_translate/en-xx': Unknown locale 'xx'"),
        ("cldr_language/en", CLASSIFIER, r"cannot open 'cldr_language/en': it has no configs"),
        ("mnist", {}, r"expected a translation dataset, two texts an example; mnist is not one"),
        ("lm1b", {}, r"expected a translation dataset, two texts an example; lm1b is not one"),
        (
            "cldr_language",
            {},
            r"expected a translation dataset, two texts an example; cldr_language is not one",
        ),
        ("mnist", CLASSIFIER, r"expected a dataset of texts; mnist has none"),
        ("mnist", LM | {"text_features": "text"}, r"expected a dataset of texts; mnist has none"),
        (
            "glue/stsb",
            CLASSIFIER,
            r"needs a dataset with one ClassLabel, .*glue/stsb has .*label \(float32\)",
        ),
        (
            "trec",
            CLASSIFIER,
            r"one ClassLabel, .*trec has label-coarse \(ClassLabel\), label-fine \(ClassLabel\)",
        ),
        ("parallel_text", {}, r"cannot open 'parallel_text'"),
        (
            "cldr_translate/en-de",
            CLASSIFIER,
            r"one ClassLabel, such as cldr_language; .*en-de has en \(Text\), de",
        ),
    ],
)
def test_an_unreadable_dataset_name_is_refused_in_one_message(copies, name, options, words):
    with pytest.raises(
        ValueError, match=f"config.data.dataset: .*{words}|config.data.dataset: {words}"
    ):
        Dataset(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "wmt14_translate/de-en",
            {"source_language": "fr"},
            r"source_language: wmt14_.*/de-en has de and en, not 'fr'",
        ),
        (
            "wmt14_translate/de-en",
            LM | {"source_language": "fr"},
            r"source_language: .* has de and en, not 'fr'",
        ),
        (
            "wmt14_translate/de-en",
            {"text_features": "de"},
            r"text_features: a translation model reads the two languages",
        ),
        (
            "imdb_reviews",
            CLASSIFIER | {"source_language": "en"},
            r"source_language: a classifier does not translate",
        ),
        (
            "imdb_reviews",
            CLASSIFIER | {"languages": ("text",)},
            r"languages: a classifier does not translate",
        ),
        (
            "wmt14_translate/de-en",
            {"languages": ("en", "fr")},
            r"languages: wmt14_.* has no 'fr'; it has de, en",
        ),
        (
            "ted_multi_translate",
            {"languages": ("en", "xx")},
            r"languages: ted_.* has no 'xx'; it has .*, pt, pt-br, ",
        ),
        (
            "ted_multi_translate",
            {},
            r"languages: ted_multi_translate has more than two languages; name the two to read",
        ),
        (
            "ted_multi_translate",
            LM,
            r"languages: ted_multi_translate has more than two languages; name the two to read",
        ),
        (
            "ted_multi_translate",
            {"languages": ("en", "de"), "source_language": "fr"},
            r"source_language: .* has en and de, not 'fr'",
        ),
        (
            "lm1b",
            LM | {"source_language": "en"},
            r"source_language: lm1b is not a translation dataset",
        ),
        (
            "wmt14_translate/de-en",
            LM | {"source_language": "de", "text_features": "en"},
            r"source_language: data.text_features already selects the texts",
        ),
        (
            "ag_news_subset",
            CLASSIFIER | {"text_features": "title,descripton"},
            r"text_features: .* no text 'descripton'; did you mean 'description'\?",
        ),
        (
            "ag_news_subset",
            LM | {"text_features": "label"},
            r"text_features: .* no text 'label'; valid are description, title\.",
        ),
        (
            "ag_news_subset",
            LM | {"text_features": "title,title"},
            r"text_features: 'title,title' has a duplicate",
        ),
    ],
)
def test_a_setting_that_does_not_match_the_dataset_or_the_architecture_is_refused_by_name(
    copies, name, options, words
):
    with pytest.raises(ValueError, match=rf"^config\.data\.{words}"):
        Dataset(name, **options)
