"""Trains the tokenizer of a run on the texts of its training split."""

from pathlib import Path

import numpy as np

from flaxformer_lite.config import Config, source_normalization
from flaxformer_lite.data.sources.examples import Reader
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.runs import multihost
from flaxformer_lite.system.errors import InputError

READ_AT_ONCE = 8192  # examples in memory as text


def vocabulary_texts(reader: Reader, count: int, kind: str = "none") -> list[str]:
    """Returns at most `count` evenly spaced texts of all sources, then all targets.

    Reads only the returned texts.

    Args:
      kind: the normalisation of the sources.
    """
    sides = [side for side in ("source", "target") if side in reader.columns]
    total, texts = len(sides) * len(reader), []
    chosen = np.arange(min(count, total)) * total // max(1, min(count, total))
    for number, side in enumerate(sides):
        examples = chosen[chosen // max(1, len(reader)) == number] - number * len(reader)
        for first in range(0, len(examples), READ_AT_ONCE):
            some = getattr(reader(examples[first : first + READ_AT_ONCE]), side)
            texts += [
                tokenizer.normalized(text, kind) if side == "source" else text for text in some
            ]
    return texts


def provide_tokenizer(config: Config, reader: Reader, path: Path, *, verify: bool) -> None:
    """Trains the tokenizer in process 0 if `path` does not exist.

    Args:
      reader: of the training split.
      verify: whether to train an existing tokenizer again, and compare the result.

    Raises:
      InputError: the tokenizer cannot be trained, or the existing one differs.
    """

    def provide() -> None:
        if path.exists() and not verify:
            return
        kind = source_normalization(config)
        texts = vocabulary_texts(reader, config.data.vocabulary_sample, kind)
        options = {
            "vocab_size": config.data.vocab_size,
            "kind": config.data.tokenizer,
            "vocab_limit": config.data.vocab_limit,
            "character_coverage": config.data.character_coverage,
        }
        if not path.exists():
            tokenizer.train(texts, path, **options)
        elif tokenizer.trained(texts, **options) != path.read_bytes():
            raise InputError(
                f"{path}: not what the text of {config.data.train_split!r} gives now, and no "
                "checkpoint needs it yet; put the old text back, or delete it, which makes a new "
                "one."
            )

    multihost.by_process_0(provide)
