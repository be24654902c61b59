"""Losses as (sum, weight): added over microbatches and devices, and divided once."""

import jax
import jax.numpy as jnp

LOGITS_AT_ONCE = 2**28  # that exist at a time on a device in training: 1 GiB in float32


def cross_entropy(
    logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy in nats, with the label smoothing of section 5.4.

    The label has probability 1 - `label_smoothing`, and that much is spread evenly over all V tokens.

    Returns:
      (sum of `weights_BT` times the loss of each token, sum of `weights_BT`), float32 scalars.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    expected_BT = (1 - label_smoothing) * label_BT + label_smoothing * logits_BTV.mean(axis=-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - expected_BT
    return (loss_BT * weights_BT).sum(), weights_BT.sum()


def parts_of(rows: int, logits_of_row: int, *, row_shards: int = 1) -> int:
    """Into how many equal parts to take `rows`, so that the logits of one are not too many for a device at once.

    `row_shards` devices share the rows evenly, and so each part of them.
    """
    mine = rows // row_shards
    fits = lambda n: n == mine or mine // n * logits_of_row <= LOGITS_AT_ONCE  # noqa: E731
    return next(n for n in range(1, mine + 1) if mine % n == 0 and fits(n))
