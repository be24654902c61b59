"""R-Drop: each row passes through the model twice, and the two predictions are drawn together. Liang 2021."""

import jax
import jax.numpy as jnp

from flaxformer_lite.training.predictions import Batch, Predicted


def repeated(batch: Batch) -> Batch:
    """Returns the batch with each row twice in a row, the second under a number of its own: other dropout."""
    row_2B = jnp.stack([batch["row"], ~batch["row"]], axis=1).ravel()
    return {name: jnp.repeat(x, 2, axis=0) for name, x in batch.items()} | {"row": row_2B}


def paired(predicted: Predicted) -> Predicted:
    """Returns the predictions of each `repeated` row side by side, (B, 2T, ...); each token counts half."""
    x, labels, weights = (a.reshape(-1, 2 * a.shape[1], *a.shape[2:]) for a in predicted)
    return Predicted(x, labels, weights / 2)


def disagreement(logits_BTV: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the sum of each token's weight times KL(p || q) + KL(q || p), in nats. Liang 2021, section 2.1.

    The first half of T has the logits of p, the second those of q, and both the same weights. Logits may stand for
    log p and log q: they differ by a constant, which cancels between the two means of log p - log q.
    """
    B, T, V = logits_BTV.shape
    logits_B2TV = logits_BTV.astype(jnp.float32).reshape(B, 2, T // 2, V)
    apart_B2TV = logits_B2TV - logits_B2TV[:, ::-1]
    probability_B2TV = jnp.exp(logits_B2TV - jax.nn.logsumexp(logits_B2TV, axis=-1, keepdims=True))
    return ((probability_B2TV * apart_B2TV).sum(axis=-1).reshape(B, T) * weights_BT).sum()
