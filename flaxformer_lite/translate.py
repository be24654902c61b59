"""A trained encoder-decoder, ready to translate.

from flaxformer_lite import translate
translator = translate.load("runs/mine")
print(translator(["Monday, May 5, 2025"]))
"""

from collections.abc import Sequence
from pathlib import Path

from flaxformer_lite import trained


class Translator:
    """Texts in the source language to texts in the target language, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh)

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """One translation a text; an empty text gives an empty translation.

        Raises:
          ValueError: a text has more tokens than the model takes; it is named by its number, counted from 1.
        """
        return self.run.tokenizer.decode(self._decoder(self.run.params, self.run.encode(texts)))


def load(workdir: str | Path, *, average: str | None = None, parameters: str | None = None) -> Translator:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      average, parameters: as `trained.load` takes them; an average is 'last:5' or 'best:5' checkpoints.

    Raises:
      ValueError: the folder holds no run, no checkpoint that can be read, or a model that does not translate.
    """
    chosen = {"average": average, "parameters": parameters}
    return Translator(trained.load(workdir, command="translate", architecture="encoder_decoder", **chosen))
