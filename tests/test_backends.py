"""Every backend against the reference, values and gradients; what it refuses, what 'auto' takes, and its memory."""

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
from flaxformer_lite.model.masks import AttentionMask, TokenPositions
from flaxformer_lite.model.positions import T5_BUCKETS, clipped_offset, offsets, t5_bucket
from flaxformer_lite.training import parallel, step

B, T, S, H, K = 2, 13, 17, 6, 7  # H is no prime: its heads share keys in groups
CLIP = 3
FAST = {"xla_backend_optimization_level": "0"}  # compiling is what takes long here
GROUPS = {"multi-head": H, "grouped": 2, "multi-query": 1}  # heads of keys
# The number of the text of each token, 0 = padding.
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
BIASES = ("none", "by distance", "by distance and query")


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def qkv(num_kv_heads=H, query_length=T, key_length=T):
    keys = (B, key_length, num_kv_heads, K)
    return draw(0, B, query_length, H, K), draw(1, *keys), draw(2, *keys)


def within(segment_BL, *, causal=False, window=None):
    """Self-attention: queries and keys stand at the same places."""
    places = TokenPositions.of(segment_BL, segment_BL)
    return AttentionMask(places, places, causal=causal, window=window)


def across(ids):
    """Attention to another text: `ids` of the queries and of the keys."""
    return AttentionMask(*map(TokenPositions.of, ids))


def learned_bias(table_RH, vector_RK):
    """T5's bias and Shaw's together; parameters of zero add nothing."""

    def bias(query_BTHK, query_at, key_at):
        by_distance = jnp.moveaxis(table_RH[t5_bucket(offsets(query_at, key_at), bidirectional=True)], -1, 1)
        offset_BTSR = jnp.repeat(clipped_offset(query_at, key_at, CLIP), B // len(query_at), axis=0)
        return by_distance + jnp.einsum("BTHK,RK,BTSR->BHTS", query_BTHK, vector_RK, offset_BTSR)

    return bias


def parameters(kind):
    table_RH, vector_RK = draw(3, T5_BUCKETS, H), draw(4, 2 * CLIP + 1, K)
    return table_RH * (kind == "by distance"), vector_RK * (kind == "by distance and query")


def reference(query, key, value, pattern, bias=None):
    """Equation 1 by the functions of `attention.py`, which `test_attention.py` compares with numpy."""
    scores = dot_product_scores(query, repeat_heads(key, query))
    if bias is not None:
        scores += jnp.broadcast_to(bias(query, pattern.query.position_BL, pattern.key.position_BL), scores.shape)
    return weighted_sum(softmax(scores, pattern.array()), repeat_heads(value, query))


COMPUTE = {
    "reference": reference,
    "blockwise": functools.partial(backends.blockwise, block=5),  # so that there are several, and the last is filled up
    "xla": backends.xla,
    "flash": functools.partial(backends.flash, interpret=True),
}


@functools.cache
def compiled(backend, make_pattern, biased):
    """Outputs and gradients. Segments are an argument, so that masks that differ in them are compiled once."""

    @functools.partial(jax.jit, compiler_options=FAST)
    def run(inputs, parameters, segments, weight):
        def loss(inputs, parameters):
            bias = [learned_bias(*parameters)] if biased else []
            mixed = COMPUTE[backend](*inputs, make_pattern(segments), *bias)
            return jnp.sum(mixed * weight, dtype=jnp.float32), mixed

        gradients, mixed = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, parameters)
        return mixed, gradients

    return run


def results(backend, inputs, make_pattern, segments, kind=None):
    """What queries that see something get, and the gradients of a weighted sum of it. `kind`: None passes no bias."""
    mask = np.asarray(make_pattern(segments).array())
    sees_BT = np.broadcast_to(mask.any(axis=(1, 3)), inputs[0].shape[:2])
    weight = draw(5, *inputs[0].shape) * sees_BT[:, :, None, None]
    run = compiled(backend, make_pattern, kind is not None)
    mixed, gradients = run(inputs, parameters(kind), segments, weight)
    return [np.asarray(mixed)[sees_BT], *jax.tree.leaves(gradients)]


