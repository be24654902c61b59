"""Every backend against the reference; unsupported arguments, the choice of 'auto', memory."""

import dataclasses
import functools
import re
from collections.abc import Iterator

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.model import backends, devices
from flaxformer_lite.model.attention import dot_product_scores, repeat_heads, softmax, weighted_sum
from flaxformer_lite.model.blockwise import BLOCK
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import T5_BUCKETS, clipped_offset, offsets, t5_bucket
from flaxformer_lite.training import meshes, parallel, step

pytestmark = pytest.mark.usefixtures("quickly_compiled_if_plain")
ALSO_OPTIMIZED = pytest.mark.usefixtures("also_optimized")

B, T, S, H, K = 2, 13, 17, 6, 7  # H is not prime, so that groups of heads can share keys
CLIP = 3
GROUPS = {"multi-head": H, "grouped": 2, "multi-query": 1}  # heads of keys
# the segment of each token, 0 = padding
WHOLE = np.array([[1] * 13, [1] * 13], np.int32)
PADDED = np.array([[1] * 13, [1] * 6 + [0] * 7], np.int32)
PACKED = np.array([[1] * 8 + [2] * 3 + [0] * 2, [1] * 5 + [2] * 7 + [0]], np.int32)
MASKS = {  # causal, window, segments
    "none": (False, None, WHOLE),
    "padding": (False, None, PADDED),
    "packed": (False, None, PACKED),
    "causal": (True, None, WHOLE),
    "causal and padding": (True, None, PADDED),
    "causal and packed": (True, None, PACKED),
    "window": (False, 2, PADDED),
    "causal window": (True, 3, PACKED),
}
QUICK_MASKS = ("padding", "causal and packed", "causal window")  # in the plain suite
BIASES = ("none", "by distance", "by distance and query")


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv(num_kv_heads=H, query_length=T, key_length=T):
    keys = (B, key_length, num_kv_heads, K)
    return normal(0, B, query_length, H, K), normal(1, *keys), normal(2, *keys)


def within(segment_BL, *, causal=False, window=None):
    """Returns the mask of self-attention."""
    positions = TokenPositions.of(segment_BL, segment_BL)
    return AttentionMask(positions, positions, causal=causal, window=window)


def across(ids):
    """Returns the mask of cross-attention; `ids`: of the queries and of the keys."""
    return AttentionMask(*map(TokenPositions.of, ids))


def learned_bias(table_RH, vector_RK):
    """Returns the sum of T5's and Shaw's biases; either is 0 if its parameters are 0."""
    table_RH = jnp.asarray(table_RH)

    def bias(query_BTHK, query_at, key_at):
        by_distance = jnp.moveaxis(
            table_RH[t5_bucket(offsets(query_at, key_at), bidirectional=True)], -1, 1
        )
        offset_BTSR = jnp.repeat(clipped_offset(query_at, key_at, CLIP), B // len(query_at), axis=0)
        return by_distance + jnp.einsum("BTHK,RK,BTSR->BHTS", query_BTHK, vector_RK, offset_BTSR)

    return bias


def parameters(kind):
    table_RH, vector_RK = normal(3, T5_BUCKETS, H), normal(4, 2 * CLIP + 1, K)
    return table_RH * (kind == "by distance"), vector_RK * (kind == "by distance and query")


def reference(query, key, value, mask, bias=None):
    """Equation 1 by `attention.py`, which `test_attention.py` compares with numpy."""
    scores = dot_product_scores(query, repeat_heads(key, query))
    if bias is not None:
        scores += jnp.broadcast_to(
            bias(query, mask.query.position_BL, mask.key.position_BL), scores.shape
        )
    return weighted_sum(softmax(scores, mask.array()), repeat_heads(value, query))


COMPUTE = {
    "reference": reference,
    # small blocks, so that there are several and the last one is padded
    "blockwise": functools.partial(backends.blockwise, block=5),
    "xla": backends.xla,
    "flash": functools.partial(backends.flash, interpret=True),
}


@functools.cache
def compiled(backend, make_mask, biased):
    """Returns a jitted function to outputs and gradients, compiled once for all segments."""

    @jax.jit
    def run(inputs, parameters, segments, weight):
        def loss(inputs, parameters):
            bias = [learned_bias(*parameters)] if biased else []
            mixed = COMPUTE[backend](*inputs, make_mask(segments), *bias)
            return jnp.sum(mixed * weight, dtype=jnp.float32), mixed

        gradients, mixed = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, parameters)
        return mixed, gradients

    return run


