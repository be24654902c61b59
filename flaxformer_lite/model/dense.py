"""The linear map of every projection: of queries, keys and values, of heads back to the model, of feed-forward."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from flaxformer_lite.config import ModelConfig

# Collections of variables beside "params": kernels, with which a CPU computes the same in another way.
TURNED = "turned"  # (*features, *inputs), as `turned` makes them
CONVOLVED = "convolved"  # (*inputs, *features), as `kernels` finds them
ONCE = ("cross_attention", "key"), ("cross_attention", "value")  # not in each step: they map the encoder's output once
INPUT_AXES = {"out": 2}  # of kernels by their names, where there is more than one: heads, and the size of each


class Dense(nn.Module):
    """x W + b, over the last `axes` axes of x, which become `features`; parameters float32, the product `dtype`.

    Where TURNED has its kernel, W x + b is computed in its place, and where CONVOLVED has it a convolution of width 1:
    the same sums, but for rounding.
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
        bias = self.param("bias", nn.initializers.zeros, self.features) if c.use_bias else None
        x = x.astype(c.dtype)
        if self.has_variable(TURNED, "kernel"):
            return self._by_rows(x, self.get_variable(TURNED, "kernel").astype(c.dtype), bias)
        if self.has_variable(CONVOLVED, "kernel"):
            y = _convolution(x, self.get_variable(CONVOLVED, "kernel").reshape(shape).astype(c.dtype), self.axes)
        else:
            y = jnp.tensordot(x, kernel.astype(c.dtype), self.axes)
        return y if bias is None else add(y, bias)

    def _by_rows(self, x: jax.Array, turned_FI: jax.Array, bias: jax.Array | None) -> jax.Array:
        """W x + b in place of x W + b; `turned_FI`: (*features, *inputs)."""
        rows, inputs = x.shape[: -self.axes], x.shape[-self.axes :]
        if turned_FI.shape != self.features + inputs:
            raise ValueError(f"{TURNED}: expected a kernel {self.features + inputs}, got {turned_FI.shape}.")
        # With x of two axes, YNNPACK, by which XLA computes products on a CPU, reads it as it is; else XLA copies it.
        x_RI = x.reshape(math.prod(rows), math.prod(inputs))
        y_FR = jnp.tensordot(turned_FI.reshape(-1, x_RI.shape[1]), x_RI, (1, 1))
        y_FR = y_FR if bias is None else add(y_FR, bias.reshape(-1, 1))
        y_FR = jax.lax.optimization_barrier(y_FR)  # else XLA finds that it is x W, transposed
        return y_FR.T.reshape(*rows, *self.features)


def _convolution(x: jax.Array, kernel: jax.Array, axes: int) -> jax.Array:
    """x W, as the convolution of one sequence, its rows, with a kernel of width 1.

    XLA computes it as a product then, but decides by which library while it is a convolution: on a CPU that is Eigen,
    where many other products are YNNPACK's.
    """
    rows, features = x.shape[:-axes], kernel.shape[axes:]
    x_1RI = x.reshape(1, math.prod(rows), math.prod(x.shape[-axes:]))
    kernel_1IF = kernel.reshape(1, x_1RI.shape[2], math.prod(features))
    order = ("NWC", "WIO", "NWC")
    y_1RF = jax.lax.conv_general_dilated(x_1RI, kernel_1IF, (1,), "VALID", dimension_numbers=order)
    return y_1RF.reshape(*rows, *features)


def _drawn(key: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Initial values (*inputs, *features), as of a matrix from all inputs to all features. Glorot 2010, equation 16."""
    matrix = nn.initializers.xavier_uniform()(key, (math.prod(shape[:axes]), math.prod(shape[axes:])))
    return matrix.reshape(shape)


def kernels(params: dict) -> dict:
    """Those among `params`, as they are, for the collection CONVOLVED.

    Measured on an AMD machine: in one thread Eigen multiplies more than some 32 rows sooner than YNNPACK; in several,
    later.
    """
    return unflatten_dict({path: kernel for path, kernel in flatten_dict(params).items() if path[-1] == "kernel"})


def turned(params: dict) -> dict:
    """The kernels of a decoder's step transposed, (*features, *inputs), for the collection TURNED.

    On a CPU XLA packs the right one of two matrices anew for each product. With the few rows of a decoding step that
    takes a good part of the time, if it is the kernel; transposed, the kernel can be the left one.
    """
    every = flatten_dict(kernels(params))
    of_step = {path: kernel for path, kernel in every.items() if "decoder" in path and path[-3:-1] not in ONCE}

    def turn(kernel: jax.Array, axes: int) -> jax.Array:
        return jnp.moveaxis(kernel, range(axes), range(-axes, 0))

    return unflatten_dict({path: turn(kernel, INPUT_AXES.get(path[-2], 1)) for path, kernel in of_step.items()})


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, in the dtype of x; `bias`: float32, repeated to the shape of x.

    Repeated first and rounded then, so that its gradient, a sum over all rows of x, is one of float32 numbers: in
    bfloat16 a sum of more than a few hundred like terms stands still.
    """
    return x + jnp.broadcast_to(bias, x.shape).astype(x.dtype)
