"""The closed form of the FLOPs against the matrix products of the traced model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import Config, ModelConfig, TrainConfig
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import flops

CONFIG = ModelConfig(
    vocab_size=23,
    d_model=14,
    num_heads=6,
    d_head=5,
    d_ff=11,
    num_encoder_layers=2,
    num_decoder_layers=1,
    max_length=19,
)
CHANGES = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "two vocabularies": {"target_vocab_size": 31},
    "derived head size": {"d_model": 6, "d_head": None},
    "more decoder layers": {"num_decoder_layers": 3, "norm_placement": "pre"},
    "grouped heads": {"num_kv_heads": 2},
    "one head of keys": {"num_kv_heads": 1},
    "gated": {"activation": "swiglu"},
    "other activation": {
        "activation": "gelu",
        "norm": "rms_norm",
        "use_bias": False,
        "output_bias": True,
    },
    "classifier": {"architecture": "encoder_classifier", "num_classes": 13},
    "classifier by its first token": {
        "architecture": "encoder_classifier",
        "num_classes": 3,
        "pooling": "first",
    },
    "masked decoder": {"decoder": "masked"},
    "language model": {"architecture": "decoder_lm"},
    "gated language model with grouped heads": {
        "architecture": "decoder_lm",
        "activation": "geglu",
        "num_kv_heads": 3,
        "num_decoder_layers": 2,
    },
}
CONFIGS = {name: dataclasses.replace(CONFIG, **changes) for name, changes in CHANGES.items()}
# These have the matrix products of the base model.
FREE = {
    # the product with a query becomes one with a vector
    "additive attention": {"attention": "additive"},
    "a window": {"attention_window": 3},
    "rotary positions": {"position": "rotary", "d_head": 8},
    "distances as a bias": {"position": "alibi"},
    "learned positions": {"position": "learned"},
}


def matmul_flops(jaxpr):
    """Returns 2 for each multiply-add of the dot products in `jaxpr` and in its inner jaxprs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += (
                2
                * math.prod(equation.outvars[0].aval.shape)
                * math.prod(left[axis] for axis in contracted)
            )
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            total += matmul_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def forward(config, rows, source_length, target_length):
    """Returns the forward pass as a function of the parameters, and the parameter shapes."""
    model = build_model(config)
    source, target = jnp.ones((rows, source_length), int), jnp.ones((rows, target_length), int)
    inputs = {
        "encoder_decoder": (source, target),
        "encoder_classifier": (source,),
        "decoder_lm": (target,),
    }
    arrays = inputs[config.architecture]
    return lambda params: model.apply({"params": params}, *arrays).sum(), param_shapes(model)


def by_hand(c, source_length, target_length):
    """Returns the FLOPs, counted matrix by matrix: 2 x rows x columns x inner dimension."""
    d_head = c.d_head or c.d_model // c.num_heads
    groups = c.num_kv_heads or c.num_heads
    matrices = {"swiglu": 3, "geglu": 3}.get(c.activation, 2)

    def attention(queries, keys):
        query = output = queries * (c.d_model * c.num_heads * d_head)
        key = value = keys * (c.d_model * groups * d_head)
        scores = weighted_sum = c.num_heads * queries * keys * d_head
        return query + output + key + value + scores + weighted_sum

    def feed_forward(length):
        return matrices * length * c.d_model * c.d_ff

    lengths = c.d_model * c.max_length if c.decoder == "masked" else 0
    encoded = source_length + (1 if lengths else 0)
    encoder = c.num_encoder_layers * (attention(encoded, encoded) + feed_forward(encoded))
    decoder = c.num_decoder_layers * (
        attention(target_length, target_length) + feed_forward(target_length)
    )
    cross = c.num_decoder_layers * attention(target_length, source_length)
    logits = target_length * c.d_model * (c.target_vocab_size or c.vocab_size)
    total = {
        "encoder_decoder": encoder + decoder + cross + logits + lengths,
        "encoder_classifier": encoder + c.d_model * (c.num_classes or 0),
        "decoder_lm": decoder + logits,
    }
    return 2 * total[c.architecture]


def pooling(config, source_length):
    """Returns the FLOPs of the mean over tokens, a product with weights that is not counted."""
    mean = config.architecture == "encoder_classifier" and config.pooling == "mean"
    return 2 * source_length * config.d_model if mean else 0


def test_the_matrix_products_of_inner_jaxprs_are_counted():
    product = lambda x, y: x @ y  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda x, y: jax.jit(product)(x, y) + product(x, y))(
        jnp.ones((3, 5)), jnp.ones((5, 7))
    )
    assert matmul_flops(jaxpr.jaxpr) == 2 * (2 * 3 * 5 * 7)


SLOW = [pytest.mark.slow]
EVERY_CONFIG = [
    pytest.param(name, *lengths, marks=[] if lengths == (7, 13) or name == "tied" else SLOW)
    for name in CONFIGS
    for lengths in [(7, 13), (17, 5), (1, 1)]
]


