"""The linear map of every projection: its formula over one axis and over two, its start, its gradients in bfloat16."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.dense import Dense, product

CONFIG = ModelConfig(vocab_size=11, use_bias=True)
ROWS, IN, OUT = (3, 5), (7,), (2, 13)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("inputs", "features"), [(IN, (17,)), (IN, OUT), (OUT, IN)], ids=["plain", "split", "join"])
def test_it_is_its_formula_over_one_axis_and_over_two(inputs, features, use_bias):
    x = draw(0, *ROWS, *inputs)
    dense = Dense(dataclasses.replace(CONFIG, use_bias=use_bias), features, axes=len(inputs))
    params = {"kernel": draw(1, *inputs, *features)} | ({"bias": draw(2, *features)} if use_bias else {})
    assert jax.tree.map(np.shape, dense.init(jax.random.key(0), x)["params"]) == jax.tree.map(np.shape, params)
    kernel = np.float64(params["kernel"]).reshape(math.prod(inputs), -1)
    expected = (x.reshape(*ROWS, -1) @ kernel).reshape(*ROWS, *features) + params.get("bias", 0)
    np.testing.assert_allclose(dense.apply({"params": params}, x), expected, atol=1e-5)


def test_its_matrix_starts_as_wide_as_all_inputs_and_all_outputs_ask_for():
    # Glorot 2010, equation 16, of the matrix as a whole, not of each head's part.
    for inputs, features in (((64,), (4, 32)), ((4, 32), (64,))):
        dense = Dense(CONFIG, features, axes=len(inputs))
        params = dense.init(jax.random.key(0), jnp.ones(inputs))["params"]
        widest = math.sqrt(6 / (64 + 4 * 32))
        assert 0.99 * widest < np.abs(params["kernel"]).max() <= widest
        assert not params["bias"].any()


@pytest.mark.parametrize(("inputs", "features"), [(IN, (17,)), (IN, OUT), (OUT, IN)], ids=["plain", "split", "join"])
def test_its_gradients_are_those_of_its_formula(inputs, features):
    x, kernel, weight = draw(0, *ROWS, *inputs), draw(1, *inputs, *features), draw(2, *ROWS, *features)
    gradients = jax.grad(lambda x, kernel: (product(x, kernel, len(inputs)) * weight).sum(), argnums=(0, 1))(x, kernel)
    matrix = np.float64(kernel).reshape(math.prod(inputs), -1)
    flat, of_y = (np.float64(side).reshape(math.prod(ROWS), -1) for side in (x, weight))
    np.testing.assert_allclose(gradients[0], (of_y @ matrix.T).reshape(x.shape), atol=1e-5)
    np.testing.assert_allclose(gradients[1], (flat.T @ of_y).reshape(kernel.shape), atol=1e-5)


def test_in_bfloat16_the_gradient_of_the_kernel_is_not_rounded():
    x, weight = (jnp.asarray(draw(i, 257, 3), jnp.bfloat16) for i in range(2))
    kernel = jnp.asarray(draw(2, 3, 3))
    gradient = jax.grad(lambda kernel: jnp.vdot(product(x, kernel, 1), weight).astype(jnp.float32))(kernel)
    exact = np.float64(x).T @ np.float64(weight)
    assert np.abs(gradient - exact).max() < 1e-4 < np.abs(np.float64(jnp.bfloat16(exact)) - exact).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_transposed_kernel_has_its_inputs_last_and_its_product_may_be_float32(dtype):
    """As of logits: bfloat16 rounds the factors, and neither the product nor the kernel's gradient."""
    x, kernel, weight = jnp.asarray(draw(0, *ROWS, 7), dtype), draw(1, 17, 7), jnp.asarray(draw(2, *ROWS, 17), dtype)

    def weighed(x, kernel):
        y = product(x, kernel, 1, True, jnp.float32)
        return jnp.vdot(y, weight.astype(jnp.float32)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(x, kernel)
    rounded, flat, of_y = np.float64(jnp.asarray(kernel, dtype)), *(np.float64(a).reshape(15, -1) for a in (x, weight))
    assert (y.dtype, gradients[0].dtype, gradients[1].dtype) == (jnp.float32, x.dtype, jnp.float32)
    np.testing.assert_allclose(y.reshape(15, 17), flat @ rounded.T, atol=1e-5)
    np.testing.assert_allclose(gradients[1], of_y.T @ flat, atol=1e-5)
    of_x = np.float64(gradients[0]).reshape(15, 7)
    np.testing.assert_allclose(of_x, of_y @ rounded, rtol=2**-7 if dtype == "bfloat16" else 1e-5, atol=1e-5)


def test_in_bfloat16_the_gradient_of_a_bias_is_summed_in_float32():
    dense = Dense(dataclasses.replace(CONFIG, dtype="bfloat16"), (3,))
    x = jnp.ones((4099, 1, 2))
    params = dense.init(jax.random.key(0), x)
    assert dense.apply(params, x).dtype == jnp.bfloat16 and params["params"]["bias"].dtype == jnp.float32
    gradient = jax.jit(jax.grad(lambda params: dense.apply(params, x).astype(jnp.float32).sum()))(params)["params"]
    np.testing.assert_array_equal(gradient["bias"], np.full(3, 4099))  # in bfloat16 a sum of so many stands still
