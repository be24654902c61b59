"""The linear map of every projection: queries, keys and values, the output of attention, and feed-forward."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig


class Dense(nn.Module):
    """x W + b, over the last `axes` axes of x, which become `features`; parameters float32, the product `dtype`."""

    config: ModelConfig
    features: tuple[int, ...]
    axes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., *inputs) to (..., *features)."""
        c = self.config
        kernel = self.param("kernel", _glorot_uniform, x.shape[-self.axes :] + self.features, self.axes)
        bias = self.param("bias", nn.initializers.zeros, self.features) if c.use_bias else None
        y = jnp.tensordot(x.astype(c.dtype), kernel.astype(c.dtype), self.axes)
        return y if bias is None else add(y, bias)


def _glorot_uniform(key: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Initial values (*inputs, *features), as of a matrix from all inputs to all features. Glorot 2010, equation 16."""
    matrix = nn.initializers.xavier_uniform()(key, (math.prod(shape[:axes]), math.prod(shape[axes:])))
    return matrix.reshape(shape)


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias in the dtype of x; `bias`: float32, broadcast to the shape of x.

    The broadcast comes before the cast, so that the gradient of the bias, a sum over all rows of x, is accumulated in
    float32: in bfloat16 a sum of more than a few hundred equal terms stops growing.
    """
    return x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
