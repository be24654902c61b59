"""Norms, feed-forward and residuals against formulas; layers against their sublayers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, ModelConfig
from flaxformer_lite.model import layers, positions
from flaxformer_lite.model.attention import MultiHeadAttention
from flaxformer_lite.model.layers import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    Residual,
    make_norm,
)
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

pytestmark = pytest.mark.usefixtures("also_optimized")

B, T, S, D = 2, 5, 7, 13
CONFIG = ModelConfig(
    d_model=D, num_heads=3, d_head=11, d_ff=17, norm_epsilon=0.01, dropout=0.5, backend="reference"
)
SOURCE = TokenPositions.of(np.array([[7, 5, 6, 4, 2, 0, 0], [7, 5, 6, 4, 3, 8, 2]]))
TARGET = TokenPositions.at(np.arange(T))
ACTIVATIONS = {
    "relu": lambda x: max(0.0, x),
    # Hendrycks 2016, section 2, and its approximation
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + math.exp(-x)),
}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}  # Shazeer 2020, equation 5


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomised(params, seed=0):
    """Returns random parameters of the same shapes, so that no scale is 1 and no bias is 0."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(
        tree, [normal(100 * seed + i, *leaf.shape) / 3 for i, leaf in enumerate(leaves)]
    )


def config_with(**fields):
    return dataclasses.replace(CONFIG, **fields)


def normed(params, x, norm="layer_norm"):
    """Returns the norm in float64: Ba 2016, equations 3 and 4, or Zhang 2019, equation 4."""
    x = np.asarray(x, np.float64)
    centred = x if norm == "rms_norm" else x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + CONFIG.norm_epsilon)
    return scaled * params["scale"] + params.get("bias", 0)


def fed_forward(params, x, activation="relu"):
    """Equation 2 of section 3.3, or Shazeer 2020, equation 5, with biases."""
    x = np.asarray(x, np.float64)
    dense = lambda name, x: x @ params[name]["kernel"] + params[name].get("bias", 0)  # noqa: E731
    act = np.vectorize(ACTIVATIONS[GATED.get(activation, activation)])
    if activation in GATED:
        return dense("outer", act(dense("gate", x)) * dense("inner", x))
    return dense("outer", act(dense("inner", x)))


def with_residual(placement, norm, x, sublayer):
    """Returns a residual connection: section 3.1 for 'post', Xiong 2020 for 'pre'."""
    return x + sublayer(normed(norm, x)) if placement == "pre" else normed(norm, x + sublayer(x))


def initialised(module, *inputs, **bound):
    """Returns random parameters of a module, and its jitted forward with `bound` arguments."""
    init = functools.partial(module.init, **bound)
    params = randomised(jax.eval_shape(init, jax.random.key(0), *inputs)["params"])
    return params, jax.jit(functools.partial(module.apply, {"params": params}, **bound))


@pytest.mark.parametrize(
    ("norm", "use_bias", "names"),
    [
        ("layer_norm", True, {"scale", "bias"}),
        ("layer_norm", False, {"scale"}),
        ("rms_norm", True, {"scale"}),
        ("rms_norm", False, {"scale"}),
    ],
)
def test_a_norm_is_its_formula_with_the_epsilon_of_the_config(norm, use_bias, names):
    x = 5 + 0.3 * normal(0, B, T, D)
    params, apply = initialised(make_norm(config_with(norm=norm, use_bias=use_bias)), x)
    assert params.keys() == names
    other = "layer_norm" if norm == "rms_norm" else "rms_norm"
    assert np.abs(normed(params, x, norm) - normed(params, x, other)).max() > 0.1
    np.testing.assert_allclose(apply(x), normed(params, x, norm), atol=1e-4)


