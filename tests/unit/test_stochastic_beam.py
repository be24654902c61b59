"""Stochastic beam search on tables of logits, whose texts and probabilities are enumerated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tables

from flaxformer_lite.config import DecodeConfig, ModelConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.decoding.methods import beam_search
from flaxformer_lite.decoding.stochastic_beam import with_maximum
from flaxformer_lite.model import transformer
from flaxformer_lite.training import meshes, parallel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ROWS, LIMIT = 4001, 2  # 13 texts: the end symbol, 3 with it after a word, 9 cut
LOGITS = tables.table(3, scale=1.0)
SIGMAS = 5.0  # a right program exceeds this once in a million seeds


@functools.cache
def compiled(n, beam_size, forbidden=(), prompt=(), limit=LIMIT, **fields):
    """Returns the search for n texts of each of the rows with these numbers, jitted."""
    config = DecodeConfig(method="stochastic_beam", beam_size=beam_size, **dict(fields))

    def search(row_B):
        tables_BTXV = jnp.broadcast_to(LOGITS, (len(row_B), *LOGITS.shape))
        task = tables.task_of(tables_BTXV, [limit] * len(row_B), row_B, prompt)
        sequences = [(token,) for token in forbidden]
        return beam_search(task, config, n_best=n, capacities=(limit,), forbidden=sequences)

    return jax.jit(search)


@functools.cache
def sampled(**options):
    """Returns 2 samples of each of many rows: a list of (ids, score)."""
    return tables.texts_of(compiled(2, 2, **options)(np.arange(ROWS)))


def misfit(texts, expected):
    """Returns chi-square of the counts of `texts`, and its quantile for 1 of 10,000 seeds."""
    counts = np.array([sum(text == each for text in texts) for each in expected])
    share = np.array(list(expected.values()))
    assert counts.sum() == len(texts) and (len(texts) * share).min() > 5
    statistic = ((counts - len(texts) * share) ** 2 / (len(texts) * share)).sum()
    return statistic, scipy.stats.chi2.ppf(1 - 1e-4, len(expected) - 1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"forbidden": (5,)},
        pytest.param({"prompt": (6,), "limit": 3}, marks=pytest.mark.slow),
        pytest.param({"seed": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_first_of_the_list_is_a_sample_of_the_model(options):
    """Constraints and prompts included: their probabilities are renormalised, as in sampling."""
    constraints = {name: options[name] for name in ("forbidden", "prompt") if name in options}
    limit = options.get("limit", LIMIT)
    expected = tables.probabilities(LOGITS, limit, **constraints)
    assert sum(expected.values()) == pytest.approx(1.0)
    texts = [row[0][0] for row in sampled(**options)]
    statistic, highest = misfit(texts, expected)
    assert statistic < highest
    uniform = dict.fromkeys(expected, 1 / len(expected))
    assert misfit(texts, uniform)[0] > highest


def test_a_text_is_among_two_samples_with_the_probability_of_sampling_without_replacement():
    p = tables.probabilities(LOGITS, LIMIT)
    found = [{text for text, _ in row} for row in sampled()]
    replaced = []
    for text, p_i in p.items():
        without = p_i + sum(p_j * p_i / (1 - p_j) for other, p_j in p.items() if other != text)
        share = sum(text in texts for texts in found) / ROWS
        error = np.sqrt(without * (1 - without) / ROWS)
        assert abs(share - without) < SIGMAS * error
        replaced.append(abs(share - (1 - (1 - p_i) ** 2)) / error)
    assert max(replaced) > SIGMAS


def test_all_samples_of_a_row_differ_and_their_scores_decrease():
    assert all(first[0] != second[0] for first, second in sampled())
    assert all(first[1] > second[1] for first, second in sampled())


def test_scores_are_perturbed_log_probabilities():
    """The highest has the distribution Gumbel(0); weights of the others add up to 1 on average.

    The weight of a text above the threshold, the score of the last one, is its probability over
    that of a perturbed log-probability above the threshold (Kool 2019, section 4.2).
    """
    scores = np.array([[score for _, score in row] for row in sampled()])
    assert abs(scores[:, 0].mean() - np.euler_gamma) < SIGMAS * np.pi / np.sqrt(6 * ROWS)
    p = tables.probabilities(LOGITS, LIMIT)
    first_B = np.array([p[row[0][0]] for row in sampled()])
    weight_B = first_B / -np.expm1(-first_B * np.exp(-scores[:, 1]))
    assert weight_B.std() > 0.1
    assert abs(weight_B.mean() - 1) < SIGMAS * weight_B.std() / np.sqrt(ROWS)


def test_a_row_has_the_same_samples_in_any_order_and_batch():
    order = np.random.default_rng(7).permutation(ROWS)
    assert tables.texts_of(compiled(2, 2)(order)) == [sampled()[row] for row in order]


@pytest.mark.slow
def test_another_seed_has_other_samples_and_one_sample_is_the_first_of_two():
    one = tables.texts_of(compiled(1, 2)(np.arange(ROWS)))
    assert one == [row[:1] for row in sampled()]
    other = sampled(seed=3)
    assert sum(a[0][0] != b[0][0] for a, b in zip(one, other, strict=True)) > ROWS / 2


def test_a_beam_with_room_for_all_texts_returns_each_once():
    every = tables.probabilities(LOGITS, LIMIT)
    found = tables.texts_of(compiled(17, 17)(np.arange(3)))
    assert [sorted(text for text, _ in row) for row in found] == [sorted(every)] * 3
    orders = {tuple(text for text, _ in row) for row in found}
    assert len(orders) == 3


@pytest.mark.slow
def test_if_no_token_is_allowed_there_is_no_text():
    found = compiled(2, 2, forbidden=(2, *tables.WORDS))(np.arange(3))
    assert tables.texts_of(found) == [[], [], []]


def test_conditioned_values_are_those_of_the_closed_form():
    """Without care for rounding: -log(exp(-maximum) - exp(-largest) + exp(-value)), section 4.1."""
    values = np.random.default_rng(5).gumbel(size=(2, 3, 7)).astype(np.float32)
    values[1, 2, 4] = values[0, 1] = -np.inf
    maximum = np.array([[[0.5], [-1.0], [3.0]], [[-2.0], [-np.inf], [-7.0]]], np.float32)
    found = np.asarray(with_maximum(jnp.asarray(values), jnp.asarray(maximum)))
    with np.errstate(divide="ignore", invalid="ignore"):
        wide = values.astype(np.float64)
        largest = wide.max(axis=-1, keepdims=True)
        expected = -np.log(np.exp(-maximum.astype(np.float64)) - np.exp(-largest) + np.exp(-wide))
    expected[~np.isfinite(values)] = -np.inf
    expected[0, 1] = expected[1, 1] = -np.inf
    np.testing.assert_allclose(found, expected, atol=1e-5)
    exists = [0, 0, 1, 1], [0, 2, 0, 2]
    np.testing.assert_array_equal(found.max(axis=-1)[exists], maximum[..., 0][exists])


# Models, in batches and on devices.

SOURCES = [np.arange(4, 4 + length, dtype=np.int32) for length in (5, 1, 7, 0, 3, 2, 6, 4)]
CONFIG = ModelConfig(
    vocab_size=14, d_model=6, num_heads=2, d_ff=10, num_encoder_layers=1, num_decoder_layers=1,
    max_length=16,
)  # fmt: skip


@functools.cache
def params():
    model = transformer.build_model(CONFIG)
    ids = np.zeros((1, 3), np.int32)
    return jax.device_get(jax.jit(model.init)(jax.random.key(5), ids, ids)["params"])


@functools.cache
def n_best(method, *sizes):
    """Returns the 3 best texts of each source, decoded on a mesh of these sizes; (): 1 device."""
    config = DecodeConfig(method=method, beam_size=4, max_extra_length=5)
    sharding, placed, order = None, params(), slice(None)
    if sizes:
        mode, order = parallel.MeshMode(meshes.make_mesh(*sizes)), slice(None, None, -1)
        sharding = parallel.decoding_shardings(mode.mesh)
        placed = mode.over_mesh(mode.put_state(placed))
    decoder = Decoder(transformer.build_model(CONFIG), config, rows=8, sharding=sharding)
    numbers = list(range(len(SOURCES)))[order]
    found = decoder.n_best(placed, SOURCES[order], 3, numbers=numbers)
    return [[(ids.tolist(), score) for ids, score in row] for row in found][order]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sizes"),
    [("diverse_beam", (2, 2, 2)), ("stochastic_beam", (2, 2, 2)), ("stochastic_beam", (8,))],
)
def test_8_devices_and_another_order_find_the_texts_of_1_device(method, sizes):
    """In (2, 2, 2) they split the vocabulary, in (8,) only the rows."""
    alone = n_best(method)
    assert [len(row) for row in alone] == [1 if len(ids) == 0 else 3 for ids in SOURCES]
    for row, expected in zip(n_best(method, *sizes), alone, strict=True):
        assert [ids for ids, _ in row] == [ids for ids, _ in expected]
        scores, other_scores = ([score for _, score in each] for each in (row, expected))
        np.testing.assert_allclose(scores, other_scores, atol=1e-4)
