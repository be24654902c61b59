"""Every shape of model with every position scheme: packed rows, a cache, lengths, and by gradients who sees what."""

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

# Six heads, so that some may share keys, of an even size, so that rotary positions can turn pairs.
CONFIG = ModelConfig(
    vocab_size=29, d_model=14, num_heads=6, d_head=4, d_ff=11, num_encoder_layers=1, num_decoder_layers=1, max_length=5
)
CONFIG = dataclasses.replace(CONFIG, relative_clip=3, backend="reference", num_classes=3)
S, T = 19, 23  # more than three times max_length
SOURCES, TARGETS = (3, 11, 5), (11, 5, 7)  # lengths of three pairs that fill a row of S and a row of T
APART, PACKED = ((0,), (1,), (2,)), ((0, 1, 2), (2, 0), (1,))  # which pairs stand in which row
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
    dict(num_kv_heads=1, attention="additive", attention_window=2, relative_values=True, activation="gelu"),
)
# Every position scheme meets every kind, once in one of the shapes that write.
CASES = [
    pytest.param(
        *(architecture, position, (first + n) % 3),
        id=f"{architecture}-{position}-{(first + n) % 3}",
        marks=runs.SLOW.get(position, []),
    )
    for n, position in enumerate(CHOICES["model.position"])
    for architecture, first in (("encoder_decoder", 0), ("decoder_lm", 1), ("decoder_lm", 2))
]
# What runs a few times on a few numbers is compiled without optimisation, in less time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def config_of(architecture, position, kind):
    """The config of a case; 'learned' alone ends at max_length."""
    options = {"max_length": T} if position == "learned" else {}
    config = dataclasses.replace(CONFIG, architecture=architecture, position=position, **options, **KINDS[kind])
    try:
        check_model(config)
    except ValueError:  # the scheme acts through the product of query and key
        config = dataclasses.replace(config, attention="dot_product")
    return config


@functools.cache
def built(config):
    """A model, parameters that are all drawn, so that no bias is zero and no scale one, and its jitted forward."""
    model, rng = build_model(config), np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return model, {"params": jax.tree.map(draw, param_shapes(model))}, jit(model.apply)


def texts(lengths):
    """Drawn ids, none of them padding."""
    return [np.random.default_rng(n).integers(3, 29, length) for n, length in enumerate(lengths)]


def laid_out(parts, layout, length):
    """Rows of texts one after another, (rows, length), and the number of each token's text in its row."""
    ids, segment = np.zeros((2, len(layout), length), np.int32)
    for row, numbers in enumerate(layout):
        packed = [parts[number] for number in numbers]
        ends = np.cumsum([len(part) for part in packed])
        ids[row, : ends[-1]] = np.concatenate(packed)
        segment[row, : ends[-1]] = np.repeat(np.arange(len(packed)) + 1, [len(part) for part in packed])
    return ids, segment


def forward(config, source, target):
    """The logits for ids and segments of those sides that the model reads."""
    _, variables, apply = built(config)
    if config.architecture == "decoder_lm":
        return np.asarray(apply(variables, target[0], segment_BT=target[1]))
    segments = {"source_segment_BS": source[1], "target_segment_BT": target[1]}
    return np.asarray(apply(variables, source[0], target[0], **segments))


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_texts_packed_in_a_row_get_the_logits_that_each_gets_alone(architecture, position, kind):
    config = config_of(architecture, position, kind)
    alone, packed = (
        (laid_out(texts(SOURCES), layout, S), laid_out(texts(TARGETS), layout, T)) for layout in (APART, PACKED)
    )
    run_together = [(ids, (ids != 0).astype(np.int32)) for ids, _ in packed]
    alone, packed, run_together = (forward(config, *sides) for sides in (alone, packed, run_together))
    assert np.abs(run_together - packed)[0, TARGETS[0] :].max() > 0.01
    for row, numbers in enumerate(PACKED):
        start = 0
        for number in numbers:
            length = TARGETS[number]
            np.testing.assert_allclose(packed[row, start : start + length], alone[number, :length], atol=2e-5)
            start += length


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_decoding_token_by_token_with_a_cache_gives_the_logits_of_the_full_forward(architecture, position, kind):
    config = config_of(architecture, position, kind)
    model, variables, _ = built(config)
    source, target = laid_out(texts(SOURCES), APART, S), laid_out(texts(TARGETS), APART, T)
    steps, room = max(TARGETS), 13
    encoded = (source[0],) if architecture == "encoder_decoder" else ()

    @jit
    def stepwise(variables):
        cache = model.apply(variables, *(encoded or (3,)), room, method="start_cache")

        def step(cache, token_and_index):
            token_B, index = token_and_index
            logits_BV, cache = model.apply(variables, token_B, cache, index, *encoded, method="decode_step")
            return cache, logits_BV

        cache, logits_TBV = jax.lax.scan(step, cache, (target[0][:, :steps].T, jnp.arange(steps)))
        return logits_TBV.swapaxes(0, 1), cache

    logits, cache = stepwise(variables)
    full = forward(config, source, target)
    for row, length in enumerate(TARGETS):
        np.testing.assert_allclose(logits[row, :length], full[row, :length], atol=2e-5)
    of_layers = (cache.self_attention, cache.cross_attention)
    own, cross = ([part for kept in caches if kept for part in kept.projected()] for caches in of_layers)
    assert {part.shape for part in own} == {(3, room, config.num_kv_heads or 6, 4)}
    assert {part.shape for part in cross} == ({(3, S, config.num_kv_heads or 6, 4)} if encoded else set())
    assert all((part[:, :steps] != 0).all() and (part[:, steps:] == 0).all() for part in own)


