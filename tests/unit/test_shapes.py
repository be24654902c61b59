"""Architectures by position schemes: packed rows, the cache, lengths, and dependencies."""

import dataclasses
import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import CHOICES, ModelConfig, check_model
from flaxformer_lite.model.embeddings import Inputs
from flaxformer_lite.model.layers import Residual
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# 6 heads, so that groups can share keys; an even head size, for the pairs of rotary positions
CONFIG = ModelConfig(
    vocab_size=29,
    d_model=14,
    num_heads=6,
    d_head=4,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=5,
)
CONFIG = dataclasses.replace(CONFIG, relative_clip=3, backend="reference", num_classes=3)
S, T = 19, 23  # more than 3 times max_length
# lengths of 3 pairs that fill a row of S and a row of T
SOURCES, TARGETS = (3, 11, 5), (11, 5, 7)
APART, PACKED = ((0,), (1,), (2,)), ((0, 1, 2), (2, 0), (1,))  # the pairs of each row
KINDS = (
    {},
    dict(
        num_kv_heads=2,
        norm="rms_norm",
        norm_placement="pre",
        activation="swiglu",
        use_bias=False,
        output_bias=True,
        tie_embeddings=False,
    ),
    dict(
        num_kv_heads=1,
        attention="additive",
        attention_window=2,
        relative_values=True,
        activation="gelu",
    ),
)
SECOND = ("decoder_lm", 2)  # the second kind of language model is in the slow suite
# each position scheme with each of KINDS, in one of the architectures that generate
CASES = [
    pytest.param(
        *(architecture, position, (first + n) % 3),
        id=f"{architecture}-{position}-{(first + n) % 3}",
        marks=runs.SLOW.get(
            position, [pytest.mark.slow] if (architecture, first) == SECOND else []
        ),
    )
    for n, position in enumerate(CHOICES["model.position"])
    for architecture, first in (("encoder_decoder", 0), ("decoder_lm", 1), ("decoder_lm", 2))
]
# compilation without optimisation is faster
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def config_of(architecture, position, kind):
    """Returns the config of a case; only 'learned' is limited by max_length."""
    options = {"max_length": T} if position == "learned" else {}
    config = dataclasses.replace(
        CONFIG, architecture=architecture, position=position, **options, **KINDS[kind]
    )
    try:
        check_model(config)
    except ValueError:  # the scheme requires dot-product attention
        config = dataclasses.replace(config, attention="dot_product")
    return config


@functools.cache
def built(config):
    """Returns a model, random parameters (no bias 0, no scale 1), and its jitted forward."""
    model, rng = build_model(config), np.random.default_rng(0)
    sample = lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return model, {"params": jax.tree.map(sample, param_shapes(model))}, jit(model.apply)


def texts(lengths):
    """Returns random ids without padding."""
    return [np.random.default_rng(n).integers(3, 29, length) for n, length in enumerate(lengths)]


def laid_out(parts, layout, length):
    """Returns the ids and the segments of packed rows, (rows, length) each."""
    ids, segment = np.zeros((2, len(layout), length), np.int32)
    for row, numbers in enumerate(layout):
        packed = [parts[number] for number in numbers]
        lengths = [len(part) for part in packed]
        ids[row, : sum(lengths)] = np.concatenate(packed)
        segment[row, : sum(lengths)] = np.repeat(np.arange(len(packed)) + 1, lengths)
    return ids, segment


