"""TFDS builders of the datasets that the package generates: CLDR phrases, and custom text."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_builder, splits, writer
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data.cldr import languages, phrase_families
from flaxformer_lite.data.sources import own_text, text_files, whole_texts
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.sources.preparation import REPORT, SameBytesWriter, data_root, root_of
from flaxformer_lite.data.sources.text_files import LABEL, Corpus, Fault
from flaxformer_lite.scores.word_links import ALIGNMENT
from flaxformer_lite.system.compressed import is_gzip
from flaxformer_lite.system.errors import InputError

HELD_OUT = 2_000  # examples of validation, and of test, in `cldr_translate`
# Examples of `cldr_language` for each kind in each locale. In total 2,000 for validation, 2,000
# for test and 47,000 for training.
OF_A_LANGUAGE = {"validation": 16, "test": 16, "train": 376}
MOST_LABELS = 10_000


class CldrTranslate(tfds.core.GeneratorBasedBuilder):
    """Phrases in two locales, rendered from the Unicode CLDR: dates, money, numbers, names.

    An example has three texts: the phrase in each locale, under the locale's name, and its `kind`.
    The builder config is `<source>-<target>`. `cldr_translate` accepts any two locales; only the
    default pair is registered with TFDS.
    """

    VERSION = tfds.core.Version(phrase_families.VERSION)
    RELEASE_NOTES = {
        phrase_families.VERSION: "Corpus number, then the version of the CLDR: the same version "
        "has the same bytes."
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
            disable_shuffling=True,  # the phrases are already in random order, all kinds in turn
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[Any]]:
        phrases = phrase_families.phrases(*locales_of(self.builder_config.name))
        return {
            "train": self._generate_examples(phrases[2 * HELD_OUT :]),
            "validation": self._generate_examples(phrases[:HELD_OUT]),
            "test": self._generate_examples(phrases[HELD_OUT : 2 * HELD_OUT]),
        }

    def _generate_examples(
        self, phrases: Sequence[phrase_families.Phrase]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        source, target = locales_of(self.builder_config.name)
        for number, phrase in enumerate(phrases):
            yield number, {source: phrase.source, target: phrase.target, "kind": phrase.kind}

    def _example_writer(self) -> writer.ExampleWriter:
        return SameBytesWriter(self.info.file_format)


class CldrLanguage(tfds.core.GeneratorBasedBuilder):
    """Phrases in 25 locales from the CLDR, for language identification.

    The kinds are dates, durations, measures, money and names, all in words. An example has a
    `text`, its locale as `label`, and its `kind`.
    """

    VERSION = tfds.core.Version(languages.VERSION)
    RELEASE_NOTES = {
        languages.VERSION: "As of cldr_translate: the same version has the same bytes."
    }

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=languages.LOCALES)
        features = {"text": tfds.features.Text(), "label": label, "kind": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="The locale of a phrase from the Unicode CLDR.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("text", "label"),
            homepage="https://cldr.unicode.org",
            disable_shuffling=True,  # all kinds and locales are already in turn
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[Any]]:
        corpora, _ = languages.phrases(*OF_A_LANGUAGE.values())
        return {
            split: self._generate_examples(corpus)
            for split, corpus in zip(OF_A_LANGUAGE, corpora, strict=True)
        }

    def _generate_examples(
        self, phrases: Sequence[languages.Phrase]
    ) -> Iterator[tuple[int, dict[str, str]]]:
        for number, phrase in enumerate(phrases):
            yield number, phrase._asdict()

    def _example_writer(self) -> writer.ExampleWriter:
        return SameBytesWriter(self.info.file_format)


class TextFiles(dataset_builder.FileReaderBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Pairs of texts, texts, or labelled texts, from the user's files, in the order of the lines.

    The config's name contains the fingerprint of the files, so other files are another dataset.
    TFDS would keep all texts in memory to sort them; here they are written one at a time, in order.
    """

    VERSION = tfds.core.Version(f"{own_text.FORMAT}.0.0")
    RELEASE_NOTES = {
        str(VERSION): "The version of the reader; a hash of the files is in the config's name."
    }

    def __init__(self, own: OwnText, corpora: Mapping[str, Corpus], **options: Any):
        """
        Args:
          corpora: the files of each split, with `labels` if the texts have labels.
          options: as for any builder.
        """
        self._own, self._corpora = own, corpora  # before super().__init__, which calls `_info`
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        corpus = next(iter(self._corpora.values()))
        if self._own.kind == "parallel_text":
            keys = corpus.fields[:2]
            features = tfds.features.Translation(languages=keys)
            if any(ALIGNMENT in each.fields for each in self._corpora.values()):
                texts = {name: tfds.features.Text() for name in (*keys, ALIGNMENT)}
                features = tfds.features.FeaturesDict(texts)
        else:
            features = {name: tfds.features.Text() for name in corpus.fields if name != LABEL}
            keys = None
            if corpus.labels is not None:
                keys = next(iter(features)), LABEL
                features[LABEL] = tfds.features.ClassLabel(names=corpus.labels)
            features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"{self._own.kind} from {dict(self._own.files)}",
            features=features,
            supervised_keys=keys,
            disable_shuffling=True,
        )

    def _download_and_prepare(
        self, dl_manager: tfds.download.DownloadManager, download_config: object = None
    ) -> None:
        """Checks all files, then writes the dataset; an exception leaves nothing behind."""
        with contextlib.ExitStack() as stack:
            listing = None
            if self._own.faults == "drop":
                report = Path(self.data_dir) / REPORT
                listing = stack.enter_context(
                    report.open("w", encoding="utf-8", errors="surrogateescape")
                )
            found = text_files.check(self._corpora, listing)
        self.info.set_splits(
            splits.SplitDict([self._write(split, found[split].shards) for split in found])
        )
        for split, corpus in self._corpora.items():
            if corpus.form == whole_texts.FORM:
                whole_texts.write_index(corpus, Path(self.data_dir), split)
        if identify(self._own, self._corpora, root_of(self))[0] != self.builder_config.name:
            raise InputError(
                f"{self._own.kind}: a file has changed while it was read; start again when all "
                "files are complete."
            )

    def _write(self, split: str, shards: Sequence[int]) -> splits.SplitInfo:
        """Writes a split as files with `shards[i]` examples each."""
        template, records = self._get_filename_template(split_name=split), self.records(split)
        paths = [
            template.sharded_filepath(shard_index=i, num_shards=len(shards))
            for i in range(len(shards))
        ]
        for path, size in zip(paths, shards, strict=True):
            writer.ExampleWriter(self.info.file_format).write(path, itertools.islice(records, size))
        written = sum(Path(path).stat().st_size for path in paths)
        return splits.SplitInfo(
            name=split, shard_lengths=list(shards), num_bytes=written, filename_template=template
        )

    def records(self, split: str) -> Iterator[tuple[int, bytes]]:
        """Yields the well-formed examples of a split as (number, serialised `tf.train.Example`)."""
        corpus = self._corpora[split]
        numbers = corpus.numbers or {}
        for number, texts in enumerate(
            example.texts for example in corpus if example.texts is not None
        ):
            record = tf_example_pb2.Example()
            for name, text in zip(corpus.fields, texts, strict=True):
                feature = record.features.feature[name]
                if name == LABEL:
                    feature.int64_list.value.append(numbers[text])
                else:
                    feature.bytes_list.value.append(text.encode())
            yield number, record.SerializeToString(deterministic=True)