def results(backend, inputs, make_mask, segments, kind=None):
    """Returns the outputs of queries that may attend to a key, and gradients of a sum of them.

    `kind`: of the bias; None: no bias.
    """
    mask = np.asarray(make_mask(segments).array())
    attends_BT = np.broadcast_to(mask.any(axis=(1, 3)), inputs[0].shape[:2])
    weight = normal(5, *inputs[0].shape) * attends_BT[:, :, None, None]
    run = compiled(backend, make_mask, kind is not None)
    mixed, gradients = run(inputs, parameters(kind), segments, weight)
    return [np.asarray(mixed)[attends_BT], *jax.tree.leaves(gradients)]


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


@functools.cache
def self_attention(causal, window):
    return functools.partial(within, causal=causal, window=window)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize(
    "groups",
    [
        "grouped",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("multi-head", "multi-query")),
        pytest.param("grouped", marks=pytest.mark.slow, id="grouped-optimized"),
    ],
)
@pytest.mark.parametrize(
    "mask",
    [pytest.param(name, marks=() if name in QUICK_MASKS else pytest.mark.slow) for name in MASKS],
)
@pytest.mark.parametrize("backend", ["blockwise", "xla"])
def test_values_and_gradients_are_those_of_the_reference(backend, mask, groups, kind):
    causal, window, segments = MASKS[mask]
    arguments = qkv(GROUPS[groups]), self_attention(causal, window), segments, kind
    assert_same(results(backend, *arguments), results("reference", *arguments))


def test_every_mask_and_every_bias_of_these_tests_makes_a_difference():
    inputs, attend = qkv(), jax.jit(reference, static_argnames="bias")
    outputs = [
        attend(*inputs, within(segments, causal=c, window=w)) for c, w, segments in MASKS.values()
    ]
    biases = [learned_bias(*parameters(kind)) for kind in BIASES[1:]]
    outputs += [attend(*inputs, within(WHOLE), bias=bias) for bias in biases]
    for i, x in enumerate(outputs):
        for y in outputs[:i]:
            assert np.abs(x - y).max() > 0.1


@ALSO_OPTIMIZED
@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_attention_to_a_longer_padded_text_is_that_of_the_reference(backend):
    ids = PADDED, np.array([[1] * 11 + [0] * 6, [1] * 17], np.int32)
    arguments = qkv(GROUPS["grouped"], T, S), across, ids
    assert_same(results(backend, *arguments), results("reference", *arguments))


@pytest.mark.parametrize(
    ("mask", "groups"),
    [
        pytest.param("none", "multi-head", marks=pytest.mark.slow),
        pytest.param("packed", "multi-head", marks=pytest.mark.slow),
        pytest.param("causal", "grouped", marks=pytest.mark.slow),
        pytest.param("causal and padding", "grouped", marks=pytest.mark.slow),
        ("causal and packed", "grouped"),
        pytest.param("window", "multi-query", marks=pytest.mark.slow),
        ("causal window", "multi-query"),
        *(
            pytest.param(*case, marks=pytest.mark.slow, id=f"{'-'.join(case)}-optimized")
            for case in (("causal and packed", "grouped"), ("causal window", "multi-query"))
        ),
    ],
)
def test_the_kernel_for_tpus_gives_the_values_and_gradients_of_the_reference(mask, groups):
    causal, window, segments = MASKS[mask]
    segments = np.repeat(segments, 20, axis=1)[:, :257]  # 3 blocks of 128
    make_mask = self_attention(causal, window and 20 * window)
    arguments = qkv(GROUPS[groups], 257, 257), make_mask, segments
    assert_same(results("flash", *arguments), results("reference", *arguments))