def forward(config, source, target):
    """Returns the logits for (ids, segments) of the sides that the model reads."""
    _, variables, apply = built(config)
    if config.architecture == "decoder_lm":
        return np.asarray(apply(variables, target[0], segment_BT=target[1]))
    segments = {"source_segment_BS": source[1], "target_segment_BT": target[1]}
    return np.asarray(apply(variables, source[0], target[0], **segments))


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_packed_texts_have_the_logits_of_each_text_alone(architecture, position, kind):
    config = config_of(architecture, position, kind)
    alone, packed = (
        (laid_out(texts(SOURCES), layout, S), laid_out(texts(TARGETS), layout, T))
        for layout in (APART, PACKED)
    )
    one_segment = [(ids, (ids != 0).astype(np.int32)) for ids, _ in packed]
    alone, packed, one_segment = (forward(config, *sides) for sides in (alone, packed, one_segment))
    assert np.abs(one_segment - packed)[0, TARGETS[0] :].max() > 0.01
    for row, numbers in enumerate(PACKED):
        start = 0
        for number in numbers:
            length = TARGETS[number]
            np.testing.assert_allclose(
                packed[row, start : start + length], alone[number, :length], atol=2e-5
            )
            start += length


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_decoding_with_a_cache_gives_the_logits_of_the_full_forward(architecture, position, kind):
    config = config_of(architecture, position, kind)
    model, variables, _ = built(config)
    source, target = laid_out(texts(SOURCES), APART, S), laid_out(texts(TARGETS), APART, T)
    steps, capacity = max(TARGETS), 13
    encoded = (source[0],) if architecture == "encoder_decoder" else ()

    @jit
    def stepwise(variables):
        cache = model.apply(variables, *(encoded or (3,)), capacity, method="start_cache")

        def step(cache, token_and_index):
            token_B, index = token_and_index
            logits_BV, cache = model.apply(
                variables, token_B, cache, index, *encoded, method="decode_step"
            )
            return cache, logits_BV

        cache, logits_TBV = jax.lax.scan(step, cache, (target[0][:, :steps].T, jnp.arange(steps)))
        return logits_TBV.swapaxes(0, 1), cache

    logits, cache = stepwise(variables)
    full = forward(config, source, target)
    for row, length in enumerate(TARGETS):
        np.testing.assert_allclose(logits[row, :length], full[row, :length], atol=2e-5)
    own, cross = (
        [part for layer in layers if layer for part in layer.projected()]
        for layers in (cache.self_attention, cache.cross_attention)
    )
    heads = config.num_kv_heads or 6
    assert {part.shape for part in own} == {(3, capacity, heads, 4)}
    assert {part.shape for part in cross} == ({(3, S, heads, 4)} if encoded else set())
    assert all((part[:, :steps] != 0).all() and (part[:, steps:] == 0).all() for part in own)


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_texts_of_three_times_max_length_are_accepted_unless_positions_are_learned(
    architecture, position, kind
):
    config = config_of(architecture, position, kind)
    source, target = laid_out(texts((S, S, S)), APART, S), laid_out(texts((T, T, T)), APART, T)
    if position == "learned":
        short = dataclasses.replace(config, max_length=S - 1)
        with pytest.raises(
            ValueError,
            match=rf"^learned positions end at max_length = {S - 1}, got (19|23) positions",
        ):
            forward(short, source, target)
        return
    assert T > S > 3 * config.max_length
    logits = forward(config, source, target)
    assert np.isfinite(logits).all()
    prefix = [np.where(np.arange(T) < config.max_length, part, 0) for part in target]
    np.testing.assert_allclose(logits[:, :5], forward(config, source, prefix)[:, :5], atol=2e-5)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_a_cache_longer_than_the_table_of_learned_positions_is_an_error(architecture):
    config = dataclasses.replace(CONFIG, architecture=architecture, position="learned")
    model, variables, _ = built(config)
    start = jnp.ones((1, 3), jnp.int32) if architecture == "encoder_decoder" else 1
    apply = functools.partial(model.apply, variables, start, method="start_cache")
    cache = jax.eval_shape(lambda: apply(config.max_length))
    assert cache.self_attention[0].entries == config.max_length
    with pytest.raises(
        ValueError, match=r"^learned positions end at max_length = 5, got a cache of 6 positions"
    ):
        jax.eval_shape(lambda: apply(config.max_length + 1))


