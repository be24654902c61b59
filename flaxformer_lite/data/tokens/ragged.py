"""Rows of ids of any length, concatenated in one array, in memory or memory-mapped from a file."""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

ROWS_AT_ONCE = 1 << 16  # whose ids are hashed at once


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

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
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


def count_shared(
    sides: dict[str, Ragged], hashes_N: np.ndarray, *, unknown: int | None = None
) -> int:
    """Returns the number of rows whose hash is in `hashes_N`, see `hashes`.

    These are the rows with equal ids on each side. A hash has 64 bits, so 10 million take 80 MB.

    Args:
      unknown: an id that stands for different symbols: rows with it are not counted.
    """
    is_shared_N = np.isin(hashes(sides), hashes_N)
    for side in sides.values() if unknown is not None else ():
        at = np.flatnonzero(side.values == unknown)
        is_shared_N[np.searchsorted(side.offsets, at, side="right") - 1] = False
    return int(is_shared_N.sum())


def hashes(sides: dict[str, Ragged]) -> np.ndarray:
    """Returns a hash of each row over all sides, uint64."""
    count = len(next(iter(sides.values())))
    parts = [
        _hashes_of(
            [_rows(side, first, min(first + ROWS_AT_ONCE, count)) for side in sides.values()]
        )
        for first in range(0, count, ROWS_AT_ONCE)
    ]
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _rows(side: Ragged, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of these rows, concatenated, and the first index of each row and the end."""
    offsets = side.offsets[first : stop + 1]
    return side.values[offsets[0] : offsets[-1]], offsets - offsets[0]


def _hashes_of(sides: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Returns the sum over all ids of a row of a mix of the id, its position and its side."""
    total_N = np.zeros(len(sides[0][1]) - 1, np.uint64)
    for number, (ids_M, offsets) in enumerate(sides):
        length_N = np.diff(offsets)
        position_M = np.arange(len(ids_M)) - np.repeat(offsets[:-1], length_N)
        key_M = (position_M.astype(np.uint64) << np.uint64(32)) | ids_M.astype(np.uint64)
        mixed_M = mixed(key_M, number)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed_M, dtype=np.uint64)])
        total_N += (
            sums[offsets[1:]] - sums[offsets[:-1]] + mixed(length_N.astype(np.uint64), number)
        )
    return total_N


def mixed(key: np.ndarray, *words: int) -> np.ndarray:
    """Returns uint64 keys hashed with each of `words` (SplitMix64, Steele 2014)."""
    with np.errstate(over="ignore"):
        for word in words:
            key = key + (np.uint64(word) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key = key ^ (key >> np.uint64(31))
    return key
