"""Beam search with models, against all texts and against full forward passes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite.config import CHOICES, DecodeConfig, ModelConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.decoding.methods import beam_search
from flaxformer_lite.decoding.task import continuation, translation
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.training import meshes, parallel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V = 7  # a text consists of the tokens 4 to 6 and the end symbol
CONFIG = ModelConfig(
    vocab_size=V,
    d_model=14,
    num_heads=3,
    d_head=6,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=16,
)
CONFIG = dataclasses.replace(CONFIG, norm_placement="pre", relative_clip=3)
KINDS = (
    {},
    {
        "num_kv_heads": 1,
        "norm": "rms_norm",
        "activation": "swiglu",
        "tie_embeddings": False,
        "norm_placement": "post",
    },
    {"attention": "additive", "attention_window": 2, "relative_values": True},
)


def built(config=CONFIG):
    return runs.varied_model(config)


def sources(*lengths):
    """Returns rows of ids with an end symbol; a length of 0 gives an empty row."""
    rng = np.random.default_rng(7)
    rows = np.zeros((len(lengths), max(lengths) + 1), np.int32)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = rng.integers(4, V, length)
        row[length] = EOS if length else PAD
    return jnp.asarray(rows)


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def texts_of(found):
    """Returns the list of (ids, score) of each row."""
    return [
        [
            ([int(token) for token in ids if token], float(score))
            for ids, score in zip(*row, strict=True)
            if score > -1e30
        ]
        for row in zip(*map(np.asarray, found), strict=True)
    ]


@functools.cache
def probabilities(length):
    """Returns every text of `length` tokens, and the log-probabilities (length, V) along it.

    The source has 2 tokens.
    """
    model, params = built()
    texts = np.array(list(itertools.product([EOS, 4, 5, 6], repeat=length)), np.int32)
    inputs = np.concatenate([np.full((len(texts), 1), BOS, np.int32), texts[:, :-1]], axis=1)
    source_BS = jnp.broadcast_to(sources(2), (len(texts), 3))
    logits = jax.jit(model.apply)({"params": params}, source_BS, inputs)
    return texts, np.asarray(jax.nn.log_softmax(logits))


def every_translation(limit, prefix=(), min_length=0, no_repeat_ngram=None, alpha=0.6):
    """Returns all allowed translations with their scores: finished, then cut ones, best first."""
    found = {}
    for ids, log_prob_TV in zip(*probabilities(limit), strict=True):
        ids = ids.tolist()
        ids = ids[: ids.index(EOS) + 1] if EOS in ids else ids
        n = no_repeat_ngram or limit + 1
        grams = [ids[i : i + n] for i in range(len(ids) - n + 1)]
        repeats = any(gram in grams[:i] for i, gram in enumerate(grams) if i + n > len(prefix))
        if (
            tuple(ids[: len(prefix)]) == prefix
            and not repeats
            and (len(ids) > min_length or EOS not in ids)
        ):
            total = sum(float(log_prob_TV[t, token]) for t, token in enumerate(ids))
            found[tuple(ids)] = total / penalty(len(ids), alpha)
    return sorted(found.items(), key=lambda item: (EOS not in item[0], -item[1]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"prefix": (5, 5), "no_repeat_ngram": 1, "min_length": 3}, marks=pytest.mark.slow
        ),
        pytest.param({"alpha": 0.0, "min_length": 2}, marks=pytest.mark.slow),
        pytest.param({"alpha": 1.0, "no_repeat_ngram": 2}, marks=pytest.mark.slow),
        pytest.param({"prefix": (6,)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_beam_wide_enough_finds_the_best_of_all_translations_of_a_model(options):
    limit, n_best = 4, 23
    expected = every_translation(limit, **options)[:n_best]
    assert len(expected) > 3 and (not options or expected != every_translation(limit)[:n_best])
    # A prefix may repeat n-grams.
    assert options.get("prefix") != (5, 5) or expected[0][0][:2] == (5, 5)
    fields = {name: value for name, value in options.items() if name != "prefix"}
    config = DecodeConfig(method="beam", beam_size=109, max_extra_length=limit - 3, **fields)
    model, params = built()
    prefix_BP = jnp.asarray([[*options["prefix"], PAD]]) if "prefix" in options else None
    task = translation(model, config, params, sources(2), jnp.arange(1), prefix_BP)
    (found,) = texts_of(
        jax.jit(lambda: beam_search(task, config, n_best=n_best, capacities=(4, 7)))()
    )
    assert [tuple(ids) for ids, _ in found] == [ids for ids, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in found], [score for _, score in expected], atol=1e-4
    )


def by_full_forwards(apply, source_S, config, limit):
    """Returns the texts of a beam search in lists, with a full forward pass for each token."""
    W = config.beam_size
    live, ended = [([], 0.0)] * min(limit, 1), []
    for length in range(1, limit + 1):
        inputs = np.full((W, 13), PAD, np.int32)
        for row, (ids, _) in zip(inputs, live, strict=False):
            row[:length] = [BOS, *ids]
        log_prob_WV = np.asarray(
            apply(jnp.broadcast_to(source_S[None], (W, len(source_S))), inputs)[:, length - 1]
        )
        candidates = [
            ([*ids, token], total + float(log_prob_V[token]))
            for (ids, total), log_prob_V in zip(live, log_prob_WV, strict=False)
            for token in (EOS, 4, 5, 6)
        ]
        candidates.sort(key=lambda item: -item[1])
        ended += [
            (ids, s / penalty(length, config.alpha)) for ids, s in candidates[:W] if ids[-1] == EOS
        ]
        live = [item for item in candidates if item[0][-1] != EOS][:W]
    cut = [(ids, s / penalty(limit, config.alpha)) for ids, s in live]
    return [item for part in (ended, cut) for item in sorted(part, key=lambda item: -item[1])][:W]


SCHEMES = [
    pytest.param(position, marks=() if position == "relative" else pytest.mark.slow)
    for position in CHOICES["model.position"]
]


@pytest.mark.parametrize("position", SCHEMES)
def test_with_every_position_scheme_beams_with_a_cache_find_the_texts_of_full_forwards(position):
    kind = KINDS[CHOICES["model.position"].index(position) % 3]
    # These schemes change a dot product, which additive attention does not have.
    if position in ("rotary", "relative"):
        kind = {**kind, "attention": "dot_product"}
    model, params = built(dataclasses.replace(CONFIG, position=position, **kind))
    source_BS, limits = sources(3, 5, 0, 1), [4 + 5, 6 + 5, 0, 2 + 5]
    config = DecodeConfig(method="beam", beam_size=3, max_extra_length=5)
    task = translation(model, config, params, source_BS, jnp.arange(4))
    found = texts_of(jax.jit(lambda: beam_search(task, config, n_best=3, capacities=(11,)))())
    apply = jax.jit(lambda *inputs: jax.nn.log_softmax(model.apply({"params": params}, *inputs)))
    expected = [by_full_forwards(apply, source_BS[b], config, limits[b]) for b in range(4)]
    assert len({len(ids) for row in expected for ids, _ in row}) > 1
    for row, expected_row in zip(found, expected, strict=True):
        assert [ids for ids, _ in row] == [ids for ids, _ in expected_row]
        np.testing.assert_allclose([s for _, s in row], [s for _, s in expected_row], atol=1e-4)


def test_beams_of_a_language_model_continue_their_prompts_and_score_the_whole_text():
    config = dataclasses.replace(CONFIG, architecture="decoder_lm", position="t5_bias")
    model, params = built(config)
    prompts = jnp.array([[5, 4, 6], [6, PAD, PAD], [PAD] * 3])
    decode = DecodeConfig(method="beam", beam_size=5, max_extra_length=4, no_repeat_ngram=2)
    task = continuation(model, decode, params, prompts, jnp.array([0, 1, -1]))
    found = texts_of(jax.jit(lambda: beam_search(task, decode, n_best=3, capacities=(5, 9)))())
    assert [len(row) for row in found] == [3, 3, 0]
    apply = jax.jit(model.apply)
    for prompt, row in zip(prompts, found[:2], strict=False):
        assert [score for _, score in row] == sorted((score for _, score in row), reverse=True)
        for ids, score in row:
            prompt_ids = [int(token) for token in prompt if token]
            assert ids[: len(prompt_ids)] == prompt_ids and len(ids) <= len(prompt_ids) + 4
            inputs = jnp.array([[BOS, *ids[:-1], *[PAD] * (9 - len(ids))]])
            log_prob_TV = jax.nn.log_softmax(apply({"params": params}, inputs)[0])
            total = sum(float(log_prob_TV[t, token]) for t, token in enumerate(ids))
            assert score == pytest.approx(total / penalty(len(ids), 0.6), abs=1e-4)


def test_beams_share_the_encoder_output_and_each_has_its_own_tokens():
    B, W, S, L, G, K = 2, 5, 11, 13, 3, 6
    model, params = built()
    start = functools.partial(
        model.apply, {"params": params}, sources(S - 1, 4), L, method="start_cache"
    )
    cache = jax.eval_shape(lambda: start(W))
    assert {leaf.shape for leaf in jax.tree.leaves(cache.cross_attention)} == {
        (B, G, K, S),
        (B, G, S, K),
    }
    assert {leaf.shape for leaf in jax.tree.leaves(cache.self_attention)} == {
        (B, G, K, L * W),
        (B, G, L * W, K),
    }
    step = functools.partial(model.apply, {"params": params}, method="decode_step")
    ancestor_BWT = jnp.zeros((B, W, L), jnp.int32)
    arguments = jnp.ones((B, W), jnp.int32), cache, jnp.int32(0), sources(S - 1, 4)
    jaxpr = jax.make_jaxpr(step)(*arguments, ancestor_BWT=ancestor_BWT)
    sizes = {eqn.outvars[0].aval.size for eqn in every_equation(jaxpr.jaxpr)}
    assert B * W * G * S * K not in sizes and B * W * G * L * K in sizes and B * G * S * K in sizes


def every_equation(jaxpr):
    """Yields the equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from every_equation(inner)


