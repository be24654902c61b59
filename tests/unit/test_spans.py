"""The characters that tokens cover: of random Unicode texts, for every kind of tokenizer."""

import itertools
import json
import random
import unicodedata

import given_tokenizers
import marian_folders
import numpy as np
import pytest

from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.marian_tokenizer import MarianTokenizer
from flaxformer_lite.data.tokens.normalization import normalized, normalized_spans
from flaxformer_lite.data.tokens.sentencepiece_tokenizer import trained
from flaxformer_lite.data.tokens.spans import spans, word_of, words
from flaxformer_lite.data.tokens.symbol_tokenizer import counted
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies
from flaxformer_lite.fields import UNK

# Compositions, decompositions, a reordering, Korean letters, zero widths, the escapes, spaces.
ODD = [
    *"e\u0301 \u00e9 \ufb01 \u212b \uff21 \u2460\u0323\u0307 \u1100\u1161\u11a8 \uac00\u11a8",
    *"\u30ab\uff9e \u0344 \u200b \ufeff \u2581 \uf8ff \u00a0 \u3000 \u2028 \n \t \x00 \u3320",
    *"\U0001f468\u200d\U0001f469 \U0010ffff \u0958 \u0fb2\u0f71\u0f80 \u1e9b\u0323 \u01c4".split(),
]
TEXTS = given_tokenizers.texts(211)


def any_texts(number, *, seed):
    rng = random.Random(seed)

    def part():
        if rng.random() < 0.4:
            return rng.choice(given_tokenizers.WORDS)
        if rng.random() < 0.6:
            return "".join(rng.choices(ODD, k=3))
        code = rng.randrange(1, rng.choice([0x100, 0x3000, 0x10F800]))
        return chr(code if code < 0xD800 else code + 0x800)  # without the surrogates

    texts = [
        rng.choice(["", " ", "  "]).join(part() for _ in range(rng.randrange(9)))
        for _ in range(number)
    ]
    return ["", " ", "\u200b", "a", " anna  otto ", *texts]


def contents():
    """The file of a tokenizer of each kind but Marian's."""
    subwords = {"vocab_size": 311, "vocab_limit": "soft"}
    yield from ((kind, trained(TEXTS, kind=kind, **subwords)) for kind in ("unigram", "bpe"))
    yield from ((kind, counted(TEXTS, kind=kind)) for kind in ("char", "byte", "word", "spaces"))
    yield "sentencepiece", given_tokenizers.sentencepiece_model()
    yield (
        "sentencepiece with bytes",
        given_tokenizers.sentencepiece_model(byte_fallback=True, vocab_size=311),
    )
    yield from (
        (f"huggingface {kind}", given_tokenizers.tokenizer_json(kind))
        for kind in ("bpe", "wordpiece", "unigram")
    )


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for kind, content in contents():
        path = folder / kind
        path.write_bytes(content)
        found |= {(kind, form): tokenizer.load(path, form) for form in ("none", "nfkc")}
    models = {
        side: marian_folders.spm(side_words, 61)
        for side, side_words in [
            ("source", marian_folders.ENGLISH), ("target", marian_folders.GERMAN)
        ]
    }  # fmt: skip
    files = {f"{side}.spm": model for side, model in models.items()}
    vocabulary = marian_folders.numbered(*models.values())
    special = {"pad": "<pad>", "start": "<pad>", "eos": "</s>", "unk": "<unk>"}
    files["vocab.json"] = json.dumps(vocabulary).encode()
    MarianTokenizer.pack(folder / "marian", files, special)
    found["marian", "own"] = tokenizer.load(folder / "marian")
    found["two", "nfkc"] = TwoVocabularies(found["unigram", "nfkc"], found["char", "none"])
    return found


def each(tokenizers):
    return [(name, model, side) for name, model in tokenizers.items() for side in SIDES]


SIDES = ("source", "target")
EXACT = ("unigram", "bpe", "char", "byte", "word", "spaces")


def test_each_token_has_a_span_of_the_text_in_order(tokenizers):
    for name, model, side in each(tokenizers):
        for text in any_texts(61, seed=3):
            found = spans(model, text, side)
            (ids,) = model.encode([text], side=side)
            assert len(found) == len(ids), (name, side, text)
            flat = np.array(found).reshape(-1, 2)
            assert (np.diff(flat, axis=0) >= 0).all() and (flat[:, 0] <= flat[:, 1]).all()
            assert not len(flat) or (flat[0, 0] >= 0 and flat[-1, 1] <= len(text))


