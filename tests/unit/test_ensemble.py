"""Ensembles: the mean of probabilities in scoring, decoding, beam search and the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import DecodeConfig, ModelConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model import parameters
from flaxformer_lite.model.ensemble import Ensemble, log_mean_probability
from flaxformer_lite.training import ensemble_step, losses, predictions, step

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, CLASSES, LONGEST = 13, 5, 17
SIZES = dict(vocab_size=V, d_model=14, num_heads=3, d_head=5, d_ff=11, num_classes=CLASSES)
FIRST = ModelConfig(num_encoder_layers=1, num_decoder_layers=1, max_length=LONGEST, **SIZES)
# other sizes, positions, parameters and maximum length
SECOND = dataclasses.replace(
    FIRST, d_model=6, num_heads=2, d_ff=7, num_decoder_layers=2, max_length=19
)
SECOND = dataclasses.replace(SECOND, position="t5_bias", norm_placement="pre", tie_embeddings=False)


@functools.cache
def members_of(architecture, *configs):
    """Returns (model, parameters) per config; parameters of equal configs differ too.

    The probabilities are spread enough that no member dominates the mean.
    """
    made = [
        runs.varied_model(dataclasses.replace(config, architecture=architecture))
        for config in configs
    ]
    return [
        (model, jax.tree.map(lambda x, n=number: 0.6**n * jnp.roll(x, n), params))
        for number, (model, params) in enumerate(made)
    ]


def ensemble_of(members):
    params = {f"members_{number}": params for number, (_, params) in enumerate(members)}
    return Ensemble(tuple(model.config for model, _ in members)), params


@functools.cache
def jitted(model):
    return jax.jit(model.apply)


def mean_probability(members, *inputs, **options):
    """Returns the mean over the models, each applied alone, in float64: (..., V)."""
    logits = [
        np.asarray(jitted(model)({"params": p}, *inputs, **options), np.float64)
        for model, p in members
    ]
    each = [np.exp(x - x.max(-1, keepdims=True)) for x in logits]
    each = [x / x.sum(-1, keepdims=True) for x in each]
    assert np.abs(each[0] - each[1]).max() > 0.05  # else the mean would be near each of them
    return np.mean(each, axis=0)


def ids_of(*lengths, width, end=True):
    rng = np.random.default_rng(3)
    rows = np.zeros((len(lengths), width), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.integers(4, V, length)
        if end and length:
            row[length - 1] = EOS
    return rows


def test_the_mean_of_probabilities_is_exact_with_probabilities_of_0_and_1():
    logits = [
        np.array([[0.0, 1.0, -np.inf]], np.float32),
        np.array([[500.0, 3.0, 500.0]], np.float32),
    ]
    each = np.array([1 / (1 + np.e), np.e / (1 + np.e), 0.0]), np.array([0.5, 0.0, 0.5])
    mean = np.exp(log_mean_probability([jnp.asarray(x) for x in logits]))
    np.testing.assert_allclose(mean[0], np.mean(each, axis=0), atol=1e-6)
    assert np.abs(mean.sum() - 1) < 1e-6


DIFFERENT, EQUAL = (FIRST, SECOND, FIRST), (FIRST, FIRST)


@pytest.mark.parametrize(
    ("architecture", "configs"),
    [
        pytest.param("encoder_decoder", DIFFERENT, marks=pytest.mark.slow),
        ("decoder_lm", EQUAL),
        pytest.param("encoder_decoder", EQUAL, marks=pytest.mark.slow),
        pytest.param("decoder_lm", DIFFERENT, marks=pytest.mark.slow),
        ("encoder_classifier", EQUAL),
    ],
)
def test_an_ensemble_returns_the_mean_of_the_probabilities_of_its_members(architecture, configs):
    members = members_of(architecture, *configs)
    model, params = ensemble_of(members)
    inputs = [ids_of(7, 3, 11, width=11)][: architecture != "decoder_lm"]
    inputs += [predictions.shift_right(jnp.asarray(ids_of(5, 11, 2, width=11)))][
        : architecture != "encoder_classifier"
    ]
    log_prob = jax.jit(model.apply)({"params": params}, *inputs)
    assert log_prob.shape[-1] == (CLASSES if architecture == "encoder_classifier" else V)
    np.testing.assert_allclose(np.exp(log_prob), mean_probability(members, *inputs), atol=1e-5)


def test_an_ensemble_has_the_parameters_of_its_members_and_the_smallest_max_length():
    model, params = ensemble_of(members_of("encoder_decoder", SECOND, FIRST))
    shapes = jax.tree.map(lambda x: x.shape, parameters.shapes(model))
    assert jax.tree.map(jnp.shape, params) == shapes
    assert model.config != model.configs[0]
    assert model.config == dataclasses.replace(model.configs[0], max_length=LONGEST)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder_lm"])
def test_greedy_decoding_with_caches_follows_the_mean_of_full_forwards(architecture, monkeypatch):
    # without padding some texts are longer than the first capacity of the caches
    def unpadded(length, max_length):
        return length

    monkeypatch.setattr("flaxformer_lite.decoding.decoder.padded_length", unpadded)
    members = members_of(architecture, FIRST, SECOND)
    model, params = ensemble_of(members)
    rows = [row[row != PAD] for row in ids_of(5, 1, 3, 7, 4, 2, 6, width=7, end=False)]
    decoded = Decoder(model, DecodeConfig(max_extra_length=6), rows=7)(params, rows)
    alone = [
        Decoder(each, DecodeConfig(max_extra_length=6), rows=7)(own, rows) for each, own in members
    ]
    assert all([x.tolist() for x in decoded] != [x.tolist() for x in other] for other in alone)
    translates = architecture == "encoder_decoder"
    for row, ids in zip(rows, decoded, strict=True):
        source_1S = np.array([[*row, EOS, *[PAD] * (7 - len(row))]])
        so_far = [] if translates else row.tolist()
        while len(so_far) < min(len(row) + translates + 6, LONGEST):
            target_1T = np.array([[BOS, *so_far, *[PAD] * (LONGEST - 1 - len(so_far))]])
            inputs = (source_1S, target_1T) if translates else (target_1T,)
            probability_V = mean_probability(members, *inputs)[0, len(so_far)]
            probability_V[[PAD, BOS, UNK]] = 0  # they are never generated
            so_far.append(int(probability_V.argmax()))
            if so_far[-1] == EOS:
                break
        assert ids.tolist() == [token for token in so_far if token != EOS]


@pytest.mark.slow
def test_beam_search_scores_texts_by_the_mean_probability_of_each_token():
    members = members_of("encoder_decoder", FIRST, SECOND)
    model, params = ensemble_of(members)
    source = ids_of(5, width=5, end=False)[0]
    decoder = Decoder(model, DecodeConfig(method="beam", beam_size=5, max_extra_length=3), rows=1)
    (found,) = decoder.n_best(params, [source], 5)
    assert len(found) == 5
    for ids, score in found:
        tokens = [*ids.tolist(), EOS][: 5 + 1 + 3]  # a text at the length limit has no EOS
        inputs = np.array([[BOS, *ids, *[PAD] * (9 - len(ids))]])
        probability_TV = mean_probability(members, np.array([[*source, EOS]]), inputs)[0]
        total = sum(np.log(probability_TV[t, token]) for t, token in enumerate(tokens))
        assert score == pytest.approx(total / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


@pytest.mark.parametrize(
    "architecture",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("encoder_decoder", "decoder_lm")),
        "encoder_classifier",
    ],
)
def test_the_loss_is_that_of_the_mean_probability_for_any_number_of_rows_at_once(
    architecture, monkeypatch
):
    members = members_of(architecture, FIRST, SECOND)
    model, params = ensemble_of(members)
    batch = {"source": ids_of(7, 3, 11, 0, width=11), "row": np.arange(4, dtype=np.int32)}
    label = np.array([4, 0, 2, -1], np.int32)[:, None]
    if architecture == "encoder_classifier":
        inputs, batch = (batch["source"],), {**batch, "label": label[:, 0]}
        mean = mean_probability(members, *inputs)[:, None]
    else:
        label = ids_of(5, 11, 2, 0, width=11)
        label = np.where(label == PAD, -1, label)
        target = np.where(label == -1, PAD, label)
        inputs = (batch["source"], predictions.shift_right(jnp.asarray(target)))[
            architecture == "decoder_lm" :
        ]
        batch = {**batch, "target": target}
        mean = mean_probability(members, *inputs)
    likelihood = np.take_along_axis(mean, np.maximum(label, 0)[..., None], axis=-1)[..., 0]
    expected = -np.log(likelihood)[label >= 0].sum()
    module = step if architecture == "encoder_classifier" else ensemble_step
    for at_once in (2**22, 2 * 11 * V):  # the second is 1 row of both models
        monkeypatch.setattr(losses, "LOGITS_AT_ONCE", at_once)
        sums = jax.jit(functools.partial(module.eval_step, model=model))(params, batch)
        assert float(sums["loss"][0]) == pytest.approx(expected, rel=1e-5)
        assert float(sums["loss"][1]) == float(sums["accuracy"][1]) == (label >= 0).sum()
        hits = (mean.argmax(axis=-1) == label)[label >= 0].sum()
        assert float(sums["accuracy"][0]) == hits


def test_packed_texts_have_the_loss_of_each_text_alone():
    model, params = ensemble_of(members_of("decoder_lm", FIRST, SECOND))
    texts = [row[row != PAD] for row in ids_of(5, 3, 4, width=5)]
    sums = []
    for rows in ([[texts[0], texts[1]], [texts[2]]], [[text] for text in texts]):
        target, segment = runs.filled(rows, 11)
        batch = {
            "target": target,
            "target_segment": segment,
            "row": np.arange(len(rows), dtype=np.int32),
        }
        sums.append(jax.jit(functools.partial(ensemble_step.eval_step, model=model))(params, batch))
    assert float(sums[0]["loss"][0]) == pytest.approx(float(sums[1]["loss"][0]), rel=1e-5)
