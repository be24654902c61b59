"""Segmentation in numpy equals SentencePiece's without randomness, else the papers' frequencies."""

import collections
import math
import random

import numpy as np
import pytest

from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.segmentation import Segmenter, mixed, uniform
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import Tokenizer, escape

WORDS = "anna otto regal lager nebel Straße Bäume Haus Katze Hund Garten Fenster 1999 7".split()
WORDS += ["\u2581", "a\x00b", "", "x", "\U0001f468\u200d"]
# Strengths without randomness: no merge is skipped, or a power of the likelihoods that leaves only
# the best segmentation.
CERTAIN = {"bpe": 0.0, "unigram": 500.0}


def sentences(number, seed):
    rng = random.Random(seed)
    return [
        "".join(rng.choice([" ", "", "  "]) + rng.choice(WORDS) for _ in range(rng.randint(0, 9)))
        for _ in range(number)
    ]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    tokenizer.train(sentences(401, seed=0), path, vocab_size=340, kind=request.param)
    tokens = Tokenizer(path)
    return tokens, Segmenter(request.param, *tokens.table()), CERTAIN[request.param]


def keys(number):
    return mixed(np.arange(number, dtype=np.uint64), 7)


def cut(segmenter, texts, strength):
    return [
        row.tolist()
        for row in segmenter([escape(text) for text in texts], keys(len(texts)), strength)
    ]


def test_without_randomness_the_pieces_are_those_of_sentencepiece(trained):
    tokens, segmenter, certain = trained
    odd = [
        "",
        " ",
        "   ",
        "\u65e5\u672c\u8a9e",
        "\u2581\u2581a",
        "<s></s>",
        "<0x41>",
        "\uf8ff\ufffd",
        "e\u0301\ufeff",
    ]
    texts = [*odd, *sentences(997, seed=1)]
    usual = [ids.tolist() for ids in tokens.encode(texts)]
    assert cut(segmenter, texts, certain) == usual
    assert cut(segmenter, texts, 0.3) != usual


def test_every_sample_decodes_to_the_text(trained):
    tokens, segmenter, _ = trained
    texts = sentences(997, seed=2)
    for strength in (0.01, 0.1, 0.5, 0.99):
        assert tokens.decode(cut(segmenter, texts, strength)) == texts


def test_no_texts_and_empty_texts_have_no_pieces(trained):
    _, segmenter, _ = trained
    assert cut(segmenter, [], 0.3) == [] and cut(segmenter, ["", ""], 0.3) == [[], []]


BYTES = range(100, 356)


def shares(segmenter, text, strength, number=20_011):
    """Returns the frequency of each segmentation of `text`."""
    rows = segmenter([text] * number, keys(number), strength)
    counts = collections.Counter(tuple(row.tolist()) for row in rows)
    return {way: count / number for way, count in counts.items()}


def assert_shares(seen, expected):
    assert sum(expected.values()) == pytest.approx(1)
    assert seen.keys() <= expected.keys()
    for way, share in expected.items():
        assert seen.get(way, 0) == pytest.approx(
            share, abs=4.5 * math.sqrt(share * (1 - share) / 20_011) + 1e-9
        ), way


def test_bpe_dropout_skips_each_possible_merge_with_its_probability():
    """Compares with all outcomes of Algorithm 1; the merge ranks are those in `rank`."""
    ids = {
        "\u2581": 0,
        "a": 1,
        "b": 2,
        "c": 3,
        "ab": 4,
        "bc": 5,
        "abc": 6,
        "\u2581a": 7,
        "\u2581ab": 8,
    }
    rank = {"ab": 0, "bc": 1, "abc": 2, "\u2581ab": 3, "\u2581a": 4}
    pieces = {piece: (id, -float(rank.get(piece, 9))) for piece, id in ids.items()}
    p = 0.3

    def outcomes(word):
        """Returns the probability of each final segmentation, over all sets of skipped merges."""
        possible = [i for i in range(len(word) - 1) if word[i] + word[i + 1] in rank]
        found = collections.Counter()
        stay = 1.0
        for i in sorted(possible, key=lambda i: rank[word[i] + word[i + 1]]):
            merged = (*word[:i], word[i] + word[i + 1], *word[i + 2 :])
            for way, share in outcomes(merged).items():
                found[way] += stay * (1 - p) * share
            stay *= p
        found[tuple(ids[piece] for piece in word)] += stay
        return found

    expected = outcomes(("\u2581", "a", "b", "c"))
    assert len(expected) > 5
    assert_shares(shares(Segmenter("bpe", pieces, BYTES), "abc", p), expected)


@pytest.mark.parametrize("alpha", [0.2, 0.7])
def test_a_segmentation_is_sampled_by_the_power_of_its_likelihood(alpha):
    score = {
        "\u2581": -2.0,
        "a": -1.5,
        "b": -2.5,
        "ab": -2.0,
        "\u2581a": -1.0,
        "ba": -3.0,
        "\u2581aba": -4.0,
    }
    pieces = {piece: (id, value) for id, (piece, value) in enumerate(score.items())}

    def ways(text):
        if not text:
            return [()]
        ends = [end for end in range(1, len(text) + 1) if text[:end] in score]
        return [(text[:end], *rest) for end in ends for rest in ways(text[end:])]

    weights = {
        way: math.exp(alpha * sum(score[piece] for piece in way)) for way in ways("\u2581abab")
    }
    assert len(weights) > 7
    expected = {
        tuple(pieces[p][0] for p in way): w / sum(weights.values()) for way, w in weights.items()
    }
    assert_shares(shares(Segmenter("unigram", pieces, BYTES), "abab", alpha), expected)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_if_a_piece_crosses_a_space_a_text_is_one_word(kind):
    pieces = {
        "\u2581": (0, -9.0),
        "a": (1, -9.0),
        "\u2581a\u2581a": (2, -1.0),
        "\u2581a": (3, -2.0),
    }
    assert cut(Segmenter(kind, pieces, BYTES), ["a a", "a", "aa a"], CERTAIN[kind]) == [
        [2],
        [3],
        [3, 1, 3],
    ]


def test_a_character_without_a_piece_becomes_bytes():
    pieces = {"\u2581": (0, -1.0), "a": (1, -1.0)}
    for kind in CERTAIN:
        rows = cut(Segmenter(kind, pieces, BYTES), ["aéa", "é\U0001f468", "a"], 0.3)
        accent, man = ([100 + byte for byte in text.encode()] for text in ("é", "\U0001f468"))
        assert rows == [[0, 1, *accent, 1], [0, *accent, *man], [0, 1]]


def test_keys_of_different_inputs_are_different_and_uniform():
    numbers = np.arange(10_007, dtype=np.uint64)
    streams = [
        mixed(numbers, seed, epoch, side)
        for seed in (0, 2**32 - 1)
        for epoch in (0, 1)
        for side in (0, 1)
    ]
    assert len(np.unique(np.concatenate(streams))) == 8 * 10_007
    samples = [uniform(streams[0], turn) for turn in (0, 1, 2)]
    for sample in samples:
        assert sample.min() >= 0 and sample.max() < 1
        np.testing.assert_allclose(np.histogram(sample, 7, (0, 1))[0], 10_007 / 7, rtol=0.1)
    for stream in [*streams[1:], samples[1]]:
        assert abs(np.corrcoef(streams[0].astype(float), stream.astype(float))[0, 1]) < 0.05
    assert abs(np.corrcoef(samples[0], samples[1])[0, 1]) < 0.05
