"""Windows of a language model: blocks of consecutive tokens of a stream, in numpy only.

The stream of a split is all its texts in their order, with one end symbol between two texts:

    t1 t1 t1 END t2 t2 END t3 t3 t3 t3

Each token of the stream is a label once an epoch. The model reads the token before each label, also
before the first label of a block, so a block needs no start symbol. Only the first label of a text
has none before it in its text: there the model reads the start symbol, as in any other batch.
"""

import functools

import numpy as np

from flaxformer_lite.data.batches.batching import bucket_rows
from flaxformer_lite.data.tokens.ragged import Ragged, ranges
from flaxformer_lite.fields import BOS, EOS, PAD
from flaxformer_lite.system.errors import InputError


class WindowPlan:
    """The order of the blocks of a stream, a pure function of (seed, step).

    In training an epoch starts at a random offset, so the blocks have other borders in each epoch:
    a short block up to the offset, full blocks, and a short one at the end. The blocks are
    shuffled. All epochs have the same number of blocks: if an offset needs one block less than
    others, a full block is cut in half.

    In evaluation the offset is 0, and the blocks are in order.

    Attributes: as `BatchPlan`. A text is never too long. `tokens` is the length of the stream.
    """

    too_long = 0

    def __init__(
        self,
        length_N: np.ndarray,
        *,
        windows: int,
        tokens_per_batch: int,
        rows_multiple: int = 1,
        seed: int = 0,
        shuffled: bool = True,
    ):
        """
        Args:
          length_N: tokens of each text, without the end symbol.
          windows: tokens of a block.
          shuffled: whether to plan for training, see above.

        Raises:
          InputError: no text has a token.
        """
        self.seed, self.buckets, self._shuffled = seed, (windows,), shuffled
        self.usable = np.flatnonzero(length_N > 0)
        self.empty = len(length_N) - len(self.usable)
        if not len(self.usable):
            raise InputError(
                f"None of {len(length_N)} texts can be used: all are empty; check the dataset."
            )
        total = int(length_N.sum()) + len(self.usable) - 1
        self.tokens = (total,)
        self.rows = bucket_rows(
            self.buckets, tokens_per_batch=tokens_per_batch, rows_multiple=rows_multiple
        )
        self._blocks = -(-(total - 1) // windows) + 1 if shuffled else -(-total // windows)
        self.steps_per_epoch = -(-self._blocks // self.rows[0])
        self.positions = self.steps_per_epoch * self.rows[0] * windows
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)

    def span(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks of steps `first` to `stop` - 1, and the number of them in each row.

        A block is named by the index of its first label in the stream. A row has one block; rows at
        the end of an epoch have none. All steps must be of one epoch.
        """
        epoch, position = divmod(first, self.steps_per_epoch)
        first_K, _ = self._epoch(epoch)
        rows = (stop - first) * self.rows[0]
        blocks = first_K[position * self.rows[0] :][:rows]
        return blocks, (np.arange(rows) < len(blocks)).astype(np.int64)

    def borders(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each row of `step`, the first label of its block and the one after its last.

        Both are 0 in an empty row.
        """
        epoch, position = divmod(step, self.steps_per_epoch)
        rows = slice(position * self.rows[0], (position + 1) * self.rows[0])
        first_R, stop_R = (
            np.pad(border_K[rows], (0, self.rows[0] - len(border_K[rows])))
            for border_K in self._epoch(epoch)
        )
        return first_R, stop_R

    def shape(self, step: int) -> tuple[int, int]:
        """Returns (rows, length) of the batch of `step`."""
        return self.rows[0], self.buckets[0]

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the (rows, length) that occur, only one."""
        return [self.shape(0)]

    def padding_shares(self) -> tuple[float, ...]:
        """Returns the share of padding in an epoch's positions."""
        return (1 - self.tokens[0] / self.positions,)

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each block, its first label and the one after its last."""
        (total,), (length,) = self.tokens, self.buckets
        if not self._shuffled:
            first_K = np.arange(0, total, length)
            return first_K, np.minimum(first_K + length, total)
        rng = np.random.default_rng((self.seed, epoch))
        border = np.arange(int(rng.integers(length)), total, length)
        border = np.unique(np.concatenate([[0], border, [total]]))
        if len(border) - 1 < self._blocks:
            longest = int(np.diff(border).argmax())
            border = np.insert(border, longest + 1, border[longest : longest + 2].sum() // 2)
        order_K = rng.permutation(self._blocks)
        return border[:-1][order_K], border[1:][order_K]


class Stream:
    """The stream of some texts; reads blocks of it without joining the texts in memory."""

    def __init__(self, texts: Ragged):
        self._values = texts.values
        border = np.unique(texts.offsets)  # an empty text has no part in the stream
        self._text_start = border + np.arange(len(border))  # of each text, and after the last END

    def fill(
        self, first_R: np.ndarray, stop_R: np.ndarray, *, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels of each block, (R, length), and the token before each block, (R,).

        Both are int32. Short blocks end with padding. The token before the stream is the start
        symbol, also before an empty block.
        """
        label = np.full((len(first_R), length), PAD, np.int32)
        is_label = np.arange(length) < (stop_R - first_R)[:, None]
        label[is_label] = self._ids(ranges(first_R, stop_R))
        before_R = np.full(len(first_R), BOS, np.int32)
        before_R[first_R > 0] = self._ids(first_R[first_R > 0] - 1)
        return label, before_R

    def _ids(self, place_M: np.ndarray) -> np.ndarray:
        """Returns the tokens at these places of the stream, int32."""
        text_M = np.searchsorted(self._text_start, place_M, side="right") - 1
        ids_M = self._values[place_M - text_M].astype(np.int32)  # one END before each further text
        return np.where(place_M == self._text_start[text_M + 1] - 1, EOS, ids_M)
