"""R-Drop: 2 passes with different dropout, and a loss on their disagreement. Liang 2021."""

import jax
import jax.numpy as jnp

from flaxformer_lite.training.predictions import Batch, Predicted


def repeated(batch: Batch) -> Batch:
    """Returns the batch with each row repeated: rows 0, 0, 1, 1, ....

    The copy has another row number and therefore another dropout mask.
    """
    row_2B = jnp.stack([batch["row"], ~batch["row"]], axis=1).ravel()
    return {name: jnp.repeat(x, 2, axis=0) for name, x in batch.items()} | {"row": row_2B}


def paired(predicted: Predicted) -> Predicted:
    """Returns the 2 predictions of each row in one row, (B, 2T, ...), with half the weight each.

    Args:
      predicted: predictions for a `repeated` batch, (2B, T, ...).
    """
    x, labels, weights = (a.reshape(-1, 2 * a.shape[1], *a.shape[2:]) for a in predicted)
    return Predicted(x, labels, weights / 2)


def disagreement(logits_BTV: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the sum over tokens of weight x (KL(p || q) + KL(q || p)), in nats.

    Liang 2021, section 2.1. log p and log q are replaced by the logits, which differ from them by a
    constant. The constant cancels between the two expectations of log p - log q.

    Args:
      logits_BTV: logits of p in the first half of T, of q in the second.
      weights_BT: the same in both halves.
    """
    B, T, V = logits_BTV.shape
    logits_B2TV = logits_BTV.astype(jnp.float32).reshape(B, 2, T // 2, V)
    difference_B2TV = logits_B2TV - logits_B2TV[:, ::-1]
    probability_B2TV = jnp.exp(logits_B2TV - jax.nn.logsumexp(logits_B2TV, axis=-1, keepdims=True))
    return ((probability_B2TV * difference_B2TV).sum(axis=-1).reshape(B, T) * weights_BT).sum()
