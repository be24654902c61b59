"""The masked decoder: the dependencies of its logits, its training, decoding by mask-predict."""

import dataclasses
import functools

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from flaxformer_lite.config import DecodeConfig, ModelConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model import backends, devices, parameters, transformer
from flaxformer_lite.model.embeddings import Inputs
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import masking, meshes, metrics, parallel
from flaxformer_lite.training import state as state_lib
from flaxformer_lite.training import step as step_lib

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, LONGEST = 13, 16
CONFIG = ModelConfig(
    decoder="masked", vocab_size=V, d_model=14, num_heads=3, d_head=6, d_ff=11,
    num_encoder_layers=1, num_decoder_layers=1, max_length=LONGEST, norm_placement="pre",
    relative_clip=3, dropout=0.0,
)  # fmt: skip
MASK_PREDICT = DecodeConfig(
    method="mask_predict", iterations=3, length_candidates=3, max_extra_length=4
)
RNG = np.random.default_rng(7)
SOURCES = [
    RNG.integers(4, V, size=length).astype(np.int32)
    for length in (5, 1, 9, 0, 3, 2, 11, 15, 0, 4, 13)
]
KINDS = ("learned", "rotary", "relative", "t5_bias")  # each acts in another part of the model


def built(config=CONFIG):
    return runs.varied_model(config)


def forward(model):
    """Returns the jitted function to the logits of the tokens and of the length."""

    def outputs(params, source_BS, target_BT):
        apply = functools.partial(model.apply, {"params": params})
        x_BTD, length_logits = apply(source_BS, target_BT, method="features_and_lengths")
        return apply(x_BTD, method="logits"), length_logits

    return jax.jit(outputs)


@pytest.mark.parametrize(
    ("position", "use_bias"), [*((position, True) for position in KINDS), ("sinusoidal", False)]
)
def test_a_masked_decoder_adds_only_the_matrix_that_predicts_the_length_to_a_causal_one(
    position, use_bias
):
    config = dataclasses.replace(CONFIG, position=position, use_bias=use_bias)
    shapes = [
        flax.traverse_util.flatten_dict(parameters.shapes(build_model(each)))
        for each in (config, dataclasses.replace(config, decoder="causal"))
    ]
    more = {path: leaf.shape for path, leaf in shapes[0].items() if path not in shapes[1]}
    bias = {("length", "bias"): (LONGEST,)} if use_bias else {}
    assert more == {("length", "kernel"): (14, LONGEST), **bias}
    assert shapes[1].keys() <= shapes[0].keys()


def test_the_symbol_in_front_of_the_source_is_the_start_symbol():
    assert transformer.LENGTH == BOS


# Dependencies, by gradients.


def dependencies(config, source, target):
    """Returns masks of the inputs that the logits of each token, and of the length, depend on.

    They are the source for each token, the target for each token, and both for the length.
    """
    model, params = built(config)
    sides = {"source": jnp.array([source]), "target": jnp.array([target])}

    def outputs(moved):
        def disturb(call, args, kwargs, context):
            result = call(*args, **kwargs)
            if isinstance(context.module, Inputs) and context.method_name == "__call__":
                side = moved[context.module.name]
                # The symbol in front of the source is embedded separately.
                return result + side if side.shape == result.shape else result
            return result

        with nn.intercept_methods(disturb):
            x_BTD, length_logits = model.apply(
                {"params": params}, *sides.values(), method="features_and_lengths"
            )
        size = max(x_BTD.shape[-1], LONGEST)
        mixture = np.random.default_rng(1).normal(size=(size,)).astype(np.float32)
        return x_BTD[0] @ mixture[: x_BTD.shape[-1]], length_logits[0] @ mixture[:LONGEST]

    moved = {
        f"{side}_inputs": jnp.zeros((*ids.shape, config.d_model)) for side, ids in sides.items()
    }
    of_text, of_length = jax.jit(jax.jacrev(outputs))(moved)
    reads = lambda derivative: np.abs(derivative).max(axis=(-3, -1)) > 0  # noqa: E731
    return *(reads(of_text[name]) for name in moved), *(reads(of_length[name]) for name in moved)


