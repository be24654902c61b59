"""Trained models of each architecture: answers in order, independent of each other; ensembles."""

import dataclasses
import functools
import io
import shutil
import types

import jax
import numpy as np
import pytest

from flaxformer_lite import classify, generate, trained, translate
from flaxformer_lite.cli import translate_lines
from flaxformer_lite.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TrainConfig,
    source_language,
)
from flaxformer_lite.fields import BOS, EOS
from flaxformer_lite.lines import chunks
from flaxformer_lite.lines.line_windows import Window
from flaxformer_lite.model import transformer
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes, parallel
from flaxformer_lite.training.checkpoint import Checkpoints
from flaxformer_lite.training.origin import Origin, restore, schedule

pytestmark = pytest.mark.usefixtures("quickly_compiled")

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
NAMES = ["da", "nb", "zh"]
TOO_LONG = (
    "text {}: {} tokens, and the model takes at most {}; "
    "split it into shorter sentences. It starts: 'F"
)


class Letters:
    """A tokenizer that needs no training: id i is the i-th letter from 'A'."""

    fingerprint = "letters"

    @staticmethod
    def encode(texts, *, side="source"):
        return [np.array([ord(letter) - ord("A") for letter in text], np.int32) for text in texts]

    @staticmethod
    def decode(rows):
        return ["".join(chr(ord("A") + i) for i in row) for row in rows]


@functools.cache
def run_of(architecture, *, devices=1, position="sinusoidal", **decode):
    """Returns a run with parameters so large that different inputs get different outputs."""
    config = dataclasses.replace(
        MODEL, architecture=architecture, num_classes=len(NAMES), position=position
    )
    model, mesh = transformer.build_model(config), meshes.make_mesh(devices)
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(np.float32), param_shapes(model)
    )
    whole = Config(
        model=config,
        data=DataConfig(vocab_size=V),
        decode=DecodeConfig(**{"max_extra_length": EXTRA, **decode}),
    )
    return trained.Trained(whole, Letters, model, parallel.replicate(params, mesh), mesh, NAMES)


# Models that tests share, so that each program is compiled once.


@functools.cache
def translator_of(**options):
    return translate.Translator(run_of("encoder_decoder", **options))


@functools.cache
def classifier_of(**options):
    return classify.Classifier(run_of("encoder_classifier", **options))


@functools.cache
def generator_of(**options):
    return generate.Generator(run_of("decoder_lm", **options))


def make_texts(number, longest=LONGEST - 2):
    rng = np.random.default_rng(5)
    return Letters.decode(rng.integers(4, V, length) for length in rng.integers(1, longest, number))


TEXTS = make_texts(17)
BEAM = {"method": "beam", "beam_size": 3}
SAMPLED_TRANSLATIONS = {"method": "sample", "temperature": 2.0, "seed": 3}


def assert_refuses_longer_texts(answer, longest):
    """Asserts that texts of `longest` tokens are accepted, and longer ones an error."""
    assert len(answer(["F" * longest])) == 1
    with pytest.raises(ValueError) as caught:
        answer(["G", "F" * (longest + 1)])
    assert str(caught.value).startswith(TOO_LONG.format(2, longest + 1, longest))


def test_a_translator_keeps_the_order_and_translates_an_empty_text_as_empty():
    translator = translator_of()
    answers = translator(["", *TEXTS, ""])
    assert answers[0] == answers[-1] == "" and len(set(answers)) > 3
    assert answers[1:-1] == [translator([text])[0] for text in TEXTS]


def test_a_blank_text_has_an_empty_translation_by_every_method():
    translator = translator_of(**BEAM)
    blank = [" ", "\t", "\u00a0\u202f", " " * LONGEST]
    assert translator(blank) == list(translator.stream(blank)) == [""] * len(blank)
    assert translator.n_best(blank, 3) == [[("", 0.0)]] * len(blank)


def test_a_text_that_is_too_long_for_a_translator_is_an_error_with_its_number():
    # The end symbol takes 1 position.
    assert_refuses_longer_texts(translator_of(), LONGEST - 1)