def assert_same(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


@functools.cache
def self_attention(causal, window):
    return functools.partial(within, causal=causal, window=window)


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["blockwise", "xla"])
def test_values_and_gradients_are_those_of_the_reference(backend, mask, groups, kind):
    causal, window, segments = MASKS[mask]
    arguments = qkv(GROUPS[groups]), self_attention(causal, window), segments, kind
    assert_same(results(backend, *arguments), results("reference", *arguments))


def test_every_mask_and_every_bias_of_these_tests_makes_a_difference():
    inputs = qkv()
    outputs = [reference(*inputs, within(segments, causal=c, window=w)) for c, w, segments in MASKS.values()]
    pattern = within(WHOLE)
    outputs += [reference(*inputs, pattern, learned_bias(*parameters(kind))) for kind in BIASES[1:]]
    for i, x in enumerate(outputs):
        for y in outputs[:i]:
            assert np.abs(x - y).max() > 0.1


@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_queries_attend_to_a_longer_text_without_its_padding(backend):
    ids = PADDED, np.array([[1] * 11 + [0] * 6, [1] * 17], np.int32)
    arguments = qkv(GROUPS["grouped"], T, S), across, ids
    assert_same(results(backend, *arguments), results("reference", *arguments))


@pytest.mark.parametrize(
    ("mask", "groups"),
    [
        pytest.param("none", "multi-head", marks=pytest.mark.slow),
        ("packed", "multi-head"),
        pytest.param("causal", "grouped", marks=pytest.mark.slow),
        ("causal and padding", "grouped"),
        ("causal and packed", "grouped"),
        pytest.param("window", "multi-query", marks=pytest.mark.slow),
        ("causal window", "multi-query"),
    ],
)
def test_the_kernel_for_tpus_gives_the_values_and_gradients_of_the_reference(mask, groups):
    causal, window, segments = MASKS[mask]
    segments = np.repeat(segments, 20, axis=1)[:, :257]  # three blocks of 128
    arguments = qkv(GROUPS[groups], 257, 257), self_attention(causal, window and 20 * window), segments
    assert_same(results("flash", *arguments), results("reference", *arguments))


