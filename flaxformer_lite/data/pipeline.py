"""From the config to all that a run reads: examples as ids and, where they are needed, as text; tokenizer and plan."""

import dataclasses
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from flaxformer_lite.config import Config, DataConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.batches.loader import Batches, Tokens
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.sources.own_text import OwnText
from flaxformer_lite.data.tokens import store, subwords, tokenizer
from flaxformer_lite.data.tokens.subwords import Drawing
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS, OWN_TEXT
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError

ROLES = ("train", "validation", "test")
READ_AT_ONCE = 8192  # examples held as text where a split is not held as a whole


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a dataset; where its texts are not in memory, there is a reader of them."""

    texts: Examples | None
    tokens: Tokens
    plan: BatchPlan | PackedPlan
    reader: Reader | None = None
    drawing: Drawing | None = None  # where ids are drawn anew each epoch

    def lengths(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each example of `step`'s global batch, source and target, with their ends; 0 on a missing side.

        Where ids are drawn anew, those of the usual ones.
        """
        examples, _ = self.plan.span(step, step + 1)
        sides = self.tokens.sides()
        return tuple(
            sides[name].offsets[examples + 1] - sides[name].offsets[examples] + 1
            if name in sides
            else np.zeros(len(examples), np.int64)
            for name in ("source", "target")
        )

    @functools.cached_property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the target texts that the plan uses: what a loss in bits per byte is divided by."""
        return sum(len(text.encode()) for text in self._used_targets())

    def _used_targets(self) -> Iterator[str]:
        used = self.plan.usable
        if self.texts is not None:
            yield from (self.texts.target[i] for i in used)
            return
        for first in range(0, len(used), READ_AT_ONCE):
            yield from self.reader(used[first : first + READ_AT_ONCE]).target


@dataclasses.dataclass(frozen=True)
class Data:
    """What training reads."""

    tokenizer: Tokenizer
    train: Split
    validation: Split
    label_names: list[str] | None  # of a classifier
    fingerprint: str  # of the training ids and their order


def open_dataset(config: Config) -> Dataset:
    """The dataset of `config.data`, as the model's architecture reads it, with those it is measured on.

    Raises:
      InputError: as `Dataset`; also if another dataset to measure on has not the same languages or labels.
    """
    data, options = config.data, {"architecture": config.model.architecture, "text_features": config.data.text_features}
    own_text = _own_text(config, data.dataset, None)
    options_of_main = {"source_language": data.source_language, "languages": data.languages, "own_text": own_text}
    dataset = Dataset(data.dataset, **options, **options_of_main)
    for role, name in (("validation", data.validation_dataset), ("test", data.test_dataset)):
        if name not in (None, data.dataset):
            try:
                own_text = _own_text(config, name, dataset.label_names)
                other = Dataset(name, **options, languages=dataset.sides, own_text=own_text)
            except InputError as error:  # which is about the dataset that is trained on
                known = error.where in ("config.data.dataset", "config.data.languages")
                message = error.what if known else str(error)
                raise InputError(message, where=f"config.data.{role}_dataset") from error
            dataset.add_part(role, other)
    return dataset


def _check_files(data: DataConfig) -> None:
    """Of text of one's own, whatever is read has files, and whatever has files is read."""
    datasets = {role: getattr(data, f"{role}_dataset", None) or data.dataset for role in ROLES}
    for role, dataset in datasets.items():
        split, files = getattr(data, f"{role}_split"), getattr(data, f"{role}_files")
        read = [name for name in re.findall(r"\w+", split) if name in ROLES]
        if dataset not in OWN_TEXT:
            continue
        if files and role not in read:
            raise InputError(
                f"config.data.{role}_files: data.{role}_split = {split!r} reads none of them; leave one of the two out."
            )
        for name in read:
            if datasets[name] != dataset or not getattr(data, f"{name}_files"):
                raise InputError(
                    f"config.data.{role}_split: {split!r} is what data.{name}_files hold, and there are none; set "
                    "them, or take a slice of others, such as train[-2000:]."
                )


