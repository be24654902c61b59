"""Datasets by their name in the config: TFDS datasets, generated ones, and custom text."""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from flaxformer_lite.data.sources import builders, generated, preparation, whole_texts
from flaxformer_lite.data.sources.examples import KIND, Examples, Reader, complete
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.scores.word_links import ALIGNMENT
from flaxformer_lite.system.errors import InputError, did_you_mean

# modules of TFDS whose import registers WMT, GLUE, ...
REGISTERED_BY = ("translate", "text", "summarization")
ID_NAMES = ("id", "idx", "uid")  # last words of features that are identifiers and not text


class Dataset:
    """A prepared TFDS dataset with the columns of an architecture; reads without TensorFlow.

    Attributes:
      sides: the two texts of a translation dataset in reading order; empty for other datasets.
      languages: (source, target) of a translation model.
      label_names: the name of each label of a classifier.
      contents: the SHA-256 of each file of custom text, by its path.
      unit: what a slice of a split counts.
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
          name: TFDS name and config, such as 'cldr_translate/en-de', or a kind of custom text.
          architecture: as in the config of the model.
          source_language: for translation, the side to translate from; None: the first in the
            config's name. A language model learns both sides of a translation dataset, this one
            first.
          languages: the two sides, if the dataset has more than two texts or declares no pair;
            empty: the declared pair.
          text_features: for a classifier or language model, the texts to read, such as 'a,b';
            None: all texts.
          own_text: the files, if `name` is a kind of custom text.

        Raises:
          InputError: the dataset, language or text does not exist, it does not match the
            architecture, or it is not prepared and cannot be generated.
        """
        self.name = name
        self.contents: dict[str, str] = {}
        if own_text is None:
            self._builder = _open(name)
        else:
            self._builder, self.contents = builders.own_texts(own_text)
        self.version = str(self._builder.version)
        self._has_whole_files = own_text is not None and own_text.whole_files
        self.unit = "characters" if self._has_whole_files else "examples"
        self.languages: tuple[str, str] | None = None
        self.label_names: list[str] | None = None
        self._texts = self._features_of_type(tfds.features.Text)
        variable = self._features_of_type(tfds.features.TranslationVariableLanguages)
        self._variable_languages = variable[0] if variable else None
        self._chosen_sides = self._checked(languages)
        self._parts: dict[str, Dataset] = {}
        # The names of the features to read, and the separator between texts of an example.
        self._source: Sequence[str] = ()
        self._target: Sequence[str] = ()
        self._label: str | None = None
        self._join = "\n"
        if architecture == "decoder_lm" and self._translation():
            self._join = getattr(self._builder, "SEPARATOR", "\t")
        if architecture == "encoder_decoder":
            self.languages = self._languages(source_language, text_features)
            self._source, self._target = self.languages[:1], self.languages[1:]
        elif architecture == "encoder_classifier":
            _check_no_translation(source_language, languages)
            self._label = self._class_label()
            self.label_names = list(self._builder.info.features[self._label].names)
            self._source = self._chosen_texts(text_features)
        else:
            self._target = self._texts_to_generate(source_language, text_features)
        self.sides = self.text_names if self._reads_both(text_features) else ()
        self._to_generate = own_text is not None or name.split("/")[0] in preparation.GENERATED
        if not self._to_generate:
            preparation.check_prepared(name, self._builder)

    @property
    def text_names(self) -> tuple[str, ...]:
        """The names of the texts to read, the sources first."""
        return (*self._source, *self._target)

    def add_part(self, role: str, dataset: "Dataset") -> None:
        """Reads 'validation' or 'test' from another dataset with the same languages or labels.

        Raises:
          InputError: the languages or labels differ.
        """
        for what, mine, its in (
            ("languages", sorted(self.sides), sorted(dataset.sides)),
            ("labels", self.label_names, dataset.label_names),
        ):
            if mine != its:
                raise InputError(
                    f"config.data.{role}_dataset: expected the {what} of {self.name}, "
                    f"{', '.join(mine or ['(none)'])}, got {dataset.name} with "
                    f"{', '.join(its or ['(none)'])}; choose a dataset with the same {what}, "
                    "labels in the same order."
                )
        self._parts[role] = dataset
        self.contents = {**self.contents, **dataset.contents}

    def part(self, role: str) -> "Dataset":
        """Returns the dataset that 'validation' or 'test' is read from, by default this one."""
        return self._parts.get(role, self)

    def prepare(self) -> None:
        """Generates the files of this dataset and its parts, unless they exist.

        Raises:
          InputError: the files cannot be written, or custom text has malformed lines.
        """
        if self._to_generate:
            preparation.prepare(self._builder)
            self._to_generate = False
        for dataset in self._parts.values():
            dataset.prepare()

    def check_split(self, split: str) -> None:
        """Raises InputError if the split does not exist, or its first example has no label."""
        reader = self.reader(split)
        if self._label is not None and len(reader):
            reader([0])

    def shared(self, one: str, other: str) -> int:
        """Returns the number of examples that two splits, or slices of them, have in common.

        Of whole files it is the number of characters.
        """
        if self._has_whole_files:
            wholes = [self._part(split) for split in (one, other)]
            return wholes[0].overlap(wholes[1]) if wholes[0] and wholes[1] else 0
        parts = [self._builder.info.splits[split].file_instructions for split in (one, other)]
        ranges = [
            [(part.filename, part.skip, part.skip + part.take) for part in of_split]
            for of_split in parts
        ]
        return sum(
            max(0, min(end, other_end) - max(start, other_start))
            for name, start, end in ranges[0]
            for other_name, other_start, other_end in ranges[1]
            if name == other_name
        )

    def read(self, split: str) -> Examples:
        """Returns all examples of `split`, which may be a slice such as 'train[:10%]'.

        Raises:
          InputError: the split does not exist, or its examples have no labels.
        """
        reader = self.reader(split)
        examples = reader(range(len(reader)))
        return examples if self._variable_languages is None else complete(examples)

    def reader(self, split: str, *, alignments: bool = False) -> Reader:
        """Returns random access to the examples of `split`, without reading any.

        Raises:
          InputError: the split does not exist; or the dataset has no alignments, and they are read.
        """
        if alignments and ALIGNMENT not in self._texts:
            raise InputError(
                f"config.train.guided_alignment: needs alignments, and {self.name} has none; set "
                "data.train_alignments, or leave this unset."
            )
        part = self._part(split)
        of_records = split if part is None else part.of_records
        records = self._open_split(of_records).data_source
        parts = self._builder.info.splits[of_records].file_instructions
        columns = {
            "source": self._source,
            "target": self._target,
            "label": [self._label] if self._label else (),
            ALIGNMENT: [ALIGNMENT] if alignments else (),
        }
        return Reader(
            records,
            name=self.name,
            split=split,
            folder=Path(self._builder.data_dir),
            files=tuple(
                (Path(part.filename).name, part.skip, part.take, *_size_and_time(part.filename))
                for part in parts
            ),
            columns={
                name: (self._join if len(features) > 1 else "", *features)
                for name, features in columns.items()
                if features
            },
            kind=KIND in self._texts,
            variable_languages=self._variable_languages,
            part=part,
        )

    def _part(self, split: str) -> whole_texts.Part | None:
        """Returns the characters of `split`; None if its examples are not whole files."""
        folder = Path(self._builder.data_dir)
        return whole_texts.part(split, folder) if self._has_whole_files else None

    def _open_split(self, split: str) -> Any:
        # For plain text, TFDS's decoding takes 2 times as long.
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        try:
            return self._builder.as_data_source(split=split, deserialize_method=raw)
        except ValueError as error:
            name = f"config.data: {split!r} of {self.name}"
            if found := re.search(r"(\[.*\]) incompatible with (\d+) examples", str(error)):
                raise InputError(
                    f"{name}: the split has {int(found[2]):,} examples; change {found[1]}."
                ) from error
            if self._is_empty(split):
                raise InputError(f"{name} has no example; take a larger slice.") from error
            splits = ", ".join(self._builder.info.splits)
            more = "; set the data.*_files of the missing one" if self.contents else ""
            raise InputError(
                f"config.data: {self.name} has no split {split!r}; it has {splits}, and slices "
                f"of them such as 'train[:10%]'{more}."
            ) from error

    def _is_empty(self, split: str) -> bool:
        """Whether `split` is a slice, of splits that exist, without an example."""
        try:
            return not self._builder.info.splits[split].file_instructions
        except (ValueError, KeyError):
            return False

    def _translation(self) -> tuple[str, ...]:
        """Returns the pair of sides from the config or the dataset; empty if it declares none."""
        names = tuple(self._builder.info.supervised_keys or ())[:2]
        is_pair = all(name in self._texts for name in names) and len(set(names)) == 2
        return self._chosen_sides or (names if is_pair else ())

    def _checked(self, languages: tuple[str, ...]) -> tuple[str, ...]:
        """Returns `languages`; raises InputError if the dataset lacks one of them."""
        valid = (
            list(self._texts)
            if self._variable_languages is None
            else self._builder.info.features[self._variable_languages].languages
        )
        for name in languages:
            if valid is not None and name not in valid:
                raise InputError(
                    f"{self.name} has no {name!r}; it has {', '.join(valid)}.",
                    where="config.data.languages",
                )
        return languages

    def _languages(self, source_language: str | None, text_features: str | None) -> tuple[str, str]:
        names = self._translation()
        if not names and self._variable_languages is not None:
            raise InputError(
                f"{self.name} has more than two languages; name the two to read.",
                where="config.data.languages",
            )
        if not names:
            raise InputError(
                f"expected a translation dataset, two texts an example; {self.name} is not one.",
                where="config.data.dataset",
            )
        if text_features is not None:
            raise InputError(
                "config.data.text_features: a translation model reads the two languages of its "
                "dataset; leave it unset."
            )
        source = names[0] if source_language is None else source_language
        if source not in names:
            raise InputError(
                f"config.data.source_language: {self.name} has {' and '.join(names)}, not "
                f"{source_language!r}."
            )
        return source, names[1 - names.index(source)]

    def _reads_both(self, text_features: str | None) -> bool:
        return self._label is None and text_features is None and bool(self._translation())

    def _features_of_type(self, kind: type) -> list[str]:
        features = self._builder.info.features
        return [name for name, feature in features.items() if isinstance(feature, kind)]

    def _class_label(self) -> str:
        features = self._builder.info.features
        labels = self._features_of_type(tfds.features.ClassLabel)
        if len(labels) != 1:
            listed = ", ".join(
                f"{name} ({_type_name(feature)})" for name, feature in features.items()
            )
            raise InputError(
                "model.architecture='encoder_classifier' needs a dataset with one ClassLabel, "
                f"such as cldr_language; {self.name} has {listed}.",
                where="config.data.dataset",
            )
        return labels[0]

    def _chosen_texts(self, text_features: str | None) -> list[str]:
        """Returns the texts in `text_features`, or all texts but identifiers."""
        valid = [name for name in self._texts if name != KIND]
        if not valid:
            raise InputError(
                f"expected a dataset of texts; {self.name} has none.", where="config.data.dataset"
            )
        if text_features is None:
            return [name for name in valid if name.split("_")[-1] not in ID_NAMES] or valid
        chosen = [name.strip() for name in text_features.split(",")]
        for name in chosen:
            if name not in valid:
                raise InputError(
                    f"config.data.text_features: {self.name} has no text "
                    f"{name!r}{did_you_mean(name, valid)}"
                )
        if len(set(chosen)) < len(chosen):
            raise InputError(
                f"config.data.text_features: {text_features!r} has a duplicate; name each text "
                "once."
            )
        return chosen

    def _texts_to_generate(
        self, source_language: str | None, text_features: str | None
    ) -> Sequence[str]:
        """Returns the texts of a language model; a translation dataset has both, source first."""
        if source_language is not None and text_features is not None:
            raise InputError(
                "config.data.source_language: data.text_features already selects the texts; "
                "unset one of the two."
            )
        if source_language is not None and not self._translation():
            raise InputError(
                f"config.data.source_language: {self.name} is not a translation dataset; leave it "
                "unset."
            )
        if (self._translation() or self._variable_languages is not None) and text_features is None:
            return self._languages(source_language, None)
        return self._chosen_texts(text_features)


def _check_no_translation(source_language: str | None, languages: tuple[str, ...]) -> None:
    """Raises InputError if a classifier has a field for translations."""
    fields = {"source_language": source_language, "languages": languages or None}
    for name, value in fields.items():
        if value is not None:
            raise InputError(
                "a classifier does not translate; leave it unset.", where=f"config.data.{name}"
            )


def _type_name(feature: tfds.features.FeatureConnector) -> str:
    """Returns 'Text', 'ClassLabel', ...; for a plain number its dtype."""
    if type(feature) is tfds.features.Tensor:
        return np.dtype(feature.np_dtype).name
    return type(feature).__name__


def _size_and_time(file: str) -> tuple[int, int]:
    """Returns size in bytes and time of last write in ns; zeros if the file is not on this host."""
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _open(name: str) -> tfds.core.DatasetBuilder:
    dataset, _, config = name.partition("/")
    try:
        if dataset in preparation.GENERATED:
            return generated.builder(dataset, config)
        for module in REGISTERED_BY:
            importlib.import_module(f"tensorflow_datasets.{module}")
        return preparation.open_prepared(name)
    except InputError as error:
        raise InputError(f"cannot open {name!r}: {error}", where="config.data.dataset") from error