def test_a_stream_gives_the_same_translations_with_any_window_and_method():
    for decode in ({}, SAMPLED_TRANSLATIONS):
        translator = translator_of(**decode)
        answers = translator(["FGH", *TEXTS, "FGH", ""])
        assert (answers[0] != answers[-2]) == bool(decode) and len(set(answers)) > 3
        for window in (1, 5, 97):
            assert (
                list(translator.stream(iter(["FGH", *TEXTS, "FGH", ""]), window=window)) == answers
            )


def test_a_stream_reads_only_one_window_of_texts_at_a_time():
    def texts():
        yield from ["FGH"] * 5
        raise AssertionError("a sixth text is read")

    stream = translator_of().stream(texts(), window=5)
    assert len({next(stream) for _ in range(5)}) == 1


def test_a_stream_raises_for_a_long_text_or_translates_its_chunks():
    translator = translator_of()
    rng = np.random.default_rng(11)
    (long,) = Letters.decode([rng.integers(4, V, 3 * LONGEST)])
    texts = [*TEXTS, long, *TEXTS]
    stream = translator.stream(texts, window=5)
    assert [next(stream) for _ in range(15)] == translator(texts[:15])
    with pytest.raises(
        ValueError,
        match=rf"^text 18: {3 * LONGEST} tokens, and the model takes at most {LONGEST - 1}",
    ):
        next(stream)
    whole = list(translator.stream(texts, window=5, long="split"))
    assert whole[:17] == whole[18:] == translator(TEXTS)
    parts = [chunk.text for chunk in chunks.cut(long, translator.run.fits)]
    assert len(parts) == 4 and whole[17] == "".join(translator(parts))


@pytest.mark.slow
def test_chunks_of_a_text_are_sampled_separately_and_only_the_first_has_the_prefix():
    translator = translator_of(**SAMPLED_TRANSLATIONS)
    answer = translate.LineTranslator(translator, long="split", prefix="KKKK")
    long = "F" * 4 * (LONGEST - 1)
    (text, other), split = answer(Window([long, "FGH"], first=7))
    assert split == 1 and text.startswith("KKKK") and other.startswith("KKKK")
    same = translate.LineTranslator(translator, prefix="KKKK")(Window(["FGH"], first=8)).lines
    assert (
        [other]
        == same
        != translate.LineTranslator(translator, prefix="KKKK")(Window(["FGH"], first=9)).lines
    )
    parts = ["F" * (LONGEST - 1)] * 4
    numbers = [7 + k * translate.CHUNK_STRIDE for k in range(4)]
    (prefix,) = Letters.encode(["KKKK"])
    expected = translator.translate_ids(Letters.encode(parts), [prefix] + [prefix[:0]] * 3, numbers)
    assert text == "".join(expected) and len(set(expected[1:])) > 1


def test_n_best_translations_have_the_numbers_of_their_lines_and_exclude_chunks():
    translator = translator_of(**BEAM)
    lines = translate_lines.lines_of(translator, n_best=2)(Window(TEXTS[:3], first=100)).lines
    found = [
        (n, *pair)
        for n, row in enumerate(translator.n_best(TEXTS[:3], 2), start=101)
        for pair in row
    ]
    assert lines == [f"{n}\t{score:.6f}\t{text}" for n, text, score in found]
    with pytest.raises(
        ValueError,
        match=r"^--long=split: applies only to plain translations; leave out --n_best",
    ):
        translate_lines.lines_of(translator, n_best=2, long="split")
    with pytest.raises(ValueError, match=r"^long: expected refuse or split, got 'cut'"):
        translate.LineTranslator(translator, long="cut")


def test_a_fingerprint_depends_on_settings_parameters_and_tokenizer():
    run = dataclasses.replace(
        run_of("encoder_decoder"), tokenizer=types.SimpleNamespace(fingerprint="one")
    )
    params = jax.tree.map(lambda x: x + (x.ndim == 1) * 1e-3, run.params)
    others = [
        {"params": params},
        {"tokenizer": types.SimpleNamespace(fingerprint="two")},
        {
            "config": dataclasses.replace(
                run.config, model=dataclasses.replace(run.config.model, norm="rms_norm")
            )
        },
    ]
    names = [
        run.asked()["model"],
        *(dataclasses.replace(run, **other).asked()["model"] for other in others),
    ]
    assert len(set(names)) == 4 and all(name.startswith("step 0, parameters ") for name in names)
    assert (
        run.asked() == dataclasses.replace(run).asked()
        and run.asked()["--max_extra_length"] == EXTRA
    )