def _own_text(config: Config, name: str, label_names: list[str] | None) -> OwnText | None:
    """The files of the dataset `name`, which are those of the splits that are read from it; None if it has none."""
    data = config.data
    if name not in OWN_TEXT:
        return None
    files = {
        "train": (data.dataset, data.train_files),
        "validation": (data.validation_dataset or data.dataset, data.validation_files),
        "test": (data.test_dataset or data.dataset, data.test_files),
    }
    chosen = tuple(part.strip() for part in data.text_features.split(",")) if data.text_features else ()
    return OwnText(
        kind=name,
        files={split: paths for split, (dataset, paths) in files.items() if dataset == name and paths},
        names=data.languages if name == "parallel_text" else chosen,
        labels=label_names and tuple(label_names),
        longest_line=data.longest_line,
        faults=data.faults,
    )


def read_split(dataset: Dataset, name: str, tokens: Tokenizer, config: Config) -> Split:
    """A split by its TFDS name, tokenised and planned, with its texts in memory.

    Raises:
      InputError: there is no such split, or no example in it fits the batches.
    """
    return make_split(dataset.read(name), tokens, config)


def read_part(dataset: Dataset, role: str, tokens: Tokenizer, config: Config) -> Split:
    """What the config measures 'validation' or 'test' on, its ids from where they are stored, as in `stored_split`.

    The texts of translations are in memory, to compare with; others stay where they are.

    Raises:
      InputError: there is no such split, or no example in it fits the batches.
    """
    part, name = dataset.part(role), getattr(config.data, f"{role}_split")
    reader = part.reader(name)
    texts, examples = None, _stored(reader, tokens, config)
    if config.model.architecture == "encoder_decoder":
        texts = part.read(name)
        if texts.kept is not None:
            examples = Tokens(**{side: ids.take(texts.kept) for side, ids in examples.sides().items()})
    return Split(texts, examples, _plan(*examples.lengths(), config), reader)


def make_split(texts: Examples, tokens: Tokenizer, config: Config) -> Split:
    """`texts` tokenised and planned; raises InputError if no example fits the batches."""
    given = {"source": texts.source, "target": texts.target}
    source, target = (None if part is None else tokens.encode(part, side=side) for side, part in given.items())
    if source is not None and _start(config):
        source = [np.concatenate([_start(config), ids]).astype(np.int32) for ids in source]
    examples = Tokens(source, target, texts.label)
    return Split(texts, examples, _plan(*examples.lengths(), config))


def stored_split(dataset: Dataset, name: str, tokens: Tokenizer, config: Config) -> Split:
    """A split to train on: its ids are mapped from where they are stored, its texts stay where they are.

    Raises:
      InputError: no example in the split fits the batches.
    """
    reader = dataset.reader(name)
    examples = _stored(reader, tokens, config)
    lengths, drawing = dict(zip(("source", "target"), examples.lengths(), strict=True)), None
    if config.data.subword_sampling:
        how = dict(kind=config.data.tokenizer, strength=config.data.subword_sampling, seed=config.data.seed)
        drawing = Drawing(reader, tokens, start=_start(config), **how)
        longest = config.data.buckets[-1] - 1
        for side, growth in drawing.head_room(examples.sides(), longest).items():
            lengths[side] = subwords.planned(lengths[side], growth, longest)
    return Split(None, examples, _plan(*lengths.values(), config), reader, drawing)


def _stored(reader: Reader, tokens: Tokenizer, config: Config) -> Tokens:
    """The ids of all examples, mapped from files, or in memory where none can be written.

    Process 0 stores what is not stored yet; where the others do not see what it has written, they do the same.
    """
    if jax.process_count() > 1:
        multihost.by_process_0(lambda: store.tokenised(reader, tokens, start=_start(config)))
    columns = store.tokenised(reader, tokens, start=_start(config), show=jax.process_index() == 0)
    label = columns.pop("label", None)
    return Tokens(**columns, label=None if label is None else np.asarray(label.values, np.int32))


def _start(config: Config) -> tuple[int, ...]:
    """A text to classify starts with the start symbol, whose vector may stand for the whole text."""
    return (BOS,) if config.model.architecture == "encoder_classifier" else ()


