"""TFDS builders: phrases from the CLDR, texts of the user's own; and `prepare`, for any number of processes at once."""

import contextlib
import dataclasses
import io
import itertools
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_builder, splits, writer
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data.cldr import languages, phrase_families
from flaxformer_lite.data.sources import own_text, text_files
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.sources.text_files import LABEL, Corpus
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import check_bucket, fetch, in_bucket, locked, on_disk, place

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

    VERSION = tfds.core.Version(phrase_families.VERSION)
    RELEASE_NOTES = {
        phrase_families.VERSION: "Corpus number, then the version of the CLDR: the same version has the same bytes."
    }
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
        phrases = phrase_families.phrases(*locales_of(self.builder_config.name))
        return {
            "train": self._generate_examples(phrases[2 * HELD_OUT :]),
            "validation": self._generate_examples(phrases[:HELD_OUT]),
            "test": self._generate_examples(phrases[HELD_OUT : 2 * HELD_OUT]),
        }

    def _generate_examples(self, phrases: Sequence[phrase_families.Phrase]) -> Iterator[tuple[int, dict[str, str]]]:
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


class TextFiles(dataset_builder.FileReaderBuilder, skip_registration=True):
    """Pairs of texts, texts, or texts with a label, from files of the user's own, in the order of their lines.

    The name of the config is the fingerprint of the files, so that other files are another dataset. TFDS would keep
    texts in memory to sort them; these are in order, and are written one at a time.
    """

    VERSION = tfds.core.Version(f"{own_text.FORMAT}.0.0")
    RELEASE_NOTES = {str(VERSION): "How files are read; what is in them is in the name of the config."}
    REPORT = "faults.txt"  # beside the data, where faults are dropped

    def __init__(self, own: OwnText, corpora: Mapping[str, Corpus], **options):
        """`corpora` know their labels, if `own` has any; `options` as of any builder."""
        self._own, self._corpora = own, corpora  # `_info` is called next
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        corpus = next(iter(self._corpora.values()))
        features = tfds.features.Translation(languages=corpus.fields)
        keys = corpus.fields
        if self._own.kind != "parallel_text":
            texts = {name: tfds.features.Text() for name in corpus.fields if name != LABEL}
            label = {} if corpus.labels is None else {LABEL: tfds.features.ClassLabel(names=corpus.labels)}
            features, keys = tfds.features.FeaturesDict(texts | label), (next(iter(texts)), LABEL) if label else None
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{self._own.kind} from {dict(self._own.files)}",
            features=features,
            supervised_keys=keys,
            disable_shuffling=True,
        )

    def _download_and_prepare(self, dl_manager: tfds.download.DownloadManager, download_config: object = None) -> None:
        """Checks all files, then writes; whatever is raised leaves nothing behind."""
        report = Path(self.data_dir) / self.REPORT
        with report.open("w", encoding="utf-8") if self._own.faults == "drop" else contextlib.nullcontext() as listing:
            found = text_files.check(self._corpora, listing)
        self.info.set_splits(splits.SplitDict([self._write(split, found[split].shards) for split in found]))
        if identify(self._own, self._corpora, _root(self))[0] != self.builder_config.name:
            raise InputError(
                f"{self._own.kind}: a file has changed while it was read; start again when all are written."
            )

    def _write(self, split: str, shards: Sequence[int]) -> splits.SplitInfo:
        """Writes a split into files of so many examples."""
        template, records = self._get_filename_template(split_name=split), self._records(split)
        paths = [template.sharded_filepath(shard_index=i, num_shards=len(shards)) for i in range(len(shards))]
        for path, size in zip(paths, shards, strict=True):
            writer.ExampleWriter(self.info.file_format).write(path, itertools.islice(records, size))
        written = sum(Path(path).stat().st_size for path in paths)
        return splits.SplitInfo(name=split, shard_lengths=list(shards), num_bytes=written, filename_template=template)

    def _records(self, split: str) -> Iterator[tuple[int, bytes]]:
        """The examples without faults, each with its number, as TFDS writes them."""
        corpus = self._corpora[split]
        for number, texts in enumerate(example.texts for example in corpus if example.texts is not None):
            record = tf_example_pb2.Example()
            for name, text in zip(corpus.fields, texts, strict=True):
                feature = record.features.feature[name]
                if name == LABEL:
                    feature.int64_list.value.append(corpus.numbers[text])
                else:
                    feature.bytes_list.value.append(text.encode())
            yield number, record.SerializeToString(deterministic=True)


def data_root() -> Path:
    """The folder of all datasets on this disk: `TFDS_DATA_DIR`, or if that is in a bucket, where copies of it are kept.

    Examples are read at random from files that are mapped into memory, which those in a bucket cannot be.
    """
    return on_disk(place(tfds.core.constants.DATA_DIR), "data").expanduser()


def open_prepared(name: str) -> tfds.core.DatasetBuilder:
    """The builder of a dataset that TFDS knows, which a bucket in `TFDS_DATA_DIR` may have.

    Raises:
      InputError: the bucket cannot be read, or as `tfds.builder`.
    """
    root = place(tfds.core.constants.DATA_DIR)
    if not in_bucket(root):
        return tfds.builder(name)
    check_bucket(root)
    dataset, how = tfds.core.naming.parse_builder_name_kwargs(name)
    folder = "/".join([str(dataset), *(how[part] for part in ("config", "version") if how.get(part))])
    if not (root / folder).is_dir():
        raise InputError(f"nothing is in {root / folder}")
    below = sorted(entry.name for entry in (root / folder).iterdir())
    configs = [name for name in below if not (name.startswith(".") or tfds.core.Version.is_valid(name))]
    if "config" not in how and configs:  # of which one may be as large as all others
        raise InputError(f"{root} has {', '.join(configs)} of it; name one, as in {dataset}/{configs[0]}")
    fetch(root / folder, data_root() / folder)
    return tfds.builder(name, data_dir=data_root())


