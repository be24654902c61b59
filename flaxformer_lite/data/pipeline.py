"""The data of a run from its config: examples as ids, and as text if needed; tokenizer; plan."""

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flaxformer_lite.config import source_normalization
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Plan, Tokens
from flaxformer_lite.data.batches.windows import WindowPlan
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.split import Data, Split
from flaxformer_lite.data.tokens import (
    store,
    subwords,
    tokenizer,
)
from flaxformer_lite.data.tokens.ragged import Ragged, count_shared, hashes
from flaxformer_lite.data.tokens.subwords import SubwordSampler
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.field_rules import OWN_TEXT
from flaxformer_lite.fields import BOS, UNK, Config, DataConfig
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute

ROLES = ("train", "validation", "test")


def open_dataset(
    config: Config,
    *,
    beside: Path | None = None,
    roles: Sequence[str] = ROLES,
    label_names: list[str] | None = None,
) -> Dataset:
    """Returns the dataset of `config.data` with its validation and test datasets.

    Args:
      beside: for custom text, the folder of the run, see `OwnText`.
      roles: for custom text, the splits whose files are needed.
      label_names: for custom text, the labels; None: those of the training split.

    Raises:
      InputError: as `Dataset`; or the languages or labels of another dataset to evaluate on differ.
    """
    data = config.data
    architecture, text_features = config.model.architecture, data.text_features
    dataset = Dataset(
        data.dataset,
        architecture=architecture,
        text_features=text_features,
        source_language=data.source_language,
        languages=data.languages,
        own_text=_own_text(config, data.dataset, label_names, roles, beside),
    )
    for role, name in (("validation", data.validation_dataset), ("test", data.test_dataset)):
        if name not in (None, data.dataset):
            try:
                own_text = _own_text(config, name, dataset.label_names, roles, beside)
                other = Dataset(
                    name,
                    architecture=architecture,
                    text_features=text_features,
                    languages=dataset.sides,
                    own_text=own_text,
                )
            except InputError as error:  # it names the fields of the training dataset
                is_general = error.where in ("config.data.dataset", "config.data.languages")
                message = error.what if is_general else str(error)
                raise InputError(message, where=f"config.data.{role}_dataset") from error
            dataset.add_part(role, other)
    return dataset


def _check_files(data: DataConfig) -> None:
    """Raises InputError if a split of custom text has no files, or files belong to no split."""
    datasets = {role: getattr(data, f"{role}_dataset", None) or data.dataset for role in ROLES}
    for role, dataset in datasets.items():
        split, files = getattr(data, f"{role}_split"), getattr(data, f"{role}_files")
        read = [name for name in re.findall(r"\w+", split) if name in ROLES]
        if dataset not in OWN_TEXT:
            continue
        if files and role not in read:
            raise InputError(
                f"config.data.{role}_files: data.{role}_split = {split!r} does not read these "
                "files; leave one of the two out."
            )
        for name in read:
            if datasets[name] != dataset or not getattr(data, f"{name}_files"):
                raise InputError(
                    f"config.data.{role}_split: {split!r} reads data.{name}_files, which are not "
                    "set; set them, or use a slice of another split, such as train[-2000:]."
                )


def _own_text(
    config: Config,
    name: str,
    label_names: list[str] | None,
    roles: Sequence[str],
    beside: Path | None,
) -> OwnText | None:
    """Returns the files of the splits of dataset `name`; None if it is not custom text."""
    data = config.data
    if name not in OWN_TEXT:
        return None
    files = {
        "train": (data.dataset, data.train_files),
        "validation": (data.validation_dataset or data.dataset, data.validation_files),
        "test": (data.test_dataset or data.dataset, data.test_files),
    }
    features = data.text_features.split(",") if data.text_features else ()
    chosen = tuple(feature.strip() for feature in features)
    return OwnText(
        kind=name,
        files={
            split: paths
            for split, (dataset, paths) in files.items()
            if dataset == name and paths and split in roles
        },
        names=data.languages if name == "parallel_text" else chosen,
        labels=tuple(label_names) if label_names else None,
        longest_line=data.longest_line,
        faults=data.faults,
        header=data.header,
        quoted=data.quoted,
        whole_files=data.whole_files,
        alignments={"train": data.train_alignments} if data.train_alignments else {},
        beside=beside and absolute(beside),
    )


