"""Decoding with a cache, against full forward passes; limits of the output, batches and devices."""

import dataclasses
import functools
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.config import CHOICES, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens.tokenizer import pad_rows
from flaxformer_lite.decoding.constraints import constrain
from flaxformer_lite.decoding.decoder import Decoder, padded_length, rows_for
from flaxformer_lite.decoding.methods import decode as decode_task
from flaxformer_lite.decoding.methods import pick_token
from flaxformer_lite.decoding.task import continuation, translation
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training import meshes, parallel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, MAX_LENGTH, EXTRA = 11, 19, 3
CONFIG = ModelConfig(
    vocab_size=V, d_model=14, num_heads=3, d_head=5, d_ff=13, num_encoder_layers=1,
    num_decoder_layers=2, max_length=MAX_LENGTH, tie_embeddings=False, norm_placement="pre",
)  # fmt: skip
RNG = np.random.default_rng(7)
SOURCES = [
    RNG.integers(4, V, size=length).astype(np.int32)
    for length in (5, 1, 17, 0, 3, 2, 11, 7, 0, 4, 13)
]
GREEDY = DecodeConfig(max_extra_length=EXTRA)


def varied_params(model):
    """Returns random parameters whose outputs vary: large embeddings, small sublayers."""
    rng = np.random.default_rng(3)

    def random(path, leaf):
        name, noise = jax.tree_util.keystr(path), rng.normal(size=leaf.shape)
        if "scale" in name or "['bias']" in name:
            return jnp.float32(0.1 * noise + ("scale" in name))
        return jnp.float32(noise if "embedding" in name or "output" in name else 0.6 * noise)

    return jax.tree_util.tree_map_with_path(random, param_shapes(model))


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return varied_params(model)


@functools.cache
def with_layers(layers, **changes):
    """Returns a model with `layers` decoder layers, and its parameters."""
    model = build_model(dataclasses.replace(CONFIG, num_decoder_layers=layers, **changes))
    return model, varied_params(model)


def most_probable(logits_V):
    """Returns the most probable token without the special symbols, except the end symbol."""
    return max(set(range(V)) - {PAD, BOS, UNK}, key=np.asarray(logits_V).item)


@pytest.mark.parametrize("size", [V, 401])  # the larger one is searched by blocks
@pytest.mark.parametrize(
    "wanted",
    [{}, {"min_length": 5}, {"no_repeat_ngram": 2}, {"min_length": 5, "no_repeat_ngram": 2}],
    ids=str,
)
def test_the_greedy_pick_is_the_most_probable_token_that_is_allowed(wanted, size):
    config = dataclasses.replace(GREEDY, **wanted)
    logits = np.random.default_rng(5).normal(size=(3, size)).astype(np.float32)
    logits[:, [PAD, BOS, UNK]] = 99
    logits[0, 7], logits[1, EOS] = 20, 20
    ids_BT = jnp.array([[6, 7, 6, 0], [6, 7, 8, 0], [9, 9, 9, 0]])
    tokens = jax.jit(pick_token(config, jnp.arange(3)))(
        jnp.asarray(logits), ids_BT, jnp.int32(3)
    ).tolist()
    assert (tokens[0] == 7) == ("no_repeat_ngram" not in wanted) and (tokens[1] == EOS) == (
        "min_length" not in wanted
    )
    allowed = jax.jit(functools.partial(constrain, config))(
        jnp.asarray(logits), ids_BT, jnp.int32(3)
    )
    assert tokens == allowed.argmax(axis=-1).tolist()


@pytest.fixture(scope="module")
def full_forward(model):
    """Greedy ids of one source by full forward passes: one for each token."""
    apply = jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs))

    def decode(params, source, extra=EXTRA):
        tokens = [BOS]
        source_1S = np.pad([*source, EOS], (0, MAX_LENGTH - len(source) - 1))[None]
        while len(source) and len(tokens) - 1 < min(len(source) + 1 + extra, MAX_LENGTH):
            target_1T = np.pad(tokens, (0, MAX_LENGTH - len(tokens)))[None]
            logits_1TV = apply(params, jnp.asarray(source_1S), jnp.asarray(target_1T))
            tokens.append(most_probable(np.asarray(logits_1TV)[0, len(tokens) - 1]))
            if tokens[-1] == EOS:
                return tokens[1:-1]
        return tokens[1:]

    return decode


