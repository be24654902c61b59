"""A trained model from its workdir, ready to translate.

from flaxformer_lite import translate
translator = translate.load("runs/mine")
print(translator(["Monday, May 5, 2025"]))
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from flaxformer_lite import workdir as workdir_lib
from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data.tokenizer import Tokenizer
from flaxformer_lite.decoding.generate import Decoder
from flaxformer_lite.model import transformer
from flaxformer_lite.training import metrics, parallel, step, writers
from flaxformer_lite.training.checkpoint import Checkpoints

ROWS = 64  # sentences decoded at once


class Translator:
    """Texts in the source language to texts in the target language, in order."""

    def __init__(self, config: Config, tokenizer: Tokenizer, params: dict, *, mesh: jax.sharding.Mesh):
        self.config, self.tokenizer, self.params, self.mesh = config, tokenizer, params, mesh
        self.model = transformer.build_model(config.model)
        self.decoder = make_decoder(self.model, config, mesh)

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """One translation a text; an empty text gives an empty translation.

        Raises:
          ValueError: a text has more tokens than the model takes; it is named by its number, counted from 1.
        """
        sources = self.tokenizer.encode(texts)
        longest = self.config.model.max_length - 1
        for number, (text, ids) in enumerate(zip(texts, sources, strict=True), start=1):
            if len(ids) > longest:
                raise ValueError(
                    f"line {number}: {len(ids)} tokens, and the model takes at most {longest}; "
                    f"split it into shorter sentences. It begins: {text[:60]!r}"
                )
        return self.tokenizer.decode(self.decoder(self.params, sources))


def make_decoder(model: transformer.EncoderDecoder, config: Config, mesh: jax.sharding.Mesh, **options) -> Decoder:
    """A `Decoder` that splits its batches over the devices of `mesh`."""
    return Decoder(
        model,
        max_extra_length=config.decode.max_extra_length,
        rows=-(-ROWS // mesh.size) * mesh.size,
        sharding=parallel.decoding_shardings(mesh),
        **options,
    )


def load(workdir: str | Path) -> Translator:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Raises:
      ValueError: the folder holds no run, or no checkpoint that can be read.
    """
    paths = workdir_lib.Workdir(Path(workdir))
    config = workdir_lib.read_config(paths.path)
    tokenizer = Tokenizer(paths.tokenizer)
    config = with_vocabulary(config, config.data.vocab_size)
    model = transformer.build_model(config.model)
    params = step.param_shapes(model)
    mesh = parallel.widest_mesh(config.data.rows_multiple)
    best, metric = None, config.train.best_metric
    if paths.checkpoints.is_dir():
        scores = writers.validation_scores(paths.metrics, lambda values: metrics.score(values, metric))
        checkpoints = Checkpoints(paths.checkpoints, scores=scores, read_only=True)
        best = checkpoints.best_step()
    if best is None:
        raise ValueError(f"{workdir}: there is no checkpoint yet; train this run first.")
    parts, record = checkpoints.restore(best, {"params": parallel.whole_on(mesh, params)})
    checkpoints.close()
    if record["tokenizer"] != tokenizer.fingerprint:  # so the ids of one are not the ids of the other
        raise ValueError(f"{paths.tokenizer}: this is not the tokenizer that step {best} was trained with.")
    return Translator(config, tokenizer, parts["params"], mesh=mesh)
