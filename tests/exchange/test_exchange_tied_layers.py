"""Exports of tied layers: other libraries get one copy of the parameters per layer."""

import dataclasses

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.exchange import ctranslate2_spec, marian_config, marian_weights
from flaxformer_lite.exchange.folder import on_host, with_separate_layers
from flaxformer_lite.model import parameters, transformer

V = 11
TIED = ModelConfig(
    vocab_size=V,
    d_model=14,
    num_heads=2,
    d_ff=13,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_length=7,
    tie_layers=True,
    norm_epsilon=marian_config.NORM_EPSILON,
)


def tied_params(model: ModelConfig) -> dict:
    return on_host(runs.varied_model(model)[1])


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_exported_parameters_are_those_of_the_model_with_separate_layers(architecture):
    tied = dataclasses.replace(TIED, architecture=architecture)
    separate = transformer.build_model(dataclasses.replace(tied, tie_layers=False))
    params = with_separate_layers(tied_params(tied), tied)
    expected = parameters.shapes(separate)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, expected)
    for stack in {"encoder", "decoder"} & params.keys():
        first, second = (params[stack][f"layers_{n}"] for n in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)
        shares = jax.tree.map(np.shares_memory, first, second)
        assert not any(jax.tree.leaves(shares))  # CTranslate2 quantizes in place


def test_parameters_of_separate_layers_are_not_changed():
    model = dataclasses.replace(TIED, tie_layers=False)
    params = tied_params(model)
    jax.tree.map(np.testing.assert_array_equal, with_separate_layers(params, model), params)


def test_a_marian_model_gets_the_arrays_of_every_layer():
    marian_config.check_exportable(TIED)
    params = with_separate_layers(tied_params(TIED), TIED)
    ids = {side: list(range(V)) for side in ("source", "target")}
    arrays = marian_weights.to_theirs(params, TIED, ids, dict.fromkeys(ids, V))
    names = [f"model.decoder.layers.{n}.fc1.weight" for n in range(3)]
    np.testing.assert_array_equal(arrays[names[0]], arrays[names[2]])
    ours = marian_weights.to_ours(arrays, dataclasses.replace(TIED, output_bias=True), ids)
    for stack in ("encoder", "decoder"):
        jax.tree.map(np.testing.assert_array_equal, ours[stack], params[stack])


def test_a_specification_of_ctranslate2_gets_every_layer():
    spec = ctranslate2_spec.build(TIED, with_separate_layers(tied_params(TIED), TIED))
    first, *others = spec.decoder.layer
    assert len(others) == 2
    for layer in others:
        np.testing.assert_array_equal(layer.ffn.linear_0.weight, first.ffn.linear_0.weight)
