"""The subwords of a run: trains its tokenizer, and samples segmentations of training texts.

Subword regularisation is a new segmentation of each training text in each epoch. The methods are
BPE-dropout (Provilkov 2020) and sampling from a unigram model (Kudo 2018). A sample is a function
of the seed, the epoch, the example's number and its side. It is the same after a resume and for any
number of processes. A sample has more ids than the tokenizer's segmentation, so batches are planned
with extra length. A row that is still too short gets the tokenizer's ids.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from flaxformer_lite.checks.vocabularies import SIDES, copied_from, named_for, of_side
from flaxformer_lite.config import source_normalization
from flaxformer_lite.data.sources.examples import Examples, Reader
from flaxformer_lite.data.tokens import extension, tokenizer, two_vocabularies
from flaxformer_lite.data.tokens.given_tokenizer import Given
from flaxformer_lite.data.tokens.normalization import normalized
from flaxformer_lite.data.tokens.ragged import Ragged, mixed
from flaxformer_lite.data.tokens.segmentation import Segmenter
from flaxformer_lite.data.tokens.symbol_tokenizer import counted
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer, Tokenizer
from flaxformer_lite.field_rules import COUNTED
from flaxformer_lite.fields import Config
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole

READ_AT_ONCE = 8192  # examples in memory as text
GROWTH_SAMPLE = 1000  # evenly spaced examples for the estimate of the growth
EXAMPLES_AT_ONCE = 50  # segmentation takes some hundred bytes a character
SHARE = 0.9  # share of texts that fit into the planned length


def vocabulary_texts(
    reader: Reader, count: int, kind: str = "none", *, of: Sequence[str] = SIDES
) -> list[str]:
    """Returns at most `count` evenly spaced texts of all sources, then all targets.

    Reads only the returned texts. Of whole files a text is a line, so that no token spans two.

    Args:
      kind: the normalisation of the sources.
      of: the sides whose texts count.
    """
    sides = [side for side in of if side in reader.columns]
    total, texts = len(sides) * len(reader), []
    chosen = np.arange(min(count, total)) * total // max(1, min(count, total))
    for number, side in enumerate(sides):
        examples = chosen[chosen // max(1, len(reader)) == number] - number * len(reader)
        for first in range(0, len(examples), READ_AT_ONCE):
            some = getattr(reader(examples[first : first + READ_AT_ONCE]), side)
            texts += [normalized(text, kind) if side == "source" else text for text in some]
    if reader.part is not None:
        lines = [line for text in texts for line in text.split("\n") if line]
        texts = lines[:: max(1, -(-len(lines) // count))]
    return texts


def all_texts(reader: Reader, kind: str = "none", *, of: Sequence[str] = SIDES) -> Iterator[str]:
    """Yields all sources and targets, READ_AT_ONCE examples at a time.

    Args:
      kind: the normalisation of the sources.
      of: the sides whose texts count.
    """
    for first in range(0, len(reader), READ_AT_ONCE):
        examples = reader(range(first, min(first + READ_AT_ONCE, len(reader))))
        if "source" in of:
            yield from (normalized(text, kind) for text in examples.source or ())
        if "target" in of:
            yield from examples.target or ()


def provide_tokenizer(
    config: Config,
    reader: Reader,
    path: Path,
    *,
    verify: bool = False,
    given: Given | None = None,
) -> None:
    """Writes the tokenizer of a run in process 0 if `path` does not exist.

    Args:
      reader: of the training split.
      verify: whether to make an existing tokenizer again, and compare the result: it is from an
        earlier start, and no checkpoint records its text.
      given: the tokenizers to copy, or under `init.vocabulary='extend'` to extend by this text; one
        that is None is trained.

    Raises:
      InputError: the tokenizer cannot be made, or the existing one differs.
    """

    def provide() -> None:
        if path.exists() and not verify:
            return
        content = _content(config, reader, path, given)
        if not path.exists():
            write_whole(path, content)
        elif content != path.read_bytes():
            copied = copied_from(config)
            made_of = (
                f"of {' and '.join(map(repr, copied))}"
                if copied
                else f"that the text of {config.data.train_split!r} gives now"
            )
            raise InputError(
                f"{path}: differs from the tokenizer {made_of}, and no checkpoint needs it yet; "
                f"put the old {'one' if copied else 'text'} back, or delete it, which makes a new "
                "one."
            )

    multihost.by_process_0(provide)


def _content(config: Config, reader: Reader, path: Path, given: Given | None) -> bytes:
    """Returns the file of the tokenizer of a run."""
    given = given or Given(None, None)
    if config.data.target_tokenizer is None:
        return _content_of(config, reader, path, given.source, of=SIDES)
    files = {}
    for side in SIDES:
        with named_for(side):
            own = getattr(given, side)
            files[side] = _content_of(of_side(config, side), reader, path, own, of=(side,))
    return two_vocabularies.packed(files)


def _content_of(
    config: Config, reader: Reader, path: Path, given: AnyTokenizer | None, *, of: Sequence[str]
) -> bytes:
    """Returns the file of a tokenizer of one vocabulary, for the sides `of`."""
    data = config.data
    has_given = config.init.run is not None or data.tokenizer_file is not None
    if has_given and given is None:  # after the first checkpoint, which has its fingerprint
        raise InputError(f"{path}: the tokenizer of this run is gone; put the file back.")
    extends = config.init.vocabulary == "extend"
    if given is not None and not extends:
        return given.content
    normalization = source_normalization(config)
    if data.tokenizer in (*COUNTED, "byte"):
        every = all_texts(reader, normalization, of=of)
        return counted(every, kind=data.tokenizer, vocab_size=data.vocab_size)
    texts = vocabulary_texts(reader, data.vocabulary_sample, normalization, of=of)
    options: dict[str, Any] = {
        "vocab_size": data.vocab_size,
        "vocab_limit": data.vocab_limit,
        "character_coverage": data.character_coverage,
    }
    if given is not None:
        return extension.extended(given.content, texts, **options)
    return tokenizer.trained(texts, kind=data.tokenizer, **options)


class SubwordSampler:
    """Samples the ids of examples for an epoch."""

    def __init__(
        self,
        read: Callable[[Sequence[int] | np.ndarray], Examples],
        tokenizer: AnyTokenizer,
        *,
        kind: str,
        strength: float,
        seed: int,
        start: Sequence[int] = (),
    ):
        """
        Args:
          read: returns the texts of examples by their numbers, such as a `Reader`.
          tokenizer: a `Tokenizer`, or two of one kind.
          kind: 'bpe' or 'unigram', the kind of the tokenizer.
          strength: the probability to skip a merge, or the power of the likelihoods.
          start: ids at the start of every text.
        """
        self._read = read
        self._strength, self._seed, self._start = strength, seed, tuple(start)
        # An imported tokenizer raises InputError in `table`.
        own = {
            side: cast(Tokenizer, two_vocabularies.tokenizer_of(tokenizer, side)) for side in SIDES
        }
        source = Segmenter(kind, *own["source"].table())
        is_shared = own["source"] is own["target"]
        target = source if is_shared else Segmenter(kind, *own["target"].table())
        self._segment = {"source": source, "target": target}
        self._prepared = {side: each.prepared for side, each in own.items()}

    def __call__(self, examples: np.ndarray, epoch: int) -> dict[str, Ragged]:
        """Returns the sampled ids of each side of the examples, int32."""
        texts, sampled = self._read(examples), dict[str, Ragged]()
        for number, side in enumerate(("source", "target")):
            side_texts = getattr(texts, side)
            if side_texts is not None:
                keys = mixed(np.asarray(examples).astype(np.uint64), self._seed, epoch, number)
                prepared = [self._prepared[side](text, side) for text in side_texts]
                rows = self._segment[side](prepared, keys, self._strength)
                if self._start:
                    rows = Ragged.of([[*self._start, *row] for row in rows])
                sampled[side] = rows
        return sampled

    def growth(self, usual: dict[str, Ragged], longest: int) -> dict[str, float]:
        """Returns, for each side, the factor of ids that suffices for a SHARE of the texts.

        Args:
          usual: the tokenizer's ids of all examples, by side.
          longest: ids in the longest row; longer texts are never used and not part of the estimate.
        """
        fit_N = np.all([side.lengths() <= longest for side in usual.values()], axis=0)
        examples = np.flatnonzero(fit_N)
        if len(examples):
            examples = examples[
                np.unique(np.arange(GROWTH_SAMPLE) * len(examples) // GROWTH_SAMPLE)
            ]
        growth: dict[str, list[np.ndarray]] = {side: [] for side in usual}
        for first in range(0, len(examples), EXAMPLES_AT_ONCE):
            some = examples[first : first + EXAMPLES_AT_ONCE]
            for side, sampled in self(some, 0).items():
                usual_N = np.maximum(usual[side].take(some).lengths(), 1)
                growth[side].append(sampled.lengths() / usual_N)
        return {
            side: max(1.0, float(np.quantile(np.concatenate(parts), SHARE))) if parts else 1.0
            for side, parts in growth.items()
        }


def planned(length_N: np.ndarray, growth: float, longest: int) -> np.ndarray:
    """Returns lengths to plan with: `growth` x the ids, at most `longest` for a text that fits.

    Args:
      longest: ids in the longest row.
    """
    grown_N = np.ceil(length_N * growth).astype(np.int64)
    return np.maximum(length_N, np.minimum(grown_N, longest))
