"""The TFDS builder of `listops`: nested expressions of digits, and the digit that is their value.

The operators are those of Nangia and Bowman 2018, the sizes those of Long Range Arena (Tay 2021).
"""

import random
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer

from flaxformer_lite.data.sources.preparation import SameBytesWriter, data_root, number_in_name

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")  # least, greatest, median, sum modulo 10
END = "]"
DIGITS = "0123456789"
SIZES = {"train": 96_000, "validation": 2_000, "test": 2_000}  # examples
MOST_ARGUMENTS = 10  # of an operator; the fewest are 2
MOST_LEVELS = 10  # the lowest level has digits only, so at most 9 operators are nested
OPERATOR_RATE = 0.25  # probability that an argument above the lowest level is an expression
LEAST, MOST = 16, 4_000  # values of the name; longer texts are rare with 10 levels


class Listops(tfds.core.GeneratorBasedBuilder):
    """Expressions of symbols with one space between 2 of them, with their value as the label.

    The builder config is the most symbols of a text, such as `listops/2000`; the fewest are a
    quarter of it. All texts are distinct, in one random order over the splits.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The same version has the same bytes."}
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="256", description="64 to 256 symbols.")]

    def _info(self) -> tfds.core.DatasetInfo:
        label = tfds.features.ClassLabel(names=list(DIGITS))
        return tfds.core.DatasetInfo(
            builder=self,
            description="Nested minimum, maximum, median and sum modulo 10 of digits.",
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "label": label}),
            supervised_keys=("text", "label"),
            homepage="https://arxiv.org/abs/2011.04006",
            disable_shuffling=True,  # the texts are already in random order
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[Any]]:
        texts = expressions(most_symbols(self.builder_config.name))  # the splits read it in turn
        return {split: self._generate_examples(texts, size) for split, size in SIZES.items()}

    def _generate_examples(self, texts: Iterator[str], size: int) -> Iterator[tuple[int, Any]]:
        for number, text in zip(range(size), texts, strict=False):
            yield number, {"text": text, "label": value_of(text)}

    def _example_writer(self) -> writer.ExampleWriter:
        return SameBytesWriter(self.info.file_format)


def expressions(most: int) -> Iterator[str]:
    """Returns an endless iterator of distinct expressions of `most` // 4 to `most` symbols.

    They are always the same.
    """
    generator = random.Random(f"{Listops.VERSION} {most}")
    found: set[str] = set()
    while True:
        symbols: list[str] = []
        _extend(symbols, generator, level=1, most=most)
        if most // 4 <= len(symbols) <= most:
            text = " ".join(symbols)
            if text not in found:
                found.add(text)
                yield text


def _extend(symbols: list[str], generator: random.Random, *, level: int, most: int) -> None:
    """Appends a random expression; stops early once there are more than `most` symbols."""
    symbols.append(generator.choice(OPERATORS))
    for _ in range(generator.randint(2, MOST_ARGUMENTS)):
        if level + 1 < MOST_LEVELS and generator.random() < OPERATOR_RATE:
            _extend(symbols, generator, level=level + 1, most=most)
        else:
            symbols.append(DIGITS[int(10 * generator.random())])  # faster than `choice`
        if len(symbols) > most:
            return
    symbols.append(END)


def value_of(text: str) -> int:
    """Returns the value of an expression, a digit.

    The median of an even number of digits is the mean of the middle 2, rounded down.

    Raises:
      ValueError: the text is not one whole expression.
    """
    values: list[tuple[str, list[int]]] = [("", [])]  # of the text, and of each open expression
    for symbol in text.split(" "):
        if symbol in OPERATORS:
            values.append((symbol, []))
        else:
            is_end = symbol == END and len(values) > 1
            value = _applied(*values.pop()) if is_end else int(symbol)
            values[-1][1].append(value)
    ((_, (value,)),) = values
    return value


def _applied(operator: str, values: list[int]) -> int:
    """Returns the value of an operator; raises ValueError if it has no arguments."""
    if not values:
        raise ValueError(f"expected arguments of {operator}, got none")
    if operator == "[MED":
        values = sorted(values)
        return (values[(len(values) - 1) // 2] + values[len(values) // 2]) // 2
    if operator == "[SM":
        return sum(values) % 10
    return min(values) if operator == "[MIN" else max(values)


def most_symbols(name: str) -> int:
    """Returns the most symbols of a text, which is the name of a config.

    Raises:
      InputError: it is not a whole number from LEAST to MOST, without leading zeros.
    """
    return number_in_name(
        name, meaning="the most symbols of a text", bounds=(LEAST, MOST), example="listops/256"
    )


def builder(name: str = "256", data_dir: str | PathLike[str] | None = None) -> Listops:
    """Returns the builder of `listops/<name>`, which reads without TensorFlow.

    Args:
      name: the most symbols of a text.
      data_dir: the folder of all datasets; None: `data_root()`.

    Raises:
      InputError: `name` is not a valid number.
    """
    most_symbols(name)
    config = next((known for known in Listops.BUILDER_CONFIGS if known.name == name), None)
    config = config or tfds.core.BuilderConfig(name=name, description="Another length.")
    return Listops(config=config, data_dir=data_dir or data_root(), file_format="array_record")