def cldr_translate(pair: str = "en-de", data_dir: str | PathLike | None = None) -> CldrTranslate:
    """The builder of `cldr_translate/<pair>`, which reads without TensorFlow.

    Args:
      pair: `<source>-<target>`, two locales as Babel names them.
      data_dir: the folder of all datasets; None is TFDS's own.

    Raises:
      InputError: `pair` is not two different locales of the CLDR.
    """
    locales_of(pair)
    config = next((known for known in CldrTranslate.BUILDER_CONFIGS if known.name == pair), None)
    config = config or tfds.core.BuilderConfig(name=pair, description="Two locales of the Unicode CLDR.")
    return CldrTranslate(config=config, data_dir=data_dir or data_root(), file_format="array_record")


def cldr_language(data_dir: str | PathLike | None = None) -> CldrLanguage:
    """The builder of `cldr_language`, which reads without TensorFlow; `data_dir` as in `cldr_translate`."""
    return CldrLanguage(data_dir=data_dir or data_root(), file_format="array_record")


def own_texts(own: OwnText, data_dir: str | PathLike | None = None) -> tuple[tfds.core.DatasetBuilder, dict[str, str]]:
    """The builder of text files, and the SHA-256 of each of them by its path.

    Reads all files once if they have not been seen before, and the labels if the dataset is not prepared.

    Args:
      own: which files.
      data_dir: as in `cldr_translate`.

    Raises:
      InputError: a file is missing or cannot be read, or the files do not suit each other or their kind.
    """
    corpora = own_text.corpora(own)
    root = Path(data_dir or data_root())
    name, contents = identify(own, corpora, root)
    folder = root / TextFiles.name / name / str(TextFiles.VERSION)
    if (folder / "dataset_info.json").exists():
        return tfds.builder_from_directory(folder), contents
    if own.kind == "labelled_text":
        labels = own.labels or own_text.label_names(corpora)
        corpora = {split: dataclasses.replace(corpus, labels=labels) for split, corpus in corpora.items()}
    config = tfds.core.BuilderConfig(name=name, description=own.kind)
    return TextFiles(own, corpora, config=config, data_dir=root, file_format="array_record"), contents


def identify(own: OwnText, corpora: Mapping[str, Corpus], root: Path) -> tuple[str, dict[str, str]]:
    """The name of the config for these files, and their digests, which are kept in a file below `root`."""
    contents = own_text.digests(corpora, root / f".{TextFiles.name}.json")
    return f"{own.kind}-{own_text.fingerprint(own, corpora, contents)}", contents


def locales_of(pair: str) -> tuple[str, str]:
    """The two locale names in `<source>-<target>`.

    Raises:
      InputError: there are not two, one is unknown, or both are the same.
    """
    names = pair.split("-")
    if len(names) != 2:
        raise InputError(
            "Expected the config of cldr_translate as <source>-<target>, with an underscore inside a locale, "
            f"like 'en-de' or 'pt_BR-zh_Hant'; got {pair!r}."
        )
    phrase_families.parse_locales(*names)
    return names[0], names[1]


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Writes the dataset under its TFDS folder, once, however many processes ask for it at the same time.

    What was left out of text of one's own is told each time.

    Raises:
      InputError: the folder cannot be written, or holds something else.
    """
    if not _is_prepared(builder):
        try:
            with _locked(builder):
                if not _is_prepared(builder):  # nobody did it while this process waited
                    _remove_leftovers(builder)
                    _generate(builder)
        except OSError as error:
            raise InputError(
                f"Cannot write the dataset {builder.info.full_name} to {_root(builder)} ({error.strerror or error}); "
                "set TFDS_DATA_DIR or `data_dir` to a folder that can be written."
            ) from error
    if not _is_prepared(builder):  # TFDS leaves an existing folder as it is
        raise InputError(
            f"Expected a dataset in {builder.data_dir}, got no dataset_info.json there; remove the folder."
        )
    builder.info.read_from_directory(builder.data_path)  # another process may have written it since `builder` was made
    for line in _left_out(builder):
        print(line, file=sys.stderr, flush=True)


def _left_out(builder: tfds.core.DatasetBuilder) -> list[str]:
    """How many examples of each split had faults and were left out, as the end of the report of faults says."""
    report = Path(builder.data_dir) / TextFiles.REPORT
    if not report.exists():
        return []
    with report.open("rb") as file:
        file.seek(max(0, report.stat().st_size - 4096))  # before it, a line for each fault
        counts = file.read().decode(errors="replace").splitlines()[-len(builder.info.splits) :]
    kind = builder.info.config_name.rpartition("-")[0]
    return [f"{kind}, {line}; left out, see {report}" for line in counts if ": 0 of " not in line]


def _is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    return (builder.data_path / "dataset_info.json").exists()


def _root(builder: tfds.core.DatasetBuilder) -> Path:
    """The folder of all datasets: the full name, dataset/config/version, is the path below it."""
    return Path(builder.data_dir).parents[builder.info.full_name.count("/")]


@contextlib.contextmanager
def _locked(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Holds the lock file of the dataset."""
    _root(builder).mkdir(parents=True, exist_ok=True)
    with locked(_root(builder) / f".{builder.info.full_name.replace('/', '.')}.lock"):
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
