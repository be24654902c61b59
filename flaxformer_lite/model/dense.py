"""The linear layer of all projections: queries, keys, values, attention output, feed-forward."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flaxformer_lite.fields import ModelConfig

MATMUL = "matmul"  # the checkpoint name of the output of `Dense`, for `model.remat`


class Dense(nn.Module):
    """x W + b over the last `axes` axes of x; parameters are float32, the output is `dtype`."""

    config: ModelConfig
    features: tuple[int, ...]
    axes: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., *inputs) to (..., *features)."""
        c = self.config
        shape = x.shape[-self.axes :] + self.features
        kernel = self.param("kernel", _glorot_uniform, shape, self.axes)
        bias = self.param("bias", nn.initializers.zeros, self.features) if c.use_bias else None
        y = checkpoint_name(matmul(x.astype(c.dtype), kernel, self.axes), MATMUL)
        return y if bias is None else add_bias(y, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def matmul(
    x: jax.Array,
    kernel: jax.Array,
    axes: int,
    transposed: bool = False,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Returns x W over the last `axes` axes of x, in `dtype` or the dtype of x.

    All factors have the dtype of x, also in the backward pass. The gradient of the kernel is
    accumulated in float32 and not rounded. With a plain cast of the kernel it would be bfloat16,
    and so would the all-reduce over devices that the compiler adds to it.

    Args:
      kernel: float32 (*inputs, *features), or if `transposed` (*features, *inputs).
    """
    inputs, _ = _kernel_axes(kernel, axes, transposed)
    of_x = tuple(range(x.ndim - axes, x.ndim))
    return jnp.tensordot(x, kernel.astype(x.dtype), (of_x, inputs), preferred_element_type=dtype)


def _kernel_axes(
    kernel: jax.Array, axes: int, transposed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the input axes and the feature axes of a kernel."""
    every = tuple(range(kernel.ndim))
    return (every[-axes:], every[:-axes]) if transposed else (every[:axes], every[axes:])


def _matmul_forward(
    x: jax.Array, kernel: jax.Array, *options: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, kernel, *options), (x, kernel)


def _matmul_backward(
    axes: int,
    transposed: bool,
    dtype: jnp.dtype | None,
    saved: tuple[jax.Array, jax.Array],
    y_gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    y_gradient = y_gradient.astype(x.dtype)
    _, features = _kernel_axes(kernel, axes, transposed)
    rows = tuple(range(x.ndim - axes))
    of_y = tuple(range(len(rows), y_gradient.ndim))
    x_gradient = jnp.tensordot(y_gradient, kernel.astype(x.dtype), (of_y, features))
    # in the order of the kernel's axes
    factors = (y_gradient, x) if transposed else (x, y_gradient)
    return x_gradient, jnp.tensordot(*factors, (rows, rows), preferred_element_type=kernel.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _glorot_uniform(key: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Returns initial values of a matrix from all inputs to all features. Glorot 2010, eq. 16."""
    fan_in, fan_out = math.prod(shape[:axes]), math.prod(shape[axes:])
    return nn.initializers.xavier_uniform()(key, (fan_in, fan_out)).reshape(shape)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns x + bias in the dtype of x; `bias`: float32, broadcast to the shape of x.

    The broadcast precedes the cast, so that the gradient of the bias, a sum over all rows of x, is
    accumulated in float32. In bfloat16 a sum of more than a few hundred equal terms stops growing.
    """
    return x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
