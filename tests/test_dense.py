"""The linear map of every projection: its formula over one axis and over two, its start, its gradients in bfloat16."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.dense import CONVOLVED, TURNED, Dense, kernels, turned
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training.step import param_shapes

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


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("inputs", "features"), [(IN, (17,)), (IN, OUT), (OUT, IN)], ids=["plain", "split", "join"])
@pytest.mark.parametrize("collection", [TURNED, CONVOLVED])
def test_a_kernel_of_another_collection_is_what_is_computed_with_and_gives_the_same(
    collection, inputs, features, use_bias
):
    x = draw(0, *ROWS, *inputs)
    dense = Dense(dataclasses.replace(CONFIG, use_bias=use_bias), features, axes=len(inputs))
    params = {"kernel": draw(1, *inputs, *features)} | ({"bias": draw(2, *features)} if use_bias else {})
    others = {**params, "kernel": draw(3, *inputs, *features)}
    axes = [*range(len(inputs + features))]
    order = axes[len(inputs) :] + axes[: len(inputs)] if collection == TURNED else axes
    given = {"params": others, collection: {"kernel": params["kernel"].transpose(order)}}
    np.testing.assert_allclose(dense.apply(given, x), dense.apply({"params": params}, x), atol=1e-5)


@pytest.mark.parametrize("collection", [TURNED, CONVOLVED])
def test_a_kernel_of_another_collection_is_rounded_to_the_dtype_of_the_product(collection):
    dense, x = Dense(dataclasses.replace(CONFIG, dtype="bfloat16"), (17,)), draw(0, *ROWS, *IN)
    params = {"kernel": draw(1, *IN, 17), "bias": draw(2, 17)}
    kernel = params["kernel"].T if collection == TURNED else params["kernel"]
    y = dense.apply({"params": params, collection: {"kernel": kernel}}, x)
    assert y.dtype == jnp.bfloat16
    expected = dense.apply({"params": params}, x).astype(jnp.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.05)


def test_a_kernel_that_is_turned_another_way_is_refused():
    dense, x = Dense(CONFIG, OUT), draw(0, *ROWS, *IN)
    params = {"kernel": draw(1, *IN, *OUT), "bias": draw(2, *OUT)}
    with pytest.raises(ValueError, match=r"^turned: expected a kernel \(2, 13, 7\), got \(13, 7, 2\)\."):
        dense.apply({"params": params, TURNED: {"kernel": draw(3, 13, 7, 2)}}, x)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_what_is_turned_are_the_kernels_of_a_step_of_the_decoder(architecture):
    sizes = {"d_model": 6, "num_heads": 2, "d_ff": 13, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = build_model(ModelConfig(vocab_size=11, architecture=architecture, activation="swiglu", **sizes))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape), param_shapes(model))
    from_model, to_model = {"kernel": (2, 3, 6)}, {"kernel": (6, 2, 3)}  # heads, size of a head, width of the model
    feed_forward = {"inner": {"kernel": (13, 6)}, "gate": {"kernel": (13, 6)}, "outer": {"kernel": (6, 13)}}
    self_attention = {"query": from_model, "key": from_model, "value": from_model, "out": to_model}
    layer = {"feed_forward": feed_forward, "self_attention": self_attention}
    if architecture == "encoder_decoder":  # its keys and values are made once a text, of the encoder's output
        layer["cross_attention"] = {"query": from_model, "out": to_model}
    expected = {"decoder": {"layers_0": layer}}
    assert jax.tree.map(np.shape, turned(params)) == expected
    ensemble = {"members_0": params, "members_1": params}
    assert jax.tree.map(np.shape, turned(ensemble)) == {"members_0": expected, "members_1": expected}


def test_a_product_by_convolution_is_left_to_another_library():
    dense, x = Dense(CONFIG, (512,)), draw(0, 64, 512)
    params = dense.init(jax.random.key(0), x)["params"]

    def compiled(variables):
        return jax.jit(dense.apply).lower(variables, x).compile().as_text()

    program = compiled({"params": params, CONVOLVED: kernels(params)})
    assert " dot(" in program and "convolution(" not in program and "__ynn_fusion" not in program
    if "__ynn_fusion" not in compiled({"params": params}):
        pytest.skip("XLA leaves no product to YNNPACK here")


def test_what_is_convolved_are_all_kernels_as_they_are():
    kernel, table = np.ones((2, 3)), np.ones((5, 2))
    params = {"encoder": {"inner": {"kernel": kernel, "bias": np.ones(3)}, "norm": {"scale": np.ones(2)}}}
    told = kernels({"embedding": {"embedding": table}, **params})
    assert told["encoder"]["inner"]["kernel"] is kernel and told == {"encoder": {"inner": {"kernel": kernel}}}


def test_its_matrix_starts_as_wide_as_all_inputs_and_all_outputs_ask_for():
    # Glorot 2010, equation 16, of the matrix as a whole, not of each head's part.
    for inputs, features in (((64,), (4, 32)), ((4, 32), (64,))):
        dense = Dense(CONFIG, features, axes=len(inputs))
        params = dense.init(jax.random.key(0), jnp.ones(inputs))["params"]
        widest = math.sqrt(6 / (64 + 4 * 32))
        assert 0.99 * widest < np.abs(params["kernel"]).max() <= widest
        assert not params["bias"].any()


def test_in_bfloat16_the_gradient_of_a_bias_is_summed_in_float32():
    dense = Dense(dataclasses.replace(CONFIG, dtype="bfloat16"), (3,))
    x = jnp.ones((4099, 1, 2))
    params = dense.init(jax.random.key(0), x)
    assert dense.apply(params, x).dtype == jnp.bfloat16 and params["params"]["bias"].dtype == jnp.float32
    gradient = jax.jit(jax.grad(lambda params: dense.apply(params, x).astype(jnp.float32).sum()))(params)["params"]
    np.testing.assert_array_equal(gradient["bias"], np.full(3, 4099))  # in bfloat16 a sum of so many stands still