# Many texts with a Decoder.

MANY = dataclasses.replace(CONFIG, vocab_size=13, tie_embeddings=False)
RNG = np.random.default_rng(7)
SOURCES = [
    RNG.integers(4, 13, size=length).astype(np.int32)
    for length in (5, 1, 14, 0, 3, 2, 11, 7, 0, 4, 13)
]
BEAM = DecodeConfig(method="beam", beam_size=4, max_extra_length=5)


@functools.cache
def decoder(rows=11, devices=None, **changes):
    """Returns a decoder for batches of `rows` inputs, and its parameters."""
    model, params = built(MANY)
    mesh = devices and meshes.make_mesh(devices)
    params = parallel.replicate(params, mesh) if mesh else params
    sharding = parallel.decoding_shardings(mesh) if mesh else None
    made = Decoder(model, dataclasses.replace(BEAM, **changes), rows=rows, sharding=sharding)
    return made, params


def decoded(inputs, prefixes=None, **options):
    made, params = decoder(**options)
    return [ids.tolist() for ids in made(params, inputs, prefixes=prefixes)]


def n_best(inputs, n, prefixes=None, **options):
    made, params = decoder(**options)
    return [
        [(ids.tolist(), score) for ids, score in row]
        for row in made.n_best(params, inputs, n, prefixes=prefixes)
    ]


