"""Batches of token ids as a stream: made ahead in a grain thread, and put on the devices ahead of their step."""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from flaxformer_lite.data.batching import EMPTY_ROW, BatchPlan
from flaxformer_lite.data.tokenizer import pad_rows


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Examples as ids, without start or end symbols: `source[i]` is translated by `target[i]`."""

    source: list[np.ndarray]
    target: list[np.ndarray]

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each source and of each target."""
        return np.array([len(x) for x in self.source]), np.array([len(x) for x in self.target])


class Batches:
    """Random access to the batch of each step, as grain wants a source: this process's rows of it.

    The rows of process p are the p-th of `process_count` equal parts, so the global batch does not depend on how
    many processes there are.
    """

    def __init__(
        self,
        pairs: TokenPairs,
        plan: BatchPlan,
        *,
        num_steps: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._pairs, self._plan, self._num_steps = pairs, plan, num_steps
        self._part = (process_index, process_count)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """`source` and `target`, int32 (rows, length), and `row`, int32 (rows,): their numbers in the global batch."""
        length, example_B = self._plan.batch(int(step))
        index, count = self._part
        row_B = np.split(np.arange(len(example_B), dtype=np.int32), count)[index]
        return {
            "source": pad_rows([self._side(self._pairs.source, i) for i in example_B[row_B]], length),
            "target": pad_rows([self._side(self._pairs.target, i) for i in example_B[row_B]], length),
            "row": row_B,
        }

    @staticmethod
    def _side(rows: list[np.ndarray], example: int) -> np.ndarray:
        return np.empty(0, np.int32) if example == EMPTY_ROW else rows[example]


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


def fingerprint(pairs: TokenPairs, plan: BatchPlan) -> str:
    """SHA-256 of the ids of every example and of the order of the first epoch: equal data gives equal training."""
    digest = hashlib.sha256(repr((plan.buckets, plan.rows, plan.seed)).encode())
    for side in (pairs.source, pairs.target):
        digest.update(np.array([len(ids) for ids in side], np.int64).tobytes())
        digest.update(np.concatenate(side).astype(np.int32).tobytes())
    for step in range(plan.steps_per_epoch):
        digest.update(plan.batch(step)[1].astype(np.int64).tobytes())
    return digest.hexdigest()
