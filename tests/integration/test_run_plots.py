"""The arrays of figures: attention weights under the right tokens, tables of position schemes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from flaxformer_lite import config as config_lib
from flaxformer_lite import trained
from flaxformer_lite.config import (
    CHOICES,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.model import positions, transformer
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.plotting import plots, run_plots
from flaxformer_lite.training import meshes, parallel

pytestmark = pytest.mark.usefixtures("quickly_compiled")

V, LONGEST, HEADS = 29, 23, 3
# Attention maps are computed op by op, and an op is compiled once a shape: most texts below make
# inputs of 5 tokens, the shortest that tests need.
MODEL = ModelConfig(
    vocab_size=V, num_classes=7, d_model=14, num_heads=HEADS, d_head=6, d_ff=11,
    num_encoder_layers=2, num_decoder_layers=2, max_length=LONGEST,
)  # fmt: skip
DEEP = 11  # layers: sorted as text, layer 10 would come after layer 1
GREEDY = DecodeConfig(max_extra_length=3)
MASK_PREDICT = DecodeConfig(method="mask_predict", iterations=2, min_length=3, max_extra_length=3)
TEXT, TOKENS = "FLEX", ["F", "L", "E", "X"]


class Letters:
    """A tokenizer without training: id i is the i-th letter from 'A'; special tokens have names."""

    @staticmethod
    def encode(texts, *, side="source"):
        return [np.array([ord(letter) - ord("A") for letter in text], np.int32) for text in texts]

    @staticmethod
    def pieces(ids, *, side="source"):
        return [{BOS: "<s>", EOS: "</s>"}.get(int(i), chr(ord("A") + int(i))) for i in ids]


@functools.cache
def run_of(architecture, decode=GREEDY, **changes):
    config = dataclasses.replace(MODEL, architecture=architecture, **changes)
    model, mesh = transformer.build_model(config), meshes.make_mesh(1)
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), param_shapes(model)
    )
    whole = Config(model=config, data=DataConfig(vocab_size=V), decode=decode)
    return trained.Trained(whole, Letters, model, parallel.replicate(params, mesh), mesh, None)


def assert_weights_of_layers(each, run, *inputs, stack, kind):
    """Layer n of a map has the weights of layer n of the model."""
    arrays = [jnp.array([row], jnp.int32) for row in inputs]
    _, kept = run.model.apply({"params": run.params}, *arrays, mutable=["intermediates"])
    layers = kept["intermediates"][stack]
    assert len(each.weights_NHTS) == len(layers)
    for n, weights_HTS in enumerate(each.weights_NHTS):
        ((expected_1HTS,),) = layers[f"layers_{n}"][kind].values()
        np.testing.assert_allclose(weights_HTS, expected_1HTS[0], atol=1e-6)
    np.testing.assert_allclose(
        each.weights_NHTS.sum(axis=-1), np.ones(each.weights_NHTS.shape[:-1]), rtol=1e-5
    )
    assert np.abs(each.weights_NHTS[0] - each.weights_NHTS[1]).max() > 0.1


def assert_nothing_is_read_ahead(each):
    ahead_TS = np.triu(np.ones(each.weights_NHTS.shape[2:], bool), k=1)
    assert (each.weights_NHTS[..., ahead_TS] == 0).all() and (
        each.weights_NHTS[..., ~ahead_TS] > 0
    ).any()


@pytest.mark.parametrize("count", [3, pytest.param(len(TEXT), marks=pytest.mark.slow)])
def test_the_map_of_a_classifier_includes_the_start_and_end_symbols(count):
    run = run_of("encoder_classifier")
    (each,) = run_plots.attention_maps(run, TEXT[:count])
    assert each.name == "encoder self-attention"
    assert each.query_tokens == each.key_tokens == ["<s>", *TOKENS[:count], "</s>"]
    assert each.weights_NHTS.shape == (2, HEADS, count + 2, count + 2)
    ids = [BOS, *Letters.encode([TEXT[:count]])[0], EOS]
    assert_weights_of_layers(each, run, ids, stack="encoder", kind="self_attention")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="default"),
        pytest.param(
            {"num_kv_heads": 1, "position": "rotary"}, id="shared", marks=pytest.mark.slow
        ),
    ],
)
def test_queries_of_a_language_model_are_its_predicted_tokens_and_keys_its_input_tokens(changes):
    run = run_of("decoder_lm", num_decoder_layers=DEEP, **changes)
    (each,) = run_plots.attention_maps(run, TEXT)
    assert each.name == "decoder self-attention"
    assert (each.query_tokens, each.key_tokens) == ([*TOKENS, "</s>"], ["<s>", *TOKENS])
    assert each.weights_NHTS.shape == (DEEP, HEADS, 5, 5)
    assert_weights_of_layers(
        each, run, [BOS, *Letters.encode([TEXT])[0]], stack="decoder", kind="self_attention"
    )
    assert_nothing_is_read_ahead(each)


@pytest.mark.slow
@pytest.mark.slow
def test_tied_layers_have_a_map_for_each_application():
    tied = run_of("decoder_lm", num_decoder_layers=DEEP, tie_layers=True)
    separate = run_of("decoder_lm", num_decoder_layers=DEEP)
    copies = {f"layers_{n}": tied.params["decoder"]["layers_0"] for n in range(DEEP)}
    decoder = {**tied.params["decoder"], **copies}
    separate = dataclasses.replace(separate, params={**tied.params, "decoder": decoder})
    (each,), (expected,) = (run_plots.attention_maps(run, TEXT) for run in (tied, separate))
    assert each.weights_NHTS.shape == (DEEP, HEADS, 5, 5)
    np.testing.assert_allclose(each.weights_NHTS, expected.weights_NHTS, atol=1e-5)


@pytest.mark.slow
def test_the_maps_of_a_translator_have_source_tokens_and_predicted_tokens():
    run = run_of("encoder_decoder")
    (source,) = Letters.encode([TEXT])
    (target,) = trained.make_decoder(run.model, run.config, run.mesh)(run.params, [source])
    assert len(target) not in (0, len(source))
    encoder, decoder, cross = run_plots.attention_maps(run, TEXT)
    read, written = [*TOKENS, "</s>"], [*Letters.pieces(target), "</s>"]
    assert [each.name for each in (encoder, decoder, cross)] == [
        "encoder self-attention",
        "decoder self-attention",
        "cross-attention",
    ]
    assert (encoder.query_tokens, encoder.key_tokens) == (read, read)
    assert (decoder.query_tokens, decoder.key_tokens) == (written, ["<s>", *written[:-1]])
    assert (cross.query_tokens, cross.key_tokens) == (written, read)
    inputs = [[*source, EOS], [BOS, *target]]
    assert_weights_of_layers(encoder, run, *inputs, stack="encoder", kind="self_attention")
    assert_weights_of_layers(decoder, run, *inputs, stack="decoder", kind="self_attention")
    assert_weights_of_layers(cross, run, *inputs, stack="decoder", kind="cross_attention")
    assert_nothing_is_read_ahead(decoder)


@pytest.mark.slow
def test_the_maps_of_a_masked_decoder_have_its_output_as_keys_and_a_length_symbol_in_the_source():
    run = run_of("encoder_decoder", MASK_PREDICT, decoder="masked", position="t5_bias")
    (source,) = Letters.encode([TEXT])
    (target,) = trained.make_decoder(run.model, run.config, run.mesh)(run.params, [source])
    encoder, decoder, cross = run_plots.attention_maps(run, TEXT)
    read, written = [*TOKENS, "</s>"], [*Letters.pieces(target), "</s>"]
    assert len(written) > 3
    assert encoder.query_tokens == encoder.key_tokens == ["<s>", *read]
    assert decoder.query_tokens == decoder.key_tokens == written
    assert (cross.query_tokens, cross.key_tokens) == (written, read)
    inputs = [[*source, EOS], [*target, EOS]]
    assert_weights_of_layers(encoder, run, *inputs, stack="encoder", kind="self_attention")
    assert_weights_of_layers(decoder, run, *inputs, stack="decoder", kind="self_attention")
    assert (
        decoder.weights_NHTS[..., np.triu(np.ones((len(written), len(written)), bool), k=1)] > 0.01
    ).any()
    curves = run_plots.position_curves(run.config.model, run.params)
    assert curves.keys() >= {"encoder/t5_bias", "decoder/t5_bias"}
    ahead = curves["decoder/t5_bias"][:, run_plots.POSITIONS + 1 :]
    assert (ahead != curves["decoder/t5_bias"][:, run_plots.POSITIONS :][:, :1]).any()


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(a, marks=pytest.mark.slow if a == "encoder_decoder" else [])
        for a in CHOICES["model.architecture"]
    ],
)
@pytest.mark.parametrize("max_length", [5, pytest.param(LONGEST, marks=pytest.mark.slow)])
def test_the_longest_text_that_a_model_takes_has_maps_and_a_longer_one_is_refused(
    architecture, max_length
):
    """With a table of positions, in which one token too many would be out of bounds."""
    run = run_of(architecture, position="learned", max_length=max_length)
    longest = max_length - (2 if architecture == "encoder_classifier" else 1)
    for each in run_plots.attention_maps(run, "F" * longest):
        assert each.weights_NHTS.shape[2:] == (len(each.query_tokens), len(each.key_tokens))
        assert max(each.weights_NHTS.shape[2:]) <= max_length
    with pytest.raises(
        ValueError, match=f"{longest + 1} tokens, and the model takes at most {longest}"
    ):
        run_plots.attention_maps(run, "F" * (longest + 1))


def test_a_text_without_a_token_is_refused():
    with pytest.raises(
        ValueError, match=r"^--text: expected a text with at least one token, got none"
    ):
        run_plots.attention_maps(run_of("decoder_lm"), "")


# Position schemes: by their formulas, or with their trained tables.


def trained_tables(params, ending):
    """Path to table, for each path with this ending."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    tables = {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    return {
        path.rpartition("/")[0]: table for path, table in tables.items() if path.endswith(ending)
    }


