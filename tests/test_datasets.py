"""Any TFDS dataset of texts by its name, for each architecture, and clear words for what cannot be read."""

import functools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from flaxformer_lite.data import builders, cldr, languages
from flaxformer_lite.data.datasets import Dataset
from flaxformer_lite.data.examples import Examples

# Small copies of TFDS datasets: the same names, versions, features and folders, written by a process of its own, since
# TFDS registers a name once. TFDS says on standard output what it does.
PREPARE = """
import sys
import numpy as np
import tensorflow_datasets as tfds

Text, ClassLabel = tfds.features.Text, tfds.features.ClassLabel

def prepare(name, version, config, features, keys, **splits):
    body = {
        "VERSION": tfds.core.Version(version),
        "BUILDER_CONFIGS": [tfds.core.BuilderConfig(name=config, description="small")] if config else [],
        "_info": lambda self: tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=keys, disable_shuffling=True
        ),
        "_split_generators": lambda self, manager: {s: self._generate_examples(splits[s]) for s in splits},
        "_generate_examples": lambda self, examples: enumerate(examples),
    }
    builder = type(name, (tfds.core.GeneratorBasedBuilder,), body, skip_registration=True)
    builder(file_format="array_record", config=config, data_dir=sys.argv[1]).download_and_prepare()

def pairs(count):
    return [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in range(count)]

tfds.disable_progress_bar()
prepare("Wmt14Translate", "1.0.0", "de-en", {"de": Text(), "en": Text()}, ("de", "en"),
    train=pairs(7), validation=pairs(3))
prepare("Lm1b", "1.1.0", None, {"text": Text()}, ("text", "text"),
    train=[{"text": f"line {i}"} for i in range(5)], test=[{"text": "last"}])
prepare("ImdbReviews", "1.0.0", "plain_text", {"text": Text(), "label": ClassLabel(names=["neg", "pos"])},
    ("text", "label"), train=[{"text": "good", "label": "pos"}, {"text": "bad", "label": "neg"}],
    unsupervised=[{"text": "so", "label": -1}])
prepare("AgNewsSubset", "1.0.0", None, {
    "label": ClassLabel(names=["World", "Sports", "Business", "Sci/Tech"]), "title": Text(), "description": Text(),
}, ("description", "label"), train=[{"label": 3, "title": "Comet seen", "description": "It is bright."}])
nli = {"label": ClassLabel(names=["entailment", "neutral", "contradiction"]), "idx": np.int32}
prepare("Glue", "2.0.0", "mnli", {"premise": Text(), "hypothesis": Text()} | nli, None,
    train=[{"premise": "It rains.", "hypothesis": "It is wet.", "label": 0, "idx": 0}])
prepare("Glue", "2.0.0", "sst2",
    {"sentence": Text(), "label": ClassLabel(names=["negative", "positive"]), "idx": np.int32}, None,
    validation=[{"sentence": "fine", "label": 1, "idx": 0}], test=[{"sentence": "well", "label": -1, "idx": 0}])
prepare("Glue", "2.0.0", "stsb", {"sentence1": Text(), "sentence2": Text(), "label": np.float32, "idx": np.int32}, None,
    train=[{"sentence1": "a", "sentence2": "b", "label": 2.5, "idx": 0}])
prepare("Trec", "1.0.0", None,
    {"label-coarse": ClassLabel(num_classes=6), "label-fine": ClassLabel(num_classes=47), "text": Text()}, None,
    train=[{"label-coarse": 0, "label-fine": 0, "text": "Why?"}])
prepare("Piqa", "1.0.0", None,
    {"id": Text(), "goal": Text(), "sol1": Text(), "sol2": Text(), "label": ClassLabel(num_classes=2)}, None,
    train=[{"id": "x7", "goal": "sweep", "sol1": "broom", "sol2": "spoon", "label": 0}])
"""

# Reads datasets where there is no TensorFlow to import, even if this machine has one.
READ = """
import importlib.machinery, json, sys

class WithoutTensorFlow(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "tensorflow" else super().find_spec(name, path, target)

found_by = importlib.machinery.PathFinder
sys.meta_path = [WithoutTensorFlow if finder is found_by else finder for finder in sys.meta_path]
from flaxformer_lite.data.datasets import Dataset

for name, split, options in json.loads(sys.argv[1]):
    dataset = Dataset(name, **options)
    dataset.check_split(split)
    examples = dataset.read(split)
    label = None if examples.label is None else examples.label.tolist()
    print(json.dumps([dataset.label_names, examples.source, examples.target, label, examples.kind]))
assert "tensorflow" not in sys.modules
"""

