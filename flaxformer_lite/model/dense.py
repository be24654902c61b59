"""The linear map of every projection: of queries, keys and values, of heads back to the model, of feed-forward."""

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
        shape = x.shape[-self.axes :] + self.features
        kernel = self.param("kernel", _drawn, shape, self.axes)
        y = jnp.tensordot(x.astype(c.dtype), kernel.astype(c.dtype), self.axes)
        return add(y, self.param("bias", nn.initializers.zeros, self.features)) if c.use_bias else y


def _drawn(key: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Initial values (*inputs, *features), as of a matrix from all inputs to all features. Glorot 2010, equation 16."""
    matrix = nn.initializers.xavier_uniform()(key, (math.prod(shape[:axes]), math.prod(shape[axes:])))
    return matrix.reshape(shape)


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, in the dtype of x; `bias`: float32, repeated to the shape of x.

    Repeated first and rounded then, so that its gradient, a sum over all rows of x, is one of float32 numbers: in
    bfloat16 a sum of more than a few hundred like terms stands still.
    """
    return x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
