"""Texts cut anew: what is drawn depends on seed, epoch, example and side, and on nothing that came before."""

import random
import threading

import numpy as np
import pytest

from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.subwords import Drawing, planned
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.fields import BOS

WORDS = "Haus Baum Katze Hund Garten Fenster Wasser Feuer Himmel Straße Bruder Schwester Kirche Schule \u2581".split()
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


def drawing(tokens, *, read=read, seed=5, start=()):
    return Drawing(read, tokens, kind=tokens.kind, strength=STRENGTH[tokens.kind], seed=seed, start=start)


def drawn(draw, examples, epoch):
    return {side: [row.tolist() for row in rows] for side, rows in draw(np.array(examples), epoch).items()}


def test_what_is_drawn_is_the_text_in_other_pieces(tokens):
    sides = drawing(tokens)(np.arange(211), 0)
    assert sides.keys() == {"source", "target"}
    for side, texts in (("source", SOURCE), ("target", TARGET)):
        assert tokens.decode(sides[side]) == texts
        usual = Ragged.of(tokens.encode(texts))
        others = [drawn.tolist() != ids.tolist() for drawn, ids in zip(sides[side], usual, strict=True)]
        assert np.mean(others) > 0.7
        assert sides[side].lengths().sum() > usual.lengths().sum()


def test_a_draw_is_a_function_of_its_example_whatever_is_drawn_before_or_beside_it(tokens):
    draw = drawing(tokens)
    together = drawn(draw, range(211), 3)
    for examples in ([7], [210, 7, 0], list(range(211))[::-1]):
        for side, rows in drawn(draw, examples, 3).items():
            assert rows == [together[side][i] for i in examples]
    in_a_thread = []
    thread = threading.Thread(target=lambda: in_a_thread.append(drawn(drawing(tokens), range(211), 3)))
    thread.start()
    thread.join()
    assert in_a_thread == [together]


def test_epochs_seeds_sides_and_examples_differ(tokens):
    first = drawn(drawing(tokens), range(211), 0)
    for other in (drawn(drawing(tokens), range(211), 1), drawn(drawing(tokens, seed=6), range(211), 0)):
        assert np.mean([a != b for a, b in zip(first["source"], other["source"], strict=True)]) > 0.8
    same_text = drawing(tokens, read=lambda numbers: Examples(source=[TEXTS[0]] * 9, target=[TEXTS[0]] * 9))
    sides = drawn(same_text, range(9), 0)
    rows = [tuple(row) for side in sides.values() for row in side]
    assert len(set(rows)) > 9


def test_the_stronger_the_dropout_of_merges_the_more_pieces(tmp_path):
    tokenizer.train(TEXTS, tmp_path / "model", vocab_size=300, kind="bpe")
    pieces = [
        Drawing(read, Tokenizer(tmp_path / "model"), kind="bpe", strength=p, seed=5)(np.arange(211), 0)["source"]
        .lengths()
        .sum()
        for p in (0.01, 0.1, 0.4, 0.99)
    ]
    assert pieces == sorted(pieces) and len(set(pieces)) == 4
    letters = sum(len(text.replace("\u2581", "..")) + 1 for text in SOURCE)  # one that is escaped, and the first space
    assert pieces[-1] == pytest.approx(letters, rel=0.05)


def test_a_text_to_classify_starts_with_its_start_symbol_here_too(tokens):
    plain, started = (drawn(drawing(tokens, start=start), range(5), 0) for start in ((), (BOS,)))
    assert started["source"] == [[BOS, *row] for row in plain["source"]]


def test_the_head_room_holds_most_texts_as_they_are_drawn(tokens):
    usual = {"source": Ragged.of(tokens.encode(SOURCE)), "target": Ragged.of(tokens.encode(TARGET))}
    draw = drawing(tokens)
    growth = draw.head_room(usual, 10_000)
    for side, ids in draw(np.arange(211), 0).items():
        fits = ids.lengths() <= planned(usual[side].lengths(), growth[side], 10_000)
        assert (ids.lengths() <= usual[side].lengths()).mean() < 0.5
        assert fits.mean() >= 0.9 and growth[side] > 1
    assert drawing(tokens).head_room(usual, 10_000) == growth


def test_texts_that_fit_no_row_are_not_cut_to_measure_the_head_room(tokens):
    usual, cut = {"source": Ragged.of(tokens.encode(SOURCE)), "target": Ragged.of(tokens.encode(TARGET))}, []
    draw = drawing(tokens, read=lambda numbers: cut.extend(numbers) or read(numbers))
    longest = int(np.median(usual["source"].lengths()))
    growth = draw.head_room(usual, longest)
    assert cut == [i for i in range(211) if max(usual[side].lengths()[i] for side in usual) <= longest]
    assert 0 < len(cut) < 211 and all(growth[side] > 1 for side in usual)
    assert draw.head_room(usual, 0) == {"source": 1.0, "target": 1.0}


def test_lengths_are_planned_with_head_room_but_what_fits_still_fits():
    assert planned(np.array([0, 1, 10, 17, 19, 20, 31]), 1.25, 20).tolist() == [0, 2, 13, 20, 20, 20, 31]
    assert planned(np.array([3, 7]), 1.0, 20).tolist() == [3, 7]
