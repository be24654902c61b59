"""A trained model from its workdir, whatever its shape."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from flaxformer_lite import config as config_lib
from flaxformer_lite import workdir as workdir_lib
from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data.tokenizer import Tokenizer
from flaxformer_lite.decoding.generate import Decoder
from flaxformer_lite.model import transformer
from flaxformer_lite.training import metrics, parallel, step, writers
from flaxformer_lite.training.checkpoint import Checkpoints

ROWS = 64  # texts decoded at once


@dataclasses.dataclass(frozen=True)
class Trained:
    """The best model of a run: whole on each device of `mesh`."""

    config: Config
    tokenizer: Tokenizer
    model: nn.Module
    params: dict
    mesh: jax.sharding.Mesh
    label_names: list[str] | None  # of a classifier's classes

    def encode(self, texts: Sequence[str], *, name: str = "text") -> list[np.ndarray]:
        """One array of ids a text; `name`: what an error calls it.

        Raises:
          ValueError: a text has more tokens than the model takes; it is named by its number, counted from 1.
        """
        rows, model = self.tokenizer.encode(texts), self.config.model
        longest = model.max_length - (2 if model.architecture == "encoder_classifier" else 1)  # start and end symbols
        for number, (text, ids) in enumerate(zip(texts, rows, strict=True), start=1):
            if len(ids) > longest:
                advice = "split it into shorter sentences" if name == "text" else "shorten it"
                raise ValueError(
                    f"{name} {number}: {len(ids)} tokens, and the model takes at most {longest}; {advice}. "
                    f"It begins: {text[:60]!r}"
                )
        return rows


def load(workdir: str | Path, *, command: str | None = None, architecture: str | None = None) -> Trained:
    """The best model of a finished or half-finished run; without an evaluation yet, the newest.

    Args:
      command, architecture: what the model is wanted for, and the shape that this needs.

    Raises:
      ValueError: the folder holds no run, or no checkpoint that can be read, or a model of another shape.
    """
    paths = workdir_lib.Workdir(Path(workdir))
    config = workdir_lib.read_config(paths.path)
    if architecture not in (None, config.model.architecture):
        raise ValueError(
            f"{workdir}: {command} needs a run with model.architecture={architecture!r}, this one is "
            f"{config.model.architecture!r}."
        )
    tokenizer = Tokenizer(paths.tokenizer)
    config = with_vocabulary(config, config.data.vocab_size)
    # What computed attention then may not exist here, and is no part of what was learned.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, backend="auto"))
    model = transformer.build_model(config.model)
    mesh = parallel.widest_mesh(config.data.rows_multiple)
    best, metric = None, config.train.best_metric
    if paths.checkpoints.is_dir():
        scores = writers.validation_scores(paths.metrics, lambda values: metrics.score(values, metric))
        checkpoints = Checkpoints(paths.checkpoints, scores=scores, read_only=True)
        best = checkpoints.best_step()
    if best is None:
        raise ValueError(f"{workdir}: there is no checkpoint yet; train this run first.")
    shapes = {"params": parallel.whole_on(mesh, step.param_shapes(model))}
    parts, record = checkpoints.restore(best, shapes)
    checkpoints.close()
    if record["tokenizer"] != tokenizer.fingerprint:  # so the ids of one are not the ids of the other
        raise ValueError(f"{paths.tokenizer}: this is not the tokenizer that step {best} was trained with.")
    return Trained(config, tokenizer, model, parts["params"], mesh, record.get("label_names"))


def with_decode(run: Trained, decode: Mapping[str, object]) -> Trained:
    """`run` with some fields of `DecodeConfig` in place of its own.

    Raises:
      ValueError: there is no such field, or its value is wrong.
    """
    fields = config_lib.to_dict(run.config)
    own = fields["decode"]
    if decode.get("method", own["method"]) != own["method"]:  # then what the run says of its own is of no use
        own = {name: value for name, value in own.items() if f"decode.{name}" not in config_lib.READ_IF}
    return dataclasses.replace(run, config=config_lib.resolve({**fields, "decode": {**own, **decode}}))


def make_decoder(model: nn.Module, config: Config, mesh: jax.sharding.Mesh, **options) -> Decoder:
    """A `Decoder` that splits its batches over the devices of `mesh`."""
    sharding = parallel.decoding_shardings(mesh)
    return Decoder(model, config.decode, rows=-(-ROWS // mesh.size) * mesh.size, sharding=sharding, **options)
