"""Mask-predict with a model: a masked decoder predicts all tokens of a text in parallel."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.decoding import mask_predict
from flaxformer_lite.decoding.constraints import IN_NO_TEXT, forbid
from flaxformer_lite.fields import EOS, PAD, UNK, DecodeConfig

FEWEST_POSITIONS = 16  # a size up to this is not halved


def decode_masked(
    model: nn.Module, config: DecodeConfig, params: dict, source_BS: jax.Array, *, max_length: int
) -> jax.Array:
    """Returns the translation of each source by mask-predict: ids (B, max_length), then padding.

    A row of padding has an empty output. The encoder runs once for all candidates of a row, texts
    of different lengths. In the decoder each candidate is a row of its own.
    """
    apply = functools.partial(model.apply, {"params": params})
    memory, logits_BL = apply(source_BS, method="start_filling")
    source_B = (source_BS != PAD).sum(axis=1)
    # One position is for the end symbol.
    limit_B = jnp.minimum(source_B + config.max_extra_length, max_length) - 1
    limit_B = jnp.where(source_B > 0, limit_B, 0)
    count = config.length_candidates
    length_BC, log_prob_BC = mask_predict.most_probable_lengths(
        logits_BL, config.min_length, limit_B, count=count
    )

    B, C = length_BC.shape
    memory, source_RS = jax.tree.map(lambda x: jnp.repeat(x, C, axis=0), (memory, source_BS))

    def predict(ids_BCT: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_RTD = apply(ids_BCT.reshape(B * C, -1), memory, source_RS, method="fill")
        x_CBTD = x_RTD.reshape(B, C, *x_RTD.shape[1:]).swapaxes(0, 1)
        # One candidate after another: the logits of all at once would need C times the memory.
        best = jax.lax.map(lambda x_BTD: _most_probable(apply(x_BTD, method="logits")), x_CBTD)
        return jax.tree.map(lambda x_CBT: x_CBT.swapaxes(0, 1), best)

    def decode_within(positions: int, length_BC: jax.Array, log_prob_BC: jax.Array) -> jax.Array:
        options = {"iterations": config.iterations, "mask": UNK, "end": EOS}
        ids_BT, _ = mask_predict.mask_predict(
            predict, length_BC, log_prob_BC, max_length=positions, **options
        )
        return jnp.pad(ids_BT, ((0, 0), (0, max_length - positions)))

    # The cost of an iteration grows with the positions, and most texts need few. So this runs the
    # smallest of a few sizes, each half of the next, that holds the longest candidate.
    sizes = [max_length]
    while sizes[0] > FEWEST_POSITIONS:
        sizes.insert(0, -(-sizes[0] // 2))
    number = (length_BC.max() >= jnp.array(sizes[:-1], jnp.int32)).sum()
    branches = [functools.partial(decode_within, size) for size in sizes]
    return jax.lax.switch(number, branches, length_BC, log_prob_BC)


def _most_probable(logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the most probable token of each position, and its log-probability."""
    log_prob_BTV = jax.nn.log_softmax(logits_BTV)
    allowed_BTV = forbid(log_prob_BTV, (*IN_NO_TEXT, EOS))  # the length places EOS
    return jnp.argmax(allowed_BTV, axis=-1).astype(jnp.int32), allowed_BTV.max(axis=-1)
