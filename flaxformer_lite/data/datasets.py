"""From a dataset's name in the config to examples in memory: any TFDS translation dataset, the embedded one first."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.proto import tf_example_pb2

from flaxformer_lite.data import builders

EMBEDDED = "cldr_translate"


@dataclasses.dataclass(frozen=True)
class TextPairs:
    """Parallel text: `source[i]` is translated by `target[i]`, a phrase of `kind[i]` where kinds are known."""

    source: list[str]
    target: list[str]
    kind: list[str] | None


class Dataset:
    """A prepared TFDS translation dataset, read without TensorFlow."""

    def __init__(self, name: str, *, source_language: str | None = None):
        """
        Args:
          name: TFDS name and config, 'cldr_translate/en-de'.
          source_language: the side to translate from; None: the first in the config's name.

        Raises:
          ValueError: there is no such dataset or language, or it is not prepared and cannot be here.
        """
        self.name = name
        self._builder = _open(name)
        languages = list(self._builder.info.supervised_keys or ())[:2]
        source = source_language or languages[0]
        if source not in languages:
            raise ValueError(
                f"config.data.source_language: {name} has {' and '.join(languages)}, not {source_language!r}."
            )
        self.languages = (source, languages[1 - languages.index(source)])
        self.version = str(self._builder.version)

    def prepare(self) -> None:
        """Makes the embedded dataset's files if they are not there yet."""
        if self.name.split("/")[0] == EMBEDDED:
            builders.prepare(self._builder)

    def check_split(self, split: str) -> None:
        """Raises ValueError if there is no such split; reads no example."""
        self._open_split(split)

    def _open_split(self, split: str) -> Sequence[bytes]:
        raw = tfds.decode.DeserializeMethod.RAW_BYTES  # TFDS's own decoding takes twice as long for plain text
        try:
            return self._builder.as_data_source(split=split, deserialize_method=raw)
        except ValueError as error:
            splits = ", ".join(self._builder.info.splits)
            raise ValueError(f"config.data: {self.name} has no split {split!r}; it has {splits}.") from error

    def read(self, split: str) -> TextPairs:
        """All examples of `split`, which may be a slice such as 'train[:10%]'.

        Raises:
          ValueError: there is no such split.
        """
        records = self._open_split(split)
        examples = [
            tf_example_pb2.Example.FromString(record).features.feature
            for record in records.__getitems__(range(len(records)))
        ]
        source, target = ([_text(example, language) for example in examples] for language in self.languages)
        has_kind = bool(examples) and "kind" in examples[0]
        return TextPairs(source, target, [_text(example, "kind") for example in examples] if has_kind else None)


def _text(example: Mapping[str, Any], name: str) -> str:
    return example[name].bytes_list.value[0].decode()


def _open(name: str) -> tfds.core.DatasetBuilder:
    dataset, _, pair = name.partition("/")
    try:
        if dataset == EMBEDDED:
            return builders.cldr_translate(pair or "en-de")
        importlib.import_module("tensorflow_datasets.translate")  # registers WMT and its like, which TFDS finds lazily
        builder = tfds.builder(name)
    except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
        raise ValueError(f"config.data.dataset: cannot open {name!r}: {str(error).splitlines()[0]}") from error
    keys = builder.info.supervised_keys or ()
    if len(keys) != 2 or not all(isinstance(builder.info.features[key], tfds.features.Text) for key in keys):
        raise ValueError(f"config.data.dataset: expected a translation dataset, two texts an example; {name} is none.")
    file_format = builder.info.file_format.value
    if builder.info.splits and file_format != "array_record":
        raise ValueError(
            f"config.data.dataset: {builder.data_dir} is prepared as {file_format}, and reading needs array_record; "
            "convert it once, where TensorFlow is installed, with: "
            f"python -m tensorflow_datasets.scripts.convert_format --dataset_version_dir={builder.data_dir} "
            f"--out_file_format=array_record --out_dir=NEW/{builder.info.full_name}, and set TFDS_DATA_DIR=NEW"
        )
    if not builder.info.splits:
        raise ValueError(
            f"config.data.dataset: {name} is not prepared: nothing is in {builder.data_dir}; prepare it once, where "
            f"TensorFlow is installed, with: tfds build {name} --file_format=array_record"
        )
    return builder
