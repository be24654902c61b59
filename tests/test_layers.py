"""LayerNorm, feed-forward and residuals against their formulas, and layers against their sublayers in order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.attention import MultiHeadAttention
from flaxformer_lite.model.layers import DecoderLayer, EncoderLayer, FeedForward, Residual, layer_norm

B, T, S, D = 2, 5, 7, 13
CONFIG = ModelConfig(d_model=D, num_heads=3, d_head=11, d_ff=17, norm_epsilon=0.01, dropout=0.5)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomised(params, seed=0):
    """Every parameter drawn anew, so that no scale is 1 and no bias 0."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [draw(100 * seed + i, *leaf.shape) / 3 for i, leaf in enumerate(leaves)])


def placed(placement):
    return dataclasses.replace(CONFIG, norm_placement=placement)


def normed(params, x):
    """LayerNorm over the last axis, in float64."""
    x = np.asarray(x, np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 0.01) * params["scale"] + params["bias"]


def fed_forward(params, x):
    """Equation 2 of section 3.3."""
    hidden = np.maximum(0, x @ params["inner"]["kernel"] + params["inner"]["bias"])
    return hidden @ params["outer"]["kernel"] + params["outer"]["bias"]


def in_place(placement, norm, x, sublayer):
    """Section 3.1 for 'post', and its variant with the norm before the sublayer."""
    return x + sublayer(normed(norm, x)) if placement == "pre" else normed(norm, x + sublayer(x))


def test_layer_norm_is_the_formula_with_the_epsilon_of_the_config():
    module, x = layer_norm(CONFIG), 5 + 0.3 * draw(0, B, T, D)
    params = randomised(module.init(jax.random.key(0), x)["params"])
    np.testing.assert_allclose(module.apply({"params": params}, x), normed(params, x), atol=1e-4)


def test_layer_norm_takes_its_statistics_in_float32_when_activations_are_bfloat16():
    module = layer_norm(dataclasses.replace(CONFIG, dtype="bfloat16"))
    x = jnp.asarray(draw(0, B, T, 257), jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    normal = module.apply(variables, x)
    assert normal.dtype == jnp.bfloat16 and variables["params"]["scale"].dtype == jnp.float32
    exact = normed({"scale": 1, "bias": 0}, x.astype(jnp.float32))
    np.testing.assert_array_less(np.abs(np.asarray(normal, np.float64) - exact), 2**-8 * np.abs(exact) + 1e-5)


def test_feed_forward_is_equation_2_at_every_position():
    module, x = FeedForward(CONFIG), draw(0, B, T, D)
    params = randomised(module.init(jax.random.key(0), x)["params"])
    assert params["inner"]["kernel"].shape == (D, 17) and params["outer"]["kernel"].shape == (17, D)
    np.testing.assert_allclose(module.apply({"params": params}, x), fed_forward(params, x), atol=1e-5)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_the_norm_stands_where_the_config_places_it(placement):
    module, x = Residual(placed(placement)), draw(0, B, T, D)
    params = randomised(module.init(jax.random.key(0), x, jnp.sin)["params"])
    other = "pre" if placement == "post" else "post"
    expected = in_place(placement, params["norm"], x, np.sin)
    assert np.abs(expected - in_place(other, params["norm"], x, np.sin)).max() > 0.1
    np.testing.assert_allclose(module.apply({"params": params}, x, jnp.sin), expected, atol=1e-4)


def test_dropout_falls_on_the_output_of_the_sublayer_and_not_on_the_residual():
    module, x = Residual(placed("pre")), draw(0, B, 101, D)
    variables = module.init(jax.random.key(0), x, jnp.ones_like)
    rngs = {"dropout": jax.random.key(1)}
    added = module.apply(variables, x, jnp.ones_like, deterministic=False, rngs=rngs) - x
    np.testing.assert_allclose(np.unique(np.round(added, 5)), [0, 2])
    post = Residual(placed("post")).apply(variables, x, jnp.ones_like, deterministic=False, rngs=rngs)
    np.testing.assert_allclose(post, normed({"scale": 1, "bias": 0}, x + added), atol=1e-4)


def attended(params, x, memory, mask):
    return MultiHeadAttention(CONFIG).apply({"params": params}, jnp.asarray(x, jnp.float32), memory, mask)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_an_encoder_layer_attends_to_itself_and_then_feeds_forward(placement):
    module, x = EncoderLayer(placed(placement)), draw(0, B, S, D)
    mask = np.array([[1, 1, 1, 1, 1, 0, 0], [1] * 7], bool)[:, None, None]
    params = randomised(module.init(jax.random.key(0), x, mask)["params"])

    def attend(x):
        x = jnp.asarray(x, jnp.float32)
        return attended(params["self_attention"], x, x, mask)

    y = in_place(placement, params["self_attention_residual"]["norm"], x, attend)
    feed = lambda y: fed_forward(params["feed_forward"], y)  # noqa: E731
    expected = in_place(placement, params["feed_forward_residual"]["norm"], y, feed)
    np.testing.assert_allclose(module.apply({"params": params}, x, mask), expected, atol=1e-4)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_decoder_layer_attends_to_itself_then_to_the_memory_and_then_feeds_forward(placement):
    module, x, memory = DecoderLayer(placed(placement)), draw(0, B, T, D), draw(1, B, S, D)
    mask = np.tril(np.ones((T, T), bool))[None, None]
    cross_mask = np.array([[1, 1, 1, 1, 1, 0, 0], [1] * 7], bool)[:, None, None]
    params = randomised(module.init(jax.random.key(0), x, memory, mask, cross_mask)["params"])

    def attend(x):
        x = jnp.asarray(x, jnp.float32)
        return attended(params["self_attention"], x, x, mask)

    y = in_place(placement, params["self_attention_residual"]["norm"], x, attend)
    cross = lambda y: attended(params["cross_attention"], y, memory, cross_mask)  # noqa: E731
    z = in_place(placement, params["cross_attention_residual"]["norm"], y, cross)
    feed = lambda z: fed_forward(params["feed_forward"], z)  # noqa: E731
    expected = in_place(placement, params["feed_forward_residual"]["norm"], z, feed)
    output = module.apply({"params": params}, x, memory, mask, cross_mask)
    np.testing.assert_allclose(output, expected, atol=2e-4)
