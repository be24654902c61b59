"""Rows of ids of any length, end to end in one array: in memory, or mapped from a file and read where it is touched."""

from collections.abc import Iterator, Sequence

import numpy as np


def ranges(first_N: np.ndarray, stop_N: np.ndarray) -> np.ndarray:
    """first, first + 1, ..., stop - 1 of each pair, one after another."""
    size_N = stop_N - first_N
    before_N = np.cumsum(size_N) - size_N
    return np.repeat(first_N - before_N, size_N) + np.arange(int(size_N.sum()))


class Ragged:
    """Row i is `values[offsets[i] : offsets[i + 1]]`."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray):
        """
        Args:
          values: ids of any unsigned or signed integer type.
          offsets: int64, one more than there are rows, never falling.
        """
        self.values, self.offsets = values, offsets

    @classmethod
    def of(cls, rows: "Ragged | Sequence[Sequence[int] | np.ndarray]") -> "Ragged":
        """`rows` as int32 in memory; what is ragged already stays as it is."""
        if isinstance(rows, Ragged):
            return rows
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice) -> "np.ndarray | list[np.ndarray]":
        """A row as int32, or a list of them."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # counts from the end if negative, and raises IndexError beyond it
        return self.values[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> np.ndarray:
        """Ids of each row, int64; no id is read."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Ragged":
        """The rows of these numbers, in their order, in memory."""
        first, stop = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        offsets = np.concatenate([[0], np.cumsum(stop - first)])
        return Ragged(self.values[ranges(first, stop)], offsets)

    def or_else(self, other: "Ragged", own: np.ndarray) -> "Ragged":
        """Row i of this where `own[i]`, else of `other`."""
        both = Ragged(
            np.concatenate([self.values, other.values.astype(self.values.dtype)]),
            np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]]),
        )
        return both.take(np.arange(len(self)) + np.where(own, 0, len(self)))