def two_runs(architecture, **changes):
    """Returns 2 runs; the second has other positions, parameters and `changes` of its model."""
    first, second = run_of(architecture), run_of(architecture, position="alibi")
    config = dataclasses.replace(
        second.config, model=dataclasses.replace(second.config.model, **changes)
    )
    params = parallel.replicate(jax.tree.map(lambda x: np.roll(x, 1), second.params), second.mesh)
    return {
        "a": first,
        "b": dataclasses.replace(second, config=config, params=params, origin=Origin((7,), "ema")),
    }


@pytest.mark.slow
def test_an_ensemble_gives_the_same_texts_in_any_order_and_names_its_members():
    runs = two_runs("encoder_decoder")
    both, reversed_ = trained.together(runs), trained.together(dict(reversed(runs.items())))
    answers = [translate.Translator(run)(TEXTS) for run in (both, *runs.values())]
    assert len({tuple(each) for each in answers}) == 3
    assert translate.Translator(reversed_)(TEXTS) == answers[0]
    assert str(both.origin) == "step 0; together with b, step 7, moving average"
    assert str(reversed_.origin) == "step 7, moving average; together with a, step 0"
    labels = [run.origin.label for run in (both, reversed_)]
    assert [label[:-8] for label in labels] == ["step0-ensemble2-", "step7-ema-ensemble2-"] and len(
        set(labels)
    ) == 2
    assert len({run.fingerprint() for run in (both, reversed_, *runs.values())}) == 4


@pytest.mark.slow
def test_ensembles_of_classifiers_and_of_language_models_work():
    first, second, both = (
        classify.Classifier(run).probabilities(TEXTS)
        for run in (
            *two_runs("encoder_classifier").values(),
            trained.together(two_runs("encoder_classifier")),
        )
    )
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_allclose(both, (first + second) / 2, atol=2e-5)
    generated = generate.Generator(trained.together(two_runs("decoder_lm")))(TEXTS)
    assert all(text.startswith(prompt) for prompt, text in zip(TEXTS, generated, strict=True))
    assert any(len(text) > len(prompt) for prompt, text in zip(TEXTS, generated, strict=True))


def test_the_shortest_member_limits_the_length_of_an_ensemble():
    runs = two_runs("encoder_decoder", max_length=11)
    config = dataclasses.replace(
        runs["a"].config, data=DataConfig(vocab_size=V, buckets=(7, 13, LONGEST))
    )
    both = trained.together({**runs, "a": dataclasses.replace(runs["a"], config=config)})
    both = trained.with_decode(both, {"max_extra_length": 3})  # checks the whole config
    assert (both.longest, both.config.model.max_length, both.config.data.buckets) == (
        10,
        11,
        (7, 11),
    )
    assert both.config.decode.max_extra_length == 3
    assert_refuses_longer_texts(translate.Translator(both), 10)


@pytest.mark.parametrize(
    ("data", "language"),
    [
        ({}, "en"),
        ({"dataset": "wmt14_translate/de-en:1.0.0"}, "de"),
        ({"dataset": "wmt14_translate/de-en", "source_language": "en"}, "en"),
        ({"dataset": "ted_hrlr_translate/pt_to_en"}, None),
        ({"dataset": "parallel_text", "train_files": ("a/*.fi*", "a/*.sv*")}, "fi"),
        (
            {
                "dataset": "parallel_text",
                "train_files": ("a/1.fi.gz", "a/1.sv.gz"),
                "languages": ("sv", "fi"),
            },
            "sv",
        ),
        ({"dataset": "parallel_text", "train_files": ("a.tsv",)}, None),
        ({"dataset": "parallel_text", "train_files": ("left", "right")}, None),
        ({"dataset": "parallel_text", "train_files": ("a.txt", "b.txt")}, None),
        ({"tokenizer": "marian"}, None),  # imported, not trained yet
    ],
)
def test_the_source_language_comes_from_the_config(data, language):
    assert source_language(Config(data=DataConfig(**data))) == language


