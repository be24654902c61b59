"""Embeddings and logits: initial variance, formulas, gradients in bfloat16."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.embeddings import Inputs, Output, project, token_embedding
from flaxformer_lite.model.masks import TokenPositions

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, D = 23, 14
CONFIG = functools.partial(ModelConfig, vocab_size=V, d_model=D, num_heads=2)


def test_initial_embeddings_have_unit_variance_after_their_scaling():
    table = token_embedding(CONFIG(vocab_size=1009))
    params = table.init(jax.random.key(3), jnp.array([[5]]))["params"]
    scaled = np.asarray(params["embedding"]) * math.sqrt(D)
    assert abs(scaled.std() - 1) < 4 / math.sqrt(2 * scaled.size)


@pytest.mark.parametrize(("tied", "output_bias"), [(True, False), (False, True)])
def test_logits_are_products_with_the_embeddings_or_if_untied_with_another_matrix(
    tied, output_bias
):
    config, rng = CONFIG(tie_embeddings=tied, output_bias=output_bias), np.random.default_rng(0)
    x, matrix_VD, bias_V = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 5, D), (V, D), V)
    )
    own = {"kernel": matrix_VD} if not tied else {"embedding": {"embedding": matrix_VD}}
    params = own | ({"bias": bias_V} if output_bias else {})
    weights = Output(config, token_embedding(config)).apply({"params": params})
    logits = project(x, weights, config)
    np.testing.assert_allclose(logits, x @ matrix_VD.T + (bias_V if output_bias else 0), atol=1e-5)


def test_gradients_of_a_frequent_token_are_summed_in_float32_if_activations_are_bfloat16():
    config = CONFIG(dtype="bfloat16", d_model=16, dropout=0.0)
    inputs, ids_1L = Inputs(config, token_embedding(config)), jnp.full((1, 4099), 5)
    apply = functools.partial(inputs.apply, ids_BL=ids_1L, positions=TokenPositions.of(ids_1L))
    params = inputs.init(jax.random.key(0), ids_1L, TokenPositions.of(ids_1L))
    assert apply(params).dtype == jnp.bfloat16
    gradient = jax.jit(jax.grad(lambda params: apply(params).astype(jnp.float32).sum()))(params)
    (table_VD,) = jax.tree.leaves(gradient)
    expected = np.zeros((V, 16))
    expected[5] = 4099 * math.sqrt(16)
    # a sum of 4099 equal terms in bfloat16 would stop growing earlier
    np.testing.assert_array_equal(table_VD, expected)