def read_split(dataset: Dataset, name: str, tokens: AnyTokenizer, config: Config) -> Split:
    """Returns a split by its TFDS name, tokenised and planned, with its texts in memory.

    The texts of whole files are not in memory.

    Raises:
      InputError: the split does not exist, or none of its examples fits the batches.
    """
    reader = dataset.reader(name)
    if reader.part is None:
        return make_split(dataset.read(name), tokens, config)
    examples = _stored(reader, tokens, config)
    return Split(None, examples, _plan(*examples.lengths(), config), reader)


def read_part(dataset: Dataset, role: str, tokens: AnyTokenizer, config: Config) -> Split:
    """Returns the 'validation' or 'test' split of the config, with stored ids as `stored_split`.

    The texts of translations are in memory as references; other texts are not.

    Raises:
      InputError: the split does not exist, or none of its examples fits the batches.
    """
    part, name = dataset.part(role), getattr(config.data, f"{role}_split")
    reader = part.reader(name)
    texts, examples = None, _stored(reader, tokens, config)
    if config.model.architecture == "encoder_decoder":
        texts = part.read(name)
        if texts.kept is not None:
            sides = {side: ids.take(texts.kept) for side, ids in examples.sides().items()}
            examples = Tokens(sides.get("source"), sides.get("target"))
    return Split(texts, examples, _plan(*examples.lengths(), config), reader)


def make_split(texts: Examples, tokens: AnyTokenizer, config: Config) -> Split:
    """Returns `texts` tokenised and planned; raises InputError if no example fits the batches."""
    source, target = (
        None if part is None else Ragged.of(tokens.encode(part, side=side))
        for side, part in (("source", texts.source), ("target", texts.target))
    )
    if source is not None and _start(config):
        source = Ragged.of([np.concatenate([_start(config), ids]) for ids in source])
    examples = Tokens(source, target, texts.label)
    return Split(texts, examples, _plan(*examples.lengths(), config))


def stored_split(dataset: Dataset, name: str, tokens: AnyTokenizer, config: Config) -> Split:
    """Returns a split to train on, with memory-mapped ids and without texts in memory.

    Raises:
      InputError: no example of the split fits the batches.
    """
    reader = dataset.reader(name, alignments=config.train.guided_alignment > 0)
    examples = _stored(reader, tokens, config)
    lengths, sampler = examples.lengths(), None
    if config.data.subword_sampling:
        sampler = SubwordSampler(
            reader,
            tokens,
            start=_start(config),
            kind=config.data.tokenizer,
            strength=config.data.subword_sampling,
            seed=config.data.seed,
        )
        longest, sides = config.data.buckets[-1] - 1, examples.sides()
        growth = sampler.growth(sides, longest)
        grown = {
            side: subwords.planned(ids.lengths(), growth[side], longest)
            for side, ids in sides.items()
        }
        lengths = grown.get("source"), grown.get("target")
    return Split(None, examples, _plan(*lengths, config, train=True), reader, sampler)


def _stored(reader: Reader, tokens: AnyTokenizer, config: Config) -> Tokens:
    """Returns the ids of all examples, memory-mapped, or in memory if no folder is writable.

    Process 0 stores missing ids first. A process that cannot see the files of process 0 stores the
    ids itself.
    """
    if jax.process_count() > 1:
        multihost.by_process_0(lambda: store.tokenised(reader, tokens, start=_start(config)))
    columns = store.tokenised(reader, tokens, start=_start(config), show=jax.process_index() == 0)
    label = columns.pop("label", None)
    if reader.part is not None:
        texts = np.array(reader.part.texts)  # an example is a text, and not a piece of one
        columns = {name: Ragged(ids.values, ids.offsets[texts]) for name, ids in columns.items()}
    return Tokens(**columns, label=None if label is None else np.asarray(label.values, np.int32))


def _start(config: Config) -> tuple[int, ...]:
    """Returns the ids at the start of a source: BOS for a classifier, which can pool its vector."""
    return (BOS,) if config.model.architecture == "encoder_classifier" else ()


