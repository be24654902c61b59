"""Classifies texts with a trained classifier.

from flaxformer_lite import classify
classifier = classify.load("runs/mine")
print(classifier(["Montag, 5. Mai 2025"]))
"""

import collections
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from flaxformer_lite import trained
from flaxformer_lite.data.tokens.tokenizer import pad_rows
from flaxformer_lite.decoding.decoder import padded_length
from flaxformer_lite.fields import BOS
from flaxformer_lite.system import given

ROWS = 64  # texts that are classified at once


class Classifier:
    """Returns the class of each text, in order."""

    def __init__(self, run: trained.Trained):
        self.run = run
        assert run.label_names is not None, "a classifier has labels"
        self._names = run.label_names
        self._logits = jax.jit(run.model.apply)

    def __call__(
        self, texts: Sequence[str], *, name: str = "text", numbers: Sequence[int] | None = None
    ) -> list[str]:
        """Returns the name of the most probable class of each text; empty for an empty text.

        Args:
          name, numbers: the name and the number of a text in error messages; by default its number,
            counted from 1.

        Raises:
          InputError: a text has more tokens than the model takes.
        """
        texts = given.texts(texts)
        probability_NC = self.probabilities(texts, name=name, numbers=numbers)
        best_N = probability_NC.argmax(axis=1)
        return [self._names[best] if text else "" for text, best in zip(texts, best_N, strict=True)]

    def probabilities(
        self, texts: Sequence[str], *, name: str = "text", numbers: Sequence[int] | None = None
    ) -> np.ndarray:
        """Returns the probabilities of `run.label_names` for each text, (N, C); see `__call__`."""
        rows = [
            np.concatenate([[BOS], ids]).astype(np.int32)
            for ids in self.run.encode(given.texts(texts), name=name, numbers=numbers)
        ]
        probability_NC = np.zeros((len(rows), len(self._names)), np.float32)
        # Texts of the same padded length share batches, so that the probabilities of a text do not
        # depend on other texts.
        of_length = collections.defaultdict(list)
        for i, row in enumerate(rows):
            of_length[padded_length(len(row) + 1, self.run.config.model.max_length)].append(i)
        for length, group in of_length.items():
            for first in range(0, len(group), ROWS):
                part = group[first : first + ROWS]
                unused = [np.empty(0, np.int32)] * (ROWS - len(part))
                source_BS = pad_rows([rows[i] for i in part] + unused, length)
                logits_BC = self._logits({"params": self.run.params}, source_BS)
                probability_NC[part] = jax.nn.softmax(logits_BC)[: len(part)]
        return probability_NC


def load(
    workdir: str | Path,
    *,
    average: str | None = None,
    parameters: str | None = None,
    ensemble: str | Path | Sequence[str | Path] = (),
    tensor: int = 1,
) -> Classifier:
    """Returns the best classifier of a run, finished or not; the newest if none is evaluated yet.

    Args:
      average, parameters, ensemble, tensor: see `trained.load`.

    Raises:
      InputError: the folder contains no run, no readable checkpoint or no classifier.
    """
    run = trained.load(
        workdir,
        command="classify",
        architecture="encoder_classifier",
        average=average,
        parameters=parameters,
        ensemble=ensemble,
        tensor=tensor,
    )
    return Classifier(run)