@pytest.mark.parametrize("position", ["learned", pytest.param("relative", marks=pytest.mark.slow)])
def test_every_token_depends_on_all_other_tokens_and_none_on_padding(position):
    config = dataclasses.replace(CONFIG, position=position)
    by_source, by_target, length_by_source, length_by_target = dependencies(
        config, [5, 6, 7, 2, 0, 0], [8, 3, 3, 9, 0]
    )
    np.testing.assert_array_equal(by_target[:4], [[1, 1, 1, 1, 0]] * 4)
    np.testing.assert_array_equal(by_source[:4], [[1, 1, 1, 1, 0, 0]] * 4)
    np.testing.assert_array_equal(length_by_source, [1, 1, 1, 1, 0, 0])
    assert not length_by_target.any()


@pytest.mark.parametrize("position", ["learned", pytest.param("t5_bias", marks=pytest.mark.slow)])
def test_padding_changes_no_logit_even_up_to_the_longest_source(position):
    model, params = built(dataclasses.replace(CONFIG, position=position))
    apply = functools.partial(forward(model), params)
    source, target = jnp.array([[5, 6, 7, 2]]), jnp.array([[8, 3, 9]])
    wide = jnp.pad(source, ((0, 0), (0, LONGEST - 4))), jnp.pad(target, ((0, 0), (0, 6)))
    for some, padded in zip(apply(source, target), apply(*wide), strict=True):
        np.testing.assert_allclose(padded[:, : some.shape[1]], some, atol=2e-5)


@pytest.mark.parametrize(
    "position", [pytest.param("rotary", marks=pytest.mark.slow), "t5_bias", "none"]
)
def test_masked_positions_differ_by_their_distance_to_the_end_symbol(position, monkeypatch):
    """Without a position scheme they do not differ, so such a model is refused."""
    if position == "none":
        monkeypatch.setattr(transformer, "check_model", lambda model: None)
    model, params = built(dataclasses.replace(CONFIG, position=position))
    run, source = forward(model), jnp.array([[5, 6, 7, 2]])

    def spread(ids):
        logits_TV = run(params, source, jnp.array([ids]))[0][0, :4]
        return float(np.ptp(logits_TV, axis=0).max())

    assert (spread([UNK, UNK, UNK, UNK, EOS]) > 0.005) == (position != "none")
    assert spread([UNK, UNK, UNK, UNK, PAD]) < 1e-4  # so the end symbol is never masked


def test_segments_are_refused():
    model, params = built()
    ids = jnp.ones((1, 3), jnp.int32)
    with pytest.raises(
        ValueError, match=r"^Expected one pair a row, whose length is predicted, got segments"
    ):
        model.apply({"params": params}, ids, ids, source_segment_BS=ids, target_segment_BT=ids)


# Training.

ROWS, S, T = 16, 9, 7


def make_batch():
    """Returns rows of 1 to 6 target tokens; the last row is empty."""
    rng = np.random.default_rng(0)
    batch = {"source": np.zeros((ROWS, S), np.int32), "target": np.zeros((ROWS, T), np.int32)}
    for row in range(ROWS - 1):
        for side, longest in (("source", S), ("target", T)):
            ids = [*rng.integers(4, V, rng.integers(1, longest)), EOS]
            batch[side][row, : len(ids)] = ids
    return {**batch, "row": np.arange(ROWS, dtype=np.int32)}


BATCH, SGD = make_batch(), optax.sgd(1.0)


def state_of(seed=0, optimizer=SGD):
    model, params = built()
    key_data = jax.random.key_data(jax.random.key(seed))
    return state_lib.TrainState(jnp.int32(5), params, optimizer.init(params), key_data)


def step_options():
    return {"model": built()[0], "optimizer": SGD, "label_smoothing": 0.1}


def step_in_parts(microbatches=1):
    options = {**step_options(), "microbatches": microbatches}
    return jax.jit(functools.partial(step_lib.train_step, **options))


