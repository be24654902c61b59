"""Position schemes against the formulas of their papers, alone and in self-attention."""

import dataclasses
import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, ModelConfig, check_model
from flaxformer_lite.model import positions
from flaxformer_lite.model.attention import MultiHeadAttention
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import LearnedPositions, PositionBias, PositionVectors

pytestmark = pytest.mark.usefixtures("also_optimized")

SCHEMES = CHOICES["model.position"]
D, H, K, INITIAL, LENGTH = 10, 3, 14, 13, 41  # more than three times the length at initialisation
CONFIG = ModelConfig(
    d_model=D,
    num_heads=H,
    d_head=K,
    max_length=53,
    relative_clip=5,
    rope_base=500.0,
    backend="reference",
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# The definitions: i is the position of a query, j that of a key.


def encoding(position, d_model):
    """Returns PE of one position: "Attention Is All You Need", section 3.5."""
    row = np.empty(d_model)
    for i in range(d_model // 2):
        angle = position / 10000 ** (2 * i / d_model)
        row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
    return row


def rotation(position, size, base):
    """Returns the block-diagonal matrix R of Su 2021, equations 14 and 15."""
    matrix = np.zeros((size, size))
    for i in range(size // 2):
        angle = position * base ** (-2 * i / size)
        pair = slice(2 * i, 2 * i + 2)
        matrix[pair, pair] = [
            [math.cos(angle), -math.sin(angle)],
            [math.sin(angle), math.cos(angle)],
        ]
    return matrix


def clipped(i, j, k):
    """Returns the row of clip(j - i, k) in a table w[-k], ..., w[k]: Shaw 2018, section 3.2."""
    return max(-k, min(k, j - i)) + k


def bucket(i, j, bidirectional):
    """Returns the T5 bucket, 0 to 31, in integer arithmetic: Raffel 2020, section 2.1.

    In the first half each distance has a bucket. In the second half the k-th of `wide` buckets
    starts at distance exact * (128 / exact)^(k / wide).
    """
    buckets, first, distance = 32, 0, max(0, int(i - j))
    if bidirectional:
        buckets, first, distance = 16, 16 if j > i else 0, abs(int(i - j))
    exact = wide = buckets // 2
    if distance < exact:
        return first + distance
    starts_before = lambda k: exact**wide * 128**k <= distance**wide * exact**k  # noqa: E731
    return first + exact + max(k for k in range(wide) if starts_before(k))


def slopes(num_heads):
    """Returns the geometric sequence of Press 2022, section 3; parts of 2 if not a power of 2."""
    if num_heads.bit_count() == 1:
        return [2 ** (-8 * (n + 1) / num_heads) for n in range(num_heads)]
    lower = 1 << (num_heads.bit_length() - 1)
    return slopes(lower) + slopes(2 * lower)[0::2][: num_heads - lower]


@dataclasses.dataclass(frozen=True)
class Definition:
    """The effect of a scheme on self-attention; a field that is left out has no effect."""

    added: Callable = lambda params, i: 0.0  # to the vector at position i
    # the matrix that multiplies a query or key at position i
    rotation: Callable = lambda i: np.eye(K)
    bias: Callable = lambda params, head, i, j, bidirectional: 0.0  # to the score
    key: Callable = lambda params, i, j: 0.0  # to the key
    value: Callable = lambda params, i, j: 0.0  # to the value


def shaw(name):
    """Returns the vectors w of Shaw 2018, equations 3 and 4; zeros if the table is missing."""
    clip = CONFIG.relative_clip
    tables = lambda params: params["attention"]["relative"]  # noqa: E731
    zeros = np.zeros((2 * clip + 1, K))
    return lambda params, i, j: tables(params).get(name, zeros)[clipped(i, j, clip)]


def t5_entry(params, head, i, j, bidirectional):
    return params["bias"]["embedding"][bucket(i, j, bidirectional), head]


def alibi_penalty(params, head, i, j, bidirectional):
    return -slopes(H)[head] * abs(i - j)


DEFINITIONS = {
    "sinusoidal": Definition(added=lambda params, i: encoding(i, D)),
    "learned": Definition(added=lambda params, i: params["vectors"]["learned"]["embedding"][i]),
    "rotary": Definition(rotation=lambda i: rotation(i, K, CONFIG.rope_base)),
    "relative": Definition(key=shaw("key"), value=shaw("value")),
    "t5_bias": Definition(bias=t5_entry),
    "alibi": Definition(bias=alibi_penalty),
    "none": Definition(),
}


def by_definition(position, params, x_LD, *, bidirectional):
    """Returns self-attention of one row in float64, one query and key at a time: (L, D)."""
    assert position in DEFINITIONS, f"DEFINITIONS: expected a definition of {position!r}; add it"
    scheme, heads = DEFINITIONS[position], params["attention"]
    x_LD = np.stack([x_D + scheme.added(params, i) for i, x_D in enumerate(x_LD)])
    project = lambda name, h: x_LD @ heads[name]["kernel"][:, h] + heads[name]["bias"][h]  # noqa: E731
    output_LD = np.zeros(x_LD.shape) + heads["out"]["bias"]
    for h in range(H):
        query, key, value = (project(name, h) for name in ("query", "key", "value"))
        query, key = (
            [scheme.rotation(i) @ vector for i, vector in enumerate(part)] for part in (query, key)
        )
        for i in range(len(x_LD)):
            keys = range(len(x_LD) if bidirectional else i + 1)
            scores = [query[i] @ (key[j] + scheme.key(params, i, j)) / math.sqrt(K) for j in keys]
            scores = [
                score + scheme.bias(params, h, i, j, bidirectional)
                for j, score in enumerate(scores)
            ]
            weights = np.exp(scores) / np.exp(scores).sum()
            mixed_K = sum(
                weight * (value[j] + scheme.value(params, i, j)) for j, weight in enumerate(weights)
            )
            output_LD[i] += mixed_K @ heads["out"]["kernel"][h]
    return output_LD


class SelfAttention(nn.Module):
    """Self-attention with all parts of the model in which a scheme may act."""

    config: ModelConfig
    bidirectional: bool

    def setup(self):
        self.vectors = PositionVectors(self.config)
        self.bias = PositionBias(self.config, bidirectional=self.bidirectional)
        self.attention = MultiHeadAttention(self.config, is_self_attention=True)

    def __call__(self, x_BLD, position_L):
        tokens = TokenPositions.at(position_L)
        vectors_1LD = self.vectors(tokens.position_BL)
        x_BLD = x_BLD if vectors_1LD is None else x_BLD + jnp.broadcast_to(vectors_1LD, x_BLD.shape)
        mask = AttentionMask(tokens, tokens, causal=not self.bidirectional)
        return self.attention(x_BLD, x_BLD, mask, self.bias())


@functools.cache
def initialised(config, bidirectional=True):
    """Returns random parameters of `SelfAttention` for a short length, and its jitted forward."""
    check_model(config)
    module = SelfAttention(config, bidirectional)
    short = jnp.zeros((1, INITIAL, D)), jnp.arange(INITIAL)
    leaves, tree = jax.tree.flatten(
        jax.eval_shape(module.init, jax.random.key(0), *short)["params"]
    )
    params = jax.tree.unflatten(tree, [normal(n, *leaf.shape) / 3 for n, leaf in enumerate(leaves)])
    variables = {"params": jax.tree.map(jnp.asarray, params)}
    return params, jax.jit(functools.partial(module.apply, variables))


def of_scheme(position, **more):
    return dataclasses.replace(CONFIG, position=position, **more)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
@pytest.mark.parametrize("position", SCHEMES)
def test_self_attention_is_its_definition_at_three_times_the_length_of_initialisation(
    position, bidirectional
):
    params, attend = initialised(of_scheme(position), bidirectional)
    x_LD = normal(99, LENGTH, D) / 2
    expected = by_definition(position, params, x_LD, bidirectional=bidirectional)
    np.testing.assert_allclose(attend(x_LD[None], jnp.arange(LENGTH))[0], expected, atol=1e-5)


def test_relative_vectors_are_added_to_values_if_configured():
    params, attend = initialised(of_scheme("relative", relative_values=True))
    vectors, x_LD = params["attention"]["relative"], normal(99, LENGTH, D) / 2
    expected = by_definition("relative", params, x_LD, bidirectional=True)
    keys_alone = {"attention": {**params["attention"], "relative": {"key": vectors["key"]}}}
    without_values = by_definition("relative", keys_alone, x_LD, bidirectional=True)
    assert np.abs(expected - without_values).max() > 0.1
    np.testing.assert_allclose(attend(x_LD[None], jnp.arange(LENGTH))[0], expected, atol=1e-5)


@pytest.mark.parametrize("position", SCHEMES)
def test_cross_attention_is_the_same_computation_with_every_scheme(position):
    x_1LD, tokens = jnp.zeros((1, LENGTH, D)), TokenPositions.at(jnp.arange(LENGTH))

    def computation(position, is_self_attention=False):
        module = MultiHeadAttention(of_scheme(position), is_self_attention=is_self_attention)
        call = lambda *inputs: module.init_with_output(jax.random.key(0), *inputs)  # noqa: E731
        return str(jax.make_jaxpr(call)(x_1LD, x_1LD, AttentionMask(tokens, tokens)))

    assert computation("relative", True) != computation("none", True)
    assert computation(position) == computation("none")


# Properties of self-attention with a scheme.


@pytest.mark.parametrize("position", SCHEMES)
def test_self_attention_depends_on_the_order_of_tokens_with_every_scheme_but_none(position):
    _, attend = initialised(of_scheme(position))
    x_1LD, order = normal(98, 1, LENGTH, D), np.random.default_rng(0).permutation(LENGTH)
    here, there = attend(x_1LD, jnp.arange(LENGTH)), attend(x_1LD[:, order], jnp.arange(LENGTH))
    error = np.abs(here[:, order] - there).max()
    assert error < 1e-5 if position == "none" else error > 0.01


@pytest.mark.parametrize("position", SCHEMES)
def test_a_shift_of_all_positions_has_no_effect_unless_the_scheme_adds_vectors(position):
    _, attend = initialised(of_scheme(position))
    x_1LD, position_L = normal(97, 1, LENGTH, D), jnp.arange(LENGTH)
    error = np.abs(attend(x_1LD, position_L) - attend(x_1LD, position_L + 11)).max()
    vectors = jax.eval_shape(
        PositionVectors(of_scheme(position)).init_with_output, jax.random.key(0), position_L[None]
    )
    assert error < 2e-5 if vectors[0] is None else error > 0.01


@pytest.mark.parametrize("position", SCHEMES)
def test_the_bias_of_a_block_of_queries_and_keys_is_that_block_of_the_whole_bias(position):
    module = SelfAttention(of_scheme(position), bidirectional=False)
    query, position_1L = normal(0, 2, 7, H, K), np.arange(7)[None]

    def whole_and_block(module):
        bias = module.attention.relative.score_bias() if position == "relative" else module.bias()
        if bias is None:
            return None
        return bias(query, position_1L, position_1L), bias(
            query[:, 2:5], position_1L[:, 2:5], position_1L[:, 1:6]
        )

    variables = {"params": jax.tree.map(jnp.asarray, initialised(module.config)[0])}
    biases = jax.jit(nn.apply(whole_and_block, module))(variables)
    if biases is None:
        assert DEFINITIONS[position].bias is Definition.bias
    else:
        assert biases[0].dtype == jnp.float32 and biases[0].shape[1:] == (H, 7, 7)
        np.testing.assert_allclose(biases[1], biases[0][:, :, 2:5, 1:6], atol=1e-6)


# Sinusoidal.


@pytest.mark.parametrize(("length", "d_model"), [(1, 2), (7, 6), (31, 22), (127, 46)])
def test_sinusoidal_positions_are_the_formula_of_the_paper(length, d_model):
    encoded = positions.sinusoidal(jnp.arange(length), d_model)
    assert encoded.shape == (length, d_model) and encoded.dtype == jnp.float32
    np.testing.assert_allclose(encoded, [encoding(p, d_model) for p in range(length)], atol=1e-5)


def test_sinusoidal_positions_have_no_maximum():
    far = [0, 9973, 104_729]
    encoded = positions.sinusoidal(jnp.array(far), 14)
    # float32 holds an angle near 1e5 to about 0.008
    np.testing.assert_allclose(encoded, [encoding(p, 14) for p in far], atol=0.02)


@pytest.mark.parametrize("offset", [1, 5, 13])
def test_a_shift_of_sinusoidal_positions_is_one_rotation_for_all_positions(offset):
    d_model, here_L = 10, jnp.array([0, 3, 17, 29])
    here = np.asarray(positions.sinusoidal(here_L, d_model))
    there = np.asarray(positions.sinusoidal(here_L + offset, d_model))
    assert np.abs(here - there).max() > 0.1
    # The sine is first here and second in `rotation`, so the rotation is in the other direction.
    np.testing.assert_allclose(there, here @ rotation(offset, d_model, 10000), atol=1e-5)


def test_the_product_of_two_sinusoidal_positions_depends_only_on_their_distance():
    d_model, length = 22, 31
    encoded = np.asarray(positions.sinusoidal(jnp.arange(length), d_model))
    products = encoded @ encoded.T
    np.testing.assert_array_equal(products, products.T)
    frequencies = 10000.0 ** (-2 * np.arange(d_model // 2) / d_model)
    # cos a cos b + sin a sin b
    of_distance = np.cos(np.multiply.outer(np.arange(length), frequencies)).sum(axis=-1)
    assert np.abs(np.diff(of_distance)).min() > 1e-3
    distance = np.abs(np.arange(length)[:, None] - np.arange(length))
    np.testing.assert_allclose(products, of_distance[distance], atol=1e-4)


def test_sinusoidal_positions_of_an_odd_width_are_an_error():
    with pytest.raises(ValueError, match=r"need an even d_model, got 7"):
        positions.sinusoidal(jnp.arange(3), 7)


# Learned.


def test_learned_positions_are_rows_of_a_table_with_a_row_for_each_position():
    table, rows = LearnedPositions(11, 7), normal(0, 11, 7)
    position_BL = np.array([[4, 5, 10, 0], [0, 1, 0, 1]])
    shapes = jax.eval_shape(table.init, jax.random.key(0), position_BL)
    assert jax.tree.map(jnp.shape, shapes) == {"params": {"embedding": rows.shape}}
    looked_up = table.apply({"params": {"embedding": jnp.asarray(rows)}}, position_BL)
    np.testing.assert_array_equal(looked_up, rows[position_BL])


def test_initial_learned_positions_have_the_variance_of_the_embeddings():
    table = LearnedPositions(max_length=997, d_model=31)
    variables = table.init(jax.random.key(1), np.arange(2)[None])
    entries = np.asarray(variables["params"]["embedding"]) * 31**0.5
    assert abs(entries.std() - 1) < 4 / math.sqrt(2 * entries.size)
    assert abs(entries.mean()) < 4 / math.sqrt(entries.size)


def test_more_positions_than_the_table_has_are_an_error_with_its_length():
    table = LearnedPositions(max_length=5, d_model=7)
    with pytest.raises(ValueError, match=r"end at max_length = 5, got 6 positions"):
        table.apply({"params": {"embedding": normal(0, 5, 7)}}, np.arange(6)[None])


# Rotary.

rotary = jax.jit(positions.rotary, static_argnames="base")


@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotary_positions_multiply_every_head_by_the_matrix_of_the_paper(base):
    x_BLHK, position_BL = normal(0, 2, 5, 3, K), np.array([[0, 1, 2, 3, 4], [0, 1, 0, 7, 31]])
    rotated = rotary(x_BLHK, position_BL, base=base)
    assert rotated.dtype == jnp.float32
    expected = [
        [x_HK @ rotation(p, K, base).T for p, x_HK in zip(*row, strict=True)]
        for row in zip(position_BL, x_BLHK, strict=True)
    ]
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


@pytest.mark.parametrize("shift", [1, 7, 101])
def test_the_product_of_a_rotated_query_and_key_depends_only_on_their_offset(shift):
    query, key, position_1L = normal(0, 1, 7, 1, K), normal(1, 1, 7, 1, K), np.arange(7)[None]
    rotate = lambda x, by: rotary(x, position_1L + by, base=10000.0)[0, :, 0]  # noqa: E731
    here, there = (rotate(query, by) @ rotate(key, by).T for by in (0, shift))
    assert np.abs(here - rotate(query, 0) @ rotate(key, shift).T).max() > 0.1
    np.testing.assert_allclose(here, there, atol=1e-4)


def test_rotary_positions_are_computed_in_float32_and_keep_the_dtype():
    x, position_1L = (
        jnp.asarray(normal(0, 1, 5, 3, K), jnp.bfloat16),
        np.array([[0, 1, 101, 103, 107]]),
    )
    rotated = rotary(x, position_1L, base=10000.0)
    assert rotated.dtype == jnp.bfloat16
    exact = rotary(x.astype(jnp.float32), position_1L, base=10000.0)
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


# T5.


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_are_those_of_exact_arithmetic_at_every_offset(bidirectional):
    offset = np.arange(-307, 308)
    found = positions.t5_bucket(jnp.asarray(offset), bidirectional=bidirectional)
    np.testing.assert_array_equal(found, [bucket(0, j, bidirectional) for j in offset])
    # bucket 16 would be distance 0 after the query
    assert set(found.tolist()) == set(range(32)) - ({16} if bidirectional else set())


@pytest.mark.parametrize(
    ("bidirectional", "buckets"),
    [
        (True, {7: 7, 8: 8, 16: 10, 32: 12, 64: 14, 128: 15}),
        (False, {15: 15, 16: 16, 32: 21, 64: 26, 128: 31}),
    ],
    ids=["bidirectional", "one-sided"],
)
def test_each_doubling_of_a_distance_advances_by_the_same_number_of_wide_buckets(
    bidirectional, buckets
):
    # 8 wide buckets for 4 doublings from 8 to 128, or 16 for 3 from 16 to 128; the last bucket is
    # unbounded.
    before = positions.t5_bucket(-jnp.array(list(buckets)), bidirectional=bidirectional)
    assert before.tolist() == list(buckets.values())
    after = positions.t5_bucket(jnp.array(list(buckets)), bidirectional=bidirectional)
    assert after.tolist() == [16 + number if bidirectional else 0 for number in buckets.values()]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias_is_the_entry_of_its_bucket_for_each_head(bidirectional):
    table = normal(0, 32, H)
    query_BT, key_BS = np.array([[0, 1, 40], [5, 0, 1]]), np.array([[0, 7, 39, 301, 2]] * 2)
    bias = positions.t5_bias(jnp.asarray(table), query_BT, key_BS, bidirectional=bidirectional)
    bias = np.asarray(bias)
    assert bias.shape == (2, H, 3, 5)
    for b, h, t, s in np.ndindex(bias.shape):
        assert bias[b, h, t, s] == table[bucket(query_BT[b, t], key_BS[b, s], bidirectional), h]


# ALiBi.


@pytest.mark.parametrize(
    ("num_heads", "published"),
    [
        (8, [1 / 2**n for n in range(1, 9)]),
        (16, [1 / 2 ** (n / 2) for n in range(1, 17)]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (12, [1 / 2**n for n in range(1, 9)] + [1 / 2 ** (n / 2) for n in (1, 3, 5, 7)]),
        (1, [1 / 256]),
    ],
)
def test_alibi_slopes_are_those_of_the_paper(num_heads, published):
    np.testing.assert_allclose(positions.alibi_slopes(num_heads), published, rtol=1e-6)
    np.testing.assert_allclose(slopes(num_heads), published, rtol=1e-12)


def test_alibi_subtracts_the_distance_times_the_slope_on_both_sides():
    bias = np.asarray(positions.alibi(jnp.arange(5)[None], jnp.arange(7)[None], num_heads=6))
    assert bias.shape == (1, 6, 5, 7)
    for h, i, j in np.ndindex(6, 5, 7):
        np.testing.assert_allclose(bias[0, h, i, j], -slopes(6)[h] * abs(i - j), rtol=1e-6)
    np.testing.assert_array_equal(bias[..., :5], bias[..., :5].swapaxes(2, 3))


# Relative.


@pytest.mark.parametrize("clip", [1, 3])
def test_an_offset_beyond_the_clip_counts_as_the_clip(clip):
    query_BT = np.array([[0, 9, 3], [2, 0, 1]])
    key_BS = np.array([[0, 1, 2, 8, 11], [4, 3, 2, 1, 0]])
    one_hot = np.asarray(positions.clipped_offset(query_BT, key_BS, clip))
    assert one_hot.shape == (2, 3, 5, 2 * clip + 1)
    np.testing.assert_array_equal(one_hot.sum(axis=-1), np.ones((2, 3, 5)))
    for b, t, s in np.ndindex(2, 3, 5):
        assert one_hot[b, t, s].argmax() == clipped(query_BT[b, t], key_BS[b, s], clip)
