"""The evaluation step of an ensemble of decoders, by the mean of their probabilities."""

import jax
import jax.numpy as jnp

from flaxformer_lite.fields import PAD
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import loss_in_parts, losses, metrics, predictions
from flaxformer_lite.training.predictions import Batch


def eval_step(
    params: Params,
    batch: Batch,
    *,
    model: Ensemble,
    axis_name: str | None = None,
    row_shards: int = 1,
) -> metrics.Sums:
    """Returns sums of `loss` and `accuracy` over the labels of the batch, in parts of rows.

    Arguments as of `step.eval_step`.
    """

    def of_part(batch: Batch) -> metrics.Sums:
        inputs, segments = predictions.decoder_inputs(batch, model=model)
        log_prob_BTV = predictions.apply(model, params, *inputs, **segments)
        predicted = log_prob_BTV, batch["target"], (batch["target"] != PAD).astype(jnp.float32)
        return {
            "loss": losses.cross_entropy(*predicted),
            "accuracy": metrics.correct_tokens(*predicted),
        }

    rows, length = batch["target"].shape
    vocab_size = model.config.output_vocab_size or 0
    logits_of_row = len(model.configs) * length * vocab_size
    parts = losses.parts_of(rows, logits_of_row, row_shards=row_shards)
    sums = jax.lax.map(of_part, loss_in_parts.split_rows(batch, parts))
    sums = jax.tree.map(lambda sum_M: sum_M.sum(axis=0), sums)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)
