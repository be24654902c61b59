"""The schedules against their formulas, and steps of Adam against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxformer_lite.config import OptimConfig
from flaxformer_lite.training import optim

D_MODEL, WARMUP, NUM_STEPS = 509, 401, 1009
CONFIGS = {
    "paper": OptimConfig(warmup_steps=WARMUP, learning_rate=2.0),
    "inverse_sqrt": OptimConfig(schedule="inverse_sqrt", warmup_steps=WARMUP, learning_rate=3e-3),
    "linear": OptimConfig(schedule="linear", warmup_steps=WARMUP, learning_rate=3e-3),
    "cosine": OptimConfig(
        schedule="cosine", warmup_steps=WARMUP, learning_rate=3e-3, final_rate=0.07
    ),
    "wsd": OptimConfig(
        schedule="wsd", warmup_steps=WARMUP, learning_rate=3e-3, final_rate=0.07, decay_steps=103
    ),
    "constant": OptimConfig(schedule="constant", warmup_steps=WARMUP, learning_rate=3e-3),
}
STEPS = np.arange(1, NUM_STEPS + 1)


def rates(schedule, steps=STEPS, num_steps=NUM_STEPS):
    config = CONFIGS[schedule]
    return np.asarray(
        optim.learning_rate(jnp.asarray(steps), config, d_model=D_MODEL, num_steps=num_steps),
        np.float64,
    )


def equation_3(step):
    return D_MODEL**-0.5 * min(step**-0.5, step * WARMUP**-1.5)


def up_then_down(step):
    """Returns a line from 0 to 1 at the end of the warmup, then to 0 after the last step."""
    return step / WARMUP if step <= WARMUP else (NUM_STEPS + 1 - step) / (NUM_STEPS + 1 - WARMUP)


def test_the_schedule_of_the_paper_is_equation_3_times_the_factor():
    np.testing.assert_allclose(
        rates("paper"), [2 * equation_3(float(step)) for step in STEPS], rtol=1e-5
    )


def test_the_inverse_sqrt_schedule_is_equation_3_scaled_to_its_peak():
    scale = 3e-3 / equation_3(float(WARMUP))
    np.testing.assert_allclose(
        rates("inverse_sqrt"), [scale * equation_3(float(step)) for step in STEPS], rtol=1e-5
    )


def test_the_linear_schedule_rises_linearly_and_then_falls_linearly():
    np.testing.assert_allclose(
        rates("linear"), [3e-3 * up_then_down(step) for step in STEPS], rtol=1e-5
    )


def cosine(step):
    """Returns the share of the peak: half a cosine from 1 to 0.07 after the warmup."""
    angle = np.pi * max(0, step - WARMUP) / (NUM_STEPS - WARMUP)
    return min(step / WARMUP, 0.07 + 0.93 * (1 + np.cos(angle)) / 2)


def wsd(step):
    """Returns the share of the peak: up in 401 steps, down in the last 103 to 0.07."""
    return np.interp(step, [0, WARMUP, NUM_STEPS - 103, NUM_STEPS], [0, 1, 1, 0.07])


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("cosine", cosine), ("wsd", wsd), ("constant", lambda step: min(1, step / WARMUP))],
)
def test_a_schedule_is_its_closed_form_and_stays_at_its_last_rate(schedule, share):
    np.testing.assert_allclose(rates(schedule), [3e-3 * share(step) for step in STEPS], rtol=1e-4)
    after = rates(schedule, [NUM_STEPS, NUM_STEPS + 1, NUM_STEPS + 50])
    np.testing.assert_allclose(after, 3e-3 * (1 if schedule == "constant" else 0.07), rtol=1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_warmup_longer_than_the_run_is_a_line_up_to_its_decay(schedule):
    short = rates(schedule, [1, 2], num_steps=2)
    np.testing.assert_allclose(short[0], 3e-3 / WARMUP, rtol=1e-5)
    assert (short > 0).all()


@pytest.mark.parametrize(("num_steps", "decay_steps"), [(1009, 100), (13, 1), (3, 1)])
def test_the_last_phase_is_a_tenth_of_the_training_by_default(num_steps, decay_steps):
    assert OptimConfig(schedule="wsd").last_phase(num_steps) == decay_steps
    assert OptimConfig(schedule="wsd", decay_steps=7).last_phase(num_steps) == 7


@pytest.mark.parametrize("schedule", CONFIGS)
def test_every_schedule_peaks_at_the_end_of_the_warmup_and_is_always_positive(schedule):
    assert STEPS[rates(schedule).argmax()] == WARMUP
    assert (rates(schedule) > 0).all()


@pytest.mark.parametrize(
    ("schedule", "peak"),
    [("paper", 2 * (D_MODEL * WARMUP) ** -0.5), ("inverse_sqrt", 3e-3), ("linear", 3e-3)],
)
def test_the_peak_is_that_of_the_closed_form(schedule, peak):
    assert rates(schedule).max() == pytest.approx(peak, rel=1e-5)


def test_the_base_model_of_the_paper_peaks_near_7e_4():
    config = OptimConfig()
    peak = optim.learning_rate(jnp.int32(4000), config, d_model=512, num_steps=100_000)
    assert float(peak) == pytest.approx((512 * 4000) ** -0.5, rel=1e-5)


def test_the_linear_schedule_is_0_after_its_end_and_accepts_a_warmup_longer_than_the_run():
    assert rates("linear", [NUM_STEPS + 1, NUM_STEPS + 50]).tolist() == [0, 0]
    short = rates("linear", [1, 2, 3], num_steps=3)
    np.testing.assert_allclose(short, [3e-3 / WARMUP * step for step in (1, 2, 3)], rtol=1e-5)


def updated(config, gradients):
    """Returns parameters that start at 0, after one step for each of `gradients`."""
    optimizer = optim.make_optimizer(config, d_model=D_MODEL, num_steps=NUM_STEPS)
    params = jax.tree.map(jnp.zeros_like, gradients[0])
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def adam(config, gradients):
    """Returns the result of algorithm 1 of the Adam paper, in float64."""
    mean = square = value = np.zeros_like(gradients[0], np.float64)
    for t, gradient in enumerate(gradients, start=1):
        mean = config.b1 * mean + (1 - config.b1) * gradient
        square = config.b2 * square + (1 - config.b2) * gradient**2
        rate = float(
            optim.learning_rate(jnp.int32(t), config, d_model=D_MODEL, num_steps=NUM_STEPS)
        )
        value = value - rate * (mean / (1 - config.b1**t)) / (
            np.sqrt(square / (1 - config.b2**t)) + config.eps
        )
    return value


@pytest.mark.parametrize("changes", [{}, dict(b1=0.7, b2=0.9, eps=1e-3)])
@pytest.mark.parametrize("steps", [1, 5])
def test_steps_of_the_optimizer_are_those_of_adam(steps, changes):
    config = OptimConfig(warmup_steps=3, learning_rate=5.0, **changes)
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=7).astype(np.float32) * scale for scale in rng.random(steps)]
    expected = adam(config, gradients)
    np.testing.assert_allclose(
        updated(config, [{"w": g} for g in gradients])["w"], expected, rtol=1e-4
    )


def test_the_first_step_of_adam_is_the_rate_times_the_sign_of_the_gradient():
    # mean / sqrt(square) of one gradient is its sign, if epsilon is small compared with it
    config = OptimConfig(warmup_steps=3)
    gradient = np.array([1e-3, -5.0, 1e3, -1e-9], np.float32)
    moved = np.asarray(updated(config, [{"w": gradient}])["w"])
    rate = D_MODEL**-0.5 * 3**-1.5
    np.testing.assert_allclose(moved, -rate * gradient / (np.abs(gradient) + 1e-9), rtol=1e-4)
    assert moved[3] == pytest.approx(rate / 2, rel=1e-4)


def test_gradients_are_clipped_by_their_global_norm_before_adam():
    gradients = [
        {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])},
        {"a": jnp.array([0.3, 0.0]), "b": jnp.zeros((1, 1))},
    ]
    # norms 5 and 0.3; the limit is 1
    clipped = [jax.tree.map(lambda g: g / 5, gradients[0]), gradients[1]]
    config = OptimConfig(warmup_steps=3)
    with_clipping = updated(OptimConfig(warmup_steps=3, clip_norm=1.0), gradients)
    without = updated(config, gradients)
    assert abs(with_clipping["a"][0] - without["a"][0]) > 1e-4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        with_clipping,
        updated(config, clipped),
    )


def test_gradients_with_a_norm_below_the_limit_are_not_clipped():
    gradients = [{"a": jnp.array([0.3, -0.4])}, {"a": jnp.array([0.1, 0.2])}]
    config = OptimConfig(warmup_steps=3)
    same = updated(OptimConfig(warmup_steps=3, clip_norm=0.6), gradients)
    np.testing.assert_array_equal(same["a"], updated(config, gradients)["a"])