def _plan(
    source_length_N: np.ndarray | None,
    target_length_N: np.ndarray | None,
    config: Config,
    *,
    train: bool = False,
) -> Plan:
    """Returns the plan of a split; `train`: the blocks of windows are shuffled."""
    data = config.data
    sizes = {"tokens_per_batch": data.tokens_per_batch, "rows_multiple": data.rows_multiple}
    if data.windows is not None:
        assert target_length_N is not None, "a language model has targets"
        return WindowPlan(
            target_length_N, windows=data.windows, **sizes, seed=data.seed, shuffled=train
        )
    make = (
        PackedPlan if data.packing else functools.partial(BatchPlan, num_buckets=data.num_buckets)
    )
    return make(
        source_length_N,
        target_length_N,
        buckets=data.buckets,
        **sizes,
        seed=data.seed,
    )


def provide_tokenizer(
    config: Config, dataset: Dataset, tokenizer_path: Path, **options: Any
) -> AnyTokenizer:
    """Prepares the dataset, makes the tokenizer if its file does not exist, and returns it.

    Args:
      options: `verify` and `given`, as in `subwords.provide_tokenizer`.

    Raises:
      InputError: a split is missing or has no labels; or the tokenizer is of other text.
    """

    def prepare() -> None:
        _check_files(config.data)
        dataset.prepare()
        for role in ROLES:
            dataset.part(role).check_split(getattr(config.data, f"{role}_split"))

    multihost.together(prepare)
    reader = dataset.reader(config.data.train_split)
    subwords.provide_tokenizer(config, reader, tokenizer_path, **options)
    return multihost.together(lambda: tokenizer.load(tokenizer_path, source_normalization(config)))


def load(config: Config, dataset: Dataset, tokenizer_path: Path, **options: Any) -> Data:
    """Prepares and reads the dataset; makes the tokenizer if `tokenizer_path` does not exist.

    Args:
      options: as in `provide_tokenizer`.

    Raises:
      InputError: as `provide_tokenizer`, or a split has no usable example. If one of several
        processes raises it before their last barrier, all do.
    """
    loader.import_grain()
    tokens = provide_tokenizer(config, dataset, tokenizer_path, **options)
    _warn_of_overlap(dataset, {role: getattr(config.data, f"{role}_split") for role in ROLES})
    train = stored_split(dataset, config.data.train_split, tokens, config)
    validation = read_part(dataset, "validation", tokens, config)
    if not config.data.whole_files:  # equal files are rare, and hashes of long ones large
        _warn_of_equal_examples(dataset, train.tokens, tokens, config)
    return Data(
        tokens, train, validation, dataset.label_names, loader.fingerprint(train.tokens, train.plan)
    )


def _warn_of_overlap(dataset: Dataset, splits: Mapping[str, str]) -> None:
    """Warns of examples that are both trained and evaluated on."""
    for role in ("validation", "test"):
        if dataset.part(role) is not dataset or jax.process_index() != 0:
            continue
        if shared := dataset.shared(splits["train"], splits[role]):
            logging.warning(
                "config.data.%s_split: %s has %s %s that %s has too: the model is evaluated on "
                "training examples.",
                role,
                splits[role],
                f"{shared:,}",
                dataset.unit,
                splits["train"],
            )


def _warn_of_equal_examples(
    dataset: Dataset, train: Tokens, tokens: AnyTokenizer, config: Config
) -> None:
    """Warns of examples of validation and test that are in train too, word for word."""
    of_train = hashes(train.sides()) if jax.process_index() == 0 else None
    for role in ("validation", "test"):
        name = getattr(config.data, f"{role}_split")
        part = dataset.part(role)
        examples = _stored(part.reader(name), tokens, config)
        is_slice = part is dataset and dataset.shared(config.data.train_split, name)
        if is_slice or of_train is None:  # a slice of the same examples is warned of above
            continue
        if shared := count_shared(examples.sides(), of_train, unknown=UNK):
            logging.warning(
                "config.data.%s_split: %s of %s examples are in %s too, word for word: scores on "
                "them are too good.",
                role,
                f"{shared:,}",
                f"{len(examples):,}",
                config.data.train_split,
            )
