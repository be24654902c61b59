"""Models whose source and target have vocabularies of different sizes."""

import dataclasses
import functools
import itertools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import (
    Config,
    DecodeConfig,
    InitConfig,
    ModelConfig,
    with_vocabulary,
)
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.decoding.methods import beam_search
from flaxformer_lite.decoding.task import translation
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model import parameters
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import ensemble_step, losses, parent, run_report, step, warm_start

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# In the first pair of sizes the source has more tokens, in the second the target.
SIZES = ((23, 7), (7, 23))
CONFIG = ModelConfig(
    vocab_size=23,
    target_vocab_size=7,
    d_model=14,
    num_heads=3,
    d_head=6,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=17,
    norm_placement="pre",
)


def config_of(sizes=SIZES[0], **changes):
    source, target = sizes
    return dataclasses.replace(CONFIG, vocab_size=source, target_vocab_size=target, **changes)


def named(tree):
    """Returns 'a/b' to each array."""
    return flax.traverse_util.flatten_dict(tree, sep="/")


@functools.cache
def applied(model, **options):
    """Returns the jitted function of the model."""
    return jax.jit(functools.partial(model.apply, **options))


def shifted(target_BT):
    """Returns the decoder's input."""
    return np.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)


def ids(vocab_size, *lengths, end=True, seed=3):
    """Returns rows of ids over a whole vocabulary, with an end symbol, then padding."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((len(lengths), max(lengths) + 1), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.integers(4, vocab_size, length)
        row[0] = vocab_size - 1
        row[length] = EOS if end else PAD
    return rows


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_source_has_its_own_embedding_and_the_output_the_size_of_the_target(sizes, tied):
    source, target = sizes
    config = config_of(sizes, tie_embeddings=tied, output_bias=True)
    shapes = {
        name: leaf.shape for name, leaf in named(parameters.shapes(build_model(config))).items()
    }
    of_vocabulary = {name: shape for name, shape in shapes.items() if {source, target} & {*shape}}
    assert of_vocabulary == {
        "source_embedding/embedding": (source, 14),
        "target_embedding/embedding": (target, 14),
        "output/bias": (target,),
    } | ({} if tied else {"output/kernel": (target, 14)})
    shared = dataclasses.replace(config, vocab_size=29, target_vocab_size=None)
    assert ("source_embedding/embedding" in named(parameters.shapes(build_model(shared)))) != tied


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_are_products_with_the_embeddings_of_the_target_for_all_ids_of_both_sides(sizes):
    model, params = runs.varied_model(config_of(sizes))
    source_BS, target_BT = ids(sizes[0], 5, 3), ids(sizes[1], 3, 2, end=False)
    features = applied(model, method="features")
    logits = applied(model)({"params": params}, source_BS, target_BT)
    x_BTD = features({"params": params}, source_BS, target_BT)
    table_VD = np.asarray(params["target_embedding"]["embedding"])
    assert logits.shape == (2, 4, sizes[1])
    np.testing.assert_allclose(logits, np.asarray(x_BTD) @ table_VD.T, atol=1e-4)
    # The last id of each side has a row of its own.
    for side, row in (("source", sizes[0] - 1), ("target", sizes[1] - 1)):
        other = jax.tree.map(np.array, params)
        other[f"{side}_embedding"]["embedding"][row] *= -1
        changed = features({"params": other}, source_BS, target_BT)
        assert np.abs(changed - x_BTD).max() > 1e-2


def gradient(config, params):
    """Returns the gradient of the loss of a batch, by name."""
    model, source_BS, target_BT = build_model(config), ids(23, 5, 3), ids(7, 4, 2)
    inputs_BT = shifted(target_BT)

    def loss(params):
        logits = model.apply({"params": params}, source_BS, inputs_BT)
        weights = (target_BT != PAD).astype(np.float32)
        return losses.cross_entropy(logits, target_BT, weights, label_smoothing=0.1)[0]

    return named(jax.jit(jax.grad(loss))(params))


def test_a_matrix_of_target_and_output_gets_the_gradients_of_both():
    _, params = runs.varied_model(CONFIG)
    table_VD = params["target_embedding"]["embedding"]
    separate = {**params, "output": {"kernel": table_VD}}
    tied = gradient(CONFIG, params)
    untied = gradient(dataclasses.replace(CONFIG, tie_embeddings=False), separate)
    total = untied.pop("output/kernel") + untied["target_embedding/embedding"]
    assert np.abs(total - untied["target_embedding/embedding"]).max() > 0.1
    assert np.abs(untied["target_embedding/embedding"]).max() > 0.1
    expected = {**untied, "target_embedding/embedding": total}
    assert tied.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(tied[name], each, rtol=1e-4, atol=1e-4, err_msg=name)


def test_label_smoothing_is_over_the_tokens_of_the_target():
    model, params = runs.varied_model(CONFIG)
    batch = {"source": ids(23, 5, 3), "target": ids(7, 4, 2), "row": np.arange(2)}
    inputs_BT = shifted(batch["target"])
    logits_BTV = applied(model)({"params": params}, batch["source"], inputs_BT)
    log_prob_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    labels = np.take_along_axis(log_prob_BTV, batch["target"][..., None], axis=-1)[..., 0]
    is_token = batch["target"] != PAD
    smoothed = 0.9 * labels + 0.1 * log_prob_BTV.sum(axis=-1) / 7
    sums = jax.jit(functools.partial(step.eval_step, model=model))(params, batch)
    assert float(sums["loss"][0]) == pytest.approx(-labels[is_token].sum(), rel=1e-4)
    weights = is_token.astype(np.float32)
    found, _ = losses.cross_entropy(log_prob_BTV, batch["target"], weights, label_smoothing=0.1)
    assert float(found) == pytest.approx(-smoothed[is_token].sum(), rel=1e-4)


# Decoding.

SOURCES = [row[:length] for length in (5, 1, 3, 2) for row in ids(23, length, seed=length)]


def decoded(**options):
    model, params = runs.varied_model(CONFIG)
    decoder = Decoder(model, DecodeConfig(max_extra_length=5, **options), rows=4)
    return [row.tolist() for row in decoder(params, SOURCES)]


@pytest.mark.slow
def test_greedy_decoding_takes_the_most_probable_token_of_the_target_and_so_does_a_beam_of_1():
    greedy = decoded(method="greedy")
    assert greedy == decoded(method="beam", beam_size=1, alpha=0.0)
    assert len({tuple(row) for row in greedy}) > 1
    model, params = runs.varied_model(CONFIG)
    source_BS, inputs_BT = (np.zeros((4, length), np.int32) for length in (6, 13))
    for b, (source, row) in enumerate(zip(SOURCES, greedy, strict=True)):
        source_BS[b, : len(source) + 1] = [*source, EOS]
        inputs_BT[b, : len(row) + 1] = [BOS, *row]
    logits_BTV = np.array(applied(model)({"params": params}, source_BS, inputs_BT))
    logits_BTV[:, :, [PAD, BOS, UNK]] = -np.inf
    for source, row, best_T in zip(SOURCES, greedy, logits_BTV.argmax(axis=-1), strict=True):
        best = best_T.tolist()
        assert best[: len(row)] == row and (best[len(row)] == EOS or len(row) == len(source) + 6)


@pytest.mark.slow
def test_a_beam_wide_enough_finds_the_best_of_all_translations():
    model, params = runs.varied_model(CONFIG)
    limit, source_1S = 4, ids(23, 2)
    texts = np.array(list(itertools.product([EOS, 4, 5, 6], repeat=limit)), np.int32)
    inputs = np.concatenate([np.full((len(texts), 1), BOS, np.int32), texts[:, :-1]], axis=1)
    source_BS = np.broadcast_to(source_1S, (len(texts), 3))
    logits_NTV = applied(model)({"params": params}, source_BS, inputs)
    log_prob_NTV = jax.nn.log_softmax(logits_NTV)
    found = {}
    for text, log_prob_TV in zip(texts.tolist(), np.asarray(log_prob_NTV), strict=True):
        text = text[: text.index(EOS) + 1] if EOS in text else text
        total = sum(float(log_prob_TV[t, token]) for t, token in enumerate(text))
        found[tuple(text)] = total / ((5 + len(text)) / 6) ** 0.6
    # A text that ends is better than one that is cut.
    expected = sorted(found.items(), key=lambda item: (EOS not in item[0], -item[1]))[:23]
    decode = DecodeConfig(method="beam", beam_size=109, max_extra_length=limit - 3)
    task = translation(model, decode, params, jnp.asarray(source_1S), jnp.arange(1))
    beams_BNT, score_BN = jax.jit(
        lambda: beam_search(task, decode, n_best=23, capacities=(limit,))
    )()
    assert [tuple(row[row != PAD].tolist()) for row in np.asarray(beams_BNT[0])] == [
        text for text, _ in expected
    ]
    np.testing.assert_allclose(score_BN[0], [score for _, score in expected], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_a_masked_decoder_predicts_tokens_of_the_target(sizes):
    config = config_of(sizes, decoder="masked", norm_placement="post")
    model, params = runs.varied_model(config)
    source_BS, target_BT = ids(sizes[0], 5, 3), ids(sizes[1], 4, 2)
    logits = jax.eval_shape(
        functools.partial(model.apply, {"params": params}), source_BS, target_BT
    )
    assert logits.shape == (2, 5, sizes[1])
    decoder = Decoder(model, DecodeConfig(method="mask_predict", iterations=3), rows=2)
    rows = decoder(params, [row[: row.tolist().index(EOS)] for row in source_BS])
    assert all(4 <= token < sizes[1] for row in rows for token in row.tolist())
    assert sum(map(len, rows)) > 0


@pytest.mark.slow
def test_an_ensemble_has_the_mean_of_the_probabilities_of_the_target():
    members = [runs.varied_model(CONFIG), runs.varied_model(config_of(d_ff=13))]
    ensemble = Ensemble(tuple(model.config for model, _ in members))
    params = {f"members_{number}": own for number, (_, own) in enumerate(members)}
    batch = {"source": ids(23, 5, 3), "target": ids(7, 4, 2), "row": np.arange(2)}
    inputs_BT = shifted(batch["target"])
    each = [
        jax.nn.softmax(applied(model)({"params": own}, batch["source"], inputs_BT))
        for model, own in members
    ]
    assert each[0].shape == (2, 5, 7) and np.abs(each[0] - each[1]).max() > 0.05
    labels = np.take_along_axis(np.mean(each, axis=0), batch["target"][..., None], axis=-1)[..., 0]
    sums = jax.jit(functools.partial(ensemble_step.eval_step, model=ensemble))(params, batch)
    expected = -np.log(labels[batch["target"] != PAD]).sum()
    assert float(sums["loss"][0]) == pytest.approx(expected, rel=1e-4)


# Sizes in a config.


@pytest.mark.parametrize("architecture", ["decoder_lm", "encoder_classifier"])
def test_a_model_without_source_and_target_refuses_a_vocabulary_of_the_target(architecture):
    config = config_of(architecture=architecture, num_classes=3)
    build_model(dataclasses.replace(config, target_vocab_size=None))
    with pytest.raises(ValueError, match=rf"^ModelConfig\.target_vocab_size: .*'{architecture}'"):
        build_model(config)


def test_the_sizes_of_the_tokenizer_become_those_of_the_model():
    config = with_vocabulary(Config(), 1009, 47)
    assert (config.model.vocab_size, config.model.target_vocab_size) == (1009, 47)
    assert with_vocabulary(config, 1009, 47) == config
    for sizes, message in (((1009, 43), "expected 43, the size of"), ((1009,), "expected None")):
        with pytest.raises(ValueError, match=rf"^config\.model\.target_vocab_size: {message}"):
            with_vocabulary(config, *sizes)


def test_a_run_reports_the_sizes_of_both_vocabularies():
    assert run_report.vocabulary(dataclasses.replace(CONFIG, vocab_size=1009)) == (
        "vocabularies 1,009 and 7"
    )
    assert run_report.vocabulary(ModelConfig(vocab_size=1009)) == "vocabulary 1,009"


@pytest.mark.parametrize(
    ("side", "field"), [("source", "vocab_size"), ("target", "target_vocab_size")]
)
def test_a_start_from_a_run_of_another_size_is_refused_by_the_field_of_the_side(side, field):
    config = dataclasses.replace(Config(), model=CONFIG, init=InitConfig(run="A"))
    new = parent.shapes_of(config)
    assert warm_start.match(new, new, config, config)["source_embedding/embedding"].old
    larger = dataclasses.replace(config, model=dataclasses.replace(CONFIG, **{field: 29}))
    with pytest.raises(ValueError, match=rf"^config\.data\.{field}: .*use data\.{field}=29"):
        warm_start.match(new, parent.shapes_of(larger), config, larger)


def test_a_run_with_2_vocabularies_may_start_from_the_shared_embedding_of_another():
    rule = InitConfig(run="A", map=("source_embedding=target_embedding",))
    config = dataclasses.replace(Config(), model=config_of((13, 13)), init=rule)
    shared = dataclasses.replace(
        config, model=dataclasses.replace(config.model, target_vocab_size=None)
    )
    found = warm_start.match(parent.shapes_of(config), parent.shapes_of(shared), config, shared)
    for side in ("source", "target"):
        each = found[f"{side}_embedding/embedding"]
        assert (each.old, each.kind) == ("target_embedding/embedding", warm_start.LOADED)
