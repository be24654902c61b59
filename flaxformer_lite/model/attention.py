"""Scaled dot-product attention and multi-head attention. Section 3.2."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model import backends
from flaxformer_lite.model.dense import Dense
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.kv_cache import KVCache
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import RelativeVectors, ScoreBias, rotate


def dot_product_attention(
    query_BTHK: jax.Array, key_BSHK: jax.Array, value_BSHK: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(Q K^T / sqrt(d_k)) V, equation 1 of section 3.2.1.

    Returns:
      The output (B, T, H, K), and the attention weights (B, H, T, S).
    """
    weights_BHTS = softmax(dot_product_scores(query_BTHK, key_BSHK), mask)
    return weighted_sum(weights_BHTS, value_BSHK), weights_BHTS


def dot_product_scores(query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
    """Returns the scores of equation 1, Q K^T / sqrt(d_k): (B, H, T, S) float32."""
    scale = query_BTHK.shape[-1] ** -0.5
    return jnp.einsum(
        "BTHK,BSHK->BHTS", query_BTHK * scale, key_BSHK, preferred_element_type=jnp.float32
    )


def softmax(scores_BHTS: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Returns the weights of equation 1, (B, H, T, S): a softmax over the unmasked keys.

    `mask`: bool, broadcast to the scores; True = may attend. A query that may attend to no key
    gets equal weights: they are finite, and callers ignore them.
    """
    if mask is not None:
        scores_BHTS = jnp.where(mask, scores_BHTS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores_BHTS, axis=-1)


def weighted_sum(weights_BHTS: jax.Array, value_BSHK: jax.Array) -> jax.Array:
    """Returns the weighted sum of the values, the last product of equation 1: (B, T, H, K)."""
    mixed_BHTK = jnp.einsum("BHTS,BSHK->BHTK", weights_BHTS.astype(value_BSHK.dtype), value_BSHK)
    return mixed_BHTK.swapaxes(1, 2)


def additive_scores(query_BTHK: jax.Array, key_BSHK: jax.Array, vector_HK: jax.Array) -> jax.Array:
    """Returns v . tanh(q + k), (B, H, T, S) float32. Bahdanau 2015, appendix A.1.2."""
    hidden_BTSHK = jnp.tanh(query_BTHK[:, :, None] + key_BSHK[:, None])
    return jnp.einsum("BTSHK,HK->BHTS", hidden_BTSHK, vector_HK, preferred_element_type=jnp.float32)


def repeat_heads(x_BSGK: jax.Array, query_BTHK: jax.Array) -> jax.Array:
    """Returns keys or values with each head repeated H / G times in a row: (B, S, H, K)."""
    times = query_BTHK.shape[2] // x_BSGK.shape[2]
    return x_BSGK if times == 1 else jnp.repeat(x_BSGK, times, axis=2)


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: project, attend in `num_heads` subspaces, project back.

    With `num_kv_heads` G < H, each head of keys and values serves H / G heads of queries
    (grouped-query, Ainslie 2023; G = 1 is multi-query, Shazeer 2019). The weights are sown as
    ('intermediates', 'attention_weights'): `apply(..., mutable=['intermediates'])` returns them.
    ('projections', 'query_and_key') has what the scores are computed from, with every backend.
    """

    config: ModelConfig
    is_self_attention: bool = False  # position schemes act only in self-attention

    def setup(self) -> None:
        c = self.config
        d_head = c.d_head or c.d_model // c.num_heads
        num_kv_heads = c.num_kv_heads or c.num_heads
        self.query = Dense(c, (c.num_heads, d_head))
        self.key = Dense(c, (num_kv_heads, d_head))
        self.value = Dense(c, (num_kv_heads, d_head))
        self.out = Dense(c, (c.d_model,), axes=2)
        self.drop = Dropout(c.attention_dropout)
        if c.attention == "additive":
            self.score_vector = self.param(
                "score_vector", nn.initializers.xavier_uniform(), (c.num_heads, d_head)
            )
        if self.is_self_attention and c.position == "relative":
            self.relative = RelativeVectors(c)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask: AttentionMask,
        bias: ScoreBias | None = None,
        **dropout_args: Any,
    ) -> jax.Array:
        """Returns attention from `x_BTD` to `memory_BSD` (itself in self-attention): (B, T, D)."""
        keys_values = self.keys_values(memory_BSD, mask.key)
        return self.attend(x_BTD, keys_values, mask, bias, **dropout_args)

    def keys_values(self, memory_BSD: jax.Array, positions: TokenPositions) -> KVCache:
        """Returns the projected keys and values of tokens at `positions`."""
        key_BSGK = self.key(memory_BSD)
        if self.is_self_attention:
            key_BSGK = rotate(key_BSGK, positions.position_BL, self.config)
        return KVCache.of(key_BSGK, self.value(memory_BSD))

    def attend(
        self,
        x_BTD: jax.Array,
        keys_values: KVCache,
        mask: AttentionMask,
        bias: ScoreBias | None = None,
        *,
        deterministic: bool = True,
        row_B: jax.Array | None = None,
    ) -> jax.Array:
        """Returns attention from `x_BTD` to projected keys and values: (B, T, D)."""
        query_BTHK = self.query(x_BTD)
        if self.is_self_attention:
            query_BTHK = rotate(query_BTHK, mask.query.position_BL, self.config)
            if self.config.position == "relative":
                bias = self.relative.score_bias()
        key_BSGK, value_BSGK = keys_values.projected()
        if not self.is_initializing():
            self.sow("projections", "query_and_key", (query_BTHK, key_BSGK))
        reason = self._needs_weights(deterministic)
        backend = backends.choose(
            self.config.backend, query_BTHK, key_BSGK, mask, bias, reference_only=reason
        )
        if backend != "reference":
            return self.out(backends.attend(backend, query_BTHK, key_BSGK, value_BSGK, mask, bias))
        drop = lambda weights: self.drop(weights, deterministic=deterministic, row_B=row_B)  # noqa: E731
        return self.out(self._reference(query_BTHK, key_BSGK, value_BSGK, mask, bias, drop=drop))

    def _needs_weights(self, deterministic: bool) -> str | None:
        """Returns why the attention weights must exist as an array; None if they need not."""
        c = self.config
        if self.is_mutable_collection("intermediates") and not self.is_initializing():
            return "the caller requests the attention weights"
        if c.attention == "additive":
            return "model.attention is 'additive'"
        if c.attention_dropout and not deterministic:
            return "model.attention_dropout acts on the weights"
        return "model.relative_values acts on the weights" if self._relative_values() else None

    def _relative_values(self) -> bool:
        return (
            self.is_self_attention
            and self.config.position == "relative"
            and self.config.relative_values
        )

    def _reference(
        self,
        query_BTHK: jax.Array,
        key_BSGK: jax.Array,
        value_BSGK: jax.Array,
        mask: AttentionMask,
        bias: ScoreBias | None,
        *,
        drop: Callable[..., Any],
    ) -> jax.Array:
        """Returns attention by equation 1, with all weights in one array: (B, T, H, K)."""
        key_BSHK, value_BSHK = (
            repeat_heads(key_BSGK, query_BTHK),
            repeat_heads(value_BSGK, query_BTHK),
        )
        positions = mask.query.position_BL, mask.key.position_BL
        scores_BHTS = self._scores(query_BTHK, key_BSHK)
        if bias is not None:
            scores_BHTS += jnp.broadcast_to(bias(query_BTHK, *positions), scores_BHTS.shape)
        weights_BHTS = softmax(scores_BHTS, mask.array())
        self.sow("intermediates", "attention_weights", weights_BHTS)
        weights_BHTS = drop(weights_BHTS)
        mixed_BTHK = weighted_sum(weights_BHTS, value_BSHK)
        if self._relative_values():
            mixed_BTHK += self.relative.values(weights_BHTS, *positions).astype(mixed_BTHK.dtype)
        return mixed_BTHK

    def _scores(self, query_BTHK: jax.Array, key_BSHK: jax.Array) -> jax.Array:
        if self.config.attention == "additive":
            return additive_scores(query_BTHK, key_BSHK, self.score_vector)
        return dot_product_scores(query_BTHK, key_BSHK)
