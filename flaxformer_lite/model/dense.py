"""The linear map of every projection: of queries, keys and values, of heads back to the model, of feed-forward."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_lite.config import ModelConfig

TURNED = "turned"  # a collection of variables beside "params": kernels (features, inputs), as `turned` makes them


class Dense(nn.Module):
    """x W + b, over the last `axes` axes of x, which become `features`; parameters float32, the product `dtype`.

    Where TURNED has its kernel, of one axis to one, W x is computed in its place: the same sums, but for rounding.
    """

    config: ModelConfig
    features: tuple[int, ...]
    axes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., *inputs) to (..., *features)."""
        c = self.config
        shape = x.shape[-self.axes :] + self.features
        kernel = self.param("kernel", _drawn, shape, self.axes)
        if self.has_variable(TURNED, "kernel"):
            turned_FD = self.get_variable(TURNED, "kernel").astype(c.dtype)
            y = jnp.moveaxis(jnp.tensordot(turned_FD, x.astype(c.dtype), (1, -1)), 0, -1)
        else:
            y = jnp.tensordot(x.astype(c.dtype), kernel.astype(c.dtype), self.axes)
        return add(y, self.param("bias", nn.initializers.zeros, self.features)) if c.use_bias else y


def _drawn(key: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Initial values (*inputs, *features), as of a matrix from all inputs to all features. Glorot 2010, equation 16."""
    matrix = nn.initializers.xavier_uniform()(key, (math.prod(shape[:axes]), math.prod(shape[axes:])))
    return matrix.reshape(shape)


def turned(params: dict) -> dict:
    """The feed-forward kernels of a model's decoder transposed, (features, inputs), for the collection TURNED.

    On a CPU XLA packs the right one of two matrices anew for each product. With the few rows of a decoding step that
    takes a good part of the time, if it is the kernel; transposed, the kernel can be the left one.
    """
    kernels = {path: kernel for path, kernel in flatten_dict(params).items() if path[-1] == "kernel"}
    return unflatten_dict(
        {path: kernel.T for path, kernel in kernels.items() if {"decoder", "feed_forward"} <= {*path}}
    )


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, in the dtype of x; `bias`: float32, repeated to the shape of x.

    Repeated first and rounded then, so that its gradient, a sum over all rows of x, is one of float32 numbers: in
    bfloat16 a sum of more than a few hundred like terms stands still.
    """
    return x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
