"""What a model predicts for a batch, and the labels: the inputs of the loss.

A batch is a dict of int32 arrays: `row` (B,), each row's number in the global batch, and what the model reads:

    encoder_decoder      `source` (B, S) and `target` (B, T): ids that end with the end symbol and then padding
    encoder_classifier   `source`, and `label` (B,), -1 in a row without a text
    decoder_lm           `target`

Packed rows hold several texts, or pairs. They have `target_segment` (B, T) too, and `source_segment` (B, S) if there is
a source: the number of each token's text, from 1; 0 = padding.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import BOS, PAD
from flaxformer_lite.training import masking

Batch = dict[str, jax.Array]


class Predicted(NamedTuple):
    """One prediction for each of T labels of a row."""

    x: jax.Array  # (B, T, D): the decoder's output, before the projection; of a classifier the logits (B, 1, C)
    labels_BT: jax.Array  # int32
    weights_BT: jax.Array  # float32, 0 where there is no label


def shift_right(labels_BT: jax.Array, segment_BT: jax.Array | None = None) -> jax.Array:
    """Returns the decoder's input: in each text the start symbol, then all but the last label. Figure 1."""
    shifted_BT = jnp.pad(labels_BT, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1]
    if segment_BT is None:
        return shifted_BT
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(begins_BT, BOS, shifted_BT)


def decoder_inputs(batch: Batch, *, model: nn.Module) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array | None]]:
    """Returns (source if there is an encoder, decoder input), and their segments by name if the rows are packed."""
    segment_BT = batch.get("target_segment")
    inputs_BT = shift_right(batch["target"], segment_BT)
    if model.config.architecture == "decoder_lm":
        return (inputs_BT,), {"segment_BT": segment_BT}
    if segment_BT is None:
        return (batch["source"], inputs_BT), {}
    segments = {"source_segment_BS": batch["source_segment"], "target_segment_BT": segment_BT}
    return (batch["source"], inputs_BT), segments


def of_classes(params: dict, batch: Batch, *, model: nn.Module, **mode) -> Predicted:
    """A classifier's logits (B, 1, C), as if for one token; an empty row has the weight 0."""
    logits_BC = model.apply({"params": params}, batch["source"], **mode)
    labels_B1 = batch["label"][:, None]
    return Predicted(logits_BC[:, None], jnp.maximum(labels_B1, 0), (labels_B1 >= 0).astype(jnp.float32))


def of_tokens(params: dict, batch: Batch, *, model: nn.Module, **mode) -> Predicted:
    """A decoder's output for each next token, (B, T, D)."""
    inputs, segments = decoder_inputs(batch, model=model)
    x_BTD = model.apply({"params": params}, *inputs, method="features", **segments, **mode)
    labels_BT = batch["target"]
    return Predicted(x_BTD, labels_BT, (labels_BT != PAD).astype(jnp.float32))


def of_masked_tokens(
    params: dict, batch: Batch, *, model: nn.Module, step_key: jax.Array | None, **mode
) -> tuple[Predicted, Predicted]:
    """A masked decoder's output for each token, and the logits (B, 1, L) of each target's length.

    Only masked tokens have a weight. Ghazvininejad 2019, sections 2.2 and 2.3.

    Args:
      step_key: what is masked is a function of this key and the row; None, in evaluation: of the text alone, so that
        every evaluation measures the same.
    """
    masked = masking.mask_batch(step_key, batch)
    inputs = batch["source"], masked.inputs_BT
    x_BTD, logits_BL = model.apply({"params": params}, *inputs, method="features_and_lengths", **mode)
    length_B1 = masked.length_B[:, None]
    lengths = Predicted(logits_BL[:, None], length_B1, (length_B1 > 0).astype(jnp.float32))
    return Predicted(x_BTD, masked.labels_BT, masked.weights_BT), lengths
