"""The closed form against every matrix multiplication that JAX traces."""

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
    vocab_size=23, d_model=14, num_heads=6, d_head=5, d_ff=11, num_encoder_layers=2, num_decoder_layers=1, max_length=19
)
CHANGES = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "derived head size": {"d_model": 6, "d_head": None},
    "more decoder layers": {"num_decoder_layers": 3, "norm_placement": "pre"},
    "grouped heads": {"num_kv_heads": 2},
    "one head of keys": {"num_kv_heads": 1},
    "gated": {"activation": "swiglu"},
    "other activation": {"activation": "gelu", "norm": "rms_norm", "use_bias": False, "output_bias": True},
    "classifier": {"architecture": "encoder_classifier", "num_classes": 13},
    "classifier by its first token": {"architecture": "encoder_classifier", "num_classes": 3, "pooling": "first"},
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
# These save no matrix product, and add none.
FREE = {
    "additive attention": {"attention": "additive"},  # a product with a vector in place of one with a query
    "a window": {"attention_window": 3},
    "rotary positions": {"position": "rotary", "d_head": 8},
    "distances as a bias": {"position": "alibi"},
    "learned positions": {"position": "learned"},
}


def matmul_flops(jaxpr):
    """Two for each multiply-add of the dot products in `jaxpr` and in what it calls."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            total += matmul_flops(inner) if hasattr(inner, "eqns") else 0
    return total


def forward(config, rows, source_length, target_length):
    """A function of the parameters, and their shapes."""
    model = build_model(config)
    source, target = jnp.ones((rows, source_length), int), jnp.ones((rows, target_length), int)
    inputs = {"encoder_decoder": (source, target), "encoder_classifier": (source,), "decoder_lm": (target,)}
    arrays = inputs[config.architecture]
    return lambda params: model.apply({"params": params}, *arrays).sum(), param_shapes(model)


def by_hand(c, source_length, target_length):
    """Matrix by matrix, as rows x columns x what is summed over, times two."""
    d_head = c.d_head or c.d_model // c.num_heads
    groups = c.num_kv_heads or c.num_heads
    matrices = {"swiglu": 3, "geglu": 3}.get(c.activation, 2)

    def attention(queries, keys):
        own = queries * (c.d_model * c.num_heads * d_head)  # queries; and as much again for the output
        shared = keys * (c.d_model * groups * d_head)  # keys; and as much again for the values
        scores = c.num_heads * queries * keys * d_head  # and as much again for the values mixed
        return 2 * own + 2 * shared + 2 * scores

    def feed_forward(length):
        return matrices * length * c.d_model * c.d_ff

    lengths = c.d_model * c.max_length if c.decoder == "masked" else 0
    encoded = source_length + (1 if lengths else 0)
    encoder = c.num_encoder_layers * (attention(encoded, encoded) + feed_forward(encoded))
    decoder = c.num_decoder_layers * (attention(target_length, target_length) + feed_forward(target_length))
    cross = c.num_decoder_layers * attention(target_length, source_length)
    logits = target_length * c.d_model * c.vocab_size
    total = {
        "encoder_decoder": encoder + decoder + cross + logits + lengths,
        "encoder_classifier": encoder + c.d_model * (c.num_classes or 0),
        "decoder_lm": decoder + logits,
    }
    return 2 * total[c.architecture]


def pooling(config, source_length):
    """A mean over tokens is a product with their weights, which is not counted: as little as a norm."""
    mean = config.architecture == "encoder_classifier" and config.pooling == "mean"
    return 2 * source_length * config.d_model if mean else 0


def test_matrix_products_are_counted_in_what_is_called_too():
    product = lambda x, y: x @ y  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda x, y: jax.jit(product)(x, y) + product(x, y))(jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert matmul_flops(jaxpr.jaxpr) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("source_length", "target_length"), [(7, 13), (17, 5), (1, 1)])
def test_the_forward_pass_has_the_matrix_products_of_the_closed_form(name, source_length, target_length):
    config = CONFIGS[name]
    function, params = forward(config, 1, source_length, target_length)
    traced = matmul_flops(jax.make_jaxpr(function)(params).jaxpr)
    counted = flops.forward(config, source_length, target_length)
    assert counted == by_hand(config, source_length, target_length) == traced - pooling(config, source_length) > 0


def test_models_that_differ_in_their_products_cost_different_amounts():
    costs = {name: flops.forward(config, 7, 13) for name, config in CONFIGS.items() if name != "untied"}
    assert costs.pop("other activation") == costs["tied"] == flops.forward(CONFIGS["untied"], 7, 13)
    assert len(set(costs.values())) == len(costs)
    assert costs["one head of keys"] < costs["grouped heads"] < costs["tied"] < costs["gated"]


@pytest.mark.parametrize("name", FREE)
def test_what_turns_adds_or_masks_costs_no_matrix_product(name):
    config = dataclasses.replace(CONFIG, **FREE[name])
    function, params = forward(config, 1, 7, 13)
    assert flops.forward(config, 7, 13) == matmul_flops(jax.make_jaxpr(function)(params).jaxpr)


@pytest.mark.parametrize("name", ["tied", "classifier by its first token", "language model"])
def test_a_step_forward_and_backward_has_three_times_the_matrix_products_for_every_row(name):
    config = CONFIGS[name]
    function, params = forward(config, 3, 7, 7)
    traced = matmul_flops(jax.make_jaxpr(jax.value_and_grad(function))(params).jaxpr)
    assert flops.train_step(Config(model=config), 3, 7) == 3 * 3 * flops.forward(config, 7, 7) == traced


def test_a_step_with_two_draws_of_dropout_costs_twice_as_much():
    once, twice = Config(model=CONFIGS["tied"]), Config(model=CONFIGS["tied"], train=TrainConfig(r_drop=5.0))
    assert flops.train_step(twice, 3, 7) == 2 * flops.train_step(once, 3, 7)
    lengths = np.array([7, 3]), np.array([2, 11])
    assert flops.train_examples(twice, *lengths) == 2 * flops.train_examples(once, *lengths)


@pytest.mark.parametrize("name", ["tied", "classifier by its first token", "language model"])
def test_a_step_on_examples_costs_what_each_of_them_costs_at_its_own_length(name):
    config, source_N, target_N = CONFIGS[name], np.array([7, 3, 5]), np.array([2, 11, 5])
    each = [flops.forward(config, int(s), int(t)) for s, t in zip(source_N, target_N, strict=True)]
    assert flops.train_examples(Config(model=config), source_N, target_N) == 3 * sum(each) > 0


def test_the_base_model_costs_about_two_flops_a_parameter_and_token():
    # Embeddings cost nothing but as logits; attention scores are small at this length.
    config = ModelConfig(vocab_size=37000)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(build_model(config))))
    assert flops.forward(config, 25, 25) / (2 * 25 * parameters) == pytest.approx(1, abs=0.02)


def test_decoding_encodes_once_and_predicts_every_hypothesis():
    """Counted by hand: one layer each of width 4, one head, inner width 6, 10 tokens; 7 source tokens, 11 steps."""
    sizes = {"num_heads": 1, "d_head": None, "num_encoder_layers": 1, "num_decoder_layers": 1}
    model = dataclasses.replace(CONFIG, vocab_size=10, d_model=4, d_ff=6, **sizes)
    encoder = 4 * 7 * 4 * 4 + 2 * 7 * 7 * 4 + 2 * 7 * 4 * 6  # projections, scores and mix, feed-forward
    keys = 2 * 7 * 4 * 4  # and values of the source, once for all hypotheses
    decoder = 4 * 11 * 4 * 4 + 2 * 11 * 11 * 4 + 2 * 11 * 4 * 6  # self-attention and feed-forward
    decoder += 2 * 11 * 4 * 4 + 2 * 11 * 7 * 4 + 11 * 4 * 10  # cross-attention and logits
    for changes, times in (
        ({"method": "greedy"}, 1),
        ({"method": "beam", "beam_size": 5}, 5),
        ({"method": "mask_predict", "length_candidates": 3, "iterations": 4}, 12),
    ):
        decode = dataclasses.replace(Config().decode, **changes)
        config = Config(model=model, decode=decode)
        assert flops.decoding(config, 13, 7, 11) == 2 * 13 * (encoder + keys + times * decoder)
