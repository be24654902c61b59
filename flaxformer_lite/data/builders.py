"""TFDS builders whose data is made here, and `prepare`, which any number of processes may call at once."""

import contextlib
import fcntl
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data import cldr, languages

HELD_OUT = 2_000  # examples of validation, and of test, in `cldr_translate`
# Of each kind in each locale, in `cldr_language`: 2,000 examples of validation, and of test, and 47,000 to train on.
OF_A_LANGUAGE = {"validation": 16, "test": 16, "train": 376}


class _SameBytesWriter(writer.ExampleWriter):
    """Writes the features of a record in the order of their names; protobuf orders them anew in each process."""

    def write(self, path: str | PathLike, examples: Iterable[tuple[int, bytes]]) -> None:
        records = ((key, tf_example_pb2.Example.FromString(record)) for key, record in examples)
        super().write(path, ((key, record.SerializeToString(deterministic=True)) for key, record in records))


class CldrTranslate(tfds.core.GeneratorBasedBuilder):
    """Phrases in two locales: dates, durations, money, numbers and names, by Babel from the Unicode CLDR.

    An example has three texts: the phrase under the name of each locale, and its `kind`. The builder config
    is `<source>-<target>`; `cldr_translate` makes it for any two locales, TFDS itself knows the default one.
    """

    VERSION = tfds.core.Version(cldr.VERSION)
    RELEASE_NOTES = {cldr.VERSION: "Corpus number, then the version of the CLDR: the same version has the same bytes."}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="en-de", description="English to German.")]

    def _info(self) -> tfds.core.DatasetInfo:
        source, target = locales_of(self.builder_config.name)
        texts = {name: tfds.features.Text() for name in (source, target, "kind")}
        return tfds.core.DatasetInfo(
            builder=self,
            description="The same value rendered in two locales from the Unicode CLDR.",
            features=tfds.features.FeaturesDict(texts),
            supervised_keys=(source, target),
            homepage="https://cldr.unicode.org",
            disable_shuffling=True,  # the phrases come in random order, and all kinds in turn
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Mapping[str, Iterator]:
        phrases = cldr.phrases(*locales_of(self.builder_config.name))
        return {
            "train": self._generate_examples(phrases[2 * HELD_OUT :]),
            "validation": self._generate_examples(phrases[:HELD_OUT]),
            "test": self._generate_examples(phrases[HELD_OUT : 2 * HELD_OUT]),
        }

    def _generate_examples(self, phrases: Sequence[cldr.Phrase]) -> Iterator[tuple[int, dict[str, str]]]:
        source, target = locales_of(self.builder_config.name)
        for number, phrase in enumerate(phrases):
            yield number, {source: phrase.source, target: phrase.target, "kind": phrase.kind}

    def _example_writer(self) -> writer.ExampleWriter:
        return _SameBytesWriter(self.info.file_format)


class CldrLanguage(tfds.core.GeneratorBasedBuilder):
    """Phrases in 25 locales, to be told apart: dates, durations, measures, money and names, in words, from the CLDR.

    An example has a `text`, its locale as `label`, and its `kind`.
    """

    VERSION = tfds.core.Version(languages.VERSION)
    RELEASE_NOTES = {languages.VERSION: "As of cldr_translate: the same version has the same bytes."}

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=languages.LOCALES)
        features = {"text": tfds.features.Text(), "label": label, "kind": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="The locale of a phrase from the Unicode CLDR.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("text", "label"),
            homepage="https://cldr.unicode.org",
            disable_shuffling=True,  # all kinds and locales come in turn
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> Mapping[str, Iterator]:
        corpora, _ = languages.phrases(*OF_A_LANGUAGE.values())
        return {split: self._generate_examples(corpus) for split, corpus in zip(OF_A_LANGUAGE, corpora, strict=True)}

    def _generate_examples(self, phrases: Sequence[languages.Phrase]) -> Iterator[tuple[int, dict[str, str]]]:
        for number, phrase in enumerate(phrases):
            yield number, phrase._asdict()

    def _example_writer(self) -> writer.ExampleWriter:
        return _SameBytesWriter(self.info.file_format)


def cldr_translate(pair: str = "en-de", data_dir: str | PathLike | None = None) -> CldrTranslate:
    """The builder of `cldr_translate/<pair>`, which reads without TensorFlow.

    Args:
      pair: `<source>-<target>`, two locales as Babel names them.
      data_dir: the folder of all datasets; None is TFDS's own.

    Raises:
      ValueError: `pair` is not two different locales of the CLDR.
    """
    locales_of(pair)
    config = next((known for known in CldrTranslate.BUILDER_CONFIGS if known.name == pair), None)
    config = config or tfds.core.BuilderConfig(name=pair, description="Two locales of the Unicode CLDR.")
    return CldrTranslate(config=config, data_dir=data_dir, file_format="array_record")


def cldr_language(data_dir: str | PathLike | None = None) -> CldrLanguage:
    """The builder of `cldr_language`, which reads without TensorFlow; `data_dir` as in `cldr_translate`."""
    return CldrLanguage(data_dir=data_dir, file_format="array_record")


def locales_of(pair: str) -> tuple[str, str]:
    """The two locale names in `<source>-<target>`.

    Raises:
      ValueError: there are not two, one is unknown, or both are the same.
    """
    names = pair.split("-")
    if len(names) != 2:
        raise ValueError(
            "Expected the config of cldr_translate as <source>-<target>, with an underscore inside a locale, "
            f"like 'en-de' or 'pt_BR-zh_Hant'; got {pair!r}."
        )
    cldr.parse_locales(*names)
    return names[0], names[1]


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Writes the dataset under its TFDS folder, once, however many processes ask for it at the same time.

    Raises:
      ValueError: the folder cannot be written, or holds something else.
    """
    if not _is_prepared(builder):
        try:
            with _locked(builder):
                if not _is_prepared(builder):  # nobody did it while this process waited
                    _remove_leftovers(builder)
                    _generate(builder)
        except OSError as error:
            raise ValueError(
                f"Cannot write the dataset {builder.info.full_name} to {_root(builder)} ({error.strerror or error}); "
                "set TFDS_DATA_DIR or `data_dir` to a folder that can be written."
            ) from error
    if not _is_prepared(builder):  # TFDS leaves an existing folder as it is
        raise ValueError(
            f"Expected a dataset in {builder.data_dir}, got no dataset_info.json there; remove the folder."
        )
    builder.info.read_from_directory(builder.data_path)  # another process may have written it since `builder` was made


def _is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    return (builder.data_path / "dataset_info.json").exists()


def _root(builder: tfds.core.DatasetBuilder) -> Path:
    """The folder of all datasets: the full name, dataset/config/version, is the path below it."""
    return Path(builder.data_dir).parents[builder.info.full_name.count("/")]


@contextlib.contextmanager
def _locked(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds the lock file of the dataset; the system lets go of it when the process dies, however it dies."""
    _root(builder).mkdir(parents=True, exist_ok=True)
    with (_root(builder) / f".{builder.info.full_name.replace('/', '.')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(builder: tfds.core.DatasetBuilder) -> None:
    """Removes what a killed preparation left; needs the lock, or it would remove a running one."""
    target = Path(builder.data_dir)
    for folder in target.parent.glob(f"incomplete.*_{target.name}"):
        shutil.rmtree(folder)


def _generate(builder: tfds.core.DatasetBuilder) -> None:
    """TFDS writes into a folder of its own and renames it last; its bars and greetings are left out."""
    tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    finally:
        tfds.enable_progress_bar()
