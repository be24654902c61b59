"""Exports of runs with each kind of tokenizer: their cards have code that tokenises as the run."""

import json

import ctranslate2
import given_tokenizers
import jax
import numpy as np
import pytest

from flaxformer_lite import generate, trained, translate
from flaxformer_lite.config import Config, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.symbol_tokenizer import counted
from flaxformer_lite.exchange import tokenizer_code
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.fields import BOS, EOS, PAD, UNK, DataConfig
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes

LONGEST = 37
TEXTS = given_tokenizers.texts(31, seed=1)
SENTENCES = ["tor eis\nlager", "Haus  Baum", "otto \u65e5 anna", "eis"]
KINDS = ("char", "word", "spaces", "byte", "sentencepiece", "huggingface")


def file_of(kind):
    if kind == "sentencepiece":
        return given_tokenizers.sentencepiece_model(bos_id=-1, eos_id=0, unk_id=1)
    if kind == "huggingface":
        return given_tokenizers.tokenizer_json("bpe")
    return counted(TEXTS, kind=kind)


def random_values(rng, config):
    """Returns a function that returns values of the size of trained ones for each parameter."""

    def values(path, leaf):
        name, x = jax.tree_util.keystr(path), rng.normal(size=leaf.shape).astype(np.float32)
        if name.endswith(("['scale']", "['bias']")):
            return 0.2 * x + name.endswith("['scale']")
        if "embedding" in name:
            return x * config.d_model**-0.5
        return 1.5 * x * (np.prod(leaf.shape[:-1]) if "'out'" in name else leaf.shape[0]) ** -0.5

    return values


def run_of(folder, kind, architecture="encoder_decoder", **decode):
    """Returns a run with random weights whose texts end after some tokens."""
    (folder / "tokenizer.model").write_bytes(file_of(kind))
    found = tokenizer.load(folder / "tokenizer.model")
    config = ModelConfig(
        architecture=architecture, vocab_size=found.vocab_size, d_model=24, num_heads=2, d_ff=40,
        num_encoder_layers=1, num_decoder_layers=1, max_length=LONGEST, output_bias=True,
    )  # fmt: skip
    model = transformer.build_model(config)
    params = jax.tree_util.tree_map_with_path(
        random_values(np.random.default_rng(5), config), parameters.shapes(model)
    )
    params["output"]["bias"][EOS] += 1
    params["output"]["bias"][[PAD, BOS, UNK]] -= 30  # as after training
    whole = Config(
        model=config,
        data=DataConfig(
            tokenizer=kind,
            vocab_size=None,
            normalization="none",
            buckets=(LONGEST,),
            tokenizer_file="file" if kind in ("sentencepiece", "huggingface") else None,
        ),
        decode=DecodeConfig(**{"max_extra_length": LONGEST, **decode}),
    )
    mesh = meshes.make_mesh(1, devices=jax.devices()[:1])
    return trained.Trained(whole, found, model, params, mesh, None)


def printed_by_card(run, folder, monkeypatch, capsys, kind="ctranslate2"):
    """Returns the output of the code of an exported card for each of SENTENCES."""
    export(run, folder, folder / "out", kind=kind, quantization="float32", license=None)
    code = (folder / "out/README.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(folder / "out")
    printed = []
    for text in SENTENCES:
        exec(code.replace('"A text."', repr(text)), {})
        printed.append(capsys.readouterr().out.removesuffix("\n"))
    return printed


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_a_card_tokenises_and_joins_as_the_run(kind, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(file_of(kind))
    ours = tokenizer.load(tmp_path / "tokenizer.model")
    code, pieces = tokenizer_code.of(ours), ours.vocabulary_of("source")
    for name, content in ours.models.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("\n".join([f"import {code.imports}" if code.imports else "", *code.setup]), names)
    for text in [*TEXTS, *SENTENCES, ""]:
        names["text"] = text
        found = list(eval(code.pieces, names))
        (row,) = ours.encode([text])
        # CTranslate2 takes any piece outside the vocabulary for the unknown token.
        assert [each if each in pieces else pieces[UNK] for each in found] == [
            pieces[i] for i in row
        ]
        if UNK not in row:
            names["found"] = [pieces[i] for i in row]
            assert [eval(code.text.replace("{}", "found"), names)] == ours.decode([row])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["char", *KINDS[-2:]])
def test_the_card_of_ctranslate2_translates_with_any_kind(
    kind, tmp_path, monkeypatch, capsys, quickly_compiled
):
    run = run_of(tmp_path, kind, min_length=5, no_repeat_ngram=2)
    ours = translate.Translator(run)(SENTENCES)
    assert len(set(ours)) > 1 and all(ours)
    assert printed_by_card(run, tmp_path, monkeypatch, capsys) == ours


@pytest.mark.slow
def test_beam_search_of_ctranslate2_mostly_finds_the_same_characters(tmp_path, quickly_compiled):
    run = run_of(tmp_path, "char", method="beam", penalty="power", beam_size=3)
    ours = translate.Translator(run)(TEXTS)
    export(
        run, tmp_path, tmp_path / "out", kind="ctranslate2", quantization="float32", license=None
    )
    arguments = json.loads((tmp_path / "out/decode.json").read_text())
    engine = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    found = engine.translate_batch([list(text) for text in TEXTS], **arguments)
    same = sum("".join(each.hypotheses[0]) == text for each, text in zip(found, ours, strict=True))
    # The 2 searches have other rules about their end.
    assert len(set(ours)) > 5 and same >= 0.8 * len(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["char", "huggingface"])
def test_the_card_of_a_language_model_continues_a_text(
    kind, tmp_path, monkeypatch, capsys, quickly_compiled
):
    run = run_of(tmp_path, kind, "decoder_lm")
    ours = generate.Generator(run)(SENTENCES)
    printed = printed_by_card(run, tmp_path, monkeypatch, capsys)
    # CTranslate2 shows unknown symbols of a prompt as it got them.
    known = [n for n, text in enumerate(SENTENCES) if "\u65e5" not in text]
    assert [printed[n] for n in known] == [ours[n] for n in known]
    assert any(len(text) > len(prompt) for text, prompt in zip(ours, SENTENCES, strict=True))


@pytest.mark.parametrize("kind", ["char", pytest.param("sentencepiece", marks=pytest.mark.slow)])
def test_the_card_of_safetensors_computes_logits_with_any_kind(
    kind, tmp_path, monkeypatch, quickly_compiled
):
    run = run_of(tmp_path, kind)
    export(run, tmp_path, tmp_path / "out", kind="safetensors", quantization="", license=None)
    code, names = (tmp_path / "out/README.md").read_text().split("```python\n")[1], {}
    monkeypatch.chdir(tmp_path / "out")
    exec(code.split("```")[0].replace('"A text."', '"tor eis"'), names)
    assert names["ids"].tolist() == run.tokenizer.encode(["tor eis"])[0].tolist()
    assert names["logits"].shape == (1, 1, run.tokenizer.vocab_size)


@pytest.mark.parametrize("kind", ["char", "huggingface"])
def test_a_tokenizer_that_marian_models_cannot_have_is_refused_by_name(kind, tmp_path):
    with pytest.raises(InputError) as caught:
        export(
            run_of(tmp_path, kind), tmp_path, tmp_path / "out", kind="huggingface", quantization="",
            license=None,
        )  # fmt: skip
    message = str(caught.value)
    assert message.startswith("config.data.tokenizer: the tokenizer of a MarianMTModel")
    assert f"{kind!r}; use export ctranslate2 or export safetensors" in message
    assert not (tmp_path / "out").exists()