@pytest.mark.parametrize(("architecture", "position", "kind"), CASES)
def test_a_text_of_more_than_three_times_max_length_is_read_unless_positions_are_a_table(architecture, position, kind):
    config = config_of(architecture, position, kind)
    source, target = laid_out(texts((S, S, S)), APART, S), laid_out(texts((T, T, T)), APART, T)
    if position == "learned":
        short = dataclasses.replace(config, max_length=S - 1)
        with pytest.raises(ValueError, match=rf"^learned positions end at max_length = {S - 1}, got (19|23) positions"):
            forward(short, source, target)
        return
    assert T > S > 3 * config.max_length
    logits = forward(config, source, target)
    assert np.isfinite(logits).all()
    beginning = [np.where(np.arange(T) < config.max_length, part, 0) for part in target]
    np.testing.assert_allclose(logits[:, :5], forward(config, source, beginning)[:, :5], atol=2e-5)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_a_cache_has_no_room_for_positions_that_a_table_has_not(architecture):
    config = dataclasses.replace(CONFIG, architecture=architecture, position="learned")
    model, variables, _ = built(config)
    start = jnp.ones((1, 3), jnp.int32) if architecture == "encoder_decoder" else 1
    apply = functools.partial(model.apply, variables, start, method="start_cache")
    assert jax.eval_shape(lambda: apply(config.max_length)).self_attention[0].entries == config.max_length
    with pytest.raises(ValueError, match=r"^learned positions end at max_length = 5, got a cache of 6 positions"):
        apply(config.max_length + 1)