@pytest.fixture(scope="module")
def expected(full_forward, params):
    return [full_forward(params, source) for source in SOURCES]


def test_some_outputs_end_by_the_end_symbol_and_some_at_their_limit(expected):
    limits = [min(len(source) + 1 + EXTRA, MAX_LENGTH) for source in SOURCES]
    at_limit = [len(ids) == limit for ids, limit in zip(expected, limits, strict=True)]
    assert 0 < sum(at_limit) < len([source for source in SOURCES if len(source)])
    assert len({tuple(ids) for ids in expected}) > 5 and max(len(set(ids)) for ids in expected) > 2


@pytest.mark.parametrize(
    "rows", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, len(SOURCES) + 2))]
)
def test_decoding_with_a_cache_gives_the_tokens_of_the_full_forward_in_any_batches(
    model, params, expected, rows
):
    decoder = Decoder(model, GREEDY, rows=rows)
    decoded = decoder(params, SOURCES)
    assert [ids.tolist() for ids in decoded] == expected
    assert all(ids.dtype == np.int32 for ids in decoded)


def test_rows_over_devices_give_the_same_tokens(model, params, expected):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params, shardings = jax.device_put(params, whole), (rows, rows, whole)
    decoder = Decoder(model, GREEDY, rows=14, sharding=shardings)
    assert [ids.tolist() for ids in decoder(params, SOURCES)] == expected


def decoded_with(decoder, params, sources=SOURCES):
    return [ids.tolist() for ids in decoder(params, sources)]


def up_to(longest, texts=SOURCES):
    """Returns the texts of the sources of at most `longest` tokens."""
    return [text for text, source in zip(texts, SOURCES, strict=True) if len(source) <= longest]


# Sources of one padded length; all sources, which have two.
LONGEST = pytest.mark.parametrize("longest", [15, pytest.param(17, marks=pytest.mark.slow)])
# Of the decoder. The second layer's cache depends on the first layer's output, so on its cache.
LAYERS = pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])


class Compiled:
    """Keeps the compiled functions of a decoder, and the batches that they are called with."""

    def __init__(self):
        self.functions, self.batches = [], []

    def compile_with(self, compile):
        compiled = compile()
        self.functions.append(compiled)

        def call(params, *batch):
            self.batches.append([np.asarray(array) for array in batch])
            return compiled(params, *batch)

        return call

    def exchanges(self):
        """Returns the kinds of communication between devices."""
        kinds = r"\b(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\b[\w-]*\("
        assert self.functions
        return {kind for each in self.functions for kind in re.findall(kinds, each.as_text())}


@LAYERS
@pytest.mark.parametrize(
    "method", ["greedy", *(pytest.param(m, marks=pytest.mark.slow) for m in ("beam", "sample"))]
)
def test_devices_that_each_hold_the_whole_model_do_not_communicate(method, layers):
    model, params = with_layers(layers)
    config, mesh = dataclasses.replace(GREEDY, method=method), meshes.make_mesh(2)
    compiled, options = Compiled(), {"sharding": parallel.decoding_shardings(mesh)}
    decoder = Decoder(model, config, rows=14, compile_with=compiled.compile_with, **options)
    texts = decoded_with(decoder, parallel.replicate(params, mesh))
    assert texts == decoded_with(Decoder(model, config, rows=14), params)
    assert compiled.exchanges() == set()


