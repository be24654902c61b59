"""A model with two vocabularies on a mesh of data, fsdp and tensor, against 1 device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from flaxformer_lite.config import Config, DecodeConfig, ModelConfig, OptimConfig
from flaxformer_lite.data.batches import loader
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import EOS
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.training import meshes, metrics, optim, parallel, sharding
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

# Each mesh axis divides both sizes.
SOURCE, TARGET, ROWS, LENGTH, STEPS = 46, 34, 8, 7, 5
WHOLE, MESH = (1, 1, 1), (2, 2, 2)
MODEL = ModelConfig(
    activation="gelu",  # the gradient of ReLU depends on rounding near 0
    vocab_size=SOURCE,
    target_vocab_size=TARGET,
    d_model=16,
    num_heads=2,
    d_ff=22,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=13,
)


@functools.cache
def batches():
    rng = np.random.default_rng(3)
    made = []
    for _ in range(STEPS):
        batch = {"row": np.arange(ROWS, dtype=np.int32)}
        for side, size in (("source", SOURCE), ("target", TARGET)):
            rows = rng.integers(4, size, (ROWS, LENGTH)).astype(np.int32)
            rows[:, 0], rows[:, -1] = size - 1, EOS
            batch[side] = rows
        made.append(batch)
    return made


def trained(sizes):
    """Returns the losses of some steps, and the mode and the state after them."""
    model = transformer.build_model(MODEL)
    optimizer = optim.make_optimizer(
        OptimConfig(schedule="linear", learning_rate=3e-3, warmup_steps=2),
        d_model=MODEL.d_model,
        num_steps=STEPS,
    )
    mode = parallel.MeshMode(meshes.make_mesh(*sizes))
    state = mode.make_state(functools.partial(state_lib.init_state, model, optimizer, seed=5))
    step = functools.partial(
        step_lib.train_step,
        model=model,
        optimizer=optimizer,
        label_smoothing=0.1,
        axis_name=mode.axis_name,
        row_shards=mode.row_shards,
    )
    struct = loader.batch_struct(Config(model=MODEL), ROWS, LENGTH)
    run = mode.compile(step, jax.eval_shape(lambda: state), struct, donate=False)
    losses = []
    for batch in batches():
        state, sums = run(state, mode.put_batch(batch))
        losses.append(metrics.divide(mode.read(sums))["loss"])
    return losses, mode, state


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_a_mesh_trains_and_decodes_as_1_device_and_splits_both_vocabularies():
    (expected, *one), (losses, mode, state) = (trained(sizes) for sizes in (WHOLE, MESH))
    assert losses[0] > losses[-1] > 0
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    params = mode.over_mesh(state.params)
    for side, size in (("source", SOURCE), ("target", TARGET)):
        table = params[f"{side}_embedding"]["embedding"]
        assert {each.data.shape for each in table.addressable_shards} == {(size // 2, 16 // 2)}
    texts = []
    for each, weights in ((one[0], one[1].params), (mode, state.params)):
        decoder = Decoder(
            transformer.build_model(MODEL),
            DecodeConfig(method="beam", beam_size=3, max_extra_length=5),
            rows=ROWS,
            sharding=parallel.decoding_shardings(each.mesh),
        )
        found = decoder(each.over_mesh(weights), [row[:5] for row in batches()[0]["source"]])
        texts.append([ids.tolist() for ids in found])
    assert texts[0] == texts[1] and all(token < TARGET for row in texts[0] for token in row)


@pytest.mark.parametrize("side", ["source", "target"])
def test_the_error_for_a_vocabulary_that_devices_cannot_share_names_its_side(side):
    field = "vocab_size" if side == "source" else "target_vocab_size"
    config = dataclasses.replace(MODEL, **{field: 41})
    params = parameters.shapes(transformer.build_model(config))
    with pytest.raises(ValueError, match=rf"{side}_embedding/embedding of shape \(41, 16\)"):
        sharding.check(params, meshes.make_mesh(*MESH))
