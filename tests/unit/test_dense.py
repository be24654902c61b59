"""The linear layer: formula over 1 and 2 axes, initial values, gradients, bfloat16."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.dense import Dense, matmul

CONFIG = ModelConfig(vocab_size=11, use_bias=True)
pytestmark = pytest.mark.usefixtures("also_optimized")

ROWS, IN, OUT = (3, 5), (7,), (2, 13)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "features"), [(IN, (17,)), (IN, OUT), (OUT, IN)], ids=["plain", "split", "join"]
)
def test_dense_is_its_formula_over_one_axis_and_over_two(inputs, features, use_bias):
    x = normal(0, *ROWS, *inputs)
    dense = Dense(dataclasses.replace(CONFIG, use_bias=use_bias), features, axes=len(inputs))
    params = {"kernel": normal(1, *inputs, *features)}
    params |= {"bias": normal(2, *features)} if use_bias else {}
    initial = jax.eval_shape(dense.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(np.shape, initial) == jax.tree.map(np.shape, params)
    kernel = np.float64(params["kernel"]).reshape(math.prod(inputs), -1)
    expected = (x.reshape(*ROWS, -1) @ kernel).reshape(*ROWS, *features) + params.get("bias", 0)
    np.testing.assert_allclose(dense.apply({"params": params}, x), expected, atol=1e-5)


def test_the_initial_range_of_the_kernel_follows_from_all_inputs_and_all_outputs():
    # Glorot 2010, equation 16, for the matrix as a whole, not per head.
    for inputs, features in (((64,), (4, 32)), ((4, 32), (64,))):
        dense = Dense(CONFIG, features, axes=len(inputs))
        params = dense.init(jax.random.key(0), jnp.ones(inputs))["params"]
        widest = math.sqrt(6 / (64 + 4 * 32))
        assert 0.99 * widest < np.abs(params["kernel"]).max() <= widest
        assert not params["bias"].any()


@pytest.mark.parametrize(
    ("inputs", "features"), [(IN, (17,)), (IN, OUT), (OUT, IN)], ids=["plain", "split", "join"]
)
def test_the_gradients_of_a_matmul_are_those_of_its_formula(inputs, features):
    x, kernel = normal(0, *ROWS, *inputs), normal(1, *inputs, *features)
    weight = normal(2, *ROWS, *features)
    loss = lambda x, kernel: (matmul(x, kernel, len(inputs)) * weight).sum()  # noqa: E731
    gradients = jax.grad(loss, argnums=(0, 1))(x, kernel)
    matrix = np.float64(kernel).reshape(math.prod(inputs), -1)
    flat, of_y = (np.float64(side).reshape(math.prod(ROWS), -1) for side in (x, weight))
    np.testing.assert_allclose(gradients[0], (of_y @ matrix.T).reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(gradients[1], (flat.T @ of_y).reshape(kernel.shape), atol=1e-5)


def test_in_bfloat16_the_gradient_of_the_kernel_is_not_rounded():
    x, weight = (jnp.asarray(normal(i, 257, 3), jnp.bfloat16) for i in range(2))
    kernel = jnp.asarray(normal(2, 3, 3))
    loss = lambda kernel: jnp.vdot(matmul(x, kernel, 1), weight).astype(jnp.float32)  # noqa: E731
    gradient = jax.grad(loss)(kernel)
    exact = np.float64(x).T @ np.float64(weight)
    rounded = np.float64(jnp.bfloat16(exact))
    assert np.abs(gradient - exact).max() < 1e-4 < np.abs(rounded - exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_transposed_kernel_has_its_inputs_last_and_its_output_may_be_float32(dtype):
    """In bfloat16, as for logits, factors are rounded; output and kernel gradient are not."""
    x, weight = (jnp.asarray(normal(i, *ROWS, n), dtype) for i, n in ((0, 7), (2, 17)))
    kernel = normal(1, 17, 7)

    def weighed(x, kernel):
        y = matmul(x, kernel, 1, True, jnp.float32)
        return jnp.vdot(y, weight.astype(jnp.float32)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(
        x, kernel
    )
    rounded = np.float64(jnp.asarray(kernel, dtype))
    flat, of_y = (np.float64(a).reshape(15, -1) for a in (x, weight))
    assert (y.dtype, gradients[0].dtype, gradients[1].dtype) == (jnp.float32, x.dtype, jnp.float32)
    np.testing.assert_allclose(y.reshape(15, 17), flat @ rounded.T, atol=1e-5)
    np.testing.assert_allclose(gradients[1], of_y.T @ flat, atol=1e-5)
    of_x = np.float64(gradients[0]).reshape(15, 7)
    np.testing.assert_allclose(
        of_x, of_y @ rounded, rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=1e-5
    )


def test_in_bfloat16_the_gradient_of_a_bias_is_summed_in_float32():
    dense = Dense(dataclasses.replace(CONFIG, dtype="bfloat16"), (3,))
    x = jnp.ones((4099, 1, 2))
    params = dense.init(jax.random.key(0), x)
    assert dense.apply(params, x).dtype == jnp.bfloat16
    assert params["params"]["bias"].dtype == jnp.float32
    loss = lambda params: dense.apply(params, x).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))(params)["params"]
    # a sum of 4099 ones in bfloat16 would stop growing at 256
    np.testing.assert_array_equal(gradient["bias"], np.full(3, 4099))
