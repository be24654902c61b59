"""Examples as text, and the reader that has them by their numbers."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.system.errors import InputError

KIND = "kind"  # a feature of this name sorts examples for the report; it is never part of a text


@dataclasses.dataclass(frozen=True)
class Examples:
    """Examples as text, number i of each list; None where the model reads or writes no such thing.

    A translation has `source` and `target`, a classified text `source` and `label`, a language model learns to
    write `target`. Where kinds of examples are known, `kind` names them.
    """

    source: list[str] | None = None
    target: list[str] | None = None
    label: np.ndarray | None = None  # int32, indexes of Dataset.label_names
    kind: list[str] | None = None
    incomplete: int = 0  # examples of the dataset that lack one of the two languages, and are not here
    kept: np.ndarray | None = None  # the numbers, of all that were read, of those that are here; None: all are

    def __len__(self) -> int:
        return len(self.target if self.source is None else self.source)

    def texts(self) -> list[str]:
        """The texts of both sides."""
        return [*(self.source or ()), *(self.target or ())]


def complete(examples: Examples) -> Examples:
    """Those of a translation that have a text on both sides, and how many have not."""
    sides = [side for side in (examples.source, examples.target) if side is not None]
    kept = [i for i in range(len(examples)) if all(side[i] for side in sides)]

    def of_kept(values: list[str] | None) -> list[str] | None:
        return None if values is None else [values[i] for i in kept]

    source, target, kind = map(of_kept, (examples.source, examples.target, examples.kind))
    return Examples(source, target, kind=kind, incomplete=len(examples) - len(kept), kept=np.array(kept, int))


@dataclasses.dataclass(frozen=True)
class Reader:
    """The examples of a split by their numbers. It holds none of them, and can be sent to another process."""

    records: Sequence[bytes]
    name: str  # of the dataset
    split: str
    folder: Path  # of the dataset's files
    files: tuple[tuple, ...]  # name, first example, number of examples, size and time of each file
    columns: Mapping[str, tuple[str, ...]]  # 'source', 'target', 'label': what joins features, and their names
    kind: bool  # whether the examples have one
    spoken: str | None = None  # the feature that holds texts by their language, as many languages as there are

    def __len__(self) -> int:
        return len(self.records)

    def __call__(self, numbers: Sequence[int]) -> Examples:
        """The examples of these numbers, in their order; a language that one lacks is an empty text.

        Raises:
          InputError: their labels are kept secret.
        """
        records = self.records.__getitems__(np.asarray(numbers, int).tolist()) if len(numbers) else []
        examples = [tf_example_pb2.Example.FromString(record).features.feature for record in records]
        return Examples(
            source=self._texts("source", examples),
            target=self._texts("target", examples),
            label=self._labels(examples) if "label" in self.columns else None,
            kind=[_text(example, KIND) for example in examples] if self.kind else None,
        )

    def _texts(self, column: str, examples: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """The texts of a column, joined, of each example; None for a column that there is not."""
        if column not in self.columns:
            return None
        join, *names = self.columns[column]
        texts = [[self._text(example, name) for name in names] for example in examples]
        return [join.join(parts) if all(parts) or self.spoken is None else "" for parts in texts]

    def _text(self, example: Mapping[str, Any], name: str) -> str:
        """The text of this name, or in this language."""
        if self.spoken is None or name in example:
            return _text(example, name)
        said, texts = (example[f"{self.spoken}/{part}"].bytes_list.value for part in ("language", "translation"))
        return next(
            (text for language, text in zip(said, texts, strict=True) if language == name.encode()), b""
        ).decode()

    def _labels(self, examples: Sequence[Mapping[str, Any]]) -> np.ndarray:
        name = self.columns["label"][1]
        label = np.array([example[name].int64_list.value[0] for example in examples], np.int32)
        if (label < 0).any():  # as in the test splits of GLUE, whose labels only its server knows
            raise InputError(
                f"config.data: split {self.split!r} of {self.name} has no labels; set config.data.test_split to one "
                "that has, e.g. 'validation'."
            )
        return label


def _text(example: Mapping[str, Any], name: str) -> str:
    return example[name].bytes_list.value[0].decode()