@pytest.mark.parametrize("architecture", CHOICES["model.architecture"])
@pytest.mark.parametrize("position", runs.SCHEMES)
def test_every_scheme_has_an_array_and_that_of_the_run_its_trained_table(position, architecture):
    run = run_of(architecture, position=position)
    codes = run_plots.position_codes(run.config.model, run.params)
    curves = run_plots.position_curves(run.config.model, run.params)
    for scheme, ending, arrays in (
        ("learned", "learned/embedding", codes),
        ("relative", "relative/key", codes),
        ("t5_bias", "position_bias/embedding", curves),
    ):
        tables = trained_tables(run.params, ending)
        assert bool(tables) == (position == scheme)
        names = [name for name in arrays if scheme in name]
        if not tables:
            assert [name for name in names if "(untrained)" in name] == names and len(names) == 1
        elif arrays is codes:
            assert names == list(tables)
            for name, table in tables.items():
                np.testing.assert_array_equal(codes[name], table)
        else:
            assert names == [path.replace("position_bias", "t5_bias") for path in tables]
    assert {np.shape(code)[-1] for name, code in codes.items() if name == "sinusoidal"} == {14}
    assert all(np.isfinite(array).all() for array in (*codes.values(), *curves.values()))


def test_codes_and_curves_are_those_of_the_schemes():
    run = run_of("encoder_decoder", position="t5_bias")
    codes = run_plots.position_codes(run.config.model, run.params)
    curves = run_plots.position_curves(run.config.model, run.params)
    at = jnp.arange(run_plots.POSITIONS)
    offsets = np.arange(-run_plots.POSITIONS, run_plots.POSITIONS + 1)
    np.testing.assert_array_equal(codes["sinusoidal"], positions.sinusoidal(at, 14))
    rotated = positions.rotary(jnp.ones((1, len(at), 1, 6)), at[None], base=10000.0)[0, :, 0]
    np.testing.assert_array_equal(codes["rotary (of a vector of ones)"], rotated)
    slopes = positions.alibi_slopes(HEADS)
    np.testing.assert_allclose(curves["alibi"], -slopes[:, None] * np.abs(offsets), rtol=1e-6)
    for side in ("encoder", "decoder"):
        table = trained_tables(run.params, f"{side}/position_bias/embedding")[
            f"{side}/position_bias"
        ]
        bucket = np.asarray(
            positions.t5_bucket(jnp.asarray(offsets), bidirectional=side == "encoder")
        )
        assert len(set(bucket)) > 8
        np.testing.assert_array_equal(curves[f"{side}/t5_bias"], table[bucket].T)


