"""Skipped updates: the rule, the state that they keep, and their counts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxformer_lite.config import CHOICES, Config, ModelConfig, OptimConfig, resolve
from flaxformer_lite.data.batches import loader
from flaxformer_lite.training import metrics, optim, spikes, step
from flaxformer_lite.training.spikes import LONGEST, WARMUP

NUM_STEPS, D_MODEL = 211, 13
SHAPES = {"bias": (5,), "kernel": (3, 7)}
OPTIMIZERS = CHOICES["optim.optimizer"]


def gradients_of(norm_N: np.ndarray, seed: int = 0) -> dict[str, jax.Array]:
    """Returns gradients with these global norms, each with a leading axis N."""
    rng, N = np.random.default_rng(seed), len(norm_N)
    flat = rng.normal(size=(N, sum(math.prod(shape) for shape in SHAPES.values())))
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True) * np.asarray(norm_N)[:, None]
    parts = np.split(flat, [math.prod(SHAPES["bias"])], axis=1)
    return {
        name: jnp.float32(part.reshape(N, *shape))
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(7)
    return {name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def run(optimizer, gradients_N, value_N=None):
    """Returns parameters and state after each gradient, with a leading axis N."""
    optimizer = optax.with_extra_args_support(optimizer)

    def one(carry, inputs):
        params, state = carry
        gradients, value = inputs
        updates, state = optimizer.update(gradients, state, params, value=value)
        carry = optax.apply_updates(params, updates), state
        return carry, carry

    value_N = jnp.ones(len(gradients_N["bias"])) if value_N is None else jnp.asarray(value_N)
    start = params()
    _, states = jax.jit(functools.partial(jax.lax.scan, one))(
        (start, optimizer.init(start)), (gradients_N, value_N)
    )
    return jax.device_get(states)


def optimizer_of(**fields) -> optax.GradientTransformation:
    fields = {"schedule": "constant", "warmup_steps": 1, "learning_rate": 0.1, **fields}
    return optim.make_optimizer(OptimConfig(**fields), d_model=D_MODEL, num_steps=NUM_STEPS)


def is_skipped(state) -> np.ndarray:
    return np.diff(state.skipped, prepend=0) > 0


def expected_skips(norm_N: np.ndarray, deviations: float) -> np.ndarray:
    """Returns which steps are skipped, in float64: the statistics of all accepted norms.

    The first WARMUP norms have equal weights; each later one has the weight 1 / WARMUP, and those
    before it decay by 1 - 1 / WARMUP.
    """
    norms, weights, in_a_row, skipped = np.zeros(0), np.zeros(0), 0, []
    for norm in norm_N:
        if not math.isfinite(norm):
            skipped.append(True)
            continue
        mean = (weights * norms).sum()
        deviation = math.sqrt((weights * (norms - mean) ** 2).sum())
        is_spike = len(norms) >= WARMUP and norm > mean + deviations * deviation
        skipped.append(is_spike and in_a_row < LONGEST)
        in_a_row = in_a_row + 1 if is_spike else 0
        if not skipped[-1]:
            share = 1 / min(len(norms) + 1, WARMUP)
            norms, weights = np.append(norms, norm), np.append(weights * (1 - share), share)
    return np.array(skipped)


def noisy_norms(seed: int, N: int = 300) -> np.ndarray:
    """Returns norms that fall and vary, with some high ones and some that are not finite."""
    rng = np.random.default_rng(seed)
    norm_N = (1 + np.exp(-np.arange(N) / 80)) * rng.lognormal(sigma=0.1, size=N)
    norm_N[rng.choice(N, 12, replace=False)] *= 9
    norm_N[rng.choice(N, 7, replace=False)] = rng.choice([np.nan, np.inf], 7)
    return norm_N.astype(np.float32)


@pytest.mark.parametrize("deviations", [1.0, 4.0])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_skipped_steps_are_those_of_the_mean_and_deviation_of_accepted_norms(seed, deviations):
    norm_N = noisy_norms(seed)
    _, state = run(spikes.skip_updates(optax.sgd(0.1), deviations=deviations), gradients_of(norm_N))
    expected = expected_skips(norm_N, deviations)
    assert expected[WARMUP:].sum() > (~np.isfinite(norm_N))[WARMUP:].sum()
    np.testing.assert_array_equal(is_skipped(state), expected)
    assert state.skipped[-1] + state.accepted[-1] == len(norm_N)


def test_without_deviations_only_steps_that_are_not_finite_are_skipped():
    norm_N = noisy_norms(0)
    _, state = run(spikes.skip_updates(optax.sgd(0.1), deviations=None), gradients_of(norm_N))
    np.testing.assert_array_equal(is_skipped(state), ~np.isfinite(norm_N))


def test_no_spike_is_skipped_before_the_warmup_of_the_statistics():
    norm_N = 1 + 0.1 * np.random.default_rng(0).random(2 * WARMUP)
    norm_N[WARMUP - 1] = 50.0
    late = np.append(norm_N[:WARMUP], 50.0 * np.ones(1))
    late[WARMUP - 1] = 1.0
    guard = spikes.skip_updates(optax.sgd(0.1), deviations=3.0)
    assert not is_skipped(run(guard, gradients_of(norm_N))[1])[: WARMUP + 1].any()
    assert is_skipped(run(guard, gradients_of(late))[1]).tolist() == [False] * WARMUP + [True]


def test_after_the_longest_run_of_skipped_spikes_a_high_norm_is_a_new_level():
    rng = np.random.default_rng(0)
    norm_N = np.append(1 + 0.1 * rng.random(WARMUP), 50 * np.ones(2 * LONGEST))
    params_N, state = run(spikes.skip_updates(optax.sgd(0.1), deviations=6.0), gradients_of(norm_N))
    expected = np.zeros(len(norm_N), bool)
    expected[WARMUP : WARMUP + LONGEST] = True
    np.testing.assert_array_equal(is_skipped(state), expected)
    assert np.diff(params_N["bias"][-LONGEST:], axis=0).any(axis=1).all()


def test_numbers_that_are_not_finite_do_not_enter_the_statistics():
    norm_N = np.array([1.0, np.nan, 3.0, np.inf, 5.0], np.float32)
    _, state = run(spikes.skip_updates(optax.sgd(0.1), deviations=3.0), gradients_of(norm_N))
    np.testing.assert_allclose(state.mean, [1, 1, 2, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(state.variance, [0, 0, 1, 1, 8 / 3], rtol=1e-5)
    assert state.non_finite.tolist() == [0, 1, 0, 1, 0]
    assert state.skipped.tolist() == [0, 1, 1, 2, 2]


def test_the_number_of_steps_in_a_row_that_are_not_finite_starts_again_after_any_other():
    norm_N = np.array([np.nan, np.nan, 1.0, np.inf, np.inf, np.nan])
    _, state = run(spikes.skip_updates(optax.sgd(0.1), deviations=None), gradients_of(norm_N))
    assert state.non_finite.tolist() == [1, 2, 0, 1, 2, 3]


def test_a_loss_that_is_not_finite_skips_the_step_also_if_the_gradients_are():
    value_N = [1.0, math.nan, 1.0, math.inf]
    params_N, state = run(
        spikes.skip_updates(optax.sgd(0.1), deviations=None), gradients_of(np.ones(4)), value_N
    )
    assert is_skipped(state).tolist() == [False, True, False, True]
    moved = np.diff(params_N["bias"], axis=0).any(axis=1)
    assert moved.tolist() == [False, True, False]


SPIKES = [WARMUP + 3, WARMUP + 4, WARMUP + 9]
EVERY_OPTIMIZER = pytest.mark.parametrize(
    "name",
    [each if each == "adam" else pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS],
)


def norms_with_spikes(high: float) -> np.ndarray:
    norm_N = 1 + 0.1 * np.random.default_rng(1).random(WARMUP + 20)
    norm_N[SPIKES] = high
    return norm_N


@EVERY_OPTIMIZER
@pytest.mark.parametrize("high", [40.0, pytest.param(math.nan, marks=pytest.mark.slow)])
def test_a_run_with_skipped_steps_is_that_without_them_bit_for_bit(name, high):
    """With a constant rate the step number has no other effect."""
    options = dict(optimizer=name, clip_norm=0.5)
    options |= {"weight_decay": 0.01} if name in ("adamw", "lion", "muon", "schedule_free") else {}
    gradients_N = gradients_of(norms_with_spikes(high))
    without = jax.tree.map(lambda g: np.delete(g, SPIKES, axis=0), gradients_N)
    guarded, _ = run(optimizer_of(**options, skip_spikes=9.0), gradients_N)
    plain, _ = run(optimizer_of(**options), gradients_N)
    expected, _ = run(optimizer_of(**options, skip_spikes=9.0), without)
    assert not np.array_equal(plain["kernel"][-1], guarded["kernel"][-1])
    for leaf, of_others in guarded.items():
        assert of_others[SPIKES].tobytes() == of_others[np.array(SPIKES) - 1].tobytes()
        kept = np.delete(of_others, SPIKES, axis=0)
        np.testing.assert_array_equal(kept, expected[leaf])


@EVERY_OPTIMIZER
def test_a_skipped_step_leaves_parameters_and_moments_and_counts_for_the_schedule(name):
    """The next update has the rate of its step number, as the log says."""
    options = dict(optimizer=name, schedule="linear", warmup_steps=7, skip_spikes=9.0)
    gradients_N = gradients_of(norms_with_spikes(40.0))
    params_N, state = run(optimizer_of(**options), gradients_N)
    assert np.flatnonzero(is_skipped(state)).tolist() == SPIKES
    leaves = jax.tree_util.tree_leaves_with_path((params_N, state.inner))
    clocks = 0
    for path, leaf_N in leaves:
        changes = [leaf_N[n].tobytes() != leaf_N[n - 1].tobytes() for n in SPIKES]
        if leaf_N.dtype == np.int32 and all(changes):
            clocks += 1
            np.testing.assert_array_equal(leaf_N, np.arange(1, len(leaf_N) + 1))
        else:
            assert not any(changes), jax.tree_util.keystr(path)
    assert clocks == (2 if name == "schedule_free" else 1)


def test_the_update_after_a_spike_has_the_learning_rate_of_its_step():
    options = dict(optimizer="sgd", momentum=0.0, schedule="linear", warmup_steps=7)
    gradients_N = gradients_of(norms_with_spikes(40.0))
    params_N, _ = run(optimizer_of(**options, skip_spikes=9.0), gradients_N)
    config, after = OptimConfig(**{"learning_rate": 0.1, **options}), SPIKES[-1] + 1
    rate = optim.learning_rate(jnp.int32(after + 1), config, d_model=D_MODEL, num_steps=NUM_STEPS)
    moved = params_N["kernel"][after] - params_N["kernel"][after - 1]
    np.testing.assert_allclose(moved, -rate * gradients_N["kernel"][after], rtol=1e-3, atol=1e-6)


@EVERY_OPTIMIZER
def test_the_state_of_an_optimizer_without_skipped_updates_has_no_new_part(name):
    plain, guarded = (
        optimizer_of(optimizer=name, **fields).init(params())
        for fields in ({}, dict(nan_tolerance=1))
    )
    assert not any("Skip" in str(type(leaf)) for leaf in plain)
    assert jax.tree.structure(guarded.inner) == jax.tree.structure(plain)
    assert spikes.counts(plain) == {} and spikes.counts(guarded).keys() == {"skipped", "non_finite"}


def test_the_state_of_the_default_optimizer_is_that_of_adam_and_its_schedule():
    adam = optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9)
    expected = optax.chain(optax.chain(adam, optax.scale_by_learning_rate(lambda _: 0.1)))
    default = optim.make_optimizer(OptimConfig(), d_model=D_MODEL, num_steps=NUM_STEPS)
    assert jax.tree.structure(default.init(params())) == jax.tree.structure(expected.init(params()))


# Whole training steps. A batch of one label has a gradient several times as large as the mean over
# many, and a vector of infinity at a token makes loss and gradient NaN.

V, LENGTH, ROWS, BAD = 23, 7, 8, 22
MODEL = ModelConfig(
    architecture="decoder_lm",
    vocab_size=V,
    d_model=14,
    num_heads=2,
    d_ff=11,
    num_decoder_layers=1,
    max_length=LENGTH,
    tie_embeddings=False,
)


def batch(seed: int, labels: str = "all") -> dict[str, np.ndarray]:
    struct = loader.batch_struct(Config(model=MODEL), ROWS, LENGTH)
    target = np.random.default_rng(seed).integers(4, BAD, (ROWS, LENGTH), dtype=np.int32)
    if labels == "one":
        target[1:], target[:, 1:] = 0, 0
    if labels == "bad":
        target[0, 0] = BAD
    assert struct.keys() == {"target", "row"}
    return {"target": target, "row": np.arange(ROWS, dtype=np.int32)}


@functools.cache
def compiled(accumulate: int = 1, **fields):
    """Returns a compiled step with a moving average of the parameters, and its initial state."""
    config = OptimConfig(
        schedule="constant",
        learning_rate=1e-3,
        warmup_steps=1,
        accumulate_steps=accumulate,
        **fields,
    )
    config = Config(model=MODEL, optim=config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, ema_decay=0.9))
    train_step, initial_state = step.of_config(config)
    state = jax.jit(initial_state)()
    table = state.params["target_embedding"]["embedding"].at[BAD].set(jnp.inf)
    state.params["target_embedding"]["embedding"] = table
    return jax.jit(train_step), state


def assert_same_bits(first, second) -> None:
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_with_a_spike_is_skipped_and_counted(accumulate):
    train_step, state = compiled(accumulate, skip_spikes=6.0)
    for number in range(WARMUP + 2):
        state, sums = train_step(state, batch(number))
    usual = metrics.divide(sums)
    after, sums = train_step(state, batch(0, "one"))
    spike = metrics.divide(sums)
    assert spike["grad_norm"] > 2 * usual["grad_norm"]
    assert (usual["skipped"], spike["skipped"], spike["non_finite"]) == (0, 1, 0)
    assert_same_bits(after.params, state.params)
    assert int(after.step) == int(state.step) + 1
    later, sums = train_step(after, batch(WARMUP + 3))
    assert metrics.divide(sums)["skipped"] == 1
    kernel = lambda state: state.params["output"]["kernel"]  # noqa: E731
    assert not np.array_equal(kernel(later), kernel(after))


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_step_with_a_loss_of_nan_changes_neither_parameters_nor_their_average():
    train_step, state = compiled(nan_tolerance=2)
    state, _ = train_step(state, batch(0))
    after, sums = train_step(state, batch(1, "bad"))
    values = metrics.divide(sums)
    assert math.isnan(values["loss"]) and (values["skipped"], values["non_finite"]) == (1, 1)
    assert_same_bits(after.params, state.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(after.ema):
        is_table = "target_embedding" in jax.tree_util.keystr(path)
        assert np.isfinite(leaf[:BAD] if is_table else leaf).all()
    later, sums = train_step(after, batch(2))
    values = metrics.divide(sums)
    assert math.isfinite(values["loss"]) and (values["skipped"], values["non_finite"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_step_without_skipped_updates_applies_the_nan():
    """So the test above can fail."""
    train_step, state = compiled()
    after, sums = train_step(state, batch(1, "bad"))
    assert "skipped" not in sums
    assert np.isnan(after.params["output"]["kernel"]).any()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(skip_spikes=0.0), "skip_spikes"),
        (dict(skip_spikes=math.inf), "skip_spikes"),
        (dict(skip_spikes=-1.0), "skip_spikes"),
        (dict(nan_tolerance=-1), "nan_tolerance"),
    ],
)
def test_a_limit_outside_of_its_range_is_refused(fields, name):
    with pytest.raises(ValueError, match=rf"^config\.optim\.{name}: expected "):
        resolve({"optim": fields})
