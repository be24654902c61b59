"""A model with two vocabularies generates the same tokens in Transformers and in CTranslate2."""

import importlib.util
import json

import ctranslate2
import jax
import numpy as np
import phones
import pytest

from flaxformer_lite import trained
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies
from flaxformer_lite.exchange.exports import export
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.model import parameters, transformer
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes

pytestmark = [
    pytest.mark.slow,
    # Their own warnings while they load.
    pytest.mark.filterwarnings("default"),
]
needs_transformers = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "transformers")),
    reason="needs torch and transformers: pip install -e '.[bench]'",
)

WORDS = phones.words(211)
PHONES = [phones.phones_of(word) for word in WORDS]
SIZES = {"source": 293, "target": 274}
FIRST = 19  # tokens that are compared: a text of Transformers is cut earlier, with its end


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tokenizers"), []
    for side, texts in (("source", WORDS), ("target", PHONES)):
        path = folder / side
        tokenizer.train(texts, path, vocab_size=SIZES[side], kind="unigram")
        made.append(tokenizer.load(path))
    return TwoVocabularies(*made)


def run_of(tokens, **changes):
    """A run with random parameters, so large that texts get different outputs."""
    model = ModelConfig(
        vocab_size=SIZES["source"],
        target_vocab_size=SIZES["target"],
        d_model=24,
        num_heads=4,
        d_ff=40,
        num_encoder_layers=2,
        num_decoder_layers=1,
        max_length=32,
        norm_epsilon=1e-5,
        **changes,
    )
    built, rng = transformer.build_model(model), np.random.default_rng(2)

    def sample(path, leaf):
        name, noise = jax.tree_util.keystr(path), rng.normal(size=leaf.shape).astype(np.float32)
        if name.endswith("['scale']"):
            return 1 + 0.2 * noise
        if "embedding" in name:
            return noise * 24**-0.5
        return 0.3 * noise if name.endswith("['bias']") else noise * leaf.shape[0] ** -0.5

    params = jax.tree_util.tree_map_with_path(sample, parameters.shapes(built))
    data = DataConfig(tokenizer="unigram", target_tokenizer="unigram", normalization="none")
    # Random models repeat themselves otherwise.
    decode = DecodeConfig(max_extra_length=31, no_repeat_ngram=1, min_length=7)
    config = Config(model=model, data=data, decode=decode)
    mesh = meshes.make_mesh(1, devices=jax.devices()[:1])
    return trained.Trained(config, tokens, built, params, mesh, None)


def generated(run, texts):
    """Returns the first ids of the translation of each text."""
    decoder = trained.make_decoder(run.model, run.config, run.mesh)
    rows = decoder(run.params, run.tokenizer.encode(texts))
    return [ids.tolist()[:FIRST] for ids in rows]


@pytest.mark.parametrize("tied", [True, False])
def test_ctranslate2_generates_the_same_tokens(tied, tokens, tmp_path):
    run, folder = run_of(tokens, tie_embeddings=tied, output_bias=not tied), tmp_path / "exported"
    export(run, tmp_path, folder, kind="ctranslate2", quantization="float32", license=None)
    engine = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    texts, target = phones.words(17, seed=7), tokens.vocabulary_of("target")
    pieces = [[tokens.vocabulary_of("source")[i] for i in ids] for ids in tokens.encode(texts)]
    options = json.loads((folder / "decode.json").read_text())
    found = [each.hypotheses[0] for each in engine.translate_batch(pieces, **options)]
    expected = generated(run, texts)
    assert [[target.index(piece) for piece in row[:FIRST]] for row in found] == expected
    assert len({tuple(ids) for ids in expected}) > 5


@needs_transformers
@pytest.mark.parametrize("tied", [True, False])
def test_a_marian_model_has_the_same_logits_and_writes_the_same_texts(tied, tokens, tmp_path):
    import torch
    from transformers import MarianMTModel, MarianTokenizer

    run, folder = run_of(tokens, tie_embeddings=tied, output_bias=not tied), tmp_path / "exported"
    export(run, tmp_path, folder, kind="huggingface", quantization="", license=None)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["share_encoder_decoder_embeddings"] is False
    assert (settings["vocab_size"], settings["decoder_vocab_size"]) == (*SIZES.values(),)
    model = MarianMTModel.from_pretrained(folder).eval()
    theirs = MarianTokenizer.from_pretrained(folder)
    texts = phones.words(17, seed=7)
    (source,), (target,) = tokens.encode(texts[:1]), tokens.encode(PHONES[:1], side="target")
    inputs = theirs(texts[:1], return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == [*source.tolist(), EOS]
    decoder_ids = [[BOS, *target.tolist()]]
    with torch.no_grad():
        logits = model(**inputs, decoder_input_ids=torch.tensor(decoder_ids)).logits.numpy()
    ours = jax.jit(run.model.apply)(
        {"params": run.params}, np.array([[*source, EOS]]), np.array(decoder_ids)
    )
    assert ours.shape == (1, 1 + len(target), SIZES["target"])
    np.testing.assert_allclose(logits, ours, atol=1e-4)
    expected = generated(run, texts)
    found = [
        model.generate(**theirs([text], return_tensors="pt"))[0].tolist()[1 : FIRST + 1]
        for text in texts
    ]
    found = [[token for token in ids if token != EOS] for ids in found]
    assert found == expected and len({tuple(ids) for ids in expected}) > 5


def test_special_tokens_of_other_names_are_refused(tokens, tmp_path):
    class Renamed:
        """The target's tokenizer with another name of its padding."""

        kind, content, fingerprint = "sentencepiece", b"", "renamed"
        vocab_size = SIZES["target"]

        def vocabulary_of(self, side):
            return ["[PAD]", *tokens.target.vocabulary_of(side)[1:]]

    run = run_of(TwoVocabularies(tokens.source, Renamed()))
    with pytest.raises(InputError, match=r"^config\.data\.target_tokenizer: the special tokens"):
        export(run, tmp_path, tmp_path / "out", kind="huggingface", quantization="", license=None)