def test_the_segments_of_one_side_only_are_an_error():
    model, variables, _ = built(CONFIG)
    ids = jnp.ones((1, 3), jnp.int32)
    expected = "source_segment_BS, target_segment_BT: expected both or neither, got one"
    with pytest.raises(ValueError, match=f"^{expected}"):
        model.apply(variables, ids, ids, target_segment_BT=ids)


@pytest.mark.parametrize("kind", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("position", runs.SCHEMES)
def test_in_bfloat16_every_sublayer_returns_bfloat16_and_the_logits_are_float32(position, kind):
    config = config_of("encoder_decoder", position, kind)
    model = build_model(dataclasses.replace(config, dtype="bfloat16"))
    is_sublayer = lambda module, method: isinstance(module, Residual)  # noqa: E731
    capture = {"capture_intermediates": is_sublayer, "mutable": ["intermediates"]}
    apply = functools.partial(model.apply, **capture)
    ids = jnp.ones((3, 5), jnp.int32)
    logits, extra = jax.eval_shape(apply, {"params": param_shapes(model)}, ids, ids)
    outputs = flax.traverse_util.flatten_dict(extra["intermediates"])
    of_sublayers = [output.dtype for path, (output,) in outputs.items() if path[-1] == "__call__"]
    assert logits.dtype == jnp.float32 and of_sublayers == [jnp.bfloat16] * 5


# The inputs that each output depends on, by gradients.


@functools.cache
def jacobian(config):
    """Returns the jitted Jacobian of a mixture of each position's logits by embedded inputs."""
    model, variables, _ = built(config)

    def outputs(added, sides, segments):
        def disturb(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if isinstance(context.module, Inputs) and context.method_name == "__call__":
                return result + added[context.module.name]
            return result

        with nn.intercept_methods(disturb):
            logits = model.apply(variables, *sides.values(), **segments)[0]
        return logits @ np.random.default_rng(1).normal(size=logits.shape[-1]).astype(np.float32)

    return jit(jax.jacrev(outputs))


def dependencies(config, sides, **segments):
    """Returns a bool array (outputs, inputs) per side: whether the output depends on the input."""
    sides, segments = (
        {name: jnp.array([row]) for name, row in rows.items()} for rows in (sides, segments)
    )
    zeros = {
        f"{side}_inputs": jnp.zeros((*ids.shape, config.d_model)) for side, ids in sides.items()
    }
    derivatives = jacobian(config)(zeros, sides, segments)
    return [np.abs(derivatives[name]).max(axis=(-3, -1)) > 0 for name in zeros]


def picture(text):
    """Returns the bool array of lines of 0 and 1: a line per output, a column per input."""
    return np.array([[int(cell) for cell in line] for line in text.split()], dtype=bool)


@pytest.mark.parametrize(
    "position", ["sinusoidal", pytest.param("learned", marks=pytest.mark.slow)]
)
def test_logits_depend_on_the_source_and_on_previous_targets_but_not_on_padding(position):
    config, source = config_of("encoder_decoder", position, kind=1), [5, 6, 7, 8, 9, 2, 0]
    by_source, by_target = dependencies(config, {"source": source, "target": [1, 13, 14, 15, 16]})
    np.testing.assert_array_equal(by_target, np.tril(np.ones((5, 5), bool)))
    np.testing.assert_array_equal(by_source, picture("1111110 " * 5))
    _, of_short = dependencies(config, {"source": source, "target": [1, 11, 12, 0, 0]})
    np.testing.assert_array_equal(of_short[:3], np.tril(np.ones((5, 5), bool))[:3])


def test_logits_of_a_packed_pair_depend_on_that_pair_within_the_window():
    config = config_of("encoder_decoder", "rotary", kind=2)
    assert config.attention_window == 2
    segments = {"source_segment_BS": [1, 1, 2, 2, 2, 0], "target_segment_BT": [1, 1, 1, 1, 2, 2]}
    pairs = {"source": [5, 2, 6, 7, 2, 0], "target": [1, 8, 9, 7, 1, 10]}
    by_source, by_target = dependencies(config, pairs, **segments)
    np.testing.assert_array_equal(by_target, picture("100000 110000 111000 011100 000010 000011"))
    np.testing.assert_array_equal(by_source, picture("110000 " * 4 + "001110 " * 2))


@pytest.mark.parametrize("position", runs.SCHEMES)
def test_logits_of_a_language_model_depend_on_previous_tokens_of_the_same_text(position):
    config, segment_BT = config_of("decoder_lm", position, kind=1), [1, 1, 1, 2, 2, 2, 0]
    (by_target,) = dependencies(config, {"target": [1, 5, 6, 1, 7, 8, 0]}, segment_BT=segment_BT)
    # the last token is padding: its logits are ignored
    expected = "1000000 1100000 1110000 0001000 0001100 0001110"
    np.testing.assert_array_equal(by_target[:6], picture(expected))


# The classifier.


CLASSIFIER = dataclasses.replace(CONFIG, architecture="encoder_classifier")
SOURCE = np.array([[5, 6, 7, 8, 9, 2, 0], [5, 6, 2, 0, 0, 0, 0]])


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
@pytest.mark.parametrize("use_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_classifier_pools_the_mean_of_all_vectors_or_the_first(pooling, use_bias):
    config = dataclasses.replace(CLASSIFIER, pooling=pooling, use_bias=use_bias)
    model, variables, apply = built(config)

    def encode(model, ids):
        positions = TokenPositions.of(ids)
        return model.encoder(model.source_inputs(ids, positions), positions)

    apply_encoder = jit(functools.partial(model.apply, method=encode))
    vectors = np.asarray(apply_encoder(variables, SOURCE), np.float64)
    pools = {
        "first": vectors[:, 0],
        "mean": np.stack([vectors[0, :6].mean(axis=0), vectors[1, :3].mean(axis=0)]),
    }
    assert np.abs(pools["first"] - pools["mean"]).max() > 0.1
    classes = variables["params"]["classes"]
    logits = apply(variables, SOURCE)
    assert logits.shape == (2, 3) and logits.dtype == jnp.float32
    expected = pools[pooling] @ np.asarray(classes["kernel"]) + np.asarray(classes.get("bias", 0))
    assert ("bias" in classes) == use_bias
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
def test_logits_of_a_classifier_do_not_depend_on_padding_and_are_finite(pooling):
    _, variables, apply = built(dataclasses.replace(CLASSIFIER, pooling=pooling))
    padded = apply(variables, np.pad(SOURCE, ((0, 1), (0, 4))))
    np.testing.assert_allclose(padded[:2], apply(variables, SOURCE), atol=1e-5)
    np.testing.assert_allclose(padded[1], apply(variables, SOURCE[1:, :3])[0], atol=1e-5)
    assert np.isfinite(padded).all()


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
def test_logits_of_a_classifier_depend_on_every_token(pooling):
    config = dataclasses.replace(CLASSIFIER, pooling=pooling)
    (by_source,) = dependencies(config, {"source": SOURCE[0]})
    np.testing.assert_array_equal(by_source, picture("1111110")[0])


def test_a_classifier_without_a_number_of_classes_is_an_error():
    expected = r"ModelConfig\.num_classes: expected the number of classes, got None"
    with pytest.raises(ValueError, match=f"^{expected}"):
        build_model(dataclasses.replace(CLASSIFIER, num_classes=None))


def test_in_bfloat16_the_logits_of_a_classifier_stay_float32():
    models = [
        built(dataclasses.replace(CLASSIFIER, dtype=dtype)) for dtype in CHOICES["model.dtype"]
    ]
    exact, rounded = (apply(variables, SOURCE) for _, variables, apply in models)
    assert rounded.dtype == jnp.float32 and (rounded != rounded.astype(jnp.bfloat16)).any()
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