def test_the_same_model_twice_in_an_ensemble_is_an_error():
    runs = two_runs("encoder_decoder")
    with pytest.raises(
        ValueError,
        match=r"^ensemble: c is the same model as b, which would count 2 times; leave it out",
    ):
        trained.together({**runs, "c": runs["b"]})


def test_answers_of_an_ensemble_do_not_depend_on_the_folders_of_its_members():
    runs = two_runs("encoder_decoder")
    here, there = (trained.together({"a": runs["a"], name: runs["b"]}) for name in ("b", "moved/b"))
    assert here.asked() == there.asked() != runs["a"].asked() and here.origin != there.origin


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"tokenizer": types.SimpleNamespace(fingerprint="other")}, "another tokenizer"),
        ({"label_names": ["da", "zh", "nb"]}, "other labels"),
        (
            {"config": Config(model=dataclasses.replace(MODEL, architecture="decoder_lm"))},
            "another model.architecture",
        ),
        (
            {"config": Config(model=dataclasses.replace(MODEL, decoder="masked"))},
            "another model.decoder",
        ),
        (
            {"config": Config(MODEL, DataConfig(source_language="de", vocab_size=V))},
            "another source language",
        ),
    ],
)
def test_incompatible_members_of_an_ensemble_are_an_error(changes, what):
    runs = two_runs("encoder_decoder")
    with pytest.raises(
        ValueError, match=rf"^ensemble: b has {what} than a; only models that give probabilities of"
    ):
        trained.together({**runs, "b": dataclasses.replace(runs["b"], **changes)})


def test_masked_decoders_in_an_ensemble_are_an_error():
    config = Config(model=dataclasses.replace(MODEL, decoder="masked"))
    masked = dataclasses.replace(run_of("encoder_decoder"), config=config)
    with pytest.raises(
        ValueError, match=r"^ensemble: a has model\.decoder='masked', and its texts are not written"
    ):
        trained.together({"a": masked, "b": masked})


def expected_probabilities(text):
    """Returns the probabilities of a single text without padding, (C,)."""
    run = run_of("encoder_classifier")
    source = np.array([[BOS, *Letters.encode([text])[0], EOS]])
    logits_C = np.asarray(jax.jit(run.model.apply)({"params": run.params}, source)[0], np.float64)
    weights_C = np.exp(logits_C - logits_C.max())
    return weights_C / weights_C.sum()


def test_a_classifier_returns_the_softmax_of_the_logits_of_each_text():
    expected = np.array([expected_probabilities(text) for text in TEXTS[:3]])
    assert min(np.ptp(expected[:, 0]), np.ptp(expected[:, 2])) > 0.1
    probabilities = classifier_of().probabilities(TEXTS)
    assert probabilities.shape == (len(TEXTS), len(NAMES)) and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities[:3], expected, atol=2e-5)
    np.testing.assert_allclose(probabilities.sum(axis=1), np.ones(len(TEXTS)), rtol=1e-5)


def test_a_classifier_returns_the_most_probable_class_and_none_for_an_empty_text():
    classifier = classifier_of()
    most_probable = classifier.probabilities(TEXTS).argmax(axis=1)
    assert len(set(most_probable)) > 1
    assert classifier(["", *TEXTS, ""]) == ["", *(NAMES[best] for best in most_probable), ""]
    assert classifier([]) == [] and classifier.probabilities([]).shape == (0, len(NAMES))


def test_a_class_does_not_depend_on_the_number_of_texts_or_devices():
    many = make_texts(2 * classify.ROWS + 3)
    one, eight = (classifier_of(**on).probabilities(many) for on in ({}, {"devices": 8}))
    np.testing.assert_allclose(eight, one, atol=2e-5)
    np.testing.assert_allclose(one[-5:], classifier_of().probabilities(many[-5:]))


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_a_text_that_is_too_long_for_a_classifier_is_an_error_with_its_number(position):
    # The start and the end symbol take 2 positions.
    assert_refuses_longer_texts(classifier_of(position=position), LONGEST - 2)


def test_a_generator_continues_the_prompt_by_at_most_max_extra_length_tokens():
    texts = generator_of()(["", *TEXTS])
    for prompt, text in zip(["", *TEXTS], texts, strict=True):
        assert text.startswith(prompt) and len(text) <= min(len(prompt) + EXTRA, LONGEST)
    assert any(len(text) > len(prompt) for prompt, text in zip(["", *TEXTS], texts, strict=True))


