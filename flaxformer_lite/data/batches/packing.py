"""Which texts share a row: best fit decreasing (after Krell et al. 2021, arXiv:2107.02027), in numpy only.

The longest go first, and each goes into the fullest row that has room for it. Rows are kept by the room that they have
left, so that all texts of a length are placed with a few operations on arrays.
"""

from collections.abc import Iterator

import numpy as np


def pack(length_N: np.ndarray, room: int) -> np.ndarray:
    """The row of each text, from 0, such that the texts of a row have at most `room` tokens together: int32 (N,)."""
    row_N = np.empty(len(length_N), np.int32)
    rows_left, num_rows = _Rows(room), 0
    for length, texts in _longest_first(length_N):
        while len(texts):
            left = rows_left.fullest(length)
            if left is None:
                left, new = room, -(-len(texts) // (room // length))
                rows_left.add(room, np.arange(num_rows, num_rows + new, dtype=np.int32))
                num_rows += new
            fit = left // length
            rows = rows_left.take(left, -(-len(texts) // fit))
            place = np.repeat(rows, fit)[: len(texts)]
            row_N[texts[: len(place)]] = place
            rows_left.add(left - fit * length, rows[:-1])
            rows_left.add(left - (len(place) - fit * (len(rows) - 1)) * length, rows[-1:])
            texts = texts[len(place) :]
    return row_N


def pack_pairs(source_N: np.ndarray, target_N: np.ndarray, room: int) -> np.ndarray:
    """As `pack` for pairs of texts: both the sources and the targets of a row have at most `room` tokens together.

    A row's room is that of its fuller side, a pair's length that of its longer text, and each of the fullest rows gets
    one pair at a time. Rows that have more of source than of target get pairs where it is the other way round, so that
    both sides fill up.
    """
    row_N = np.empty(len(source_N), np.int32)
    used_R2 = np.zeros((0, 2), np.int32)
    rows_left = _Rows(room)
    size_N2 = np.stack([source_N, target_N], axis=1).astype(np.int32)
    for length, texts in _longest_first(np.maximum(source_N, target_N)):
        texts = texts[np.argsort(size_N2[texts, 0] - size_N2[texts, 1], kind="stable")]
        while len(texts):
            if rows_left.fullest(length) is None:
                new = -(-len(texts) // (room // length))
                rows_left.add(room, np.arange(len(used_R2), len(used_R2) + new, dtype=np.int32))
                used_R2 = np.concatenate([used_R2, np.zeros((new, 2), np.int32)])
            rows = rows_left.take_fullest(length, len(texts))
            rows = rows[np.argsort(used_R2[rows, 1] - used_R2[rows, 0], kind="stable")]
            chosen = np.arange(len(rows)) * len(texts) // len(rows)  # of every slant
            row_N[texts[chosen]] = rows
            used_R2[rows] += size_N2[texts[chosen]]
            texts = np.delete(texts, chosen)
            left_R = room - used_R2[rows].max(axis=1)
            order = np.argsort(left_R, kind="stable")
            values, first = np.unique(left_R[order], return_index=True)
            for value, part in zip(values.tolist(), np.split(rows[order], first[1:]), strict=True):
                rows_left.add(value, part)
    return row_N


class _Rows:
    """The numbers of rows by the room that they have left."""

    def __init__(self, room: int):
        self._parts: list[list[np.ndarray]] = [[] for _ in range(room + 1)]

    def fullest(self, length: int) -> int | None:
        """The least room, at least `length`, that a row has left; None if no row has that much."""
        return next((left for left in range(length, len(self._parts)) if self._parts[left]), None)

    def add(self, left: int, rows: np.ndarray) -> None:
        if len(rows):
            self._parts[left].append(rows)

    def take_fullest(self, length: int, count: int) -> np.ndarray:
        """Takes out `count` rows, or all, that have room for `length`, the fullest of them."""
        rows: list[np.ndarray] = []
        while count and (left := self.fullest(length)) is not None:
            rows.append(self.take(left, count))
            count -= len(rows[-1])
        return np.concatenate(rows)

    def take(self, left: int, count: int) -> np.ndarray:
        """Takes out the first `count` rows, or all, that have so much room left, in the order of their numbers."""
        parts = self._parts[left]
        rows = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts), kind="stable")
        self._parts[left] = [rows[count:]] if count < len(rows) else []
        return rows[:count]


def _longest_first(length_N: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each length that occurs, from the longest, and the texts that have it."""
    order = np.argsort(length_N, kind="stable")
    values, first = np.unique(length_N[order], return_index=True)
    yield from reversed(list(zip(values.tolist(), np.split(order, first[1:]), strict=True)))
