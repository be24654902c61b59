"""Import and export of Marian models: the same logits as their definition, the same weights back,
and error messages."""

import ast
import contextlib
import dataclasses
import json
import math
import re
import shlex
import shutil

import jax
import marian_folders
import numpy as np
import pytest
import runs
import sentencepiece
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from flaxformer_lite import config_files, evaluate, trained, translate
from flaxformer_lite.cli import commands as main
from flaxformer_lite.config import Config, DecodeConfig, ModelConfig, to_config_dict
from flaxformer_lite.data.tokens.tokenizer import MarianTokenizer
from flaxformer_lite.exchange import from_marian, marian_config, marian_weights, to_huggingface
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model import parameters
from flaxformer_lite.model.positions import sinusoidal
from flaxformer_lite.runs.workdir import read_config

# One shared matrix of embeddings, with an odd vocabulary size; three matrices; two vocabularies.
FOLDERS = {
    "one for all": dict(d_model=24, heads=4, d_ff=40, layers=(2, 3)),
    "untied": dict(
        d_model=16,
        heads=2,
        d_ff=24,
        layers=(1, 1),
        share=False,
        tie=False,
        activation_function="relu",
    ),
    "sides apart": dict(d_model=32, heads=8, d_ff=56, layers=(3, 1), share=False, separate=True),
}


def imported(folder, workdir, *flags):
    with contextlib.redirect_stdout(None), pytest.raises(SystemExit) as ended:
        main.main(["import", "marian", str(folder), f"--workdir={workdir}", *flags])
    return ended.value.code


