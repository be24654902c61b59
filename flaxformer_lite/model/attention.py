"""Scaled dot-product attention, many heads of it, and the cache of keys and values for decoding."""

from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.dropout import Dropout


def dot_product_attention(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    mask: jax.Array | None = None,
    *,
    drop: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> tuple[jax.Array, jax.Array]:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1 of section 3.2.1.

    Args:
      mask: bool, broadcast to (B, H, T, S); True = may attend. A query that may attend to nothing gets the mean
        of all values: finite, and meant to be ignored.
      drop: applied to the weights before the values are mixed.

    Returns:
      The mixed values (B, T, H, K) and the weights (B, H, T, S), float32, before `drop`.
    """
    scale = query_BTHK.shape[-1] ** -0.5
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", query_BTHK * scale, key_BSHK, preferred_element_type=jnp.float32)
    if mask is not None:
        scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(jnp.float32).min)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1)
    mixed_BTHK = jnp.einsum("BHTS,BSHK->BTHK", drop(weights_BHTS).astype(value_BSHK.dtype), value_BSHK)
    return mixed_BTHK, weights_BHTS


@flax.struct.dataclass
class KVCache:
    """Keys and values of one attention, (B, S, H, K) each; the position to write next is the caller's to keep."""

    key: jax.Array
    value: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> "KVCache":
        """Zeros of `shape` (B, S, H, K)."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, new: "KVCache", index: jax.Array) -> "KVCache":
        """This cache with `new` (B, 1, H, K) at position `index`."""
        return jax.tree.map(
            lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x.astype(old.dtype), index, axis=1),
            self,
            new,
        )


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: project, attend in `num_heads` subspaces, project back.

    Weights are sown as ('intermediates', 'attention_weights'): `apply(..., mutable=['intermediates'])` returns
    them, and otherwise nothing is kept.
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        d_head = c.d_head or c.d_model // c.num_heads
        dense = {"dtype": c.dtype, "kernel_init": nn.initializers.xavier_uniform()}
        self.query = nn.DenseGeneral((c.num_heads, d_head), **dense)
        self.key = nn.DenseGeneral((c.num_heads, d_head), **dense)
        self.value = nn.DenseGeneral((c.num_heads, d_head), **dense)
        self.out = nn.DenseGeneral(c.d_model, axis=(-2, -1), **dense)
        self.drop = Dropout(c.attention_dropout)

    def keys_values(self, memory_BSD: jax.Array) -> KVCache:
        """What queries compare with and mix, (B, S, H, K) each."""
        return KVCache(self.key(memory_BSD), self.value(memory_BSD))

    def attend(
        self,
        x_BTD: jax.Array,
        memory: KVCache,
        mask: jax.Array | None = None,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Queries from `x_BTD` against keys and values already projected: (B, T, D)."""
        drop = lambda weights: self.drop(weights, deterministic=deterministic, row_B=row_B)  # noqa: E731
        mixed_BTHK, weights_BHTS = dot_product_attention(self.query(x_BTD), memory.key, memory.value, mask, drop=drop)
        self.sow("intermediates", "attention_weights", weights_BHTS)
        return self.out(mixed_BTHK)

    def __call__(self, x_BTD: jax.Array, memory_BSD: jax.Array, mask: jax.Array | None = None, **mode) -> jax.Array:
        """Attention from `x_BTD` to `memory_BSD` (the same array for self-attention): (B, T, D)."""
        return self.attend(x_BTD, self.keys_values(memory_BSD), mask, **mode)
