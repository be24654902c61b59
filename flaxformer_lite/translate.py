"""A trained encoder-decoder, ready to translate.

from flaxformer_lite import translate
translator = translate.load("runs/mine")
print(translator(["Monday, May 5, 2025"]))

By beam search, `translate.load("runs/mine", method="beam")`, it also has `n_best(texts, 3)`.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flaxformer_lite import trained


class Translator:
    """Texts in the source language to texts in the target language, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh)

    def __call__(self, texts: Sequence[str], prefixes: Sequence[str] | None = None) -> list[str]:
        """One translation a text, which begins with the text's prefix; an empty text gives an empty translation.

        Raises:
          ValueError: a text or a prefix has more tokens than the model takes; it is named by its number, counted from
            1. Or there are not as many prefixes as texts.
        """
        sources, beginnings = self._encode(texts, prefixes)
        return self.run.tokenizer.decode(self._decoder(self.run.params, sources, prefixes=beginnings))

    def n_best(
        self, texts: Sequence[str], n: int, prefixes: Sequence[str] | None = None
    ) -> list[list[tuple[str, float]]]:
        """The n best translations of each text with their scores, best first, by beam search; fewer if there are fewer.

        A score is the log-probability (natural) of the translation's tokens, its end symbol among them, over the length
        penalty. Two translations may be the same text in other tokens. An empty text has the empty one, with score 0.

        Raises:
          ValueError: as when called; or `decode.method` is not 'beam', or `decode.beam_size` is less than n.
        """
        sources, beginnings = self._encode(texts, prefixes)
        found = self._decoder.n_best(self.run.params, sources, n, prefixes=beginnings)
        decode = self.run.tokenizer.decode
        return [list(zip(decode(ids for ids, _ in row), (score for _, score in row), strict=True)) for row in found]

    def _encode(
        self, texts: Sequence[str], prefixes: Sequence[str] | None
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        sources = self.run.encode(texts)
        if prefixes is None:
            return sources, None
        if len(prefixes) != len(texts):
            raise ValueError(f"prefixes: expected one a text, {len(texts)}, got {len(prefixes)}; '' is none.")
        return sources, self.run.encode(prefixes, name="prefix")


def load(
    workdir: str | Path, *, average: str | None = None, parameters: str | None = None, **decode: object
) -> Translator:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      average, parameters: as `trained.load` takes them; an average is 'last:5' or 'best:5' checkpoints.
      decode: fields of `DecodeConfig` to use in place of the run's own.

    Raises:
      ValueError: the folder holds no run, no checkpoint that can be read, or a model that does not translate; or a
        field is wrong.
    """
    chosen = {"average": average, "parameters": parameters}
    run = trained.load(workdir, command="translate", architecture="encoder_decoder", **chosen)
    return Translator(trained.with_decode(run, decode))