@ALSO_OPTIMIZED
def test_the_arguments_of_the_cudnn_kernel_give_the_values_of_the_reference(monkeypatch):
    original, implementations = jax.nn.dot_product_attention, []

    def the_same_in_xla(*inputs, implementation, **options):
        implementations.append(implementation)
        # cuDNN's softmax over 0 keys is NaN
        assert (options["key_value_seq_lengths"] > 0).all()
        return original(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", the_same_in_xla)
    inputs = qkv(GROUPS["grouped"])
    positions = TokenPositions.of(PADDED)
    for mask in (
        AttentionMask(positions, positions),
        AttentionMask(positions, positions, causal=True),
        AttentionMask(ONE_TEXT, positions),
    ):
        attends_BT = np.asarray(mask.array()).any(axis=(1, 3))
        mixed, expected = backends.attend("cudnn", *inputs, mask), reference(*inputs, mask)
        np.testing.assert_allclose(mixed[attends_BT], expected[attends_BT], atol=1e-5)
    empty = TokenPositions.of(np.zeros((B, T), np.int32))
    backends.attend("cudnn", *inputs, AttentionMask(empty, empty, causal=True))
    assert set(implementations) == {"cudnn"}


@ALSO_OPTIMIZED
@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_a_query_that_may_attend_to_nothing_has_finite_outputs_and_gradients(backend):
    @jax.jit
    def run(inputs, ids):
        mixed, pull = jax.vjp(lambda *inputs: COMPUTE[backend](*inputs, across(ids)), *inputs)
        return mixed, *pull(jnp.ones_like(mixed))

    query_ids = np.ones((B, T), np.int32)
    # no key for 1 row, and for both rows
    for key_ids in (np.array([[1] * S, [0] * S]), np.zeros((B, S), int)):
        assert all(np.isfinite(x).all() for x in run(qkv(1, T, S), (query_ids, key_ids)))


@ALSO_OPTIMIZED
@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_in_bfloat16_scores_are_float32_and_the_output_is_bfloat16(backend):
    # The scores 256 and 257 are the same number in bfloat16; the values are 0 and 1.
    query = jnp.asarray([32, 2, 0, 0], jnp.bfloat16).reshape(1, 1, 1, 4)
    key = jnp.asarray([[16, 0, 0, 0], [16, 1, 0, 0]], jnp.bfloat16).reshape(1, 2, 1, 4)
    value = jnp.asarray([[0] * 4, [1] * 4], jnp.bfloat16).reshape(1, 2, 1, 4)
    assert jnp.bfloat16(256) == jnp.bfloat16(257)
    mask = across([jnp.array([[7]]), jnp.array([[7, 7]])])
    mixed, pull = jax.vjp(lambda value: COMPUTE[backend](query, key, value, mask), value)
    (gradient,) = pull(jnp.ones_like(mixed))
    assert mixed.dtype == gradient.dtype == jnp.bfloat16
    weight = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(mixed[0, 0, 0].astype(np.float32), [weight] * 4, rtol=2**-7)
    np.testing.assert_allclose(
        gradient[0, :, 0, 0].astype(np.float32), [1 - weight, weight], rtol=2**-7
    )


@ALSO_OPTIMIZED
def test_blocks_of_any_size_give_the_same_values():
    inputs, mask = qkv(), within(PACKED, causal=True)
    expected = reference(*inputs, mask)
    for block in (3, 13, BLOCK):
        attend = functools.partial(backends.blockwise, mask=mask, block=block)
        mixed = jax.jit(attend)(*inputs)
        np.testing.assert_allclose(mixed[PACKED > 0], expected[PACKED > 0], atol=1e-5)


@ALSO_OPTIMIZED
def test_blockwise_attention_of_rows_split_over_devices_needs_no_communication():
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def attend(inputs, segments):
        mixed, pull = jax.vjp(
            lambda *inputs: COMPUTE["blockwise"](*inputs, within(segments, causal=True)), *inputs
        )
        return mixed, *pull(jnp.ones_like(mixed))

    compiled = jax.jit(attend, in_shardings=rows, out_shardings=rows).lower(qkv(), PACKED).compile()
    for shared, alone in zip(compiled(qkv(), PACKED), jax.jit(attend)(qkv(), PACKED), strict=True):
        np.testing.assert_allclose(shared, alone, atol=1e-5)
    assert not re.search("all-reduce|all-gather|all-to-all|permute", compiled.as_text())


@functools.cache
def blockwise_values(make_mask):
    attend = lambda inputs, segments: COMPUTE["blockwise"](*inputs, make_mask(segments))  # noqa: E731
    return jax.jit(attend)


@ALSO_OPTIMIZED
@pytest.mark.parametrize(
    ("options", "masked", "rows"),
    [
        ({"causal": True}, slice(5, None), slice(0, 5)),  # blocks of 5: after the queries
        ({"window": 2}, slice(0, 5), slice(10, None)),  # beyond the window, before and after
        ({"window": 2}, slice(10, None), slice(0, 5)),
        ({"causal": True, "window": 2}, slice(0, 5), slice(10, None)),
    ],
)
@pytest.mark.parametrize("segments", [WHOLE, PACKED], ids=["one text", "packed"])
def test_blocks_that_are_masked_for_every_query_are_skipped(segments, options, masked, rows):
    query, key, value = qkv()
    expected = reference(query, key, value, within(segments, **options))[:, rows]
    key, value = (np.array(x) for x in (key, value))
    key[:, masked] = value[:, masked] = np.nan
    make_mask = self_attention(options.get("causal", False), options.get("window"))
    mixed = blockwise_values(make_mask)((query, key, value), segments)[:, rows]
    attends_BT = np.asarray(make_mask(segments).array()).any(axis=(1, 3))[:, rows]
    np.testing.assert_allclose(mixed[attends_BT], expected[attends_BT], atol=1e-5)


@ALSO_OPTIMIZED
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": 2}, {"causal": True, "window": 2}]
)
def test_blocks_are_skipped_by_position_if_queries_and_keys_have_other_positions(options):
    mask = AttentionMask(
        TokenPositions.at(jnp.arange(3, 8)), TokenPositions.at(jnp.arange(T)), **options
    )
    query, key, value = qkv()[0][:, :5], *qkv()[1:]
    attend = functools.partial(backends.blockwise, mask=mask, block=4)
    mixed = jax.jit(attend)(query, key, value)
    np.testing.assert_allclose(mixed, reference(query, key, value, mask), atol=1e-5)


