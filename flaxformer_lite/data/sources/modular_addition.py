"""The TFDS builder of `modular_addition`: all sums of two numbers modulo another (Power 2022)."""

import random
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer

from flaxformer_lite.data.sources.preparation import SameBytesWriter, data_root, number_in_name

FIRST_SYMBOL = 0x4E00  # Unicode's block of Chinese characters, long enough for MOST numbers
LEAST, MOST = 2, 1_000  # values of the modulus; MOST has a million examples


class ModularAddition(tfds.core.GeneratorBasedBuilder):
    """All pairs of numbers below a modulus, as text, with their sum modulo it as the label.

    The builder config is the modulus, such as `modular_addition/97`. Each number is one abstract
    symbol (section 2 of the paper), so that it is one piece of a vocabulary. The only split,
    `pairs`, has the pairs in random order; training and validation are slices of it.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The same version has the same bytes."}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="97", description="As in Power 2022.")]

    def _info(self) -> tfds.core.DatasetInfo:
        labels = [str(number) for number in range(modulus_of(self.builder_config.name))]
        features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=labels)}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Two numbers as abstract symbols, and their sum modulo a third number.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("text", "label"),
            homepage="https://arxiv.org/abs/2201.02177",
            disable_shuffling=True,  # the pairs are already in random order
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[Any]]:
        return {"pairs": self._generate_examples(modulus_of(self.builder_config.name))}

    def _generate_examples(self, modulus: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (a, b) in enumerate(pairs(modulus)):
            yield number, {"text": f"{symbol(a)}+{symbol(b)}", "label": (a + b) % modulus}

    def _example_writer(self) -> writer.ExampleWriter:
        return SameBytesWriter(self.info.file_format)


def pairs(modulus: int) -> list[tuple[int, int]]:
    """Returns all ordered pairs of numbers below `modulus`, in a random order that never varies.

    (b, a) follows (a, b): a slice for training and another for validation share no sum that differs
    only in the order of its numbers.
    """
    found = [(a, b) for a in range(modulus) for b in range(a, modulus)]
    random.Random(f"{ModularAddition.VERSION} {modulus}").shuffle(found)
    return [pair for a, b in found for pair in dict.fromkeys([(a, b), (b, a)])]


def symbol(number: int) -> str:
    """Returns the character that stands for a number from 0."""
    return chr(FIRST_SYMBOL + number)


def modulus_of(name: str) -> int:
    """Returns the modulus in the name of a config.

    Raises:
      InputError: it is not a whole number from LEAST to MOST, without leading zeros.
    """
    return number_in_name(
        name, meaning="its modulus", bounds=(LEAST, MOST), example="modular_addition/97"
    )


def builder(name: str = "97", data_dir: str | PathLike[str] | None = None) -> ModularAddition:
    """Returns the builder of `modular_addition/<name>`, which reads without TensorFlow.

    Args:
      name: the modulus.
      data_dir: the folder of all datasets; None: `data_root()`.

    Raises:
      InputError: `name` is not a valid modulus.
    """
    modulus_of(name)
    config = next((known for known in ModularAddition.BUILDER_CONFIGS if known.name == name), None)
    config = config or tfds.core.BuilderConfig(name=name, description="Another modulus.")
    return ModularAddition(
        config=config, data_dir=data_dir or data_root(), file_format="array_record"
    )
