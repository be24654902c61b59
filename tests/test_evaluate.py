"""Scores by sacreBLEU itself, bits a byte in closed form, mistakes counted; many devices measure what one does."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
import sacrebleu

from flaxformer_lite import evaluate, trained
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.examples import Examples
from flaxformer_lite.model import transformer
from flaxformer_lite.training import parallel, report
from flaxformer_lite.training.step import param_shapes

pytestmark = pytest.mark.usefixtures("quickly_compiled")

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
    texts = Examples(source=[""] * 5, target=REFERENCES, kind=["date", "money", "date", "number", "number"])
    assert evaluate.by_kind(HYPOTHESES, texts) == {
        "exact_match/date": 1.0,
        "exact_match/money": 0.0,
        "exact_match/number": 0.5,
    }


def test_without_kinds_there_is_nothing_by_kind():
    assert evaluate.by_kind(HYPOTHESES, Examples(source=[""] * 5, target=REFERENCES)) == {}


V, LONGEST, EXTRA = 29, 23, 5
MODEL = ModelConfig(
    vocab_size=V, d_model=14, num_heads=7, d_ff=11, num_encoder_layers=1, num_decoder_layers=1, max_length=LONGEST
)
SHAPES = {
    "encoder_decoder": MODEL,
    "encoder_classifier": dataclasses.replace(MODEL, architecture="encoder_classifier", num_classes=3),
    "decoder_lm": dataclasses.replace(MODEL, architecture="decoder_lm"),
}
CLASSES = ["of", "three", "letters"]


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'ä', of two bytes each."""

    @staticmethod
    def encode(texts):
        return [np.array([ord(letter) - ord("ä") for letter in text], np.int32) for text in texts]

    @staticmethod
    def decode(rows):
        return ["".join(chr(ord("ä") + i) for i in row) for row in rows]


def make_texts(number, seed, longest=LONGEST - 1):
    rng = np.random.default_rng(seed)
    return Letters.decode(rng.integers(4, V, length) for length in rng.integers(1, longest, number))


def config_of(architecture, *, packing=False, **decode):
    data = DataConfig(vocab_size=V, buckets=(LONGEST,), tokens_per_batch=LONGEST * 16, packing=packing)
    decode = DecodeConfig(max_extra_length=EXTRA, **decode)
    return Config(model=SHAPES[architecture], data=data, decode=decode)


@functools.cache
def params_of(architecture):
    """Parameters large enough that different inputs get different outputs."""
    rng = np.random.default_rng(3)
    shapes = param_shapes(transformer.build_model(SHAPES[architecture]))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def evaluator_of(config, mode_name="mesh", num_devices=1, **options):
    """An evaluator; parameters and a split go in, as they come, and a measurement comes out."""
    mode = parallel.MODES[mode_name](parallel.make_mesh(num_devices))
    options = {"label_names": CLASSES, **options}
    evaluator = evaluate.Evaluator(transformer.build_model(config.model), config, mode, Letters, **options)

    def measure(params, split, **options):
        return evaluator.measure(mode.put_state(params), parallel.replicate(params, mode.mesh), split, **options)

    return measure


@functools.cache
def measure(architecture, **changes):
    config = config_of(architecture, **changes)
    evaluator = evaluator_of(config)
    return lambda examples, **options: evaluator(
        params_of(architecture), pipeline.make_split(examples, Letters, config), **options
    )


@pytest.fixture(scope="module")
def sources():
    return Letters.encode(make_texts(83, 3))


def decode(sources, num_devices):
    mesh = parallel.make_mesh(num_devices)
    decoder = trained.make_decoder(transformer.build_model(MODEL), config_of("encoder_decoder"), mesh)
    return decoder(parallel.replicate(params_of("encoder_decoder"), mesh), sources)


def test_eight_devices_decode_what_one_device_does(sources):
    one, eight = decode(sources, 1), decode(sources, 8)
    assert len({tuple(row) for row in one}) > 5
    for first, second in zip(one, eight, strict=True):
        assert first.tolist() == second.tolist()


def test_rows_of_a_decoders_batches_are_a_multiple_of_the_devices():
    mesh = parallel.make_mesh(7)
    decoder = trained.make_decoder(transformer.build_model(MODEL), config_of("encoder_decoder"), mesh)
    assert decoder._rows % 7 == 0 and decoder._rows >= trained.ROWS


PAIRS = Examples(
    source=[*make_texts(9, 4), "ñ" * (LONGEST - 1), "ñ" * LONGEST, ""],
    target=[*make_texts(9, 5), "ñ", "ñ", "ñ"],
    kind=["date", "money", "time"] * 4,
)


def test_translations_are_scored_and_shown_and_what_the_model_cannot_take_has_an_empty_one():
    measured = measure("encoder_decoder")(PAIRS)
    shown = [line.removeprefix("translation  ") for line in measured.samples.splitlines() if "translation" in line]
    assert len(set(shown)) > 3
    assert shown[-2:] == ["", ""]
    scores, signature = evaluate.score_texts(shown, PAIRS.target)
    assert (
        scores.items() <= measured.values.items() and evaluate.by_kind(shown, PAIRS).items() <= measured.values.items()
    )
    assert measured.note == f"sacreBLEU signature {signature}"
    assert measured.samples == report.translations(PAIRS, shown)
    assert measured.values["perplexity"] == pytest.approx(math.exp(measured.values["loss"]))


def test_only_so_many_are_translated_as_asked_for_and_the_loss_is_of_all():
    every, some, none = (measure("encoder_decoder")(PAIRS, decode=count) for count in (None, 5, 0))
    assert every.samples.startswith(some.samples) and some.samples.count("translation  ") == 5
    assert not any(name.startswith("exact_match/") for name in some.values)
    assert none.values == {name: every.values[name] for name in ("loss", "perplexity", "accuracy")}
    assert (none.samples, none.note) == ("", "")
    assert some.values["loss"] == every.values["loss"]


