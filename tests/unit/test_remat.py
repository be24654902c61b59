"""Rematerialisation in the backward pass: the same step with less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxformer_lite.config import CHOICES, Config, ModelConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.model import transformer
from flaxformer_lite.training import meshes, parallel
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

V, ROWS, LENGTH, CLASSES = 37, 5, 11, 3
MODEL = ModelConfig(
    vocab_size=V, d_model=22, num_heads=2, d_ff=29, num_encoder_layers=1, num_decoder_layers=1
)
MODEL = dataclasses.replace(MODEL, num_classes=CLASSES, dropout=0.3, max_length=LENGTH)
# every architecture, and every way in which positions enter a layer from outside
CASES = [("full", dict(position="t5_bias"))]
MORE = [("dots", dict(architecture=architecture)) for architecture in CHOICES["model.architecture"]]
MORE += [
    ("full", dict(position="relative", relative_values=True)),
    ("full", dict(decoder="masked")),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def batch() -> dict[str, jax.Array]:
    rng = np.random.default_rng(3)
    source, target = (rng.integers(4, V, (ROWS, LENGTH), dtype=np.int32) for _ in range(2))
    source[1, 7:], target[2, 4:] = 0, 0
    arrays = {
        "source": source,
        "target": target,
        "label": rng.integers(0, CLASSES, ROWS),
        "row": np.arange(ROWS),
    }
    return jax.tree.map(jnp.asarray, arrays)


def gradients(config: ModelConfig):
    """Returns the gradients of a training step with dropout, and the sums of its metrics."""
    model, key = transformer.build_model(config), jax.random.key(1)
    params = jax.jit(lambda: state_lib.init_state(model, optax.identity(), seed=0).params)()
    names = set(loader.batch_struct(Config(model=config), ROWS, LENGTH))
    inputs = {name: x for name, x in batch().items() if name in names}
    step = functools.partial(step_lib.gradient_sums, model=model, dropout_key=key)
    return jax.jit(step)(params, inputs)


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize(("remat", "changes"), CASES, ids=str)
def test_gradients_and_dropout_are_those_without_remat(remat, changes):
    plain, recomputed = (
        gradients(dataclasses.replace(MODEL, remat=name, **changes)) for name in ("none", remat)
    )
    assert jax.tree.structure(plain) == jax.tree.structure(recomputed)
    for expected, actual in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["mesh", "pmap"])
def test_a_step_needs_less_memory_the_more_it_recomputes(mode):
    def compiled(remat):
        sizes = dict(vocab_size=V, d_model=64, num_heads=4, d_ff=256, num_decoder_layers=3)
        config = Config(model=ModelConfig(architecture="decoder_lm", remat=remat, **sizes))
        of_mode = parallel.MODES[mode](meshes.make_mesh(1))
        step, initial_state = step_lib.of_config(
            config, axis_name=of_mode.axis_name, row_shards=of_mode.row_shards
        )
        struct = loader.batch_struct(config, 8, 64)
        return of_mode.compile(step, jax.eval_shape(initial_state), struct, donate=True)

    none, dots, full = (compiled(remat) for remat in CHOICES["model.remat"])
    memory = [each.memory_analysis().temp_size_in_bytes for each in (none, dots, full)]
    assert memory[0] > 1.5 * memory[1] > 1.5 * 1.2 * memory[2]
    flops = [each.cost_analysis()["flops"] for each in (none, dots, full)]
    # at most one more forward pass, 1 / 3 of a step
    assert flops[0] < flops[1] < flops[2] < 4 / 3 * 1.1 * flops[0]
