"""The whole model: number of parameters, padding, attention weights, dtypes and dropout."""

import dataclasses
import functools
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import CHOICES, ModelConfig
from flaxformer_lite.model import positions
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.model.parameters import initial
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training.step import gradient_sums

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# 6 heads, so that groups can share keys; an even head size, for the pairs of rotary positions
CONFIG = ModelConfig(
    vocab_size=23,
    d_model=14,
    num_heads=6,
    d_head=4,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=19,
)
CONFIG = dataclasses.replace(CONFIG, backend="reference", num_classes=3)
BASE = ModelConfig(vocab_size=37000)
BIG = ModelConfig(vocab_size=37000, d_model=1024, num_heads=16, d_ff=4096)
SOURCE = jnp.array([[5, 6, 7, 8, 9, 2, 0], [5, 6, 2, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 11, 12, 0, 0], [1, 13, 14, 15, 16]])
SCHEMES, ARCHITECTURES = CHOICES["model.position"], CHOICES["model.architecture"]
CHANGES = [
    *(dict(position=position) for position in SCHEMES),
    *(dict(activation=activation) for activation in CHOICES["model.activation"]),
    *(dict(norm=norm, norm_placement="pre") for norm in CHOICES["model.norm"]),
    *(dict(norm=norm, use_bias=False) for norm in CHOICES["model.norm"]),
    dict(position="relative", relative_clip=5, relative_values=True),
    dict(num_kv_heads=1),
    dict(num_kv_heads=3, use_bias=False),
    dict(attention="additive", position="t5_bias"),
    dict(output_bias=True, tie_embeddings=False),
    dict(tie_embeddings=False, use_bias=False),
    dict(d_head=None, d_model=18),
    dict(num_encoder_layers=3, num_decoder_layers=2, position="relative"),
    dict(d_ff=29, activation="swiglu", use_bias=False),
]


def kind(position="sinusoidal", placement="post", tied=True, **more):
    return dataclasses.replace(
        CONFIG, position=position, norm_placement=placement, tie_embeddings=tied, **more
    )


@functools.cache
def init(config):
    """Returns a model, random parameters (no bias 0, no scale 1), and its jitted forward."""
    model, rng = build_model(config), np.random.default_rng(0)
    sample = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    # compilation without optimisation is faster
    options = {"xla_backend_optimization_level": 0}
    apply = jax.jit(
        model.apply, static_argnames=("deterministic", "mutable"), compiler_options=options
    )
    return model, {"params": jax.tree.map(sample, param_shapes(model))}, apply


@functools.cache
def number_of_parameters(config):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(build_model(config))))


def closed_form(c):
    """Returns the number of parameters by Figure 1: sublayers times layers, plus embeddings."""
    bias, d_head = int(c.use_bias), c.d_head or c.d_model // c.num_heads
    matrix = lambda rows, columns: rows * columns + bias * columns  # noqa: E731
    width, shared_width = c.num_heads * d_head, (c.num_kv_heads or c.num_heads) * d_head
    attention = (
        matrix(c.d_model, width) + 2 * matrix(c.d_model, shared_width) + matrix(width, c.d_model)
    )
    attention += width if c.attention == "additive" else 0
    tables = (1 + c.relative_values) * (c.position == "relative")
    offsets = tables * (2 * c.relative_clip + 1) * d_head
    inner = 2 if c.activation in ("reglu", "geglu", "swiglu") else 1
    feed_forward = inner * matrix(c.d_model, c.d_ff) + matrix(c.d_ff, c.d_model)
    norm = c.d_model * (1 + bias if c.norm == "layer_norm" else 1)
    sublayers = attention + offsets + norm + feed_forward + norm  # per layer
    stack = {"learned": c.max_length * c.d_model, "t5_bias": 32 * c.num_heads}.get(c.position, 0)
    stack += norm if c.norm_placement == "pre" else 0
    encoder = stack + c.num_encoder_layers * sublayers
    decoder = stack + c.num_decoder_layers * sublayers
    embedding, output = c.vocab_size * c.d_model, c.vocab_size if c.output_bias else 0
    if c.architecture == "encoder_classifier":
        return embedding + encoder + matrix(c.d_model, c.num_classes)
    if c.architecture == "decoder_lm":
        return embedding * (1 if c.tie_embeddings else 2) + decoder + output
    decoder += c.num_decoder_layers * (attention + norm)  # cross-attention
    return embedding * (1 if c.tie_embeddings else 3) + encoder + decoder + output


