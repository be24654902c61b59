"""Any TFDS translation dataset by its name, either direction, and clear words for what cannot be read."""

import json
import subprocess
import sys

import pytest

from flaxformer_lite.data.datasets import Dataset

# A small copy of a TFDS dataset: the same name, features and folders, written by a process of its own, since TFDS
# registers a name once. TFDS says on standard output what it does.
PREPARE = """
import sys
import tensorflow_datasets as tfds

class Wmt14Translate(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en", description="small")]

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("de", "en"))

    def _split_generators(self, manager):
        return {"train": self._generate_examples(7), "validation": self._generate_examples(3)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"de": f"Satz {i}", "en": f"sentence {i}"}

tfds.disable_progress_bar()
Wmt14Translate(file_format="array_record", config="de-en", data_dir=sys.argv[1]).download_and_prepare()
"""


@pytest.fixture(scope="module")
def wmt_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    subprocess.run([sys.executable, "-c", PREPARE, str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture
def wmt(wmt_folder, monkeypatch):
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(wmt_folder))
    return wmt_folder / "wmt14_translate/de-en/1.0.0"


def test_a_prepared_tfds_dataset_is_read_by_its_name_from_the_side_that_its_name_puts_first(wmt):
    dataset = Dataset("wmt14_translate/de-en")
    dataset.prepare()
    texts = dataset.read("train")
    assert dataset.languages == ("de", "en")
    assert sorted(texts.source) == [f"Satz {i}" for i in range(7)]
    assert [s.split()[1] for s in texts.source] == [t.split()[1] for t in texts.target]
    assert texts.kind is None


def test_source_language_turns_the_direction_around(wmt):
    dataset = Dataset("wmt14_translate/de-en", source_language="en")
    assert dataset.languages == ("en", "de")
    assert sorted(dataset.read("validation").source) == [f"sentence {i}" for i in range(3)]


def test_a_slice_of_a_split_is_read(wmt):
    whole, part = (Dataset("wmt14_translate/de-en").read(split).source for split in ("train", "train[2:5]"))
    assert len(whole) == 7
    assert part == whole[2:5]


def test_a_language_that_the_dataset_has_not_is_refused_with_those_it_has(wmt):
    with pytest.raises(ValueError, match=r"source_language: wmt14_translate/de-en has de and en, not 'fr'"):
        Dataset("wmt14_translate/de-en", source_language="fr")


def test_a_split_that_the_dataset_has_not_is_refused_with_those_it_has(wmt):
    with pytest.raises(ValueError, match=r"no split 'dev'; it has train, validation"):
        Dataset("wmt14_translate/de-en").read("dev")


def test_data_prepared_as_tfrecord_is_refused_with_the_command_that_converts_it(wmt):
    file = wmt / "dataset_info.json"
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
    ("name", "words"),
    [
        ("wmt14_translate/fr-en", r"wmt14_translate/fr-en is not prepared: .*tfds build wmt14_translate/fr-en"),
        ("wmt14_translat/de-en", r"cannot open 'wmt14_translat/de-en'"),
        ("cldr_translate/en-xx", r"cannot open 'cldr_translate/en-xx': Unknown locale 'xx'"),
        ("mnist", r"expected a translation dataset, two texts an example; mnist is none"),
    ],
)
def test_a_name_that_cannot_be_read_is_refused_in_one_message(wmt, name, words):
    with pytest.raises(ValueError, match=f"config.data.dataset: .*{words}|config.data.dataset: {words}"):
        Dataset(name)
