"""The TFDS builder of `algorithms`: copy, reverse, sort and addition of digits, by length.

Training has short texts only, and each test split one length, so that the splits compare how
models go beyond the trained length.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import writer

from flaxformer_lite.data.sources.preparation import SameBytesWriter, data_root
from flaxformer_lite.system.errors import InputError, did_you_mean

TRAINED_UP_TO = 20  # digits; training has lengths from 1
TEST_LENGTHS = (10, 20, 25, 30, 40)  # digits, of one split each
OF_A_LENGTH = {"train": 5_000, "validation": 50, "test": 500}  # examples
Pair = tuple[str, str]  # source and target


def _digits(generator: random.Random, length: int) -> str:
    return "".join(generator.choices("0123456789", k=length))


def _copy(generator: random.Random, length: int) -> Pair:
    source = _digits(generator, length)
    return source, source


def _reverse(generator: random.Random, length: int) -> Pair:
    source = _digits(generator, length)
    return source, source[::-1]


def _sort(generator: random.Random, length: int) -> Pair:
    source = _digits(generator, length)
    return source, "".join(sorted(source))


def _addition(generator: random.Random, length: int) -> Pair:
    lowest = 10 ** (length - 1) if length > 1 else 0
    one, other = (generator.randrange(lowest, 10**length) for _ in range(2))
    return f"{one}+{other}", str(one + other)


TASKS: dict[str, Callable[[random.Random, int], Pair]] = {
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "addition": _addition,
}


class Algorithms(tfds.core.GeneratorBasedBuilder):
    """Sources and targets of one task; each symbol is a digit or '+', with spaces between them.

    The builder config is the task, such as `algorithms/copy`. `sort` is ascending and keeps equal
    digits. `addition` adds 2 numbers of equal length as they are usually written: most significant
    digit first, without leading zeros. The length is that of a source, or of each number.

    No source is in two splits. `train` and `validation` have lengths 1 to TRAINED_UP_TO, in random
    order. Of the shortest lengths, `train` has every source, and other splits have none.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The same version has the same bytes."}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=task, description=f"The task {task!r}.") for task in TASKS
    ]
    # Between source and target of a language model's text; a symbol of its own, unlike a tab.
    SEPARATOR = " = "

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"source": tfds.features.Text(), "target": tfds.features.Text()}
        return tfds.core.DatasetInfo(
            builder=self,
            description="Digits, and the same digits copied, reversed, sorted or added.",
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("source", "target"),
            disable_shuffling=True,  # the pairs are already in random order
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> Mapping[str, Iterator[Any]]:
        found = splits(self.builder_config.name)
        return {split: self._generate_examples(pairs) for split, pairs in found.items()}

    def _generate_examples(self, pairs: list[Pair]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, sides in enumerate(pairs):
            source, target = (" ".join(side) for side in sides)
            yield number, {"source": source, "target": target}

    def _example_writer(self) -> writer.ExampleWriter:
        return SameBytesWriter(self.info.file_format)


def splits(task: str) -> dict[str, list[Pair]]:
    """Returns the pairs of 'train', 'validation', 'test_10' and so on, without spaces.

    They are always the same.
    """
    generator = random.Random(f"{Algorithms.VERSION} {task}")
    found: dict[str, list[Pair]] = {"train": [], "validation": []}
    for length in sorted({*range(1, TRAINED_UP_TO + 1), *TEST_LENGTHS}):
        wanted = {"train": OF_A_LENGTH["train"], "validation": OF_A_LENGTH["validation"]}
        if length > TRAINED_UP_TO:
            wanted = {}
        if length in TEST_LENGTHS:
            wanted[f"test_{length}"] = OF_A_LENGTH["test"]
        pairs = iter(_distinct(task, generator, length, count=sum(wanted.values())))
        for split, count in wanted.items():
            found.setdefault(split, []).extend(itertools.islice(pairs, count))
    for split in ("train", "validation"):
        generator.shuffle(found[split])
    return found


def _distinct(task: str, generator: random.Random, length: int, *, count: int) -> list[Pair]:
    """Returns random pairs with distinct sources: `count`, or all that exist if they are fewer."""
    exist = {"addition": 100 if length == 1 else 81 * 100 ** (length - 1)}.get(task, 10**length)
    found: dict[str, str] = {}
    while len(found) < min(count, exist):
        source, target = TASKS[task](generator, length)
        found[source] = target
    return list(found.items())


def builder(name: str = "copy", data_dir: str | PathLike[str] | None = None) -> Algorithms:
    """Returns the builder of `algorithms/<name>`, which reads without TensorFlow.

    Args:
      name: the task.
      data_dir: the folder of all datasets; None: `data_root()`.

    Raises:
      InputError: there is no such task.
    """
    config = next((known for known in Algorithms.BUILDER_CONFIGS if known.name == name), None)
    if config is None:
        raise InputError(
            f"expected the config of algorithms to be a task, such as 'algorithms/copy'; got "
            f"{name!r}{did_you_mean(name, TASKS)}"
        )
    return Algorithms(config=config, data_dir=data_dir or data_root(), file_format="array_record")
