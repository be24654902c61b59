"""BLEU by its definition, exact match, confidence intervals and p-values of known cases."""

import collections
import importlib.util
import os

import numpy as np
import pytest
import sacrebleu

from flaxformer_lite import scoring
from flaxformer_lite.system.errors import InputError

REFERENCES = ["der 3. Mai", "12,50 €", "vor 3 Tagen", "drei", "7 km"]
HYPOTHESES = ["der 3. Mai", "12,5 €", "vor 3 Tagen", "", "7 km"]

# Tokenized sentences: every punctuation mark is a token.
TOKENISED = [
    "der alte Bäcker öffnet morgens um fünf , bevor die Stadt erwacht .",
    "im Garten hinter dem Haus wachsen Kirschen , Birnen und ein Nussbaum .",
    "wer den Zug verpasst , nimmt den Bus über die Brücke .",
    "sie liest ihrem Bruder jeden Abend ein Kapitel vor .",
    "am Montag bleibt das Museum wegen einer Reparatur geschlossen .",
]
TRANSLATED = [
    "der Bäcker öffnet morgens um fünf , bevor die Stadt wach ist .",
    "im Garten hinter dem Haus wachsen Kirschen und ein Nussbaum .",
    "wer den Zug verpasst , fährt mit dem Bus über die Brücke .",
    "sie liest ihrem Bruder jeden Abend ein Kapitel vor .",
    "am Montag ist das Museum wegen einer Reparatur zu .",
]
OTHERS = [
    "der Bäcker öffnet morgens um fünf , bevor die Stadt wach ist .",
    "im Garten wachsen Kirschen und ein Nussbaum .",
    "ohne Zug fährt man mit dem Bus über die Brücke .",
    "jeden Abend liest sie ihrem Bruder vor .",
    "am Montag ist das Museum zu .",
]


def ngrams(tokens, n):
    return collections.Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def bleu_by_definition(hypotheses, references):
    """Papineni 2002: geometric mean of clipped n-gram precisions, times the brevity penalty."""
    hits, totals, length, closest = np.zeros(4), np.zeros(4), 0, 0
    for hypothesis, *texts in zip(hypotheses, *references, strict=True):
        tokens, texts = hypothesis.split(), [text.split() for text in texts]
        length += len(tokens)
        closest += min((abs(len(text) - len(tokens)), len(text)) for text in texts)[1]
        for n in range(1, 5):
            allowed = collections.Counter()
            for text in texts:
                allowed |= ngrams(text, n)
            hits[n - 1] += sum((ngrams(tokens, n) & allowed).values())
            totals[n - 1] += ngrams(tokens, n).total()
    assert (hits > 0).all()  # no smoothing
    return 100 * min(1.0, np.exp(1 - closest / length)) * np.exp(np.log(hits / totals).mean())


def test_exact_match_compares_characters():
    assert scoring.exact_matches(["a b", "a\u00a0b", "A"], [["a b", "a b", "a"]]).tolist() == [
        1,
        0,
        0,
    ]


def test_exact_match_accepts_any_of_several_references():
    assert scoring.exact_matches(["a", "b", "c"], [["a", "x", "y"], ["z", "b", "y"]]).tolist() == [
        1,
        1,
        0,
    ]


def test_scores_of_raw_text_are_those_of_sacrebleu_with_its_signatures():
    scores = scoring.score(HYPOTHESES, [REFERENCES])
    assert scores.values == {
        "exact_match": 3 / 5,
        "bleu": sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score,
        "chrf": sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score,
    }
    assert scores.signatures.keys() == {"bleu", "chrf"}
    assert scores.signatures["bleu"].startswith(
        "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:"
    )
    assert scores.signatures["chrf"].startswith(
        "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:"
    )


@pytest.mark.parametrize("tokenized", [False, True])
def test_perfect_translations_have_perfect_scores(tokenized):
    values = scoring.score(TOKENISED, [TOKENISED], tokenized=tokenized).values
    assert values.pop("exact_match") == 1
    assert values == pytest.approx(dict.fromkeys(values, 100))


def test_bleu_of_tokenized_text_follows_its_definition():
    values = scoring.score(TRANSLATED, [TOKENISED], tokenized=True).values
    expected = bleu_by_definition(TRANSLATED, [TOKENISED])
    assert 20 < expected < 80
    assert values == {"exact_match": 1 / 5, "bleu_tokenized": pytest.approx(expected, rel=1e-9)}


