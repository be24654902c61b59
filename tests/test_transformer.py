"""The whole model: its size in closed form, causality and padding by gradients, decoding with a cache."""

import dataclasses
import functools
import itertools
import math

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model import transformer
from flaxformer_lite.model.positions import sinusoidal
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training.step import param_shapes

CONFIG = ModelConfig(
    vocab_size=23, d_model=14, num_heads=3, d_head=5, d_ff=11, num_encoder_layers=1, num_decoder_layers=1, max_length=19
)
BASE = ModelConfig(vocab_size=37000)
BIG = ModelConfig(vocab_size=37000, d_model=1024, num_heads=16, d_ff=4096)
SOURCE = jnp.array([[5, 6, 7, 8, 9, 2, 0], [5, 6, 2, 0, 0, 0, 0]])
TARGET = jnp.array([[1, 11, 12, 0, 0], [1, 13, 14, 15, 16]])
STILL = {"deterministic": True}
KINDS = list(itertools.product(("sinusoidal", "learned"), ("post", "pre"), (True, False)))


def kind(position, placement, tied, **more):
    return dataclasses.replace(CONFIG, position=position, norm_placement=placement, tie_embeddings=tied, **more)


@functools.cache
def init(config):
    """A model, parameters that are all drawn, so that no bias is zero and no scale one, and its jitted forward."""
    model, rng = build_model(config), np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    apply = jax.jit(model.apply, static_argnames=("deterministic", "mutable", "method"))
    return model, {"params": jax.tree.map(draw, param_shapes(model))}, apply


def number_of_parameters(config):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(build_model(config))))


