"""Greedy decoding: the same tokens as running the full forward again for each of them, and where rows end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.data.tokenizer import BOS, EOS, PAD
from flaxformer_lite.decoding.generate import Decoder, greedy
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.training.step import param_shapes

V, MAX_LENGTH, EXTRA = 11, 19, 3
CONFIG = ModelConfig(
    vocab_size=V, d_model=14, num_heads=3, d_head=5, d_ff=13, num_encoder_layers=1, num_decoder_layers=2,
    max_length=MAX_LENGTH, tie_embeddings=False, norm_placement="pre",
)  # fmt: skip
RNG = np.random.default_rng(7)
SOURCES = [RNG.integers(4, V, size=length).astype(np.int32) for length in (5, 1, 17, 0, 3, 2, 11, 7, 0, 4, 13)]


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    """Drawn so that outputs vary: large embeddings, small sublayers."""
    rng = np.random.default_rng(4)

    def draw(path, leaf):
        name, noise = jax.tree_util.keystr(path), rng.normal(size=leaf.shape)
        if "scale" in name or "bias" in name:
            return jnp.float32(0.1 * noise + ("scale" in name))
        return jnp.float32(noise if "embedding" in name or "output" in name else 0.3 * noise)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(model))


@pytest.fixture(scope="module")
def full_forward(model, params):
    """Ids of one source by the full forward alone: the likeliest next token, appended, and all of it again."""
    apply = jax.jit(functools.partial(model.apply, {"params": params}))

    def decode(source, extra=EXTRA):
        tokens = [BOS]
        source_1S = jnp.asarray(np.pad([*source, EOS], (0, MAX_LENGTH - len(source) - 1))[None])
        while len(source) and len(tokens) - 1 < min(len(source) + 1 + extra, MAX_LENGTH):
            target_1T = jnp.asarray(np.pad(tokens, (0, MAX_LENGTH - len(tokens)))[None])
            tokens.append(int(jnp.argmax(apply(source_1S, target_1T)[0, len(tokens) - 1])))
            if tokens[-1] in (EOS, PAD):
                return tokens[1:-1]
        return tokens[1:]

    return decode


@pytest.fixture(scope="module")
def expected(full_forward):
    return [full_forward(source) for source in SOURCES]


def test_some_sources_end_by_themselves_and_some_at_their_limit(expected):
    limits = [min(len(source) + 1 + EXTRA, MAX_LENGTH) for source in SOURCES]
    at_limit = [len(ids) == limit for ids, limit in zip(expected, limits, strict=True)]
    assert 0 < sum(at_limit) < len([source for source in SOURCES if len(source)])
    assert len({tuple(ids) for ids in expected}) > 5 and max(len(set(ids)) for ids in expected) > 2


@pytest.mark.parametrize("rows", [2, 3, len(SOURCES) + 2])
def test_decoding_with_a_cache_gives_the_tokens_of_the_full_forward_in_any_batches(model, params, expected, rows):
    decoder = Decoder(model, max_extra_length=EXTRA, rows=rows)
    decoded = decoder(params, SOURCES)
    assert [ids.tolist() for ids in decoded] == expected
    assert all(ids.dtype == np.int32 for ids in decoded)


def test_rows_over_devices_give_the_same_tokens(model, params, expected):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shardings = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(params, shardings[1])
    decoder = Decoder(model, max_extra_length=EXTRA, rows=14, sharding=shardings)
    assert [ids.tolist() for ids in decoder(params, SOURCES)] == expected


def test_a_batch_compiles_once_for_its_padded_length_and_the_caller_may_breathe_between_batches(model, params):
    compiled, breaths = [], []

    def compile_with(compile):
        compiled.append(1)
        return compile()

    decoder = Decoder(model, max_extra_length=EXTRA, rows=2, compile_with=compile_with)
    sources = [SOURCES[0], SOURCES[1], SOURCES[3], SOURCES[4]]  # three that are not empty: two batches of length 16
    first = decoder(params, sources, between_batches=lambda: breaths.append(1))
    again = decoder(params, sources)
    assert len(compiled) == 1 and len(breaths) == 2
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]


@pytest.mark.parametrize(("length", "padded"), [(2, 16), (16, 16), (17, 32), (32, 32), (33, 64), (65, 97)])
def test_sources_are_padded_to_a_power_of_two_or_the_longest_the_model_takes(length, padded):
    decoder = Decoder(build_model(ModelConfig(vocab_size=V, max_length=97)), max_extra_length=EXTRA)
    assert decoder._padded_length(length) == padded


def test_no_source_gives_no_output_and_empty_sources_give_empty_outputs_without_a_model(model):
    decoder = Decoder(model, max_extra_length=EXTRA)
    assert decoder(None, []) == []
    assert [ids.tolist() for ids in decoder(None, [np.empty(0, np.int32)] * 2)] == [[], []]


def test_a_source_that_is_too_long_for_the_model_is_refused_by_its_number(model):
    fits, does_not = (np.full(length, 5, np.int32) for length in (MAX_LENGTH - 1, MAX_LENGTH))
    with pytest.raises(ValueError, match=r"^source 1: 19 tokens, the model takes at most 18; split it"):
        Decoder(model, max_extra_length=EXTRA)(None, [fits, does_not])


class Scripted:
    """Stands for a model: its token at step i is `script[b][i]`, whatever it reads."""

    def __init__(self, script):
        self._script_BT = jnp.asarray(script)

    def apply(self, variables, *arguments, method):
        if method == "encode":
            return jnp.zeros(())
        if method == "start_cache":
            return jnp.zeros(self._script_BT.shape, jnp.int32)  # remembers the tokens that were fed back
        token_B, cache, index, _ = arguments
        cache = cache.at[:, index].set(token_B)
        return jax.nn.one_hot(self._script_BT[:, index], V), cache


def scripted(script, sources, *, extra, max_length):
    return greedy(Scripted(script), {}, jnp.asarray(sources), max_extra_length=extra, max_length=max_length).tolist()


def test_a_row_stops_at_its_end_symbol_and_is_padding_from_there_on():
    script = [[7, 8, EOS, 9, 9], [5, EOS, 9, 9, 9], [4, 5, 6, 7, 8]]
    sources = [[9, 9, EOS]] * 3
    expected = [[7, 8, EOS, PAD, PAD], [5, EOS, PAD, PAD, PAD], [4, 5, 6, 7, 8]]
    assert scripted(script, sources, extra=3, max_length=5) == expected


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_row_that_does_not_end_stops_so_many_tokens_after_the_length_of_its_source(extra):
    sources = [[9, EOS, PAD, PAD, PAD], [9, 9, 9, 9, EOS]]
    rows = scripted([[4, 5, 6, 7, 8, 9, 10]] * 2, sources, extra=extra, max_length=7)
    assert [sum(token != PAD for token in row) for row in rows] == [2 + extra, 5 + extra]


def test_an_empty_source_gives_an_empty_row_and_all_empty_ones_end_at_once():
    assert scripted([[4, 5, 6]] * 2, [[PAD, PAD], [9, EOS]], extra=1, max_length=3) == [[PAD] * 3, [4, 5, 6]]
    assert scripted([[4, 5, 6]] * 2, [[PAD, PAD]] * 2, extra=1, max_length=3) == [[PAD] * 3] * 2


def test_no_row_is_longer_than_the_longest_output():
    assert scripted([[4, 5, 6, 7]], [[9, EOS]], extra=50, max_length=3) == [[4, 5, 6]]
