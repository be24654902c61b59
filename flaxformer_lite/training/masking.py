"""Random masks on the targets, to train a masked decoder. Ghazvininejad 2019, section 2.2.

Each row is masked independently, as in dropout, so that the masks do not depend on the number of
devices and microbatches.
"""

import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import EOS, PAD, UNK
from flaxformer_lite.model.dropout import scramble

# The unknown token is the mask symbol. It is otherwise unused: the tokenizer falls back to bytes,
# so that no text contains it, and no decoding method generates it.
MASK = UNK
MASKING = 1  # folded into the step's key, so that masks are independent of dropout


@flax.struct.dataclass
class Masked:
    """The inputs, labels and label weights of a masked decoder."""

    inputs_BT: jax.Array  # int32: the targets with some tokens masked
    labels_BT: jax.Array  # int32: the targets
    weights_BT: jax.Array  # float32: 1 for a masked token, else 0
    length_B: jax.Array  # int32: tokens of each target without its end symbol; 0 in an empty row


def mask_batch(step_key: jax.Array | None, batch: dict[str, jax.Array]) -> Masked:
    """Returns the targets of a batch, masked.

    Args:
      step_key: the masked positions are a function of this key and the row number. None: of the
        text alone.
    """
    if step_key is None:
        return mask_targets(jax.random.key(0), number_of_text(batch["target"]), batch["target"])
    return mask_targets(jax.random.fold_in(step_key, MASKING), batch["row"], batch["target"])


def mask_targets(key: jax.Array, row_B: jax.Array, target_BT: jax.Array) -> Masked:
    """Returns the targets with some tokens masked.

    The number of masked tokens is uniform from 1 to the length, and so is the choice of tokens. The
    end symbol is never masked. The decoder gets it from the predicted length, and needs it: with
    relative positions, masked tokens alone would be indistinguishable.

    Args:
      row_B: a number for each row; the mask of row b is a function of (key, row_B[b], length).
      target_BT: ids, the end symbol, then padding.
    """
    length_B = ((target_BT != PAD) & (target_BT != EOS)).sum(axis=1)
    masked_BT = sample_mask(key, row_B, length_B, size=target_BT.shape[1])
    inputs_BT = jnp.where(masked_BT, MASK, target_BT)
    return Masked(inputs_BT, target_BT, masked_BT.astype(jnp.float32), length_B)


def number_of_text(target_BT: jax.Array) -> jax.Array:
    """Returns a hash of the tokens of each row, (B,) uint32.

    With it as row number, a text has the same mask in every batch.
    """
    position_1T = scramble(jnp.arange(target_BT.shape[1], dtype=jnp.uint32))[None]
    mixed_BT = scramble(target_BT.astype(jnp.uint32) + position_1T)
    return jnp.where(target_BT == PAD, 0, mixed_BT).sum(axis=1, dtype=jnp.uint32)


def sample_mask(key: jax.Array, row_B: jax.Array, length_B: jax.Array, *, size: int) -> jax.Array:
    """Returns a random mask, bool (B, size): True for 1 to `length_B` of the first `length_B`."""

    def of_row(row: jax.Array, length: jax.Array) -> jax.Array:
        count_key, order_key = jax.random.split(jax.random.fold_in(key, row))
        count = jax.random.randint(count_key, (), 1, jnp.maximum(length, 1) + 1)
        in_text_T = jnp.arange(size) < length
        order_T = jnp.where(in_text_T, jax.random.uniform(order_key, (size,)), jnp.inf)
        rank_T = jnp.argsort(jnp.argsort(order_T))
        return (rank_T < count) & in_text_T

    return jax.vmap(of_row)(row_B, length_B)