def test_a_prompt_that_is_too_long_is_an_error_with_its_number():
    # The start symbol takes 1 position.
    assert_refuses_longer_texts(generator_of(), LONGEST - 1)


SAMPLED = {"method": "sample", "temperature": 2.0, "max_extra_length": 11}


@pytest.mark.slow
def test_text_number_i_is_a_function_of_the_seed_i_and_its_prompt():
    first, other = (generator_of(**SAMPLED, seed=seed) for seed in (3, 4))
    texts = first(["FGH"] * 13)
    assert len(set(texts)) > 5
    assert first(["FGH"] * 13) == texts != other(["FGH"] * 13)
    assert first(["FGH"] * 3 + TEXTS) == texts[:3] + first([""] * 3 + TEXTS)[3:]


def test_eight_devices_generate_the_same_texts_as_one():
    one, eight = (generator_of(**SAMPLED, seed=3, **on) for on in ({}, {"devices": 8}))
    assert one(["FGH"] * 13) == eight(["FGH"] * 13)


@pytest.mark.slow
def test_a_translation_starts_with_its_prefix_by_every_method():
    prefixes = ["", "FG", "KKK"] * 5 + ["", "Z"]
    for decode in ({}, BEAM):
        translator = translator_of(**decode)
        answers = translator(TEXTS, prefixes)
        assert all(
            answer.startswith(prefix) for answer, prefix in zip(answers, prefixes, strict=True)
        )
        assert answers != translator(TEXTS)
        assert translator(["", *TEXTS[:2]], ["FG"] * 3)[0] == ""


def test_a_wrong_number_of_prefixes_or_a_long_prefix_is_an_error():
    translator = translator_of()
    with pytest.raises(ValueError, match=r"^prefixes: expected one a text, 2, got 1; '' is none"):
        translator(TEXTS[:2], ["F"])
    with pytest.raises(
        ValueError, match=rf"^prefix 2: {LONGEST} tokens, and the model takes at most {LONGEST - 1}"
    ):
        translator(TEXTS[:2], ["F", "F" * LONGEST])


def test_the_first_of_the_n_best_is_the_translation_and_scores_decrease():
    translator = translator_of(**BEAM)
    found = translator.n_best(["", *TEXTS], 3)
    assert [row[0][0] for row in found] == translator(["", *TEXTS])
    assert found[0] == [("", 0.0)]
    for row in found[1:]:
        scores = [score for _, score in row]
        assert (
            len({text for text, _ in row}) == 3
            and scores == sorted(scores, reverse=True)
            and scores[0] < 0
        )
    assert [row[:2] for row in found] == [row[:2] for row in translator.n_best(["", *TEXTS], 2)]


def test_decoding_fields_replace_those_of_the_run_and_another_method_resets_its_own():
    sampled = Config(
        decode=DecodeConfig(method="sample", temperature=2.0, seed=7, max_extra_length=EXTRA)
    )
    run = dataclasses.replace(run_of("encoder_decoder"), config=sampled)
    assert trained.with_decode(run, {}).config == run.config
    changed = trained.with_decode(run, {"method": "beam", "alpha": 1.0}).config.decode
    assert changed == DecodeConfig(method="beam", alpha=1.0, max_extra_length=EXTRA)
    assert trained.with_decode(run, {"seed": 8}).config.decode == dataclasses.replace(
        run.config.decode, seed=8
    )
    with pytest.raises(ValueError, match=r"^config\.decode\.alpha: requires decode.method='beam'"):
        trained.with_decode(run, {"alpha": 1.0})
    with pytest.raises(ValueError, match=r"^config\.decode\.beam: there is no such field"):
        trained.with_decode(run, {"beam": 4})


# The origin of parameters.