def test_devices_get_inputs_of_similar_lengths(model, params, full_forward):
    mesh, compiled = meshes.make_mesh(2), Compiled()
    options = {"sharding": parallel.decoding_shardings(mesh)}
    decoder = Decoder(model, GREEDY, rows=8, compile_with=compiled.compile_with, **options)
    # 6 inputs for 8 rows: 2 rows are unused.
    sources = [np.full(length, 5, np.int32) for length in (3, 9, 1, 7, 5, 11)]
    texts = decoded_with(decoder, parallel.replicate(params, mesh), sources)
    ((source_BS, _),) = compiled.batches
    tokens = (source_BS != PAD).sum(axis=1)
    assert [*tokens[:4]] == [12, 8, 4, 0] and [*tokens[4:]] == [10, 6, 2, 0]
    assert texts == [full_forward(params, source) for source in sources]


@LONGEST
def test_a_decoder_takes_other_parameters_at_each_call(
    model, params, full_forward, expected, longest
):
    sources, expected = up_to(longest), up_to(longest, expected)
    tripled = jax.tree_util.tree_map_with_path(
        lambda path, x: 3 * x if "feed_forward" in jax.tree_util.keystr(path) else x, params
    )
    others = [full_forward(tripled, source) for source in sources]
    assert others != expected
    decoder = Decoder(model, GREEDY, rows=3)
    texts = [decoded_with(decoder, each, sources) for each in (params, tripled, params)]
    assert texts == [expected, others, expected]


@LONGEST
def test_parameters_on_one_device_decode_on_a_mesh_too(model, params, expected, longest):
    mesh, sources = meshes.make_mesh(2), up_to(longest)
    decoder = Decoder(model, GREEDY, rows=4, sharding=parallel.decoding_shardings(mesh))
    for make in (jnp.array, np.array):
        texts = decoded_with(decoder, jax.tree.map(make, params), sources)
        assert texts == up_to(longest, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "layers", "longest"),
    [({"tensor": 2}, 1, 15), ({"tensor": 2}, 2, 17), ({"fsdp": 2}, 2, 17)],
    ids=str,
)
def test_devices_that_share_the_parameters_decode_with_several_sets_of_them(axes, layers, longest):
    model, first = with_layers(layers, vocab_size=12, d_ff=12, num_heads=2)
    sources = up_to(longest)
    mesh, compiled = meshes.make_mesh(1, **axes), Compiled()
    options = {"sharding": parallel.decoding_shardings(mesh)}
    decoder = Decoder(model, GREEDY, rows=4, compile_with=compiled.compile_with, **options)
    alone = Decoder(model, GREEDY, rows=4)
    sharded = parallel.MeshMode(mesh).make_state(lambda: first)
    shardings = jax.tree.map(lambda x: x.sharding, sharded)
    for params in (first, jax.tree.map(lambda x: 2 * np.asarray(x), first)):
        expected = decoded_with(alone, params, sources)
        assert len({tuple(ids) for ids in expected}) > 5
        assert decoded_with(decoder, jax.device_put(params, shardings), sources) == expected
    assert compiled.exchanges()  # no device holds the whole model


def test_a_padded_length_compiles_once_and_a_callback_runs_between_batches(model, params):
    compiled, pauses = [], []

    def compile_with(compile):
        compiled.append(1)
        return compile()

    decoder = Decoder(model, GREEDY, rows=2, compile_with=compile_with)
    # 3 sources that are not empty: 2 batches of length 16.
    sources = [SOURCES[0], SOURCES[1], SOURCES[3], SOURCES[4]]
    first = decoder(params, sources, between_batches=lambda: pauses.append(1))
    again = decoder(params, sources)
    assert len(compiled) == 1 and len(pauses) == 2
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]


def test_rows_fill_the_tokens_or_an_eighth_for_few_inputs_in_multiples_of_the_devices():
    rows = functools.partial(rows_for, tokens=4096, multiple=1)
    assert [rows(length, waiting=10**6) for length in (16, 32, 64, 128, 256)] == [
        256,
        128,
        64,
        32,
        16,
    ]
    assert [rows(16, waiting=waiting) for waiting in (1, 32, 33, 256, 257)] == [
        32,
        32,
        256,
        256,
        256,
    ]
    assert [rows_for(16, tokens=4096, multiple=7, waiting=waiting) for waiting in (1, 99)] == [
        28,
        252,
    ]
    assert (
        rows_for(256, tokens=97, multiple=7, waiting=1)
        == rows_for(256, tokens=97, multiple=7, waiting=99)
        == 7
    )


