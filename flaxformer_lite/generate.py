"""Generates texts with a trained language model.

from flaxformer_lite import generate
generator = generate.load("runs/mine", method="sample", temperature=0.8, seed=1)
print(generator(["Monday,"] * 3))
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from flaxformer_lite import trained
from flaxformer_lite.system import given


class Generator:
    """Continues each prompt to a whole text, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        self._decoder = trained.make_decoder(run.model, run.config, run.mesh, run.tokenizer)

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """Returns a text for each prompt; it starts with the prompt, which may be empty.

        With sampling, text number i is a function of the seed, i and its prompt.

        Raises:
          InputError: a prompt has more tokens than the model takes.
        """
        rows = self.run.encode(given.texts(prompts, name="prompts", item="prompt"))
        return self.run.tokenizer.decode(self._decoder(self.run.params, rows))


def load(
    workdir: str | Path,
    *,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
    **decode: Unpack[trained.DecodeOptions],
) -> Generator:
    """Returns the best language model of a run, finished or not; the newest if none is evaluated.

    Args:
      average, parameters, ensemble, tensor: see `trained.load`.
      decode: fields of `DecodeConfig`, in place of the run's own.

    Raises:
      InputError: the folder contains no run, no readable checkpoint or no language model; or a
        field is wrong.
    """
    run = trained.load(
        workdir,
        command="generate",
        architecture="decoder_lm",
        average=average,
        parameters=parameters,
        ensemble=ensemble,
        tensor=tensor,
    )
    return Generator(trained.with_decode(run, decode))
