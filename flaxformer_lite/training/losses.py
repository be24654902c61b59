"""Losses as (sum, weight). They are added over microbatches and devices, then divided once."""

import jax
import jax.numpy as jnp

LOGITS_AT_ONCE = 2**28  # limit for a device in a training step: 1 GiB in float32


def cross_entropy(
    logits_BTV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cross-entropy in nats, with the label smoothing of section 5.4.

    The target distribution is 1 - `label_smoothing` on the label, plus `label_smoothing` / V on
    each of the V tokens.

    Returns:
      (sum of `weights_BT` times the loss of each token, sum of `weights_BT`), float32 scalars.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    expected_BT = (1 - label_smoothing) * label_BT + label_smoothing * logits_BTV.mean(axis=-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - expected_BT
    return (loss_BT * weights_BT).sum(), weights_BT.sum()


def z_loss(logits_BTV: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the sum over the labels of weight x log(Z)^2, Z the sum of exp(logits).

    It keeps the logits from drifting, as the cross-entropy does not depend on Z. Chowdhery 2022,
    section 5.
    """
    log_z_BT = jax.nn.logsumexp(logits_BTV.astype(jnp.float32), axis=-1)
    return (log_z_BT**2 * weights_BT).sum()


def parts_of(rows: int, logits_of_row: int, *, row_shards: int = 1) -> int:
    """Returns the least number of equal parts of rows with at most `LOGITS_AT_ONCE` logits each.

    A part has at least one row of each device.

    Args:
      row_shards: how many devices the rows, and each part of them, are split over. The limit is per
        device.
    """
    device_rows = rows // row_shards
    for parts in range(1, device_rows):
        if device_rows % parts == 0 and device_rows // parts * logits_of_row <= LOGITS_AT_ONCE:
            return parts
    return device_rows
