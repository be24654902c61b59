"""Layer drop, tied layers, and dropout of embeddings and of the feed-forward network."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import Config, ModelConfig, resolve, to_dict
from flaxformer_lite.data.batches import loader
from flaxformer_lite.field_rules import DROPOUTS
from flaxformer_lite.model.embeddings import Inputs, token_embedding
from flaxformer_lite.model.layers import FeedForward, LayerDrop
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import flops, step

SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, CLASSES, LENGTH, LAYERS = 23, 3, 7, 2
KEY = jax.random.key(5)
TRAINING = dict(deterministic=False, rngs={"dropout": KEY})
MODEL = ModelConfig(
    vocab_size=V,
    num_classes=CLASSES,
    d_model=14,
    num_heads=3,
    d_head=5,
    d_ff=11,
    num_encoder_layers=LAYERS,
    num_decoder_layers=LAYERS,
    max_length=LENGTH,
    dropout=0.0,
)
LM = dataclasses.replace(MODEL, architecture="decoder_lm")
# by name, every model with its stacks
MODELS = {
    "encoder_decoder": {},
    "encoder_classifier": dict(architecture="encoder_classifier"),
    "decoder_lm": dict(architecture="decoder_lm", norm_placement="pre", position="relative"),
    "masked": dict(decoder="masked"),
}
EACH_MODEL = pytest.mark.parametrize(
    "model",
    [
        "decoder_lm",
        *(pytest.param(each, marks=SLOW) for each in MODELS if each != "decoder_lm"),
    ],
)


def changed(model: str, **changes) -> ModelConfig:
    return dataclasses.replace(MODEL, **MODELS[model], **changes)


def batch_of(config: ModelConfig, rows: int) -> dict[str, jax.Array]:
    """Returns a batch of random ids and labels, with padding in some rows."""
    rng = np.random.default_rng(3)
    batch = {}
    for name, struct in loader.batch_struct(Config(model=config), rows, LENGTH).items():
        batch[name] = rng.integers(4, V, struct.shape, dtype=np.int32)
    batch["row"] = np.arange(rows, dtype=np.int32)
    for name in {"source", "target"} & batch.keys():
        batch[name][1::2, LENGTH - 2 :] = 0
    if "label" in batch:
        batch["label"] %= CLASSES
    return jax.tree.map(jnp.asarray, batch)


def inputs_of(config: ModelConfig, rows: int) -> list[jax.Array]:
    batch = batch_of(config, rows)
    return [batch[name] for name in ("source", "target") if name in batch]


def untied(params: dict) -> dict:
    """Returns the parameters of tied layers, copied to each layer of an untied model."""
    return {
        name: {
            **part,
            **{f"layers_{n}": part["layers_0"] for n in range(LAYERS)},
        }
        if name in ("encoder", "decoder")
        else part
        for name, part in params.items()
    }


@functools.cache
def gradients(config: ModelConfig, rows: int = 8, microbatches: int = 1):
    """Returns the gradients of a training step, and the sums of its metrics."""
    model, params = runs.varied_model(config)
    of_step = functools.partial(
        step.gradient_sums, model=model, dropout_key=KEY, microbatches=microbatches
    )
    return jax.jit(of_step)(params, batch_of(config, rows))


def applied(model, params: dict, *inputs: jax.Array, **options) -> jax.Array:
    """Returns the output of a model, compiled."""
    return jax.jit(functools.partial(model.apply, **options))({"params": params}, *inputs)


def close(first, second, tolerance: float) -> None:
    """Asserts that arrays agree within a share of the largest number of the tree."""
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(second))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance * largest), first, second
    )


# Dropout of the feed-forward network and of embeddings.


@pytest.mark.parametrize("activation", ["relu", "reglu"])
def test_the_inner_activations_of_the_feed_forward_network_are_dropped_and_scaled(activation):
    """With identities as matrices the output is the activation itself, dropped."""
    D, rate = 31, 0.3
    config = ModelConfig(
        d_model=D, d_ff=D, use_bias=False, activation=activation, feed_forward_dropout=rate
    )
    network, params = FeedForward(config), {"inner": {"kernel": jnp.eye(D)}}
    params |= {"outer": params["inner"], "gate": params["inner"]}
    x = 1 + jax.random.uniform(KEY, (17, 13, D))
    activated = np.asarray(x**2 if activation == "reglu" else x)
    np.testing.assert_allclose(applied(network, params, x), activated, rtol=1e-5)
    dropped = np.asarray(applied(network, params, x, **TRAINING))
    is_kept = dropped != 0
    np.testing.assert_allclose(dropped[is_kept], (activated / (1 - rate))[is_kept], rtol=1e-5)
    assert abs(is_kept.mean() - 0.7) <= 4 * math.sqrt(0.3 * 0.7 / is_kept.size)


@pytest.mark.parametrize(
    ("dropout", "embedding_dropout", "expected"),
    [(0.3, None, 0.3), (0.3, 0.0, 0.0), (0.0, 0.5, 0.5), (0.3, 0.5, 0.5)],
)
def test_embeddings_have_their_own_rate_or_else_that_of_all_dropout(
    dropout, embedding_dropout, expected
):
    config = ModelConfig(
        vocab_size=V, d_model=30, dropout=dropout, embedding_dropout=embedding_dropout
    )
    ids = jnp.full((17, 13), 5)
    inputs = Inputs(config, token_embedding(config))
    arguments = (ids, TokenPositions.of(ids))
    variables = inputs.init(KEY, *arguments)
    embedded = inputs.apply(variables, *arguments, deterministic=False, rngs={"dropout": KEY})
    share = float((embedded == 0).mean())
    assert abs(share - expected) <= 4 * math.sqrt(0.25 / embedded.size)


@pytest.mark.parametrize(
    "name",
    ["feed_forward_dropout", *(pytest.param(x, marks=SLOW) for x in DROPOUTS[3:])],
)
def test_each_kind_of_dropout_acts_in_training_only(name):
    plain, dropped = (
        runs.varied_model(dataclasses.replace(LM, **{name: rate})) for rate in (0.0, 0.5)
    )
    (ids,) = inputs_of(LM, 5)
    apply = lambda model, **options: applied(*model, ids, **options)  # noqa: E731
    np.testing.assert_array_equal(apply(dropped), apply(plain))
    assert np.abs(apply(dropped, **TRAINING) - apply(plain, **TRAINING)).max() > 0.1


# Layer drop.


def drop_layers(rate: float, rows: int, calls: int = 1, **options) -> np.ndarray:
    """Returns for each call and row whether the layer is kept: (calls, rows)."""

    layer_drop = LayerDrop(rate)
    before, after = jnp.zeros((rows, 5, 3)), jnp.ones((rows, 5, 3))
    run = lambda module: jnp.stack(  # noqa: E731
        [module(before, after, **options) for _ in range(calls)]
    )
    kept = np.asarray(layer_drop.apply({}, method=run, rngs={"dropout": KEY}))
    assert (kept == kept[:, :, :1, :1]).all()  # of a row the whole layer or nothing
    return kept[:, :, 0, 0]


def test_a_row_keeps_the_output_of_a_layer_with_1_minus_the_rate():
    kept = drop_layers(0.3, 5003, calls=3, deterministic=False)
    np.testing.assert_allclose(kept.mean(axis=1), 0.7, atol=4 * math.sqrt(0.21 / 5003))


def test_the_layers_that_a_row_skips_are_independent():
    first, second, third = 1 - drop_layers(0.3, 5003, calls=3, deterministic=False)
    for one, other in itertools.combinations((first, second, third), 2):
        assert abs((one * other).mean() - 0.09) <= 4 * math.sqrt(0.09 * 0.91 / 5003)


def test_a_row_skips_the_same_layers_in_every_batch():
    whole = drop_layers(0.5, 64, calls=3, deterministic=False)
    some = jnp.array([60, 3, 17])
    np.testing.assert_array_equal(
        drop_layers(0.5, 3, calls=3, deterministic=False, row_B=some), whole[:, some]
    )


@pytest.mark.parametrize(("rate", "deterministic"), [(0.5, True), (0.0, False)])
def test_no_layer_is_skipped_at_inference_or_at_rate_0(rate, deterministic):
    assert drop_layers(rate, 64, deterministic=deterministic).all()


@pytest.mark.parametrize("placement", ["post", pytest.param("pre", marks=SLOW)])
def test_each_row_is_that_of_a_model_with_a_part_of_the_layers(placement):
    """Every part of the 2 layers occurs, and nothing else."""
    rows = 128
    config = dataclasses.replace(LM, norm_placement=placement, layer_drop=0.5)
    model, params = runs.varied_model(config)
    (ids,) = inputs_of(config, rows)
    dropped = applied(model, params, ids, **TRAINING, method="features")
    found = np.zeros((rows, 0), bool)
    for count in range(LAYERS + 1):
        part = build_model(dataclasses.replace(config, num_decoder_layers=count))
        apply = jax.jit(functools.partial(part.apply, method="features"))
        for kept in itertools.combinations(range(LAYERS), count):
            layers = {f"layers_{n}": params["decoder"][f"layers_{k}"] for n, k in enumerate(kept)}
            others = {k: v for k, v in params["decoder"].items() if not k.startswith("layers")}
            output = apply({"params": {**params, "decoder": {**others, **layers}}}, ids)
            same = np.abs(dropped - output).max(axis=(1, 2)) < 1e-3
            found = np.concatenate([found, same[:, None]], axis=1)
    assert (found.sum(axis=1) == 1).all()
    counts = found.sum(axis=0)  # of each of the 4 parts, about rows / 4
    np.testing.assert_allclose(counts, rows / 4, atol=4 * math.sqrt(rows * 3 / 16))


DROPPED = dict(layer_drop=0.4, feed_forward_dropout=0.3, embedding_dropout=0.2)


@SLOW
def test_a_step_with_layer_drop_does_not_depend_on_microbatches():
    config = changed("encoder_decoder", **DROPPED)
    whole, plain = gradients(config), gradients(changed("encoder_decoder"))
    assert abs(float(whole[1]["loss"][0] / plain[1]["loss"][0]) - 1) > 1e-3
    close(gradients(config, microbatches=4), whole, 1e-5)


@SLOW
@pytest.mark.parametrize(("remat", "tied"), [("full", True), ("dots", False)])
def test_a_step_with_layer_drop_does_not_depend_on_remat(remat, tied):
    config = changed("decoder_lm", **DROPPED, tie_layers=tied)
    close(gradients(dataclasses.replace(config, remat=remat)), gradients(config), 1e-5)


# Tied layers.


@EACH_MODEL
def test_tied_layers_have_the_parameters_of_one_layer_of_a_stack(model):
    tied, own, single = (
        param_shapes(build_model(changed(model, **changes)))
        for changes in (
            dict(tie_layers=True),
            {},
            dict(num_encoder_layers=1, num_decoder_layers=1),
        )
    )
    assert jax.tree.map(jnp.shape, tied) == jax.tree.map(jnp.shape, single)
    assert jax.tree.structure(untied(tied)) == jax.tree.structure(own) != jax.tree.structure(tied)


def test_tied_layers_have_the_flops_of_separate_ones():
    tied = dataclasses.replace(MODEL, tie_layers=True)
    assert flops.forward(tied, 5, 3) == flops.forward(MODEL, 5, 3)


@EACH_MODEL
def test_tied_layers_have_the_output_of_separate_layers_with_copied_parameters(model):
    config = changed(model, tie_layers=True)
    (tied, params), separate = runs.varied_model(config), build_model(changed(model))
    ids = inputs_of(config, 5)
    expected = applied(separate, untied(params), *ids)
    once = build_model(changed(model, num_encoder_layers=1, num_decoder_layers=1))
    assert np.abs(applied(once, params, *ids) - expected).max() > 0.1
    np.testing.assert_array_equal(applied(tied, params, *ids), expected)


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=SLOW) for each in ("encoder_decoder", "decoder_lm")]
)
def test_the_gradient_of_tied_layers_is_the_sum_of_those_of_separate_layers(model):
    config, rows = changed(model, tie_layers=True), 5
    (_, params), separate = runs.varied_model(config), build_model(changed(model))
    of_step = functools.partial(step.gradient_sums, model=separate, dropout_key=KEY)
    expected, _ = jax.jit(of_step)(untied(params), batch_of(config, rows))
    for stack in {"encoder", "decoder"} & expected.keys():
        layers = [expected[stack].pop(f"layers_{n}") for n in range(LAYERS)]
        expected[stack]["layers_0"] = jax.tree.map(lambda *g: sum(g), *layers)
    close(gradients(config, rows)[0], expected, 1e-5)


def test_each_application_of_tied_layers_has_its_own_dropout():
    """2 kept or dropped ones are added to each element: with shared bits it would be 0 or 2."""
    config = dataclasses.replace(LM, tie_layers=True, norm_placement="pre", dropout=0.5)
    config = dataclasses.replace(config, embedding_dropout=0.0, position="none", d_model=61)
    model = build_model(config)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), param_shapes(model))
    decoder = params["decoder"]
    decoder["layers_0"]["feed_forward"]["outer"]["bias"] += 1
    decoder["final_norm"]["scale"] += 1
    (ids,) = inputs_of(config, 2)
    x_BTD = applied(model, params, ids, **TRAINING, method="features")
    distinct = {len(np.unique(np.asarray(x_D).round(3))) for x_D in x_BTD.reshape(-1, 61)}
    assert distinct == {LAYERS + 1}


@SLOW
def test_each_application_of_tied_layers_is_skipped_on_its_own():
    """Rows have 0, 1 or 2 applications: those of a model of that many tied layers."""
    config = dataclasses.replace(LM, tie_layers=True, layer_drop=0.5)
    model, params = runs.varied_model(config)
    (ids,) = inputs_of(config, 64)
    dropped = applied(model, params, ids, **TRAINING, method="features")
    count_of_row = np.full(64, -1)
    for count in range(LAYERS + 1):
        part = build_model(dataclasses.replace(config, num_decoder_layers=count))
        output = applied(part, params, ids, method="features")
        count_of_row[np.abs(dropped - output).max(axis=(1, 2)) < 1e-3] = count
    expected = 64 * np.array([1, 2, 1]) / 4
    np.testing.assert_allclose(np.bincount(count_of_row), expected, atol=4 * math.sqrt(64 * 0.24))


@pytest.mark.parametrize("model", ["decoder_lm", pytest.param("encoder_decoder", marks=SLOW)])
def test_decoding_with_the_cache_has_the_logits_of_a_full_pass(model):
    config = changed(model, tie_layers=True)
    tied, params = runs.varied_model(config)
    *source, target = inputs_of(config, 5)
    target = target.at[:, LENGTH - 2 :].set(5)
    apply = functools.partial(tied.apply, {"params": params})
    expected = applied(tied, params, *source, target)
    cache = apply(*(source or (5,)), LENGTH, method="start_cache")
    assert len(cache.self_attention) == LAYERS
    decode = jax.jit(functools.partial(apply, method="decode_step"))
    for index in range(LENGTH):
        logits, cache = decode(target[:, index], cache, jnp.int32(index), *source)
        np.testing.assert_allclose(logits, expected[:, index], atol=2e-4)
    own = [np.asarray(each.value_BGSK) for each in cache.self_attention]
    assert all(np.abs(a - b).max() > 0.1 for a, b in itertools.combinations(own, 2))


@SLOW
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_attention_weights_of_every_application_are_returned_in_order(remat):
    config = dataclasses.replace(LM, tie_layers=True, remat=remat)
    model, params = runs.varied_model(config)
    separate = build_model(dataclasses.replace(config, tie_layers=False, remat="none"))
    (ids,) = inputs_of(config, 2)
    tied, own = (
        applied(each, of_model, ids, mutable=["intermediates"])[1]["intermediates"]
        for each, of_model in ((model, params), (separate, untied(params)))
    )
    weights = tied["decoder"]["layers_0"]["self_attention"]["attention_weights"]
    assert len(weights) == LAYERS
    for n, weights_BHTS in enumerate(weights):
        (expected,) = own["decoder"][f"layers_{n}"]["self_attention"]["attention_weights"]
        np.testing.assert_allclose(weights_BHTS, expected, atol=1e-6)


# Checks of the config.


@pytest.mark.parametrize("name", DROPOUTS)
def test_r_drop_accepts_every_kind_of_dropout_alone(name):
    none = {**dict.fromkeys(DROPOUTS, 0.0), "embedding_dropout": None}
    resolve({"model": {**none, name: 0.1}, "train": {"r_drop": 1.0}})
    with pytest.raises(ValueError, match=r"^config\.train\.r_drop: compares two passes"):
        resolve({"model": none, "train": {"r_drop": 1.0}})


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (dict(num_encoder_layers=1, num_decoder_layers=1), "num_encoder_layers and model.num_dec"),
        (dict(architecture="decoder_lm", num_decoder_layers=1), "model.num_decoder_layers is 1"),
        (
            dict(architecture="encoder_classifier", num_encoder_layers=1),
            "model.num_encoder_layers is 1",
        ),
    ],
)
def test_tied_layers_are_refused_if_every_stack_has_one_layer(model, named):
    with pytest.raises(ValueError, match=r"^config\.model\.tie_layers: shares") as error:
        resolve({"model": {**model, "tie_layers": True}})
    assert named in str(error.value)
    resolve({"model": {**model, "tie_layers": False}})


def test_one_stack_of_several_layers_may_be_tied():
    model = dict(num_encoder_layers=1, num_decoder_layers=2, tie_layers=True)
    assert to_dict(resolve({"model": model}))["model"]["tie_layers"]
