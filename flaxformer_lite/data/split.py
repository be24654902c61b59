"""One split of a dataset: its ids, the plan of its batches, and the sizes of its texts."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from flaxformer_lite.data.batches.loader import Plan, Tokens
from flaxformer_lite.data.batches.windows import WindowPlan
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.tokens.subwords import SubwordSampler

READ_AT_ONCE = 8192  # examples in memory as text, if a split is not in memory as a whole


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a dataset. If `texts` is None, `reader` reads them."""

    texts: Examples | None
    tokens: Tokens
    plan: Plan
    reader: Reader | None = None
    drawing: SubwordSampler | None = None  # samples other ids in each epoch; None: fixed ids

    def lengths(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token counts of source and target for each example of the batch of `step`.

        The counts include the end symbols, and are 0 on a missing side. With subword sampling, they
        are the counts of the usual ids. With windows, an example is a block. The batch is the
        global one.
        """
        if isinstance(self.plan, WindowPlan):
            first_R, stop_R = self.plan.borders(step)
            return np.zeros_like(first_R), stop_R - first_R
        examples, _ = self.plan.span(step, step + 1)
        sides = self.tokens.sides()
        source, target = (
            sides[name].offsets[examples + 1] - sides[name].offsets[examples] + 1
            if name in sides
            else np.zeros(len(examples), np.int64)
            for name in ("source", "target")
        )
        return source, target

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the target texts in the plan, the divisor of a loss in bits per byte."""
        return self._sizes[0]

    @property
    def text_characters(self) -> int:
        """Unicode characters of these texts, the divisor of a loss per character."""
        return self._sizes[1]

    @functools.cached_property
    def _sizes(self) -> tuple[int, int]:
        """Bytes and characters, counted in one pass over the texts."""
        size = [0, 0]
        for text in self._usable_targets():
            size[0] += len(text.encode())
            size[1] += len(text)
        return size[0], size[1]

    def _usable_targets(self) -> Iterator[str]:
        used = self.plan.usable
        if self.texts is not None:
            targets = self.texts.target or []
            yield from (targets[i] for i in used)
        elif self.reader is not None:
            records = self.reader.records_of(used)
            for first in range(0, len(records), READ_AT_ONCE):
                yield from self.reader(records[first : first + READ_AT_ONCE]).target or ()
