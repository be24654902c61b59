"""Which examples make up batch number `step`: a pure function of (seed, step), in numpy only."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np


def bucket_rows(buckets: Sequence[int], *, tokens_per_batch: int, rows_multiple: int) -> list[int]:
    """Rows of a batch for each bucket length: as many as the token budget holds, a multiple of `rows_multiple`."""
    return [tokens_per_batch // length // rows_multiple * rows_multiple for length in buckets]


class BatchPlan:
    """The order of training: every example once an epoch, in a row of its own, among others of like length.

    An epoch is shuffled, cut into batches bucket by bucket, and the batches are shuffled. What does not fill a
    batch moves on to the next longer bucket, so at most one batch an epoch has empty rows.

    Attributes:
      steps_per_epoch: batches that hold every usable example once.
      buckets: the bucket lengths in use.
      rows: rows of a batch for each of them.
      usable: numbers of the examples that are used.
      too_long: how many examples are longer than the longest bucket, and left out.
      empty: how many examples have an empty side, and are left out.
    """

    def __init__(
        self,
        source_length_N: np.ndarray | None,
        target_length_N: np.ndarray | None,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int,
        rows_multiple: int = 1,
        seed: int = 0,
    ):
        """Lengths count tokens without the end symbol; every side of an example needs room for one more.

        A side that the examples do not have is None.

        Raises:
          ValueError: no example is left to train on.
        """
        sides = [length_N for length_N in (source_length_N, target_length_N) if length_N is not None]
        self.seed = seed
        self._length_N = np.maximum.reduce(sides) + 1
        self._bucket_N = np.searchsorted(buckets, self._length_N)
        self.usable, self.empty, self.too_long = _usable(np.minimum.reduce(sides), self._length_N, buckets)
        self.buckets = tuple(buckets[: self._bucket_N[self.usable].max() + 1])  # longer ones stay without a batch
        self.rows = bucket_rows(self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self.steps_per_epoch = len(self._epoch(0))

    def batch(self, step: int) -> tuple[int, list[np.ndarray]]:
        """(padded length, example numbers of each row) of the batch of `step` (from 0): one a row, or none."""
        epoch, position = divmod(step, self.steps_per_epoch)
        length, rows, examples = self._epoch(epoch)[position]
        return length, [examples[row : row + 1] for row in range(rows)]

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length) of the batch of `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        length, rows, _ = self._epoch(epoch)[position]
        return rows, length

    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, length) that occur, most frequent first."""
        seen = [self.shape(step) for step in range(self.steps_per_epoch)]
        return sorted(set(seen), key=seen.count, reverse=True)

    def padding_share(self) -> float:
        """Share of an epoch's positions that hold padding, by the longer side of each example."""
        positions = sum(rows * length for length, rows, _ in self._epoch(0))
        return 1 - float(self._length_N[self.usable].sum()) / positions

    def _plan_epoch(self, epoch: int) -> list[tuple[int, int, np.ndarray]]:
        """(length, rows, examples) of each batch; only the incomplete one has fewer examples than rows."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(self.usable)
        bucket_of_order = self._bucket_N[order]
        batches, left = [], np.empty(0, order.dtype)
        for bucket, (length, rows) in enumerate(zip(self.buckets, self.rows, strict=True)):
            waiting = np.concatenate([left, order[bucket_of_order == bucket]])
            full = len(waiting) // rows
            batches += [(length, rows, examples) for examples in waiting[: full * rows].reshape(full, rows)]
            left = waiting[full * rows :]
        if len(left):
            batches.append((length, rows, left))
        return [batches[i] for i in rng.permutation(len(batches))]


class PackedPlan:
    """The order of training where a row holds many texts: every text once an epoch, next to no padding.

    Which lengths share a row is the same in all epochs, so that all have the same number of rows; which texts have
    these places, and the order of the rows, is drawn anew for each.

    Attributes: as `BatchPlan`; the only bucket is the longest.
    """

    def __init__(
        self,
        length_N: np.ndarray,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int,
        rows_multiple: int = 1,
        seed: int = 0,
    ):
        """Lengths count tokens without the end symbol; each text takes one more.

        Raises:
          ValueError: no text is left to train on.
        """
        self.seed, self.buckets = seed, (buckets[-1],)
        self.rows = bucket_rows(self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple)
        self.usable, self.empty, self.too_long = _usable(length_N, length_N + 1, buckets)
        self._length = length_N[self.usable] + 1
        self._row_by_length = pack(self._length, buckets[-1])[np.argsort(self._length, kind="stable")]
        self._num_rows = int(self._row_by_length.max()) + 1
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self.steps_per_epoch = -(-self._num_rows // self.rows[0])

    def batch(self, step: int) -> tuple[int, list[np.ndarray]]:
        """(length, example numbers of each row) of the batch of `step` (from 0); an epoch may end with empty rows."""
        epoch, position = divmod(step, self.steps_per_epoch)
        examples, start = self._epoch(epoch)
        start = start[position * self.rows[0] :][: self.rows[0] + 1]
        rows = [examples[first:end] for first, end in itertools.pairwise(start)]
        return self.buckets[0], rows + [examples[:0]] * (self.rows[0] - len(rows))

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length) of the batch of `step`."""
        return self.rows[0], self.buckets[0]

    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, length) that occur."""
        return [self.shape(0)]

    def padding_share(self) -> float:
        """Share of an epoch's positions that hold padding."""
        return 1 - float(self._length.sum()) / (self.steps_per_epoch * self.rows[0] * self.buckets[0])

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples of all rows one after another, and where in them each row starts and the last one ends."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.usable))
        by_length = order[np.argsort(self._length[order], kind="stable")]  # in random order among their equals
        row = rng.permutation(self._num_rows)[self._row_by_length]
        examples = self.usable[by_length[np.argsort(row, kind="stable")]]
        return examples, np.concatenate([[0], np.cumsum(np.bincount(row))])


