"""Three updates of each optimizer against its definition in NumPy, in float64."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from flaxformer_lite.config import CHOICES, OptimConfig
from flaxformer_lite.training import optim, schedule_free

pytestmark = pytest.mark.usefixtures("quickly_compiled")
# 3 axes of queries (D, H, K) and of the output (H, K, D); a wide and a tall matrix
SHAPES = {
    "encoder": {
        "query": {"kernel": (37, 3, 41), "bias": (3, 41)},
        "out": {"kernel": (3, 41, 37)},
        "inner": {"kernel": (37, 43)},
        "outer": {"kernel": (43, 37)},
        "norm": {"scale": (37,)},
    },
    "embedding": {"embedding": (47, 37)},
    "output": {"kernel": (47, 37)},
}
MATRICES = {  # input axes, output axes
    "encoder/query/kernel": (37, 123),
    "encoder/out/kernel": (123, 37),
    "encoder/inner/kernel": (37, 43),
    "encoder/outer/kernel": (43, 37),
}
KERNELS = {*MATRICES, "output/kernel"}
RATE, WARMUP, DECAY, STEPS = 0.1, 2, 0.03, 3


def config_of(optimizer: str, **changes: object) -> OptimConfig:
    """Returns a config whose rates are RATE / 2, RATE, RATE."""
    fields = {"optimizer": optimizer, "schedule": "constant", "learning_rate": RATE}
    decay = {} if optimizer == "adam" else {"weight_decay": DECAY}
    return OptimConfig(**{**fields, "warmup_steps": WARMUP, "eps": 1e-3, **decay, **changes})


def rate(t: int) -> float:
    return RATE * min(t / WARMUP, 1)


def flat(tree: dict) -> dict[str, np.ndarray]:
    """Returns {'encoder/inner/kernel': array}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def sampled(seed: int) -> dict:
    """Returns an array of each shape, float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def initial() -> dict:
    """Returns small parameters, so that the rounding of their float32 is small too."""
    return jax.tree.map(lambda x: x / 8, sampled(0))


@functools.cache
def updated(config: OptimConfig, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the parameters after an update for each of `steps` gradients."""
    optimizer, params = optim.make_optimizer(config, d_model=37, num_steps=STEPS), initial()
    state, update = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
    for t in range(1, steps + 1):
        updates, state = update(sampled(t), state, params)
        params = optax.apply_updates(params, updates)
    return flat(params)


# The definitions: each returns the directions d_1, d_2, ... of the gradients g_1, g_2, ...


def adam(gradients, config, *, b1=None):
    """Kingma 2015, algorithm 1."""
    b1, mean, square = config.b1 if b1 is None else b1, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        mean = b1 * mean + (1 - b1) * g
        square = config.b2 * square + (1 - config.b2) * g**2
        yield mean / (1 - b1**t) / (np.sqrt(square / (1 - config.b2**t)) + config.eps)


def lion(gradients, config):
    """Chen 2023, algorithm 2."""
    mean = 0.0
    for g in gradients:
        yield np.sign(config.b1 * mean + (1 - config.b1) * g)
        mean = config.b2 * mean + (1 - config.b2) * g


def sgd(gradients, config):
    total = 0.0
    for g in gradients:
        total = (0.9 if config.momentum is None else config.momentum) * total + g
        yield total


def adafactor(gradients, config):
    """Shazeer 2018, algorithms 4 and 5 without the scale of the parameter."""
    square = rows = columns = 0.0
    for t, g in enumerate(gradients, 1):
        b2, squares = 1 - t**-0.8, g**2 + 1e-30
        second, longest = np.argsort(g.shape, stable=True)[-2:] if g.ndim > 1 else (0, 0)
        if g.ndim > 1 and g.shape[second] >= 32:
            rows = b2 * rows + (1 - b2) * squares.mean(longest, keepdims=True)
            columns = b2 * columns + (1 - b2) * squares.mean(second, keepdims=True)
            square = rows * columns / rows.mean(second, keepdims=True)
        else:
            square = b2 * square + (1 - b2) * squares
        d = g / np.sqrt(square)
        yield d / max(1, np.sqrt((d**2).mean()))