MANY_TOKENS = 16 * 61


@pytest.mark.parametrize(
    ("method", "tokens"),
    [
        ("greedy", MANY_TOKENS),
        pytest.param("greedy", 1, marks=pytest.mark.slow),
        pytest.param("sample", MANY_TOKENS, marks=pytest.mark.slow),
    ],
)
def test_texts_are_the_same_for_any_tokens_of_a_batch_and_few_shapes_are_compiled(
    model, params, expected, method, tokens
):
    sources = [source for source in SOURCES for _ in range(7)]

    def decoded(tokens):
        compiled, options = Compiled(), {"temperature": 1.5, "tokens_per_batch": tokens}
        config = dataclasses.replace(GREEDY, method=method, **options)
        decoder = Decoder(model, config, compile_with=compiled.compile_with)
        texts = decoded_with(decoder, params, sources)
        assert len(compiled.functions) == 2  # for the padded lengths 16 and 19
        return texts

    greedy = [ids for ids in expected for _ in range(7)]
    texts = decoded(tokens)
    if method == "greedy":
        assert texts == greedy
    else:
        assert texts == decoded(1) != greedy


def test_each_beam_counts_as_a_row_of_a_batch(model):
    rows = [
        Decoder(model, DecodeConfig(**method)).rows(16)
        for method in ({}, {"method": "beam"}, {"method": "beam", "beam_size": 8}, {"beam_size": 8})
    ]
    assert rows == [256, 64, 32, 256]


PADDED = [
    (2, 16),
    (16, 16),
    (17, 24),
    (24, 24),
    (25, 32),
    (32, 32),
    (33, 48),
    (49, 64),
    (65, 96),
    (97, 97),
]


@pytest.mark.parametrize(("length", "padded"), PADDED)
def test_inputs_are_padded_to_a_power_of_two_or_three_quarters_of_one_or_max_length(length, padded):
    assert padded_length(length, 97) == padded


def test_no_source_gives_no_output_and_empty_sources_give_empty_outputs_without_a_model(model):
    decoder = Decoder(model, GREEDY)
    assert decoder(None, []) == []
    assert [ids.tolist() for ids in decoder(None, [np.empty(0, np.int32)] * 2)] == [[], []]


def test_an_error_names_the_number_of_a_source_that_is_too_long(model):
    fits, does_not = (np.full(length, 5, np.int32) for length in (MAX_LENGTH - 1, MAX_LENGTH))
    with pytest.raises(
        ValueError, match=r"^input 1: 19 tokens, the model takes at most 18; split it"
    ):
        Decoder(model, GREEDY)(None, [fits, does_not])


@flax.struct.dataclass
class Fed:
    """A cache of the tokens of all previous steps; it has its full length from the start."""

    ids_BT: jax.Array

    def extended(self, max_length):
        return self


class Scripted:
    """A model whose token of row b at step i is `script[b][i]`, whatever its input is."""

    def __init__(self, script):
        self._script_BT = jnp.asarray(script)

    def apply(self, variables, *arguments, method):
        if method == "start_cache":
            return Fed(jnp.zeros(self._script_BT.shape, jnp.int32))
        token_B, cache, index, *_ = arguments
        cache = Fed(cache.ids_BT.at[:, index].set(token_B))
        return jax.nn.one_hot(self._script_BT[:, index], V), cache


def scripted(script, sources, *, extra, max_length):
    config, row_B = DecodeConfig(max_extra_length=extra), jnp.arange(len(sources))
    task = translation(Scripted(script), config, {}, jnp.asarray(sources), row_B)
    return decode_task(task, config, capacities=(2, max_length)).tolist()


TASKS = [
    pytest.param("encoder_decoder", "beam", marks=pytest.mark.slow),
    pytest.param("encoder_decoder", "greedy", marks=pytest.mark.slow),
    ("decoder_lm", "beam"),
]