def test_packed_pairs_need_the_segments_of_both_sides():
    model, variables, _ = built(CONFIG)
    ids = jnp.ones((1, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"^Expected the segments of source and target, or of neither"):
        model.apply(variables, ids, ids, target_segment_BT=ids)


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("position", runs.SCHEMES)
def test_in_bfloat16_every_sublayer_gives_bfloat16_and_the_logits_are_float32(position, kind):
    model = build_model(dataclasses.replace(config_of("encoder_decoder", position, kind), dtype="bfloat16"))
    is_sublayer = lambda module, method: isinstance(module, Residual)  # noqa: E731
    apply = functools.partial(model.apply, capture_intermediates=is_sublayer, mutable=["intermediates"])
    ids = jnp.ones((3, 5), jnp.int32)
    logits, extra = jax.eval_shape(apply, {"params": param_shapes(model)}, ids, ids)
    outputs = flax.traverse_util.flatten_dict(extra["intermediates"])
    of_sublayers = [output.dtype for path, (output,) in outputs.items() if path[-1] == "__call__"]
    assert logits.dtype == jnp.float32 and of_sublayers == [jnp.bfloat16] * 5


# What depends on what, by gradients.


@functools.cache
def jacobian(config):
    """The derivatives of a random mixture of each position's logits by a disturbance of the embedded inputs, jitted."""
    model, variables, _ = built(config)

    def outputs(moved, sides, segments):
        def disturb(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if isinstance(context.module, Inputs) and context.method_name == "__call__":
                return result + moved[context.module.name]
            return result

        with nn.intercept_methods(disturb):
            logits = model.apply(variables, *sides.values(), **segments)[0]
        return logits @ np.random.default_rng(1).normal(size=logits.shape[-1]).astype(np.float32)

    return jit(jax.jacrev(outputs))


def dependencies(config, sides, **segments):
    """Which inputs each output position depends on: for each of the model's sides a bool array (outputs, inputs)."""
    sides, segments = ({name: jnp.array([row]) for name, row in rows.items()} for rows in (sides, segments))
    zeros = {f"{side}_inputs": jnp.zeros((*ids.shape, config.d_model)) for side, ids in sides.items()}
    derivatives = jacobian(config)(zeros, sides, segments)
    return [np.abs(derivatives[name]).max(axis=(-3, -1)) > 0 for name in zeros]


def picture(text):
    """The bool array that lines of 0 and 1 draw: a row for each output, a column for each input."""
    return np.array([[int(cell) for cell in line] for line in text.split()], dtype=bool)


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_no_logit_depends_on_a_later_target_or_on_padding_and_each_on_all_the_rest(position):
    config, source = config_of("encoder_decoder", position, kind=1), [5, 6, 7, 8, 9, 2, 0]
    by_source, by_target = dependencies(config, {"source": source, "target": [1, 13, 14, 15, 16]})
    np.testing.assert_array_equal(by_target, np.tril(np.ones((5, 5), bool)))
    np.testing.assert_array_equal(by_source, picture("1111110 " * 5))
    _, of_short = dependencies(config, {"source": source, "target": [1, 11, 12, 0, 0]})
    np.testing.assert_array_equal(of_short[:3], np.tril(np.ones((5, 5), bool))[:3])


def test_no_logit_of_a_packed_pair_depends_on_another_pair_nor_on_what_is_beyond_the_window():
    config = config_of("encoder_decoder", "rotary", kind=2)
    assert config.attention_window == 2
    segments = {"source_segment_BS": [1, 1, 2, 2, 2, 0], "target_segment_BT": [1, 1, 1, 1, 2, 2]}
    pairs = {"source": [5, 2, 6, 7, 2, 0], "target": [1, 8, 9, 7, 1, 10]}
    by_source, by_target = dependencies(config, pairs, **segments)
    np.testing.assert_array_equal(by_target, picture("100000 110000 111000 011100 000010 000011"))
    np.testing.assert_array_equal(by_source, picture("110000 " * 4 + "001110 " * 2))


@pytest.mark.parametrize("position", runs.SCHEMES)
def test_no_logit_of_a_language_model_depends_on_a_later_token_or_on_another_text_of_its_row(position):
    config = config_of("decoder_lm", position, kind=1)
    (by_target,) = dependencies(config, {"target": [1, 5, 6, 1, 7, 8, 0]}, segment_BT=[1, 1, 1, 2, 2, 2, 0])
    drawn = "1000000 1100000 1110000 0001000 0001100 0001110"  # the last token is padding: its logits are ignored
    np.testing.assert_array_equal(by_target[:6], picture(drawn))


# The classifier.


CLASSIFIER = dataclasses.replace(CONFIG, architecture="encoder_classifier")
SOURCE = np.array([[5, 6, 7, 8, 9, 2, 0], [5, 6, 2, 0, 0, 0, 0]])


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_text_is_classified_by_the_mean_of_its_vectors_or_by_its_first(pooling, use_bias):
    config = dataclasses.replace(CLASSIFIER, pooling=pooling, use_bias=use_bias)
    model, variables, apply = built(config)

    def encode(model, ids):
        positions = TokenPositions.of(ids)
        return model.encoder(model.source_inputs(ids, positions), positions)

    vectors = np.asarray(jit(lambda ids: model.apply(variables, ids, method=encode))(SOURCE), np.float64)
    pools = {"first": vectors[:, 0], "mean": np.stack([vectors[0, :6].mean(axis=0), vectors[1, :3].mean(axis=0)])}
    assert np.abs(pools["first"] - pools["mean"]).max() > 0.1
    classes = variables["params"]["classes"]
    logits = apply(variables, SOURCE)
    assert logits.shape == (2, 3) and logits.dtype == jnp.float32
    expected = pools[pooling] @ np.asarray(classes["kernel"]) + np.asarray(classes.get("bias", 0))
    assert ("bias" in classes) == use_bias
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
def test_the_amount_of_padding_changes_no_logit_of_a_text_and_a_row_of_padding_is_finite(pooling):
    _, variables, apply = built(dataclasses.replace(CLASSIFIER, pooling=pooling))
    padded = apply(variables, np.pad(SOURCE, ((0, 1), (0, 4))))
    np.testing.assert_allclose(padded[:2], apply(variables, SOURCE), atol=1e-5)
    np.testing.assert_allclose(padded[1], apply(variables, SOURCE[1:, :3])[0], atol=1e-5)
    assert np.isfinite(padded).all()


@pytest.mark.parametrize("pooling", CHOICES["model.pooling"])
def test_the_classes_of_a_text_depend_on_each_of_its_tokens_and_not_on_padding(pooling):
    (by_source,) = dependencies(dataclasses.replace(CLASSIFIER, pooling=pooling), {"source": SOURCE[0]})
    np.testing.assert_array_equal(by_source, picture("1111110")[0])


def test_a_classifier_needs_the_number_of_its_classes():
    with pytest.raises(ValueError, match=r"^ModelConfig\.num_classes: expected how many classes there are, got None"):
        build_model(dataclasses.replace(CLASSIFIER, num_classes=None))


def test_in_bfloat16_the_logits_of_a_classifier_stay_float32():
    logits = [built(dataclasses.replace(CLASSIFIER, dtype=dtype)) for dtype in CHOICES["model.dtype"]]
    exact, rounded = (apply(variables, SOURCE) for _, variables, apply in logits)
    assert rounded.dtype == jnp.float32 and (rounded != rounded.astype(jnp.bfloat16)).any()
    assert 0 < np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()
