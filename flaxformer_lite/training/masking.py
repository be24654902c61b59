"""Targets with some tokens masked, as a masked decoder learns from them. Ghazvininejad 2019, section 2.2.

Each row draws for itself, as dropout does, so that devices and microbatches make no difference.
"""

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import EOS, PAD, UNK
from flaxformer_lite.model.dropout import scramble

# The unknown token is the mask: the tokenizer falls back to bytes, so that no text holds it, and no method of decoding
# writes it. So a masked decoder needs no symbol of its own.
MASK = UNK
MASKING = 1  # folded into the step's key: dropout uses other random numbers


@flax.struct.dataclass
class Masked:
    """What a masked decoder reads, and what it is to predict."""

    inputs_BT: jax.Array  # int32: the targets, some tokens masked
    labels_BT: jax.Array  # int32: the targets
    weights_BT: jax.Array  # float32: 1 for a token that is masked, else 0
    length_B: jax.Array  # int32: tokens of each target without its end symbol; 0 in an empty row


def mask_batch(step_key: jax.Array | None, batch: dict[str, jax.Array]) -> Masked:
    """Masks the targets of a batch.

    Args:
      step_key: what is masked is a function of this key and the row's number; None: of the text alone.
    """
    if step_key is None:
        return mask_targets(jax.random.key(0), number_of_text(batch["target"]), batch["target"])
    return mask_targets(jax.random.fold_in(step_key, MASKING), batch["row"], batch["target"])


def mask_targets(key: jax.Array, row_B: jax.Array, target_BT: jax.Array) -> Masked:
    """Masks some tokens of each target: how many is uniform from 1 to all of them, and so is which.

    The end symbol is never masked: the length, which is predicted, says where a text ends. And it must be seen: of
    masked tokens alone, a position scheme that acts through distances could not tell one from the other.

    Args:
      row_B: a number for each row; what is masked is a function of (key, row_B[b], length).
      target_BT: ids that end with the end symbol and then padding.
    """
    length_B = ((target_BT != PAD) & (target_BT != EOS)).sum(axis=1)
    hidden_BT = draw(key, row_B, length_B, size=target_BT.shape[1])
    inputs_BT = jnp.where(hidden_BT, MASK, target_BT)
    return Masked(inputs_BT, target_BT, hidden_BT.astype(jnp.float32), length_B)


def number_of_text(target_BT: jax.Array) -> jax.Array:
    """A number for each row, (B,) uint32, a function of its tokens: by it a text is masked alike in any batch."""
    place_1T = scramble(jnp.arange(target_BT.shape[1], dtype=jnp.uint32))[None]
    mixed_BT = scramble(target_BT.astype(jnp.uint32) + place_1T)
    return jnp.where(target_BT == PAD, 0, mixed_BT).sum(axis=1, dtype=jnp.uint32)


def draw(key: jax.Array, row_B: jax.Array, length_B: jax.Array, *, size: int) -> jax.Array:
    """Which of the first `length_B` of `size` tokens are masked: bool (B, size)."""

    def of_row(row: jax.Array, length: jax.Array) -> jax.Array:
        count_key, order_key = jax.random.split(jax.random.fold_in(key, row))
        count = jax.random.randint(count_key, (), 1, jnp.maximum(length, 1) + 1)
        in_text_T = jnp.arange(size) < length
        order_T = jnp.where(in_text_T, jax.random.uniform(order_key, (size,)), jnp.inf)
        rank_T = jnp.argsort(jnp.argsort(order_T))
        return (rank_T < count) & in_text_T

    return jax.vmap(of_row)(row_B, length_B)
