"""From `config.data` to all that a run reads: examples as text and as ids, the tokenizer and the batch plan."""

import dataclasses
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from flaxformer_lite.config import Config
from flaxformer_lite.data import loader, tokenizer
from flaxformer_lite.data.batching import BatchPlan, bucket_rows
from flaxformer_lite.data.datasets import Dataset, TextPairs
from flaxformer_lite.data.loader import Batches, TokenPairs
from flaxformer_lite.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a dataset."""

    texts: TextPairs
    pairs: TokenPairs
    plan: BatchPlan


@dataclasses.dataclass(frozen=True)
class Data:
    """What training reads."""

    tokenizer: Tokenizer
    train: Split
    validation: Split
    fingerprint: str  # of the training ids and their order


def read_split(dataset: Dataset, name: str, tokens: Tokenizer, config: Config) -> Split:
    """A split by its TFDS name, tokenised and planned.

    Raises:
      ValueError: there is no such split, or no example in it fits the batches.
    """
    return make_split(dataset.read(name), tokens, config)


def make_split(texts: TextPairs, tokens: Tokenizer, config: Config) -> Split:
    """`texts` tokenised and planned; raises ValueError if no example fits the batches."""
    pairs = TokenPairs(tokens.encode(texts.source), tokens.encode(texts.target))
    plan = BatchPlan(
        *pairs.lengths(),
        buckets=config.data.buckets,
        tokens_per_batch=config.data.tokens_per_batch,
        rows_multiple=config.data.rows_multiple,
        seed=config.data.seed,
    )
    return Split(texts, pairs, plan)


def possible_shapes(config: Config) -> list[tuple[int, int]]:
    """The (rows, length) of batches that `config.data` allows, known before any data is."""
    data = config.data
    rows = bucket_rows(data.buckets, tokens_per_batch=data.tokens_per_batch, rows_multiple=data.rows_multiple)
    return list(zip(rows, data.buckets, strict=True))


def load(config: Config, dataset: Dataset, tokenizer_path: Path) -> Data:
    """Prepares and reads the dataset; process 0 trains the tokenizer if `tokenizer_path` does not exist.

    Raises:
      ValueError: a split is missing, or holds nothing to train on.
    """
    dataset.prepare()
    for name in (config.data.train_split, config.data.validation_split, config.data.test_split):
        dataset.check_split(name)
    texts = dataset.read(config.data.train_split)
    if not tokenizer_path.exists() and jax.process_index() == 0:
        both = [*texts.source, *texts.target]
        tokenizer.train(both, tokenizer_path, vocab_size=config.data.vocab_size, kind=config.data.tokenizer)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the tokenizer is trained")
    tokens = Tokenizer(tokenizer_path)
    train = make_split(texts, tokens, config)
    validation = read_split(dataset, config.data.validation_split, tokens, config)
    return Data(tokens, train, validation, loader.fingerprint(train.pairs, train.plan))


def batches(split: Split, *, num_steps: int | None = None) -> Batches:
    """This process's share of the batches of `split`; `num_steps` None: of one epoch."""
    return Batches(
        split.pairs,
        split.plan,
        num_steps=split.plan.steps_per_epoch if num_steps is None else num_steps,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