def newton_schulz(x):
    """Returns x after the 5 iterations of Jordan 2024, on the side with fewer rows."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def muon(gradients, config, shape):
    """Jordan 2024 with Nesterov momentum, without bias, and the scale of Liu 2025, equation 4."""
    mean, b = 0.0, 0.95 if config.momentum is None else config.momentum
    for t, g in enumerate(gradients, 1):
        mean = b * mean + (1 - b) * g
        ahead = b * mean / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
        yield 0.2 * max(shape) ** 0.5 * newton_schulz(ahead.reshape(shape)).reshape(g.shape)


def directions(name, gradients, config):
    match config.optimizer:
        case "lion":
            return lion(gradients, config)
        case "sgd":
            return sgd(gradients, config)
        case "adafactor":
            return adafactor(gradients, config)
        case "schedule_free":
            return adam(gradients, config, b1=0.0)
    if config.optimizer == "muon" and name in MATRICES:
        return muon(gradients, config, MATRICES[name])
    return adam(gradients, config)


def defined(config: OptimConfig) -> dict[str, np.ndarray]:
    """Returns the parameters after STEPS updates by the definitions."""
    result, gradients = {}, [flat(sampled(t)) for t in range(1, STEPS + 1)]
    for name, start in flat(initial()).items():
        found = directions(name, [g[name].astype(np.float64) for g in gradients], config)
        decay = config.weight_decay * (name in KERNELS)
        x = z = start.astype(np.float64)
        weights = 0.0
        for t, d in enumerate(found, 1):
            if config.optimizer != "schedule_free":
                x = x - rate(t) * (d + decay * x)
                continue
            y = (1 - config.b1) * z + config.b1 * x
            z, weights = z - rate(t) * (d + decay * y), weights + rate(t) ** 2
            x = x + rate(t) ** 2 / weights * (z - x)
        result[name] = x
    return result


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        *((name, {}) for name in CHOICES["optim.optimizer"]),
        ("sgd", {"momentum": 0.5}),
        ("muon", {"momentum": 0.5}),
    ],
)
def test_3_updates_are_those_of_the_definition(optimizer, changes):
    config = config_of(optimizer, **changes)
    expected, actual = defined(config), updated(config)
    for name, array in expected.items():
        tolerance = 1e-4 if optimizer == "muon" and name in MATRICES else 1e-6
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=tolerance, err_msg=name)


def test_the_definitions_of_different_optimizers_differ():
    arms = [defined(config_of(name)) for name in CHOICES["optim.optimizer"]]
    arms += [defined(config_of(name, momentum=0.5)) for name in ("sgd", "muon")]
    kernels = [arm["encoder/inner/kernel"] for arm in arms]
    for i, first in enumerate(kernels):
        for second in kernels[i + 1 :]:
            assert np.abs(first - second).max() > 1e-3


@pytest.mark.parametrize("optimizer", [x for x in CHOICES["optim.optimizer"] if x != "adam"])
def test_weight_decay_moves_the_kernels_and_nothing_else(optimizer):
    with_decay, without = (updated(config_of(optimizer, weight_decay=d)) for d in (DECAY, 0.0))
    moved = {name for name, x in with_decay.items() if np.abs(x - without[name]).max() > 1e-4}
    same = {name for name, x in with_decay.items() if (x == without[name]).all()}
    assert moved == KERNELS and same == set(with_decay) - KERNELS


def test_gradients_are_clipped_by_their_global_norm_before_the_optimizer():
    config = config_of("sgd", weight_decay=0.0, momentum=0.0, clip_norm=0.7)
    start, norm = flat(initial()), 0.0
    for name, x in updated(config).items():
        norm += ((x - start[name]) ** 2).sum()
    gradients = [flat(sampled(t)) for t in range(1, STEPS + 1)]
    units = [
        {name: g / np.sqrt(sum((x**2).sum() for x in each.values())) for name, g in each.items()}
        for each in gradients
    ]
    sums = {name: sum(rate(t) * each[name] for t, each in enumerate(units, 1)) for name in start}
    assert norm**0.5 == pytest.approx(
        0.7 * np.sqrt(sum((x**2).sum() for x in sums.values())), rel=1e-3
    )


def test_the_root_mean_square_of_muons_updates_is_about_0_2_for_every_shape():
    config = config_of("muon", weight_decay=0.0, warmup_steps=1)
    config = dataclasses.replace(config, learning_rate=1.0, schedule="linear")
    first, start = updated(config, steps=1), flat(initial())
    for name, x in first.items():
        size = np.sqrt(((x - start[name]) ** 2).mean())
        assert (0.12 < size < 0.25) if name in MATRICES else size > 0.8, (name, size)


def test_schedule_free_learning_is_that_of_optax_which_stores_another_point():
    """On a quadratic with its minimum at 3: here x is stored, in Optax y."""
    config = config_of("schedule_free", warmup_steps=1, b1=0.7)
    ours = optim.make_optimizer(config, d_model=37, num_steps=STEPS)
    theirs = optax.contrib.schedule_free_adamw(
        RATE, b1=0.7, b2=config.b2, eps=config.eps, weight_decay=DECAY
    )
    x = y = {"kernel": np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)}
    state, their_state = ours.init(x), theirs.init(y)

    def gradient(at):
        return jax.tree.map(lambda value: value - 3, at)

    for _ in range(7):
        point = schedule_free.gradient_point(x, state, b1=0.7)
        np.testing.assert_allclose(point["kernel"], y["kernel"], atol=2e-6)
        updates, state = ours.update(gradient(point), state, x)
        x = optax.apply_updates(x, updates)
        updates, their_state = theirs.update(gradient(y), their_state, y)
        y = optax.apply_updates(y, updates)
    averaged = optax.contrib.schedule_free_eval_params(their_state, y)
    np.testing.assert_allclose(x["kernel"], averaged["kernel"], atol=2e-6)
    assert np.abs(x["kernel"] - y["kernel"]).max() > 1e-3


def test_a_point_of_schedule_free_learning_weighs_the_square_of_its_rate():
    config = config_of("schedule_free", warmup_steps=3, weight_decay=0.0, eps=1e-30)
    optimizer, x = optim.make_optimizer(config, d_model=1, num_steps=3), {"w": np.zeros(1)}
    state = optimizer.init(x)
    for _ in range(3):
        updates, state = optimizer.update({"w": np.ones(1)}, state, x)
        x = optax.apply_updates(x, updates)
    # the direction of equal gradients is 1, so z is minus the sum of the rates
    rates = RATE * np.array([1, 2, 3]) / 3
    z = -np.cumsum(rates)
    assert x["w"][0] == pytest.approx((rates**2 * z).sum() / (rates**2).sum(), rel=1e-5)
    assert abs(x["w"][0] - z.mean()) > 0.01
