"""Scores of translations, against sacreBLEU itself and by hand; many devices decode what one does."""

import jax
import numpy as np
import pytest
import sacrebleu

from flaxformer_lite import evaluate, translate
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data.datasets import TextPairs
from flaxformer_lite.model import transformer
from flaxformer_lite.training import parallel
from flaxformer_lite.training.step import param_shapes

REFERENCES = ["der 3. Mai", "12,50 €", "vor 3 Tagen", "drei", "7 km"]
HYPOTHESES = ["der 3. Mai", "12,5 €", "vor 3 Tagen", "", "7 km"]


def test_exact_match_counts_characters_and_nothing_less():
    assert evaluate.exact_matches(["a b", "a\u00a0b", "A"], ["a b", "a b", "a"]).tolist() == [1, 0, 0]


def test_scores_are_sacrebleus_on_raw_text_with_its_signature():
    scores, signature = evaluate.score_texts(HYPOTHESES, REFERENCES)
    assert scores["exact_match"] == 3 / 5
    assert scores["bleu"] == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_perfect_translations_have_perfect_scores():
    scores, _ = evaluate.score_texts(REFERENCES, REFERENCES)
    assert scores["exact_match"] == 1
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)


def test_exact_match_by_kind_divides_by_the_examples_of_the_kind():
    texts = TextPairs(source=[""] * 5, target=REFERENCES, kind=["date", "money", "date", "number", "number"])
    assert evaluate.by_kind(HYPOTHESES, texts) == {
        "exact_match/date": 1.0,
        "exact_match/money": 0.0,
        "exact_match/number": 0.5,
    }


def test_without_kinds_there_is_nothing_by_kind():
    assert evaluate.by_kind(HYPOTHESES, TextPairs(source=[""] * 5, target=REFERENCES, kind=None)) == {}


MODEL = ModelConfig(
    vocab_size=29, d_model=14, num_heads=7, d_ff=11, num_encoder_layers=1, num_decoder_layers=1, max_length=23
)
CONFIG = Config(model=MODEL, data=DataConfig(vocab_size=29), decode=DecodeConfig(max_extra_length=5))


@pytest.fixture(scope="module")
def params():
    """Parameters large enough that different sources get different outputs."""
    rng = np.random.default_rng(2)
    shapes = param_shapes(transformer.build_model(MODEL))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def sources():
    rng = np.random.default_rng(3)
    return [rng.integers(4, 29, length, dtype=np.int32) for length in rng.integers(1, 22, 83)]


def decode(params, sources, num_devices):
    mesh = parallel.make_mesh(num_devices)
    decoder = translate.make_decoder(transformer.build_model(MODEL), CONFIG, mesh)
    return decoder(parallel.replicate(params, mesh), sources)


def test_eight_devices_decode_what_one_device_does(params, sources):
    one, eight = decode(params, sources, 1), decode(params, sources, 8)
    assert len({tuple(row) for row in one}) > 5
    for first, second in zip(one, eight, strict=True):
        assert first.tolist() == second.tolist()


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'A'."""

    @staticmethod
    def encode(texts):
        return [np.array([ord(letter) - ord("A") for letter in text], np.int32) for text in texts]

    @staticmethod
    def decode(rows):
        return ["".join(chr(ord("A") + i) for i in row) for row in rows]


def test_an_evaluator_gives_an_empty_text_for_a_source_that_the_model_cannot_take(params, sources):
    mode = parallel.MeshMode(parallel.make_mesh(1))
    evaluator = evaluate.Evaluator(transformer.build_model(MODEL), CONFIG, mode)
    longest, too_long = np.full(22, 5, np.int32), np.full(23, 5, np.int32)
    texts = evaluator.translate(parallel.replicate(params, mode.mesh), Letters, [*sources, longest, too_long])
    assert sum(map(bool, texts)) > len(sources) / 2
    assert texts[-1] == ""


def test_a_translator_keeps_the_order_and_answers_an_empty_text_with_an_empty_text(params, sources):
    mesh = parallel.make_mesh(1)
    translator = translate.Translator(CONFIG, Letters, parallel.replicate(params, mesh), mesh=mesh)
    texts = Letters.decode(sources[:9])
    answers = translator(["", *texts, ""])
    assert answers[0] == answers[-1] == ""
    assert answers[1:-1] == [translator([text])[0] for text in texts]


def test_a_translator_refuses_a_text_that_is_too_long_and_names_its_line(params):
    mesh = parallel.make_mesh(1)
    translator = translate.Translator(CONFIG, Letters, parallel.replicate(params, mesh), mesh=mesh)
    fits = "F" * (MODEL.max_length - 1)
    assert len(translator([fits])) == 1
    with pytest.raises(ValueError, match="line 2: 23 tokens, and the model takes at most 22"):
        translator(["A", fits + "F"])


def test_rows_of_a_decoders_batches_are_a_multiple_of_the_devices():
    mesh = parallel.make_mesh(7)
    decoder = translate.make_decoder(transformer.build_model(MODEL), CONFIG, mesh)
    assert decoder._rows % 7 == 0 and decoder._rows >= translate.ROWS
