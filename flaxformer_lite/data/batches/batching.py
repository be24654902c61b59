"""The examples of each training batch, a pure function of (seed, step), in numpy only.

A plan stores a few bytes an example and has no Python loop over examples or batches: 10 million
pairs are planned in seconds.
"""

import functools
from collections.abc import Sequence

import numpy as np

from flaxformer_lite.data.batches.packing import pack, pack_pairs
from flaxformer_lite.data.tokens.ragged import ranges
from flaxformer_lite.system.errors import InputError


def bucket_rows(buckets: Sequence[int], *, tokens_per_batch: int, rows_multiple: int) -> list[int]:
    """Returns, for each bucket length, the most rows within the token budget.

    The number of rows is a multiple of `rows_multiple`.
    """
    return [tokens_per_batch // length // rows_multiple * rows_multiple for length in buckets]


def best_buckets(length_N: np.ndarray, count: int) -> tuple[int, ...]:
    """Returns the `count` bucket lengths with the least padding, by dynamic programming.

    Each text is padded to the shortest bucket that fits it. If fewer than `count` lengths occur,
    all of them are returned.
    """
    lengths, texts = np.unique(length_N, return_counts=True)
    lengths, below = np.concatenate([[0], lengths]), np.concatenate([[0], np.cumsum(texts)])
    # added_JI[j, i]: positions of a bucket of length i with the texts longer than length j.
    added_JI = (below - below[:, None]) * lengths.astype(np.float64)
    added_JI[np.tril_indices(len(lengths))] = np.inf
    positions_I, before = np.where(lengths == 0, 0.0, np.inf), []
    for _ in range(min(count, len(lengths) - 1)):
        total_JI = positions_I[:, None] + added_JI
        before.append(total_JI.argmin(axis=0))
        positions_I = total_JI.min(axis=0)
    chosen, last = [], len(lengths) - 1
    for before_I in reversed(before):
        chosen.append(int(lengths[last]))
        last = before_I[last]
    return tuple(reversed(chosen))


class BatchPlan:
    """The order of training with one example a row, batched with examples of similar length.

    Every usable example occurs once an epoch. An epoch is shuffled and divided into batches bucket
    by bucket; then the batches are shuffled. The rest of a bucket moves to the next longer bucket,
    so at most one batch an epoch has empty rows.

    Attributes:
      steps_per_epoch: number of batches in an epoch.
      buckets: the bucket lengths in use.
      rows: rows of a batch, for each bucket.
      usable: numbers of the usable examples.
      too_long: number of examples left out because they are longer than the longest bucket.
      empty: number of examples left out because a side is empty.
      tokens: tokens and end symbols of an epoch, for each side of the examples.
      positions: positions of an epoch on one side, padding included.
    """

    def __init__(
        self,
        source_length_N: np.ndarray | None,
        target_length_N: np.ndarray | None,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int,
        rows_multiple: int = 1,
        num_buckets: int | None = None,
        seed: int = 0,
    ):
        """
        Args:
          source_length_N: tokens without the end symbol, which takes one more position; None: the
            examples have no source.
          target_length_N: as `source_length_N`.
          num_buckets: the number of buckets to choose by `best_buckets`, none longer than the
            longest of `buckets`; None: use `buckets`.

        Raises:
          InputError: no example is usable.
        """
        sides = [
            length_N for length_N in (source_length_N, target_length_N) if length_N is not None
        ]
        self.seed = seed
        need_N = np.maximum.reduce(sides).astype(np.int32) + 1
        self.usable, self.empty, self.too_long = _usable(np.minimum.reduce(sides), need_N, buckets)
        self.tokens = tuple(_with_ends(length_N, self.usable) for length_N in sides)
        buckets = buckets if num_buckets is None else best_buckets(need_N[self.usable], num_buckets)
        self._bucket_N = np.searchsorted(buckets, need_N).astype(np.min_scalar_type(len(buckets)))
        count = np.bincount(self._bucket_N[self.usable])
        self.buckets = tuple(buckets[: len(count)])  # longer ones have no batch
        self.rows = bucket_rows(
            self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple
        )
        batches, rest = [], 0
        for examples, rows in zip(count.tolist(), self.rows, strict=True):
            full, rest = divmod(rest + examples, rows)
            batches.append(full)
        batches[-1] += rest > 0
        # For each batch before shuffling, the same in all epochs: its bucket, and the borders of
        # its examples among the usable examples in bucket order.
        self._bucket_B = np.repeat(np.arange(len(batches)), batches)
        rows_B = np.array(self.rows)[self._bucket_B]
        self._border = np.minimum(np.concatenate([[0], np.cumsum(rows_B)]), len(self.usable))
        self.positions = int((rows_B * np.array(self.buckets)[self._bucket_B]).sum())
        self.steps_per_epoch = len(self._bucket_B)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def span(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples of steps `first` to `stop` - 1, and the number of them in each row.

        All steps must be of one epoch.
        """
        epoch, position = divmod(first, self.steps_per_epoch)
        order, batch_B = self._epoch(epoch)
        batch_B = batch_B[position : position + stop - first]
        start_B, end_B = self._border[batch_B], self._border[batch_B + 1]
        rows_B = np.array(self.rows)[self._bucket_B[batch_B]]
        row_R = ranges(np.zeros_like(rows_B), rows_B)
        is_filled_R = row_R < np.repeat(end_B - start_B, rows_B)
        return order[ranges(start_B, end_B)], is_filled_R.astype(np.int64)

    def batch(self, step: int) -> tuple[int, list[np.ndarray]]:
        """Returns (padded length, example numbers of each row) of `step`: 1 example a row, or 0."""
        return self.shape(step)[1], _as_rows(*self.span(step, step + 1))

    def shape(self, step: int) -> tuple[int, int]:
        """Returns (rows, length) of the batch of `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        bucket = self._bucket_B[self._epoch(epoch)[1][position]]
        return self.rows[bucket], self.buckets[bucket]

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the (rows, length) that occur, most frequent first."""
        count = np.bincount(self._bucket_B, minlength=len(self.buckets))
        return [
            (self.rows[i], self.buckets[i]) for i in np.argsort(-count, kind="stable") if count[i]
        ]

    def padding_shares(self) -> tuple[float, ...]:
        """Returns the share of padding in an epoch's positions, for each side of the examples."""
        return tuple(1 - tokens / self.positions for tokens in self.tokens)

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the usable examples in bucket order, and the batch number of each step."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(self.usable)
        bucket_of_order = self._bucket_N[order]
        in_buckets = np.concatenate(
            [order[bucket_of_order == bucket] for bucket in range(len(self.buckets))]
        )
        return in_buckets, rng.permutation(self.steps_per_epoch)


class PackedPlan:
    """The order of training with several texts, or pairs, packed into a row, with little padding.

    Every usable text occurs once an epoch. The lengths in each row are the same in all epochs, so
    all epochs have the same number of rows. The texts with these lengths, and the order of the
    rows, are shuffled for each epoch.

    Attributes: as `BatchPlan`; the only bucket is the longest.
    """

    def __init__(
        self,
        source_length_N: np.ndarray | None,
        target_length_N: np.ndarray | None = None,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int,
        rows_multiple: int = 1,
        seed: int = 0,
    ):
        """
        Args:
          source_length_N: tokens without the end symbol, which takes one more position; None: the
            examples have no source.
          target_length_N: as `source_length_N`.

        Raises:
          InputError: no text is usable.
        """
        sides = [
            length_N for length_N in (source_length_N, target_length_N) if length_N is not None
        ]
        self.seed, self.buckets = seed, (buckets[-1],)
        self.rows = bucket_rows(
            self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple
        )
        need_N = np.maximum.reduce(sides).astype(np.int32) + 1
        self.usable, self.empty, self.too_long = _usable(np.minimum.reduce(sides), need_N, buckets)
        self.tokens = tuple(_with_ends(length_N, self.usable) for length_N in sides)
        sizes = [length_N[self.usable].astype(np.int32) + 1 for length_N in sides]
        # Texts of the same kind have the same lengths, so they can be exchanged.
        self._kind = (
            sizes[0]
            if len(sizes) == 1
            else sizes[0].astype(np.int64) * (buckets[-1] + 1) + sizes[1]
        )
        row = (
            pack(sizes[0], buckets[-1])
            if len(sizes) == 1
            else pack_pairs(sizes[0], sizes[1], buckets[-1])
        )
        self._row_by_kind = row[np.argsort(self._kind, kind="stable")]
        self._num_rows = int(row.max()) + 1
        self.steps_per_epoch = -(-self._num_rows // self.rows[0])
        self.positions = self.steps_per_epoch * self.rows[0] * self.buckets[0]
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def span(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples of steps `first` to `stop` - 1, and the number of them in each row.

        All steps must be of one epoch.
        """
        epoch, position = divmod(first, self.steps_per_epoch)
        examples, border = self._epoch(epoch)
        border = border[position * self.rows[0] :][: (stop - first) * self.rows[0] + 1]
        # the last batch of an epoch can have empty rows
        size_R = np.zeros((stop - first) * self.rows[0], np.int64)
        size_R[: len(border) - 1] = np.diff(border)
        return examples[border[0] : border[-1]], size_R

    def batch(self, step: int) -> tuple[int, list[np.ndarray]]:
        """Returns (length, example numbers of each row) of the batch of `step` (from 0)."""
        return self.buckets[0], _as_rows(*self.span(step, step + 1))

    def shape(self, step: int) -> tuple[int, int]:
        """Returns (rows, length) of the batch of `step`."""
        return self.rows[0], self.buckets[0]

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the (rows, length) that occur, only one."""
        return [self.shape(0)]

    def padding_shares(self) -> tuple[float, ...]:
        """Returns the share of padding in an epoch's positions, for each side of the examples."""
        return tuple(1 - tokens / self.positions for tokens in self.tokens)

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the examples of all rows, concatenated, and the borders of the rows in them."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(np.arange(len(self.usable), dtype=self.usable.dtype))
        # sorted by kind, in random order within a kind
        by_kind = order[np.argsort(self._kind[order], kind="stable")]
        row = rng.permutation(np.arange(self._num_rows, dtype=np.int32))[self._row_by_kind]
        examples = self.usable[by_kind[np.argsort(row, kind="stable")]]
        return examples, np.concatenate([[0], np.cumsum(np.bincount(row))])


def _as_rows(examples: np.ndarray, size_R: np.ndarray) -> list[np.ndarray]:
    return np.split(examples, np.cumsum(size_R)[:-1])


def _with_ends(length_N: np.ndarray, usable: np.ndarray) -> int:
    return int(length_N[usable].sum()) + len(usable)


def _usable(
    shorter_N: np.ndarray, longer_N: np.ndarray, buckets: Sequence[int]
) -> tuple[np.ndarray, int, int]:
    """Returns the numbers of the usable examples, and how many are empty and too long.

    Args:
      shorter_N: tokens of the shorter side.
      longer_N: positions that the longer side needs.
    """
    empty_N = shorter_N == 0
    too_long_N = (longer_N > buckets[-1]) & ~empty_N
    usable = np.flatnonzero(~empty_N & ~too_long_N)
    empty, too_long = int(empty_N.sum()), int(too_long_N.sum())
    if not len(usable):
        raise InputError(
            f"None of {len(empty_N)} examples can be used: {empty} have an empty side and "
            f"{too_long} are longer than the longest of data.buckets = {tuple(buckets)}; raise it "
            "or check the dataset."
        )
    return usable.astype(np.int32 if len(empty_N) < 2**31 else np.int64), empty, too_long
