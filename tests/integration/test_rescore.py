"""Scores of given texts: pairs and texts, both directions, words, files; and of translations."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
import runs

from flaxformer_lite import rescore, trained, translate
from flaxformer_lite.cli import translate_lines
from flaxformer_lite.cli.rescore_flags import parse_rescore
from flaxformer_lite.cli.rescore_lines import LineRescorer
from flaxformer_lite.config import Config, DataConfig, DecodeConfig, ModelConfig
from flaxformer_lite.data.tokens.symbol_tokenizer import SymbolTokenizer, counted
from flaxformer_lite.decoding import beam
from flaxformer_lite.fields import EOS
from flaxformer_lite.lines import line_job
from flaxformer_lite.lines.line_job import LineJob
from flaxformer_lite.lines.line_windows import Window
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import meshes

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LETTERS = "abcdefg hijkl"
TOKENIZER = SymbolTokenizer(counted([LETTERS], kind="char"))
LONGEST = 16  # tokens with the end symbol: all texts have one padded length
MODEL = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    d_model=14,
    num_heads=7,
    d_ff=11,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=LONGEST,
)
PAIRS = [("abc", "cab d"), ("ba", ""), ("a b", "b"), ("kl", "lk ah")]


@functools.cache
def run_of(architecture="encoder_decoder", *, data=(), d_ff=11, **decode):
    config = dataclasses.replace(MODEL, architecture=architecture, d_ff=d_ff)
    model, params = runs.varied_model(config)

    def with_ends(path, leaf):
        """Makes the end symbol more probable, so that some outputs have it and others are cut."""
        return leaf.at[EOS].multiply(-3) if "embedding" in jax.tree_util.keystr(path) else leaf

    params = jax.tree_util.tree_map_with_path(with_ends, params)
    whole = Config(
        model=config,
        data=DataConfig(
            **{
                "vocab_size": config.vocab_size,
                "dataset": "x",
                "tokens_per_batch": 8 * LONGEST,
                **dict(data),
            }
        ),
        decode=DecodeConfig(**{"max_extra_length": 5, **decode}),
    )
    mesh = meshes.make_mesh(1)
    return trained.Trained(whole, TOKENIZER, model, jax.device_put(params), mesh, None)


def with_data(**data):
    return tuple(data.items())


@functools.cache
def rescorer_of(architecture="encoder_decoder", *, data=(), d_ff=11, **options):
    return rescore.Rescorer(run_of(architecture, data=data, d_ff=d_ff), **options)


@functools.cache
def translator_of(**decode):
    return translate.Translator(run_of(**decode))


def request_of(*flags):
    return parse_rescore(["--workdir=w", *flags])


def lines_of(rescorer, lines, *flags):
    """The output of the command for lines of a file."""
    return LineRescorer(rescorer, request_of(*flags))(Window(lines, 0, "in.tsv, line"))


def as_lines(pairs=PAIRS):
    return ["\t".join(pair) for pair in pairs]


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
    {"method": "sample", "temperature": 2.0, "seed": 3},
    {"method": "beam", "beam_size": 3, "no_repeat_ngram": 2},
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


def test_columns_are_score_perplexity_and_tokens_then_pieces_and_their_scores():
    lines, _ = lines_of(rescorer_of(), as_lines(), "--tokens")
    objects, _ = lines_of(rescorer_of(), as_lines(), "--tokens", "--format=jsonl")
    for line, text, (_, target) in zip(lines, objects, PAIRS, strict=True):
        score, perplexity, count, pieces, log_probs = line.split("\t")
        found = json.loads(text)
        assert list(found) == ["score", "perplexity", "tokens", "pieces", "log_probs"]
        assert found["pieces"] == [*target, "</s>"] and found["tokens"] == int(count)
        assert pieces.replace("<0x20>", "_").split(" ") == [*target.replace(" ", "_"), "</s>"]
        assert len(pieces.split(" ")) == int(count) == len(log_probs.split(" "))
        assert sum(map(float, log_probs.split(" "))) == pytest.approx(float(score), abs=1e-5)
        assert math.fsum(found["log_probs"]) == pytest.approx(found["score"], abs=1e-12)
        assert float(perplexity) == pytest.approx(math.exp(-float(score) / int(count)), rel=1e-4)


@pytest.mark.parametrize(("line", "tabs"), [("abc", 0), ("a\tb\tc", 2)])
def test_a_malformed_line_is_refused_with_its_file_and_number(line, tabs):
    with pytest.raises(InputError, match=rf"^in\.tsv, line 2: expected .* got {tabs} tabs"):
        lines_of(rescorer_of(), ["a\tb", line])


@pytest.mark.parametrize("pair", [("a" * LONGEST, "b"), ("b", "a" * LONGEST)])
def test_a_long_line_is_refused_with_its_number_or_skipped_without_a_score(pair):
    lines = as_lines([PAIRS[0], pair, PAIRS[2]])
    with pytest.raises(InputError, match=r"in\.tsv, line 2: 16 tokens.*--long=skip"):
        lines_of(rescorer_of(), lines)
    answer = lines_of(rescorer_of(), lines, "--long=skip")
    whole = lines_of(rescorer_of(), as_lines())
    assert answer.split == 1
    assert answer.lines == [whole.lines[0], "nan\tnan\t0", whole.lines[2]]
    objects = lines_of(rescorer_of(), lines, "--long=skip", "--format=jsonl").lines
    assert json.loads(objects[1]) == {"score": None, "perplexity": None, "tokens": 0}
    words = lines_of(rescorer_of(), ["a b\tb a", "\t".join(pair)], "--surprisal", "--long=skip")
    assert words.lines[2].split("\t")[3] == "nan"


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


def test_two_files_are_read_together_and_resumed(tmp_path):
    source, target, output = (tmp_path / name for name in ("a.txt", "b.txt", "out.tsv"))
    source.write_bytes(b"\xef\xbb\xbfabc\r\nba\na b\nkl")
    target.write_bytes("".join(f"{text}\n" for _, text in PAIRS).encode())
    job = LineJob(source, output, window=3, target=target)
    request = request_of(f"--input={source}", f"--target={target}", f"--output={output}")
    answer, windows = LineRescorer(rescorer_of(), request), []

    def failing(window):
        windows.append(window.first)
        if len(windows) == 2:
            raise KeyboardInterrupt
        return answer(window)

    asked = dict(request.settings)
    with pytest.raises(KeyboardInterrupt):
        line_job.run(job, failing, asked=lambda: asked)
    line_job.run(job, failing, asked=lambda: asked)
    assert windows == [0, 3, 3]
    assert output.read_text().splitlines() == lines_of(rescorer_of(), as_lines()).lines


def test_files_with_different_numbers_of_lines_are_refused(tmp_path):
    one, two = tmp_path / "1.txt", tmp_path / "2.txt"
    one.write_text("a\nb\n")
    two.write_text("a\n")
    for job, flag in (
        (LineJob(one, target=two), "--target"),
        (LineJob(two, target=one), "--input"),
    ):
        with pytest.raises(InputError, match=f"^{flag}=.*2.txt: 1 lines, and"):
            line_job.run(job, lambda window: pytest.fail("no window"), asked=dict)


@pytest.mark.parametrize(("flags", "message"), [
    (["--total", "--tokens"], "--tokens: has no effect with --total"),
    (["--surprisal", "--format=jsonl"], "--format: has no effect with --surprisal"),
    (["--surprisal", "--alpha=1"], "--alpha: has no effect with --surprisal"),
    (["--target=x"], "--target: requires --input"),
    (["--restart"], "--restart: requires --output"),
])  # fmt: skip
def test_flags_without_an_effect_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        request_of(*flags)


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