@pytest.mark.slow
@pytest.mark.parametrize("capacities", [(1, 7), (3,), (1, 2, 7)], ids=str)
@pytest.mark.parametrize(("architecture", "method"), TASKS)
def test_texts_do_not_depend_on_the_capacities_of_the_cache(architecture, method, capacities):
    config = dataclasses.replace(
        CONFIG, architecture=architecture, num_decoder_layers=1, attention_window=4
    )
    config = dataclasses.replace(config, position="relative", relative_values=True, num_kv_heads=1)
    model = build_model(config)
    decode = DecodeConfig(method=method, max_extra_length=9, min_length=7)
    translates = architecture == "encoder_decoder"
    inputs_BL = jnp.asarray(pad_rows(SOURCES[:7], MAX_LENGTH - 1, end=translates))
    make_task = translation if translates else continuation
    task = make_task(model, decode, varied_params(model), inputs_BL, jnp.arange(7))

    def decoded(*capacities):
        return jax.jit(lambda: decode_task(task, decode, capacities=capacities))().tolist()

    texts = decoded(MAX_LENGTH)
    assert decoded(*capacities, MAX_LENGTH) == texts
    assert max(sum(token != PAD for token in text) for text in texts) > 9


def test_a_row_stops_at_its_end_symbol_and_is_padding_after_it():
    script = [[7, 8, EOS, 9, 9], [5, EOS, 9, 9, 9], [4, 5, 6, 7, 8]]
    sources = [[9, 9, EOS]] * 3
    expected = [[7, 8, EOS, PAD, PAD], [5, EOS, PAD, PAD, PAD], [4, 5, 6, 7, 8]]
    assert scripted(script, sources, extra=3, max_length=5) == expected


