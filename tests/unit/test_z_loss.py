"""The z-loss: its closed form and gradient, and its part of the objective in every kind of step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import Config, ModelConfig, resolve
from flaxformer_lite.data.batches import loader
from flaxformer_lite.training import losses, step

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, T, V, CLASSES = 3, 5, 23, 7
SLOW = pytest.mark.slow
KEY = jax.random.key(5)
MODEL = ModelConfig(
    vocab_size=V,
    num_classes=CLASSES,
    d_model=14,
    num_heads=3,
    d_head=5,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=11,
    dropout=0.2,
)
WEIGHT = 0.05


def logits_and_weights() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return 3 * rng.normal(size=(B, T, V)), rng.integers(0, 2, (B, T)) / 2


def log_z(logits: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))


def test_the_z_loss_is_the_weighted_sum_of_the_squared_log_of_the_softmax_denominator():
    logits, weights = logits_and_weights()
    expected = (weights * log_z(logits) ** 2).sum()
    actual = losses.z_loss(jnp.float32(logits), jnp.float32(weights))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_gradient_of_the_z_loss_is_2_log_z_times_the_probabilities():
    logits, weights = logits_and_weights()
    probability = np.exp(logits - log_z(logits)[..., None])
    expected = 2 * (weights * log_z(logits))[..., None] * probability
    gradient = jax.grad(losses.z_loss)(jnp.float32(logits), jnp.float32(weights))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_agrees_with_finite_differences_of_the_closed_form():
    logits, weights = logits_and_weights()
    direction = np.random.default_rng(3).normal(size=logits.shape)
    above, below = (
        (weights * log_z(logits + sign * 1e-5 * direction) ** 2).sum() for sign in (1, -1)
    )
    gradient = jax.grad(losses.z_loss)(jnp.float32(logits), jnp.float32(weights))
    np.testing.assert_allclose((gradient * direction).sum(), (above - below) / 2e-5, rtol=1e-4)


def test_logits_in_bfloat16_are_summed_in_float32():
    logits, weights = jnp.zeros((1, 1, 1009), jnp.bfloat16), jnp.ones((1, 1))
    np.testing.assert_allclose(losses.z_loss(logits, weights), np.log(1009) ** 2, rtol=1e-5)


def batch_of(config: ModelConfig, rows: int = 8) -> dict[str, jax.Array]:
    rng, batch = np.random.default_rng(3), {}
    for name, struct in loader.batch_struct(Config(model=config), rows, T).items():
        batch[name] = rng.integers(4, V, struct.shape, dtype=np.int32)
    batch["row"] = np.arange(rows, dtype=np.int32)
    for name in {"source", "target"} & batch.keys():
        batch[name][1::2, 2:] = 0
    if "label" in batch:
        batch["label"] = np.append(batch["label"][1:] % CLASSES, np.int32(-1))
    return jax.tree.map(jnp.asarray, batch)


def loss_and_metrics(config: ModelConfig, key=None, **options):
    """Returns the objective and the metrics of a batch, given the options of `loss_sums`."""
    model, params = runs.varied_model(config)
    of_batch = functools.partial(step.loss_sums, model=model, dropout_key=key, **options)
    return jax.jit(of_batch)(params, batch_of(config))


def gradients(config: ModelConfig, microbatches: int = 1, **options):
    model, params = runs.varied_model(config)
    of_batch = functools.partial(
        step.gradient_sums, model=model, dropout_key=KEY, microbatches=microbatches, **options
    )
    return jax.jit(of_batch)(params, batch_of(config))


CHANGES = {
    "encoder_classifier": dict(architecture="encoder_classifier"),
    "decoder_lm": dict(architecture="decoder_lm"),
    "masked": dict(decoder="masked"),
}


@pytest.mark.parametrize(
    "name",
    [
        "decoder_lm",
        pytest.param("encoder_classifier", marks=SLOW),
        pytest.param("masked", marks=SLOW),
    ],
)
def test_the_objective_has_the_weighted_z_loss_of_the_labels_and_the_metrics_do_not(name):
    """The logits of a model without label smoothing are those of the labels with a weight."""
    config = dataclasses.replace(MODEL, **CHANGES[name])
    seen = []
    cross_entropy = losses.cross_entropy

    def spy(logits, labels, weights, **options):
        if logits.shape[-1] != config.max_length:  # not the lengths of a masked decoder
            seen.append((np.asarray(logits, np.float64), np.asarray(weights)))
        return cross_entropy(logits, labels, weights, **options)

    model, params = runs.varied_model(config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(losses, "cross_entropy", spy)
        step.loss_sums(params, batch_of(config), model=model)
    logits, weights = seen[0]
    expected = WEIGHT * (weights * log_z(logits) ** 2).sum()
    plain, weighted = (
        loss_and_metrics(config, label_smoothing=0.1, z_loss_weight=z) for z in (0.0, WEIGHT)
    )
    assert expected > 0.1 and weights.sum() > 1
    np.testing.assert_allclose(weighted[0] - plain[0], expected, rtol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, weighted[1], plain[1])


LM = dataclasses.replace(MODEL, architecture="decoder_lm")


@SLOW
def test_with_r_drop_the_z_loss_is_the_mean_of_both_passes():
    batch, (model, params) = batch_of(LM), runs.varied_model(LM)
    of_pass = jax.jit(
        lambda rows, z: step.loss_sums(
            params, {**batch, "row": rows}, model=model, dropout_key=KEY, z_loss_weight=z
        )[0],
        static_argnums=1,
    )
    passes = [of_pass(rows, WEIGHT) - of_pass(rows, 0.0) for rows in (batch["row"], ~batch["row"])]
    assert abs(passes[0] - passes[1]) > 1e-3
    plain, weighted = (
        loss_and_metrics(LM, KEY, r_drop_weight=2.0, z_loss_weight=z)[0] for z in (0.0, WEIGHT)
    )
    np.testing.assert_allclose(weighted - plain, sum(passes) / 2, rtol=1e-3)


@SLOW
def test_microbatches_and_parts_of_the_logits_have_the_gradients_of_the_batch(monkeypatch):
    options = dict(z_loss_weight=WEIGHT, label_smoothing=0.1, r_drop_weight=2.0)
    plain, _ = gradients(LM, label_smoothing=0.1, r_drop_weight=2.0)
    whole, sums = gradients(LM, **options)
    micro = gradients(LM, microbatches=4, **options)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 4 * T * V)  # the 2 passes of 2 rows
    parts = gradients(LM, **options)
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(whole))
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), whole, plain)
    assert max(jax.tree.leaves(difference)) > 1e-3 * largest
    for found, found_sums in (micro, parts):
        close = functools.partial(np.testing.assert_allclose, atol=1e-5 * largest)
        jax.tree.map(close, found, whole)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found_sums, sums)


def test_evaluation_has_no_z_loss():
    """The steps of a config with it and without it are the same."""
    _, params = runs.varied_model(LM)
    model, _ = runs.varied_model(LM)
    sums = step.eval_step(params, batch_of(LM), model=model)
    np.testing.assert_allclose(sums["loss"], loss_and_metrics(LM)[1]["loss"], rtol=1e-6)
    assert sums.keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("weight", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_weight_outside_of_0_to_1_is_refused(weight):
    with pytest.raises(ValueError, match=r"^config\.train\.z_loss: expected "):
        resolve({"train": {"z_loss": weight}})