def pack(length_N: np.ndarray, room: int) -> np.ndarray:
    """The row of each text, from 0, such that the texts of a row have at most `room` tokens together.

    The longest texts go first, and each goes into the fullest row that has room for it: best fit decreasing, for all
    texts of a length at once (after Krell et al. 2021, arXiv:2107.02027).
    """
    row_N = np.empty(len(length_N), np.int64)
    left = np.empty(0, np.int64)  # room that is left in each row
    for length in np.unique(length_N)[::-1]:
        texts = np.flatnonzero(length_N == length)
        while len(texts):
            if not (left >= length).any():
                left = np.append(left, np.full(-(-len(texts) // (room // length)), room))
            fullest = left[left >= length].min()
            rows = np.repeat(np.flatnonzero(left == fullest), fullest // length)[: len(texts)]
            row_N[texts[: len(rows)]] = rows
            left -= length * np.bincount(rows, minlength=len(left))
            texts = texts[len(rows) :]
    return row_N


def _usable(shorter_N: np.ndarray, longer_N: np.ndarray, buckets: Sequence[int]) -> tuple[np.ndarray, int, int]:
    """The numbers of the examples that can be used, and how many are empty and too long.

    Args:
      shorter_N: tokens of the shorter side.
      longer_N: positions that the longer side needs.
    """
    empty_N = shorter_N == 0
    too_long_N = (longer_N > buckets[-1]) & ~empty_N
    usable, empty, too_long = np.flatnonzero(~empty_N & ~too_long_N), int(empty_N.sum()), int(too_long_N.sum())
    if not len(usable):
        raise ValueError(
            f"None of {len(empty_N)} examples can be used: {empty} have an empty side and {too_long} "
            f"are longer than the longest of data.buckets = {tuple(buckets)}; raise it or check the dataset."
        )
    return usable, empty, too_long