ONE = "one for all"
UNTIED = pytest.param("untied", marks=pytest.mark.slow)
# For tests that do not depend on the matrices and vocabularies.
ONE_IS_ENOUGH = pytest.mark.parametrize(
    "pair", [ONE, UNTIED, pytest.param("sides apart", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=[ONE, UNTIED, "sides apart"])
def pair(request, tmp_path_factory, no_exit):
    """A folder with a Marian model, its config and arrays, and the imported run."""
    path = tmp_path_factory.mktemp("marian")
    config, arrays = marian_folders.make(path / "theirs", **FOLDERS[request.param])
    assert imported(path / "theirs", path / "ours") == 0
    return path / "theirs", config, arrays, path / "ours"


@pytest.fixture(scope="module")
def no_exit():
    """Commands raise SystemExit instead of ending this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr(main, "exit_now", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    yield
    patch.undo()


# The definition of Marian's model, in NumPy.


def reference_logits(config, arrays, source_BS, target_BT):
    """Logits (B, T, V) after each token of `target_BT`, for Marian's ids, padded at the end."""
    D, H, pad = config["d_model"], config["encoder_attention_heads"], config["pad_token_id"]

    def array(*names):
        return next(arrays[name].astype(np.float64) for name in names if name in arrays)

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * array(f"{name}.weight") + array(f"{name}.bias")

    def dense(x, name):
        return x @ array(f"{name}.weight").T + array(f"{name}.bias")

    def attention(x, memory, mask, name):
        def heads(y):
            return y.reshape(*y.shape[:2], H, D // H).swapaxes(1, 2)

        q, k, v = (
            heads(dense(y, f"{name}.{n}_proj")) for y, n in ((x, "q"), (memory, "k"), (memory, "v"))
        )
        scores = np.where(mask, q @ k.swapaxes(2, 3) / math.sqrt(D // H), -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).swapaxes(1, 2).reshape(*x.shape)
        return dense(mixed, f"{name}.out_proj")

    def inputs(ids, *names):
        angle = np.arange(ids.shape[1])[:, None] / 10000 ** (np.arange(D // 2) * 2 / D)
        return array(*names)[ids] * math.sqrt(D) + np.concatenate(
            [np.sin(angle), np.cos(angle)], axis=1
        )

    def feed_forward(x, layer):
        hidden = dense(x, f"{layer}.fc1")
        act = {"relu": lambda z: np.maximum(z, 0), "swish": lambda z: z / (1 + np.exp(-z))}
        return norm(
            x + dense(act[config["activation_function"]](hidden), f"{layer}.fc2"),
            f"{layer}.final_layer_norm",
        )

    shared = "model.shared.weight"
    seen = (source_BS != pad)[:, None, None]
    x = inputs(source_BS, "model.encoder.embed_tokens.weight", shared)
    for n in range(config["encoder_layers"]):
        layer = f"model.encoder.layers.{n}"
        x = norm(x + attention(x, x, seen, f"{layer}.self_attn"), f"{layer}.self_attn_layer_norm")
        x = feed_forward(x, layer)
    causal = np.tri(target_BT.shape[1], dtype=bool)[None, None]
    y = inputs(target_BT, "model.decoder.embed_tokens.weight", shared)
    for n in range(config["decoder_layers"]):
        layer = f"model.decoder.layers.{n}"
        y = norm(y + attention(y, y, causal, f"{layer}.self_attn"), f"{layer}.self_attn_layer_norm")
        y = norm(
            y + attention(y, x, seen, f"{layer}.encoder_attn"), f"{layer}.encoder_attn_layer_norm"
        )
        y = feed_forward(y, layer)
    output = array("lm_head.weight", "model.decoder.embed_tokens.weight", shared)
    return y @ output.T + array("final_logits_bias")


def rows_of_ids(rng, rows, length, limit, *, start=None, end=None):
    """Random ids of ours, (rows, length), in rows of random length with padding."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        count = rng.integers(1, length)
        row[:count] = rng.integers(UNK, limit, count)
        if start is not None:
            row[0] = start
        if end is not None:
            row[count] = end
    return ids


def largest_difference(run, config, arrays, ids):
    """The largest difference between our logits and Marian's, for all tokens that both have."""
    rng = np.random.default_rng(3)
    source_BS = rows_of_ids(rng, 31, 13, len(ids["source"]), end=EOS)
    target_BT = rows_of_ids(rng, 31, 11, len(ids["target"]), start=BOS)
    ours = np.asarray(jax.jit(run.model.apply)({"params": run.params}, source_BS, target_BT))
    theirs = reference_logits(
        config, arrays, np.array(ids["source"])[source_BS], np.array(ids["target"])[target_BT]
    )
    both = [number for number in range(len(ids["target"])) if number != BOS]
    difference = np.abs(ours[:, :, both] - theirs[:, :, np.array(ids["target"])[both]])
    assert np.abs(theirs).max() > 3  # logits of a relevant size
    return difference[target_BT != PAD].max()


@pytest.mark.parametrize(
    "pair",
    [
        ONE,
        UNTIED,
        "sides apart",
        *(
            pytest.param(name, marks=pytest.mark.slow, id=f"{name}-optimized")
            for name in (ONE, "sides apart")
        ),
    ],
    indirect=True,
)
def test_an_imported_model_has_the_logits_of_the_definition(pair, quickly_compiled_if_plain):
    _, config, arrays, workdir = pair
    run = trained.load(workdir)
    assert largest_difference(run, config, arrays, run.tokenizer.theirs) < 1e-4


def exported(workdir, output, *flags, kind="huggingface"):
    with contextlib.redirect_stdout(None), pytest.raises(SystemExit) as ended:
        main.main(["export", kind, f"--workdir={workdir}", f"--output={output}", *flags])
    assert ended.value.code == 0
    return output


def test_import_and_export_restore_every_array_bit_for_bit_and_the_tokenizer(pair, tmp_path):
    folder, config, arrays, workdir = pair
    back = exported(workdir, tmp_path / "back")
    again = load_file(back / "model.safetensors")
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype and again[name].tobytes() == array.tobytes(), name
    written = json.loads((back / "config.json").read_text())
    assert {name: written[name] for name in config if name in written} == {
        **config,
        "share_encoder_decoder_embeddings": "model.shared.weight" in arrays,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
    }
    for name in ("source.spm", "target.spm"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    for name in ("vocab.json", "target_vocab.json"):
        if (folder / name).exists():
            theirs, ours = (json.loads((each / name).read_text()) for each in (folder, back))
            assert theirs.items() <= ours.items() and all(
                "<unused" in piece for piece in ours.keys() - theirs.keys()
            )


def test_weights_in_half_precision_are_imported_unchanged(tmp_path, no_exit):
    _, arrays = marian_folders.make(tmp_path / "theirs", layers=(1, 1))
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    save_file(halves, tmp_path / "theirs/model.safetensors")
    assert imported(tmp_path / "theirs", tmp_path / "ours") == 0
    back = load_file(exported(tmp_path / "ours", tmp_path / "back") / "model.safetensors")
    assert all(np.array_equal(back[name], halves[name].astype(np.float32)) for name in arrays)


@ONE_IS_ENOUGH
def test_weights_in_several_files_are_one_model(pair, tmp_path):
    folder, _, arrays, workdir = pair
    split = shutil.copytree(folder, tmp_path / "split")
    (split / "model.safetensors").unlink()
    names = sorted(arrays)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: arrays[name] for name in own}, split / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    assert imported(split, tmp_path / "again") == 0
    assert trained.load(tmp_path / "again").fingerprint() == trained.load(workdir).fingerprint()


def test_width_order_maps_the_sinusoids_of_marian_to_ours():
    ours = np.asarray(sinusoidal(np.arange(19), 14))
    np.testing.assert_allclose(
        marian_weights.sinusoids(19, 14)[:, marian_weights.width_order(14)], ours, atol=1e-5
    )


def test_a_text_is_encoded_by_the_model_and_vocabulary_of_its_side(pair):
    folder, config, _, workdir = pair
    tokens = trained.load(workdir).tokenizer
    sides = {"source": ("a small dog", "vocab.json"), "target": ("die alt Straße", "vocab.json")}
    if (folder / "target_vocab.json").exists():
        sides["target"] = ("die alt Straße", "target_vocab.json")
    for side, (text, file) in sides.items():
        vocabulary = json.loads((folder / file).read_text())
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        (ids,) = tokens.encode([text], side=side)
        assert [tokens.theirs[side][i] for i in ids] == [
            vocabulary[piece] for piece in model.encode(text, out_type=str)
        ]
        assert UNK not in ids and "".join(tokens.pieces(ids, side=side)).strip() == text
    (ids,) = tokens.encode(["die alt Straße"], side="target")
    assert tokens.decode([np.append(ids, [EOS, 7])]) == ["die alt Straße"]
    assert UNK in tokens.encode(["a § dog"])[0]
    first = {side: tokens.theirs[side][: UNK + 1] for side in ("source", "target")}
    assert first == dict.fromkeys(first, [config["pad_token_id"]] * 2 + [0, 1])
    assert tokens.pieces([PAD, BOS, EOS, UNK]) == ["<pad>", "<s>", "</s>", "<unk>"]


def test_a_language_code_at_the_start_of_a_text_is_one_token(tmp_path, no_exit):
    folder = tmp_path / "theirs"
    marian_folders.make(folder, layers=(1, 1))
    vocabulary = json.loads((folder / "vocab.json").read_text())
    name, number = next((piece, number) for piece, number in vocabulary.items() if number > 5)
    vocabulary[">>deu<<"] = vocabulary.pop(name)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    assert imported(folder, tmp_path / "ours") == 0
    tokens = trained.load(tmp_path / "ours").tokenizer
    with_code, without = tokens.encode([">>deu<< the dog", "the dog"])
    assert (
        tokens.theirs["source"][with_code[0]] == number
        and with_code[-len(without) :].tolist() == without.tolist()
    )
    assert tokens.pieces(with_code[:1]) == [">>deu<<"]


def test_the_generation_settings_are_imported(tmp_path, no_exit):
    folder = tmp_path / "theirs"
    marian_folders.make(folder, layers=(1, 1), num_beams=6)
    settings = {"num_beams": 3, "length_penalty": 0.75, "no_repeat_ngram_size": 4}
    assert imported(folder, tmp_path / "config") == 0
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (folder / "README.md").write_text("---\nlanguage: de\nlicense:\n- 'cc-by-4.0'\n---\nA model.\n")
    assert imported(folder, tmp_path / "ours") == 0
    decode = read_config(tmp_path / "config").decode
    assert (decode.method, decode.beam_size, decode.alpha, decode.penalty) == (
        "beam",
        6,
        1.0,
        "power",
    )
    decode = read_config(tmp_path / "ours").decode
    assert (decode.beam_size, decode.alpha, decode.penalty, decode.no_repeat_ngram) == (
        3,
        0.75,
        "power",
        4,
    )
    (tmp_path / "mine.py").write_text(
        "from flaxformer_lite.config import default_config\ndef get_config():\n    config = "
        "default_config()\n"
        "    config.model.update(dropout=0.3, dtype='bfloat16')\n"
        "    config.decode.update(max_extra_length=7, tokens_per_batch=512)\n    return config\n"
    )
    flags = [f"--config={tmp_path / 'mine.py'}", "--config.decode.method=greedy"]
    assert imported(folder, tmp_path / "mine", *flags) == 0
    config = read_config(tmp_path / "mine")
    assert (config.model.dropout, config.model.dtype) == (0.3, "bfloat16")
    assert (config.decode.max_extra_length, config.decode.tokens_per_batch) == (7, 512)
    assert (config.decode.method, config.decode.no_repeat_ngram) == ("greedy", 4)
    back = exported(tmp_path / "ours", tmp_path / "back")
    written = json.loads((back / "generation_config.json").read_text())
    assert {name: written[name] for name in settings} == settings
    assert "license: cc-by-4.0\n" in (back / "README.md").read_text()


def test_a_separate_start_token_stays_separate(tmp_path, no_exit, also_optimized):
    folder = tmp_path / "theirs"
    config, arrays = marian_folders.make(folder, layers=(1, 1), decoder_start_token_id=9)
    assert imported(folder, tmp_path / "ours") == 0
    run = trained.load(tmp_path / "ours")
    assert (
        run.config.model.vocab_size == config["vocab_size"]
        and run.tokenizer.theirs["target"][BOS] == 9
    )
    assert largest_difference(run, config, arrays, run.tokenizer.theirs) < 1e-4
    back = exported(tmp_path / "ours", tmp_path / "back")
    assert json.loads((back / "config.json").read_text())["decoder_start_token_id"] == 9
    again = load_file(back / "model.safetensors")
    assert all(again[name].tobytes() == arrays[name].tobytes() for name in arrays)


# Error messages.


def edited(file, **changes):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **changes}))


def with_arrays(folder, change):
    arrays = load_file(folder / "model.safetensors")
    save_file(change(arrays), folder / "model.safetensors")


def without(name):
    return lambda arrays: {key: array for key, array in arrays.items() if key != name}


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FIRST = "model.encoder.layers.0.fc1.weight"
REFUSED = {
    "no folder": (shutil.rmtree, "{}: expected a folder with a Marian model"),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        "{}/config.json: expected a file of a Marian model: No such",
    ),
    "half a config": (
        lambda f: (f / "config.json").write_text('{"a'),
        "{}/config.json: expected JSON, got ",
    ),
    "a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "{}/config.json: expected a JSON object, got list",
    ),
    "another model": (
        lambda f: edited(f / "config.json", model_type="t5"),
        "{}/config.json: model_type: expected 'marian', the only value that can be imported, "
        "got 't5'",
    ),
    "another head": (
        lambda f: edited(f / "config.json", architectures=["MarianForCausalLM"]),
        "{}/config.json: architectures: expected ['MarianMTModel'], got ['MarianForCausalLM']",
    ),
    "unscaled": (
        lambda f: edited(f / "config.json", scale_embedding=False),
        "{}/config.json: scale_embedding: expected True, the only value that can be imported, "
        "got False",
    ),
    "pre-LN": (
        lambda f: edited(f / "config.json", normalize_before=True),
        "{}/config.json: normalize_before: expected False",
    ),
    "odd width": (
        lambda f: edited(f / "config.json", d_model=25),
        "{}/config.json: d_model: expected an even number",
    ),
    "no width": (
        lambda f: edited(f / "config.json", d_model="24"),
        "{}/config.json: d_model: expected a positive",
    ),
    "heads": (
        lambda f: edited(f / "config.json", decoder_attention_heads=2),
        "{}/config.json: decoder_attention_heads: expected 4, as encoder_attention_heads, got 2",
    ),
    "heads do not divide": (
        lambda f: edited(f / "config.json", encoder_attention_heads=5, decoder_attention_heads=5),
        "{}/config.json: encoder_attention_heads: expected a divisor of d_model = 24, got 5",
    ),
    "activation": (
        lambda f: edited(f / "config.json", activation_function="mish"),
        "{}/config.json: activation_function: expected one of swish, ",
    ),
    "ends": (
        lambda f: edited(f / "config.json", eos_token_id=[0, 5]),
        "{}/config.json: eos_token_id: expected the id of a token, 0 to 162, got [0, 5]",
    ),
    "dropout": (
        lambda f: edited(f / "config.json", dropout=None),
        "{}/config.json: dropout: expected at least 0 and less than 1, got None",
    ),
    "activations": (
        lambda f: edited(f / "config.json", activation_function=["gelu"]),
        "{}/config.json: activation_function: expected one of swish, ",
    ),
    "unknown as a list": (
        lambda f: edited(f / "tokenizer_config.json", unk_token=["<unk>"]),
        "{}/tokenizer_config.json: unk_token: expected a piece, got ['<unk>']",
    ),
    "index": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": [1]}'),
        "{}/model.safetensors.index.json: weight_map: expected the file of each array, got [1]",
    ),
    "not a number": (
        lambda f: with_arrays(f, lambda arrays: {**arrays, FIRST: arrays[FIRST] * np.nan}),
        f"{{}}/model.safetensors: {FIRST}: expected finite numbers only",
    ),
    "quantized": (
        lambda f: with_arrays(f, lambda arrays: {**arrays, FIRST: arrays[FIRST].astype(np.int8)}),
        f"{{}}/model.safetensors: {FIRST}: expected floating point numbers, got int8",
    ),
    "beams": (
        lambda f: edited(f / "config.json", num_beams="4"),
        "{}/config.json: num_beams: expected a number of type int, 0 or more, got '4'",
    ),
    "penalty": (
        lambda f: (f / "generation_config.json").write_text(
            '{"num_beams": 4, "length_penalty": -0.5}'
        ),
        "{}/generation_config.json: length_penalty: expected a number of type float, 0 or more, "
        "got -0.5",
    ),
    "end": (
        lambda f: edited(f / "config.json", eos_token_id=None),
        "{}/config.json: eos_token_id: expected the id of a token, 0 to ",
    ),
    "pad is end": (
        lambda f: edited(f / "config.json", pad_token_id=0),
        "{}/config.json: expected three different tokens for pad, eos and unk",
    ),
    "no source model": (
        lambda f: (f / "source.spm").unlink(),
        "{}/source.spm: expected a file of a Marian model",
    ),
    "target model": (
        lambda f: (f / "target.spm").write_bytes(b"no model"),
        "{}/target.spm: expected a SentencePiece model, got ",
    ),
    "no vocabulary": (
        lambda f: (f / "vocab.json").unlink(),
        "{}/vocab.json: expected a file of a Marian model",
    ),
    "vocabulary too large": (
        lambda f: edited(f / "vocab.json", more=10_000),
        "{}/vocab.json: expected a different id from 0 to 162 for each piece",
    ),
    "repeated id": (
        lambda f: edited(f / "vocab.json", more=7),
        "{}/vocab.json: expected a different id from 0 to 162",
    ),
    "no unknown": (
        lambda f: edited(f / "tokenizer_config.json", unk_token="[UNK]"),
        "{}/vocab.json: expected the unk token '[UNK]'",
    ),
    "pickled": (
        pickled,
        "{}/pytorch_model.bin: pickled weights can run any code and are not read; convert ",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "{}/model.safetensors: expected the weights of a Marian model; no such file",
    ),
    "half the weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-100]
        ),
        "{}/model.safetensors: not a safetensors file, or damaged: ",
    ),
    "an array too few": (
        lambda f: with_arrays(f, without(FIRST)),
        f"{{}}/model.safetensors: expected the array '{FIRST}', which is missing",
    ),
    "no embeddings": (
        lambda f: with_arrays(f, without("model.shared.weight")),
        "{}/model.safetensors: expected the array 'model.shared.weight', which is missing",
    ),
    "an array too many": (
        lambda f: with_arrays(
            f, lambda arrays: {**arrays, "model.encoder.layer_norm.bias": arrays[FIRST][0]}
        ),
        "{}/model.safetensors: model.encoder.layer_norm.bias: a MarianMTModel has no such array",
    ),
    "another shape": (
        lambda f: with_arrays(f, lambda arrays: {**arrays, FIRST: arrays[FIRST][:-1]}),
        f"{{}}/model.safetensors: {FIRST}: expected the shape [40, 24], got [39, 24]",
    ),
    "positions of an odd width": (
        lambda f: with_arrays(
            f,
            lambda arrays: {
                **arrays,
                "model.encoder.embed_positions.weight": np.ones((64, 23), np.float32),
            },
        ),
        "{}/model.safetensors: model.encoder.embed_positions.weight: expected the sinusoids of "
        "section 3.5",
    ),
    "learned positions": (
        lambda f: with_arrays(
            f,
            lambda arrays: {
                **arrays,
                "model.encoder.embed_positions.weight": np.ones((64, 24), np.float32),
            },
        ),
        "{}/model.safetensors: model.encoder.embed_positions.weight: expected the sinusoids of "
        "section 3.5",
    ),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused") / "theirs"
    marian_folders.make(folder, **FOLDERS[ONE])
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_folder_is_refused_by_file_and_field_and_nothing_is_left(
    case, theirs, tmp_path, no_exit, capsys
):
    folder = shutil.copytree(theirs, tmp_path / "theirs")
    damage, message = REFUSED[case]
    damage(folder)
    assert imported(folder, tmp_path / "ours") == 2
    (line,) = runs.error_lines(capsys.readouterr().err)
    assert line.startswith("error: " + message.format(folder)), line
    assert not (tmp_path / "ours").exists()