@pytest.mark.parametrize("norm", CHOICES["model.norm"])
def test_a_norm_takes_its_statistics_in_float32_when_activations_are_bfloat16(norm):
    module = make_norm(config_with(norm=norm, dtype="bfloat16"))
    x = jnp.asarray(normal(0, B, T, 257), jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    output = module.apply(variables, x)
    assert output.dtype == jnp.bfloat16 and variables["params"]["scale"].dtype == jnp.float32
    exact = normed({"scale": 1}, x.astype(jnp.float32), norm)
    np.testing.assert_array_less(
        np.abs(np.asarray(output, np.float64) - exact), 2**-8 * np.abs(exact) + 1e-5
    )


@pytest.mark.parametrize("norm", CHOICES["model.norm"])
def test_a_norm_of_a_text_does_not_depend_on_its_batch_or_its_padding(norm):
    alone, others = normal(0, 1, T, D), 3 + 2 * normal(1, 3, S, D)
    shared = np.concatenate([others, np.pad(alone, ((0, 0), (0, S - T), (0, 0)))])

    def over_the_batch(x_BLD):
        """Batch normalisation, over rows and positions (Ioffe 2015)."""
        return (x_BLD - x_BLD.mean(axis=(0, 1))) / x_BLD.std(axis=(0, 1))

    assert np.abs(over_the_batch(shared)[3:, :T] - over_the_batch(alone)).max() > 0.1
    params, apply = initialised(make_norm(config_with(norm=norm)), alone)
    np.testing.assert_allclose(apply(shared)[3:, :T], apply(alone), atol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", CHOICES["model.activation"])
def test_feed_forward_is_its_formula_at_every_position(activation, use_bias):
    x = normal(0, B, T, D)
    params, apply = initialised(
        FeedForward(config_with(activation=activation, use_bias=use_bias)), x
    )
    assert params["inner"]["kernel"].shape == (D, 17) and params["outer"]["kernel"].shape == (17, D)
    assert {"bias" in part for part in params.values()} == {use_bias}
    np.testing.assert_allclose(apply(x), fed_forward(params, x, activation), atol=2e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_its_formula_and_differs_from_the_others(activation):
    x = np.linspace(-5, 5, 101, dtype=np.float32)
    expected = {
        name: np.vectorize(formula)(x.astype(np.float64)) for name, formula in ACTIVATIONS.items()
    }
    np.testing.assert_allclose(layers.ACTIVATIONS[activation](x), expected[activation], atol=2e-6)
    assert all(
        np.abs(expected[activation] - expected[name]).max() > 1e-4
        for name in expected.keys() - {activation}
    )


@pytest.mark.parametrize("placement", CHOICES["model.norm_placement"])
def test_the_norm_is_before_or_after_the_sublayer_as_configured(placement):
    x = normal(0, B, T, D)
    params, apply = initialised(
        Residual(config_with(norm_placement=placement)), x, sublayer=jnp.sin
    )
    other = "pre" if placement == "post" else "post"
    expected = with_residual(placement, params["norm"], x, np.sin)
    assert np.abs(expected - with_residual(other, params["norm"], x, np.sin)).max() > 0.1
    np.testing.assert_allclose(apply(x), expected, atol=1e-4)


def test_dropout_acts_on_the_output_of_the_sublayer_and_not_on_the_residual():
    module, x = Residual(config_with(norm_placement="pre")), normal(0, B, 101, D)
    variables = module.init(jax.random.key(0), x, jnp.ones_like)
    rngs = {"dropout": jax.random.key(1)}
    added = module.apply(variables, x, jnp.ones_like, deterministic=False, rngs=rngs) - x
    np.testing.assert_allclose(np.unique(np.round(added, 5)), [0, 2])
    post = Residual(CONFIG).apply(variables, x, jnp.ones_like, deterministic=False, rngs=rngs)
    np.testing.assert_allclose(post, normed({"scale": 1}, x + added), atol=1e-4)


def bias_by_distance(query_BTHK, query_position_BT, key_position_BS):
    """A bias that the layers pass to self-attention."""
    return positions.alibi(query_position_BT, key_position_BS, num_heads=3)


def attended(params, x, memory, mask, bias=None):
    inputs = jnp.asarray(x, jnp.float32), jnp.asarray(memory, jnp.float32)
    return MultiHeadAttention(CONFIG).apply({"params": params}, *inputs, mask, bias)


@pytest.mark.parametrize("placement", CHOICES["model.norm_placement"])
def test_an_encoder_layer_is_self_attention_and_then_feed_forward(placement):
    x, mask = normal(0, B, S, D), AttentionMask(SOURCE, SOURCE)
    module = EncoderLayer(config_with(norm_placement=placement))
    params, apply = initialised(module, x, mask, bias=bias_by_distance)
    attend = lambda x: attended(params["self_attention"], x, x, mask, bias_by_distance)  # noqa: E731
    y = with_residual(placement, params["self_attention_residual"]["norm"], x, attend)
    feed = lambda y: fed_forward(params["feed_forward"], y)  # noqa: E731
    expected = with_residual(placement, params["feed_forward_residual"]["norm"], y, feed)
    np.testing.assert_allclose(apply(x, mask), expected, atol=1e-4)


@pytest.mark.parametrize("placement", CHOICES["model.norm_placement"])
@pytest.mark.parametrize("has_encoder", [True, False])
def test_a_decoder_layer_is_self_attention_then_cross_attention_if_any_then_feed_forward(
    has_encoder, placement
):
    x, memory = normal(0, B, T, D), normal(1, B, S, D)
    own, cross = AttentionMask(TARGET, TARGET, causal=True), AttentionMask(TARGET, SOURCE)
    module = DecoderLayer(config_with(norm_placement=placement), has_encoder)
    encoder = {"memory": memory, "cross_mask": cross} if has_encoder else {}
    params, apply = initialised(module, x, own, bias=bias_by_distance, **encoder)
    attend = lambda x: attended(params["self_attention"], x, x, own, bias_by_distance)  # noqa: E731
    y = with_residual(placement, params["self_attention_residual"]["norm"], x, attend)
    if has_encoder:
        attend = lambda y: attended(params["cross_attention"], y, memory, cross)  # noqa: E731
        y = with_residual(placement, params["cross_attention_residual"]["norm"], y, attend)
    feed = lambda z: fed_forward(params["feed_forward"], z)  # noqa: E731
    expected = with_residual(placement, params["feed_forward_residual"]["norm"], y, feed)
    np.testing.assert_allclose(apply(x, own), expected, atol=2e-4)