def by_hand(batch, smoothing):
    """Returns the objective and all sums in float64, from the logits with masks of evaluation."""
    by_text = jax.random.key(0), masking.number_of_text(batch["target"])
    params, masked = built()[1], jax.jit(masking.mask_targets)(*by_text, batch["target"])
    outputs = forward(built()[0])(params, batch["source"], masked.inputs_BT)
    log_p, log_p_length = (np.asarray(jax.nn.log_softmax(x), np.float64) for x in outputs)
    found = dict.fromkeys(
        ("objective", "loss", "accuracy", "length_loss", "length_accuracy", "tokens"), 0.0
    )
    for row, ids in enumerate(batch["target"]):
        ids = [token for token in ids if token not in (PAD, EOS)]
        if ids:
            length_loss = -log_p_length[row, len(ids)]
            found["length_loss"] += length_loss
            found["objective"] += length_loss
            found["length_accuracy"] += log_p_length[row].argmax() == len(ids)
        for t, token in enumerate(ids):
            if masked.inputs_BT[row, t] == UNK:
                found["tokens"] += 1
                found["loss"] -= log_p[row, t, token]
                found["accuracy"] += log_p[row, t].argmax() == token
                found["objective"] -= (1 - smoothing) * log_p[row, t, token] + smoothing * log_p[
                    row, t
                ].mean()
    return found


def test_the_objective_and_the_metrics_are_of_the_masked_tokens_and_the_length():
    expected = by_hand(BATCH, 0.1)
    assert 0 < expected["tokens"] < (BATCH["target"] > 2).sum()
    run = jax.jit(functools.partial(step_lib.loss_sums, model=built()[0], label_smoothing=0.1))
    objective, sums = run(built()[1], BATCH)
    np.testing.assert_allclose(objective, expected["objective"], rtol=1e-4)
    assert sums.keys() == {"loss", "accuracy", "length_loss", "length_accuracy"}
    for name, (total, weight) in sums.items():
        count = ROWS - 1 if name.startswith("length") else expected["tokens"]
        np.testing.assert_allclose((total, weight), (expected[name], count), rtol=1e-4)


def test_evaluation_masks_by_the_text_and_a_training_step_by_its_number_and_the_seed():
    evaluate = jax.jit(functools.partial(step_lib.eval_step, model=built()[0]))
    evaluated = jax.device_get(evaluate(built()[1], BATCH))
    assert jax.device_get(evaluate(built()[1], BATCH)) == evaluated
    reversed_rows = {name: x if name == "row" else x[::-1] for name, x in BATCH.items()}
    for name, sums in jax.device_get(evaluate(built()[1], reversed_rows)).items():
        np.testing.assert_allclose(sums, evaluated[name], rtol=1e-5, err_msg=name)

    @jax.jit
    def weight_of(state):  # the number of masked tokens; the compiler drops the gradients
        return step_lib.train_step(state, BATCH, **step_options())[1]["loss"][1]

    state = state_of()
    weights = [
        float(weight_of(each))
        for each in (state, state, state.replace(step=jnp.int32(6)), state_of(seed=1))
    ]
    assert weights[0] == weights[1] and len(set(weights)) == 3


def assert_same_step(actual, expected):
    """Asserts equal sums and parameters, except key biases, whose exact gradient is 0."""
    for name, sums in expected[1].items():
        np.testing.assert_allclose(actual[1][name], sums, rtol=1e-5, err_msg=name)
    moved = [
        flax.traverse_util.flatten_dict(state.params, sep="/") for state, _ in (actual, expected)
    ]
    for name, leaf in moved[1].items():
        if not name.endswith("key/bias"):
            np.testing.assert_allclose(moved[0][name], leaf, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_microbatches_eight_devices_and_pmap_make_the_step_of_one_device():
    """Without dropout, the masks are the only random values.

    With half the parameters, rounding errors are 1 % as large.
    """
    state = state_of()
    state = state.replace(params=jax.tree.map(lambda x: x / 2, state.params))
    expected = jax.device_get(step_in_parts()(state, BATCH))
    assert_same_step(jax.device_get(step_in_parts(microbatches=4)(state, BATCH)), expected)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, BATCH))
    for mode in (
        parallel.MeshMode(meshes.make_mesh(8)),
        parallel.PmapMode(meshes.make_mesh(8)),
    ):
        step = functools.partial(step_lib.train_step, **step_options(), axis_name=mode.axis_name)
        after, sums = mode.compile(step, *shapes, donate=False)(
            mode.put_state(state), mode.put_batch(BATCH)
        )
        assert_same_step((jax.device_get(mode.over_mesh(after)), mode.read(sums)), expected)


