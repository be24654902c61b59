"""The loss of the guided head: its closed form, its head, and its part of every kind of step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    resolve,
)
from flaxformer_lite.data.batches import loader
from flaxformer_lite.decoding.cross_attention import attention_weights
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import guided_alignment, meshes, metrics, parallel, step
from flaxformer_lite.training.guided_alignment import GuidedHead

pytestmark = pytest.mark.usefixtures("quickly_compiled")

B, T, V = 8, 7, 23
SLOW = pytest.mark.slow
KEY = jax.random.key(5)
MODEL = ModelConfig(
    vocab_size=V,
    d_model=20,
    num_heads=4,
    num_kv_heads=2,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=2,
    max_length=T,
    dropout=0.2,
)
GUIDED = GuidedHead(weight=0.3, layer=0, head=3)


def batch_of(rows: int = B) -> dict[str, np.ndarray]:
    """Returns pairs of two lengths, with and without links; the links of padding are none."""
    rng = np.random.default_rng(3)
    batch = {name: rng.integers(4, V, (rows, T), dtype=np.int32) for name in ("source", "target")}
    batch["row"] = np.arange(rows, dtype=np.int32)
    batch["source"][1::2, 4:], batch["target"][::3, 5:] = 0, 0
    linked_BTS = rng.random((rows, T, T)) < 0.3
    linked_BTS &= (batch["source"] != 0)[:, None] & (batch["target"] != 0)[:, :, None]
    linked_BTS[2] = False
    return batch | {"alignment": linked_BTS}


def test_the_loss_is_the_cross_entropy_with_a_uniform_distribution_over_the_links():
    rng = np.random.default_rng(2)
    scores, linked = 3 * rng.normal(size=(3, 5, 7)), rng.random((3, 5, 7)) < 0.3
    mask = np.arange(7) < np.array([7, 4, 6])[:, None, None]
    linked &= mask
    expected, count = 0.0, 0
    for b, t in np.ndindex(3, 5):
        probability = np.exp(scores[b, t, mask[b, 0]])
        probability /= probability.sum()
        if links := np.flatnonzero(linked[b, t]).tolist():
            expected -= np.mean([np.log(probability[s]) for s in links])
            count += 1
    total, weight = guided_alignment.alignment_loss(
        jnp.float32(scores), jnp.array(linked), jnp.array(mask)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert weight == count < 15


def test_its_gradient_is_the_weights_minus_the_links_and_0_for_tokens_without_a_link():
    scores = np.random.default_rng(4).normal(size=(1, 2, 5))
    linked = np.array([[[True, False, True, False, False], [False] * 5]])
    of = lambda x: guided_alignment.alignment_loss(x, jnp.array(linked), jnp.ones((1, 1, 5), bool))  # noqa: E731
    gradient = jax.grad(lambda x: of(x)[0])(jnp.float32(scores))
    weights = np.exp(scores[0, 0]) / np.exp(scores[0, 0]).sum()
    np.testing.assert_allclose(gradient[0, 0], weights - linked[0, 0] / 2, atol=1e-6)
    np.testing.assert_array_equal(gradient[0, 1], 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(dict(tie_layers=True), marks=SLOW),
        pytest.param(dict(remat="full"), marks=SLOW),
    ],
)
def test_the_head_is_that_of_the_weights_that_the_model_returns(changes):
    config = dataclasses.replace(MODEL, **changes)
    model, params = runs.varied_model(config)
    batch = jax.tree.map(jnp.asarray, batch_of())
    inputs = batch["source"], batch["target"]

    @jax.jit
    def both(params):
        _, kept = model.apply({"params": params}, *inputs, mutable=["projections"])
        scores = [
            guided_alignment.head_scores(kept["projections"], config, GuidedHead(1.0, n, h))
            for n, h in np.ndindex(2, 4)
        ]
        return jnp.stack(scores, axis=1), attention_weights(config, params, *inputs)

    scores, weights = both(params)
    masked = jnp.where(batch["source"][:, None, None] != 0, scores, -jnp.inf)
    expected = jnp.concatenate(weights["cross-attention"], axis=1)
    is_token_BT = np.array(batch["target"] != 0)  # padding has no links, and no loss
    each_token = [x.swapaxes(1, 2)[is_token_BT] for x in (jax.nn.softmax(masked), expected)]
    np.testing.assert_allclose(*each_token, atol=1e-6)
    assert not np.allclose(expected[:, 0], expected[:, 4], atol=1e-2)  # the layers differ


def of_loss(config: ModelConfig = MODEL, key=None, batch=None, **options):
    model, params = runs.varied_model(config)
    function = functools.partial(step.loss_sums, model=model, dropout_key=key, **options)
    return jax.jit(function)(params, batch or batch_of())


def test_the_objective_has_the_weighted_sum_and_the_other_metrics_stay():
    plain, guided = of_loss(label_smoothing=0.1), of_loss(label_smoothing=0.1, guided=GUIDED)
    total, count = guided[1].pop("alignment_loss")
    assert count == batch_of()["alignment"].any(axis=-1).sum() > 9
    np.testing.assert_allclose(guided[0] - plain[0], GUIDED.weight * total, rtol=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), guided[1], plain[1])


@SLOW
def test_with_r_drop_it_is_the_mean_of_both_passes():
    batch = batch_of()
    one, other = (
        of_loss(key=KEY, guided=GUIDED, batch={**batch, "row": rows})[1]["alignment_loss"]
        for rows in (batch["row"], ~batch["row"])
    )
    assert abs(one[0] - other[0]) > 1e-3
    both = of_loss(key=KEY, guided=GUIDED, r_drop_weight=2.0)[1]["alignment_loss"]
    np.testing.assert_allclose(both, (np.array(one) + np.array(other)) / 2, rtol=1e-5)


@SLOW
def test_microbatches_have_the_gradients_of_the_batch():
    model, _ = runs.varied_model(MODEL)  # whose parameters are large, and round more
    inputs = [batch_of()[name] for name in ("source", "target")]
    params = jax.jit(model.init)(KEY, *inputs)["params"]

    def gradients(**options):
        of_batch = functools.partial(step.gradient_sums, model=model, dropout_key=KEY, **options)
        return jax.jit(of_batch)(params, batch_of())

    whole, parts, plain = (
        gradients(guided=GUIDED),
        gradients(guided=GUIDED, microbatches=4),
        gradients(),
    )
    largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(whole[0]))
    close = functools.partial(np.testing.assert_allclose, atol=1e-5 * largest, rtol=1e-5)
    jax.tree.map(close, parts, whole)
    differ = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), whole[0], plain[0])
    assert max(jax.tree.leaves(differ)) > 1e-3 * largest


ARMS = {"mesh of 8": ("mesh", 8, 1, 1), "pmap over 8": ("pmap", 8, 1, 1)}
ARMS |= {"one device": ("mesh", 1, 1, 1), "split over 8": ("mesh", 2, 2, 2)}


@functools.cache
def trained(arm: str) -> list[dict[str, float]]:
    """Returns the metrics of 3 steps on one batch."""
    mode_name, *sizes = ARMS[arm]
    mode = parallel.MODES[mode_name](meshes.make_mesh(*sizes))
    config = Config(
        model=dataclasses.replace(MODEL, num_heads=4, num_kv_heads=None, vocab_size=24, d_ff=12),
        data=DataConfig(rows_multiple=B),
        optim=OptimConfig(schedule="constant", learning_rate=1e-2, warmup_steps=1),
        train=TrainConfig(guided_alignment=2.0, alignment_layer=1, alignment_head=2),
    )
    of_mode = dict(axis_name=mode.axis_name, row_shards=mode.row_shards)
    train_step, initial_state = step.of_config(config, **of_mode)
    state, struct = mode.make_state(initial_state), loader.batch_struct(config, B, T, train=True)
    run = mode.compile(train_step, jax.eval_shape(initial_state), struct, donate=True)
    values = []
    for _ in range(3):
        state, sums = run(state, mode.put_batch(batch_of()))
        values.append(metrics.divide(mode.read(sums)))
    return values


@SLOW
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "one device"])
def test_devices_have_the_losses_of_1_device(arm):
    for name in ("loss", "alignment_loss", "grad_norm"):
        expected = [each[name] for each in trained("one device")]
        np.testing.assert_allclose([each[name] for each in trained(arm)], expected, rtol=1e-4)
    first, *_, last = trained("one device")
    assert last["alignment_loss"] < first["alignment_loss"] - 1e-3


def test_only_batches_to_train_on_have_links():
    config = Config(train=TrainConfig(guided_alignment=0.1))
    with_links = loader.batch_struct(config, 8, 5, train=True)
    assert with_links["alignment"] == jax.ShapeDtypeStruct((8, 5, 5), np.bool_)
    for other in (
        loader.batch_struct(config, 8, 5),
        loader.batch_struct(Config(), 8, 5, train=True),
    ):
        assert other.keys() == with_links.keys() - {"alignment"}


def test_by_default_no_head_is_guided_and_else_head_0_of_the_layer_before_the_last():
    assert guided_alignment.of_config(Config()) is None
    config = Config(train=TrainConfig(guided_alignment=0.05))
    assert guided_alignment.of_config(config) == GuidedHead(0.05, 4, 0)
    one_layer = dataclasses.replace(config, model=ModelConfig(num_decoder_layers=1))
    assert guided_alignment.of_config(one_layer) == GuidedHead(0.05, 0, 0)


FILES = {"dataset": "parallel_text", "train_files": ("a", "b"), "train_alignments": ("c",)}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"data": FILES}, "data.train_alignments: applies only with train.guided_alignment"),
        ({"train": {"alignment_layer": 1}}, "train.alignment_layer: applies only with"),
        ({"train": {"guided_alignment": 0.1, "alignment_layer": 6}}, "train.alignment_layer: .* 5"),
        ({"train": {"guided_alignment": 0.1, "alignment_head": 8}}, "train.alignment_head: .* 7"),
        (
            {"train": {"guided_alignment": 0.1}, "model": {"architecture": "decoder_lm"}},
            "train.guided_alignment: needs cross-attention",
        ),
        (
            {"train": {"guided_alignment": 0.1}, "model": {"attention": "additive"}},
            "train.guided_alignment: .*model.attention",
        ),
        (
            {"train": {"guided_alignment": 0.1}, "data": {"packing": True}},
            "train.guided_alignment: .*data.packing",
        ),
        (
            {"train": {"guided_alignment": 0.1}, "data": {"subword_sampling": 0.1}},
            "train.guided_alignment: .*data.subword_sampling",
        ),
        (
            {"train": {"guided_alignment": 0.1}, "data": {"train_alignments": ("c",)}},
            "data.train_alignments: .*parallel_text",
        ),
        (
            {"train": {"guided_alignment": 0.1}, "data": FILES | {"train_files": ("a.tsv",)}},
            "data.train_alignments: .*two files",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(sections, field):
    with pytest.raises(InputError, match=rf"^config\.{field}"):
        resolve(sections)


def test_the_fields_are_accepted_together():
    config = resolve({"data": FILES, "train": {"guided_alignment": 0.1, "alignment_head": 7}})
    assert config.data.train_alignments == ("c",)
