"""Subword sampling: a sample depends only on seed, epoch, example and side."""

import random
import threading

import numpy as np
import pytest

from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.subwords import SubwordSampler, planned
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS

WORDS = "Haus Baum Katze Hund Garten Fenster Wasser Feuer Himmel Straße Bruder Schwester".split()
WORDS += ["Kirche", "Schule", "\u2581"]
RANDOM = random.Random(0)
TEXTS = [" ".join(RANDOM.choices(WORDS, k=RANDOM.randint(3, 9))) for _ in range(211)]
STRENGTH = {"bpe": 0.3, "unigram": 0.02}
SOURCE, TARGET = TEXTS, TEXTS[3:] + TEXTS[:3]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokens(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    tokenizer.train(TEXTS, path, vocab_size=300, kind=request.param)
    made = Tokenizer(path)
    made.kind = request.param
    return made


def read(numbers):
    return Examples(source=[SOURCE[i] for i in numbers], target=[TARGET[i] for i in numbers])


def make_sampler(tokens, *, read=read, seed=5, start=()):
    return SubwordSampler(
        read, tokens, kind=tokens.kind, strength=STRENGTH[tokens.kind], seed=seed, start=start
    )


def sampled(sampler, examples, epoch):
    return {
        side: [row.tolist() for row in rows]
        for side, rows in sampler(np.array(examples), epoch).items()
    }


def test_a_sample_is_the_same_text_in_other_pieces(tokens):
    sides = make_sampler(tokens)(np.arange(211), 0)
    assert sides.keys() == {"source", "target"}
    for side, texts in (("source", SOURCE), ("target", TARGET)):
        assert tokens.decode(sides[side]) == texts
        usual = Ragged.of(tokens.encode(texts))
        differ = [
            sample.tolist() != ids.tolist() for sample, ids in zip(sides[side], usual, strict=True)
        ]
        assert np.mean(differ) > 0.7
        assert sides[side].lengths().sum() > usual.lengths().sum()


def test_a_sample_is_independent_of_earlier_and_simultaneous_samples(tokens):
    sampler = make_sampler(tokens)
    together = sampled(sampler, range(211), 3)
    for examples in ([7], [210, 7, 0], list(range(211))[::-1]):
        for side, rows in sampled(sampler, examples, 3).items():
            assert rows == [together[side][i] for i in examples]
    in_a_thread = []
    thread = threading.Thread(
        target=lambda: in_a_thread.append(sampled(make_sampler(tokens), range(211), 3))
    )
    thread.start()
    thread.join()
    assert in_a_thread == [together]


def test_epochs_seeds_sides_and_examples_differ(tokens):
    first = sampled(make_sampler(tokens), range(211), 0)
    for other in (
        sampled(make_sampler(tokens), range(211), 1),
        sampled(make_sampler(tokens, seed=6), range(211), 0),
    ):
        assert (
            np.mean([a != b for a, b in zip(first["source"], other["source"], strict=True)]) > 0.8
        )
    same_text = make_sampler(
        tokens, read=lambda numbers: Examples(source=[TEXTS[0]] * 9, target=[TEXTS[0]] * 9)
    )
    sides = sampled(same_text, range(9), 0)
    rows = [tuple(row) for side in sides.values() for row in side]
    assert len(set(rows)) > 9


def test_a_higher_dropout_of_merges_gives_more_pieces(tmp_path):
    tokenizer.train(TEXTS, tmp_path / "model", vocab_size=300, kind="bpe")
    pieces = [
        SubwordSampler(read, Tokenizer(tmp_path / "model"), kind="bpe", strength=p, seed=5)(
            np.arange(211), 0
        )["source"]
        .lengths()
        .sum()
        for p in (0.01, 0.1, 0.4, 0.99)
    ]
    assert pieces == sorted(pieces) and len(set(pieces)) == 4
    # an escaped character is two, and each text has a space in front
    letters = sum(len(text.replace("\u2581", "..")) + 1 for text in SOURCE)
    assert pieces[-1] == pytest.approx(letters, rel=0.05)


def test_a_sample_of_a_classified_text_starts_with_its_start_symbol(tokens):
    plain, started = (
        sampled(make_sampler(tokens, start=start), range(5), 0) for start in ((), (BOS,))
    )
    assert started["source"] == [[BOS, *row] for row in plain["source"]]


def test_the_planned_growth_suffices_for_most_samples(tokens):
    usual = {"source": Ragged.of(tokens.encode(SOURCE)), "target": Ragged.of(tokens.encode(TARGET))}
    sampler = make_sampler(tokens)
    growth = sampler.growth(usual, 10_000)
    for side, ids in sampler(np.arange(211), 0).items():
        fits = ids.lengths() <= planned(usual[side].lengths(), growth[side], 10_000)
        assert (ids.lengths() <= usual[side].lengths()).mean() < 0.5
        assert fits.mean() >= 0.9 and growth[side] > 1
    assert make_sampler(tokens).growth(usual, 10_000) == growth


def test_texts_too_long_for_every_row_are_not_part_of_the_growth(tokens):
    usual = {"source": Ragged.of(tokens.encode(SOURCE)), "target": Ragged.of(tokens.encode(TARGET))}
    used = []
    sampler = make_sampler(tokens, read=lambda numbers: used.extend(numbers) or read(numbers))
    longest = int(np.median(usual["source"].lengths()))
    growth = sampler.growth(usual, longest)
    assert used == [
        i for i in range(211) if max(usual[side].lengths()[i] for side in usual) <= longest
    ]
    assert 0 < len(used) < 211 and all(growth[side] > 1 for side in usual)
    assert sampler.growth(usual, 0) == {"source": 1.0, "target": 1.0}


def test_planned_lengths_grow_but_a_text_that_fits_still_fits():
    assert planned(np.array([0, 1, 10, 17, 19, 20, 31]), 1.25, 20).tolist() == [
        0,
        2,
        13,
        20,
        20,
        20,
        31,
    ]
    assert planned(np.array([3, 7]), 1.0, 20).tolist() == [3, 7]
