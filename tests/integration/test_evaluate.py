"""Evaluation: translations scored and saved, bits per byte, confusion matrices, many devices."""

import dataclasses
import functools
import json
import math
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from flaxformer_lite import evaluate, scoring, trained
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.decoding.decoder import padded_length, rows_for
from flaxformer_lite.evaluator import SAMPLES, Evaluator, by_kind
from flaxformer_lite.model import transformer
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes, parallel, run_report, saved_evaluation
from flaxformer_lite.training.origin import Origin
from flaxformer_lite.training.saved_evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("quickly_compiled")

REFERENCES = ["der 3. Mai", "12,50 €", "vor 3 Tagen", "drei", "7 km"]
HYPOTHESES = ["der 3. Mai", "12,5 €", "vor 3 Tagen", "", "7 km"]


def test_exact_match_by_kind_divides_by_the_examples_of_the_kind():
    kinds = ["date", "money", "date", "number", "number"]
    assert by_kind(HYPOTHESES, [REFERENCES], kinds) == {
        "exact_match/date": 1.0,
        "exact_match/money": 0.0,
        "exact_match/number": 0.5,
    }


V, LONGEST, EXTRA = 29, 23, 5
MODEL = ModelConfig(
    vocab_size=V,
    d_model=14,
    num_heads=7,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LONGEST,
)
SHAPES = {
    "encoder_decoder": MODEL,
    "encoder_classifier": dataclasses.replace(
        MODEL, architecture="encoder_classifier", num_classes=3
    ),
    "decoder_lm": dataclasses.replace(MODEL, architecture="decoder_lm"),
}
CLASSES = ["of", "three", "letters"]


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'ä', of two bytes each."""

    @staticmethod
    def encode(texts, *, side="source"):
        return [np.array([ord(letter) - ord("ä") for letter in text], np.int32) for text in texts]

    @staticmethod
    def decode(rows):
        return ["".join(chr(ord("ä") + i) for i in row) for row in rows]


def make_texts(number, seed, longest=LONGEST - 1):
    rng = np.random.default_rng(seed)
    return Letters.decode(rng.integers(4, V, length) for length in rng.integers(1, longest, number))


def config_of(architecture, *, packing=False, pretokenized=False, **decode):
    kind = {"packing": packing, "pretokenized": pretokenized}
    data = DataConfig(vocab_size=V, buckets=(LONGEST,), tokens_per_batch=LONGEST * 16, **kind)
    decode = DecodeConfig(max_extra_length=EXTRA, **decode)
    return Config(model=SHAPES[architecture], data=data, decode=decode)


@functools.cache
def params_of(architecture):
    """Returns parameters so large that different inputs get different outputs."""
    rng = np.random.default_rng(3)
    shapes = param_shapes(transformer.build_model(SHAPES[architecture]))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def evaluator_of(config, mode_name="mesh", num_devices=1, **options):
    """Returns a function from whole parameters and a split to an evaluation."""
    mode = parallel.MODES[mode_name](meshes.make_mesh(num_devices))
    options = {"label_names": CLASSES, **options}
    evaluator = Evaluator(transformer.build_model(config.model), config, mode, Letters, **options)

    def evaluated(params, split, **options):
        return evaluator.evaluate(
            mode.put_state(params), parallel.replicate(params, mode.mesh), split, **options
        )

    return evaluated


@functools.cache
def shared_evaluator(config):
    """Returns `evaluator_of` the config, which compiles each program once for all tests."""
    return evaluator_of(config)


@functools.cache
def measure(architecture, **changes):
    """Returns a function from examples to the evaluation of `params_of`."""
    config = config_of(architecture, **changes)
    return lambda examples, **options: shared_evaluator(config)(
        params_of(architecture), pipeline.make_split(examples, Letters, config), **options
    )


def decode(sources, num_devices, **fields):
    """Returns the outputs of the sources, and the number of compilations."""
    mesh, compiled = meshes.make_mesh(num_devices), []

    def compile_with(compile):
        compiled.append(1)
        return compile()

    model, config = transformer.build_model(MODEL), config_of("encoder_decoder", **fields)
    decoder = trained.make_decoder(model, config, mesh, compile_with=compile_with)
    outputs = decoder(parallel.replicate(params_of("encoder_decoder"), mesh), sources)
    return outputs, len(compiled)


@pytest.mark.parametrize(
    ("longest", "tokens_per_batch", "padded_lengths"),
    [
        (11, DecodeConfig().tokens_per_batch, {16}),
        pytest.param(LONGEST - 1, 24 * LONGEST, {16, LONGEST}, marks=pytest.mark.slow),
    ],
)
def test_eight_devices_decode_the_same_as_one(longest, tokens_per_batch, padded_lengths):
    sources = Letters.encode(make_texts(83, 3, longest=longest))
    assert {padded_length(len(ids) + 1, LONGEST) for ids in sources} == padded_lengths
    (one, _), (eight, compiled) = (
        decode(sources, count, tokens_per_batch=tokens_per_batch) for count in (1, 8)
    )
    assert compiled >= len(padded_lengths)
    assert len({tuple(row) for row in one}) > 5
    for first, second in zip(one, eight, strict=True):
        assert first.tolist() == second.tolist()


def test_the_rows_of_a_decoder_batch_are_a_multiple_of_the_devices():
    mesh = meshes.make_mesh(7)
    decoder = trained.make_decoder(
        transformer.build_model(MODEL), config_of("encoder_decoder"), mesh
    )
    lengths = (16, 32, 4096)
    options = {"tokens": DecodeConfig().tokens_per_batch, "multiple": 7}
    rows = {decoder.rows(length) for length in lengths}
    rows |= {rows_for(length, waiting=n, **options) for length in lengths for n in (1, 50, 1000)}
    assert len(rows) > 3 and all(count % 7 == 0 and count for count in rows)


def test_the_rows_of_a_small_batch_are_a_multiple_of_the_devices_too():
    shapes = []

    def copy(params, source_BS, *_):
        shapes.append(source_BS.shape)
        return source_BS

    decoder = trained.make_decoder(
        transformer.build_model(MODEL),
        config_of("encoder_decoder"),
        meshes.make_mesh(7),
        compile_with=lambda compile: copy,  # which need not be compiled
    )
    for count in (1, 50, 1000):
        texts = make_texts(count, 3)
        assert Letters.decode(decoder({}, Letters.encode(texts))) == texts
    rows = {rows for rows, length in shapes}
    assert decoder.rows(LONGEST) in rows and min(rows) < decoder.rows(LONGEST) / 2
    assert all(count % 7 == 0 and count for count in rows)


PAIRS = Examples(
    source=[*make_texts(9, 4), "ñ" * (LONGEST - 1), "ñ" * LONGEST, ""],
    target=[*make_texts(9, 5), "ñ", "ñ", "ñ"],
    kind=["date", "money", "time"] * 4,
)


def test_translations_are_scored_and_shown_and_long_sources_have_empty_ones():
    measured = measure("encoder_decoder")(PAIRS)
    shown = [
        line.removeprefix("translation  ")
        for line in measured.samples.splitlines()
        if "translation" in line
    ]
    assert len(set(shown)) > 3
    assert shown[-2:] == ["", ""]
    scores = scoring.score(shown, [PAIRS.target])
    assert scores == measured.scores and list(measured.hypotheses) == shown
    kinds = by_kind(shown, [PAIRS.target], PAIRS.kind)
    assert measured.values.items() >= (scores.values | kinds).items()
    assert (measured.too_long, measured.note.splitlines()[:-1]) == (
        1,
        run_report.signatures(scores).splitlines(),
    )
    note = f"sources of {LONGEST} tokens or more, too many for the model: 1 of 12; their "
    assert measured.note.splitlines()[-1].startswith(f"{note}translations are empty")
    assert measured.samples == run_report.translations(PAIRS, shown)
    assert measured.values["perplexity"] == pytest.approx(math.exp(measured.values["loss"]))


def test_decode_limits_the_translated_examples_and_the_loss_is_of_all():
    every, some, none = (measure("encoder_decoder")(PAIRS, decode=count) for count in (None, 5, 0))
    assert every.samples.startswith(some.samples) and some.samples.count("translation  ") == 5
    assert not any(name.startswith("exact_match/") for name in some.values)
    assert none.values == {name: every.values[name] for name in ("loss", "perplexity", "accuracy")}
    assert (none.samples, none.note) == ("", "")
    assert some.values["loss"] == every.values["loss"]


def test_without_kinds_there_are_no_scores_by_kind():
    values = measure("encoder_decoder")(dataclasses.replace(PAIRS, kind=None)).values
    assert not any("/" in name for name in values)


def test_tokenized_text_has_scores_of_other_names():
    raw, tokenized = (
        measure("encoder_decoder")(PAIRS),
        measure("encoder_decoder", pretokenized=True)(PAIRS),
    )
    assert "bleu" in raw.values and "bleu_tokenized" not in raw.values
    assert "bleu_tokenized" in tokenized.values and not {"bleu", "chrf"} & tokenized.values.keys()
    assert tokenized.scores == scoring.score(raw.hypotheses, [PAIRS.target], tokenized=True)
    assert "tok:none" in tokenized.note and "tok:13a" not in tokenized.note
    assert tokenized.values["loss"] == raw.values["loss"]


def test_other_references_replace_the_targets_in_scores_but_not_in_the_loss():
    own = measure("encoder_decoder")(PAIRS)
    others = [list(own.hypotheses), PAIRS.target]
    measured = measure("encoder_decoder")(PAIRS, references=others)
    assert own.values["exact_match"] < measured.values["exact_match"] == 1
    assert measured.scores == scoring.score(own.hypotheses, others)
    assert {name: value for name, value in measured.values.items() if "/" in name} == dict.fromkeys(
        ("exact_match/date", "exact_match/money", "exact_match/time"), 1.0
    )
    assert measured.values["loss"] == own.values["loss"]


def test_resampling_adds_confidence_intervals():
    plain, measured = (
        measure("encoder_decoder")(PAIRS),
        measure("encoder_decoder")(PAIRS, bootstrap=40, seed=7),
    )
    assert measured.values == plain.values and plain.scores.intervals == {}
    (expected,) = scoring.resample([plain.hypotheses], [PAIRS.target], bootstrap=40, seed=7)
    assert measured.scores == expected and "bs:40|seed:7" in measured.note


MEASURED = Evaluation(
    {"loss": 0.5, "perplexity": math.inf, "bleu": 31.0, "exact_match/date": 0.25},
    hypotheses=["3. Mai", "", "zwei\nZeilen\r\u2028"],
    scores=scoring.Scores({"bleu": 31.0}, {"bleu": "nrefs:1|tok:13a"}, {"bleu": (30.5, 1.5)}),
    too_long=1,
)


def save(folder, measured=MEASURED, **changes):
    config = config_of("encoder_decoder", **changes.pop("decode", {}))
    return saved_evaluation.save(measured, folder, **of_run("a", config=config, **changes))


def of_run(name, **changes):
    config = config_of("encoder_decoder")
    return {
        "run": Path(name),
        "split": "test",
        "config": config,
        "origin": Origin((48,)),
        **changes,
    }


def test_translations_are_saved_one_a_line_with_their_scores_and_settings(tmp_path):
    texts, scores = save(tmp_path / "new", decode={"method": "sample", "temperature": 0.5})
    assert texts.read_bytes().decode() == "3. Mai\n\nzwei Zeilen \u2028\n"
    name = f"test.step48.sample-temperature=0.5-max_extra_length={EXTRA}"
    assert (texts.name, scores.name) == (f"{name}.hypotheses.txt", f"{name}.scores.json")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        [texts.name, scores.name]
    )
    facts = json.loads(scores.read_text(encoding="utf-8"))
    assert facts["scores"] == {**MEASURED.values, "perplexity": None}
    assert facts["signatures"] == MEASURED.scores.signatures and facts["resampled"] == {
        "bleu": {"mean": 30.5, "plus_minus": 1.5}
    }
    assert (facts["hypotheses"], facts["sentences"], facts["references"]) == (
        texts.name,
        3,
        "the split's own",
    )
    assert facts["too_long"] == 1
    assert facts["run"] == str(Path.cwd() / "a")
    assert (facts["split"], facts["steps"], facts["parameters"], facts["average"]) == (
        "test",
        [48],
        "raw",
        None,
    )
    assert facts["decode"]["temperature"] == 0.5


def test_different_settings_have_different_file_names(tmp_path):
    average = Origin((32, 40, 48), "ema", "last:3")
    ways = [
        {},
        {"split": "validation"},
        {"split": "test[:7]"},
        {"split": "test[7:]"},
        {"split": "a/b"},
        {"origin": Origin((40,))},
        {"origin": Origin((48,), "ema")},
        {"origin": average},
        {"decode": {"method": "sample"}},
    ]
    written = [path.name for way in ways for path in save(tmp_path, **way)]
    assert len(set(written)) == len(written) == 2 * len(ways)
    assert "test.step48-last3-ema." in " ".join(written)
    texts, scores = save(tmp_path, references=["of/mine.txt", "more.txt"])
    assert texts.name in written and scores.name not in written
    assert json.loads(scores.read_text())["references"] == ["of/mine.txt", "more.txt"]


def test_files_of_another_run_are_not_overwritten(tmp_path):
    saved_evaluation.check_unused(tmp_path / "new", **of_run("b"))
    _, scores = save(tmp_path, references=["mine.txt"])
    (tmp_path / f"{scores.name}.of-somebody{saved_evaluation.SCORES}").write_text("else")
    saved_evaluation.check_unused(tmp_path, **of_run("a"))
    saved_evaluation.check_unused(tmp_path, **of_run("b", split="validation"))
    words = f"--output={tmp_path}: {scores.name} there is of the run {Path.cwd() / 'a'}; "
    words += "name another folder."
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        saved_evaluation.check_unused(tmp_path, **of_run("b"))
    facts = json.loads(scores.read_text())
    del facts["run"]  # as of an older version
    scores.write_text(json.dumps(facts))
    saved_evaluation.check_unused(tmp_path, **of_run("b"))


def test_scores_against_other_references_of_the_same_name_are_not_overwritten(
    tmp_path,
):
    where = {name: value for name, value in of_run("a").items() if name != "run"}
    saved_evaluation.check_references(tmp_path, ["of/mine.txt"], **where)
    saved_evaluation.check_references(tmp_path, [], **where)
    _, scores = save(tmp_path, references=["of/mine.txt"])
    saved_evaluation.check_references(tmp_path, ["of/mine.txt"], **where)
    saved_evaluation.check_references(tmp_path, ["other.txt"], **where)
    words = f"{scores}: there are scores against of/mine.txt; "
    words += "name another folder with --output, or move them."
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        saved_evaluation.check_references(tmp_path, ["others/mine.txt"], **where)


def test_scores_against_a_path_that_is_not_utf_8_are_json(tmp_path):
    name = os.fsdecode(b"\xff \xc3\xbc.txt")
    references = {"references": [name], "split": "test", "run": tmp_path}
    options = {"config": Config(), "origin": Origin((5,)), **references}
    scored = Evaluation({}, hypotheses=["a"], scores=scoring.Scores({}, {}, {}))
    _, scores = saved_evaluation.save(scored, tmp_path, **options)
    text = scores.read_text(encoding="utf-8")
    assert json.loads(text)["references"] == [name] and "ü" in text


def test_without_translations_no_files_are_saved(tmp_path):
    assert (
        save(tmp_path / "new", Evaluation({"loss": 0.5})) == [] and not (tmp_path / "new").exists()
    )


def test_an_error_names_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "taken").write_text("mine")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        # the second one is called before the evaluation
        for attempt in (save, saved_evaluation.check_folder):
            with pytest.raises(
                ValueError,
                match=rf"^--output={folder}: cannot be written to: .*; name another folder",
            ):
                attempt(folder)
    saved_evaluation.check_folder(tmp_path / "new" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


TEXTS = Examples(target=[*make_texts(41, 6, longest=17), "", "ñ" * LONGEST])
USED = TEXTS.target[:41]


def test_bits_per_byte_are_of_the_texts_of_the_loss():
    """The end symbol counts bits but no bytes; left out texts count neither."""
    values = measure("decoder_lm")(TEXTS, decode=0).values
    tokens, size = sum(len(text) + 1 for text in USED), sum(len(text.encode()) for text in USED)
    assert size == 2 * sum(map(len, USED))
    assert values["bits_per_byte"] == pytest.approx(
        values["loss"] * tokens / math.log(2) / size, rel=1e-5
    )
    assert values["perplexity"] == pytest.approx(math.exp(values["loss"]))


def test_uniform_predictions_have_the_bits_of_the_vocabulary():
    config = config_of("decoder_lm")
    zero = jax.tree.map(np.zeros_like, params_of("decoder_lm"))
    values = shared_evaluator(config)(
        zero, pipeline.make_split(TEXTS, Letters, config), decode=0
    ).values
    tokens, size = sum(len(text) + 1 for text in USED), sum(len(text.encode()) for text in USED)
    assert values["loss"] == pytest.approx(math.log(V), rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(tokens * math.log2(V) / size, rel=1e-5)


def test_packed_texts_are_evaluated_like_texts_in_separate_rows():
    config = config_of("decoder_lm", packing=True)
    packed, alone = (
        pipeline.make_split(TEXTS, Letters, config),
        pipeline.make_split(TEXTS, Letters, config_of("decoder_lm")),
    )
    texts_a_row = [
        len(row)
        for step in range(packed.plan.steps_per_epoch)
        for row in packed.plan.batch(step)[1]
    ]
    assert max(texts_a_row) > 2 and sum(texts_a_row) == len(alone.plan.usable) == len(USED)
    together = measure("decoder_lm", packing=True)(TEXTS, decode=0).values
    apart = measure("decoder_lm")(TEXTS, decode=0).values
    assert together == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize(
    ("decode", "texts"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        ({"method": "sample", "temperature": 2.0, "seed": 7}, SAMPLES),
        pytest.param({"method": "stochastic_beam", "seed": 7}, SAMPLES, marks=pytest.mark.slow),
    ],
)
def test_a_language_model_shows_generated_texts_unless_decode_is_0(decode, texts):
    config = config_of("decoder_lm", **decode)
    params = params_of("decoder_lm")
    decoder = trained.make_decoder(
        transformer.build_model(config.model), config, meshes.make_mesh(1)
    )
    generated = Letters.decode(decoder(params, [np.empty(0, np.int32)] * texts))
    assert len(set(generated)) > texts // 2 and any(generated)
    split = pipeline.make_split(TEXTS, Letters, config)
    measure_split = functools.partial(evaluator_of(config), params, split)
    every, some, none = (measure_split(decode=count) for count in (None, 3, 0))
    assert every.samples == some.samples == "\n".join(generated)
    assert (none.samples, every.note) == ("", "")


LABELLED = Examples(
    source=[*make_texts(37, 8), "ñ" * LONGEST],
    label=(np.arange(38, dtype=np.int32) ** 2 // 7 % 3).astype(np.int32),
)
# With a start and an end symbol.
READ = LABELLED.label[[len(text) + 2 <= LONGEST for text in LABELLED.source]]


@functools.cache
def classified(mode_name="mesh", num_devices=1):
    config = config_of("encoder_classifier")
    split = pipeline.make_split(LABELLED, Letters, config)
    return evaluator_of(config, mode_name, num_devices)(params_of("encoder_classifier"), split)


def counts_of(table):
    """Returns the numbers in a confusion matrix; a dot is 0."""
    rows = [line.split()[1 : 1 + len(CLASSES)] for line in table.splitlines()[1:]]
    return np.array([[0 if cell == "." else int(cell) for cell in row] for row in rows])


def test_a_confusion_matrix_counts_every_text_once():
    measured = classified()
    counts = counts_of(measured.note)
    assert 0 < np.trace(counts) < counts.sum() == len(READ) < len(LABELLED)
    assert counts.sum(axis=1).tolist() == np.bincount(READ, minlength=3).tolist()
    assert measured.values["accuracy"] == pytest.approx(np.trace(counts) / counts.sum())
    assert measured.values.keys() == {"loss", "accuracy"}
    assert measured.samples == measured.note


@pytest.mark.parametrize("mode_name", ["mesh", pytest.param("pmap", marks=pytest.mark.slow)])
def test_eight_devices_have_the_same_confusion_matrix_as_one(mode_name):
    eight = classified(mode_name, 8)
    assert eight.note == classified().note
    assert eight.values == pytest.approx(classified().values, rel=1e-5)


def test_a_confusion_matrix_needs_the_whole_split():
    measured = measure("encoder_classifier")(LABELLED, decode=5)
    assert (measured.samples, measured.note) == ("", "")
    assert measured.values == pytest.approx(classified().values)


def test_an_evaluator_compiles_each_shape_once_and_calls_back_after_every_batch():
    compiled, calls = [], []

    def compile_with(compile):
        compiled.append(1)
        return compile()

    config = config_of("encoder_classifier")
    split = pipeline.make_split(LABELLED, Letters, config)
    options = {"compile_with": compile_with, "between_batches": lambda: calls.append(1)}
    evaluator = evaluator_of(config, **options)
    for number in (1, 2):
        evaluator(params_of("encoder_classifier"), split)
        assert len(compiled) == 2  # the metrics and the confusion matrix
        assert len(calls) == number * 2 * split.plan.steps_per_epoch > number * 2


WRONG = {
    "split": (None, True, 2, b"test", ["test"]),
    "bootstrap": (None, True, -1, 2.0, "2"),
    "seed": (None, True, -1, 2.0, "2"),
    "references": ("abc", ["a"], {"a": "text"}, {"a": [1]}, {1: ["a"]}),
    "files": ("abc", ["a"], {"test": "a"}, {"test": [1]}, {"tset": ["a"]}),
}


@pytest.mark.parametrize(("name", "value"), [(n, value) for n in WRONG for value in WRONG[n]])
def test_a_wrong_argument_of_an_evaluation_is_one_message_that_names_it(name, value):
    run = trained.Trained(Config(), None, None, {}, None, None)
    with pytest.raises(InputError, match=rf"^({name}|text 1)(\['\w+'\])?: expected "):
        evaluate.evaluate_run(run, **({"split": "test"} | {name: value}))


@pytest.mark.parametrize("run", [None, "runs/mine"])
def test_only_a_loaded_run_is_evaluated(run):
    with pytest.raises(InputError, match=r"^run: expected the result of trained\.load, got "):
        evaluate.evaluate_run(run, "test")
