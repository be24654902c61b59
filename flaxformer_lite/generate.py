"""A trained language model, ready to write.

from flaxformer_lite import generate
writer = generate.load("runs/mine", method="sample", temperature=0.8, seed=1)
print(writer(["Monday,"] * 3))
"""

from collections.abc import Sequence
from pathlib import Path

from flaxformer_lite import trained


class Writer:
    """Beginnings of texts to whole texts, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh)

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """What the model makes of each prompt, the prompt included; an empty one leaves all to the model.

        When drawing at random, text number i is a function of the seed, i and its prompt.

        Raises:
          InputError: a prompt has more tokens than the model takes; it is named by its number, counted from 1.
        """
        return self.run.tokenizer.decode(self._decoder(self.run.params, self.run.encode(prompts)))


def load(
    workdir: str | Path,
    *,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
    **decode: object,
) -> Writer:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      average, parameters, ensemble, tensor: as `trained.load` takes them; an average is 'last:5' or 'best:5'
        checkpoints, an ensemble other runs that decide together with this one, and a model lies on `tensor` devices.
      decode: fields of `DecodeConfig` to use in place of the run's own.

    Raises:
      InputError: the folder holds no run, no checkpoint that can be read, or no language model; or a field is wrong.
    """
    chosen = {"average": average, "parameters": parameters, "ensemble": ensemble, "tensor": tensor}
    run = trained.load(workdir, command="generate", architecture="decoder_lm", **chosen)
    return Writer(trained.with_decode(run, decode))