def test_the_command_that_converts_pickled_weights_names_the_folder(
    theirs, tmp_path, no_exit, capsys
):
    folder = shutil.copytree(theirs, tmp_path / 'it\'s "theirs"')
    pickled(folder)
    imported(folder, tmp_path / "ours")
    command = capsys.readouterr().err.partition(" first: ")[2]
    python, flag, code = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    assert code.count(repr(str(folder))) == 2 and ast.parse(code)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--config.model.d_model=32"],
            "config.model.d_model: the model in {} has 24, got 32; leave it out.",
        ),
        (
            ["--config.model.position=rotary"],
            "config.model.position: the model in {} has 'sinusoidal', got 'rotary'",
        ),
        (
            ["--config.data.vocab_size=99"],
            "config.data.vocab_size: the model in {} has 164, got 99",
        ),
        (
            ["--config.data.tokenizer=bpe"],
            "config.data.tokenizer: the model in {} has 'marian', got 'bpe'",
        ),
        (
            ["--config.data.bucket=5"],
            "config.data.bucket: there is no such field; did you mean 'buckets'?",
        ),
        (
            ["--config=lm", "--config.model.norm=rms_norm"],
            "config.model.norm: the model in {} has 'layer_norm', got",
        ),
        (["--config=nothing"], "--config=nothing: no such file and no shipped config"),
    ],
)
def test_a_config_that_differs_from_the_model_is_refused(
    flags, message, theirs, tmp_path, no_exit, capsys
):
    assert imported(theirs, tmp_path / "ours", *flags) == 2
    (line,) = runs.error_lines(capsys.readouterr().err)
    assert line.startswith("error: " + message.format(theirs))
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import"], "import: expected 'marian' and a folder, got 'nothing'."),
        (
            ["import", "bert", "f", "--workdir=w"],
            "import: expected 'marian' and a folder, got 'bert f'",
        ),
        (["import", "marian", "f"], "--workdir: expected a folder for the run, got nothing"),
        (
            ["export", "onnx"],
            "export: expected one of ctranslate2, huggingface, safetensors, got 'onnx'",
        ),
        (
            ["export", "huggingface", "--output=o"],
            "--workdir: expected the folder of a run, got nothing",
        ),
        (
            ["export", "huggingface", "--workdir=w"],
            "--output: expected a folder to make, got nothing",
        ),
        (
            ["export", "huggingface", "--workdir=w", "--output=o", "--quantization=int8"],
            "--quantization: applies only to export ctranslate2",
        ),
        (
            ["export", "safetensors", "--workdir=w", "--output=gs://b/o"],
            "gs://b/o: expected a folder on disk",
        ),
    ],
)
def test_missing_words_and_unused_flags_are_refused(words, message, no_exit, capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    (line,) = runs.error_lines(capsys.readouterr().err)
    assert ended.value.code == 2 and line.startswith("error: " + message)


@pytest.mark.parametrize(
    ("command", "library"), [("import", "safetensors"), ("export", "ctranslate2")]
)
def test_a_missing_library_is_reported_with_the_extra_to_install(
    command, library, tmp_path, no_exit, capsys, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["marian", "f"] if command == "import" else ["ctranslate2", "--output=o"]
    with pytest.raises(SystemExit) as ended:
        main.main([command, *words, f"--workdir={tmp_path}"])
    (line,) = runs.error_lines(capsys.readouterr().err)
    assert ended.value.code == 2
    assert (
        line == f"error: {command}: needs the extra for other formats: pip install "
        "'flaxformer_lite[exchange]'."
    )


@ONE_IS_ENOUGH
def test_an_import_leaves_a_folder_with_a_run_unchanged(pair, no_exit, capsys):
    folder, _, _, workdir = pair
    before = runs.files_below(workdir)
    assert imported(folder, workdir) == 2
    assert (
        f"--workdir={workdir}: holds a run already; choose another folder."
        in capsys.readouterr().err
    )
    assert runs.files_below(workdir) == before


@ONE_IS_ENOUGH
def test_an_import_changes_no_existing_files(pair, tmp_path, capsys):
    folder, *_ = pair
    (tmp_path / "mine/checkpoints").mkdir(parents=True)
    (tmp_path / "mine/checkpoints/weights").write_text("mine")
    before = runs.files_below(tmp_path)
    assert imported(folder, tmp_path / "mine") == 2
    assert (
        f"error: {tmp_path}/mine: expected a name for a new folder, and there is something"
        in capsys.readouterr().err
    )
    assert runs.files_below(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with contextlib.chdir(tmp_path / "empty"):
        assert imported(folder, ".") == 2
        assert (
            "error: .: expected a name for a new folder, and it is the one to work in"
            in capsys.readouterr().err
        )
        assert imported(folder, "../empty/") == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "mine"]


@ONE_IS_ENOUGH
def test_a_full_disk_is_reported_and_nothing_is_left(pair, tmp_path, capsys, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(from_marian.Checkpoints, "save", full)
    assert imported(pair[0], tmp_path / "ours") == 2
    message = f"--workdir={tmp_path}/ours: the weights cannot be written: No space left on device."
    assert f"error: {message}" in capsys.readouterr().err and not list(tmp_path.iterdir())
    monkeypatch.setattr(
        "safetensors.numpy.save_file", lambda *_: (_ for _ in ()).throw(SafetensorError("full"))
    )
    with pytest.raises(SystemExit) as ended:
        main.main(["export", "safetensors", f"--workdir={pair[3]}", f"--output={tmp_path}/out"])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert (
        f"error: {tmp_path}/out: cannot be written to: full; choose another folder."
        in capsys.readouterr().err
    )


@ONE_IS_ENOUGH
def test_an_import_without_its_weights_is_not_trained_from_random_ones(pair, tmp_path, capsys):
    workdir = shutil.copytree(pair[3], tmp_path / "ours")
    shutil.rmtree(workdir / "checkpoints")
    assert command("train", f"--workdir={workdir}", *custom_text(tmp_path)) == 2
    assert (
        f"error: {workdir}/checkpoints: the imported weights are gone; import them"
        in capsys.readouterr().err
    )


@ONE_IS_ENOUGH
def test_an_import_is_not_trained_on_the_default_data(pair, capsys):
    assert command("train", f"--workdir={pair[3]}") == 2
    assert (
        "error: config.data.dataset: expected what the imported weights in "
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_an_import_takes_training_settings_from_the_config_and_flags(theirs, tmp_path, no_exit):
    folder = shutil.copytree(theirs, tmp_path / "theirs")
    edited(folder / "config.json", num_beams=4)
    for name in ("lm", "mask_predict", "multi30k"):
        flags = [
            "--config.data.train_split=train",
            "--config.data.packing=False",
            "--config.train.best_metric=loss",
        ]
        assert imported(folder, tmp_path / name, f"--config={name}", *flags) == 0
        assert read_config(tmp_path / name).model == dataclasses.replace(
            trained.load(tmp_path / name).config.model, vocab_size=None
        )
    assert (
        imported(
            folder,
            tmp_path / "greedy",
            "--config.decode.method=greedy",
            "--config.model.dropout=0.3",
        )
        == 0
    )
    config = read_config(tmp_path / "greedy")
    assert (config.decode.method, config.model.dropout) == ("greedy", 0.3)


@ONE_IS_ENOUGH
def test_an_export_does_not_overwrite(pair, tmp_path, capsys):
    output = tmp_path / "there"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main.main(["export", "safetensors", f"--workdir={pair[3]}", f"--output={output}"])
    assert ended.value.code == 2
    assert f"error: {output}: expected a name for a new folder" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"] and len(
        list(output.iterdir())
    ) == 1


IMPOSSIBLE = {
    "architecture": "decoder_lm",
    "decoder": "masked",
    "position": "rotary",
    "attention": "additive",
    "attention_window": 5,
    "norm": "rms_norm",
    "norm_placement": "pre",
    "norm_epsilon": 1e-6,
    "activation": "swiglu",
    "use_bias": False,
    "num_kv_heads": 2,
    "d_head": 7,
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_a_model_that_marian_lacks_is_refused_by_field(field):
    possible = ModelConfig(vocab_size=31, d_model=24, num_heads=4, norm_epsilon=1e-5)
    marian_config.check_exportable(possible)
    model = dataclasses.replace(possible, **{field: IMPOSSIBLE[field]})
    with pytest.raises(
        ValueError, match=rf"^config\.model\.{field}: a MarianMTModel has "
    ) as error:
        marian_config.check_exportable(model)
    advice = str(error.value).partition("; ")[2]
    for_no_engine = field in ("decoder", "attention", "attention_window")
    assert ("`export ctranslate2`" in advice) != for_no_engine and "`export safetensors`" in advice
    value = re.search(rf"or train one with model\.{field}=(\w.*)\.$", advice)[1]
    changed = config_files.override(
        to_config_dict(Config(model=model)), [f"--config.model.{field}={value}"]
    )
    marian_config.check_exportable(ModelConfig(**changed.model))


# Training of an imported run.


def custom_text(folder):
    """Writes pairs in which each word has one translation; returns the flags with the files."""
    english = marian_folders.sentences(marian_folders.ENGLISH, 140, seed=5)
    german = dict(zip(marian_folders.ENGLISH, marian_folders.GERMAN * 2, strict=False))
    flags = ["--config.data.dataset=parallel_text", "--config.data.buckets=(24,)"]
    for name, first, last in (("train", 0, 100), ("validation", 100, 120), ("test", 120, 140)):
        for end, text in (
            ("en", english),
            ("de", [" ".join(german[w] for w in line.split()) for line in english]),
        ):
            (folder / f"{name}.{end}").write_text(
                "\n".join(text[first:last]) + "\n", encoding="utf-8"
            )
        flags.append(f"--config.data.{name}_files={folder}/{name}.en,{folder}/{name}.de")
    return flags


TRAINED = [
    "--config.train.num_steps=12",
    "--config.train.eval_every=6",
    "--config.optim.learning_rate=3e-3",
]
TRAINED += [
    "--config.optim.warmup_steps=2",
    "--config.train.decode_examples=0",
    "--config.model.dropout=0.0",
]
TRAINED += [
    "--config.train.ema_decay=0.5",
    "--config.data.tokens_per_batch=512",
    "--config.parallel.data=1",
]


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main.main(list(words))
    return ended.value.code


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, no_exit):
    """An imported model before and after some steps on custom text: their folder, flags, arrays."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiled for a few steps
    path = tmp_path_factory.mktemp("tuned")
    _, arrays = marian_folders.make(path / "theirs", **FOLDERS["one for all"])
    assert imported(path / "theirs", path / "before") == 0
    shutil.copytree(path / "before", path / "after")
    flags = [*custom_text(path), *TRAINED]
    assert command("train", f"--workdir={path / 'after'}", *flags) == 0
    jax.config.update("jax_disable_most_optimizations", False)
    return path, flags, arrays


@pytest.mark.slow
def test_training_lowers_the_loss_on_custom_text(tuned):
    path, flags, _ = tuned
    *_, last = (line["loss"] for line in runs.lines_of(path / "after", "validation"))
    before = shutil.copytree(path / "before", path / "evaluated")
    settings = json.loads((path / "after/config.json").read_text())
    (before / "config.json").write_text(json.dumps(settings))
    assert last < evaluate.evaluate(before, "validation").values["loss"] - 0.2


@pytest.mark.slow
def test_training_starts_from_the_imported_weights(tuned):
    path, flags, _ = tuned
    before = shutil.copytree(path / "before", path / "started")
    assert (
        command("train", f"--workdir={before}", *flags, "--config.optim.learning_rate=1e-12") == 0
    )
    weights = [
        trained.load(folder, parameters="raw").params for folder in (path / "before", before)
    ]
    jax.tree.map(lambda first, last: np.testing.assert_allclose(first, last, atol=1e-6), *weights)


@pytest.mark.slow
def test_a_trained_import_resumes_translates_and_plots_like_any_run(tuned, capsys):
    path, flags, _ = tuned
    longer = shutil.copytree(path / "after", path / "longer")
    assert command("train", f"--workdir={longer}", "--config.train.num_steps=18") == 0
    assert runs.last_step(longer) == 18
    texts = ["a small dog", "", "the house is red"]
    assert len(translate.load(longer)(texts)) == 3
    assert (
        command(
            "plot", "attention", f"--workdir={longer}", "--text=a small dog", f"--output={longer}/p"
        )
        == 0
    )
    capsys.readouterr()
    assert command("train", f"--workdir={longer}", "--config.model.dropout=0.2") == 2
    assert "config.model.dropout: the run in " in capsys.readouterr().err


@pytest.mark.slow
def test_before_the_first_step_model_and_tokenizer_cannot_change(tuned, capsys):
    path, flags, _ = tuned
    for change in ("model.d_ff=48", "data.vocab_size=99", "data.tokenizer=bpe"):
        assert command("train", f"--workdir={path / 'before'}", *flags, f"--config.{change}") == 2
        assert f"config.{change.split('=')[0]}: the run in " in capsys.readouterr().err
    # a refused start changes nothing
    assert read_config(path / "before").data.dataset != "parallel_text"


@pytest.mark.slow
def test_an_imported_tokenizer_refuses_subword_sampling(tuned, capsys):
    path, flags, _ = tuned
    before = shutil.copytree(path / "before", path / "sampled")
    assert (
        command("train", f"--workdir={before}", *flags, "--config.data.subword_sampling=0.1") == 2
    )
    assert (
        "config.data.subword_sampling: an imported tokenizer cuts a text in one way"
        in capsys.readouterr().err
    )


def test_a_marian_tokenizer_cannot_be_trained(tmp_path, no_exit, capsys):
    sizes = {"d_model": 16, "d_ff": 16, "num_heads": 2}
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1}
    small = [f"--config.model.{name}={size}" for name, size in sizes.items()]
    flags = ["--config=finetune", *custom_text(tmp_path), *small, "--config.data.tokenizer=marian"]
    assert command("train", *flags, f"--workdir={tmp_path / 'w'}") == 2
    assert "config.data.tokenizer: 'marian' comes with a model" in capsys.readouterr().err


@pytest.mark.slow
def test_after_training_the_start_is_a_separate_token_and_the_export_agrees(tuned, tmp_path):
    path, _, arrays = tuned
    back = exported(path / "after", tmp_path / "back", "--license=mit", "--parameters=raw")
    config, again = (
        json.loads((back / "config.json").read_text()),
        load_file(back / "model.safetensors"),
    )
    rows = len(arrays["model.shared.weight"])
    assert config["vocab_size"] == rows + 1 == len(again["model.shared.weight"])
    assert (
        config["decoder_start_token_id"]
        == rows
        == json.loads((back / "vocab.json").read_text())["<s>"]
    )
    run = trained.load(path / "after", parameters="raw")
    ids = {side: [*own[:BOS], rows, *own[BOS + 1 :]] for side, own in run.tokenizer.theirs.items()}
    assert largest_difference(run, config, again, ids) < 1e-4
    card = (back / "README.md").read_text()
    assert "license: mit\n" in card and "step 12" in card and run.record["data"] in card
    assert (
        "The weights of step 0 are those of theirs, a Marian model. SHA-256 of\n\n- config.json: `"
        in card
    )


@pytest.mark.slow
def test_sides_of_different_sizes_are_exported_after_training_and_imported(tmp_path, no_exit):
    config, arrays = marian_folders.make(tmp_path / "theirs", **FOLDERS["sides apart"])
    assert config["vocab_size"] != config["decoder_vocab_size"]
    assert imported(tmp_path / "theirs", tmp_path / "ours") == 0
    run = trained.load(tmp_path / "ours")
    params = jax.tree.map(np.array, run.params)
    params["target_embedding"]["embedding"][BOS] += 1  # as a training step does
    changed = dataclasses.replace(run, params=params)
    export(
        changed,
        tmp_path / "ours",
        tmp_path / "out",
        kind="huggingface",
        quantization="float32",
        license=None,
    )
    written, again = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert written["decoder_vocab_size"] == config["decoder_vocab_size"] + 1
    assert written["vocab_size"] == config["vocab_size"]
    assert imported(tmp_path / "out", tmp_path / "again") == 0
    back = trained.load(tmp_path / "again")
    assert largest_difference(back, written, again, back.tokenizer.theirs) < 1e-4
    jax.tree.map(
        np.testing.assert_array_equal,
        *(each["decoder"] for each in (params, jax.tree.map(np.array, back.params))),
    )


@pytest.mark.slow
def test_a_card_lists_the_scores_of_the_parameters_with_their_signatures(tuned, tmp_path):
    path, _, _ = tuned
    card = (
        exported(path / "after", tmp_path / "back", kind="safetensors") / "README.md"
    ).read_text()
    (line,) = runs.lines_of(path / "after", "test")
    assert f"| test, greedy | bleu | {line['bleu']:.4g} | nrefs:1\\|case:mixed" in card
    # without a signature in the log
    assert "| validation | loss | " in card and "| validation | bleu" not in card
    other = (
        exported(path / "after", tmp_path / "raw", "--parameters=raw", kind="safetensors")
        / "README.md"
    ).read_text()
    assert "None was measured." in other and "license: unknown\n" in other


@pytest.mark.slow
def test_the_code_of_the_card_restores_the_model_from_named_arrays(tuned, tmp_path):
    path, _, _ = tuned
    output = exported(path / "after", tmp_path / "arrays", kind="safetensors")
    code, names = (output / "README.md").read_text().split("```python\n")[1].split("```")[0], {}
    with contextlib.chdir(output):
        exec(code, names)
    run = trained.load(path / "after")
    (ids,) = run.encode(["A text."])
    expected = jax.jit(run.model.apply)(
        {"params": run.params}, np.array([[*ids, EOS]]), np.array([[BOS]])
    )
    np.testing.assert_array_equal(names["logits"], expected)


# The export of a model that was trained here.


class Letters:
    """A tokenizer that needs no training: 31 pieces."""

    models = {"tokenizer.model": b"pieces"}
    fingerprint, kind = "letters", "unigram"

    @staticmethod
    def vocabulary_of(side):
        return ["<pad>", "<s>", "</s>", "<unk>", *(chr(ord("a") + i) for i in range(27))]


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        (
            {"method": "greedy", "min_length": 3},
            {"num_beams": 1, "do_sample": False, "min_length": 4},
        ),
        ({"method": "beam", "alpha": 1.0}, {"num_beams": 4, "length_penalty": 0.8}),
        ({"method": "beam", "alpha": 1.5, "penalty": "power"}, {"length_penalty": 1.5}),
        (
            {"method": "sample", "top_k": 7, "temperature": 0.5, "epsilon": 0.25},
            {"do_sample": True, "top_k": 7, "temperature": 0.5, "epsilon_cutoff": 0.25},
        ),
        (
            {"method": "sample", "top_p": 0.5, "no_repeat_ngram": 3},
            {"top_p": 0.5, "no_repeat_ngram_size": 3},
        ),
    ],
)
def test_the_decoding_settings_are_exported(decode, expected):
    found = to_huggingface.generation_settings(DecodeConfig(**decode), limit=17)
    assert expected.items() <= found.items() and found["max_length"] == 18


@pytest.mark.parametrize(
    "tie",
    [
        True,
        pytest.param(True, marks=pytest.mark.slow, id="True-optimized"),
        pytest.param(False, marks=pytest.mark.slow),
    ],
)
def test_an_exported_model_has_the_logits_of_the_definition(
    tie, tmp_path, quickly_compiled_if_plain
):
    config = ModelConfig(
        vocab_size=31,
        d_model=18,
        num_heads=3,
        d_ff=20,
        num_encoder_layers=1,
        num_decoder_layers=2,
        max_length=16,
    )
    config = dataclasses.replace(config, norm_epsilon=1e-5, tie_embeddings=tie, output_bias=not tie)
    model, params = runs.varied_model(config)
    run = trained.Trained(Config(model=config), Letters(), model, params, None, None)
    to_huggingface.write(run, tmp_path)
    arrays, written = (
        load_file(tmp_path / "model.safetensors"),
        json.loads((tmp_path / "config.json").read_text()),
    )
    assert written["decoder_start_token_id"] == BOS and ("lm_head.weight" in arrays) != tie
    numbers = dict.fromkeys(("source", "target"), range(31))
    assert largest_difference(run, written, arrays, numbers) < 1e-4


def test_a_tokenizer_archive_is_deterministic_and_an_incomplete_one_is_refused(tmp_path):
    files = {"source.spm": b"a", "target.spm": b"b", "vocab.json": b"{}"}
    for name in ("one", "two"):
        MarianTokenizer.pack(tmp_path / name, files, {"pad": "<pad>"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with pytest.raises(
        ValueError, match=f"^{tmp_path}/one: expected the tokenizer of a Marian model, got "
    ):
        MarianTokenizer(tmp_path / "one")


def test_the_conversion_to_marian_keeps_all_parameters():
    from flaxformer_lite.model import transformer

    config = ModelConfig(
        vocab_size=31, d_model=18, num_heads=3, tie_embeddings=False, output_bias=True
    )
    shapes = parameters.shapes(transformer.build_model(config))
    params = jax.tree.map(
        lambda x: np.random.default_rng(0).normal(size=x.shape).astype(np.float32), shapes
    )
    numbers = {key: list(range(31)) for key in ("source", "target")}
    theirs = marian_weights.to_theirs(params, config, numbers, dict.fromkeys(numbers, 31))
    back = marian_weights.to_ours(theirs, config, numbers)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