def cldr_translate(
    pair: str = "en-de", data_dir: str | PathLike[str] | None = None
) -> CldrTranslate:
    """Returns the builder of `cldr_translate/<pair>`, which reads without TensorFlow.

    Args:
      pair: `<source>-<target>`, two of Babel's locale names.
      data_dir: the folder of all datasets; None: `data_root()`.

    Raises:
      InputError: `pair` is not two different locales of the CLDR.
    """
    locales_of(pair)
    config = next((known for known in CldrTranslate.BUILDER_CONFIGS if known.name == pair), None)
    config = config or tfds.core.BuilderConfig(
        name=pair, description="Two locales of the Unicode CLDR."
    )
    return CldrTranslate(
        config=config, data_dir=data_dir or data_root(), file_format="array_record"
    )


def cldr_language(data_dir: str | PathLike[str] | None = None) -> CldrLanguage:
    """Returns the builder of `cldr_language`; `data_dir` as in `cldr_translate`."""
    return CldrLanguage(data_dir=data_dir or data_root(), file_format="array_record")


def own_texts(
    own: OwnText, data_dir: str | PathLike[str] | None = None
) -> tuple[tfds.core.DatasetBuilder, dict[str, str]]:
    """Returns the builder of text files, and the SHA-256 of each file by its path.

    Reads new files once for their digest, and again for the labels if the dataset is not prepared.

    Args:
      own: the files.
      data_dir: as in `cldr_translate`.

    Raises:
      InputError: a file is missing or cannot be read, or the files do not match each other or their
        kind.
    """
    corpora = own_text.corpora(own)
    root = Path(data_dir or data_root())
    name, contents = identify(own, corpora, root)
    folder = root / TextFiles.name / name / str(TextFiles.VERSION)
    if (folder / "dataset_info.json").exists():
        return tfds.builder_from_directory(folder), contents
    if own.kind == "labelled_text":
        labels = own.labels or label_names(corpora)
        corpora = {
            split: dataclasses.replace(corpus, labels=labels) for split, corpus in corpora.items()
        }
    config = tfds.core.BuilderConfig(name=name, description=own.kind)
    return TextFiles(
        own, corpora, config=config, data_dir=root, file_format="array_record"
    ), contents