def test_bleu_with_several_references_follows_its_definition_and_is_higher():
    one, two = ([TOKENISED], [TOKENISED, OTHERS])
    scores = scoring.score(TRANSLATED, two, tokenized=True)
    assert scores.values["bleu_tokenized"] == pytest.approx(
        bleu_by_definition(TRANSLATED, two), rel=1e-9
    )
    assert scores.signatures["bleu_tokenized"].startswith("nrefs:2|")
    for tokenized in (True, False):
        lower, higher = (
            scoring.score(TRANSLATED, texts, tokenized=tokenized).values for texts in (one, two)
        )
        assert all(lower[name] < higher[name] for name in lower)


def test_raw_and_tokenized_bleu_have_different_names_and_values():
    glued = [
        [text.replace(" .", ".").replace(" ,", ",") for text in side]
        for side in (TRANSLATED, TOKENISED)
    ]
    raw, tokenised = (scoring.score(glued[0], glued[1:], tokenized=each) for each in (False, True))
    assert raw.values.keys() == {"exact_match", "bleu", "chrf"}
    assert tokenised.values.keys() == {"exact_match", "bleu_tokenized"}
    assert (
        "tok:13a" in raw.signatures["bleu"] and "tok:none" in tokenised.signatures["bleu_tokenized"]
    )
    assert abs(raw.values["bleu"] - tokenised.values["bleu_tokenized"]) > 1
    assert tokenised.values["bleu_tokenized"] == pytest.approx(
        bleu_by_definition(glued[0], glued[1:])
    )
    apart = [
        scoring.score(TRANSLATED, [TOKENISED], tokenized=each).values for each in (False, True)
    ]
    # 13a does not change tokenized text.
    assert apart[0]["bleu"] == pytest.approx(apart[1]["bleu_tokenized"])


def test_tokenized_text_is_scored_without_a_warning(caplog):
    many = TOKENISED[:1] * 120
    scoring.score(many, [many], tokenized=True)
    assert not caplog.records
    scoring.score(many, [many])
    assert any("detokenize" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("hypotheses", "references", "says"),
    [
        (
            ["a", "b"],
            [["a", "b"], ["a"]],
            "references 2: expected 2 lines, as many as the translations has, got 1.",
        ),
        ([], [[]], "the translations: expected a line for each sentence, got none."),
        (["a"], [], "the references: expected one text or more for each translation, got none."),
    ],
)
def test_different_numbers_of_lines_are_an_error_that_names_the_texts(hypotheses, references, says):
    for run in (scoring.score, lambda h, r: scoring.resample([h], r, bootstrap=99)):
        with pytest.raises(ValueError) as caught:
            run(hypotheses, references)
        assert str(caught.value) == says


# Resampling.

WORDS = [f"w{i}" for i in range(23)]


