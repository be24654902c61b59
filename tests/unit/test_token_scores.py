"""Log-probabilities of given ids: those of the logits, for any batch, parts and devices."""

import dataclasses

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.training import losses, meshes, parallel
from flaxformer_lite.training.token_scores import TokenScorer, TokenScores, text_blocks

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, LONGEST = 31, 23
MODEL = ModelConfig(
    vocab_size=V,
    d_model=14,
    num_heads=7,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LONGEST,
)
LM = dataclasses.replace(MODEL, architecture="decoder_lm", position="relative")
EVEN = dataclasses.replace(MODEL, vocab_size=38, num_heads=2, d_ff=22)  # 2 devices can share it
ENSEMBLE = (MODEL, dataclasses.replace(MODEL, d_ff=13))


def model_of(config):
    """A model, or an ensemble of several, and its parameters."""
    if isinstance(config, ModelConfig):
        model, variables = runs.varied_model(config)
        return model, variables
    members = [runs.varied_model(each)[1] for each in config]
    return Ensemble(config), {f"members_{n}": params for n, params in enumerate(members)}


def texts(lengths, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, V, length).astype(np.int32) for length in lengths]


# The sources are so long that all pairs have the same padded length: one compilation a model.
SOURCES = texts([17, 22, 19] * 5, seed=5)
LABELS = [np.append(ids, np.int32(EOS)) for ids in texts([0, 22, 11, 21, 3] * 3, seed=3)]
ROWS = len(LABELS) * LONGEST  # positions of one batch with all pairs


def scores_of(config, labels=LABELS, *, devices=1, tensor=1, tokens=ROWS, **called):
    model, params = model_of(config)
    mesh = meshes.make_mesh(devices, tensor=tensor)
    if model.config.architecture == "encoder_decoder":
        called = {"sources": SOURCES} | called
    on_mesh = parallel.MeshMode(mesh).put_state(params)
    return TokenScorer(model, mesh, tokens_per_batch=tokens)(on_mesh, labels, **called)


def padded(rows):
    return np.stack([np.pad(row, (0, LONGEST - len(row))) for row in rows]).astype(np.int32)


def expected(config, labels=LABELS, sources=SOURCES):
    """The log-softmax of the logits, computed by NumPy from one pass over all texts."""
    model, params = model_of(config)
    inputs = [padded([np.append(BOS, ids[:-1]) for ids in labels])]
    if model.config.architecture == "encoder_decoder":
        inputs.insert(0, padded([np.append(source, EOS) for source in sources]))
    logits_NTV = np.asarray(jax.jit(model.apply)({"params": params}, *inputs), np.float64)
    highest_NT1 = logits_NTV.max(axis=-1, keepdims=True)
    log_z_NT1 = np.log(np.exp(logits_NTV - highest_NT1).sum(axis=-1, keepdims=True)) + highest_NT1
    log_probs_NTV = logits_NTV - log_z_NT1
    return [row[np.arange(len(ids)), ids] for row, ids in zip(log_probs_NTV, labels, strict=True)]


def assert_close(first, second, atol=1e-5):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=atol)


@pytest.mark.parametrize(
    "config",
    [MODEL, LM, pytest.param(ENSEMBLE, marks=pytest.mark.slow)],
    ids=["pairs", "texts", "ensemble"],
)
def test_a_score_is_the_log_softmax_of_the_logits_of_the_text_alone(config):
    found = scores_of(config)
    assert [len(scores) for scores in found] == [len(ids) for ids in LABELS]
    assert all(scores.dtype == np.float32 for scores in found)
    assert np.ptp([scores.sum() for scores in found]) > 1  # the texts differ
    assert_close(found, expected(config))


@pytest.mark.parametrize(
    "config", [MODEL, pytest.param(ENSEMBLE, marks=pytest.mark.slow)], ids=["model", "ensemble"]
)
def test_logits_in_parts_give_the_same_scores(config, monkeypatch):
    whole = scores_of(config)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", V * LONGEST * 2)
    assert losses.parts_of(15, V * LONGEST) == 15
    assert_close(scores_of(config), whole)


def test_order_and_size_of_batches_do_not_change_a_score():
    one = scores_of(MODEL)
    order = np.random.default_rng(7).permutation(len(LABELS))
    other = scores_of(
        MODEL, [LABELS[i] for i in order], sources=[SOURCES[i] for i in order], tokens=5 * LONGEST
    )
    assert_close([one[i] for i in order], other)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "tensor"), [(5, 1), (1, 2)])
def test_devices_do_not_change_a_score(devices, tensor):
    one = scores_of(EVEN)
    assert_close(scores_of(EVEN, devices=devices, tensor=tensor), one)
    assert_close(one, expected(EVEN))


def test_a_text_without_labels_has_no_scores_and_the_token_before_the_first_is_read():
    labels = [LABELS[0], LABELS[1][:0], LABELS[0]]
    first, none, other = scores_of(LM, labels, before=[BOS, BOS, 7])
    assert none.shape == (0,) and none.dtype == np.float32
    assert_close([first], expected(LM, [LABELS[0]], [None]))
    assert abs(first - other).max() > 1e-3


@pytest.mark.parametrize(("length", "stride", "blocks"), [
    (0, 5, []),
    (7, 5, [(0, 0, 7)]),
    (11, 5, [(0, 0, 7), (4, 7, 11)]),
    (15, 5, [(0, 0, 7), (5, 7, 12), (8, 12, 15)]),
    (15, 7, [(0, 0, 7), (7, 7, 14), (14, 14, 15)]),
])  # fmt: skip
def test_blocks_of_a_text_count_each_token_once(length, stride, blocks):
    assert text_blocks(length, windows=7, stride=stride) == blocks


@pytest.mark.parametrize("stride", [11, 3])
def test_a_long_text_is_scored_in_windows_with_their_context(stride):
    model, params = model_of(LM)
    scorer = TokenScorer(model, meshes.make_mesh(1), tokens_per_batch=16 * 16)
    on_device = jax.device_put(params)
    long = np.concatenate([ids[:-1] for ids in LABELS])[:53]
    texts = [long, long[:0], LABELS[0]]
    found, none, short = scorer.in_windows(on_device, texts, windows=11, stride=stride)
    assert len(found) == len(long) and not len(none)
    wanted, apply = [], jax.jit(model.apply)
    for first, start, stop in text_blocks(len(long), windows=11, stride=stride):
        before = BOS if first == 0 else long[first - 1]
        inputs = padded([np.append(before, long[first : stop - 1])])
        log_probs = np.asarray(jax.nn.log_softmax(apply({"params": params}, inputs)))[0]
        wanted += log_probs[np.arange(stop - first), long[first:stop]][start - first :].tolist()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    assert len(short) == len(LABELS[0])


def test_perplexity_and_sum_come_from_the_tokens():
    tokens = TokenScores(("a", "</s>"), (-1.0, -3.0))
    assert tokens.log_prob == -4 and tokens.perplexity == np.exp(2)
    assert np.isnan(TokenScores((), ()).perplexity) and TokenScores((), ()).log_prob == 0
    assert TokenScores(("a",), (-1e4,)).perplexity == np.inf
