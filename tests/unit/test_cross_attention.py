"""The source token of each decoder step, against the weights that the model returns for a pair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.decoding.cross_attention import (
    CrossAttention,
    Heads,
    attention_weights,
    most_attended,
    weights_of,
)
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.model import transformer

CONFIG = ModelConfig(
    vocab_size=23,
    d_model=10,
    num_heads=5,
    d_ff=7,
    num_encoder_layers=1,
    num_decoder_layers=3,
    max_length=19,
)
HEADS = (Heads(0, 4), Heads(2, 0), Heads(1, None), Heads(None, None))


weights_alone = jax.jit(attention_weights, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return runs.varied_model(CONFIG)[1]


@pytest.fixture(scope="module")
def pairs():
    """Pairs of many lengths, in no order."""
    rng = np.random.default_rng(3)
    lengths = [(1, 1), (5, 18), (17, 3), (18, 19)]
    return [tuple(rng.integers(4, 23, n).astype(np.int32) for n in pair) for pair in lengths]


def expected(params, source, target):
    """Returns the weights (N, H, T, S) of a pair alone, with the model as a user calls it."""
    model = transformer.build_model(dataclasses.replace(CONFIG, backend="reference"))
    inputs = [[*source, EOS], [BOS, *target][: CONFIG.max_length]]
    arrays = [jnp.array([row], jnp.int32) for row in inputs]
    run = jax.jit(lambda params, *inputs: model.apply(params, *inputs, mutable=["intermediates"]))
    _, kept = run({"params": params}, *arrays)
    layers = kept["intermediates"]["decoder"]
    return np.stack(
        [
            layers[f"layers_{n}"]["cross_attention"]["attention_weights"][0][0]
            for n in range(CONFIG.num_decoder_layers)
        ]
    )


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [40, 4096])
def test_steps_of_batches_are_those_of_each_pair_alone(params, pairs, tokens):
    attention = CrossAttention(CONFIG, tokens_per_batch=tokens)
    found = attention(params, *zip(*pairs, strict=True), HEADS)
    for (source, target), position_CT in zip(pairs, found, strict=True):
        weights_NHTS = expected(params, source, target)[..., :-1]  # not the end symbol
        each = [
            weights_NHTS[0, 4],
            weights_NHTS[2, 0],
            weights_NHTS[1].mean(axis=0),
            weights_NHTS.mean(axis=(0, 1)),
        ]
        np.testing.assert_array_equal(position_CT, [one.argmax(axis=-1) for one in each])
    assert len({position_CT.tobytes() for position_CT in found[2]}) == len(HEADS)  # they differ
    # one step more than tokens, unless the model has no position for it
    assert [len(each[0]) for each in found] == [2, 19, 4, 19]


def test_tokens_that_do_not_count_are_not_attended_to():
    counts_BS = jnp.array([[True, True, False, False]])
    weights_BTS = jnp.array([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 1.0, 0.0]]])
    np.testing.assert_array_equal(most_attended(weights_BTS, counts_BS), [[1, 0]])


@pytest.mark.usefixtures("quickly_compiled")
def test_ignored_ids_are_not_attended_to(params, pairs):
    (source, target), ids = pairs[2], np.arange(CONFIG.vocab_size)
    for ignored_V in (ids == source[5], ids != source[5]):
        attention = CrossAttention(CONFIG, tokens_per_batch=99, ignored_V=ignored_V)
        (position_CT,) = attention(params, [source], [target], HEADS[:1])
        assert not ignored_V[source[position_CT]].any()


def test_a_mean_of_heads_is_not_the_mean_of_the_winners():
    layers = [jnp.array([[[[0.9, 0.1, 0.0]], [[0.0, 0.5, 0.5]], [[0.1, 0.9, 0.0]]]])]
    np.testing.assert_allclose(
        weights_of(layers, Heads(None, None)), [[[1 / 3, 0.5, 0.5 / 3]]], rtol=1e-6
    )
    np.testing.assert_array_equal(weights_of(layers, Heads(0, 2)), layers[0][:, 2])


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_tied_layers_and_rematerialised_ones_have_weights_each():
    config = dataclasses.replace(CONFIG, tie_layers=True, remat="full")
    _, params = runs.varied_model(config)
    arrays = jnp.array([[5, 6, EOS]]), jnp.array([[BOS, 8]])
    found = weights_alone(config, params, *arrays)
    assert set(found) == {
        "encoder self-attention",
        "decoder self-attention",
        "cross-attention",
    }
    layers = found["cross-attention"]
    assert [each.shape for each in layers] == [(1, 5, 2, 3)] * 3
    for each in layers:
        np.testing.assert_allclose(each.sum(axis=-1), 1, rtol=1e-5)
    assert not np.allclose(layers[0], layers[1])


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_steps_of_a_masked_decoder_have_their_own_token_as_input(pairs):
    config = dataclasses.replace(CONFIG, decoder="masked")
    _, params = runs.varied_model(config)
    source, target = pairs[2]
    (found,) = CrossAttention(config, tokens_per_batch=99)(params, [source], [target], HEADS)
    assert found.shape == (len(HEADS), len(target))
    ends = jnp.array([[*source, EOS]]), jnp.array([target])
    (_, _, last) = weights_alone(config, params, *ends)["cross-attention"]
    np.testing.assert_array_equal(found[1], last[0, 0, :, :-1].argmax(axis=-1))


@pytest.mark.usefixtures("quickly_compiled")
def test_devices_share_the_rows():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    config = dataclasses.replace(CONFIG, num_decoder_layers=1)
    _, params = runs.varied_model(config)
    ids = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
    alone, shared = (
        CrossAttention(config, tokens_per_batch=99, **options)(params, ids, ids[::-1], HEADS[3:])
        for options in ({}, {"rows_multiple": 2, "sharding": rows})
    )
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one, other)
