"""A loss that guides one head of cross-attention to given alignments. Garg 2019, section 4.2.

The head's weights at the step that predicts a token are compared with the source tokens that the
token is linked to. The decoder reads the tokens before, as in translation; the paper's variant with
the whole target as its context (section 4.3) is not built. Only the scores of the guided head are
computed again, so that attention keeps its backend.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.checks.alignment_checks import guided_layer
from flaxformer_lite.fields import PAD, Config, ModelConfig
from flaxformer_lite.model import attention, masks
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import predictions
from flaxformer_lite.training.predictions import Batch, Predicted


class GuidedHead(NamedTuple):
    """The head that is guided, from 0, and the weight of its loss."""

    weight: float
    layer: int
    head: int


def of_config(config: Config) -> GuidedHead | None:
    """Returns the guided head of a run; None if it has none."""
    train = config.train
    if not train.guided_alignment:
        return None
    return GuidedHead(train.guided_alignment, guided_layer(config), train.alignment_head)


def of_tokens(
    params: Params, batch: Batch, *, model: nn.Module, guided: GuidedHead, **options: Any
) -> tuple[Predicted, tuple[jax.Array, jax.Array]]:
    """Returns `predictions.of_tokens`, and the loss of the guided head.

    Args:
      batch: with `alignment`, (B, T, S) bool: True if target token t and source token s are linked.
      options: of the model.

    Returns:
      The predictions, and (sum of the losses of tokens with a link, their number).
    """
    inputs, _ = predictions.decoder_inputs(batch, model=model)
    x_BTD, kept = predictions.apply(
        model, params, *inputs, method="features", mutable=["projections"], **options
    )
    scores_BTS = head_scores(kept["projections"], model.config, guided)
    labels_BT = batch["target"]
    weights_BT = (labels_BT != PAD).astype(jnp.float32)
    loss = alignment_loss(scores_BTS, batch["alignment"], masks.padding(batch["source"])[:, 0])
    return Predicted(x_BTD, labels_BT, weights_BT), loss


def head_scores(projections: Any, config: ModelConfig, guided: GuidedHead) -> jax.Array:
    """Returns the scores of one head of cross-attention, (B, T, S) float32.

    Args:
      projections: the collection that `MultiHeadAttention` sows.
    """
    name, call = ("layers_0", guided.layer) if config.tie_layers else (f"layers_{guided.layer}", 0)
    sown = projections["decoder"][name]["cross_attention"]["query_and_key"]
    query_BTHK, key_BSGK = sown[call]
    group = guided.head * key_BSGK.shape[2] // query_BTHK.shape[2]
    one_head = slice(guided.head, guided.head + 1), slice(group, group + 1)
    scores_B1TS = attention.dot_product_scores(
        query_BTHK[:, :, one_head[0]], key_BSGK[:, :, one_head[1]]
    )
    return scores_B1TS[:, 0]


def alignment_loss(
    scores_BTS: jax.Array, linked_BTS: jax.Array, mask_BTS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy between the links and the attention weights, in nats.

    The target distribution of a token is uniform over its linked source tokens. A token without a
    link has no loss. Garg 2019, section 4.2.

    Args:
      scores_BTS: before the softmax.
      mask_BTS: True for a source token, broadcast to the scores.

    Returns:
      (sum of the losses of tokens with a link, their number), float32 scalars.
    """
    scores_BTS = jnp.where(mask_BTS, scores_BTS, jnp.finfo(jnp.float32).min)
    log_weight_BTS = jax.nn.log_softmax(scores_BTS, axis=-1)
    links_BT = linked_BTS.sum(axis=-1).astype(jnp.float32)
    of_links_BT = jnp.where(linked_BTS, log_weight_BTS, 0.0).sum(axis=-1)
    return -(of_links_BT / jnp.maximum(links_BT, 1)).sum(), (links_BT > 0).astype(jnp.float32).sum()