# Decoding.


@functools.cache
def decoder(config=CONFIG, rows=13, devices=None, **changes):
    model, params = built(config)
    mesh = devices and meshes.make_mesh(devices)
    sharding = parallel.decoding_shardings(mesh) if mesh else None
    made = Decoder(
        model, dataclasses.replace(MASK_PREDICT, **changes), rows=rows, sharding=sharding
    )
    return made, parallel.replicate(params, mesh) if mesh else params


def decoded(inputs=SOURCES, **options):
    made, params = decoder(**options)
    return [ids.tolist() for ids in made(params, inputs)]


def by_full_forwards(source, apply):
    """Returns the lengths and the best candidate of mask-predict by full forward passes."""
    source_1S = np.zeros((1, LONGEST), np.int32)
    source_1S[0, : len(source) + 1] = [*source, EOS]

    def logits_of(ids):
        target_1T = np.zeros((1, LONGEST), np.int32)
        target_1T[0, : len(ids) + 1] = [*ids, EOS]
        return [np.asarray(x[0]) for x in apply(source_1S, target_1T)]

    limit = min(len(source) + MASK_PREDICT.max_extra_length, LONGEST - 1)
    _, length_logits = logits_of([UNK])
    length_log_prob = np.asarray(jax.nn.log_softmax(length_logits))
    lengths = sorted(range(1, limit + 1), key=lambda n: -length_logits[n])[
        : MASK_PREDICT.length_candidates
    ]
    found = []
    for length in lengths:
        ids, log_prob = [UNK] * length, [0.0] * length
        for t in range(MASK_PREDICT.iterations):
            count = length * (MASK_PREDICT.iterations - t) // MASK_PREDICT.iterations
            hidden = sorted(range(length), key=lambda i: log_prob[i])[:count]
            ids = [UNK if i in hidden else token for i, token in enumerate(ids)]
            table = np.array(jax.nn.log_softmax(logits_of(ids)[0]))[:length]
            table[:, [PAD, BOS, EOS, UNK]] = -np.inf
            for i in hidden:
                ids[i], log_prob[i] = int(table[i].argmax()), float(table[i].max())
        found.append(((sum(log_prob) + length_log_prob[length]) / (length + 1), ids))
    return lengths, max(found, key=lambda item: item[0])[1]