@ALSO_OPTIMIZED
def test_in_bfloat16_gradients_over_many_blocks_are_as_exact_as_without_blocks():
    length = 256
    inputs, weight = tuple(normal(i, 1, length, 2, 8) for i in range(3)), normal(5, 1, length, 2, 8)
    mask = within(np.ones((1, length), np.int32), causal=True)

    def gradients(attend, inputs, **options):
        def loss(inputs):
            mixed = attend(*inputs, mask, **options)
            return (mixed.astype(jnp.float32) * weight).sum()

        return jax.jit(jax.grad(loss))(inputs)

    rounded = tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs)
    of_blocks = gradients(backends.blockwise, rounded, block=8)
    for blocks, whole, exact in zip(
        of_blocks, gradients(reference, rounded), gradients(reference, inputs), strict=True
    ):
        error = lambda x, exact=exact: np.linalg.norm(np.float32(x) - exact)  # noqa: E731
        assert 0 < error(blocks) < 1.2 * error(whole)


def arrays_of(jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Yields every array that a traced function computes, also in loops and branches."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield from arrays_of(getattr(inner, "jaxpr", inner))


def traced_gradients(attend, length):
    """Traces value and gradients of causal attention with a learned bias: 1 row, 8 heads of 64."""

    def loss(inputs, table_RH):
        def bias(query, *positions):
            bucket_BTS = t5_bucket(offsets(*positions), bidirectional=False)
            return jnp.moveaxis(table_RH[bucket_BTS], -1, 1)

        positions = TokenPositions.of(jnp.ones((1, length), jnp.int32))
        return attend(*inputs, AttentionMask(positions, positions, causal=True), bias).sum()

    inputs = [jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)] * 3
    table = jax.ShapeDtypeStruct((T5_BUCKETS, 8), jnp.float32)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(inputs, table)


def test_blockwise_attention_has_no_array_of_length_times_length():
    length = 16384
    largest = {
        name: max(x.size for x in arrays_of(traced_gradients(attend, length).jaxpr.jaxpr))
        for name, attend in {"reference": reference, "blockwise": backends.blockwise}.items()
    }
    assert largest["reference"] == 8 * length**2
    assert largest["blockwise"] == 8 * length * 64  # the size of the queries


@ALSO_OPTIMIZED
def test_memory_of_blockwise_attention_is_at_most_linear_in_the_length():
    shorter, longer = (
        traced_gradients(backends.blockwise, n)
        .lower()
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for n in (1024, 2048)
    )
    assert shorter < longer <= 2 * shorter


ONE_TEXT = TokenPositions.of(np.ones((1, T), np.int32))
OTHER_TEXT = TokenPositions.of(np.ones((1, S), np.int32))
PACKED_TEXTS = TokenPositions.of(PACKED, PACKED)
CAUSAL = AttentionMask(ONE_TEXT, ONE_TEXT, causal=True)
PACKED_WINDOW = AttentionMask(PACKED_TEXTS, PACKED_TEXTS, causal=True, window=5)
BIAS = learned_bias(*parameters("none"))


