"""Packs texts into rows by best fit decreasing (Krell et al. 2021, arXiv:2107.02027), in numpy.

Texts are placed from longest to shortest, each into the fullest row with enough free space. Rows
are grouped by free space, so that all texts of one length need only a few array operations.
"""

from collections.abc import Iterator

import numpy as np


def pack(length_N: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each text, from 0, int32 (N,), with at most `capacity` tokens in a row."""
    row_N = np.empty(len(length_N), np.int32)
    open_rows, num_rows = _Rows(capacity), 0
    for length, texts in _longest_first(length_N):
        while len(texts):
            free = open_rows.least_free(length)
            if free is None:
                free, new = capacity, -(-len(texts) // (capacity // length))
                open_rows.add(capacity, np.arange(num_rows, num_rows + new, dtype=np.int32))
                num_rows += new
            fit = free // length
            rows = open_rows.take(free, -(-len(texts) // fit))
            placed = np.repeat(rows, fit)[: len(texts)]
            row_N[texts[: len(placed)]] = placed
            open_rows.add(free - fit * length, rows[:-1])
            open_rows.add(free - (len(placed) - fit * (len(rows) - 1)) * length, rows[-1:])
            texts = texts[len(placed) :]
    return row_N


def pack_pairs(source_N: np.ndarray, target_N: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each pair, with at most `capacity` tokens in a row on each side.

    The free space of a row is that of its fuller side, and the length of a pair that of its longer
    text. Each of the fullest rows gets one pair at a time. Rows with more source than target tokens
    get pairs with more target than source tokens, so that both sides fill up.
    """
    row_N = np.empty(len(source_N), np.int32)
    used_R2 = np.zeros((0, 2), np.int32)
    open_rows = _Rows(capacity)
    size_N2 = np.stack([source_N, target_N], axis=1).astype(np.int32)
    for length, texts in _longest_first(np.maximum(source_N, target_N)):
        texts = texts[np.argsort(size_N2[texts, 0] - size_N2[texts, 1], kind="stable")]
        while len(texts):
            if open_rows.least_free(length) is None:
                new = -(-len(texts) // (capacity // length))
                open_rows.add(capacity, np.arange(len(used_R2), len(used_R2) + new, dtype=np.int32))
                used_R2 = np.concatenate([used_R2, np.zeros((new, 2), np.int32)])
            rows = open_rows.take_fullest(length, len(texts))
            rows = rows[np.argsort(used_R2[rows, 1] - used_R2[rows, 0], kind="stable")]
            chosen = np.arange(len(rows)) * len(texts) // len(rows)  # evenly over source - target
            row_N[texts[chosen]] = rows
            used_R2[rows] += size_N2[texts[chosen]]
            texts = np.delete(texts, chosen)
            free_R = capacity - used_R2[rows].max(axis=1)
            order = np.argsort(free_R, kind="stable")
            values, first = np.unique(free_R[order], return_index=True)
            for value, part in zip(values.tolist(), np.split(rows[order], first[1:]), strict=True):
                open_rows.add(value, part)
    return row_N


class _Rows:
    """Row numbers grouped by free space."""

    def __init__(self, capacity: int):
        self._parts: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]

    def least_free(self, length: int) -> int | None:
        """Returns the least free space of a row with at least `length`; None if there is no row."""
        return next((free for free in range(length, len(self._parts)) if self._parts[free]), None)

    def add(self, free: int, rows: np.ndarray) -> None:
        if len(rows):
            self._parts[free].append(rows)

    def take_fullest(self, length: int, count: int) -> np.ndarray:
        """Removes and returns the `count` fullest rows with space for `length`, or all of them."""
        rows: list[np.ndarray] = []
        while count and (free := self.least_free(length)) is not None:
            rows.append(self.take(free, count))
            count -= len(rows[-1])
        return np.concatenate(rows)

    def take(self, free: int, count: int) -> np.ndarray:
        """Removes and returns the `count` lowest row numbers with exactly `free` space, or all."""
        parts = self._parts[free]
        rows = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts), kind="stable")
        self._parts[free] = [rows[count:]] if count < len(rows) else []
        return rows[:count]


def _longest_first(length_N: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each length that occurs, from the longest, with its texts."""
    order = np.argsort(length_N, kind="stable")
    values, first = np.unique(length_N[order], return_index=True)
    yield from reversed(list(zip(values.tolist(), np.split(order, first[1:]), strict=True)))
