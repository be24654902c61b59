"""Equation 1 and many heads of it against numpy, masks, the cache, and weights on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.attention import KVCache, MultiHeadAttention, dot_product_attention

B, T, S, H, K = 2, 5, 7, 3, 11
CONFIG = ModelConfig(d_model=13, num_heads=H, d_head=K, attention_dropout=0.0)


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def softmax(scores):
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def equation_1(query_TK, key_SK, value_SK, mask_TS=None):
    """softmax(Q K^T / sqrt(d_k)) V in float64, and the softmax."""
    scores = query_TK.astype(np.float64) @ key_SK.T / np.sqrt(query_TK.shape[-1])
    weights = softmax(scores if mask_TS is None else np.where(mask_TS, scores, -np.inf))
    return weights @ value_SK, weights


@pytest.fixture(scope="module")
def qkv():
    return draw(0, B, T, H, K), draw(1, B, S, H, K), draw(2, B, S, H, K)


def some_mask():
    mask = np.random.default_rng(3).random((B, T, S)) < 0.5
    mask[..., 2] = True  # every query has a key
    assert not mask.all()
    return mask


@pytest.mark.parametrize("mask_BTS", [None, some_mask()], ids=["all keys", "some keys"])
def test_attention_is_equation_1_of_the_paper_for_every_row_and_head(qkv, mask_BTS):
    mask = None if mask_BTS is None else mask_BTS[:, None]
    mixed, weights = dot_product_attention(*qkv, mask)
    assert mixed.shape == (B, T, H, K) and weights.shape == (B, H, T, S)
    for b in range(B):
        for h in range(H):
            query, key, value = (x[b, :, h] for x in qkv)
            expected, expected_weights = equation_1(query, key, value, None if mask_BTS is None else mask_BTS[b])
            np.testing.assert_allclose(mixed[b, :, h], expected, atol=1e-5)
            np.testing.assert_allclose(weights[b, h], expected_weights, atol=1e-6)


def test_weights_of_a_query_sum_to_one_with_and_without_a_mask(qkv):
    for mask in (None, some_mask()[:, None]):
        _, weights = dot_product_attention(*qkv, mask)
        np.testing.assert_allclose(weights.sum(axis=-1), np.ones((B, H, T)), rtol=1e-6)


def test_a_masked_key_gets_a_weight_of_exactly_zero_and_no_other_does(qkv):
    mask = some_mask()[:, None]
    _, weights = dot_product_attention(*qkv, mask)
    np.testing.assert_array_equal(np.asarray(weights) > 0, np.broadcast_to(mask, weights.shape))


def test_a_masked_key_however_large_changes_nothing(qkv):
    query, key, value = qkv
    mask = some_mask()[:, None]
    hidden = ~some_mask().any(axis=1)
    hidden[:, -1] = True
    mask = mask & ~hidden[:, None, None, :]
    large = np.where(hidden[..., None, None], 1e4, 0).astype(np.float32)
    mixed, weights = dot_product_attention(query, key, value, mask)
    same, same_weights = dot_product_attention(query, key + large, value + large, mask)
    np.testing.assert_array_equal(mixed, same)
    np.testing.assert_array_equal(weights, same_weights)


def test_a_query_that_may_attend_to_nothing_gets_the_mean_of_all_values(qkv):
    mixed, weights = dot_product_attention(*qkv, np.zeros((B, 1, T, S), bool))
    np.testing.assert_allclose(weights, np.full((B, H, T, S), 1 / S), rtol=1e-6)
    np.testing.assert_allclose(mixed[:, 0], qkv[2].mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("d_k", [1, 2, 3, 5, 31])
def test_scores_are_divided_by_the_root_of_the_head_size(d_k):
    # One query of ones against the keys 0 and 1: scores 0 and d_k / sqrt(d_k), so the odds are exp(sqrt(d_k)).
    query, key = jnp.ones((1, 1, 1, d_k)), jnp.stack([jnp.zeros(d_k), jnp.ones(d_k)])[None, :, None]
    _, weights = dot_product_attention(query, key, key)
    np.testing.assert_allclose(weights[0, 0, 0, 1] / weights[0, 0, 0, 0], np.exp(np.sqrt(d_k)), rtol=1e-5)


def test_large_scores_do_not_overflow(qkv):
    query, key, value = qkv
    mixed, weights = dot_product_attention(query * 1e3, key * 1e3, value)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(weights.max(axis=-1), np.ones((B, H, T)), rtol=1e-6)


def test_drop_changes_the_mix_and_not_the_weights_that_are_returned(qkv):
    halve = lambda weights: weights / 2  # noqa: E731
    mixed, weights = dot_product_attention(*qkv)
    halved, same = dot_product_attention(*qkv, drop=halve)
    np.testing.assert_allclose(halved, mixed / 2, rtol=1e-5)
    np.testing.assert_array_equal(weights, same)


def test_in_bfloat16_the_softmax_is_float32_and_the_mix_is_not(qkv):
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in qkv)
    mixed, weights = dot_product_attention(query, key, value)
    assert mixed.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    assert (weights != weights.astype(jnp.bfloat16)).any()
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((B, H, T)), rtol=1e-6)


@pytest.fixture(scope="module")
def heads():
    """A module, random parameters (biases too) and its inputs."""
    module = MultiHeadAttention(CONFIG)
    x, memory = draw(4, B, T, CONFIG.d_model), draw(5, B, S, CONFIG.d_model)
    params = module.init(jax.random.key(0), x, memory)["params"]
    leaves, tree = jax.tree.flatten(params)
    return module, jax.tree.unflatten(tree, [draw(6 + i, *leaf.shape) / 3 for i, leaf in enumerate(leaves)]), x, memory


def by_hand(params, x_TD, memory_SD):
    """Section 3.2.2 for one row, a head at a time, heads concatenated at the end; and the weights (H, T, S)."""
    outputs, weights = [], []
    for h in range(H):
        query, key, value = (
            inputs @ params[name]["kernel"][:, h] + params[name]["bias"][h]
            for name, inputs in (("query", x_TD), ("key", memory_SD), ("value", memory_SD))
        )
        mixed, weight = equation_1(query, key, value)
        outputs.append(mixed)
        weights.append(weight)
    kernel = np.asarray(params["out"]["kernel"]).reshape(H * K, -1)
    return np.concatenate(outputs, axis=-1) @ kernel + params["out"]["bias"], np.stack(weights)


def test_many_heads_project_attend_apart_and_are_joined(heads):
    module, params, x, memory = heads
    output = module.apply({"params": params}, x, memory)
    assert output.shape == x.shape
    for b in range(B):
        np.testing.assert_allclose(output[b], by_hand(params, x[b], memory[b])[0], atol=1e-4)


def test_weights_come_out_on_request_and_only_then(heads):
    module, params, x, memory = heads
    plain = module.apply({"params": params}, x, memory)
    output, extra = module.apply({"params": params}, x, memory, mutable=["intermediates"])
    assert isinstance(plain, jax.Array)
    np.testing.assert_array_equal(output, plain)
    (weights,) = extra["intermediates"]["attention_weights"]
    assert weights.shape == (B, H, T, S)
    for b in range(B):
        np.testing.assert_allclose(weights[b], by_hand(params, x[b], memory[b])[1], atol=1e-5)


def test_the_head_size_is_the_width_over_the_heads_if_none_is_given():
    module = MultiHeadAttention(ModelConfig(d_model=15, num_heads=3))
    x = draw(0, B, T, 15)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, x)["params"]
    assert shapes["query"]["kernel"].shape == (15, 3, 5)
    assert shapes["out"]["kernel"].shape == (3, 5, 15)


def test_attention_dropout_zeroes_weights_by_row_and_leaves_those_that_are_asked_for(heads):
    _, params, x, memory = heads
    module = MultiHeadAttention(ModelConfig(d_model=13, num_heads=H, d_head=K, attention_dropout=0.5))
    apply = lambda **mode: module.apply(  # noqa: E731
        {"params": params}, x, memory, rngs={"dropout": jax.random.key(1)}, mutable=["intermediates"], **mode
    )
    still, asked = apply(deterministic=True)
    dropped, asked_again = apply(deterministic=False)
    swapped, _ = apply(deterministic=False, row_B=jnp.array([1, 0]))
    assert np.abs(still - dropped).max() > 0.01 and np.abs(swapped - dropped).max() > 0.01
    jax.tree.map(np.testing.assert_array_equal, asked, asked_again)


@pytest.mark.parametrize("index", [0, 2, 6])
def test_writing_to_the_cache_changes_one_position_and_not_the_old_cache(index):
    cache = KVCache(draw(0, B, S, H, K), draw(1, B, S, H, K))
    new = KVCache(draw(2, B, 1, H, K), draw(3, B, 1, H, K))
    written = cache.write(new, jnp.int32(index))
    for part in ("key", "value"):
        expected = getattr(cache, part).copy()
        assert (expected[:, index] != getattr(new, part)[:, 0]).any()
        expected[:, index] = getattr(new, part)[:, 0]
        np.testing.assert_array_equal(getattr(written, part), expected)


def test_an_empty_cache_is_zeros_and_keeps_its_type_when_written_to():
    cache = KVCache.empty((B, S, H, K), jnp.bfloat16)
    assert cache.key.shape == cache.value.shape == (B, S, H, K)
    assert not cache.key.any() and not cache.value.any()
    written = cache.write(KVCache(draw(0, B, 1, H, K), draw(1, B, 1, H, K)), jnp.int32(3))
    assert written.key.dtype == written.value.dtype == jnp.bfloat16


def test_attending_with_keys_and_values_from_the_cache_is_attending_to_the_memory(heads):
    module, params, x, memory = heads
    projected = module.apply({"params": params}, memory, method="keys_values")
    assert projected.key.shape == projected.value.shape == (B, S, H, K)
    attended = module.apply({"params": params}, x, projected, method="attend")
    np.testing.assert_allclose(attended, module.apply({"params": params}, x, memory), atol=1e-6)