def corpus(count, wrong, seed=0):
    """Returns translations and references; a share of translations has half of its words wrong."""
    rng = np.random.default_rng(seed)
    references = [list(rng.choice(WORDS, rng.integers(5, 13))) for _ in range(count)]
    hypotheses = [list(text) for text in references]
    for text in hypotheses:
        if rng.random() < wrong:
            for position in rng.choice(len(text), len(text) // 2, replace=False):
                text[position] = "no"
    return [" ".join(text) for text in hypotheses], [" ".join(text) for text in references]


@pytest.mark.parametrize("tokenized", [False, True])
def test_the_interval_contains_the_score_and_narrows_with_more_sentences(tokenized):
    few, many = corpus(31, 0.5), corpus(620, 0.5)
    widths = []
    for hypotheses, references in (few, many):
        (scores,) = scoring.resample([hypotheses], [references], bootstrap=300, tokenized=tokenized)
        assert scores.values == scoring.score(hypotheses, [references], tokenized=tokenized).values
        assert scores.intervals.keys() == scores.values.keys() and scores.p_values == {}
        for name, (mean, half) in scores.intervals.items():
            assert abs(mean - scores.values[name]) < half
        widths.append({name: half for name, (_, half) in scores.intervals.items()})
    for name in widths[0]:
        assert 3 < widths[0][name] / widths[1][name] < 7  # sqrt(20) = 4.5


def test_the_interval_of_exact_match_is_binomial():
    hypotheses, references = corpus(401, 0.4)
    (scores,) = scoring.resample([hypotheses], [references], bootstrap=2000)
    share, (mean, half) = scores.values["exact_match"], scores.intervals["exact_match"]
    assert mean == pytest.approx(share, abs=0.005)
    assert half == pytest.approx(1.96 * np.sqrt(share * (1 - share) / 401), rel=0.1)


def test_resamples_depend_on_the_seed_which_is_in_the_signature():
    hypotheses, references = corpus(41, 0.5)
    first, same, other = (
        scoring.resample([hypotheses], [references], bootstrap=99, seed=seed)[0]
        for seed in (7, 7, 8)
    )
    assert first == same
    assert all(first.intervals[name] != other.intervals[name] for name in first.intervals)
    assert "bs:99|seed:7" in first.signatures["bleu"] and "bs:99|seed:8" in other.signatures["chrf"]


@pytest.mark.parametrize("before", [None, "3"])
def test_the_environment_is_restored(monkeypatch, before):
    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    if before:
        monkeypatch.setenv("SACREBLEU_SEED", before)
    scoring.resample([TRANSLATED], [TOKENISED], bootstrap=40, seed=7)
    assert os.environ.get("SACREBLEU_SEED") == before


def test_seed_0_is_an_error():
    with pytest.raises(ValueError, match="seed of resampling: expected 1 or more, got 0"):
        scoring.resample([TRANSLATED], [TOKENISED], bootstrap=40, seed=0)


def test_p_is_small_for_a_large_difference_larger_for_a_small_one_and_1_for_none():
    (good, references), (worse, _) = corpus(211, 0.3), corpus(211, 0.7)
    right = [i for i in range(211) if good[i] == references[i]]
    wrong = [i for i in range(211) if good[i] != references[i]]
    similar = list(good)  # wrong in 13 other sentences
    for i, j in zip(right[:13], wrong[:13], strict=True):
        similar[i], similar[j] = " ".join(reversed(references[i].split())), references[j]
    _, against_worse = scoring.resample([worse, good], [references], bootstrap=300)
    _, against_better = scoring.resample([good, worse], [references], bootstrap=300)
    _, against_similar = scoring.resample([similar, good], [references], bootstrap=300)
    baseline, against_itself = scoring.resample([good, good], [references], bootstrap=300)
    # Additional spaces change no score.
    spaced = [text if i in right else text.replace(" ", "  ") for i, text in enumerate(good)]
    assert spaced != good
    assert (
        scoring.resample([spaced, good], [references], bootstrap=300)[1].p_values
        == against_itself.p_values
    )
    assert baseline.p_values == {} and baseline.intervals == against_itself.intervals
    assert all(
        p < 0.01 for p in (*against_worse.p_values.values(), *against_better.p_values.values())
    )
    assert similar != good and against_similar.p_values["exact_match"] > 0.3
    assert against_itself.p_values == dict.fromkeys(("exact_match", "bleu", "chrf"), 1.0)


@pytest.mark.parametrize("differ", [1, 2, 3])
def test_few_sentences_that_differ_are_no_evidence(differ):
    """Of the 2^n swaps of n sentences, 2 keep the whole difference, so p is at least 2 / 2^n."""
    base, references = corpus(13, 0.5)
    better = [*references[:differ], *base[differ:]]
    assert sum(a != b for a, b in zip(base, better, strict=True)) == differ
    _, found = scoring.resample([base, better], [references], bootstrap=300)
    assert all(p >= 2 / 2**differ - 0.1 for p in found.p_values.values())
    assert found.p_values["bleu"] == max(2 / 2**differ, 1 / 301)


def test_five_percent_of_equal_systems_have_a_p_below_0_05(monkeypatch):
    # Only exact match, which is fast.
    monkeypatch.setattr(scoring, "corpus_metrics", lambda settings: {})
    rng, references = np.random.default_rng(3), ["x"] * 150
    sample = lambda: ["x" if hit else "y" for hit in rng.random(150) < 0.7]  # noqa: E731
    p = np.array(
        [
            scoring.resample([sample(), sample()], [references], bootstrap=200, seed=trial + 1)[
                1
            ].p_values["exact_match"]
            for trial in range(500)
        ]
    )
    assert 0.01 < (p < 0.05).mean() < 0.07 and 0.4 < (p < 0.5).mean() < 0.55 and p.max() == 1


CHINESE = ["今天天气很好,我们去公园散步。", "他每天早上七点起床,然后去上班。", "这本书非常有意思。"]


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("zh", "zh"),
        ("zh_Hans", "zh"),
        ("ZH-TW", "zh"),
        ("yue", "zh"),
        ("th", "char"),
        ("km", "char"),
        ("lo_LA", "char"),
        ("my", "char"),
        ("en", "13a"),
        ("de_CH", "13a"),
        ("txt", "13a"),
        ("", "13a"),
        (None, "13a"),
    ],
)
def test_the_tokenizer_follows_the_language(language, tokenizer):
    assert scoring.tokenizer_for(language) == tokenizer


