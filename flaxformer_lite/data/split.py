"""The data of a run: the ids of its splits, the plans of their batches, and their batches."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from flaxformer_lite.data.batches.loader import Batches, Plan, Sample, Tokens
from flaxformer_lite.data.batches.windows import WindowPlan
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer

READ_AT_ONCE = 8192  # examples in memory as text, if a split is not in memory as a whole


@dataclasses.dataclass(frozen=True)
class Split:
    """One split of a dataset. If `texts` is None, `reader` reads them."""

    texts: Examples | None
    tokens: Tokens
    plan: Plan
    reader: Reader | None = None
    drawing: Sample | None = None  # samples other ids in each epoch; None: fixed ids

    def batches(self, *, num_steps: int | None = None, part: tuple[int, int] = (0, 1)) -> Batches:
        """Returns the batches of the plan: part i of n of the rows, `part` = (i, n).

        Args:
          num_steps: the number of batches; None: one epoch.
        """
        steps = self.plan.steps_per_epoch if num_steps is None else num_steps
        return Batches(self.tokens, self.plan, num_steps=steps, part=part, sample=self.drawing)

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


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a training run."""

    tokenizer: AnyTokenizer
    train: Split
    validation: Split
    label_names: list[str] | None  # None unless the model is a classifier
    fingerprint: str  # of the training ids and their order
