"""The predictions of a model for a batch, with their labels and weights: the inputs of the loss.

A batch is a dict of int32 arrays: `row` (B,), the number of each row in the global batch, and

    encoder_decoder      `source` (B, S) and `target` (B, T): ids, the end symbol, then padding
    encoder_classifier   `source`, and `label` (B,): -1 in a row without a text
    decoder_lm           `target`

A packed row has several texts, or pairs of texts. A packed batch also has `target_segment` (B, T),
and `source_segment` (B, S) if there is a source. They contain the number of the text that each
token belongs to, from 1; 0 is padding.

A batch of windows also has `before` (B,): the token before the first one of `target`.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import BOS, EOS, PAD
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import masking

Batch = dict[str, jax.Array]


class Predicted(NamedTuple):
    """One prediction for each of the T labels of a row."""

    x: jax.Array  # (B, T, D): decoder output before the projection; classifier: logits (B, 1, C)
    labels_BT: jax.Array  # int32
    weights_BT: jax.Array  # float32, 0 for a position without a label


def apply(model: nn.Module, params: Params, *inputs: jax.Array, **options: Any) -> Any:
    """Returns the output of `model.apply`, whose type depends on `method`."""
    return model.apply({"params": params}, *inputs, **options)


def shift_right(labels_BT: jax.Array, segment_BT: jax.Array | None = None) -> jax.Array:
    """Returns the decoder's input: for each text the start symbol and all labels but the last.

    The outputs "shifted right" of figure 1.
    """
    shifted_BT = jnp.pad(labels_BT, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1]
    if segment_BT is None:
        return shifted_BT
    starts_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(starts_BT, BOS, shifted_BT)


def preceding(labels_BT: jax.Array, before_B: jax.Array) -> jax.Array:
    """Returns the decoder's input for windows of a stream: the token before each label.

    An end symbol is read as the start symbol of the next text, so that every text starts as one
    that a row has for itself, and as a text to generate.
    """
    inputs_BT = jnp.concatenate([before_B[:, None], labels_BT[:, :-1]], axis=1)
    return jnp.where(inputs_BT == EOS, BOS, inputs_BT)


def decoder_inputs(
    batch: Batch, *, model: nn.Module
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Returns the inputs of a model with a decoder: arrays, and keyword arguments for packed rows.

    Returns:
      (source, decoder input) with an encoder, (decoder input,) without; and the segments by name.
    """
    if "before" in batch:
        return (preceding(batch["target"], batch["before"]),), {}
    segment_BT = batch.get("target_segment")
    inputs_BT = shift_right(batch["target"], segment_BT)
    if model.config.architecture == "decoder_lm":
        return (inputs_BT,), {"segment_BT": segment_BT}
    if segment_BT is None:
        return (batch["source"], inputs_BT), {}
    segments = {"source_segment_BS": batch["source_segment"], "target_segment_BT": segment_BT}
    return (batch["source"], inputs_BT), segments


def of_classes(params: Params, batch: Batch, *, model: nn.Module, **options: Any) -> Predicted:
    """Returns a classifier's logits (B, 1, C), one prediction a row; empty rows have weight 0."""
    logits_BC = apply(model, params, batch["source"], **options)
    labels_B1 = batch["label"][:, None]
    return Predicted(
        logits_BC[:, None], jnp.maximum(labels_B1, 0), (labels_B1 >= 0).astype(jnp.float32)
    )


def of_tokens(params: Params, batch: Batch, *, model: nn.Module, **options: Any) -> Predicted:
    """Returns a decoder's output (B, T, D) for each label; padding has weight 0."""
    inputs, segments = decoder_inputs(batch, model=model)
    x_BTD = apply(model, params, *inputs, method="features", **segments, **options)
    labels_BT = batch["target"]
    return Predicted(x_BTD, labels_BT, (labels_BT != PAD).astype(jnp.float32))


def of_masked_tokens(
    params: Params, batch: Batch, *, model: nn.Module, step_key: jax.Array | None, **options: Any
) -> tuple[Predicted, Predicted]:
    """Returns a masked decoder's output (B, T, D), and the logits (B, 1, L) of the target length.

    Only masked tokens have a weight. Ghazvininejad 2019, sections 2.2 and 2.3.

    Args:
      step_key: the masked positions are a function of this key and the row number. None, in
        evaluation: of the text alone, so that evaluations are comparable.
    """
    masked = masking.mask_batch(step_key, batch)
    inputs = batch["source"], masked.inputs_BT
    x_BTD, logits_BL = apply(model, params, *inputs, method="features_and_lengths", **options)
    length_B1 = masked.length_B[:, None]
    lengths = Predicted(logits_BL[:, None], length_B1, (length_B1 > 0).astype(jnp.float32))
    return Predicted(x_BTD, masked.labels_BT, masked.weights_BT), lengths