def _plan(
    source_length_N: np.ndarray | None, target_length_N: np.ndarray | None, config: Config
) -> BatchPlan | PackedPlan:
    data = config.data
    make = PackedPlan if data.packing else functools.partial(BatchPlan, num_buckets=data.num_buckets)
    return make(
        source_length_N,
        target_length_N,
        buckets=data.buckets,
        tokens_per_batch=data.tokens_per_batch,
        rows_multiple=data.rows_multiple,
        seed=data.seed,
    )


def vocabulary_texts(reader: Reader, count: int) -> list[str]:
    """At most `count` texts at even distances, of all sources and then all targets; no others are read."""
    sides = [side for side in ("source", "target") if side in reader.columns]
    total, texts = len(sides) * len(reader), []
    places = np.arange(min(count, total)) * total // max(1, min(count, total))
    for number, side in enumerate(sides):
        examples = places[places // max(1, len(reader)) == number] - number * len(reader)
        for first in range(0, len(examples), READ_AT_ONCE):
            texts += getattr(reader(examples[first : first + READ_AT_ONCE]), side)
    return texts


def provide_tokenizer(config: Config, dataset: Dataset, path: Path, *, unproved: bool) -> None:
    """Process 0 trains the tokenizer if `path` does not exist, or to compare with one that is `unproved`.

    Raises:
      InputError: it cannot be trained, or is another.
    """

    def provide() -> None:
        if path.exists() and not unproved:
            return
        texts = vocabulary_texts(dataset.reader(config.data.train_split), config.data.vocabulary_sample)
        options = {"vocab_size": config.data.vocab_size, "kind": config.data.tokenizer}
        if not path.exists():
            tokenizer.train(texts, path, **options)
        elif tokenizer.trained(texts, **options) != path.read_bytes():
            raise InputError(
                f"{path}: not what the text of {config.data.train_split!r} gives now, and no checkpoint needs it yet; "
                "put the old text back, or delete it, which makes a new one."
            )

    multihost.by_process_0(provide)


def load(config: Config, dataset: Dataset, tokenizer_path: Path, unproved: bool = False) -> Data:
    """Prepares and reads the dataset; process 0 trains the tokenizer if `tokenizer_path` does not exist.

    Args:
      unproved: whether a tokenizer that exists is of an earlier start, and no checkpoint tells of what text: it is
        trained once more, to see.

    Raises:
      InputError: a split is missing, has no labels, or holds nothing to train on, or the tokenizer is of other text.
        What one of several processes raises before they have waited for each other for the last time, all raise.
    """
    loader.import_grain()
    splits = {role: getattr(config.data, f"{role}_split") for role in ROLES}

    def prepare() -> None:
        _check_files(config.data)
        dataset.prepare()
        for role, name in splits.items():
            dataset.part(role).check_split(name)
        for role in ("validation", "test"):
            shared = dataset.shared(splits["train"], splits[role]) if dataset.part(role) is dataset else 0
            if shared and jax.process_index() == 0:
                logging.warning(
                    "config.data.%s_split: %s has %s examples that %s has too: the model is trained on what it is "
                    "measured by.",
                    role,
                    splits[role],
                    f"{shared:,}",
                    splits["train"],
                )

    multihost.together(prepare)
    provide_tokenizer(config, dataset, tokenizer_path, unproved=unproved)
    tokens = multihost.together(lambda: tokenizer.load(tokenizer_path))
    train = stored_split(dataset, config.data.train_split, tokens, config)
    validation = read_part(dataset, "validation", tokens, config)
    return Data(tokens, train, validation, dataset.label_names, loader.fingerprint(train.tokens, train.plan))


def batches(split: Split, *, num_steps: int | None = None, part: tuple[int, int] = (0, 1)) -> Batches:
    """The batches of `split`, all rows or part i of n, `part` = (i, n); `num_steps` None: of one epoch."""
    return Batches(
        split.tokens,
        split.plan,
        num_steps=split.plan.steps_per_epoch if num_steps is None else num_steps,
        part=part,
        draw=split.drawing,
    )