@pytest.mark.parametrize(
    ("config", "published"), [(BASE, 63_082_496), (BIG, 214_245_376)], ids=["base", "big"]
)
def test_the_models_of_the_paper_have_the_number_of_parameters_of_the_closed_form(
    config, published
):
    assert number_of_parameters(config) == closed_form(config) == published


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "changes", CHANGES, ids=lambda changes: "-".join(map(str, changes.values()))
)
def test_every_option_has_the_number_of_parameters_of_the_closed_form(architecture, changes):
    config = dataclasses.replace(CONFIG, architecture=architecture, **changes)
    assert number_of_parameters(config) == closed_form(config)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("norm", CHOICES["model.norm"])
def test_without_use_bias_the_model_has_no_bias(architecture, norm):
    for use_bias in (True, False):
        config = dataclasses.replace(
            CONFIG, architecture=architecture, norm=norm, use_bias=use_bias
        )
        paths = flax.traverse_util.flatten_dict(param_shapes(build_model(config)))
        names = {path[-1] for path in paths}
        assert names == {"embedding", "kernel", "scale"} | ({"bias"} if use_bias else set())


def test_tied_embeddings_save_two_matrices():
    untied = dataclasses.replace(BASE, tie_embeddings=False)
    assert number_of_parameters(untied) - number_of_parameters(BASE) == 2 * 37000 * 512


def test_a_model_without_a_vocabulary_size_is_an_error():
    with pytest.raises(
        ValueError, match=r"^ModelConfig\.vocab_size: expected the number of token ids, got None"
    ):
        build_model(ModelConfig())


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (dict(num_heads=7), "num_heads"),
        (dict(d_model=511, d_head=64), "d_model"),
        (dict(num_kv_heads=3), "num_kv_heads"),
        (dict(position="rotary", d_head=63), "d_head"),
    ],
)
def test_fields_that_contradict_each_other_are_an_error(wrong, field):
    with pytest.raises(ValueError, match=rf"^config\.model\.{field}: "):
        build_model(ModelConfig(vocab_size=37000, **wrong))


def embedded(config, side):
    """Returns the input of a stack for SOURCE, and the scaled embeddings."""
    model, variables, _ = init(config)
    inputs = lambda model, ids: getattr(model, f"{side}_inputs")(ids, TokenPositions.of(ids))  # noqa: E731
    name = "target_embedding" if config.tie_embeddings or side == "target" else "source_embedding"
    table = np.asarray(variables["params"][name]["embedding"])
    vectors = np.asarray(model.apply(variables, SOURCE, method=inputs))
    return vectors, math.sqrt(14) * table[SOURCE]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_multiplied_by_the_root_of_the_width_before_positions_are_added(side, tied):
    vectors, scaled = embedded(kind(tied=tied), side)
    encoding = np.asarray(positions.sinusoidal(jnp.arange(7), 14))
    np.testing.assert_allclose(vectors, scaled + encoding[None], atol=1e-5)


@pytest.mark.parametrize("side", ["source", "target"])
def test_source_and_target_have_separate_tables_of_learned_positions(side):
    vectors, scaled = embedded(kind("learned"), side)
    params = init(kind("learned"))[1]["params"]
    table = params[f"{side}_inputs"]["position_vectors"]["learned"]["embedding"]
    np.testing.assert_allclose(vectors, scaled + np.asarray(table)[None, :7], atol=1e-5)


@pytest.mark.parametrize(("stack", "bidirectional"), [("encoder", True), ("decoder", False)])
def test_the_t5_bias_is_bidirectional_in_the_encoder_and_one_sided_in_the_decoder(
    stack, bidirectional
):
    model, variables, _ = init(kind("t5_bias"))
    table = variables["params"][stack]["position_bias"]["embedding"]
    position_1L = jnp.arange(13)[None]
    bias_of = lambda model: getattr(model, stack).position_bias()(None, position_1L, position_1L)  # noqa: E731
    bias = functools.partial(positions.t5_bias, table, position_1L, position_1L)
    one, other = bias(bidirectional=bidirectional), bias(bidirectional=not bidirectional)
    assert np.abs(one - other).max() > 0.1
    np.testing.assert_array_equal(model.apply(variables, method=bias_of), one)


@pytest.mark.parametrize(
    ("position", "placement", "tied"),
    [
        ("sinusoidal", "post", True),
        pytest.param("learned", "pre", False, marks=pytest.mark.slow),
    ],
)
def test_logits_do_not_depend_on_the_amount_of_padding(position, placement, tied):
    _, variables, apply = init(kind(position, placement, tied))
    padded = apply(variables, jnp.pad(SOURCE, ((0, 0), (0, 6))), jnp.pad(TARGET, ((0, 0), (0, 8))))
    some, none = apply(variables, SOURCE, TARGET), apply(variables, SOURCE[1:, :3], TARGET[1:])
    np.testing.assert_allclose(padded[0, :3], some[0, :3], atol=2e-5)
    np.testing.assert_allclose(padded[1, :5], some[1], atol=2e-5)
    np.testing.assert_allclose(padded[1, :5], none[0], atol=2e-5)


