"""The length penalty of beam search, without which short texts would always win. Section 6.1."""

import math

import jax
import jax.numpy as jnp

from flaxformer_lite.system.errors import InputError

LARGEST = float(jnp.finfo(jnp.float32).max)

# Functions of the length of a text, its end symbol included; the power alpha is applied after them.
PENALTIES = {
    "wu": lambda length: (5.0 + length) / 6.0,  # Wu 2016, equation 14
    "power": lambda length: 1.0 * length,  # as in Hugging Face and CTranslate2
}


def length_penalty(length: jax.Array | float, *, alpha: float, kind: str) -> jax.Array | float:
    """Returns the divisor of the log-probability of a text of `length` tokens.

    It never decreases with the length.
    """
    return PENALTIES[kind](length) ** alpha


def check(alpha: float, kind: str, max_length: int) -> None:
    """Raises InputError if alpha is negative, or too large for texts of `max_length` tokens."""
    if not alpha >= 0:
        raise InputError(
            f"alpha: expected 0 or more, got {alpha}; below 0 no bound would end the search."
        )
    if alpha * math.log(PENALTIES[kind](max_length)) > math.log(LARGEST):
        raise InputError(
            f"alpha: {alpha} makes the penalty of {max_length} tokens infinite; lower it."
        )
