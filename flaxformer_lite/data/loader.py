"""Batches of token ids as a stream: made ahead in a grain thread, and put on the devices ahead of their step."""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np

from flaxformer_lite.data.batching import BatchPlan, PackedPlan
from flaxformer_lite.data.tokenizer import EOS, PAD

NOTHING = -1  # stands for the label, or the example, of a row that has none


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Examples as ids, without end symbols: number i of each list, and None for what they do not have."""

    source: list[np.ndarray] | None = None
    target: list[np.ndarray] | None = None
    label: np.ndarray | None = None

    def lengths(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Tokens of each source and of each target."""
        sides = (self.source, self.target)
        return tuple(None if side is None else np.array([len(ids) for ids in side], np.int64) for side in sides)


class Batches:
    """Random access to the batch of each step, as grain wants a source: this process's rows of it.

    The rows of process p are the p-th of `process_count` equal parts, so the global batch does not depend on how
    many processes there are.
    """

    def __init__(
        self,
        tokens: Tokens,
        plan: BatchPlan | PackedPlan,
        *,
        num_steps: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._tokens, self._plan, self._num_steps = tokens, plan, num_steps
        self._part = (process_index, process_count)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """This process's part of the batch of `step`, all int32.

        `source` and `target` (rows, length), as far as the examples have them; `row` (rows,), the rows' numbers in the
        global batch; with labels `label` (rows,), -1 for an empty row; with a packed plan `segment` (rows, length),
        the number from 1 of the text within its row that a token or its end symbol belongs to, 0 for padding.
        """
        length, rows = self._plan.batch(int(step))
        index, count = self._part
        row_B = np.split(np.arange(len(rows), dtype=np.int32), count)[index]
        rows = [rows[row] for row in row_B]
        batch = {"row": row_B}
        for name, side in (("source", self._tokens.source), ("target", self._tokens.target)):
            if side is not None:
                batch[name], segment = fill_rows([[side[i] for i in row] for row in rows], length)
        if isinstance(self._plan, PackedPlan):
            batch["segment"] = segment
        if self._tokens.label is not None:
            label = self._tokens.label
            batch["label"] = np.array([label[row[0]] if len(row) else NOTHING for row in rows], np.int32)
        return batch


def fill_rows(rows: Sequence[Sequence[np.ndarray]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The texts of each row one after another, each with its end symbol, then padding; and the texts' numbers, from 1.

    Both are int32 (len(rows), length).
    """
    ids, segment = np.full((len(rows), length), PAD, np.int32), np.zeros((len(rows), length), np.int32)
    for row, texts in enumerate(rows):
        start = 0
        for number, text in enumerate(texts, 1):
            end = start + len(text)
            ids[row, start:end], ids[row, end] = text, EOS
            segment[row, start : end + 1] = number
            start = end + 1
    return ids, segment


def stream(
    batches: Batches, put: Callable[[dict[str, np.ndarray]], Any], *, first_step: int = 0, ahead: int = 2
) -> Iterator[Any]:
    """`put(batch)` of `first_step`, `first_step` + 1, ...: read in a thread, and put `ahead` steps before its turn."""
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    remaining = iter(grain.MapDataset.source(batches)[first_step:].to_iter_dataset(options))
    waiting = collections.deque(put(batch) for batch in itertools.islice(remaining, ahead))
    while waiting:
        ready = waiting.popleft()
        waiting.extend(put(batch) for batch in itertools.islice(remaining, 1))
        yield ready


def fingerprint(tokens: Tokens, plan: BatchPlan | PackedPlan) -> str:
    """SHA-256 of all examples and of the first epoch's batches: equal data gives equal training."""
    digest = hashlib.sha256(repr((plan.buckets, plan.rows, plan.seed)).encode())
    for side in (tokens.source, tokens.target):
        if side is not None:
            digest.update(np.array([len(ids) for ids in side], np.int64).tobytes())
            digest.update(np.concatenate(side).astype(np.int32).tobytes())
    if tokens.label is not None:
        digest.update(tokens.label.astype(np.int32).tobytes())
    for step in range(plan.steps_per_epoch):
        rows = plan.batch(step)[1]
        digest.update(np.concatenate([row if len(row) else [NOTHING] for row in rows]).astype(np.int64).tobytes())
        if isinstance(plan, PackedPlan):
            digest.update(np.array([len(row) for row in rows], np.int64).tobytes())
    return digest.hexdigest()
