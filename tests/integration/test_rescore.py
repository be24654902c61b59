"""Scores of given texts: pairs and texts, both directions, words; and of translations."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scored import (
    LONGEST,
    PAIRS,
    TOKENIZER,
    as_lines,
    lines_of,
    rescorer_of,
    run_of,
    translator_of,
    with_data,
)

from flaxformer_lite import rescore
from flaxformer_lite.cli import translate_lines
from flaxformer_lite.decoding import beam
from flaxformer_lite.lines.line_windows import Window
from flaxformer_lite.system.errors import InputError

pytestmark = pytest.mark.usefixtures("quickly_compiled")


def test_tokens_sum_to_scores_and_an_empty_target_is_the_end_symbol_alone():
    rescorer = rescorer_of()
    scores, tokens = rescorer(PAIRS), rescorer.tokens(PAIRS)
    assert [sum(each.log_probs) for each in tokens] == pytest.approx(scores, abs=1e-9)
    assert [each.pieces for each in tokens[:2]] == [(*"cab d", "</s>"), ("</s>",)]
    assert len(set(scores)) == 4 and max(scores) < 0


def test_a_blank_source_has_only_the_empty_translation_as_in_decoding():
    pairs = [("", ""), (" ", ""), ("  ", "ab"), ("a", " ")]
    none, blank, other, space = rescorer_of().tokens(pairs)
    assert none == blank and none.pieces == () and none.log_prob == 0
    assert other.log_prob == -math.inf and len(other.pieces) == 3
    assert space.pieces == (" ", "</s>") and math.isfinite(space.log_prob)
    assert translator_of().scored([" "])[0].tokens == blank
    assert rescorer_of()(pairs)[:3] == [0, 0, -math.inf]


@pytest.mark.parametrize("decode", [
    {"method": "greedy"},
    pytest.param({"method": "sample", "temperature": 2.0, "seed": 3}, marks=pytest.mark.slow),
    pytest.param(
        {"method": "beam", "beam_size": 3, "no_repeat_ngram": 2}, marks=pytest.mark.slow
    ),
], ids=["greedy", "sample", "beam"])  # fmt: skip
def test_the_scores_of_translations_are_those_of_their_ids(decode):
    translator, sources = translator_of(**decode), ["abc", "ba kl", "a", ""]
    found = translator.scored(sources)
    assert [each.text for each in found] == translator(sources)
    ids = [np.array([TOKENIZER.vocabulary_of("target").index(piece) for piece in each.tokens.pieces
                     if piece != "</s>"], np.int32) for each in found]  # fmt: skip
    ended = [each.tokens.pieces[-1:] == ("</s>",) for each in found]
    assert any(ended) and (decode["method"] != "greedy" or not all(ended[:3]))
    same = rescorer_of().of_ids(TOKENIZER.encode(sources), ids, ended=ended)
    assert [each.tokens for each in found] == same


def test_the_score_of_a_beam_is_that_of_its_ids_with_its_penalty():
    translator = translator_of(method="beam", beam_size=3, alpha=0.7, penalty="power")
    sources = TOKENIZER.encode([source for source, _ in PAIRS])
    found = translator.n_best_of_ids(sources, 2)
    rescorer, plain = rescorer_of(alpha=0.7, penalty="power"), rescorer_of()
    texts = [(ids, *best) for ids, row in zip(sources, found, strict=True) for best in row]
    ids = TOKENIZER.encode([text for _, text, _ in texts])
    ended, cut = (
        rescorer.of_ids([source for source, *_ in texts], ids, ended=ended)
        for ended in (True, False)
    )
    chosen = []
    for (*_, score), *tokens in zip(texts, ended, cut, strict=True):
        distance = [abs(rescorer.score(each) - score) for each in tokens]
        assert min(distance) < 1e-4 < max(distance)
        chosen.append(int(np.argmin(distance)))
        for each in tokens:
            if not each.pieces:
                continue
            penalty = beam.length_penalty(float(len(each.pieces)), alpha=0.7, kind="power")
            assert rescorer.score(each) == pytest.approx(plain.score(each) / penalty)
    assert 0 in chosen  # an output with an end symbol


@pytest.mark.slow
def test_both_directions_are_added_and_written_first():
    reverse = rescorer_of(d_ff=13)
    both = rescore.Rescorer(run_of(), reverse=reverse)
    forward, backward = rescorer_of()(PAIRS), reverse([pair[::-1] for pair in PAIRS])
    assert both(PAIRS) == pytest.approx([a + b for a, b in zip(forward, backward, strict=True)])
    (line, *_), _ = lines_of(both, as_lines())
    values = [float(value) for value in line.split("\t")]
    ppl = math.exp(-forward[0] / 6)
    assert values == pytest.approx([forward[0] + backward[0], forward[0], backward[0], ppl, 6])
    (line,), _ = lines_of(both, ["abc\tcab d"], "--format=jsonl")
    assert list(json.loads(line)) == ["score", "forward", "backward", "perplexity", "tokens"]


@pytest.mark.parametrize(("languages", "message"), [
    (("en", "de"), r"reverse: None has the source language 'en', expected 'de'"),
    (("de", "fr"), r"reverse: None has the target language 'fr', expected 'en'"),
])  # fmt: skip
def test_a_reverse_run_of_other_languages_is_refused_by_name(languages, message):
    forward = run_of(data=with_data(languages=("en", "de")))
    of_reverse = rescore.Rescorer(run_of(data=with_data(languages=languages)))
    with pytest.raises(InputError, match=message):
        rescore.Rescorer(forward, reverse=of_reverse)
    fitting = rescore.Rescorer(run_of(data=with_data(languages=("de", "en"))))
    rescore.Rescorer(forward, reverse=fitting)


def test_models_without_a_probability_of_texts_are_refused_by_name():
    for changes, message in [
        ({"architecture": "encoder_classifier", "num_classes": 3}, "encoder_classifier"),
        ({"decoder": "masked"}, "model.decoder='causal', this one is 'masked'"),
    ]:
        run = run_of()
        config = dataclasses.replace(
            run.config, model=dataclasses.replace(run.config.model, **changes)
        )
        with pytest.raises(InputError, match=message):
            rescore.Rescorer(dataclasses.replace(run, config=config))
    with pytest.raises(InputError, match=r"reverse: None has model\.architecture='decoder_lm'"):
        rescore.Rescorer(run_of("decoder_lm"), reverse=rescorer_of())


def test_words_have_the_surprisal_of_their_tokens_in_bits_and_their_characters():
    text = " ab  c\u00e9 "  # the last letter is unknown
    rescorer = rescorer_of("decoder_lm")
    ((first, second),) = rescorer.words([text])
    (tokens,) = rescorer.tokens([text])
    bits = -np.array(tokens.log_probs) / np.log(2)
    assert (first.word, first.start, first.end, first.tokens) == ("ab", 1, 3, 3)
    assert (second.word, second.start, second.end, second.tokens) == ("c\u00e9", 5, 7, 5)
    assert [first.surprisal, second.surprisal] == pytest.approx([bits[:3].sum(), bits[3:8].sum()])
    answer = lines_of(rescorer, ["", text], "--surprisal")
    assert answer.lines[1].split("\t") == [
        *("2", "2", "c\u00e9", f"{second.surprisal:.6f}"), *("5", "5", "7")
    ]  # fmt: skip


def test_a_language_model_scores_each_text_alone_and_takes_long_ones_only_with_windows():
    texts = ["abc", "", "a" * (LONGEST - 1)]
    rescorer = rescorer_of("decoder_lm")
    alone = [rescorer([text])[0] for text in texts]
    assert rescorer(texts) == pytest.approx(alone, abs=1e-5)
    with pytest.raises(InputError, match=f"^text 1: {LONGEST} tokens"):
        rescorer(["a" * LONGEST])
    windows = rescorer_of("decoder_lm", data=with_data(windows=LONGEST))
    assert windows(texts) == pytest.approx(alone, abs=1e-5)
    assert len(windows.tokens(["ab" * LONGEST])[0].pieces) == 2 * LONGEST + 1
    overlapping = rescorer_of("decoder_lm", data=with_data(windows=LONGEST), stride=3)
    first, other = windows.tokens(["abc d" * 7])[0], overlapping.tokens(["abc d" * 7])[0]
    assert first.log_probs[:LONGEST] == pytest.approx(other.log_probs[:LONGEST], abs=1e-5)
    assert first.pieces == other.pieces and abs(first.log_prob - other.log_prob) > 1e-3


@pytest.mark.parametrize(("options", "message"), [
    ({"penalty": "wu"}, "penalty: has no effect with alpha=0"),
    ({"penalty": "log", "alpha": 1.0}, "penalty: expected wu or power, got 'log'"),
    ({"alpha": -1.0}, "alpha: expected 0 or more"),
    ({"stride": 3}, "stride: applies only to a language model with data.windows"),
])  # fmt: skip
def test_options_without_an_effect_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        rescore.Rescorer(run_of(), **options)
    windows = run_of("decoder_lm", data=with_data(windows=LONGEST))
    with pytest.raises(InputError, match=r"stride: expected at most data\.windows = 16"):
        rescore.Rescorer(windows, stride=17)


@pytest.mark.parametrize(("call", "message"), [
    (lambda r: r("ab"), "pairs: expected a list of pairs"),
    (lambda r: r(["ab"]), "pair 1: expected \\(source, target\\), got 'ab'"),
    (lambda r: r([("a", 3)]), "target 1: expected a text"),
    (lambda r: r.of_ids(None, [np.array([5])]), "sources: expected one a target, 1, got None"),
    (lambda r: r.of_ids([[5]], [[5]], ended=[True, False]), "ended: expected one a target"),
    (lambda r: r.of_ids([[5] * 16], [[5]]), "source 1: 17 tokens with its end symbol"),
    (lambda r: r.of_ids([[5]], [[5] * 16]), "target 1: 17 tokens with its end symbol"),
])  # fmt: skip
def test_wrong_arguments_are_one_message(call, message):
    with pytest.raises(InputError, match=message):
        call(rescorer_of())


def test_scores_of_translations_exclude_options_that_leave_them_unclear():
    for options, message in [
        ({"scores": True, "n_best": 1}, "--n_best: its lines have no place for what --scores"),
        ({"scores": True, "mbr": 2}, "--scores: its lines have no place for what --mbr writes"),
        ({"scores": True, "alignments": {}}, "--scores: its lines have no place for what --align"),
        ({"token_scores": True, "long": "split"}, "--long=split: .* leave out --token_scores"),
        ({"alignments": {}, "long": "split"}, "--long=split: .* leave out --alignments"),
    ]:
        with pytest.raises(InputError, match=message):
            translate_lines.lines_of(translator_of(method="beam", beam_size=3), **options)
    answer = translate_lines.lines_of(translator_of(), token_scores=True)
    (line,) = answer(Window(["abc"])).lines
    (found,) = translator_of().scored(["abc"])
    score, text, pieces, log_probs = line.split("\t")
    assert (float(score), text) == (pytest.approx(found.tokens.log_prob, abs=1e-6), found.text)
    assert len(pieces.split(" ")) == len(log_probs.split(" ")) == len(found.tokens.pieces)
    plain = translate_lines.lines_of(translator_of(), scores=True)(Window(["abc"])).lines
    assert plain == [f"{score}\t{text}"]
