"""What computes attention where its weights need not be kept: kernels and a memory-lean scan, to the same result."""

import jax

from flaxformer_lite.model.masks import Pattern
from flaxformer_lite.model.positions import ScoreBias


def choose(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    pattern: Pattern,
    bias: ScoreBias | None,
    *,
    reference_only: str | None = None,
) -> str:
    """The backend that `backend` ('auto' or a name) means for these arguments."""
    return "reference"


def attend(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    pattern: Pattern,
    bias: ScoreBias | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k) + bias) V over the keys that `pattern` lets each query see: (B, T, H, K)."""
    raise NotImplementedError(backend)
