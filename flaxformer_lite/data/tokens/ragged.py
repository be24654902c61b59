"""Rows of ids of any length, concatenated in one array, in memory or memory-mapped from a file."""

from collections.abc import Iterator, Sequence

import numpy as np


def ranges(first_N: np.ndarray, stop_N: np.ndarray) -> np.ndarray:
    """Returns first, first + 1, ..., stop - 1 of each pair, concatenated."""
    size_N = stop_N - first_N
    before_N = np.cumsum(size_N) - size_N
    return np.repeat(first_N - before_N, size_N) + np.arange(int(size_N.sum()))


class Ragged:
    """Row i is `values[offsets[i] : offsets[i + 1]]`."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray):
        """
        Args:
          values: ids of any unsigned or signed integer type.
          offsets: int64, rows + 1 numbers, non-decreasing.
        """
        self.values, self.offsets = values, offsets

    @classmethod
    def of(cls, rows: "Ragged | Sequence[Sequence[int] | np.ndarray]") -> "Ragged":
        """Returns `rows` as int32 in memory; a `Ragged` is returned unchanged."""
        if isinstance(rows, Ragged):
            return rows
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(
            np.concatenate([np.empty(0, np.int32), *(np.asarray(row, np.int32) for row in rows)]),
            offsets,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int | slice) -> "np.ndarray | list[np.ndarray]":
        """Returns a row as int32, or a list of rows for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        # resolves a negative index, and raises IndexError if it is out of range
        index = range(len(self))[index]
        return self.values[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def lengths(self) -> np.ndarray:
        """Returns the number of ids of each row, int64, without reading ids."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Ragged":
        """Returns the rows with these numbers, in this order, in memory."""
        first, stop = self.offsets[rows], self.offsets[np.asarray(rows) + 1]
        offsets = np.concatenate([[0], np.cumsum(stop - first)])
        return Ragged(self.values[ranges(first, stop)], offsets)

    def or_else(self, other: "Ragged", own: np.ndarray) -> "Ragged":
        """Returns row i of this array if `own[i]`, else row i of `other`."""
        both = Ragged(
            np.concatenate([self.values, other.values.astype(self.values.dtype)]),
            np.concatenate([self.offsets, self.offsets[-1] + other.offsets[1:]]),
        )
        return both.take(np.arange(len(self)) + np.where(own, 0, len(self)))
