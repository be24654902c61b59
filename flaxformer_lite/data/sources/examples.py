"""Examples as text, and random access to them by number."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data.sources import whole_texts
from flaxformer_lite.scores.word_links import ALIGNMENT
from flaxformer_lite.system.errors import InputError

KIND = "kind"  # a feature with this name groups examples in reports; it is never part of a text


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples as text: example i is item i of each list. A list that the model lacks is None.

    A translation model has `source` and `target`, a classifier `source` and `label`, a language
    model `target`. `kind` is set if the dataset has kinds of examples.
    """

    source: list[str] | None = None
    target: list[str] | None = None
    label: np.ndarray | None = None  # int32, indexes of Dataset.label_names
    kind: list[str] | None = None
    alignment: list[str] | None = None  # links of words, '0-0 1-2'; '' without any
    incomplete: int = 0  # number of examples left out because they lack one of the two languages
    kept: np.ndarray | None = None  # numbers of the examples that are not left out; None: all

    def __len__(self) -> int:
        return len((self.target or ()) if self.source is None else self.source)

    def texts(self) -> list[str]:
        """Returns the texts of both sides, the sources first."""
        return [*(self.source or ()), *(self.target or ())]


def complete(examples: Examples) -> Examples:
    """Returns the examples with a text on both sides, and counts the others in `incomplete`."""
    sides = [side for side in (examples.source, examples.target) if side is not None]
    kept = [i for i in range(len(examples)) if all(side[i] for side in sides)]

    def take_kept(values: list[str] | None) -> list[str] | None:
        return None if values is None else [values[i] for i in kept]

    source, target, kind = map(take_kept, (examples.source, examples.target, examples.kind))
    alignment = take_kept(examples.alignment)
    kept_N, left_out = np.array(kept, int), len(examples) - len(kept)
    return Examples(source, target, None, kind, alignment, left_out, kept_N)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Random access to the examples of a split. It contains no example and can be pickled."""

    records: Any  # the data source of TFDS, a sequence of bytes
    name: str  # of the dataset
    split: str
    folder: Path  # of the dataset's files
    # of each file: name, first example, number of examples, size in bytes, time in ns
    files: tuple[tuple[Any, ...], ...]
    # of 'source', 'target', 'label', 'alignment': the separator between features, and their names
    columns: Mapping[str, tuple[str, ...]]
    kind: bool  # whether the examples have a kind
    # the name of a feature with texts in a variable set of languages
    variable_languages: str | None = None
    # the range of characters, if the records are pieces of whole files
    part: whole_texts.Part | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __call__(self, numbers: Sequence[int] | np.ndarray) -> Examples:
        """Returns the examples with these numbers, in this order; a missing language is "".

        Raises:
          InputError: the examples have no labels.
        """
        records = (
            self.records.__getitems__(np.asarray(numbers, int).tolist()) if len(numbers) else []
        )
        examples = [
            tf_example_pb2.Example.FromString(record).features.feature for record in records
        ]
        return Examples(
            source=self._texts("source", examples),
            target=self._targets(numbers, examples),
            label=self._labels(examples) if "label" in self.columns else None,
            kind=[_text(example, KIND) for example in examples] if self.kind else None,
            alignment=self._alignments(examples) if ALIGNMENT in self.columns else None,
        )

    def records_of(self, texts: np.ndarray) -> np.ndarray:
        """Returns the numbers of the records of these texts: their own, if they are not pieces."""
        return texts if self.part is None else self.part.records_of(texts)

    def _targets(
        self, numbers: Sequence[int] | np.ndarray, examples: Sequence[Mapping[str, Any]]
    ) -> list[str] | None:
        targets = self._texts("target", examples)
        if self.part is None or targets is None:
            return targets
        return self.part.cut(numbers, targets)

    def _texts(self, column: str, examples: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """Returns the joined texts of a column, one an example; None if there is no such column."""
        if column not in self.columns:
            return None
        join, *names = self.columns[column]
        texts = [[self._text(example, name) for name in names] for example in examples]
        if self.variable_languages is not None:  # an example may lack a language
            texts = [parts if all(parts) else [] for parts in texts]
        return [join.join(parts) for parts in texts]

    def _text(self, example: Mapping[str, Any], name: str) -> str:
        """Returns the text in the feature, or in the language, `name`."""
        if self.variable_languages is None or name in example:
            return _text(example, name)
        languages, texts = (
            example[f"{self.variable_languages}/{part}"].bytes_list.value
            for part in ("language", "translation")
        )
        pairs = zip(languages, texts, strict=True)
        return next((text for language, text in pairs if language == name.encode()), b"").decode()

    def _alignments(self, examples: Sequence[Mapping[str, Any]]) -> list[str]:
        """Returns the links of each example; "" if it has none."""
        found = [list(example[ALIGNMENT].bytes_list.value) for example in examples]
        return [values[0].decode() if values else "" for values in found]

    def _labels(self, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        name = self.columns["label"][1]
        label = np.array([example[name].int64_list.value[0] for example in examples], np.int32)
        if (label < 0).any():  # the test splits of GLUE, for example
            raise InputError(
                f"config.data: split {self.split!r} of {self.name} has no labels; set "
                "config.data.test_split to one that has, e.g. 'validation'."
            )
        return label


def _text(example: Mapping[str, Any], name: str) -> str:
    return example[name].bytes_list.value[0].decode()
