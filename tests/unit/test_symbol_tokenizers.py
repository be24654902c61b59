"""Characters, words, symbols and bytes: ids by count, exact round trips, unknown symbols."""

import json
import pickle
import random

import numpy as np
import pytest

from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.symbol_tokenizer import counted, joined_words, words
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.system.errors import InputError

ODD = "\n\t\r \u2581\uf8ff\u00a0\u2028\x00e\u0301\u200d\U0001f468\U0010ffff\ufffd<unk>"


def opened(folder, texts, kind, *, normalization="none", **options):
    path = folder / f"{kind}.model"
    path.write_bytes(counted(texts, kind=kind, **options))
    return tokenizer.load(path, normalization)


def random_texts(characters, number=211, longest=29, seed=3):
    rng = random.Random(seed)
    return ["".join(rng.choices(characters, k=rng.randrange(longest))) for _ in range(number)]


def any_character(rng):
    code = rng.choice([rng.randrange(0x100), rng.randrange(0x3000), rng.randrange(0x10F800)])
    return chr(code if code < 0xD800 else code + 0x800)  # without the surrogates


def any_texts(seed=5):
    rng = random.Random(seed)
    return random_texts([*ODD, *(any_character(rng) for _ in range(499))], seed=seed)


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_texts_of_any_characters_decode_to_themselves(kind, tmp_path):
    texts = [*any_texts(), ODD, ""]
    model = opened(tmp_path, texts, kind)
    rows = model.encode(texts)
    assert model.decode(rows) == texts
    assert all(row.dtype == np.int32 and (row > UNK).all() for row in rows)
    assert len(rows[-1]) == 0
    size = {"char": len, "byte": lambda text: len(text.encode())}[kind]
    assert [len(row) for row in rows] == [size(text) for text in texts]


def test_words_that_single_spaces_separate_decode_to_themselves(tmp_path):
    names = ["".join(part.split()) for part in any_texts() if part.split()]
    rng = random.Random(11)
    lines = [" ".join(rng.choices([*names, "<s>", "</s>", "<pad>", "<unk>"], k=7)) for _ in names]
    texts = ["\n".join(lines[at : at + 3]) for at in range(0, len(lines), 3)]
    texts += ["\n\na b\n", "", "\n"]
    model = opened(tmp_path, texts, "word")
    assert model.decode(model.encode(texts)) == texts


def test_a_newline_is_a_word_and_other_spaces_at_words_are_not_kept():
    assert words("a \n b\n\nc  d ") == ["a", "\n", "b", "\n", "\n", "c", "d"]
    assert joined_words(words("a \n b\n\nc  d ")) == "a\nb\n\nc d"


def test_symbols_that_single_spaces_separate_decode_to_themselves(tmp_path):
    rng, names = random.Random(13), ["AH0", "K", "\n", "I_TURN_LEFT", "\u2581", "<s>", "\u00a0"]
    texts = [" ".join(rng.choices(names, k=rng.randrange(9))) for _ in range(101)]
    model = opened(tmp_path, texts, "spaces")
    assert model.decode(model.encode(texts)) == texts
    assert model.vocab_size == 4 + len(names)


@pytest.mark.parametrize(
    ("text", "what"),
    [("a  b", "2 spaces in a row: 'a  b'"), (" a b", "a space at an end: ' a b'"),
     ("a b ", "a space at an end: 'a b '")],
)  # fmt: skip
def test_a_training_text_with_an_empty_symbol_is_refused_with_the_text(text, what):
    with pytest.raises(InputError) as caught:
        counted(["a b", text], kind="spaces")
    message = str(caught.value)
    assert message.startswith("config.data.tokenizer: 'spaces' needs texts") and what in message
    assert message.endswith("set data.tokenizer='word', which ignores such spaces.")


def test_of_a_long_text_the_error_quotes_the_part_with_the_space():
    long = "x " * 400 + " y" + " z" * 400
    with pytest.raises(InputError, match=r"'[x ]+  y[z ]+'"):
        counted([long], kind="spaces")


def test_symbols_are_in_the_order_of_their_counts_then_of_their_code_points(tmp_path):
    assert json.loads(counted(["bca", "abd", "zb"], kind="char")) == {
        "kind": "char",
        "symbols": ["b", "a", "c", "d", "z"],
    }
    model = opened(tmp_path, ["u t u\nu", "t v"], "word")
    assert model.vocabulary_of("source") == [
        *("<pad>", "<s>", "</s>", "<unk>"), *("u", "t", "\n", "v")
    ]  # fmt: skip
    same = [counted(texts, kind="word") for texts in (["b a", "c"], ["c a b"])]
    assert same[0] == same[1]