@pytest.mark.parametrize(("language", "name"), [("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_japanese_and_korean_use_mecab_if_it_is_there_and_else_characters(
    language, name, monkeypatch, capsys
):
    scoring._say_without.cache_clear()
    for is_there, expected in ((True, name), (False, "char")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda module, there=is_there: object() if there else None
        )
        assert scoring.tokenizer_for(language) == scoring.tokenizer_for(language) == expected
    (line,) = capsys.readouterr().err.splitlines()
    assert f"its tokenizer '{name}' is not installed" in line and "flaxformer-lite[mecab]" in line


def test_a_perfect_chinese_translation_has_a_bleu_of_100_and_its_signature_names_the_tokenizer():
    scores = scoring.score(CHINESE, [CHINESE], tokenizer="zh")
    assert scores.values["bleu"] == pytest.approx(100) and "tok:zh" in scores.signatures["bleu"]
    other = [text[:-3] + "。" for text in CHINESE]
    characters = scoring.score(other, [CHINESE], tokenizer="char")
    assert 50 < characters.values["bleu"] < 100 and "tok:char" in characters.signatures["bleu"]
    assert scoring.score(other, [CHINESE]).values["bleu"] < 20  # a sentence is one word
    (resampled,) = scoring.resample([CHINESE], [CHINESE], bootstrap=40, tokenizer="zh")
    assert resampled.values == scores.values and "tok:zh" in resampled.signatures["bleu"]


def test_case_is_ignored_by_every_score_of_sacrebleu_if_wanted():
    upper = [text.upper() for text in TRANSLATED]
    lower = scoring.score(upper, [TOKENISED], lowercase=True, ter=True)
    as_is = scoring.score(TRANSLATED, [TOKENISED], ter=True)
    for name in ("bleu", "chrf", "ter"):
        assert lower.values[name] >= as_is.values[name] - 40 and "case:lc" in lower.signatures[name]
    assert lower.values["bleu"] > scoring.score(upper, [TOKENISED]).values["bleu"]


def test_ter_counts_edits_over_the_words_of_the_reference():
    edited = scoring.score(["a b c d x"], [["a b c d e f g h"]], ter=True)
    assert edited.values["ter"] == pytest.approx(100 * 4 / 8)  # 1 replaced, 3 missing
    characters = scoring.score(["天气很"], [["天气很好"]], tokenizer="zh", ter=True)
    assert (
        characters.values["ter"] == pytest.approx(25)
        and "asian:yes" in characters.signatures["ter"]
    )


def test_a_tokenizer_that_cannot_be_used_is_one_message(monkeypatch):
    def fail(**options):
        raise ImportError("Please install the Japanese extra\nfor this")

    monkeypatch.setattr(sacrebleu, "BLEU", fail)
    message = (
        r"^the tokenizer 'ja-mecab' of BLEU cannot be used: Please install the Japanese extra; "
        r"pip install 'flaxformer-lite\[mecab\]', or choose 'char'\.$"
    )
    with pytest.raises(InputError, match=message):
        scoring.score(["a"], [["a"]], tokenizer="ja-mecab")


def test_text_without_spaces_is_noticed(capsys):
    scoring.warn_if_unspaced(CHINESE)
    err = capsys.readouterr().err
    assert (
        err.startswith("warning: most letters are of a script without spaces")
        and "--tokenize" in err
    )
    for texts in (["สวัสดีครับ"], ["ສະບາຍດີ"], ["ជំរាបសួរ"], ["これはペンです"]):
        scoring.warn_if_unspaced(texts)
        assert capsys.readouterr().err
    for texts in (REFERENCES, [], ["12 ..."], ["한국어 문장입니다"], ["English 中文"]):
        scoring.warn_if_unspaced(texts)
        assert not capsys.readouterr().err
