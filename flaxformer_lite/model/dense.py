"""The linear map of every projection: queries, keys and values, the output of attention, and feed-forward."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from flaxformer_lite.config import ModelConfig

PRODUCT = "product"  # `model.remat` keeps the output of `Dense` by this name


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
        y = checkpoint_name(product(x.astype(c.dtype), kernel, self.axes), PRODUCT)
        return y if bias is None else add(y, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(
    x: jax.Array, kernel: jax.Array, axes: int, transposed: bool = False, dtype: jnp.dtype | None = None
) -> jax.Array:
    """Returns x W over the last `axes` axes of x, as `dtype` or the dtype of x.

    The gradient of the kernel is summed over rows in float32 and never rounded. The gradient of its cast would be
    bfloat16, and so would be the sums over devices that the compiler adds to it. All factors have the dtype of x, also
    in the gradients.

    Args:
      kernel: float32 (*inputs, *features), or `transposed` (*features, *inputs).
    """
    inputs, _ = _kernel_axes(kernel, axes, transposed)
    of_x = tuple(range(x.ndim - axes, x.ndim))
    return jnp.tensordot(x, kernel.astype(x.dtype), (of_x, inputs), preferred_element_type=dtype)


def _kernel_axes(kernel: jax.Array, axes: int, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the input axes and the feature axes of a kernel."""
    every = tuple(range(kernel.ndim))
    return (every[-axes:], every[:-axes]) if transposed else (every[:axes], every[axes:])


def _product_forward(x: jax.Array, kernel: jax.Array, *options) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, kernel, *options), (x, kernel)


def _product_backward(
    axes: int, transposed: bool, dtype: jnp.dtype | None, saved: tuple[jax.Array, jax.Array], y_gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    y_gradient = y_gradient.astype(x.dtype)
    _, features = _kernel_axes(kernel, axes, transposed)
    rows = tuple(range(x.ndim - axes))
    of_y = tuple(range(len(rows), y_gradient.ndim))
    x_gradient = jnp.tensordot(y_gradient, kernel.astype(x.dtype), (of_y, features))
    factors = (y_gradient, x) if transposed else (x, y_gradient)  # in the order of the kernel's axes
    return x_gradient, jnp.tensordot(*factors, (rows, rows), preferred_element_type=kernel.dtype)


product.defvjp(_product_forward, _product_backward)


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