@pytest.mark.parametrize(("kind", "rest"), [("char", "ee<unk>e"), ("word", "ee <unk>")])
def test_rarer_symbols_than_the_limit_are_unknown_and_shown_as_such(kind, rest, tmp_path):
    texts = {"char": ["eexe", "e"], "word": ["ee ee xx"]}[kind]
    model = opened(tmp_path, texts, kind, vocab_size=5)
    assert model.vocab_size == 5
    (row,) = model.encode(texts[:1] if kind == "char" else ["ee zz"])
    assert (row == UNK).sum() == 1 and model.decode([row]) == [rest]
    assert model.pieces([UNK]) == ["<unk>"]


def test_words_with_the_names_of_special_tokens_are_words_but_unk_is_the_unknown_token(tmp_path):
    model = opened(tmp_path, ["<s> </s> <pad> <unk> a <unk>"], "word")
    assert model.vocabulary_of("source") == [
        *("<pad 1>", "<s 1>", "</s 1>", "<unk>"), *("</s>", "<pad>", "<s>", "a")
    ]  # fmt: skip
    (row,) = model.encode(["<s> <unk> a"])
    assert row.tolist() == [6, UNK, 7] and model.decode([row]) == ["<s> <unk> a"]


@pytest.mark.parametrize("kind", ["char", "word", "spaces", "byte"])
def test_rows_are_decoded_up_to_their_end_and_without_start_symbols(kind, tmp_path):
    model = opened(tmp_path, ["a", "b"], kind)
    (a,), (b,) = model.encode(["a", "b"])
    rows = [[BOS, a, EOS, b], [a, PAD, b], [BOS, a], [EOS, a], []]
    assert model.decode([np.array(row, np.int32) for row in rows]) == ["a", "a", "a", "", ""]


@pytest.mark.parametrize("kind", ["char", "word", "spaces", "byte"])
def test_a_pickled_tokenizer_gives_the_same_ids_in_its_own_order_of_sides(kind, tmp_path):
    model = opened(tmp_path, ["a b", "b c"], kind, normalization="whitespace")
    again = pickle.loads(pickle.dumps(model))
    texts = ["a b", "c\u00a0b", "d"]
    for side in ("source", "target"):
        rows, others = (each.encode(texts, side=side, threads=1) for each in (model, again))
        assert [row.tolist() for row in rows] == [row.tolist() for row in others]
        assert model.made_by(side) == again.made_by(side)
    assert model.made_by("source") != model.made_by("target")
    source, target = (model.encode(texts, side=side)[1] for side in ("source", "target"))
    assert source.tolist() != target.tolist()  # a no-break space becomes a space in sources only
    assert tokenizer.model_kind(model.content) == model.kind == kind
    assert model.models == {"tokenizer.model": model.content}


def test_bytes_that_are_not_utf_8_are_replaced(tmp_path):
    model = opened(tmp_path, [], "byte")
    (row,) = model.encode(["\u00fcx"])
    assert model.vocab_size == 260 and model.decode([row[1:], row[[0, 2]]]) == ["\ufffdx"] * 2
    assert model.pieces(row) == ["<0xC3>", "<0xBC>", "x"]
    assert len(set(model.vocabulary_of("source"))) == 260
    assert model.decode(model.encode(["a\udc80"])) == ["a?"]  # a surrogate is no text


@pytest.mark.parametrize("kind", ["char", "word", "spaces"])
def test_training_without_text_is_refused(kind):
    with pytest.raises(InputError, match="no text to train on"):
        counted(["", ""], kind=kind)


@pytest.mark.parametrize(
    "content",
    ['{"kind": "word", "symbols": []}', '{"kind": "word", "symbols": ["a", "a"]}',
     '{"kind": "char", "symbols": ["a", ""]}', '{"kind": "word", "symbols": ["<unk>"]}',
     '{"kind": "words", "symbols": ["a"]}',
     '{"kind": ["char"], "symbols": ["a"]}', '{"kind": "char"', "{}"],
)  # fmt: skip
def test_a_file_that_is_no_tokenizer_is_refused_with_its_path(content, tmp_path):
    (tmp_path / "model").write_text(content)
    with pytest.raises(InputError) as caught:
        tokenizer.load(tmp_path / "model")
    assert str(caught.value).startswith(f"{tmp_path / 'model'}: expected ")
