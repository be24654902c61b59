"""The closed form against every matrix multiplication that JAX traces."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import flops
from flaxformer_lite.training.step import param_shapes

CONFIG = ModelConfig(
    vocab_size=23, d_model=14, num_heads=3, d_head=5, d_ff=11, num_encoder_layers=2, num_decoder_layers=1, max_length=19
)
CONFIGS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tie_embeddings=False),
    "derived head size": dataclasses.replace(CONFIG, d_model=6, d_head=None),
    "more decoder layers": dataclasses.replace(CONFIG, num_decoder_layers=3, norm_placement="pre"),
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
    return lambda params: model.apply({"params": params}, source, target).sum(), param_shapes(model)


def test_matrix_products_are_counted_in_what_is_called_too():
    product = lambda x, y: x @ y  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda x, y: jax.jit(product)(x, y) + product(x, y))(jnp.ones((3, 5)), jnp.ones((5, 7)))
    assert matmul_flops(jaxpr.jaxpr) == 2 * (2 * 3 * 5 * 7)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("source_length", "target_length"), [(7, 13), (17, 5), (1, 1)])
def test_the_forward_pass_has_the_matrix_products_of_the_closed_form(config, source_length, target_length):
    function, params = forward(config, 1, source_length, target_length)
    traced = matmul_flops(jax.make_jaxpr(function)(params).jaxpr)
    assert flops.forward(config, source_length, target_length) == traced > 0


def test_a_step_forward_and_backward_has_three_times_the_matrix_products_for_every_row():
    function, params = forward(CONFIG, 3, 7, 7)
    traced = matmul_flops(jax.make_jaxpr(jax.value_and_grad(function))(params).jaxpr)
    assert flops.train_step(CONFIG, 3, 7) == 3 * 3 * flops.forward(CONFIG, 7, 7) == traced


def test_the_base_model_costs_about_two_flops_a_parameter_and_token():
    # Embeddings cost nothing but as logits; attention scores are small at this length.
    config = ModelConfig(vocab_size=37000)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(build_model(config))))
    assert flops.forward(config, 25, 25) / (2 * 25 * parameters) == pytest.approx(1, abs=0.02)