@pytest.mark.parametrize(
    ("origin", "words", "label", "plain"),
    [
        (((48,),), "step 48", "step48", True),
        (((48,), "raw", "last:1"), "step 48", "step48-last1", False),
        (((48,), "ema"), "step 48, moving average", "step48-ema", False),
        (((40, 48), "raw", "best:2"), "average of steps 40, 48", "step48-best2", False),
        (
            ((7, 9), "ema", "last:2"),
            "average of steps 7, 9, moving averages",
            "step9-last2-ema",
            False,
        ),
    ],
)
def test_an_origin_has_a_description_and_a_label_for_file_names(origin, words, label, plain):
    origin = Origin(*origin)
    assert (str(origin), origin.label) == (words, label)
    assert origin.remark == (None if plain else words) and origin.step == max(origin.steps)


STEPS, SIGNAL = (4, 8, 12), 10  # scheduled, and saved because of a signal
SCORES = {4: 0.9, 8: 0.1, 12: 0.5}


@pytest.fixture(scope="module")
def averaging_run(tmp_path_factory):
    """Checkpoints with parameters equal to the step, and moving averages equal to its square."""
    folder, mesh = tmp_path_factory.mktemp("run"), meshes.make_mesh(1)
    written = Checkpoints(folder, keep_newest=9)
    for step in sorted((*STEPS, SIGNAL)):
        parts = {
            "params": {"w": np.full(3, step, np.float32)},
            "ema": {"w": np.full(3, step**2, np.float32)},
        }
        written.save(step, parallel.replicate(parts, mesh), {"step": step})
    written.close()
    return folder


def restored(folder, *, ema_decay=0.9, train_average=None, **options):
    """Returns the value of the restored parameters and their origin."""
    train = {
        "num_steps": 12,
        "eval_every": 4,
        "checkpoint_every": 4,
        "keep_newest": 3,
        "keep_best": 3,
    }
    config = Config(train=TrainConfig(**train, ema_decay=ema_decay, average=train_average))
    checkpoints = Checkpoints(folder, scores=SCORES, due=schedule(config), read_only=True)
    shapes = parallel.whole_on(meshes.make_mesh(1), {"w": jax.ShapeDtypeStruct((3,), np.float32)})
    try:
        params, _, origin = restore(checkpoints, shapes, config, **options)
    finally:
        checkpoints.close()
    (value,) = set(np.asarray(params["w"]).tolist())
    return value, origin


def test_the_best_moving_average_is_the_default_if_the_run_keeps_one(averaging_run):
    assert restored(averaging_run) == (16, Origin((4,), "ema"))
    assert restored(averaging_run, ema_decay=None) == (4, Origin((4,)))
    assert restored(averaging_run, parameters="raw") == (4, Origin((4,)))


def test_an_average_is_that_of_the_run_unless_another_or_none_is_requested(averaging_run):
    own = {"ema_decay": None, "train_average": "last:2"}
    # The checkpoint of step 10 is not scheduled.
    assert restored(averaging_run, **own) == (10, Origin((8, 12), "raw", "last:2"))
    assert restored(averaging_run, **own, average="none") == (4, Origin((4,)))
    assert restored(averaging_run, **own, average="last:3") == (
        8,
        Origin((4, 8, 12), "raw", "last:3"),
    )
    assert restored(averaging_run, average="best:2") == (
        (16 + 144) / 2,
        Origin((4, 12), "ema", "best:2"),
    )