@pytest.mark.parametrize(
    "position",
    ["learned", *(pytest.param(p, marks=pytest.mark.slow) for p in KINDS[1:])],
)
def test_a_decoder_finds_the_texts_of_full_forward_passes_for_each_candidate(position):
    config = dataclasses.replace(CONFIG, position=position)
    model, params = built(config)
    apply = functools.partial(forward(model), params)
    texts, ranks = decoded(config=config), []
    for source, ids in zip(SOURCES, texts, strict=True):
        if not len(source):
            assert ids == []
            continue
        lengths, expected = by_full_forwards(source, apply)
        assert ids == expected
        ranks.append(lengths.index(len(ids)))
    assert len({tuple(ids) for ids in texts}) > 5
    # With these weights and t5_bias, the best candidate always has the most probable length.
    assert len(set(ranks)) > 1 or position == "t5_bias"


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches",
    [{"rows": 16, "devices": 8}, pytest.param({"rows": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_sentence_gets_the_same_text_in_any_batch_and_on_eight_devices(batches):
    """Short texts need fewer positions than the maximum, so batches use different sizes."""
    options = {"config": dataclasses.replace(CONFIG, max_length=37), "max_extra_length": 9}
    texts = decoded(**options)
    # Some texts are longer than half the positions.
    assert len({tuple(ids) for ids in texts}) > 5 and max(map(len, texts)) > 11
    assert decoded(**batches, **options) == texts


@pytest.mark.slow
def test_candidates_are_rows_for_kernels_without_a_batching_rule(monkeypatch):
    """Kernels such as cuDNN's have one batch axis, so vmap over candidates is not possible."""

    def like_cudnn(*inputs):
        shapes.append(inputs[0].shape)
        return attend(*inputs)

    attend = jax.custom_batching.custom_vmap(lambda *inputs: backends.xla(*inputs))
    attend.def_vmap(lambda *_: pytest.fail("vmap of the kernel"))
    shapes = []
    monkeypatch.setattr(devices, "platform", lambda: "cuda")
    monkeypatch.setattr(backends, "cudnn", like_cudnn)
    config = dataclasses.replace(CONFIG, dtype="bfloat16", d_head=8, max_length=160)
    model, params = built(config)
    source = RNG.integers(4, V, size=130).astype(np.int32)
    (ids,) = Decoder(model, MASK_PREDICT, rows=2)(params, [source])
    assert 0 < len(ids) < 160
    # Of the encoder and of the decoder.
    assert {shape[0] for shape in shapes} == {2, 2 * MASK_PREDICT.length_candidates}


@pytest.mark.slow
def test_iterations_and_bounds_of_the_length_change_the_texts():
    texts = decoded()
    assert texts != decoded(iterations=1)

    def lengths(**changes):
        """Returns the lengths of each source and its text."""
        texts = zip(SOURCES, decoded(**changes), strict=True)
        pairs = [(len(source), len(ids)) for source, ids in texts]
        assert [pair for pair in pairs if not pair[0]] == [(0, 0)] * 2  # empty sources
        return [pair for pair in pairs if pair[0]]

    limit = MASK_PREDICT.max_extra_length
    assert min(length for _, length in lengths()) < 7
    assert all(length >= min(7, source + limit) for source, length in lengths(min_length=7))
    assert all(length <= source for source, length in lengths(max_extra_length=0))


def test_options_that_mask_predict_does_not_support_are_refused():
    made, params = decoder()
    with pytest.raises(
        ValueError,
        match=r"^prefixes: decode.method='mask_predict' predicts all tokens at once; leave",
    ):
        made(params, SOURCES[:1], prefixes=[np.array([5], np.int32)])
    with pytest.raises(
        ValueError, match=r"^n_best: requires decode.method='beam' or .*, and it is 'mask_predict'"
    ):
        made.n_best(params, SOURCES, 2)
    with pytest.raises(
        ValueError, match=r"^config\.decode\.method: 'greedy' generates token by token"
    ):
        Decoder(built()[0], DecodeConfig())
    with pytest.raises(
        ValueError, match=r"^config\.decode\.method: 'mask_predict' fills in masked tokens"
    ):
        Decoder(build_model(dataclasses.replace(CONFIG, decoder="causal")), MASK_PREDICT)
    with pytest.raises(
        ValueError, match=r"^config\.model\.decoder: 'masked' requires .*got 'decoder_lm'"
    ):
        build_model(dataclasses.replace(CONFIG, architecture="decoder_lm"))


# Training and decoding.


@pytest.mark.slow
def test_a_trained_model_decodes_its_training_texts_exactly():
    """Each target is its reversed source."""
    model = build_model(dataclasses.replace(CONFIG, d_model=34, d_ff=61))
    rng, steps = np.random.default_rng(2), 401
    texts = [rng.integers(4, V, rng.integers(2, 7)).astype(np.int32) for _ in range(ROWS)]
    source, target = np.zeros((2, ROWS, 8), np.int32)
    for row, ids in enumerate(texts):
        source[row, : len(ids) + 1], target[row, : len(ids) + 1] = [*ids, EOS], [*ids[::-1], EOS]
    batch = {"source": source, "target": target, "row": np.arange(ROWS, dtype=np.int32)}
    optimizer = optax.adam(optax.linear_schedule(1e-2, 0, steps))
    state = jax.jit(functools.partial(state_lib.init_state, model, optimizer, seed=0))()
    run = jax.jit(
        functools.partial(step_lib.train_step, model=model, optimizer=optimizer), donate_argnums=0
    )
    losses = []
    for _ in range(steps):
        state, sums = run(state, batch)
        losses.append(metrics.divide(sums)["loss"])
    assert np.mean(losses[-20:]) < 0.05 * np.mean(losses[:20])
    for candidates in (1, 5):  # improbable lengths do not win against the certain one
        config = dataclasses.replace(MASK_PREDICT, length_candidates=candidates)
        found = Decoder(model, config, rows=ROWS)(state.params, texts)
        assert [ids.tolist() for ids in found] == [ids[::-1].tolist() for ids in texts]