def test_schemes_that_pair_dimensions_have_arrays_for_a_model_of_odd_width():
    run = run_of("decoder_lm", position="learned", d_model=15, d_head=5)
    assert all(
        np.isfinite(code).all()
        for code in run_plots.position_codes(run.config.model, run.params).values()
    )


# From a workdir.


@pytest.fixture
def figures(monkeypatch):
    """Name to figure: collects the figures that would be saved to files."""
    saved = {}
    monkeypatch.setattr(
        plots,
        "save",
        lambda figure, folder, name: saved.setdefault(name, figure) and [folder / name],
    )
    return saved


def make_workdir(folder, config, records=()):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_lib.to_dict(config)))
    if records:
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return folder


def test_the_schedule_of_a_run_is_plotted_before_its_first_checkpoint(tmp_path, figures):
    optim = OptimConfig(schedule="linear", learning_rate=0.5, warmup_steps=4)
    config = Config(optim=optim, train=TrainConfig(num_steps=11))
    workdir = make_workdir(tmp_path / "run", config)
    assert run_plots.schedule(workdir, tmp_path) == [tmp_path / "schedule"]
    (line,) = figures["schedule"].axes[0].lines
    up, down = 0.5 * np.arange(1, 5) / 4, 0.5 * (12 - np.arange(5, 12)) / (12 - 4)
    np.testing.assert_allclose(
        line.get_xydata(), np.stack([np.arange(1, 12), [*up, *down]], axis=1), atol=1e-6
    )
    assert line.get_label() == "linear"


