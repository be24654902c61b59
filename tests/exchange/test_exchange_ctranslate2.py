"""CTranslate2 gives the same tokens, scores and texts with an exported model as this package."""

import dataclasses
import itertools
import json

import ctranslate2
import jax
import numpy as np
import pytest

from flaxformer_lite import trained
from flaxformer_lite.config import CHOICES, Config, DecodeConfig, ModelConfig
from flaxformer_lite.decoding.decoder import Decoder
from flaxformer_lite.exchange import ctranslate2_spec, to_ctranslate2, to_huggingface
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.field_rules import NOT_IN_WEIGHTS
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes

V, LONGEST, ROWS = 61, 48, 100
SMALL = ModelConfig(
    vocab_size=V,
    d_model=24,
    num_heads=4,
    d_ff=40,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=LONGEST,
    relative_clip=3,
    dropout=0.0,
)


class Letters:
    """A tokenizer that needs no training: a piece for each id."""

    models = {"tokenizer.model": b"pieces"}
    fingerprint, kind = "letters", "unigram"

    @staticmethod
    def vocabulary_of(side):
        return ["<pad>", "<s>", "</s>", "<unk>", *(f"piece{i}" for i in range(4, V))]


PIECES = Letters.vocabulary_of("source")


def run_of(config, decode=None, seed=0):
    """A model with random weights, biases included, of the size of trained ones."""
    model, rng = transformer.build_model(config), np.random.default_rng(seed)

    def sample(path, leaf):
        name, x = jax.tree_util.keystr(path), rng.normal(size=leaf.shape).astype(np.float32)
        if name.endswith("['scale']"):
            return 1 + 0.2 * x
        if name.endswith("['bias']"):
            return 0.3 * x
        if "position" in name or "relative" in name:
            return 0.7 * x
        if "embedding" in name:
            return x * config.d_model**-0.5
        return 1.5 * x * (np.prod(leaf.shape[:-1]) if "'out'" in name else leaf.shape[0]) ** -0.5

    params = jax.tree_util.tree_map_with_path(sample, parameters.shapes(model))
    mesh = meshes.make_mesh(1, devices=jax.devices()[:1])
    whole = Config(model=config, decode=decode or DecodeConfig(method="greedy"))
    return trained.Trained(whole, Letters(), model, params, mesh, None)


def inputs(number=ROWS, longest=19):
    rng = np.random.default_rng(7)
    return [rng.integers(4, V, rng.integers(1, longest)).tolist() for _ in range(number)]


def opened(run, folder, quantization="float32"):
    """CTranslate2's engine for an exported run, and the arguments in decode.json."""
    export(run, folder.parent, folder, kind="ctranslate2", quantization=quantization, license=None)
    engine = (
        ctranslate2.Translator
        if run.config.model.architecture == "encoder_decoder"
        else ctranslate2.Generator
    )
    loaded = engine(
        str(folder), device="cpu", compute_type=quantization, inter_threads=1, intra_threads=1
    )
    return loaded, json.loads((folder / "decode.json").read_text())


def written_by(engine, arguments, texts):
    """Ids that CTranslate2 generates for each text, and their log-probabilities with the end's."""
    words = [[PIECES[i] for i in ids] for ids in texts]
    if isinstance(engine, ctranslate2.Translator):
        written = [result.hypotheses[0] for result in engine.translate_batch(words, **arguments)]
        scored = [row[: LONGEST - 1] for row in written]  # the end symbol is one more
        scores = [result.log_probs for result in engine.score_batch(words, scored)]
    else:
        # The result has no end symbol: only its length shows whether a text ended or was cut.
        prompts = [["<s>", *word] for word in words]
        written = [result.sequences[0] for result in engine.generate_batch(prompts, **arguments)]
        scores = [
            result.log_probs
            for result in engine.score_batch([["<s>", *row[: LONGEST - 1]] for row in written])
        ]
    return [[PIECES.index(word) for word in row] for row in written], scores


def next_log_probs(run, texts, written):
    """Log-probabilities (N, T, V) of all tokens at each position of the rows of `written`."""
    target_NT = np.zeros((len(written), LONGEST), np.int32)
    for row, ids in zip(target_NT, written, strict=True):
        row[: len(ids) + 1] = [BOS, *ids][:LONGEST]
    arrays = [target_NT]
    if run.config.model.architecture == "encoder_decoder":
        source_NS = np.zeros((len(texts), 20), np.int32)
        for row, ids in zip(source_NS, texts, strict=True):
            row[: len(ids) + 1] = [*ids, EOS]
        arrays.insert(0, source_NS)
    logits = jax.jit(run.model.apply)({"params": run.params}, *arrays)
    return np.asarray(jax.nn.log_softmax(logits))