def test_the_average_of_an_unfinished_run_may_have_fewer_checkpoints(averaging_run, tmp_path):
    steps = tmp_path / "run"
    shutil.copytree(averaging_run, steps)
    own = {"ema_decay": None, "train_average": "last:3"}
    shutil.rmtree(steps / "12")
    assert restored(steps, **own) == (6, Origin((4, 8), "raw", "last:3"))
    with pytest.raises(ValueError, match="last:3 needs 3 checkpoints, and 2 are kept"):
        restored(steps, **own, average="last:3")
    shutil.rmtree(steps / "8")
    shutil.rmtree(steps / "4")
    assert restored(steps, **own) == (SIGNAL, Origin((SIGNAL,)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"average": "last:4"},
            "last:4 needs 4 checkpoints, and 3 are kept; .* train.keep_newest=4",
        ),
        (
            {"average": "best:4"},
            "best:4 needs 4 checkpoints with a score, and 3 are kept; .* train.keep_best=4",
        ),
        ({"average": "4"}, "^average: expected last:N or best:N, such as last:5, got '4'"),
        ({"average": 4}, "^average: expected last:N or best:N, such as last:5, got 4"),
        ({"average": []}, r"^average: expected last:N or best:N, such as last:5, got \[\]"),
        ({"parameters": ["ema"]}, r"^parameters: expected raw or ema, got \['ema'\]"),
        ({"parameters": "best"}, "^parameters: expected raw or ema, got 'best'"),
        ({"parameters": "ema", "ema_decay": None}, "^parameters: this run keeps no moving average"),
    ],
)
def test_parameters_that_a_run_does_not_have_are_an_error(averaging_run, options, says):
    with pytest.raises(ValueError, match=says):
        restored(averaging_run, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensor": "2"}, "^tensor: expected a whole number, 1 or more, got '2'"),
        ({"tensor": None}, "^tensor: expected a whole number, 1 or more, got None"),
        ({"ensemble": 3}, "^ensemble: expected a list of folders, got 3"),
        ({"ensemble": None}, "^ensemble: expected a list of folders, got None"),
    ],
)
def test_options_of_another_type_are_an_error(options, says):
    with pytest.raises(InputError, match=says):
        trained.load("not read", **options)


def test_the_lines_of_an_open_file_are_translated_without_their_ends():
    translator = translator_of()
    lines = io.StringIO("".join(f"{text}\r\n" for text in TEXTS), newline="")
    assert list(translator.stream(lines, window=5)) == translator(TEXTS)
    assert list(translator.stream(iter(TEXTS), window=2**70)) == translator(TEXTS)
    assert translator([f"{text}\n" for text in TEXTS]) == translator(TEXTS)
    prefixes = ["K"] * len(TEXTS)
    assert translator(TEXTS, [f"{prefix}\n" for prefix in prefixes]) == translator(TEXTS, prefixes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t("FGH"), r"^texts: expected a list of texts, got one text; pass \['FGH'\]"),
        (lambda t: t(["F"], "K"), r"^prefixes: expected a list of texts, got one text"),
        (lambda t: t(["F"], [b"K"]), r"^prefix 1: expected a text \(str\), got b'K' \(bytes\)"),
        (lambda t: t.stream("FGH"), r"^texts: expected a list of texts, got one text"),
        (
            lambda t: t.stream(["F"], window=0),
            r"^window: expected a whole number, 1 or more, got 0",
        ),
        (lambda t: t.n_best("FGH", 2), r"^texts: expected a list of texts, got one text"),
        (lambda t: t.n_best(["F"], 2.0), r"^n: expected a whole number, 1 or more, got 2\.0"),
        (lambda t: list(t.stream(["F", None])), r"^text 2: expected a text \(str\), got None"),
    ],
)
def test_an_argument_of_another_type_is_one_message(call, message):
    with pytest.raises(InputError, match=message):
        call(translator_of(**BEAM))


def test_classifiers_and_language_models_refuse_other_types_too():
    with pytest.raises(InputError, match=r"^texts: expected a list of texts, got one text"):
        classify.Classifier(run_of("encoder_classifier"))("FGH")
    with pytest.raises(InputError, match=r"^text 1: expected a text \(str\), got None"):
        classify.Classifier(run_of("encoder_classifier")).probabilities([None])
    with pytest.raises(InputError, match=r"^prompts: expected a list of texts, got one text"):
        generate.Generator(run_of("decoder_lm"))("FGH")
    with pytest.raises(InputError, match=r"^workdir: expected the path of a folder, got None"):
        translate.load(None)


WRONG = {
    "workdir": (None, 3, "", ["a"]),
    "average": (True, 2, 2.0, b"last:2", ["last:2"], "", "last:0"),
    "parameters": (True, 1, "", b"raw", ["raw"]),
    "ensemble": (None, True, 2.0, [None], [2], ""),
    "tensor": (None, True, 0, -1, 2.0, "2", [1]),
}


@pytest.mark.parametrize(("name", "value"), [(n, value) for n in WRONG for value in WRONG[n]])
def test_a_wrong_argument_of_load_is_one_message_that_names_it(name, value):
    """All are refused before anything is read: there is no such run."""
    with pytest.raises(InputError, match=rf"^{name}: expected "):
        translate.load(**({"workdir": "nowhere"} | {name: value}))