def test_the_metrics_of_several_runs_are_plotted_together(tmp_path, figures):
    records = [
        {"step": 3, "split": "train", "loss": 7.0},
        {"step": 5, "split": "train", "loss": 5.0},
    ]
    workdirs = [
        make_workdir(tmp_path / name, Config(), records[: n + 1])
        for n, name in enumerate(("a", "b"))
    ]
    run_plots.metrics(workdirs, tmp_path)
    (panel,) = figures["metrics"].axes
    curves = [line.get_xydata().tolist() for line in panel.lines if len(line.get_xydata())]
    assert curves == [[[3.0, 7.0]], [[3.0, 7.0], [5.0, 5.0]]]
    assert {str(folder) for folder in workdirs} <= {
        text.get_text() for text in figures["metrics"].legends[0].texts
    }


def test_metrics_of_a_folder_without_a_run_or_without_metrics_are_refused(tmp_path, figures):
    fine = make_workdir(tmp_path / "fine", Config(), [{"step": 1, "split": "train", "loss": 7.0}])
    (tmp_path / "none").mkdir()
    with pytest.raises(
        ValueError, match=r"none: expected the workdir of a run, but it has no config\.json"
    ):
        run_plots.metrics([fine, tmp_path / "none"], tmp_path)
    silent = make_workdir(tmp_path / "silent", Config())
    with pytest.raises(
        ValueError, match=r"silent: there is nothing in metrics\.jsonl yet; train this run first"
    ):
        run_plots.metrics([fine, silent], tmp_path)
    assert figures == {}


def test_a_page_that_cannot_be_written_is_refused_after_the_figures_are_written(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(trained, "load", lambda workdir: run_of("decoder_lm"))
    (tmp_path / "attention.html").mkdir()
    with pytest.raises(ValueError, match=r"^--output=.*: cannot be written to: Is a directory"):
        run_plots.attention(tmp_path, TEXT, tmp_path)