def assert_same(found, expected):
    for row, other in zip(found, expected, strict=True):
        assert [ids for ids, _ in row] == [ids for ids, _ in other]
        np.testing.assert_allclose([s for _, s in row], [s for _, s in other], atol=1e-4)


@pytest.mark.slow
def test_a_sentence_gets_the_same_beams_in_any_batch():
    all_at_once = n_best(SOURCES, 3)
    assert [len(row) for row in all_at_once] == [1 if len(ids) == 0 else 3 for ids in SOURCES]
    assert len({tuple(row[0][0]) for row in all_at_once}) > 5
    assert_same(n_best(SOURCES, 3, rows=2), all_at_once)
    best = [row[0][0] for row in all_at_once]
    assert decoded(SOURCES) == decoded(SOURCES, rows=2) == best
    assert all_at_once[3] == [([], 0.0)]


@pytest.mark.slow
def test_eight_devices_find_the_texts_of_one_device():
    devices = {"rows": 16, "devices": 8}
    prefixes = [np.full(i % 3, 5, np.int32) for i in range(len(SOURCES))]
    found = n_best(SOURCES, 3, prefixes)
    assert [row[0][0] for row in found] != decoded(SOURCES)
    assert_same(n_best(SOURCES, 3, prefixes, **devices), found)


