"""Decoding returns the encoded text; training is repeatable and writes its file atomically."""

import random
from pathlib import Path

import numpy as np
import pytest

from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import escape, unescape
from flaxformer_lite.data.tokens.tokenizer import Tokenizer, cut_at_end, pad_rows
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.system.errors import InputError

VOCAB = 311  # 4 special tokens, 256 bytes and 51 more
WORDS = (
    "anna otto regal lager nebel leben sie eis tor rot gras sarg\u00a0am \u202fna Haus Baum "
    "Katze Hund Garten Fenster "
    "Wasser Feuer Himmel Strasse Bruder Schwester Kirche Schule Sommer Winter Herbst Morgen "
    "Abend Nacht"
).split(" ")
KINDS = ("unigram", "bpe")


def sentences(number=401, seed=0):
    rng = random.Random(seed)
    return [
        " ".join(rng.choices(WORDS, k=5)) + f" {rng.randrange(100000)} 1999" for _ in range(number)
    ]


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    tokenizer.train(sentences(), path, vocab_size=VOCAB, kind=request.param)
    return Tokenizer(path)


TEXTS = {
    "empty": "",
    "a word": "lager",
    "a space": " ",
    "leading and trailing spaces": "  anna otto ",
    "double spaces": "anna  otto   regal",
    "no-break spaces": "12\u00a0345,67\u202f\u20ac\u2009und\u2003mehr",
    "the mark for a space": "\u2581anna\u2581 \u2581\u2581",
    "the escape": "\uf8ff \uf8ff\uf8ff0 \uf8ff1 \uf8ff\u2581 0\uf8ff",
    "emoji with joiners": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea "
    "\u2764\ufe0f",
    "control characters": "a\tb\rc\nd\x01\x7f\x85\u200b\u200e\ufeff",
    "a zero byte": "a\x00b",
    "not normalised": "e\u0301 \u00e9 \ufb01 \u212b \uff21 \u00b2",
    "names of special tokens": "<pad> <s> </s> <unk> <0x41> \u2047",
    "other scripts": "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 "
    "\u0639\u0631\u0628\u064a",
    "the replacement character": "\ufffd",
    "digits": "0123456789 007",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_an_encoded_text_decodes_to_itself(trained, text):
    (ids,) = trained.encode([text])
    assert trained.decode([ids]) == [text]
    assert ids.dtype == np.int32 and not np.isin(ids, [PAD, BOS, EOS, UNK]).any()
    assert (len(ids) == 0) == (text == "")


def test_random_texts_decode_to_themselves(trained):
    rng = random.Random(1)
    odd = "\u2581\uf8ff01 \u00a0\u202f\x00\t"

    def character():
        if rng.random() < 0.5:
            return rng.choice(odd)
        code = rng.choice(
            [rng.randrange(0x100), rng.randrange(0x3000), rng.randrange(0x110000 - 0x800)]
        )
        return chr(code if code < 0xD800 else code + 0x800)  # without the surrogates

    texts = ["".join(character() for _ in range(rng.randrange(1, 23))) for _ in range(503)]
    assert trained.decode(trained.encode(texts)) == texts


def test_the_training_sentences_have_fewer_pieces_than_characters(trained):
    texts = sentences()
    pieces = trained.encode(texts)
    assert trained.decode(pieces) == texts
    assert sum(map(len, pieces)) < 0.9 * sum(map(len, texts))


def test_special_symbols_have_their_ids_and_every_byte_has_a_piece(trained):
    pieces = trained.vocabulary_of("source")
    assert trained.vocab_size == VOCAB
    assert [pieces[i] for i in (PAD, BOS, EOS, UNK)] == ["<pad>", "<s>", "</s>", "<unk>"]
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= set(pieces)


def test_a_piece_with_a_digit_has_no_other_character(trained):
    pieces = trained.vocabulary_of("source")[4 + 256 :]
    with_digit = [piece for piece in pieces if any(character.isdigit() for character in piece)]
    assert with_digit and all(len(piece) == 1 for piece in with_digit)
    assert len(trained.encode(["1999"])[0]) >= 4  # though every sentence has this number


def test_rows_are_decoded_up_to_their_first_end_symbol_or_padding(trained):
    (anna, otto) = trained.encode(["anna", "otto"])
    rows = [[*anna, EOS, *otto], [*anna, PAD, *otto], [*anna], [EOS, *otto], []]
    assert trained.decode([np.array(row, np.int32) for row in rows]) == [
        "anna",
        "anna",
        "anna",
        "",
        "",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_trains_the_same_bytes_and_other_text_other_bytes(kind, tmp_path):
    paths = [tmp_path / name for name in ("first", "second", "other")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        tokenizer.train(iter(sentences(seed=seed)), path, vocab_size=VOCAB, kind=kind)
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other
    assert (
        Tokenizer(paths[0]).fingerprint
        == Tokenizer(paths[1]).fingerprint
        != Tokenizer(paths[2]).fingerprint
    )


def test_the_kinds_differ(tmp_path):
    for kind in KINDS:
        tokenizer.train(sentences(), tmp_path / kind, vocab_size=VOCAB, kind=kind)
    first, second = (
        [p.tolist() for p in Tokenizer(tmp_path / kind).encode(sentences())] for kind in KINDS
    )
    assert first != second


@pytest.mark.parametrize("size", [100, 5003])
def test_a_vocabulary_size_that_does_not_fit_the_text_is_refused_with_its_field(size, tmp_path):
    with pytest.raises(
        ValueError, match=rf"^config\.data\.vocab_size: .* pieces, got {size:,}; (raise|lower) it"
    ) as caught:
        tokenizer.train(sentences(), tmp_path / "model", vocab_size=size, kind="unigram")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_without_text_is_refused(texts, tmp_path):
    with pytest.raises(ValueError, match="no text to train on"):
        tokenizer.train(texts, tmp_path / "model", vocab_size=VOCAB, kind="unigram")


def test_a_file_that_is_not_a_model_is_refused_with_its_path(tmp_path):
    garbage = tmp_path / "garbage.model"
    garbage.write_bytes(b"this is not a model")
    (tmp_path / "empty.model").write_bytes(b"")
    for path in (garbage, tmp_path / "empty.model", tmp_path / "missing.model", tmp_path):
        with pytest.raises(ValueError) as caught:
            Tokenizer(path)
        assert str(caught.value).startswith(f"{path}: expected a SentencePiece model, got ")


def test_a_model_is_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.train(sentences(), path, vocab_size=VOCAB, kind="unigram")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
    monkeypatch.undo()
    tokenizer.train(sentences(), path, vocab_size=VOCAB, kind="unigram")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]
    assert Tokenizer(path).vocab_size == VOCAB


@pytest.mark.parametrize(
    "text", ["", "\u2581", "\uf8ff", "\uf8ff1", "\uf8ff\u2581", "\uf8ff0\uf8ff1\u25811", "a b"]
)
def test_an_escaped_text_has_no_space_mark_and_is_unescaped_to_itself(text):
    assert "\u2581" not in escape(text)
    assert unescape(escape(text)) == text


def test_rows_are_padded_after_their_end_symbol_and_empty_rows_are_all_padding():
    rows = [np.array([7, 5, 9]), np.array([], np.int32), np.array([8, 8, 8, 8])]
    padded = pad_rows(rows, 5)
    assert padded.dtype == np.int32
    np.testing.assert_array_equal(padded, [[7, 5, 9, EOS, PAD], [PAD] * 5, [8, 8, 8, 8, EOS]])


def test_a_row_without_an_end_symbol_is_not_cut():
    assert cut_at_end(np.array([7, 5, 9])).tolist() == [7, 5, 9]
    assert cut_at_end(np.array([7, EOS, 9, PAD])).tolist() == [7]
    assert cut_at_end(np.array([7, PAD, EOS])).tolist() == [7]


CHINESE = ["".join(map(chr, range(first, first + 20))) for first in range(0x4E00, 0x5200, 20)]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_that_does_not_fit_is_refused_in_terms_of_the_config(kind):
    with pytest.raises(
        InputError,
        match=r"^config\.data\.vocab_size: this text has at most \d+ pieces, got 2,000; lower it, "
        r"or set data\.vocab_limit='soft'",
    ):
        tokenizer.trained(["a b c"] * 3, vocab_size=2000, kind=kind)
    message = (
        r"^config\.data\.vocab_size: the characters of this text, .* are 1,301 pieces, got 500; "
        r"raise it, or lower data\.character_coverage = 0\.9995, so that"
    )
    with pytest.raises(InputError, match=message):
        tokenizer.trained(CHINESE, vocab_size=500, kind=kind)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_soft_limit_takes_all_pieces_of_a_short_text_and_changes_no_other(kind, tmp_path):
    options = {"kind": kind, "vocab_limit": "soft"}
    tokenizer.train(["a b c"] * 3, tmp_path / "model", vocab_size=2000, **options)
    model = tokenizer.load(tmp_path / "model")
    assert 4 + 256 + 4 <= model.vocab_size < 300 and model.decode(model.encode(["cab"])) == ["cab"]
    tokenizer.train(sentences(), tmp_path / "soft", vocab_size=VOCAB, **options)
    tokenizer.train(sentences(), tmp_path / "hard", vocab_size=VOCAB, kind=kind)
    soft, hard = (tokenizer.load(tmp_path / name) for name in ("soft", "hard"))
    assert soft.vocabulary_of("source") == hard.vocabulary_of("source")
    with pytest.raises(InputError, match=r"data\.character_coverage = 0\.9995"):
        tokenizer.trained(CHINESE, vocab_size=500, **options)


def test_characters_beyond_the_coverage_are_bytes(tmp_path):
    options = {"vocab_size": 264, "kind": "bpe", "character_coverage": 0.98}
    tokenizer.train([*CHINESE, *["一二三"] * 19_000], tmp_path / "model", **options)
    model = tokenizer.load(tmp_path / "model")
    common, rare = model.encode(["一", CHINESE[9][:1]])
    assert len(common) < 3 <= len(rare)
    assert model.decode([common, rare]) == ["一", CHINESE[9][:1]]