TEXTS = Examples(target=[*make_texts(41, 6, longest=17), "", "ñ" * LONGEST])
USED = TEXTS.target[:41]


def test_bits_are_counted_per_byte_of_the_texts_that_the_loss_is_of():
    """The end symbol costs bits too, and has no byte; texts that are left out count nowhere."""
    values = measure("decoder_lm")(TEXTS, decode=0).values
    tokens, size = sum(len(text) + 1 for text in USED), sum(len(text.encode()) for text in USED)
    assert size == 2 * sum(map(len, USED))
    assert values["bits_per_byte"] == pytest.approx(values["loss"] * tokens / math.log(2) / size, rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))


def test_a_model_to_which_all_tokens_are_equally_likely_has_the_bits_of_the_vocabulary():
    config = config_of("decoder_lm")
    zero = jax.tree.map(np.zeros_like, params_of("decoder_lm"))
    values = evaluator_of(config)(zero, pipeline.make_split(TEXTS, Letters, config), decode=0).values
    tokens, size = sum(len(text) + 1 for text in USED), sum(len(text.encode()) for text in USED)
    assert values["loss"] == pytest.approx(math.log(V), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(tokens * math.log2(V) / size, rel=1e-5)


def test_packed_texts_are_measured_as_texts_in_rows_of_their_own():
    config = config_of("decoder_lm", packing=True)
    packed, alone = (
        pipeline.make_split(TEXTS, Letters, config),
        pipeline.make_split(TEXTS, Letters, config_of("decoder_lm")),
    )
    texts_a_row = [len(row) for step in range(packed.plan.steps_per_epoch) for row in packed.plan.batch(step)[1]]
    assert max(texts_a_row) > 2 and sum(texts_a_row) == len(alone.plan.usable) == len(USED)
    together = measure("decoder_lm", packing=True)(TEXTS, decode=0).values
    apart = measure("decoder_lm")(TEXTS, decode=0).values
    assert together == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize(
    ("decode", "texts"), [({}, 1), ({"method": "sample", "temperature": 2.0, "seed": 7}, evaluate.SAMPLES)]
)
def test_a_language_model_shows_what_it_writes_of_nothing_unless_told_not_to(decode, texts):
    config = config_of("decoder_lm", **decode)
    params = params_of("decoder_lm")
    decoder = trained.make_decoder(transformer.build_model(config.model), config, parallel.make_mesh(1))
    written = Letters.decode(decoder(params, [np.empty(0, np.int32)] * texts))
    assert len(set(written)) > texts // 2 and any(written)
    split = pipeline.make_split(TEXTS, Letters, config)
    measure_split = functools.partial(evaluator_of(config), params, split)
    every, some, none = (measure_split(decode=count) for count in (None, 3, 0))
    assert every.samples == some.samples == "\n".join(written)
    assert (none.samples, every.note) == ("", "")


LABELLED = Examples(
    source=[*make_texts(37, 8), "ñ" * LONGEST], label=(np.arange(38, dtype=np.int32) ** 2 // 7 % 3).astype(np.int32)
)
READ = LABELLED.label[[len(text) + 2 <= LONGEST for text in LABELLED.source]]  # with a start and an end symbol


@functools.cache
def classified(mode_name="mesh", num_devices=1):
    config = config_of("encoder_classifier")
    split = pipeline.make_split(LABELLED, Letters, config)
    return evaluator_of(config, mode_name, num_devices)(params_of("encoder_classifier"), split)


def counts_of(table):
    """The numbers in a table of mistakes; a dot is none."""
    rows = [line.split()[1 : 1 + len(CLASSES)] for line in table.splitlines()[1:]]
    return np.array([[0 if cell == "." else int(cell) for cell in row] for row in rows])


def test_a_classifiers_mistakes_are_counted_once_for_every_text():
    measured = classified()
    counts = counts_of(measured.note)
    assert 0 < np.trace(counts) < counts.sum() == len(READ) < len(LABELLED)
    assert counts.sum(axis=1).tolist() == np.bincount(READ, minlength=3).tolist()
    assert measured.values["accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
    assert measured.values.keys() == {"loss", "accuracy"}
    assert measured.samples == measured.note


@pytest.mark.parametrize("mode_name", ["mesh", "pmap"])
def test_eight_devices_count_the_mistakes_that_one_does(mode_name):
    eight = classified(mode_name, 8)
    assert eight.note == classified().note
    assert eight.values == pytest.approx(classified().values, rel=1e-5)


def test_mistakes_are_laid_out_only_where_all_there_is_to_know_is_asked_for():
    measured = measure("encoder_classifier")(LABELLED, decode=5)
    assert (measured.samples, measured.note) == ("", "")
    assert measured.values == pytest.approx(classified().values)


def test_an_evaluator_compiles_once_a_shape_and_lets_the_caller_breathe_after_every_batch():
    compiled, breaths = [], []

    def compile_with(compile):
        compiled.append(1)
        return compile()

    config = config_of("encoder_classifier")
    split = pipeline.make_split(LABELLED, Letters, config)
    options = {"compile_with": compile_with, "between_batches": lambda: breaths.append(1)}
    evaluator = evaluator_of(config, **options)
    for number in (1, 2):
        evaluator(params_of("encoder_classifier"), split)
        assert len(compiled) == 2  # the metrics and the mistakes
        assert len(breaths) == number * 2 * split.plan.steps_per_epoch > number * 2
