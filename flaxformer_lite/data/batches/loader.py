"""Batches of token ids as a stream: a grain thread reads them and puts them on devices."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np

from flaxformer_lite.data.batches.batching import BatchPlan, PackedPlan, bucket_rows
from flaxformer_lite.data.batches.windows import Stream, WindowPlan
from flaxformer_lite.data.tokens import token_links
from flaxformer_lite.data.tokens.ragged import Ragged, ranges
from flaxformer_lite.fields import EOS, PAD, Config

NOTHING = -1  # the label, or the example number, of an empty row
HASHED_AT_ONCE = 1 << 22  # ids, or rows, in one update of the fingerprint

Plan = BatchPlan | PackedPlan | WindowPlan
Sample = Callable[[np.ndarray, int], dict[str, Ragged]]  # (examples, epoch) -> ids of each side


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Examples as ids without end symbols: row i of each side. A missing side is None."""

    source: Ragged | None = None  # a list of ids is accepted too
    target: Ragged | None = None
    label: np.ndarray | None = None
    alignment: Ragged | None = None  # links of tokens, see `token_links.token_links`

    def __post_init__(self) -> None:
        for name, side in self.sides().items():
            object.__setattr__(self, name, Ragged.of(side))

    def __len__(self) -> int:
        return len(next(iter(self.sides().values())))

    def sides(self) -> dict[str, Ragged]:
        """Returns source and target, without a missing side."""
        sides = {"source": self.source, "target": self.target}
        return {name: side for name, side in sides.items() if side is not None}

    def lengths(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns the token counts of the sources and of the targets; None for a missing side."""
        source, target = (
            None if side is None else side.lengths() for side in (self.source, self.target)
        )
        return source, target


class Batches:
    """A grain data source: random access to this process's rows of the batch of each step.

    A process has one of n equal parts, so the global batch is independent of the number of
    processes.

    Attributes:
      sampled: number of texts with sampled ids so far.
      not_fitting: number of these texts that kept their usual ids, because the sampled ones did not
        fit into the row.
    """

    def __init__(
        self,
        tokens: Tokens,
        plan: Plan,
        *,
        num_steps: int,
        part: tuple[int, int] = (0, 1),
        sample: Sample | None = None,
    ):
        """
        Args:
          part: (i, n): this process has part i, from 0, of n.
          sample: draws other ids in each epoch; None: the usual ids.
        """
        self._tokens, self._plan, self._num_steps, self._sample = tokens, plan, num_steps, sample
        self._part = part
        self.sampled = self.not_fitting = 0
        if isinstance(plan, WindowPlan):
            assert tokens.target is not None, "a language model has targets"
            self._stream = Stream(tokens.target)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Returns this process's part of the batch of `step`, all int32 but `alignment`.

        `source` and `target` (rows, length), unless the side is missing; `row` (rows,), the row
        numbers in the global batch; for a classifier `label` (rows,), -1 for an empty row; with a
        packed plan `source_segment` and `target_segment` (rows, length), the number of each token's
        text within the row, from 1, and 0 for padding. An end symbol belongs to its text. With
        alignments, `alignment` (rows, length, length) bool, see `token_links.fill`. With
        windows, `before` (rows,), the token before the first one of `target`.
        """
        step = int(step)
        if isinstance(self._plan, WindowPlan):
            return self._windows(self._plan, step)
        rows, length = self._plan.shape(step)
        examples, size_B = self._plan.span(step, step + 1)
        index, count = self._part
        row_B = np.split(np.arange(rows, dtype=np.int32), count)[index]
        before, size_B = int(size_B[: row_B[0]].sum()), size_B[row_B]
        examples = examples[before : before + int(size_B.sum())]
        row_N = np.repeat(np.arange(len(row_B)), size_B)
        sampled = {}
        if self._sample is not None:
            sampled = self._sample(examples, step // self._plan.steps_per_epoch)
        batch = {"row": row_B}
        for name, side in self._tokens.sides().items():
            texts = side.take(examples)
            if name in sampled:
                texts = self._fitting(sampled[name], texts, row_N, length)
            batch[name], segment = fill_rows(texts, row_N, rows=len(row_B), length=length)
            if isinstance(self._plan, PackedPlan):
                batch[f"{name}_segment"] = segment
        if self._tokens.label is not None:
            batch["label"] = np.full(len(row_B), NOTHING, np.int32)
            batch["label"][row_N] = self._tokens.label[examples]
        if self._tokens.alignment is not None:
            links = self._tokens.alignment.take(examples)
            row_L = np.repeat(row_N, links.lengths())
            shape = {"rows": len(row_B), "length": length}
            batch["alignment"] = token_links.fill(links.values, row_L, **shape)
        return batch

    def _windows(self, plan: WindowPlan, step: int) -> dict[str, np.ndarray]:
        rows, length = plan.shape(step)
        index, count = self._part
        row_B = np.split(np.arange(rows, dtype=np.int32), count)[index]
        first_R, stop_R = plan.borders(step)
        target, before_B = self._stream.fill(first_R[row_B], stop_R[row_B], length=length)
        return {"row": row_B, "target": target, "before": before_B}

    def _fitting(self, sampled: Ragged, usual: Ragged, row_N: np.ndarray, length: int) -> Ragged:
        """Returns the sampled ids, but the usual ones in rows that are too short for them."""
        fits_N = np.bincount(row_N, weights=sampled.lengths() + 1)[row_N] <= length
        self.sampled += len(fits_N)
        self.not_fitting += int((~fits_N).sum())
        return sampled.or_else(usual, fits_N)


def fill_rows(
    texts: Ragged, row_N: np.ndarray, *, rows: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and segments, int32 (rows, length): the texts of each row, then padding.

    Each text ends with the end symbol. The segment is the number of the text in its row, from 1,
    and 0 for padding.

    Args:
      row_N: the row of each text, non-decreasing.

    Raises:
      ValueError: the texts of a row do not fit.
    """
    size_N = texts.lengths() + 1
    before_N = np.cumsum(size_N) - size_N
    first_N = np.searchsorted(row_N, row_N)  # the first text of the same row
    start_N = before_N - before_N[first_N]
    if (start_N + size_N > length).any():
        raise ValueError(
            f"Expected texts that fit rows of {length} tokens, got "
            f"{(start_N + size_N).max()} in a row."
        )
    ids, segment = np.full(rows * length, PAD, np.int32), np.zeros(rows * length, np.int32)
    start_N = start_N + row_N * length
    end_N = start_N + size_N - 1
    ids[ranges(start_N, end_N)], ids[end_N] = texts.values, EOS
    segment[ranges(start_N, end_N + 1)] = np.repeat(np.arange(len(row_N)) - first_N + 1, size_N)
    return ids.reshape(rows, length), segment.reshape(rows, length)


def import_grain() -> ModuleType:
    """Imports grain, which takes 0.3 s; call it early, so that the first batch does not wait."""
    import grain

    return grain


def stream(
    batches: Batches, put: Callable[[dict[str, np.ndarray]], Any], *, first_step: int = 0
) -> Iterator[Any]:
    """Yields `put(batch)` of `first_step`, `first_step` + 1, ...

    A thread reads batches and puts them on devices, up to 4 steps before their turn.
    """
    grain = import_grain()
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    numbered = grain.MapDataset.source(batches)[first_step:]
    return iter(numbered.map(put).to_iter_dataset(options))


def fingerprint(tokens: Tokens, plan: Plan) -> str:
    """Returns the SHA-256 of all examples and of the batches of the first epoch."""
    digest = hashlib.sha256(repr((plan.buckets, plan.rows, plan.seed)).encode())
    for side in tokens.sides().values():
        _update(digest, side.lengths(), np.int64)
        _update(digest, side.values, np.int32)
    if tokens.label is not None:
        _update(digest, tokens.label, np.int32)
    if tokens.alignment is not None:
        _update(digest, tokens.alignment.lengths(), np.int64)
        _update(digest, tokens.alignment.values, np.uint32)
    steps = max(1, HASHED_AT_ONCE // max(plan.rows))
    for first in range(0, plan.steps_per_epoch, steps):
        examples, size_R = plan.span(first, min(first + steps, plan.steps_per_epoch))
        slots_R = np.maximum(size_R, 1)  # an empty row counts as a row with NOTHING
        numbers = np.full(int(slots_R.sum()), NOTHING, np.int64)
        numbers[np.repeat(size_R > 0, slots_R)] = examples
        if isinstance(plan, PackedPlan):  # after each batch the sizes of its rows
            ends = np.cumsum(slots_R)[plan.rows[0] - 1 :: plan.rows[0]]
            numbers = np.insert(numbers, np.repeat(ends, plan.rows[0]), size_R)
        _update(digest, numbers, np.int64)
    return digest.hexdigest()


def _update(digest: Any, values: np.ndarray, dtype: type) -> None:
    for first in range(0, len(values), HASHED_AT_ONCE):
        digest.update(np.ascontiguousarray(values[first : first + HASHED_AT_ONCE], dtype))


def possible_shapes(config: Config) -> list[tuple[int, int]]:
    """Returns the (rows, length) of all buckets of `config.data`.

    With packing, or with `num_buckets` chosen from the data, only the longest bucket is known.
    """
    data = config.data
    lengths = data.row_lengths
    buckets = lengths if data.num_buckets is None and not data.packing else lengths[-1:]
    rows = bucket_rows(
        buckets, tokens_per_batch=data.tokens_per_batch, rows_multiple=data.rows_multiple
    )
    return list(zip(rows, buckets, strict=True))


def batch_struct(
    config: Config, rows: int, length: int, *, train: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch of `loader.Batches`; `train`: to train on."""
    names = {
        "encoder_decoder": ["source", "target"],
        "encoder_classifier": ["source"],
        "decoder_lm": ["target"],
    }[config.model.architecture]
    if config.data.packing:
        names += [f"{name}_segment" for name in names]
    batch = {name: jax.ShapeDtypeStruct((rows, length), np.int32) for name in names}
    if train and config.train.guided_alignment:
        batch["alignment"] = jax.ShapeDtypeStruct((rows, length, length), np.bool_)
    by_row = ["row"]
    by_row += ["label"] if config.model.architecture == "encoder_classifier" else []
    by_row += ["before"] if config.data.windows is not None else []
    return batch | {name: jax.ShapeDtypeStruct((rows,), np.int32) for name in by_row}