def choose(
    backend,
    platform,
    *,
    length=512,
    key_length=None,
    dtype="bfloat16",
    d_head=64,
    mask=CAUSAL,
    **rest,
):
    """Calls `backends.choose`, which reads only the shape and dtype of queries and keys."""
    query, key = (
        jax.ShapeDtypeStruct((B, n, H, d_head), jnp.dtype(dtype))
        for n in (length, key_length or length)
    )
    return backends.choose(
        backend, query, key, mask, rest.pop("bias", None), platform=platform, **rest
    )


@pytest.mark.parametrize(
    ("platform", "expected", "case"),
    [
        (None, "reference", {}),
        (None, "blockwise", {"length": 1024}),
        (None, "blockwise", {"length": 256, "key_length": 8192}),
        (None, "reference", {"length": 1, "key_length": 2**20}),
        (None, "reference", {"length": 1024, "reference_only": "the caller requests the weights"}),
        ("gpu", "xla", {}),
        ("gpu", "blockwise", {"length": 1024}),
        ("cuda", "cudnn", {}),
        ("cuda", "cudnn", {"length": 16384}),
        ("cuda", "cudnn", {"mask": AttentionMask(ONE_TEXT, OTHER_TEXT), "key_length": 256}),
        ("cuda", "xla", {"length": 64}),
        ("cuda", "xla", {"dtype": "float32"}),
        ("cuda", "blockwise", {"dtype": "float32", "length": 1024}),
        ("cuda", "reference", {"reference_only": "the caller requests the weights"}),
        ("tpu", "flash", {"dtype": "float32"}),
        ("tpu", "flash", {"mask": PACKED_WINDOW, "length": 16384}),
        ("tpu", "xla", {"length": 64}),
        ("tpu", "xla", {"bias": BIAS}),
        ("tpu", "blockwise", {"bias": BIAS, "length": 1024}),
        ("tpu", "reference", {"length": 1}),
    ],
)
def test_auto_chooses_the_kernel_of_the_device_if_possible_or_else_blocks_for_long_texts(
    platform, expected, case, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choose("auto", platform, **case) == expected


@pytest.mark.parametrize(
    ("backend", "platform", "reason", "case"),
    [
        ("cudnn", None, "it requires an NVIDIA GPU, Ampere or newer, got 'cpu'", {}),
        ("cudnn", "gpu", "it requires an NVIDIA GPU, Ampere or newer, got 'gpu'", {}),
        (
            "cudnn",
            "cuda",
            "it requires model.dtype = 'bfloat16', got 'float32'",
            {"dtype": "float32"},
        ),
        (
            "cudnn",
            "cuda",
            "it requires a head size that is a multiple of 8, at most 128, got 100",
            {"d_head": 100},
        ),
        (
            "cudnn",
            "cuda",
            "it requires a head size that is a multiple of 8, at most 128, got 136",
            {"d_head": 136},
        ),
        (
            "cudnn",
            "cuda",
            "it does not compute the gradient of the bias that model.position adds",
            {"bias": BIAS},
        ),
        (
            "cudnn",
            "cuda",
            "it does not support model.attention_window",
            {"mask": CAUSAL.replace(window=5)},
        ),
        (
            "cudnn",
            "cuda",
            "it does not support packed rows",
            {"mask": PACKED_WINDOW.replace(window=None)},
        ),
        (
            "cudnn",
            "cuda",
            "it masks by the index in the row",
            {"mask": CAUSAL.replace(key=OTHER_TEXT)},
        ),
        ("flash", None, "it requires a TPU, got 'cpu'", {}),
        (
            "flash",
            "tpu",
            "it does not support the bias that model.position adds to the scores",
            {"bias": BIAS},
        ),
        (
            "flash",
            "tpu",
            "it masks by the index in the row",
            {"mask": CAUSAL.replace(key=OTHER_TEXT)},
        ),
        (
            "flash",
            "tpu",
            "the caller requests the weights",
            {"reference_only": "the caller requests the weights"},
        ),
        (
            "xla",
            None,
            "the caller requests the weights",
            {"reference_only": "the caller requests the weights"},
        ),
        (
            "blockwise",
            None,
            "the caller requests the weights",
            {"reference_only": "the caller requests the weights"},
        ),
    ],
)
def test_a_named_backend_that_cannot_be_used_is_an_error_with_the_reason(
    backend, platform, reason, case, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(
        ValueError, match=f"config.model.backend: '{backend}' cannot be used: {re.escape(reason)}"
    ):
        choose(backend, platform, **case)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "xla", "cudnn", "flash"])