def label_names(found: Mapping[str, Corpus]) -> tuple[str, ...]:
    """Returns the labels of the training split, sorted.

    Raises:
      InputError: there is no training split, or it has fewer than 2 or over MOST_LABELS labels.
    """
    if "train" not in found:
        raise InputError(
            "config.data.train_files: labelled_text takes its labels from these files, and none "
            "are set; set them."
        )
    labels: set[str] = set()
    faults: list[Fault] = []
    path = found["train"].rows[0][0]
    for example in found["train"]:
        if example.texts is not None:
            labels.add(example.texts[found["train"].fields.index(LABEL)])
        elif not faults:
            faults += example.faults
        if len(labels) > MOST_LABELS:
            raise InputError(
                f"{path}: over {MOST_LABELS:,} different labels; put the label first, then the "
                "text."
            )
    if len(labels) < 2:
        first = [
            f"; the first malformed line has {fault.sort} at {fault.where} ({fault.what})"
            for fault in faults
        ]
        raise InputError(
            f"{path}: expected two labels or more, got "
            f"{', '.join(labels) or 'none'}{''.join(first)}."
        )
    return tuple(sorted(labels))


def identify(own: OwnText, corpora: Mapping[str, Corpus], root: Path) -> tuple[str, dict[str, str]]:
    """Returns the config's name for these files, and their digests, cached in a file in `root`."""
    contents = own_text.digests(corpora, root / f".{TextFiles.name}.json")
    return f"{own.kind}-{fingerprint(own, corpora, contents)}", contents


def fingerprint(own: OwnText, found: Mapping[str, Corpus], contents: Mapping[str, str]) -> str:
    """Returns 20 hexadecimal digits of all that the dataset depends on: files and settings."""
    files = {
        split: [[(contents[path], is_gzip(path)) for path in paths] for paths in corpus.rows]
        for split, corpus in found.items()
    }
    read: dict[str, tuple[Any, ...]] = {
        split: (corpus.form, corpus.fields) for split, corpus in found.items()
    }
    for split, corpus in found.items():
        if corpus.header or corpus.quoted:  # others keep the fingerprint that they always had
            read[split] += (corpus.header, corpus.quoted, corpus.columns)
    how = (own_text.FORMAT, own.kind, own.labels, own.longest_line, own.faults)
    return hashlib.sha256(json.dumps((how, read, files), sort_keys=True).encode()).hexdigest()[:20]


def locales_of(pair: str) -> tuple[str, str]:
    """Returns the two locale names of `<source>-<target>`.

    Raises:
      InputError: there are not two names, one is unknown, or both are the same.
    """
    names = pair.split("-")
    if len(names) != 2:
        raise InputError(
            "Expected the config of cldr_translate as <source>-<target>, with an underscore "
            f"inside a locale, such as 'en-de' or 'pt_BR-zh_Hant'; got {pair!r}."
        )
    phrase_families.parse_locales(*names)
    return names[0], names[1]