LM, CLASSIFIER = {"architecture": "decoder_lm"}, {"architecture": "encoder_classifier"}
NEWS, NLI = ["World", "Sports", "Business", "Sci/Tech"], ["entailment", "neutral", "contradiction"]
# (name, split, options) -> label names, source, target, labels
READABLE = [
    (("wmt14_translate/de-en", "train[:1]", {}), (None, ["Satz 0"], ["sentence 0"], None)),
    (("wmt14_translate/de-en", "train[:1]", LM), (None, None, ["Satz 0\tsentence 0"], None)),
    (
        ("wmt14_translate/de-en", "train[:1]", LM | {"source_language": "en"}),
        (None, None, ["sentence 0\tSatz 0"], None),
    ),
    (("wmt14_translate/de-en", "train[:1]", LM | {"text_features": "en"}), (None, None, ["sentence 0"], None)),
    (("lm1b", "train[60%:]", LM), (None, None, ["line 3", "line 4"], None)),
    (("imdb_reviews", "train", CLASSIFIER), (["neg", "pos"], ["good", "bad"], None, [1, 0])),
    (("imdb_reviews/plain_text", "unsupervised", LM), (None, None, ["so"], None)),
    (("ag_news_subset", "train", CLASSIFIER), (NEWS, ["Comet seen\nIt is bright."], None, [3])),
    (
        ("ag_news_subset", "train", CLASSIFIER | {"text_features": "description, title"}),
        (NEWS, ["It is bright.\nComet seen"], None, [3]),
    ),
    (("ag_news_subset", "train", LM | {"text_features": "title"}), (None, None, ["Comet seen"], None)),
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


def test_prepared_datasets_are_read_by_their_tfds_names_where_tensorflow_cannot_be_imported(folder):
    asked = json.dumps([case for case, _ in READABLE])
    environment = os.environ | {"TFDS_DATA_DIR": str(folder)}
    run = subprocess.run([sys.executable, "-c", READ, asked], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    for (case, expected), (*found, kind) in zip(READABLE, lines, strict=True):
        assert tuple(found) == expected, case
        assert kind is None


def test_a_translation_is_read_from_the_side_that_its_name_puts_first(copies):
    dataset = Dataset("wmt14_translate/de-en")
    dataset.prepare()
    texts = dataset.read("train")
    assert dataset.languages == ("de", "en") and dataset.label_names is None
    assert sorted(texts.source) == [f"Satz {i}" for i in range(7)]
    assert [s.split()[1] for s in texts.source] == [t.split()[1] for t in texts.target]
    assert texts.kind is None


def test_source_language_turns_the_direction_around(copies):
    dataset = Dataset("wmt14_translate/de-en", source_language="en")
    assert dataset.languages == ("en", "de")
    assert sorted(dataset.read("validation").source) == [f"sentence {i}" for i in range(3)]


def test_a_slice_of_a_split_is_read(copies):
    whole, part = (Dataset("wmt14_translate/de-en").read(split).source for split in ("train", "train[2:5]"))
    assert len(whole) == 7
    assert part == whole[2:5]


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
def test_the_kind_of_a_phrase_is_known_and_not_part_of_its_text(name, options, pattern, monkeypatch, tmp_path):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    monkeypatch.setattr(cldr, "phrases", functools.partial(cldr.phrases, per_kind=8))
    monkeypatch.setattr(builders, "HELD_OUT", 20)
    monkeypatch.setattr(builders, "OF_A_LANGUAGE", {"train": 1})
    dataset = Dataset(name, **options)
    dataset.prepare()
    examples = dataset.read("train")
    assert set(examples.kind) == set(cldr.KINDS if name.startswith("cldr_translate") else languages.KINDS)
    assert all(re.fullmatch(pattern, text) for text in examples.texts())


def test_the_kind_cannot_be_asked_for_as_a_text():
    with pytest.raises(ValueError, match=r"text_features: cldr_language has no text 'kind'; valid are text\."):
        Dataset("cldr_language", **CLASSIFIER, text_features="kind")


def test_the_length_and_the_texts_of_examples_are_those_of_the_sides_that_they_have():
    both = Examples(source=["a", "b"], target=["c", "d"])
    assert len(both) == 2 and both.texts() == ["a", "b", "c", "d"]
    source = Examples(source=["a", "b", "c"], label=np.zeros(3, np.int32))
    assert len(source) == 3 and source.texts() == ["a", "b", "c"]
    target = Examples(target=["a"])
    assert len(target) == 1 and target.texts() == ["a"]


def test_a_split_that_the_dataset_has_not_is_refused_with_those_it_has(copies):
    with pytest.raises(ValueError, match=r"no split 'dev'; it has train, validation, and slices"):
        Dataset("wmt14_translate/de-en").read("dev")


@pytest.mark.parametrize("method", ["check_split", "read"])
@pytest.mark.parametrize(("name", "split"), [("glue/sst2", "test"), ("imdb_reviews", "unsupervised")])
def test_a_split_without_labels_is_refused_for_a_classifier(copies, method, name, split):
    with pytest.raises(ValueError, match=rf"{split}.* of {name} has no labels; set config.data.test_split to one"):
        getattr(Dataset(name, **CLASSIFIER), method)(split)


def test_data_prepared_as_tfrecord_is_refused_with_the_command_that_converts_it(copies):
    file = copies / "wmt14_translate/de-en/1.0.0/dataset_info.json"
    info = json.loads(file.read_text())
    try:
        file.write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
        with pytest.raises(
            ValueError, match=r"prepared as tfrecord, .*convert_format --dataset_version_dir=.*de-en/1.0.0"
        ):
            Dataset("wmt14_translate/de-en")
    finally:
        file.write_text(json.dumps(info))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("wmt14_translate/fr-en", {}, r"wmt14_translate/fr-en is not prepared: .*tfds build wmt14_translate/fr-en"),
        ("wmt14_translat/de-en", {}, r"cannot open 'wmt14_translat/de-en'"),
        ("cldr_translate/en-xx", {}, r"cannot open 'cldr_translate/en-xx': Unknown locale 'xx'"),
        ("cldr_language/en", CLASSIFIER, r"cannot open 'cldr_language/en': it has no configs"),
        ("mnist", {}, r"expected a translation dataset, two texts an example; mnist is none"),
        ("lm1b", {}, r"expected a translation dataset, two texts an example; lm1b is none"),
        ("cldr_language", {}, r"expected a translation dataset, two texts an example; cldr_language is none"),
        ("mnist", CLASSIFIER, r"expected a dataset of texts; mnist has none"),
        ("mnist", LM | {"text_features": "text"}, r"expected a dataset of texts; mnist has none"),
        ("glue/stsb", CLASSIFIER, r"needs a dataset with one ClassLabel, .*glue/stsb has .*label \(float32\)"),
        ("trec", CLASSIFIER, r"one ClassLabel, .*trec has label-coarse \(ClassLabel\), label-fine \(ClassLabel\)"),
        ("cldr_translate/en-de", CLASSIFIER, r"one ClassLabel, such as cldr_language; .*en-de has en \(Text\), de"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused_in_one_message(copies, name, options, words):
    with pytest.raises(ValueError, match=f"config.data.dataset: .*{words}|config.data.dataset: {words}"):
        Dataset(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "wmt14_translate/de-en",
            {"source_language": "fr"},
            r"source_language: wmt14_.*/de-en has de and en, not 'fr'",
        ),
        ("wmt14_translate/de-en", LM | {"source_language": "fr"}, r"source_language: .* has de and en, not 'fr'"),
        ("wmt14_translate/de-en", {"text_features": "de"}, r"text_features: a translation reads the two languages"),
        ("imdb_reviews", CLASSIFIER | {"source_language": "en"}, r"source_language: a classifier translates nothing"),
        ("lm1b", LM | {"source_language": "en"}, r"source_language: lm1b is no translation dataset"),
        (
            "wmt14_translate/de-en",
            LM | {"source_language": "de", "text_features": "en"},
            r"source_language: data.text_features already says what to read",
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
        ("ag_news_subset", LM | {"text_features": "title,title"}, r"text_features: 'title,title' names a text twice"),
    ],
)
def test_a_setting_that_the_dataset_or_the_architecture_cannot_follow_is_refused_by_its_name(
    copies, name, options, words
):
    with pytest.raises(ValueError, match=rf"^config\.data\.{words}"):
        Dataset(name, **options)