def test_a_named_backend_is_used_if_possible_except_for_a_single_query(backend, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    platform = {"cudnn": "cuda", "flash": "tpu"}.get(backend)
    assert choose(backend, platform) == backend
    assert (
        choose(backend, platform, length=1, key_length=T, mask=CAUSAL.replace(key=OTHER_TEXT))
        == "reference"
    )


def on_devices(shape, function, *arguments):
    """`function` of the arguments, compiled for a mesh of rows (data, fsdp) and heads (tensor)."""
    mesh = meshes.make_mesh(*shape)
    return jax.jit(devices.compiled_for(function, mesh, ("data", "fsdp")))(*arguments)


def test_the_tpu_kernel_is_not_used_if_the_mesh_of_several_devices_is_unknown():
    assert jax.device_count() > 1 and choose("auto", "tpu") == "xla"
    with pytest.raises(
        ValueError, match="'flash' cannot be used: there are several devices, and the"
    ):
        choose("flash", "tpu")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_kernel_is_used_over_devices_that_divide_rows_and_heads_evenly(platform):
    kernel = {"tpu": "flash", "cuda": "cudnn"}[platform]
    chosen = []
    record = lambda backend: lambda: chosen.append(choose(backend, platform)) or 0  # noqa: E731
    for shape in ((2, 1, 1), (1, 2, 3), (1, 1, 2), (1, 1, 1)):
        on_devices(shape, record("auto"))
        on_devices(shape, record(kernel))
    assert set(chosen) == {kernel}
    on_devices((4, 1, 1), record("auto"))
    assert chosen[-1] == "xla"
    with pytest.raises(
        ValueError, match=f"'{kernel}' cannot be used: {B} rows do not divide evenly over 4 devices"
    ):
        on_devices((4, 1, 1), record(kernel))
    with pytest.raises(
        ValueError,
        match=f"'{kernel}' cannot be used: {H} heads of queries do not divide evenly over 4",
    ):
        on_devices((1, 1, 4), record(kernel))
    jax.pmap(lambda x: chosen.append(choose(kernel, platform)) or x)(jnp.zeros(jax.device_count()))
    assert chosen[-1] == kernel  # pmap traces the rows of one device


@pytest.mark.parametrize(
    "shape",
    [(1, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 1, 1), (1, 1, 2)))],
    ids=str,
)
@pytest.mark.parametrize(
    "mask", [pytest.param("causal and padding", marks=pytest.mark.slow), "causal window"]
)
def test_a_kernel_over_devices_gives_the_values_and_gradients_of_the_reference(
    shape, mask, monkeypatch
):
    monkeypatch.setattr(backends, "flash", functools.partial(backends.flash, interpret=True))
    causal, window, segments = MASKS[mask]
    segments = np.repeat(segments, 10, axis=1)
    inputs, length = qkv(GROUPS["grouped"], 130, 130), segments.shape[1]
    weight = normal(5, *inputs[0].shape) * (segments > 0)[:, :, None, None]

    def results_of(attend):
        def loss(*inputs):
            mixed = attend(*inputs, within(segments, causal=causal, window=window and 20 * window))
            return jnp.sum(mixed * weight), mixed

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)

    assert length == 130
    of_flash = results_of(functools.partial(backends.attend, "flash"))
    gradients, mixed = on_devices(shape, of_flash, *inputs)
    expected, mixed_by_reference = jax.jit(results_of(reference))(*inputs)
    is_token = (segments > 0)[:, :, None, None]
    assert_same([mixed * is_token], [mixed_by_reference * is_token])
    assert_same(gradients, expected)
    assert_same([mixed], [on_devices((1, 1, 1), of_flash, *inputs)[1]])


@pytest.mark.parametrize("mode", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_the_state_of_a_model_with_a_kernel_is_initialised_on_any_device(mode):
    config = with_vocabulary(runs.small_config({}), 100)
    model = dataclasses.replace(config.model, backend="flash")
    _, of_auto = step.of_config(config)
    _, initial_state = step.of_config(dataclasses.replace(config, model=model))
    made = parallel.MODES[mode](meshes.make_mesh(8)).make_state(initial_state)
    expected = jax.tree.map(lambda x: x.shape, jax.eval_shape(of_auto))
    assert jax.tree.map(lambda x: x.shape[mode == "pmap" :], made) == expected