@pytest.mark.parametrize("extra", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_row_without_an_end_symbol_stops_extra_tokens_after_the_length_of_its_source(extra):
    sources = [[9, EOS, PAD, PAD, PAD], [9, 9, 9, 9, EOS]]
    rows = scripted([[4, 5, 6, 7, 8, 9, 10]] * 2, sources, extra=extra, max_length=7)
    assert [sum(token != PAD for token in row) for row in rows] == [2 + extra, 5 + extra]


def test_an_empty_source_gives_an_empty_row():
    assert scripted([[4, 5, 6]] * 2, [[PAD, PAD], [9, EOS]], extra=1, max_length=3) == [
        [PAD] * 3,
        [4, 5, 6],
    ]
    assert scripted([[4, 5, 6]] * 2, [[PAD, PAD]] * 2, extra=1, max_length=3) == [[PAD] * 3] * 2


def test_no_row_is_longer_than_max_length():
    assert scripted([[4, 5, 6, 7]], [[9, EOS]], extra=50, max_length=3) == [[4, 5, 6]]


# A language model continues a prompt.

PROMPTS = [
    RNG.integers(4, V, size=length).astype(np.int32)
    for length in (3, 0, 14, 1, 5, 0, 7, 12, 2, 11, 4)
]
LM = dataclasses.replace(CONFIG, architecture="decoder_lm", position="learned")
SAMPLED = DecodeConfig(method="sample", temperature=1.5, seed=3, max_extra_length=EXTRA)


@functools.cache
def language_model(config=LM):
    model = build_model(config)
    return model, varied_params(model)


def full_forward_of(model, params, prompts, extra):
    """Returns the greedy ids of each prompt, by a full forward pass for each token."""
    apply = jax.jit(functools.partial(model.apply, {"params": params}))

    def continue_(prompt):
        tokens = [BOS, *prompt.tolist()]
        while len(tokens) - 1 < min(len(prompt) + extra, MAX_LENGTH):
            target_1T = jnp.asarray(np.pad(tokens, (0, MAX_LENGTH - len(tokens)))[None])
            tokens.append(most_probable(apply(target_1T)[0, len(tokens) - 1]))
            if tokens[-1] == EOS:
                return tokens[1:-1]
        return tokens[1:]

    return [continue_(prompt) for prompt in prompts]


# The next test has the other schemes that act in attention.
SCHEMES = [
    pytest.param(position, marks=() if position == "sinusoidal" else pytest.mark.slow)
    for position in CHOICES["model.position"]
]


@pytest.mark.parametrize("position", SCHEMES)
def test_with_every_position_scheme_a_cache_gives_the_tokens_of_full_forwards(position):
    model, params = language_model(dataclasses.replace(LM, position=position, d_head=6))
    expected = full_forward_of(model, params, PROMPTS, extra=11)
    lengths = [len(ids) - len(prompt) for ids, prompt in zip(expected, PROMPTS, strict=True)]
    assert len(set(lengths)) > 2
    decoder = Decoder(model, DecodeConfig(max_extra_length=11), rows=len(PROMPTS))
    assert [ids.tolist() for ids in decoder(params, PROMPTS)] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {
            "num_kv_heads": 1,
            "position": "rotary",
            "d_head": 6,
            "norm": "rms_norm",
            "activation": "swiglu",
        },
        pytest.param({"attention": "additive", "position": "alibi"}, marks=pytest.mark.slow),
        {"attention_window": 2, "position": "t5_bias"},
        pytest.param(
            {
                "position": "relative",
                "relative_values": True,
                "relative_clip": 3,
                "norm_placement": "post",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_with_every_kind_of_attention_a_cache_gives_the_tokens_of_full_forwards(changes):
    model, params = language_model(dataclasses.replace(LM, **changes))
    expected = full_forward_of(model, params, PROMPTS, extra=11)
    decoder = Decoder(model, DecodeConfig(max_extra_length=11), rows=len(PROMPTS))
    assert [ids.tolist() for ids in decoder(params, PROMPTS)] == expected


def continued(script, prompts, *, extra, max_length, rows=None):
    row_B = jnp.arange(len(prompts)) if rows is None else jnp.asarray(rows)
    config, prompt_BP = DecodeConfig(max_extra_length=extra), jnp.asarray(prompts)
    task = continuation(Scripted(script), config, {}, prompt_BP, row_B)
    return decode_task(task, config, capacities=(2, max_length)).tolist()


def test_a_prompt_is_kept_whatever_the_model_predicts():
    script = [[9, 9, 9, 5, EOS, 6], [EOS, EOS, 7, 8, EOS, 6], [4, 5, EOS, 6, 7, 8]]
    prompts = [[7, 8, 6], [4, 10, PAD], [PAD, PAD, PAD]]
    expected = [[7, 8, 6, 5, EOS, PAD], [4, 10, 7, 8, EOS, PAD], [4, 5, EOS, PAD, PAD, PAD]]
    assert continued(script, prompts, extra=6, max_length=6) == expected


@pytest.mark.parametrize(
    "extra", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4]
)
def test_a_text_without_an_end_symbol_stops_extra_tokens_after_its_prompt_or_at_max_length(extra):
    rows = continued(
        [[4, 5, 6, 7, 8, 9, 10]] * 3,
        [[9, PAD, PAD], [9, 9, 9], [PAD] * 3],
        extra=extra,
        max_length=6,
    )
    assert [sum(token != PAD for token in row) for row in rows] == [
        1 + extra,
        min(3 + extra, 6),
        extra,
    ]


def test_unused_rows_stay_empty():
    script, prompts = [[4, 5, 6]] * 3, [[9, PAD], [PAD, PAD], [9, PAD]]
    expected = [[9, 5, 6], [4, 5, 6], [PAD] * 3]
    assert continued(script, prompts, extra=3, max_length=3, rows=[0, 1, -1]) == expected
    assert continued(script, prompts, extra=3, max_length=3, rows=[-1] * 3) == [[PAD] * 3] * 3


def test_an_error_names_the_number_of_a_prompt_that_is_too_long():
    model, _ = language_model()
    with pytest.raises(
        ValueError, match=r"^input 1: 19 tokens, the model takes at most 18; split it"
    ):
        Decoder(model, GREEDY)(
            None, [np.full(length, 5, np.int32) for length in (MAX_LENGTH - 1, MAX_LENGTH)]
        )


@functools.cache
def sampled(layers=1, rows=13, **changes):
    """Returns a function that samples texts of prompts, in batches of `rows`."""
    model, params = with_layers(layers, architecture="decoder_lm", position="learned")
    decoder = Decoder(model, dataclasses.replace(SAMPLED, **changes), rows=rows)
    return lambda prompts: [ids.tolist() for ids in decoder(params, prompts)]


@LAYERS
def test_a_seed_gives_the_same_texts_each_time_and_another_seed_gives_other_texts(layers):
    texts, again = sampled(layers)(PROMPTS), sampled.__wrapped__(layers)(PROMPTS)
    assert texts == again
    assert texts != sampled(layers, method="greedy")(PROMPTS)
    other_seed, equal_BV = dataclasses.replace(SAMPLED, seed=4), jnp.zeros((97, V))
    assert picked(other_seed, equal_BV) != picked(SAMPLED, equal_BV) == picked(SAMPLED, equal_BV)
    for prompt, ids in zip(PROMPTS, texts, strict=True):
        assert ids[: len(prompt)] == prompt.tolist() and len(ids) <= len(prompt) + EXTRA


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_another_seed_gives_a_model_other_texts(layers):
    assert sampled(layers, seed=4)(PROMPTS) != sampled(layers)(PROMPTS)


@LAYERS
def test_the_sample_of_a_text_does_not_depend_on_its_batch(layers):
    assert sampled(layers, rows=2)(PROMPTS) == sampled(layers)(PROMPTS)
    assert sampled(layers)(PROMPTS[:5]) == sampled(layers)(PROMPTS)[:5]


@LAYERS
def test_the_sample_of_a_text_depends_on_its_number(layers):
    texts = sampled(layers)([np.array([5, 6, 7], np.int32)] * 7)
    assert len({tuple(ids) for ids in texts}) > 1
    assert sampled(layers)(PROMPTS[::-1])[::-1] != sampled(layers)(PROMPTS)


def picked(config, logits_BV, index=5):
    """Returns the tokens that `config` picks at `index`; nothing of the text so far matters."""
    pick = jax.jit(pick_token(config, jnp.arange(len(logits_BV))))
    ids_BT = jnp.zeros((len(logits_BV), 7), jnp.int32)
    return [pick(logits_BV, ids_BT, jnp.int32(i)).tolist() for i in np.atleast_1d(index)]


def test_a_row_samples_independently_for_each_token():
    first, second, again = picked(SAMPLED, jnp.zeros((97, V)), index=[5, 6, 5])
    assert first == again != second


def test_of_the_special_symbols_only_the_end_symbol_is_generated():
    (tokens,) = picked(SAMPLED, jnp.zeros((1009, V)))
    assert set(tokens) == set(range(V)) - {PAD, BOS, UNK}
    falling_BV = jnp.broadcast_to(-jnp.arange(float(V)), (1009, V))
    assert set(picked(GREEDY, falling_BV)[0]) == {EOS}
    assert set(picked(dataclasses.replace(GREEDY, min_length=6), falling_BV)[0]) == {4}


@LAYERS
def test_sampling_from_the_most_probable_token_alone_is_greedy_decoding(layers):
    assert sampled(layers, top_k=1)(PROMPTS) == sampled(layers, method="greedy")(PROMPTS)


def test_a_translation_can_be_sampled_and_does_not_depend_on_other_sources(model, params, expected):
    # Sources of one padded length, in 2 batches or 1.
    sources, decoder = SOURCES[3:], Decoder(model, SAMPLED, rows=5)
    texts = [ids.tolist() for ids in decoder(params, sources)]
    assert [ids.tolist() for ids in decoder(params, sources[:5])] == texts[:5]
    assert texts != expected[3:]
    assert [text for text, source in zip(texts, sources, strict=True) if not len(source)] == [
        [],
        [],
    ]
