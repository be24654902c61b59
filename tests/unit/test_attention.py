"""Equation 1 and multi-head attention against numpy; masks, shared heads, cache and weights."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, ModelConfig
from flaxformer_lite.model.attention import (
    MultiHeadAttention,
    additive_scores,
    dot_product_attention,
    dot_product_scores,
    repeat_heads,
)
from flaxformer_lite.model.kv_cache import KVCache
from flaxformer_lite.model.masks import AttentionMask, TokenPositions

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, T, S, H, K = 2, 5, 7, 3, 11
CONFIG = ModelConfig(d_model=13, num_heads=H, d_head=K, backend="reference")
# S tokens, some of them padding
KEY_POSITIONS = TokenPositions.of(np.array([[7, 5, 6, 4, 3, 2, 0], [7, 5, 6, 2, 0, 0, 0]]))
MASK = AttentionMask(TokenPositions.at(np.arange(T)), KEY_POSITIONS)


def normal(seed, *shape):
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
    return normal(0, B, T, H, K), normal(1, B, S, H, K), normal(2, B, S, H, K)


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
            expected, expected_weights = equation_1(
                query, key, value, None if mask_BTS is None else mask_BTS[b]
            )
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


@pytest.mark.parametrize(
    "d_k", [2, 5, *(pytest.param(d_k, marks=pytest.mark.slow) for d_k in (1, 3, 31))]
)
def test_scores_are_divided_by_the_root_of_the_head_size(d_k):
    # One query of ones against the keys 0 and 1: scores 0 and d_k / sqrt(d_k), so the odds are
    # exp(sqrt(d_k)).
    query, key = jnp.ones((1, 1, 1, d_k)), jnp.stack([jnp.zeros(d_k), jnp.ones(d_k)])[None, :, None]
    _, weights = dot_product_attention(query, key, key)
    np.testing.assert_allclose(
        weights[0, 0, 0, 1] / weights[0, 0, 0, 0], np.exp(np.sqrt(d_k)), rtol=1e-5
    )


def test_large_scores_do_not_overflow(qkv):
    query, key, value = qkv
    mixed, weights = dot_product_attention(query * 1e3, key * 1e3, value)
    assert np.isfinite(mixed).all()
    np.testing.assert_allclose(weights.max(axis=-1), np.ones((B, H, T)), rtol=1e-6)


@pytest.mark.parametrize("d_k", [31, 127])
def test_scores_have_unit_variance_and_without_the_scaling_a_variance_of_the_head_size(d_k):
    query, key = normal(0, 1, 499, 1, d_k), normal(1, 1, 503, 1, d_k)
    # The squares of scores that share a query or a key are correlated, by about 2 / d_k.
    sigma = math.sqrt(2 / (499 * 503) + 2 / d_k * (1 / 499 + 1 / 503))
    assert abs(np.var(dot_product_scores(query, key)) - 1) < 4 * sigma
    undivided = query[0, :, 0] @ key[0, :, 0].T
    assert abs(np.var(undivided) / d_k - 1) < 4 * sigma


def test_in_bfloat16_the_weights_are_float32_and_the_output_is_bfloat16(qkv):
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in qkv)
    mixed, weights = dot_product_attention(query, key, value)
    assert mixed.dtype == jnp.bfloat16 and weights.dtype == jnp.float32
    assert (weights != weights.astype(jnp.bfloat16)).any()
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((B, H, T)), rtol=1e-6)


def test_additive_scores_are_a_network_with_one_hidden_layer():
    # Bahdanau 2015, appendix A.1.2: v . tanh(W s + U h), here with W s and U h as inputs.
    query, key, vector = normal(0, B, T, H, K), normal(1, B, S, H, K), normal(2, H, K)
    scores = np.asarray(additive_scores(query, key, vector))
    assert scores.shape == (B, H, T, S) and scores.dtype == np.float32
    for b, h, t, s in np.ndindex(scores.shape):
        expected = sum(
            vector[h].astype(np.float64) * np.tanh(query[b, t, h].astype(np.float64) + key[b, s, h])
        )
        np.testing.assert_allclose(scores[b, h, t, s], expected, atol=1e-5)


@functools.cache
def initialised(config, is_self_attention=False):
    """Random parameters, biases included; x and memory; and jitted attention with its weights."""
    module = MultiHeadAttention(config, is_self_attention=is_self_attention)
    x, memory = normal(4, B, T, config.d_model), normal(5, B, S, config.d_model)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, memory, MASK)["params"]
    leaves, tree = jax.tree.flatten(shapes)
    params = jax.tree.unflatten(
        tree, [normal(6 + i, *leaf.shape) / 3 for i, leaf in enumerate(leaves)]
    )

    @functools.partial(jax.jit, static_argnames="deterministic")
    def attend(params, x, memory, mask, **mode):
        output, extra = module.apply(
            {"params": params}, x, memory, mask, mutable=["intermediates"], **mode
        )
        return output, extra["intermediates"]["attention_weights"][0]

    return params, x, memory, attend


def by_hand(params, x_TD, memory_SD, mask_S):
    """Section 3.2.2 for one row, head by head: the output (T, D), and the weights (H, T, S)."""
    outputs, weights = [], []
    for h in range(params["query"]["kernel"].shape[1]):
        query, key, value = (
            inputs.astype(np.float64) @ params[name]["kernel"][:, h] + params[name]["bias"][h]
            for name, inputs in (("query", x_TD), ("key", memory_SD), ("value", memory_SD))
        )
        mixed, weight = equation_1(query, key, value, np.broadcast_to(mask_S, (T, S)))
        if "score_vector" in params:
            hidden = np.tanh(query[:, None] + key[None])
            weight = softmax(np.where(mask_S, hidden @ params["score_vector"][h], -np.inf))
            mixed = weight @ value
        outputs.append(mixed)
        weights.append(weight)
    kernel = np.asarray(params["out"]["kernel"]).reshape(-1, x_TD.shape[-1])
    return np.concatenate(outputs, axis=-1) @ kernel + params["out"]["bias"], np.stack(weights)


@pytest.mark.parametrize("attention", CHOICES["model.attention"])
def test_multi_head_attention_is_its_definition_and_returns_its_weights(attention):
    params, x, memory, attend = initialised(dataclasses.replace(CONFIG, attention=attention))
    output, weights = attend(params, x, memory, MASK)
    assert output.shape == x.shape and weights.shape == (B, H, T, S)
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((B, H, T)), rtol=1e-5)
    for b in range(B):
        expected, expected_weights = by_hand(
            params, x[b], memory[b], KEY_POSITIONS.segment_BL[b] != 0
        )
        np.testing.assert_allclose(output[b], expected, atol=1e-5)
        np.testing.assert_allclose(weights[b], expected_weights, atol=1e-6)


def test_weights_are_returned_only_on_request():
    params, x, memory, attend = initialised(CONFIG)
    plain = MultiHeadAttention(CONFIG).apply({"params": params}, x, memory, MASK)
    assert isinstance(plain, jax.Array)
    np.testing.assert_allclose(plain, attend(params, x, memory, MASK)[0], atol=1e-5)


def test_six_heads_of_a_width_of_300_return_a_vector_of_that_width_per_query():
    module = MultiHeadAttention(ModelConfig(d_model=300, num_heads=6))
    x, memory = np.zeros((64, 12, 300)), np.zeros((64, 10, 300))
    attend = functools.partial(module.init_with_output, mutable=["params", "intermediates"])
    mask = AttentionMask(TokenPositions.at(np.arange(12)), TokenPositions.at(np.arange(10)))
    output, variables = jax.eval_shape(attend, jax.random.key(0), x, memory, mask)
    assert output.shape == (64, 12, 300)
    assert variables["intermediates"]["attention_weights"][0].shape == (64, 6, 12, 10)


def test_the_head_size_is_the_width_over_the_heads_if_none_is_given():
    module = MultiHeadAttention(ModelConfig(d_model=15, num_heads=3))
    x = np.zeros((B, S, 15), np.float32)
    mask = AttentionMask(KEY_POSITIONS, KEY_POSITIONS)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, x, mask)["params"]
    assert shapes["query"]["kernel"].shape == (15, 3, 5)
    assert shapes["out"]["kernel"].shape == (3, 5, 15)


def test_a_head_of_keys_serves_neighbouring_heads_of_queries():
    key_BSGK = normal(0, B, S, 2, K)
    repeated = repeat_heads(jnp.asarray(key_BSGK), np.zeros((B, T, 6, K)))
    for h in range(6):
        np.testing.assert_array_equal(repeated[:, :, h], key_BSGK[:, :, h // 3])


@pytest.mark.parametrize("attention", CHOICES["model.attention"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_query_attention_is_multi_head_attention_with_repeated_keys_and_values(
    num_kv_heads, attention
):
    many = dataclasses.replace(CONFIG, num_heads=6, attention=attention)
    shared = dataclasses.replace(many, num_kv_heads=num_kv_heads)
    params, x, memory, attend = initialised(shared)
    repeated = dict(params)
    for name in ("key", "value"):
        repeat = lambda part: np.repeat(part, 6 // num_kv_heads, axis=-2)  # noqa: E731
        # the axis of heads is the last but one in both
        repeated[name] = jax.tree.map(repeat, params[name])
    *_, attend_many = initialised(many)
    assert repeated["key"]["kernel"].shape == initialised(many)[0]["key"]["kernel"].shape
    for one, other in zip(
        attend(params, x, memory, MASK), attend_many(repeated, x, memory, MASK), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("attention", CHOICES["model.attention"])
def test_attention_dropout_depends_on_the_row_and_does_not_change_the_returned_weights(attention):
    dropping = dataclasses.replace(CONFIG, attention=attention, attention_dropout=0.5)
    params, x, memory, attend = initialised(dropping)
    mode = {"rngs": {"dropout": jax.random.key(1)}}
    still, weights = attend(params, x, memory, MASK, deterministic=True, **mode)
    dropped, weights_again = attend(
        params, x, memory, MASK, deterministic=False, row_B=jnp.array([0, 1]), **mode
    )
    swapped, _ = attend(
        params, x, memory, MASK, deterministic=False, row_B=jnp.array([1, 0]), **mode
    )
    assert np.abs(still - dropped).max() > 0.01 and np.abs(swapped - dropped).max() > 0.01
    np.testing.assert_allclose(weights, weights_again, atol=1e-6)
    np.testing.assert_allclose(weights.sum(axis=-1), np.ones((B, H, T)), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "picture"),
    [
        (dict(window=1), "1100000 1110000 0111000 0011100 0001110 0000110"),
        (dict(window=2, causal=True), "1000000 1100000 1110000 0111000 0011100 0001110"),
    ],
)
def test_outputs_depend_on_the_tokens_within_the_window_and_on_no_other(options, picture):
    params, *_, attend = initialised(CONFIG, is_self_attention=True)
    positions = TokenPositions.of(np.array([[7, 5, 6, 4, 3, 2, 0]]))
    x_SD, mixture_D = normal(1, S, CONFIG.d_model), normal(2, CONFIG.d_model)

    mask = AttentionMask(positions, positions, **options)

    def outputs(x_SD):
        output, _ = attend(params, x_SD[None], x_SD[None], mask)
        return output[0, :6] @ mixture_D

    reached = np.abs(jax.jacrev(outputs)(x_SD)).max(axis=-1) > 0
    np.testing.assert_array_equal(
        reached, [[cell == "1" for cell in line] for line in picture.split()]
    )


@pytest.mark.parametrize("attention", CHOICES["model.attention"])
def test_a_query_that_may_attend_to_nothing_has_finite_outputs_and_gradients(attention):
    params, x, memory, attend = initialised(dataclasses.replace(CONFIG, attention=attention))
    empty = TokenPositions.of(np.zeros((B, S), int))
    mask = AttentionMask(MASK.query, empty)
    assert not mask.array().any()
    total = lambda *inputs: sum((part**2).sum() for part in attend(*inputs, mask))  # noqa: E731
    value, gradients = jax.value_and_grad(total, argnums=(0, 1, 2))(params, x, memory)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("index", [0, 2, 6])
def test_writing_to_the_cache_changes_one_position_and_not_the_old_cache(index):
    old = normal(0, B, S, H, K), normal(1, B, S, H, K)
    new = normal(2, B, 1, H, K), normal(3, B, 1, H, K)
    written = KVCache.of(*old).write(KVCache.of(*new), jnp.int32(index))
    for before, added, after in zip(old, new, written.projected(), strict=True):
        expected = before.copy()
        assert (expected[:, index] != added[:, 0]).any()
        expected[:, index] = added[:, 0]
        np.testing.assert_array_equal(after, expected)


def test_an_empty_cache_is_zeros_and_keeps_its_dtype_when_it_is_written_or_extended():
    cache = KVCache.empty((B, S, H, K), jnp.bfloat16)
    assert cache.entries == S
    assert (cache.key_BGKS.shape, cache.value_BGSK.shape) == ((B, H, K, S), (B, H, S, K))
    assert not cache.key_BGKS.any() and not cache.value_BGSK.any()
    written = cache.write(KVCache.of(normal(0, B, 1, H, K), normal(1, B, 1, H, K)), jnp.int32(3))
    for changed in (written, written.extended(S + 2)):
        assert changed.key_BGKS.dtype == changed.value_BGSK.dtype == jnp.bfloat16


@pytest.mark.parametrize("entries", [S, S + 3])
def test_an_extended_cache_has_zeros_after_its_entries(entries):
    parts = normal(0, B, S, H, K), normal(1, B, S, H, K)
    extended = KVCache.of(*parts).extended(entries)
    assert extended.entries == entries
    for before, after in zip(parts, extended.projected(), strict=True):
        np.testing.assert_array_equal(after[:, :S], before)
        assert after.shape == (B, entries, H, K) and not after[:, S:].any()


def test_attention_to_cached_keys_and_values_is_attention_to_the_memory():
    config = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=2)
    params, x, memory, attend = initialised(config)
    module = MultiHeadAttention(config)
    projected = module.apply({"params": params}, memory, MASK.key, method="keys_values")
    assert (projected.key_BGKS.shape, projected.value_BGSK.shape) == ((B, 2, K, S), (B, 2, S, K))
    attended = module.apply({"params": params}, x, projected, MASK, method="attend")
    np.testing.assert_allclose(attended, attend(params, x, memory, MASK)[0], atol=1e-5)