def test_a_row_of_padding_has_finite_logits_and_does_not_change_other_rows():
    _, variables, apply = init(CONFIG)
    with_empty = apply(variables, SOURCE.at[1].set(0), TARGET.at[1].set(0))
    assert np.isfinite(with_empty).all()
    np.testing.assert_array_equal(with_empty[0], apply(variables, SOURCE, TARGET)[0])


def test_the_attention_weights_of_every_layer_are_returned_on_request():
    _, variables, apply = init(dataclasses.replace(CONFIG, num_decoder_layers=2))
    plain = apply(variables, SOURCE, TARGET)
    assert isinstance(plain, jax.Array)
    logits, extra = apply(variables, SOURCE, TARGET, mutable=("intermediates",))
    np.testing.assert_allclose(logits, plain, atol=1e-5)
    weights = flax.traverse_util.flatten_dict(extra["intermediates"])
    assert {path[-1] for path in weights} == {"attention_weights"}
    shapes = {("encoder", "layers_0", "self_attention"): (2, 6, 7, 7)}
    shapes |= {("decoder", f"layers_{n}", "self_attention"): (2, 6, 5, 5) for n in range(2)}
    shapes |= {("decoder", f"layers_{n}", "cross_attention"): (2, 6, 5, 7) for n in range(2)}
    assert {path[:-1]: leaf.shape for path, (leaf,) in weights.items()} == shapes
    for (leaf,) in weights.values():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf.sum(axis=-1), np.ones(leaf.shape[:-1]), rtol=1e-5)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_bfloat16_parameters_logits_and_softmax_stay_float32(tied):
    config = kind(tied=tied)
    model, variables, apply = init(dataclasses.replace(config, dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(param_shapes(model))} == {jnp.dtype("float32")}
    encode = functools.partial(model.apply, method="encode")
    assert jax.eval_shape(encode, variables, SOURCE).dtype == jnp.bfloat16
    logits, extra = apply(variables, SOURCE, TARGET, mutable=("intermediates",))
    assert {leaf.dtype for leaf in jax.tree.leaves(extra)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    # the logits are not bfloat16 numbers cast to float32
    assert (logits != logits.astype(jnp.bfloat16)).any()
    exact = init(config)[2](variables, SOURCE, TARGET)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "position",
    [
        "learned",
        pytest.param("relative", marks=pytest.mark.slow),
        pytest.param("t5_bias", marks=pytest.mark.slow),
    ],
)
def test_in_bfloat16_the_gradient_of_every_parameter_is_close_to_that_in_float32(position):
    # Thousands of tokens, a few of them frequent: a sum that lost terms would be off by more than
    # the rounding.
    sizes = dict(vocab_size=300, d_model=32, num_heads=4, d_ff=64, max_length=48)
    config = ModelConfig(num_encoder_layers=1, num_decoder_layers=1, dropout=0.0, **sizes)
    config = dataclasses.replace(config, position=position, activation="silu", output_bias=True)
    ids = np.minimum(np.random.default_rng(0).zipf(1.3, (2, 128, 48)) + 3, 299).astype(np.int32)
    batch = {"source": ids[0], "target": ids[1], "row": np.arange(128, dtype=np.int32)}
    params = jax.jit(lambda key: initial(build_model(config), key))(jax.random.key(0))

    def gradients(dtype):
        model = build_model(dataclasses.replace(config, dtype=dtype))
        sums, _ = jax.jit(functools.partial(gradient_sums, batch=batch, model=model))(params)
        return flax.traverse_util.flatten_dict(sums, sep="/")

    exact, rounded = gradients("float32"), gradients("bfloat16")
    error = {
        name: np.linalg.norm(rounded[name] - exact[name]) / np.linalg.norm(exact[name])
        for name in exact
        if not name.endswith("key/bias")  # its gradient is 0: it cancels out of the softmax
    }
    assert max(error.values()) < 0.03, error


def test_dropout_is_off_by_default_and_depends_on_the_row():
    _, variables, apply = init(dataclasses.replace(CONFIG, dropout=0.3, attention_dropout=0.3))
    mode = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
    dropped = apply(variables, SOURCE, TARGET, row_B=jnp.array([0, 1]), **mode)
    assert np.abs(dropped - apply(variables, SOURCE, TARGET)).max() > 0.1
    swapped = apply(variables, SOURCE[::-1], TARGET[::-1], row_B=jnp.array([1, 0]), **mode)
    np.testing.assert_allclose(swapped[::-1], dropped, atol=1e-5)
    other_rows = apply(variables, SOURCE, TARGET, row_B=jnp.array([1, 0]), **mode)
    assert np.abs(other_rows - dropped).max() > 0.1
