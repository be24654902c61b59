"""From a dataset's name in the config to examples in memory: any TFDS dataset of texts, embedded ones, one's own."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds

from flaxformer_lite.config import did_you_mean
from flaxformer_lite.data.sources import builders
from flaxformer_lite.data.sources.examples import KIND, Examples, Reader, complete
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.system.errors import InputError

EMBEDDED = ("cldr_translate", "cldr_language")
REGISTERED_BY = ("translate", "text", "summarization")  # modules of TFDS whose import makes WMT, GLUE, ... known
ID_NAMES = ("id", "idx", "uid")  # the last word of a feature that names an example and says nothing


class Dataset:
    """A prepared TFDS dataset as an architecture needs it, read without TensorFlow.

    Attributes:
      sides: of a translation dataset, its two texts in the order they are read; empty if it is none.
      languages: of a translation, (source, target).
      label_names: of a classifier, the name of each label.
      contents: of the user's own text, the SHA-256 of each file by its path.
    """

    def __init__(
        self,
        name: str,
        *,
        architecture: str = "encoder_decoder",
        source_language: str | None = None,
        languages: tuple[str, ...] = (),
        text_features: str | None = None,
        own_text: OwnText | None = None,
    ):
        """
        Args:
          name: TFDS name and config, 'cldr_translate/en-de', or a kind of one's own text.
          architecture: as in the config of the model.
          source_language: translation: the side to translate from; None: the first in the config's name. A language
            model learns both sides of a translation dataset, this one first.
          languages: the two sides, where the dataset has more, or does not say which; empty: as it says.
          text_features: classifier, language model: the texts to read, 'a,b'; None: all that the dataset has.
          own_text: the files, if `name` is a kind of one's own text.

        Raises:
          InputError: there is no such dataset, language or text, it does not suit the architecture, or it is not
            prepared and cannot be here.
        """
        self.name = name
        self.contents: dict[str, str] = {}
        if own_text is None:
            self._builder = _open(name)
        else:
            self._builder, self.contents = builders.own_texts(own_text)
        self.version = str(self._builder.version)
        self.languages: tuple[str, str] | None = None
        self.label_names: list[str] | None = None
        features = self._builder.info.features
        self._texts = [key for key, feature in features.items() if isinstance(feature, tfds.features.Text)]
        spoken = tfds.features.TranslationVariableLanguages
        self._spoken = next((key for key, feature in features.items() if isinstance(feature, spoken)), None)
        self._given = self._checked(languages)
        self._parts: dict[str, Dataset] = {}
        # The features that are read, by name, and what stands between the texts of an example.
        self._source: Sequence[str] = ()
        self._target: Sequence[str] = ()
        self._label: str | None = None
        self._join = "\t" if architecture == "decoder_lm" and self._translation() else "\n"
        if architecture == "encoder_decoder":
            self.languages = self._languages(source_language, text_features)
            self._source, self._target = self.languages[:1], self.languages[1:]
        elif architecture == "encoder_classifier":
            if source_language is not None:
                raise InputError("config.data.source_language: a classifier translates nothing; leave it unset.")
            if languages:
                raise InputError("a classifier translates nothing; leave them unset.", where="config.data.languages")
            self._label = self._class_label()
            self.label_names = list(features[self._label].names)
            self._source = self._chosen(text_features)
        else:
            self._target = self._to_write(source_language, text_features)
        self.sides = tuple([*self._source, *self._target]) if self._reads_both(text_features) else ()
        self._made_here = own_text is not None or name.split("/")[0] in EMBEDDED
        if not self._made_here:
            _check_prepared(name, self._builder)

    def add_part(self, role: str, dataset: "Dataset") -> None:
        """Has 'validation' or 'test' read from another dataset, whose languages or labels are the same.

        Raises:
          InputError: they are others.
        """
        for what, mine, its in (
            ("languages", sorted(self.sides), sorted(dataset.sides)),
            ("labels", self.label_names, dataset.label_names),
        ):
            if mine != its:
                raise InputError(
                    f"config.data.{role}_dataset: {dataset.name} has the {what} {', '.join(its or ['(none)'])}, and "
                    f"{self.name} {', '.join(mine or ['(none)'])}; name one with the same, labels in the same order."
                )
        self._parts[role] = dataset
        self.contents = {**self.contents, **dataset.contents}

    def part(self, role: str) -> "Dataset":
        """The dataset that 'validation' or 'test' is read from: this one, or what `add_part` was given."""
        return self._parts.get(role, self)

    def prepare(self) -> None:
        """Makes the files of an embedded dataset, and of text of one's own, if they are not there yet; also of parts.

        Raises:
          InputError: they cannot be written, or text of one's own has faults.
        """
        if self._made_here:
            builders.prepare(self._builder)
        for dataset in self._parts.values():
            dataset.prepare()

    def check_split(self, split: str) -> None:
        """Raises InputError if there is no such split, or its first example has no label; reads no more than that."""
        reader = self.reader(split)
        if self._label is not None and len(reader):
            reader([0])

    def shared(self, one: str, other: str) -> int:
        """How many examples two splits, or slices of them, have in common."""
        parts = [self._builder.info.splits[split].file_instructions for split in (one, other)]
        ranges = [[(part.filename, part.skip, part.skip + part.take) for part in of_split] for of_split in parts]
        return sum(
            max(0, min(end, end_of_other) - max(begin, begin_of_other))
            for name, begin, end in ranges[0]
            for name_of_other, begin_of_other, end_of_other in ranges[1]
            if name == name_of_other
        )

    def read(self, split: str) -> Examples:
        """All examples of `split`, which may be a slice such as 'train[:10%]'.

        Raises:
          InputError: there is no such split, or its labels are kept secret.
        """
        reader = self.reader(split)
        examples = reader(range(len(reader)))
        return examples if self._spoken is None else complete(examples)

    def reader(self, split: str) -> Reader:
        """Random access to the examples of `split`; none is read yet.

        Raises:
          InputError: there is no such split.
        """
        records = self._open_split(split).data_source
        parts = self._builder.info.splits[split].file_instructions
        columns = {"source": self._source, "target": self._target, "label": [self._label] if self._label else ()}
        return Reader(
            records,
            name=self.name,
            split=split,
            folder=Path(self._builder.data_dir),
            files=tuple(
                (Path(part.filename).name, part.skip, part.take, *_size_and_time(part.filename)) for part in parts
            ),
            columns={
                name: (self._join if len(features) > 1 else "", *features)
                for name, features in columns.items()
                if features
            },
            kind=KIND in self._texts,
            spoken=self._spoken,
        )

    def _open_split(self, split: str) -> Sequence[bytes]:
        raw = tfds.decode.DeserializeMethod.RAW_BYTES  # TFDS's own decoding takes twice as long for plain text
        try:
            return self._builder.as_data_source(split=split, deserialize_method=raw)
        except ValueError as error:
            splits = ", ".join(self._builder.info.splits)
            more = "; data.train_files, validation_files and test_files make one each" if self.contents else ""
            raise InputError(
                f"config.data: {self.name} has no split {split!r}; it has {splits}, and slices of them such as "
                f"'train[:10%]'{more}."
            ) from error

    def _translation(self) -> tuple[str, ...]:
        """The two texts that say the same, as the config or the dataset says; empty if it is no translation dataset."""
        names = tuple(self._builder.info.supervised_keys or ())[:2]
        declared = names if all(name in self._texts for name in names) and len(set(names)) == 2 else ()
        return self._given or declared

    def _checked(self, languages: tuple[str, ...]) -> tuple[str, ...]:
        """`languages`, if the dataset has texts in them."""
        valid = list(self._texts) if self._spoken is None else self._builder.info.features[self._spoken].languages
        for name in languages:
            if valid is not None and name not in valid:
                raise InputError(
                    f"{self.name} has no {name!r}; it has {', '.join(valid)}.", where="config.data.languages"
                )
        return languages

    def _languages(self, source_language: str | None, text_features: str | None) -> tuple[str, str]:
        names = self._translation()
        if not names and self._spoken is not None:
            raise InputError(f"{self.name} has more than two; name the two to read.", where="config.data.languages")
        if not names:
            raise InputError(
                f"expected a translation dataset, two texts an example; {self.name} is none.",
                where="config.data.dataset",
            )
        if text_features is not None:
            raise InputError(
                "config.data.text_features: a translation reads the two languages of its dataset; leave it unset."
            )
        source = names[0] if source_language is None else source_language
        if source not in names:
            raise InputError(
                f"config.data.source_language: {self.name} has {' and '.join(names)}, not {source_language!r}."
            )
        return source, names[1 - names.index(source)]

    def _reads_both(self, text_features: str | None) -> bool:
        return self._label is None and text_features is None and bool(self._translation())

    def _class_label(self) -> str:
        features = self._builder.info.features
        labels = [name for name, feature in features.items() if isinstance(feature, tfds.features.ClassLabel)]
        if len(labels) != 1:
            listed = ", ".join(f"{name} ({_type_name(feature)})" for name, feature in features.items())
            raise InputError(
                "model.architecture='encoder_classifier' needs a dataset with one ClassLabel, "
                f"such as cldr_language; {self.name} has {listed}.",
                where="config.data.dataset",
            )
        return labels[0]

    def _chosen(self, text_features: str | None) -> list[str]:
        """The texts that `text_features` names, or all."""
        valid = [name for name in self._texts if name != KIND]
        if not valid:
            raise InputError(f"expected a dataset of texts; {self.name} has none.", where="config.data.dataset")
        if text_features is None:
            return [name for name in valid if name.split("_")[-1] not in ID_NAMES] or valid
        chosen = [name.strip() for name in text_features.split(",")]
        for name in chosen:
            if name not in valid:
                raise InputError(
                    f"config.data.text_features: {self.name} has no text {name!r}{did_you_mean(name, valid)}"
                )
        if len(set(chosen)) < len(chosen):
            raise InputError(f"config.data.text_features: {text_features!r} names a text twice.")
        return chosen

    def _to_write(self, source_language: str | None, text_features: str | None) -> Sequence[str]:
        """What a language model learns; of a translation dataset both languages, the source first."""
        if source_language is not None and text_features is not None:
            raise InputError("config.data.source_language: data.text_features already says what to read; unset one.")
        if source_language is not None and not self._translation():
            raise InputError(f"config.data.source_language: {self.name} is no translation dataset; leave it unset.")
        if (self._translation() or self._spoken is not None) and text_features is None:
            return self._languages(source_language, None)
        return self._chosen(text_features)


def _type_name(feature: tfds.features.FeatureConnector) -> str:
    """'Text', 'ClassLabel', ...; of plain numbers their dtype."""
    return np.dtype(feature.np_dtype).name if type(feature) is tfds.features.Tensor else type(feature).__name__


def _size_and_time(file: str) -> tuple[int, int]:
    """Bytes of a file and when it was last written, in ns; zeros for one that no file system here has."""
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _open(name: str) -> tfds.core.DatasetBuilder:
    dataset, _, config = name.partition("/")
    try:
        if dataset == "cldr_translate":
            return builders.cldr_translate(config or "en-de")
        if dataset == "cldr_language":
            if config:
                raise InputError("it has no configs; leave out what follows its name")
            return builders.cldr_language()
        for module in REGISTERED_BY:
            importlib.import_module(f"tensorflow_datasets.{module}")
        return builders.open_prepared(name)
    except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
        raise InputError(f"cannot open {name!r}: {str(error).splitlines()[0]}", where="config.data.dataset") from error


def _check_prepared(name: str, builder: tfds.core.DatasetBuilder) -> None:
    file_format = builder.info.file_format.value
    if builder.info.splits and file_format != "array_record":
        raise InputError(
            f"{builder.data_dir} is prepared as {file_format}, and reading needs array_record; "
            "convert it once, where TensorFlow is installed, with: "
            f"python -m tensorflow_datasets.scripts.convert_format --dataset_version_dir={builder.data_dir} "
            f"--out_file_format=array_record --out_dir=NEW/{builder.info.full_name}, and set TFDS_DATA_DIR=NEW",
            where="config.data.dataset",
        )
    if not builder.info.splits:
        raise InputError(
            f"{name} is not prepared: nothing is in {builder.data_dir}; prepare it once, where "
            f"TensorFlow is installed, with: tfds build {name} --file_format=array_record",
            where="config.data.dataset",
        )