def assert_same_engine(config, folder):
    """Each token of CTranslate2 is the most probable one here, with the same probability."""
    run, texts = run_of(config), inputs()
    engine, arguments = opened(run, folder)
    written, scores = written_by(engine, arguments, texts)
    log_prob_NTV = next_log_probs(run, texts, written)
    allowed_NTV = log_prob_NTV.copy()
    allowed_NTV[:, :, [PAD, BOS, UNK]] = -np.inf
    prompts = [0 if config.architecture == "encoder_decoder" else len(text) for text in texts]
    ties, decided = 0, 0
    for n, (ids, prompt) in enumerate(zip(written, prompts, strict=True)):
        assert ids[:prompt] == (texts[n] if prompt else [])
        ends = [EOS] if len(ids) < LONGEST else []
        for position, token in list(enumerate([*ids, *ends]))[prompt:]:
            best = allowed_NTV[n, position].max()
            ties += token != allowed_NTV[n, position].argmax()
            decided += 1
            assert best - allowed_NTV[n, position, token] < 1e-4, (n, position, token)
    # The outputs depend on the sources.
    assert ties < 3 and decided > 150 and len({round(sum(row), 2) for row in scores}) > 50
    for ids, row, log_prob_TV in zip(written, scores, log_prob_NTV, strict=True):
        tokens = ids[: LONGEST - 1]
        tokens = [*tokens, EOS] if config.architecture == "encoder_decoder" else tokens
        ours = log_prob_TV[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(row, ours[: len(row)], atol=1e-3)
        assert len(row) == len(tokens) and abs(sum(row) - ours.sum()) < 1e-3


# One change each from the paper's model, and the combination of modern language models.
CHANGES = [
    {},
    *(
        {"position": position}
        for position in CHOICES["model.position"]
        if position not in ("sinusoidal", "alibi")
    ),
    {"position": "relative", "relative_values": True},
    {"position": "rotary", "rope_base": 100.0},
    {"norm": "rms_norm"},
    {"norm_placement": "pre"},
    {"norm_epsilon": 0.1},
    *({"activation": activation} for activation in CHOICES["model.activation"][1:]),
    {"num_kv_heads": 2},
    {"num_kv_heads": 1},
    {"d_head": 10},
    {"use_bias": False},
    {"output_bias": True},
    {"tie_embeddings": False},
    {"tie_layers": True},
    {"num_encoder_layers": 1, "num_decoder_layers": 3},
]
MODERN = {"norm": "rms_norm", "norm_placement": "pre", "activation": "swiglu", "use_bias": False}
LANGUAGE_MODELS = [{"position": position} for position in CHOICES["model.position"]] + [
    {"position": "alibi", "num_kv_heads": 2, "norm_placement": "pre"},
    {**MODERN, "position": "rotary", "num_kv_heads": 1, "tie_embeddings": False},
]
COMBINED = [
    {"position": "relative", "relative_values": True, "num_kv_heads": 2},
    {**MODERN, "position": "t5_bias"},
]


@pytest.mark.parametrize(
    "changes",
    [
        COMBINED[0],
        pytest.param(COMBINED[0], marks=pytest.mark.slow, id=f"{COMBINED[0]}-optimized"),
        pytest.param(COMBINED[1], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_tokens_and_scores_agree(changes, tmp_path, quickly_compiled_if_plain):
    assert_same_engine(dataclasses.replace(SMALL, **changes), tmp_path / "exported")


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_each_change_of_the_model_is_exported(changes, tmp_path, quickly_compiled_if_plain):
    assert_same_engine(dataclasses.replace(SMALL, **changes), tmp_path / "exported")


@pytest.mark.parametrize(
    "changes",
    [
        LANGUAGE_MODELS[-1],
        pytest.param(
            LANGUAGE_MODELS[-1], marks=pytest.mark.slow, id=f"{LANGUAGE_MODELS[-1]}-optimized"
        ),
        *(pytest.param(each, marks=pytest.mark.slow) for each in LANGUAGE_MODELS[:-1]),
    ],
    ids=str,
)
def test_a_language_model_generates_the_same_tokens(changes, tmp_path, quickly_compiled_if_plain):
    assert_same_engine(
        dataclasses.replace(SMALL, architecture="decoder_lm", **changes), tmp_path / "exported"
    )


SETTINGS = [
    [position for position in CHOICES["model.position"] if position != "alibi"],
    CHOICES["model.norm"],
    CHOICES["model.norm_placement"],
    ["relu", "swiglu"],
    [None, 2, 1],
]
# Half of all combinations: any 2 choices of 2 settings are together in some of them.
MATRIX = [
    case
    for case in itertools.product(*SETTINGS)
    if sum(of_one.index(each) for of_one, each in zip(SETTINGS, case, strict=True)) % 2 == 0
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "position", [position for position in CHOICES["model.position"] if position != "alibi"]
)
def test_combinations_of_settings_are_exported(position, tmp_path, quickly_compiled):
    """Position x norm x placement x feed-forward x number of key and value heads."""
    small = dataclasses.replace(
        SMALL, num_encoder_layers=1, num_decoder_layers=1, position=position
    )
    cases = [case for case in MATRIX if case[0] == position]
    assert len(cases) == 12 and len(MATRIX) == 72
    for number, (_, norm, placement, activation, heads) in enumerate(cases):
        changes = dict(
            norm=norm, norm_placement=placement, activation=activation, num_kv_heads=heads
        )
        assert_same_engine(dataclasses.replace(small, **changes), tmp_path / str(number))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architecture": "encoder_classifier", "num_classes": 3},
            "architecture: CTranslate2 cannot run 'encoder_clas",
        ),
        (
            {"decoder": "masked"},
            "decoder: CTranslate2 cannot run 'masked': it decodes token by token",
        ),
        ({"attention": "additive"}, "attention: CTranslate2 cannot run 'additive'"),
        (
            {"attention_window": 5},
            "attention_window: CTranslate2 cannot run 5: its attention has no window",
        ),
        (
            {"position": "alibi"},
            "position: CTranslate2 cannot run 'alibi': its encoder has no ALiBi",
        ),
    ],
)
def test_an_unsupported_model_is_refused_by_field_and_nothing_is_saved(changes, message, tmp_path):
    config = dataclasses.replace(SMALL, **changes)
    run = trained.Trained(Config(model=config), Letters(), None, {}, None, None)
    with pytest.raises(ValueError) as caught:
        export(
            run,
            tmp_path,
            tmp_path / "out",
            kind="ctranslate2",
            quantization="float32",
            license=None,
        )
    assert str(caught.value).startswith(f"config.model.{message}")
    field = message.partition(":")[0]
    assert "use `export safetensors`" in str(caught.value)
    assert f"train one with model.{field}=" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_beam_search_of_ctranslate2_finds_nothing_better_and_mostly_the_same(tmp_path):
    """By our scores, as CTranslate2 renormalises over the tokens that it may generate."""
    decode = DecodeConfig(
        method="beam", beam_size=4, alpha=0.5, penalty="power", max_extra_length=LONGEST
    )
    run, texts = run_of(dataclasses.replace(SMALL, output_bias=True), decode), inputs()
    run.params["output"]["bias"][EOS] += 4  # otherwise the most probable texts have no end
    # less uniform distributions
    run.params["decoder"]["layers_1"]["feed_forward_residual"]["norm"]["scale"] *= 2
    engine, arguments = opened(run, tmp_path / "exported")
    assert arguments["beam_size"] == 4 and arguments["length_penalty"] == 0.5
    decoder = Decoder(run.model, decode, rows=ROWS)
    ours = [found[0] for found in decoder.n_best(run.params, [np.array(ids) for ids in texts], 1)]
    theirs, _ = written_by(engine, arguments, texts)
    log_probs = next_log_probs(run, texts, [ids[: LONGEST - 1] for ids in theirs])
    ended = [n for n in range(ROWS) if max(len(theirs[n]), len(ours[n][0])) < LONGEST - 2]
    for n in ended:
        row = [*theirs[n], EOS]
        score = sum(log_probs[n, t, token] for t, token in enumerate(row)) / len(row) ** 0.5
        assert (
            score == pytest.approx(ours[n][1], abs=1e-4)
            if theirs[n] == ours[n][0].tolist()
            else score < ours[n][1]
        )
    same = [theirs[n] for n in ended if theirs[n] == ours[n][0].tolist()]
    assert len(ended) > 90 and len(same) > 70 and len(set(map(len, same))) > 2


def test_int8_has_a_quarter_of_the_size_and_nearly_the_same_output(tmp_path):
    run, texts = run_of(dataclasses.replace(SMALL, d_model=64, d_ff=256)), inputs()
    sizes, written = {}, {}
    for quantization in ("float32", "int8"):
        engine, arguments = opened(run, tmp_path / quantization, quantization)
        written[quantization], _ = written_by(engine, arguments, texts)
        sizes[quantization] = (tmp_path / quantization / "model.bin").stat().st_size
    assert sizes["int8"] < 0.35 * sizes["float32"]
    same = sum(a[:3] == b[:3] for a, b in zip(*written.values(), strict=True))
    assert same > ROWS // 2


@pytest.mark.parametrize(
    ("decode", "expected"),
    [
        ({"method": "greedy", "min_length": 3}, {"beam_size": 1, "min_decoding_length": 3}),
        ({"method": "beam", "alpha": 1.0}, {"beam_size": 4, "length_penalty": 0.8, "patience": 2}),
        ({"method": "beam", "alpha": 1.5, "penalty": "power"}, {"length_penalty": 1.5}),
        (
            {"method": "sample", "top_k": 7},
            {"sampling_topk": 7, "sampling_temperature": 1.0, "sampling_topp": 1.0},
        ),
        (
            {"method": "sample", "top_p": 0.5, "no_repeat_ngram": 3},
            {"sampling_topp": 0.5, "no_repeat_ngram_size": 3},
        ),
    ],
)
def test_the_arguments_decode_as_the_run_does(decode, expected):
    found = to_ctranslate2.ctranslate2_arguments(DecodeConfig(**decode), translates=True, limit=17)
    assert expected.items() <= found.items() and found["max_decoding_length"] == 17
    assert found["max_input_length"] == 0  # the default truncates long sources silently


def test_forbidden_texts_are_refused():
    for settings in (to_ctranslate2.ctranslate2_arguments, to_huggingface.generation_settings):
        options = {"translates": True} if settings.__module__.endswith("ctranslate2") else {}
        with pytest.raises(
            InputError, match=r"^config\.decode\.forbidden: is not exported, got 'a'"
        ):
            settings(DecodeConfig(forbidden=("a",)), limit=17, **options)


def test_epsilon_sampling_is_refused():
    decode = DecodeConfig(method="sample", epsilon=0.25)
    with pytest.raises(InputError, match=r"^config\.decode\.epsilon: CTranslate2 cannot"):
        to_ctranslate2.ctranslate2_arguments(decode, translates=True, limit=17)


def test_the_code_of_the_card_translates(
    finished_run, tmp_path, monkeypatch, capsys, also_optimized
):
    run = trained.load(finished_run)
    run = trained.with_decode(run, {"method": "beam", "beam_size": 3, "alpha": 0.6})
    export(
        run,
        finished_run,
        tmp_path / "out",
        kind="ctranslate2",
        quantization="float32",
        license="apache-2.0",
    )
    card = (tmp_path / "out/README.md").read_text()
    assert "license: apache-2.0\n" in card and "((5 + length) / 6)^0.6" in card
    code = card.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) == 5  # the imports and four lines
    monkeypatch.chdir(tmp_path / "out")
    # the code as printed, with another text
    exec(code.replace("A text.", "Monday, 3 June 2024"), {})
    from flaxformer_lite import translate

    greedy_or_beam = translate.Translator(run)(["Monday, 3 June 2024"])
    assert capsys.readouterr().out.strip() == greedy_or_beam[0].strip()


def test_every_field_of_the_model_config_is_covered():
    """A new field must be listed here: whether an export depends on it."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    changed = {name for changes in (*CHANGES, *LANGUAGE_MODELS, *COMBINED) for name in changes}
    refused = {"architecture", "decoder", "attention", "attention_window"}
    sizes = {"vocab_size", "d_model", "num_heads", "d_ff", "max_length", "relative_clip"}
    sizes.add("target_vocab_size")  # test_two_vocabularies_exported.py
    no_weights = {*NOT_IN_WEIGHTS, "pooling", "num_classes"}
    assert fields == changed | refused | sizes | no_weights
    assert ctranslate2_spec.ACTIVATIONS.keys() | ctranslate2_spec.GATES.keys() == set(
        CHOICES["model.activation"]
    )
