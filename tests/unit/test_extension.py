"""Extended tokenizers: old ids and scores stay, old boundaries stay, new text gets pieces."""

import collections
import itertools
import random

import numpy as np
import pytest

from flaxformer_lite.data.tokens import extension, tokenizer
from flaxformer_lite.system.errors import InputError

OLD, NEW = 290, 325
# Texts of two languages that share letters; the second has characters that the first lacks.
WORDS = "der kleine Hund läuft über die grüne Wiese und springt durch den Reifen".split()
OTHERS = "le petit garçon marche à côté de la forêt avec son père et mange près".split()


def texts_of(words, count=300, seed=0):
    """Returns texts of 3 to 9 words, the first words the most often."""
    rng = random.Random(seed)
    weights = [1 / (1 + rank) for rank in range(len(words))]
    return [" ".join(rng.choices(words, weights, k=rng.randint(3, 9))) for _ in range(count)]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def models(request, tmp_path_factory):
    """The model files of a tokenizer of German and of its extension by French, and both loaded."""
    old = tokenizer.trained(texts_of(WORDS), vocab_size=OLD, kind=request.param)
    new = extension.extended(old, texts_of(OTHERS), vocab_size=NEW)
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "old.model").write_bytes(old)
    (folder / "new.model").write_bytes(new)
    return old, new, *(tokenizer.load(folder / name) for name in ("old.model", "new.model"))


def boundaries(ids, vocabulary):
    """Returns the ends of the pieces of a text, in bytes."""
    names = [vocabulary[i] for i in ids]
    sizes = [1 if name.startswith("<0x") else len(name.encode()) for name in names]
    return set(np.cumsum(sizes).tolist())


def test_old_pieces_keep_their_ids_scores_and_kinds(models):
    _, _, old, new = models
    assert (old.vocab_size, new.vocab_size) == (OLD, NEW)
    assert new.vocabulary_of("source")[:OLD] == old.vocabulary_of("source")
    assert len(set(new.vocabulary_of("source"))) == NEW
    pieces, byte_ids = old.table()
    assert byte_ids == new.table()[1]
    assert {piece: new.table()[0][piece] for piece in pieces} == pieces


def test_the_kind_is_that_of_the_old_tokenizer_and_the_result_is_deterministic(models):
    old, new, *_ = models
    assert tokenizer.model_kind(new) == tokenizer.model_kind(old)
    assert extension.extended(old, texts_of(OTHERS), vocab_size=NEW) == new


def test_new_text_has_fewer_pieces_and_old_text_keeps_its_boundaries(models):
    _, _, old, new = models
    french, german = texts_of(OTHERS, seed=1), texts_of(WORDS, seed=1)
    sizes = [sum(map(len, model.encode(french))) for model in (old, new)]
    assert sizes[1] < 0.6 * sizes[0]
    changed, names = 0, [model.vocabulary_of("source") for model in (old, new)]
    for text in german + french + ["garçon und Hund  12 %", "Ωμέγα", "", " ", "\u2581"]:
        (before,), (after,) = old.encode([text]), new.encode([text])
        assert boundaries(after, names[1]) <= boundaries(before, names[0])
        assert new.decode([after]) == [text]
        changed += list(before) != list(after)
        if max(after, default=0) < OLD:  # without a new piece nothing changes
            assert list(before) == list(after)
    assert changed > 0


def test_new_characters_become_pieces_and_digits_and_spaces_are_never_merged(models):
    _, _, old, new = models
    added = new.vocabulary_of("source")[OLD:]
    assert {"ç", "à", "ô", "ê", "è"} <= set(added)
    old_one, new_one = (model.encode(["ç"])[0] for model in (old, new))
    assert len(old_one) == 3 and len(new_one) == 2  # a space and 2 bytes, a space and a character
    assert all("\u2581" not in piece[1:] for piece in added)
    more = [f"{word} {n}7 {word}-{word}" for n in range(9) for word in OTHERS]
    content = extension.extended(old.content, more, vocab_size=OLD + 90, vocab_limit="soft")
    longer = tokenizer.open_model(content)
    names = [longer.id_to_piece(i) for i in range(OLD, longer.vocab_size())]
    assert len(names) > 20 and {"7", "-"} <= set(names)
    assert all(name in "0123456789-" or name.strip("\u2581").isalpha() for name in names)


def test_spellings_are_the_old_pieces_of_each_new_piece(models):
    _, _, old, new = models
    names = old.vocabulary_of("source")
    for piece, ids in zip(
        new.vocabulary_of("source")[OLD:], extension.spellings(old, new), strict=True
    ):
        parts = [names[i] for i in ids]
        spelled = b"".join(
            bytes([int(part[3:5], 16)]) if part.startswith("<0x") else part.encode()
            for part in parts
        )
        assert spelled.decode() == piece and max(ids) < OLD
        assert len(ids) > 1 or len(piece) == 1


def test_a_tokenizer_with_other_pieces_has_no_spellings(models, tmp_path):
    _, _, old, _ = models
    (tmp_path / "other.model").write_bytes(
        tokenizer.trained(texts_of(OTHERS), vocab_size=OLD, kind="bpe")
    )
    with pytest.raises(InputError, match=r"does not start with the pieces of init\.run"):
        extension.spellings(old, tokenizer.load(tmp_path / "other.model"))


def test_the_size_must_grow_and_the_text_must_have_the_pieces(models):
    old = models[0]
    with pytest.raises(InputError, match=r"^config.data.vocab_size: the tokenizer to extend has"):
        extension.extended(old, ["le petit"], vocab_size=OLD)
    with pytest.raises(InputError, match=r"this text adds at most \d+ pieces to the 290") as caught:
        extension.extended(old, texts_of(OTHERS), vocab_size=5000)
    added = int(str(caught.value).split("at most ")[1].split()[0])
    content = extension.extended(old, texts_of(OTHERS), vocab_size=5000, vocab_limit="soft")
    assert tokenizer.open_model(content).vocab_size() == OLD + added


def test_merges_are_those_of_the_example_of_the_paper():
    """Sennrich 2016, Algorithm 1, without its end-of-word symbol."""
    words = {tuple("low"): 5, tuple("lower"): 2, tuple("newest"): 6, tuple("widest"): 3}
    found = extension.merges(words, set(), 6)
    assert found[:4] == [("e", "s"), ("es", "t"), ("l", "o"), ("lo", "w")]
    assert len(found) == 6


def test_merges_equal_those_of_counting_all_pairs_again_after_each():
    rng = random.Random(7)
    words = {tuple(rng.choices("abcde", k=rng.randint(2, 9))): rng.randint(1, 9) for _ in range(60)}
    rows, expected, known = [[list(word), count] for word, count in words.items()], [], {"ab"}
    while len(expected) < 30:
        counts = collections.Counter()
        for row, count in rows:
            for pair in itertools.pairwise(row):
                counts[pair] += count if "".join(pair) not in known else 0
        pair = min(counts, key=lambda pair: (-counts[pair], pair))
        expected.append(pair)
        known.add("".join(pair))
        for each in rows:
            merged = []
            for piece in each[0]:
                merged.append(piece)
                if tuple(merged[-2:]) == pair:
                    merged[-2:] = ["".join(pair)]
            each[0] = merged
    assert extension.merges(words, {"ab"}, 30) == expected