def test_tokens_that_share_characters_are_parts_of_one_and_none_is_lost(tokenizers):
    for name, model, side in each(tokenizers):
        if name[0] in ("word", "spaces") or "huggingface" in name[0]:
            continue  # they have no spaces, or the library's own offsets
        changes = name[1] != "none" and side == "source"
        for text in any_texts(61, seed=5):
            found = spans(model, text, side)
            for (first, end), (start, stop) in itertools.pairwise(found):
                shares = start < end
                assert not shares or (first, end) == (start, stop) or changes, (name, text)
            covered = {at for span in found for at in range(*span)}
            lost = set(range(len(text))) - covered
            assert all(
                text[at].isspace() or unicodedata.category(text[at])[0] in "CZ" for at in lost
            ), (name, text, lost)


def test_the_text_of_known_pieces_is_that_of_their_spans(tokenizers):
    compared = 0
    for name, model, side in each(tokenizers):
        if name[1] != "none" or "wordpiece" in name[0]:
            continue
        for text in any_texts(61, seed=7):
            if not text.isascii() and name[0] not in EXACT:
                continue  # the tokenizer normalises the text
            (ids,) = model.encode([text], side=side)
            pieces = model.pieces(ids, side=side)
            for span, piece, token in zip(spans(model, text, side), pieces, ids, strict=True):
                if token == UNK or piece.startswith("<0x") or not piece.isascii():
                    continue
                if piece.strip():
                    assert text[slice(*span)].strip() == piece.strip(), (name, text, piece)
                    compared += 1
    assert compared > 997


def test_every_token_that_overlaps_a_word_is_in_it(tokenizers):
    for name, model, side in each(tokenizers):
        for text in any_texts(31, seed=11):
            tokens, found = spans(model, text, side), words(text)
            assert [text[slice(*word)] for word in found] == text.split()
            chosen = word_of(tokens, found)
            for (start, end), word in zip(tokens, chosen.tolist(), strict=True):
                overlapping = [n for n, (a, b) in enumerate(found) if start < b and a < end]
                if overlapping:
                    assert word == overlapping[0], (name, text)
                else:
                    after = [n for n, (a, _) in enumerate(found) if a >= start]
                    assert word == min([*after, len(found) - 1])


def test_spans_of_a_text_with_bytes_spaces_and_a_code_are_those_of_the_docstring(tokenizers):
    text = "otto \u00e9\U0001f468"
    byte = spans(tokenizers["byte", "none"], text)
    assert byte == [*((n, n + 1) for n in range(5)), (5, 6), (5, 6), *[(6, 7)] * 4]
    bpe = tokenizers["bpe", "none"]
    assert spans(bpe, text)[-6:] == [(5, 6)] * 2 + [(6, 7)] * 4
    assert spans(tokenizers["word", "none"], " ab \n c") == [(1, 3), (4, 5), (6, 7)]
    assert spans(tokenizers["spaces", "none"], "ab  c") == [(0, 2), (3, 3), (4, 5)]
    coded = spans(tokenizers["marian", "own"], ">>deu<< dog")
    assert coded[0] == (0, 7) and coded[-1][1] == 11
    assert word_of([(0, 2), (2, 3), (3, 3), (6, 7)], [(0, 2), (3, 5)]).tolist() == [0, 1, 1, 1]
    assert word_of([(0, 1)], []).tolist() == [-1]


@pytest.mark.parametrize("kind", ["none", "whitespace", "nfc", "nfkc"])
def test_normalised_characters_come_from_their_spans(kind):
    for text in any_texts(997, seed=13):
        result, found = normalized_spans(text, kind)
        assert result == normalized(text, kind)
        assert len(found) == len(result)
        for character, (start, end) in zip(result, found, strict=True):
            part = text[start:end]
            if kind in ("nfc", "nfkc"):
                part = unicodedata.normalize(kind.upper(), part)
            is_space = character == " " and any(each.isspace() for each in part)
            assert is_space or character in part