@pytest.mark.parametrize(("name", "source_length", "target_length"), EVERY_CONFIG)
def test_the_forward_pass_has_the_matrix_products_of_the_closed_form(
    name, source_length, target_length
):
    config = CONFIGS[name]
    function, params = forward(config, 1, source_length, target_length)
    traced = matmul_flops(jax.make_jaxpr(function)(params).jaxpr)
    counted = flops.forward(config, source_length, target_length)
    assert (
        counted
        == by_hand(config, source_length, target_length)
        == traced - pooling(config, source_length)
        > 0
    )


def test_models_with_other_matrix_products_have_other_flops():
    costs = {
        name: flops.forward(config, 7, 13) for name, config in CONFIGS.items() if name != "untied"
    }
    assert costs.pop("other activation") == costs["tied"] == flops.forward(CONFIGS["untied"], 7, 13)
    assert len(set(costs.values())) == len(costs)
    assert costs["one head of keys"] < costs["grouped heads"] < costs["tied"] < costs["gated"]


@pytest.mark.parametrize("name", FREE)
def test_positions_windows_and_additive_attention_have_no_matrix_products(name):
    config = dataclasses.replace(CONFIG, **FREE[name])
    function, params = forward(config, 1, 7, 13)
    assert flops.forward(config, 7, 13) == matmul_flops(jax.make_jaxpr(function)(params).jaxpr)


@pytest.mark.parametrize(
    "name", [pytest.param("tied", marks=SLOW), "classifier by its first token", "language model"]
)
def test_a_training_step_has_3_times_the_matrix_products_of_the_forward_pass_for_every_row(name):
    config = CONFIGS[name]
    function, params = forward(config, 3, 7, 7)
    traced = matmul_flops(jax.make_jaxpr(jax.value_and_grad(function))(params).jaxpr)
    assert (
        flops.train_step(Config(model=config), 3, 7)
        == 3 * 3 * flops.forward(config, 7, 7)
        == traced
    )


def test_a_step_with_r_drop_has_2_times_the_flops():
    once, twice = (
        Config(model=CONFIGS["tied"]),
        Config(model=CONFIGS["tied"], train=TrainConfig(r_drop=5.0)),
    )
    assert flops.train_step(twice, 3, 7) == 2 * flops.train_step(once, 3, 7)
    lengths = np.array([7, 3]), np.array([2, 11])
    assert flops.train_examples(twice, *lengths) == 2 * flops.train_examples(once, *lengths)


@pytest.mark.parametrize("name", ["tied", "classifier by its first token", "language model"])
def test_the_flops_of_examples_are_the_sum_over_their_own_lengths(name):
    config, source_N, target_N = CONFIGS[name], np.array([7, 3, 5]), np.array([2, 11, 5])
    each = [flops.forward(config, int(s), int(t)) for s, t in zip(source_N, target_N, strict=True)]
    assert flops.train_examples(Config(model=config), source_N, target_N) == 3 * sum(each) > 0


def test_the_base_model_has_about_2_flops_a_parameter_and_token():
    # Embeddings have FLOPs only as logits. Attention scores are small at this length.
    config = ModelConfig(vocab_size=37000)
    parameters = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(build_model(config)))
    )
    assert flops.forward(config, 25, 25) / (2 * 25 * parameters) == pytest.approx(1, abs=0.02)


def test_decoding_encodes_once_and_decodes_every_hypothesis():
    """By hand: 1 layer each, width 4, 1 head, inner width 6, vocabulary 10; lengths 7 and 11."""
    sizes = {"num_heads": 1, "d_head": None, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = dataclasses.replace(CONFIG, vocab_size=10, d_model=4, d_ff=6, **sizes)
    # projections, scores and weighted sum, feed-forward
    encoder = 4 * 7 * 4 * 4 + 2 * 7 * 7 * 4 + 2 * 7 * 4 * 6
    keys = 2 * 7 * 4 * 4  # keys and values of the source, once for all hypotheses
    decoder = 4 * 11 * 4 * 4 + 2 * 11 * 11 * 4 + 2 * 11 * 4 * 6  # self-attention and feed-forward
    decoder += 2 * 11 * 4 * 4 + 2 * 11 * 7 * 4 + 11 * 4 * 10  # cross-attention and logits
    for changes, times in (
        ({"method": "greedy"}, 1),
        ({"method": "beam", "beam_size": 5}, 5),
        ({"method": "diverse_beam", "beam_size": 6, "beam_groups": 3}, 6),
        ({"method": "stochastic_beam", "beam_size": 5}, 5),
        ({"method": "mask_predict", "length_candidates": 3, "iterations": 4}, 12),
    ):
        decode = dataclasses.replace(Config().decode, **changes)
        config = Config(model=model, decode=decode)
        assert flops.decoding(config, 13, 7, 11) == 2 * 13 * (encoder + keys + times * decoder)