def closed_form(c):
    """Parameters by Figure 1: matrices and biases of each sublayer, times layers, plus the embeddings."""
    width = c.num_heads * (c.d_head or c.d_model // c.num_heads)
    projection_in, projection_out = c.d_model * width + width, width * c.d_model + c.d_model
    attention = 3 * projection_in + projection_out
    feed_forward = c.d_model * c.d_ff + c.d_ff + c.d_ff * c.d_model + c.d_model
    norm = 2 * c.d_model
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    matrices = 1 if c.tie_embeddings else 3  # source, target and output
    tables = 2 * c.max_length * c.d_model if c.position == "learned" else 0
    last_norms = 2 * norm if c.norm_placement == "pre" else 0
    layers = c.num_encoder_layers * encoder_layer + c.num_decoder_layers * decoder_layer
    return layers + matrices * c.vocab_size * c.d_model + tables + last_norms


@pytest.mark.parametrize(("config", "published"), [(BASE, 63_082_496), (BIG, 214_245_376)], ids=["base", "big"])
def test_the_models_of_the_paper_have_the_parameters_that_the_closed_form_gives(config, published):
    assert number_of_parameters(config) == closed_form(config) == published


@pytest.mark.parametrize(("position", "placement", "tied"), KINDS)
def test_every_kind_of_model_has_the_parameters_that_the_closed_form_gives(position, placement, tied):
    config = kind(position, placement, tied)
    assert number_of_parameters(config) == closed_form(config)


@pytest.mark.parametrize(
    "sizes", [dict(d_head=None, d_model=6), dict(num_encoder_layers=3, num_decoder_layers=2), dict(d_ff=29), {}]
)
def test_models_of_other_sizes_have_the_parameters_that_the_closed_form_gives(sizes):
    config = dataclasses.replace(CONFIG, **sizes)
    assert number_of_parameters(config) == closed_form(config)
    assert not sizes or closed_form(config) != closed_form(CONFIG)


def test_tying_saves_two_matrices_of_embeddings():
    untied = dataclasses.replace(BASE, tie_embeddings=False)
    assert number_of_parameters(untied) - number_of_parameters(BASE) == 2 * 37000 * 512


def test_a_model_needs_the_size_of_its_vocabulary():
    with pytest.raises(ValueError, match=r"^ModelConfig\.vocab_size: expected the number of token ids, got None"):
        build_model(ModelConfig())


@pytest.mark.parametrize(
    ("wrong", "field"), [(dict(num_heads=7), "num_heads"), (dict(d_model=511, d_head=64), "d_model")]
)
def test_a_model_whose_fields_contradict_each_other_is_not_built(wrong, field):
    with pytest.raises(ValueError, match=rf"^config\.model\.{field}: "):
        build_model(ModelConfig(vocab_size=37000, **wrong))


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_multiplied_by_the_root_of_the_width_before_positions_are_added(side, tied):
    model, variables, _ = init(kind("sinusoidal", "post", tied))
    params = variables["params"]
    table = params["target_embedding" if tied or side == "target" else "source_embedding"]["embedding"]
    vectors = model.apply(variables, SOURCE, method=lambda model, ids: getattr(model, f"{side}_inputs")(ids, **STILL))
    expected = math.sqrt(14) * np.asarray(table)[SOURCE] + np.asarray(sinusoidal(jnp.arange(7), 14))[None]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.parametrize("side", ["source", "target"])
def test_learned_positions_of_source_and_target_are_added_from_tables_of_their_own(side):
    model, variables, _ = init(kind("learned", "post", True))
    params = variables["params"]
    table = np.asarray(params[f"{side}_inputs"]["learned_positions"]["embedding"])
    vectors = model.apply(variables, SOURCE, method=lambda model, ids: getattr(model, f"{side}_inputs")(ids, **STILL))
    expected = math.sqrt(14) * np.asarray(params["target_embedding"]["embedding"])[SOURCE] + table[None, :7]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_embeddings_start_with_unit_variance_after_their_scaling():
    table = transformer.token_embedding(dataclasses.replace(CONFIG, vocab_size=1009))
    params = table.init(jax.random.key(3), SOURCE)["params"]
    scaled = np.asarray(params["embedding"]) * math.sqrt(14)
    assert abs(scaled.std() - 1) < 4 / math.sqrt(2 * scaled.size)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_products_with_the_embeddings_or_untied_with_a_matrix_of_their_own(tied):
    model, variables, _ = init(kind("sinusoidal", "post", tied))
    params = variables["params"]
    x = np.random.default_rng(0).normal(size=(2, 5, 14)).astype(np.float32)
    matrix_DV = params["target_embedding"]["embedding"].T if tied else params["output"]["kernel"]
    np.testing.assert_allclose(model.apply(variables, x, method="logits"), x @ matrix_DV, atol=1e-5)


def dependencies(config, source, target):
    """Which inputs each output position depends on: bool (T, S) of the source and (T, T) of the target.

    By the Jacobian of a random mixture of each position's logits with respect to a disturbance of its embedded inputs.
    """
    model, variables, _ = init(config)
    mixture_V = np.random.default_rng(1).normal(size=config.vocab_size).astype(np.float32)

    def outputs(moved_source, moved_target):
        moved = {"source_inputs": moved_source, "target_inputs": moved_target}

        def disturb(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if isinstance(context.module, transformer.Inputs) and context.method_name == "__call__":
                return result + moved[context.module.name]
            return result

        with nn.intercept_methods(disturb):
            return model.apply(variables, source[None], target[None])[0] @ mixture_V

    zeros = [jnp.zeros((1, len(ids), config.d_model)) for ids in (source, target)]
    jacobians = jax.jit(jax.jacrev(outputs, argnums=(0, 1)))(*zeros)
    return [np.abs(jacobian).max(axis=(1, 3)) > 0 for jacobian in jacobians]


@pytest.mark.parametrize(("position", "placement", "tied"), [KINDS[0], KINDS[6]])
def test_no_logit_depends_on_a_later_target_or_on_padding_and_each_on_all_the_rest(position, placement, tied):
    config = kind(position, placement, tied)
    by_source, by_target = dependencies(config, SOURCE[0], TARGET[1])
    np.testing.assert_array_equal(by_target, np.tril(np.ones((5, 5), bool)))
    np.testing.assert_array_equal(by_source, np.broadcast_to(np.arange(7) < 6, (5, 7)))  # six tokens, one padding
    _, of_short = dependencies(config, SOURCE[0], TARGET[0])
    np.testing.assert_array_equal(of_short[:3], np.tril(np.ones((5, 5), bool))[:3])


@pytest.mark.parametrize(("position", "placement", "tied"), [KINDS[0], KINDS[7]])
def test_the_amount_of_padding_on_either_side_changes_no_logit_of_a_token(position, placement, tied):
    _, variables, apply = init(kind(position, placement, tied))
    padded = apply(variables, jnp.pad(SOURCE, ((0, 0), (0, 6))), jnp.pad(TARGET, ((0, 0), (0, 8))))
    some, none = apply(variables, SOURCE, TARGET), apply(variables, SOURCE[1:, :3], TARGET[1:])
    np.testing.assert_allclose(padded[0, :3], some[0, :3], atol=2e-5)
    np.testing.assert_allclose(padded[1, :5], some[1], atol=2e-5)
    np.testing.assert_allclose(padded[1, :5], none[0], atol=2e-5)


def test_a_row_that_is_all_padding_gives_finite_logits_and_changes_no_other_row():
    _, variables, apply = init(CONFIG)
    with_empty = apply(variables, SOURCE.at[1].set(0), TARGET.at[1].set(0))
    assert np.isfinite(with_empty).all()
    np.testing.assert_array_equal(with_empty[0], apply(variables, SOURCE, TARGET)[0])


@pytest.mark.parametrize(("position", "placement", "tied"), KINDS)
def test_decoding_step_by_step_with_a_cache_gives_the_logits_of_the_full_forward(position, placement, tied):
    layers = 2 if position == "learned" else 1
    model, variables, _ = init(kind(position, placement, tied, num_decoder_layers=layers))
    target = jnp.array([[1, 11, 12, 13, 14], [1, 15, 16, 17, 18]])

    @jax.jit
    def both_ways(variables):
        memory = model.apply(variables, SOURCE, method="encode")
        cache = model.apply(variables, memory, 11, method="start_cache")

        def step(cache, token_and_index):
            token_B, index = token_and_index
            logits_BV, cache = model.apply(variables, token_B, cache, index, SOURCE, method="decode_step")
            return cache, logits_BV

        cache, logits_TBV = jax.lax.scan(step, cache, (target.T, jnp.arange(5)))
        return model.apply(variables, target, memory, SOURCE, method="decode"), logits_TBV.swapaxes(0, 1), cache

    full, stepwise, cache = both_ways(variables)
    np.testing.assert_allclose(stepwise, full, atol=2e-5)
    assert {leaf.shape for leaf in jax.tree.leaves(cache.self_attention)} == {(2, 11, 3, 5)}
    assert {leaf.shape for leaf in jax.tree.leaves(cache.cross_attention)} == {(2, 7, 3, 5)}
    assert all((leaf[:, :5] != 0).all() and (leaf[:, 5:] == 0).all() for leaf in jax.tree.leaves(cache.self_attention))


def test_the_attention_weights_of_every_layer_come_out_on_request():
    _, variables, apply = init(dataclasses.replace(CONFIG, num_encoder_layers=2, num_decoder_layers=3))
    plain = apply(variables, SOURCE, TARGET)
    assert isinstance(plain, jax.Array)
    logits, extra = apply(variables, SOURCE, TARGET, mutable=("intermediates",))
    np.testing.assert_allclose(logits, plain, atol=1e-5)
    weights = flax.traverse_util.flatten_dict(extra["intermediates"])
    assert {path[-1] for path in weights} == {"attention_weights"}
    shapes = {("encoder", f"layers_{n}", "self_attention"): (2, 3, 7, 7) for n in range(2)}
    shapes |= {("decoder", f"layers_{n}", "self_attention"): (2, 3, 5, 5) for n in range(3)}
    shapes |= {("decoder", f"layers_{n}", "cross_attention"): (2, 3, 5, 7) for n in range(3)}
    assert {path[:-1]: leaf.shape for path, (leaf,) in weights.items()} == shapes
    for (leaf,) in weights.values():
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf.sum(axis=-1), np.ones(leaf.shape[:-1]), rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_in_bfloat16_parameters_logits_and_softmax_stay_float32(tied):
    config = kind("sinusoidal", "post", tied)
    model, variables, apply = init(dataclasses.replace(config, dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(param_shapes(model))} == {jnp.dtype("float32")}
    assert jax.eval_shape(functools.partial(model.apply, method="encode"), variables, SOURCE).dtype == jnp.bfloat16
    logits, extra = apply(variables, SOURCE, TARGET, mutable=("intermediates",))
    assert {leaf.dtype for leaf in jax.tree.leaves(extra)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    assert (logits != logits.astype(jnp.bfloat16)).any()  # not computed in bfloat16 and widened afterwards
    exact = init(config)[2](variables, SOURCE, TARGET)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.05


def test_dropout_is_off_unless_asked_for_and_then_belongs_to_the_row():
    _, variables, apply = init(dataclasses.replace(CONFIG, dropout=0.3, attention_dropout=0.3))
    mode = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
    dropped = apply(variables, SOURCE, TARGET, row_B=jnp.array([0, 1]), **mode)
    assert np.abs(dropped - apply(variables, SOURCE, TARGET)).max() > 0.1
    swapped = apply(variables, SOURCE[::-1], TARGET[::-1], row_B=jnp.array([1, 0]), **mode)
    np.testing.assert_allclose(swapped[::-1], dropped, atol=1e-5)
    other_rows = apply(variables, SOURCE, TARGET, row_B=jnp.array([1, 0]), **mode)
    assert np.abs(other_rows - dropped).max() > 0.1