def test_the_kernel_for_nvidia_gpus_is_told_what_gives_the_values_of_the_reference(monkeypatch):
    theirs, asked = jax.nn.dot_product_attention, []

    def the_same_in_xla(*inputs, implementation, **options):
        asked.append(implementation)
        assert (options["key_value_seq_lengths"] > 0).all()  # over no keys, a softmax in cuDNN is NaN
        return theirs(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", the_same_in_xla)
    inputs = qkv(GROUPS["grouped"])
    places = TokenPositions.of(PADDED)
    for pattern in (
        AttentionMask(places, places),
        AttentionMask(places, places, causal=True),
        AttentionMask(ONE_TEXT, places),
    ):
        sees_BT = np.asarray(pattern.array()).any(axis=(1, 3))
        mixed, expected = backends.attend("cudnn", *inputs, pattern), reference(*inputs, pattern)
        np.testing.assert_allclose(mixed[sees_BT], expected[sees_BT], atol=1e-5)
    empty = TokenPositions.of(np.zeros((B, T), np.int32))
    backends.attend("cudnn", *inputs, AttentionMask(empty, empty, causal=True))
    assert set(asked) == {"cudnn"}


@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_a_query_that_may_attend_to_nothing_gets_something_finite_and_so_do_its_gradients(backend):
    @jax.jit
    def run(inputs, ids):
        mixed, pull = jax.vjp(lambda *inputs: COMPUTE[backend](*inputs, across(ids)), *inputs)
        return mixed, *pull(jnp.ones_like(mixed))

    query_ids = np.ones((B, T), np.int32)
    for key_ids in (np.array([[1] * S, [0] * S]), np.zeros((B, S), int)):  # nothing for one row, and for all
        assert all(np.isfinite(x).all() for x in run(qkv(1, T, S), (query_ids, key_ids)))


@pytest.mark.parametrize("backend", ["blockwise", "xla", "flash"])
def test_in_bfloat16_scores_are_float32_and_the_output_is_not(backend):
    # Scores of 256 and 257, which are one number in bfloat16; the values are 0 and 1.
    query = jnp.asarray([32, 2, 0, 0], jnp.bfloat16).reshape(1, 1, 1, 4)
    key = jnp.asarray([[16, 0, 0, 0], [16, 1, 0, 0]], jnp.bfloat16).reshape(1, 2, 1, 4)
    value = jnp.asarray([[0] * 4, [1] * 4], jnp.bfloat16).reshape(1, 2, 1, 4)
    assert jnp.bfloat16(256) == jnp.bfloat16(257)
    pattern = across([jnp.array([[7]]), jnp.array([[7, 7]])])
    mixed, pull = jax.vjp(lambda value: COMPUTE[backend](query, key, value, pattern), value)
    (gradient,) = pull(jnp.ones_like(mixed))
    assert mixed.dtype == gradient.dtype == jnp.bfloat16
    weight = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(mixed[0, 0, 0].astype(np.float32), [weight] * 4, rtol=2**-7)
    np.testing.assert_allclose(gradient[0, :, 0, 0].astype(np.float32), [1 - weight, weight], rtol=2**-7)


def test_blocks_of_any_size_give_the_same():
    inputs, pattern = qkv(), within(PACKED, causal=True)
    expected = reference(*inputs, pattern)
    for block in (3, 13, backends.BLOCK):
        mixed = backends.blockwise(*inputs, pattern, block=block)
        np.testing.assert_allclose(mixed[PACKED > 0], expected[PACKED > 0], atol=1e-5)


def test_blocks_of_a_batch_that_devices_share_give_the_same():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def attend(inputs, segments):
        mixed, pull = jax.vjp(lambda *inputs: COMPUTE["blockwise"](*inputs, within(segments, causal=True)), *inputs)
        return mixed, *pull(jnp.ones_like(mixed))

    compiled = jax.jit(attend, in_shardings=rows, out_shardings=rows).lower(qkv(), PACKED).compile()
    for shared, alone in zip(compiled(qkv(), PACKED), jax.jit(attend)(qkv(), PACKED), strict=True):
        np.testing.assert_allclose(shared, alone, atol=1e-5)
    assert not re.search("all-reduce|all-gather|all-to-all|permute", compiled.as_text())  # each has all that it needs


@pytest.mark.parametrize(
    ("options", "unread", "rows"),
    [
        ({"causal": True}, slice(5, None), slice(0, 5)),  # blocks of five: of the future
        ({"window": 2}, slice(0, 5), slice(10, None)),  # beyond the window, before and after
        ({"window": 2}, slice(10, None), slice(0, 5)),
        ({"causal": True, "window": 2}, slice(0, 5), slice(10, None)),
    ],
)
@pytest.mark.parametrize("segments", [WHOLE, PACKED], ids=["one text", "packed"])
def test_blocks_that_no_query_sees_are_not_read(segments, options, unread, rows):
    query, key, value = qkv()
    expected = reference(query, key, value, within(segments, **options))[:, rows]
    key, value = (np.array(x) for x in (key, value))
    key[:, unread] = value[:, unread] = np.nan
    mixed = COMPUTE["blockwise"](query, key, value, within(segments, **options))[:, rows]
    seen_BT = np.asarray(within(segments, **options).array()).any(axis=(1, 3))[:, rows]
    np.testing.assert_allclose(mixed[seen_BT], expected[seen_BT], atol=1e-5)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": 2}, {"causal": True, "window": 2}])
def test_queries_that_do_not_stand_where_the_keys_do_skip_by_position(options):
    pattern = AttentionMask(TokenPositions.at(jnp.arange(3, 8)), TokenPositions.at(jnp.arange(T)), **options)
    query, key, value = qkv()[0][:, :5], *qkv()[1:]
    mixed = backends.blockwise(query, key, value, pattern, block=4)
    np.testing.assert_allclose(mixed, reference(query, key, value, pattern), atol=1e-5)


def test_in_bfloat16_gradients_are_as_exact_over_many_blocks_as_over_none():
    length = 256
    inputs, weight = tuple(draw(i, 1, length, 2, 8) for i in range(3)), draw(5, 1, length, 2, 8)
    pattern = within(np.ones((1, length), np.int32), causal=True)

    def error(attend, **options):
        loss = lambda inputs: (attend(*inputs, pattern, **options).astype(jnp.float32) * weight).sum()  # noqa: E731
        gradients = jax.jit(jax.grad(loss))(tuple(jnp.asarray(x, jnp.bfloat16) for x in inputs))
        exact = jax.jit(jax.grad(loss))(inputs)
        return [np.linalg.norm(np.float32(x) - y) / np.linalg.norm(y) for x, y in zip(gradients, exact, strict=True)]

    for blocks, whole in zip(error(backends.blockwise, block=8), error(reference), strict=True):
        assert 0 < blocks < 1.2 * whole


def arrays_of(jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Everything that a traced function computes, in its loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
                yield from arrays_of(getattr(inner, "jaxpr", inner))


def traced_gradients(attend, length):
    """The value and the gradients of causal attention with a learned bias, traced; one row, 8 heads of 64."""

    def loss(inputs, table_RH):
        bias = lambda query, *at: jnp.moveaxis(table_RH[t5_bucket(offsets(*at), bidirectional=False)], -1, 1)  # noqa: E731
        places = TokenPositions.of(jnp.ones((1, length), jnp.int32))
        return attend(*inputs, AttentionMask(places, places, causal=True), bias).sum()

    inputs = [jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)] * 3
    table = jax.ShapeDtypeStruct((T5_BUCKETS, 8), jnp.float32)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(inputs, table)


def test_blocks_never_make_an_array_of_length_times_length():
    length = 16384
    largest = {
        name: max(x.size for x in arrays_of(traced_gradients(attend, length).jaxpr.jaxpr))
        for name, attend in {"reference": reference, "blockwise": backends.blockwise}.items()
    }
    assert largest["reference"] == 8 * length**2
    assert largest["blockwise"] == 8 * length * 64  # no more than the queries themselves


def test_memory_of_blocks_grows_with_the_length_and_no_faster():
    shorter, longer = (
        traced_gradients(backends.blockwise, n).lower().compile(FAST).memory_analysis().temp_size_in_bytes
        for n in (1024, 2048)
    )
    assert shorter < longer <= 2 * shorter


ONE_TEXT = TokenPositions.of(np.ones((1, T), np.int32))
OTHER_TEXT = TokenPositions.of(np.ones((1, S), np.int32))
SEVERAL_TEXTS = TokenPositions.of(PACKED, PACKED)
CAUSAL = AttentionMask(ONE_TEXT, ONE_TEXT, causal=True)
PACKED_WINDOW = AttentionMask(SEVERAL_TEXTS, SEVERAL_TEXTS, causal=True, window=5)
BIAS = learned_bias(*parameters("none"))


def choose(backend, platform, *, length=512, key_length=None, dtype="bfloat16", d_head=64, pattern=CAUSAL, **rest):
    """`backends.choose` for queries and keys of which only shape and type are looked at."""
    query, key = (jax.ShapeDtypeStruct((B, n, H, d_head), jnp.dtype(dtype)) for n in (length, key_length or length))
    return backends.choose(backend, query, key, pattern, rest.pop("bias", None), platform=platform, **rest)


@pytest.mark.parametrize(
    ("platform", "expected", "case"),
    [
        (None, "reference", {}),
        (None, "blockwise", {"length": 1024}),
        (None, "blockwise", {"length": 256, "key_length": 8192}),
        (None, "reference", {"length": 1, "key_length": 2**20}),
        (None, "reference", {"length": 1024, "reference_only": "weights are asked for"}),
        ("gpu", "xla", {}),
        ("gpu", "blockwise", {"length": 1024}),
        ("cuda", "cudnn", {}),
        ("cuda", "cudnn", {"length": 16384}),
        ("cuda", "cudnn", {"pattern": AttentionMask(ONE_TEXT, OTHER_TEXT), "key_length": 256}),
        ("cuda", "xla", {"length": 64}),
        ("cuda", "xla", {"dtype": "float32"}),
        ("cuda", "blockwise", {"dtype": "float32", "length": 1024}),
        ("cuda", "reference", {"reference_only": "weights are asked for"}),
        ("tpu", "flash", {"dtype": "float32"}),
        ("tpu", "flash", {"pattern": PACKED_WINDOW, "length": 16384}),
        ("tpu", "xla", {"length": 64}),
        ("tpu", "xla", {"bias": BIAS}),
        ("tpu", "blockwise", {"bias": BIAS, "length": 1024}),
        ("tpu", "reference", {"length": 1}),
    ],
)
def test_auto_takes_the_kernel_of_the_device_if_it_can_and_else_blocks_for_long_texts(
    platform, expected, case, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choose("auto", platform, **case) == expected


@pytest.mark.parametrize(
    ("backend", "platform", "reason", "case"),
    [
        ("cudnn", None, "it runs on NVIDIA GPUs from Ampere on, and this is 'cpu'", {}),
        ("cudnn", "gpu", "it runs on NVIDIA GPUs from Ampere on, and this is 'gpu'", {}),
        ("cudnn", "cuda", "it needs model.dtype = 'bfloat16', not 'float32'", {"dtype": "float32"}),
        ("cudnn", "cuda", "it needs heads of at most 128 numbers, a multiple of 8, not 100", {"d_head": 100}),
        ("cudnn", "cuda", "it needs heads of at most 128 numbers, a multiple of 8, not 136", {"d_head": 136}),
        ("cudnn", "cuda", "it would lose gradients of what model.position adds to the scores", {"bias": BIAS}),
        ("cudnn", "cuda", "it has no model.attention_window", {"pattern": CAUSAL.replace(window=5)}),
        (
            "cudnn",
            "cuda",
            "it cannot tell the texts of a packed row apart",
            {"pattern": PACKED_WINDOW.replace(window=None)},
        ),
        ("cudnn", "cuda", "it masks by the index in a row", {"pattern": CAUSAL.replace(key=OTHER_TEXT)}),
        ("flash", None, "it runs on TPUs, and this is 'cpu'", {}),
        ("flash", "tpu", "it takes nothing that model.position adds to the scores", {"bias": BIAS}),
        ("flash", "tpu", "it masks by the index in a row", {"pattern": CAUSAL.replace(key=OTHER_TEXT)}),
        ("flash", "tpu", "weights are asked for", {"reference_only": "weights are asked for"}),
        ("xla", None, "weights are asked for", {"reference_only": "weights are asked for"}),
        ("blockwise", None, "weights are asked for", {"reference_only": "weights are asked for"}),
    ],
)
def test_a_backend_that_cannot_do_it_is_refused_by_name_with_the_reason(backend, platform, reason, case, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"config.model.backend: '{backend}' cannot be used: {re.escape(reason)}"):
        choose(backend, platform, **case)


@pytest.mark.parametrize("backend", ["reference", "blockwise", "xla", "cudnn", "flash"])
def test_a_backend_that_can_do_it_is_taken_by_name_and_left_for_a_single_query(backend, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    platform = {"cudnn": "cuda", "flash": "tpu"}.get(backend)
    assert choose(backend, platform) == backend
    assert choose(backend, platform, length=1, key_length=T, pattern=CAUSAL.replace(key=OTHER_TEXT)) == "reference"


def on_devices(shape, function, *arguments):
    """`function` of the arguments, compiled for a mesh of rows (data, fsdp) and heads (tensor)."""
    mesh = parallel.make_mesh(*shape)
    return jax.jit(devices.compiled_for(function, mesh, ("data", "fsdp")))(*arguments)


def test_where_nothing_says_how_devices_share_the_work_the_kernel_for_tpus_is_not_taken():
    assert jax.device_count() > 1 and choose("auto", "tpu") == "xla"
    with pytest.raises(ValueError, match="'flash' cannot be used: there are several devices, and no"):
        choose("flash", "tpu")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_devices_that_share_rows_and_heads_take_the_kernel_where_they_divide_them(platform):
    kernel = {"tpu": "flash", "cuda": "cudnn"}[platform]
    chosen = []
    ask = lambda backend: lambda: chosen.append(choose(backend, platform)) or 0  # noqa: E731
    for shape in ((2, 1, 1), (1, 2, 3), (1, 1, 2), (1, 1, 1)):
        on_devices(shape, ask("auto"))
        on_devices(shape, ask(kernel))
    assert set(chosen) == {kernel}
    on_devices((4, 1, 1), ask("auto"))
    assert chosen[-1] == "xla"
    with pytest.raises(ValueError, match=f"'{kernel}' cannot be used: 4 devices cannot share {B} rows evenly"):
        on_devices((4, 1, 1), ask(kernel))
    with pytest.raises(ValueError, match=f"'{kernel}' cannot be used: 4 devices cannot share {H} heads of queries"):
        on_devices((1, 1, 4), ask(kernel))
    jax.pmap(lambda x: chosen.append(choose(kernel, platform)) or x)(jnp.zeros(jax.device_count()))
    assert chosen[-1] == kernel  # each device sees its own rows


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 2), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("mask", ["causal and padding", "causal window"])
def test_a_kernel_over_devices_gives_the_values_and_gradients_of_the_reference(shape, mask, monkeypatch):
    monkeypatch.setattr(backends, "flash", functools.partial(backends.flash, interpret=True))
    causal, window, segments = MASKS[mask]
    segments = np.repeat(segments, 10, axis=1)
    inputs, length = qkv(GROUPS["grouped"], 130, 130), segments.shape[1]
    weight = draw(5, *inputs[0].shape) * (segments > 0)[:, :, None, None]

    def results_of(attend):
        def loss(*inputs):
            mixed = attend(*inputs, within(segments, causal=causal, window=window and 20 * window))
            return jnp.sum(mixed * weight), mixed

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)

    assert length == 130
    gradients, mixed = on_devices(shape, results_of(functools.partial(backends.attend, "flash")), *inputs)
    expected, of_reference = jax.jit(results_of(reference))(*inputs)
    assert_same([mixed * (segments > 0)[:, :, None, None]], [of_reference * (segments > 0)[:, :, None, None]])
    assert_same(gradients, expected)
    alone = on_devices((1, 1, 1), results_of(functools.partial(backends.attend, "flash")), *inputs)[1]
    assert_same([mixed], [alone])


@pytest.mark.parametrize("mode", ["mesh", "pmap"])
def test_the_state_of_a_model_with_a_kernel_is_made_anywhere(mode):
    config = with_vocabulary(runs.small_config({}), 100)
    model = dataclasses.replace(config.model, backend="flash")
    _, of_reference = step.of_config(config)
    _, initial_state = step.of_config(dataclasses.replace(config, model=model))
    made = parallel.MODES[mode](parallel.make_mesh(8)).make_state(initial_state)
    shapes = jax.eval_shape(of_reference)
    assert jax.tree.map(lambda x: x.shape[mode == "pmap" :], made) == jax.tree.map(lambda x: x.shape, shapes)
