"""Which examples make up batch number `step`: a pure function of (seed, step), in numpy only."""

import functools
from collections.abc import Sequence

import numpy as np

EMPTY_ROW = -1  # stands in a batch where there is no example


def bucket_rows(buckets: Sequence[int], *, tokens_per_batch: int, rows_multiple: int) -> list[int]:
    """Rows of a batch for each bucket length: as many as the token budget holds, a multiple of `rows_multiple`."""
    return [tokens_per_batch // length // rows_multiple * rows_multiple for length in buckets]


class BatchPlan:
    """The order of training: every example once an epoch, among others of like length.

    An epoch is shuffled, cut into batches bucket by bucket, and the batches are shuffled. What does not fill a
    batch moves on to the next longer bucket, so at most one batch an epoch has empty rows.

    Attributes:
      steps_per_epoch: batches that hold every usable example once.
      buckets: the bucket lengths in use.
      rows: rows of a batch for each of them.
      too_long: how many examples are longer than the longest bucket, and left out.
      empty: how many examples have an empty side, and are left out.
    """

    def __init__(
        self,
        source_length_N: np.ndarray,
        target_length_N: np.ndarray,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int,
        rows_multiple: int = 1,
        seed: int = 0,
    ):
        """Lengths count tokens without the end symbol; every side of an example needs room for one more.

        Raises:
          ValueError: no example is left to train on.
        """
        self.seed = seed
        self._length_N = np.maximum(source_length_N, target_length_N) + 1
        self._bucket_N = np.searchsorted(buckets, self._length_N)
        empty_N = np.minimum(source_length_N, target_length_N) == 0
        too_long_N = (self._bucket_N == len(buckets)) & ~empty_N
        self.empty, self.too_long = int(empty_N.sum()), int(too_long_N.sum())
        self._usable = np.flatnonzero(~empty_N & ~too_long_N)
        if not len(self._usable):
            raise ValueError(
                f"None of {len(empty_N)} examples can be used: {self.empty} have an empty side and {self.too_long} "
                f"are longer than the longest of data.buckets = {tuple(buckets)}; raise it or check the dataset."
            )
        self.buckets = tuple(buckets[: self._bucket_N[self._usable].max() + 1])  # longer ones stay without a batch
        self.rows = bucket_rows(self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self.steps_per_epoch = len(self._epoch(0))

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """(padded length, example numbers) of the batch of `step` (from 0); `EMPTY_ROW` where a row has none."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[position]

    def shape(self, step: int) -> tuple[int, int]:
        """(rows, length) of the batch of `step`."""
        length, example_B = self.batch(step)
        return len(example_B), length

    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, length) that occur, most frequent first."""
        seen = [self.shape(step) for step in range(self.steps_per_epoch)]
        return sorted(set(seen), key=seen.count, reverse=True)

    def padding_share(self) -> float:
        """Share of an epoch's target positions that hold padding, by the longer side of each example."""
        positions = sum(len(index_B) * length for length, index_B in self._epoch(0))
        return 1 - float(self._length_N[self._usable].sum()) / positions

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(self._usable)
        bucket_of_order = self._bucket_N[order]
        batches, left = [], np.empty(0, order.dtype)
        for bucket, (length, rows) in enumerate(zip(self.buckets, self.rows, strict=True)):
            waiting = np.concatenate([left, order[bucket_of_order == bucket]])
            full = len(waiting) // rows
            batches += [(length, index_B) for index_B in waiting[: full * rows].reshape(full, rows)]
            left = waiting[full * rows :]
        if len(left):
            batches.append((length, np.pad(left, (0, rows - len(left)), constant_values=EMPTY_ROW)))
        return [batches[i] for i in rng.permutation(len(batches))]