@pytest.mark.slow
def test_eight_devices_decode_and_search_as_one_device_with_and_without_prefixes():
    devices = {"rows": 16, "devices": 8}
    prefixes = [np.full(i % 3, 5, np.int32) for i in range(len(SOURCES))]
    assert decoded(SOURCES, prefixes, **devices) == decoded(SOURCES, prefixes) != decoded(SOURCES)
    assert_same(n_best(SOURCES, 3, **devices), n_best(SOURCES, 3))


def test_a_beam_of_one_without_a_penalty_decodes_greedily():
    greedy = decoded(SOURCES, method="greedy")
    assert decoded(SOURCES, beam_size=1, alpha=0.0) == greedy != decoded(SOURCES)


@pytest.mark.parametrize(
    "method",
    ["beam", *(pytest.param(method, marks=pytest.mark.slow) for method in ("greedy", "sample"))],
)
def test_every_method_keeps_the_prefix_and_the_minimum_length_and_repeats_no_ngram(method):
    own = {"beam": {}, "greedy": {"beam_size": 4}, "sample": {"beam_size": 4, "seed": 3}}[method]
    options = {"method": method, "min_length": 6, "no_repeat_ngram": 2, **own}
    prefixes = [
        np.array(ids, np.int32)
        for ids in ([5, 5, 5], [], [4], [6], [6, 4], [], [], [5], [4], [4], [6, 6])
    ]
    texts, free = decoded(SOURCES, prefixes, **options), decoded(SOURCES, method=method, **own)
    assert any(ids[: len(p)] != p.tolist() for p, ids in zip(prefixes, free, strict=True) if ids)
    assert method != "beam" or min(len(ids) for ids in free if ids) < 6
    for source, prefix, ids in zip(SOURCES, prefixes, texts, strict=True):
        if not len(source):
            assert ids == []
            continue
        assert ids[: len(prefix)] == prefix.tolist() and len(ids) >= 6
        pairs = list(itertools.pairwise(ids))[max(len(prefix) - 1, 0) :]
        assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("method", ["greedy", pytest.param("beam", marks=pytest.mark.slow)])
def test_a_prefix_longer_than_its_source_sets_the_limit_of_the_output(method):
    prefix = np.full(9, 5, np.int32)
    (ids,) = decoded([SOURCES[1]], [prefix], method=method, min_length=100)
    assert len(ids) == 9 + BEAM.max_extra_length


def test_a_prefix_that_is_too_long_and_an_n_best_above_the_beam_size_are_refused():
    made, params = decoder()
    with pytest.raises(
        ValueError, match=r"^prefix 1: 16 tokens, the model takes at most 15; shorten it"
    ):
        made(params, SOURCES[:2], prefixes=[SOURCES[0], np.full(16, 5, np.int32)])
    with pytest.raises(
        ValueError, match=r"^n_best: expected 1 to 4 \(decode.beam_size\), got 5; widen the beam"
    ):
        made.n_best(params, SOURCES, 5)
    greedy, params = decoder(method="greedy")
    with pytest.raises(
        ValueError, match=r"^n_best: requires decode.method='beam' or .*, and it is 'greedy'"
    ):
        greedy.n_best(params, SOURCES, 1)


def test_special_symbols_are_in_no_hypothesis_even_if_they_are_the_most_probable():
    """The vocabulary is large enough to be searched in blocks."""
    model, params = built(dataclasses.replace(CONFIG, vocab_size=401, output_bias=True))
    params["output"]["bias"] = (
        params["output"]["bias"].at[:4].add(jnp.array([20.0, 30.0, 5.0, 10.0]))
    )
    task = translation(model, DecodeConfig(), params, sources(2, 0, 5), jnp.arange(3))

    config = DecodeConfig(method="beam", beam_size=4, min_length=3)
    found = texts_of(jax.jit(lambda: beam_search(task, config, n_best=4, capacities=(9,)))())
    assert [len(row) for row in found] == [4, 0, 4]
    assert all(len(ids) > 3 and not {PAD, BOS, UNK} & set(ids) for row in found for ids, _ in row)
