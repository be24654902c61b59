"""What a model draws at its start is the same when it is drawn at once, by a program that layers do not enlarge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxformer_lite.config import Config, ModelConfig, TrainConfig
from flaxformer_lite.training import draws, step
from flaxformer_lite.training.draws import at_once

SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 13, "max_length": 17}
MODEL = ModelConfig(vocab_size=11, num_encoder_layers=2, num_decoder_layers=2, **SIZES)
MODELS = {
    "encoder_decoder": {},
    "untied": {"tie_embeddings": False, "output_bias": True},
    "classifier": {"architecture": "encoder_classifier", "num_classes": 5},
    "language_model": {"architecture": "decoder_lm", "position": "learned"},
    "masked": {"decoder": "masked"},
    "additive": {"attention": "additive"},
    "relative": {"position": "relative", "relative_values": True},
    "t5_bias": {"position": "t5_bias"},
    "grouped": {"num_kv_heads": 1, "activation": "swiglu"},
    "remat": {"remat": "full"},
}
MORE = "untied", "relative", "t5_bias", "grouped"  # which take long, and draw as others do


def initial_state(**changes):
    config = Config(model=dataclasses.replace(MODEL, **changes), train=TrainConfig(seed=3, ema_decay=0.9))
    return step.of_config(config)[1]


def draws_of(make):
    """How many times its program calls a function that makes numbers of keys."""
    calls = [equation for equation in jax.make_jaxpr(make)().eqns if "jaxpr" in equation.params]
    return sum(jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key) for call in calls for atom in call.invars)


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in MORE else []) for n in MODELS])
def test_the_state_of_every_model_is_the_same_but_for_how_a_product_is_rounded(name):
    make = initial_state(**MODELS[name])
    drawn, at_once_drawn = jax.jit(make)(), jax.jit(at_once(make))()
    assert jax.tree.structure(drawn) == jax.tree.structure(at_once_drawn)
    close = functools.partial(np.testing.assert_allclose, rtol=2**-22, atol=0)
    jax.tree.map(close, drawn, at_once_drawn)
    random = [leaf for leaf in jax.tree.leaves(drawn.params) if np.ptp(leaf) > 0]
    assert len({np.asarray(leaf).tobytes() for leaf in random}) == len(random) > 9  # each by a key of its own


CHANGES = {"one by one": lambda make: make, "at once": at_once}


def test_more_layers_are_no_more_draws():
    few, many = initial_state(num_encoder_layers=1), initial_state(num_encoder_layers=4)
    drawn = {name: [draws_of(change(make)) for make in (few, many)] for name, change in CHANGES.items()}
    assert drawn["one by one"][0] < drawn["one by one"][1]
    assert drawn["at once"][0] == drawn["at once"][1] < drawn["one by one"][0]


def test_only_so_many_bytes_are_drawn_together(monkeypatch):
    def make():
        keys = jax.random.split(jax.random.key(0), 7)
        return [jax.random.normal(key, (64,)) for key in keys]

    def count():
        return draws_of(at_once(make)), str(jax.make_jaxpr(at_once(make))())

    alone = draws_of(make)
    drawn, program = count()
    assert drawn < alone and "f32[7,64]" in program
    monkeypatch.setattr(draws, "AT_ONCE", 3 * 64 * 4)
    drawn, program = count()
    assert drawn < alone and "f32[3,64]" in program and "f32[7,64]" not in program
    jax.tree.map(np.testing.assert_array_equal, jax.jit(make)(), jax.jit(at_once(make))())


def test_keys_of_another_generator_are_drawn_one_by_one():
    def make():
        return [jax.random.normal(key, (64,)) for key in jax.random.split(jax.random.key(0, impl="rbg"), 3)]

    assert draws_of(at_once(make)) == draws_of(make)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(make)(), jax.jit(at_once(make))())


def test_an_initialiser_may_have_a_derivative_of_its_own():
    @jax.custom_jvp
    def clipped(x):
        return jnp.minimum(x, 0.5)

    clipped.defjvps(lambda tangent, _, x: tangent * (x < 0.5))

    def make():
        return [clipped(jax.random.normal(key, (64,))) for key in jax.random.split(jax.random.key(0), 3)]

    jax.tree.map(np.testing.assert_array_equal, jax.jit(make)(), jax.jit(at_once(make))())


def test_what_no_result_needs_is_not_computed():
    make = initial_state()
    assert "dot_general" in str(jax.make_jaxpr(make)()) and "dot_general" not in str(jax.make_jaxpr(at_once(make))())


def test_what_is_drawn_in_another_manner_or_of_what_was_drawn_stays_apart():
    def make():
        first, second, third = jax.random.split(jax.random.key(0), 3)
        length = jax.random.randint(first, (), 3, 7)
        again = jax.random.key(length)
        narrow, wide = (jax.random.uniform(second, (5,), maxval=most) for most in (1.0, 2.0))
        return {
            "narrow": narrow,
            "wide": wide,
            "normal": [jax.random.normal(key, (5,)) for key in (second, third, again)],
            "longer": jax.random.normal(third, (7,)),
            "constant": jnp.arange(3),
        }

    jax.tree.map(np.testing.assert_array_equal, jax.jit(make)(), jax.jit(at_once(make))())
