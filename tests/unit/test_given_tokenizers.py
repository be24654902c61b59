"""Given SentencePiece models and tokenizer.json files: their tokens, under our special ids."""

import builtins
import pickle

import given_tokenizers
import numpy as np
import pytest
import sentencepiece
import tokenizers

from flaxformer_lite.data.tokens import tokenizer
from flaxformer_lite.data.tokens.any_tokenizer import IdOrder, special_names
from flaxformer_lite.fields import BOS, EOS, PAD, UNK
from flaxformer_lite.system.errors import InputError

TEXTS = given_tokenizers.texts(23, seed=2)
NAMES = "<pad> <s> </s> <unk> [SEP] [PAD] <|endoftext|>"
SPECIAL_IDS = {
    "the defaults of spm_train": {},
    "no start, no end": {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1},
    "scattered": {"pad_id": 7, "unk_id": 2, "bos_id": 5, "eos_id": 0},
}


def opened(folder, content, normalization="none"):
    (folder / "file").write_bytes(content)
    return tokenizer.load(folder / "file", normalization)


def test_our_ids_are_the_special_ones_then_those_of_the_library_in_its_order():
    order = IdOrder([-1, 5, 0, 2], [0, 1, 2, 3, 5, 7])
    assert order.theirs_V.tolist() == [-1, 5, 0, 2, 1, 3, 7]
    assert order.ours([1, 3, 7, 2, 5, 0]).tolist() == [4, 5, 6, UNK, UNK, UNK]
    assert order.theirs(np.array([BOS, 6, UNK, 4, EOS, 5])) == [7, 2, 1]
    assert order.theirs(np.array([5, PAD, 6])) == [3]


def test_a_special_name_that_is_taken_gets_a_number():
    assert special_names([]) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert special_names(["<s>", "<s 1>", "<unk>"]) == ["<pad>", "<s 2>", "</s>", "<unk 1>"]


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "word", "char"])
@pytest.mark.parametrize("special", SPECIAL_IDS.values(), ids=SPECIAL_IDS.keys())
def test_a_sentencepiece_file_gives_its_own_pieces_under_our_ids(model_type, special, tmp_path):
    content = given_tokenizers.sentencepiece_model(model_type=model_type, **special)
    model = opened(tmp_path, content)
    theirs = sentencepiece.SentencePieceProcessor()
    theirs.LoadFromSerializedProto(content)
    assert model.kind == "sentencepiece" and model.content == content
    pieces = model.vocabulary_of("source")
    assert len(set(pieces)) == len(pieces) == model.vocab_size
    assert pieces[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    lacking = [theirs.pad_id(), theirs.bos_id(), theirs.eos_id()].count(-1)
    assert model.vocab_size == theirs.vocab_size() + lacking
    rows = model.encode(TEXTS, threads=1)
    assert [[pieces[i] for i in row] for row in rows] == theirs.encode(TEXTS, out_type=str)
    assert model.decode([[BOS, *row, EOS, 7] for row in rows]) == TEXTS
    (unknown,) = model.encode(["\u65e5"])
    assert UNK in unknown and (unknown >= UNK).all()
    again = pickle.loads(pickle.dumps(model)).encode(TEXTS)
    assert [row.tolist() for row in again] == [row.tolist() for row in rows]


def test_a_model_with_our_special_ids_is_of_its_own_kind_and_others_are_not(tmp_path):
    ours = {"pad_id": PAD, "bos_id": BOS, "eos_id": EOS, "unk_id": UNK}
    kinds = {
        name: tokenizer.model_kind(given_tokenizers.sentencepiece_model(model_type=name, **ours))
        for name in ("unigram", "bpe", "word", "char")
    }
    assert kinds == {
        "unigram": "unigram", "bpe": "bpe", "word": "sentencepiece", "char": "sentencepiece"
    }  # fmt: skip
    trained = tokenizer.trained(TEXTS, vocab_size=283, kind="bpe")
    assert tokenizer.model_kind(trained) == "bpe"


def test_the_rules_of_a_model_normalise_and_those_of_the_config_come_first(tmp_path):
    content = given_tokenizers.sentencepiece_model(normalization_rule_name="nmt_nfkc_cf")
    plain, spaced = (opened(tmp_path, content, kind) for kind in ("none", "whitespace"))
    full_width = "\uff22aum"  # NFKC and case folding make it 'baum'
    assert plain.decode(plain.encode([full_width], side="target")) == ["baum"]
    assert plain.made_by("source") == plain.made_by("target") == spaced.made_by("target")
    assert plain.made_by("source") != spaced.made_by("source")


KINDS = ("bpe", "wordpiece", "unigram")


@pytest.fixture(scope="module", params=KINDS)
def from_json(request, tmp_path_factory):
    content = given_tokenizers.tokenizer_json(request.param)
    model = opened(tmp_path_factory.mktemp(request.param), content)
    return request.param, model, tokenizers.Tokenizer.from_str(content.decode())


def test_a_tokenizer_json_gives_its_own_tokens_without_those_of_its_template(from_json):
    kind, model, theirs = from_json
    theirs.no_truncation()
    pieces = model.vocabulary_of("target")
    lacking = {"bpe": 3, "wordpiece": 0, "unigram": 1}[kind]  # of the 4 special tokens
    assert model.kind == "huggingface"
    assert model.vocab_size == theirs.get_vocab_size() + lacking == len(set(pieces))
    assert (
        pieces[:4]
        == {
            "bpe": ["<pad>", "<s>", "<|endoftext|>", "<unk>"],
            "wordpiece": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"],
            "unigram": ["<pad>", "<s>", "</s>", "<unk>"],
        }[kind]
    )
    rows = model.encode(TEXTS)
    expected = [theirs.encode(text, add_special_tokens=False).tokens for text in TEXTS]
    assert [[pieces[i] for i in row] for row in rows] == expected
    assert max(map(len, rows)) > 3  # beyond the truncation of the file
    lower = str.lower if kind == "wordpiece" else str
    assert model.decode([[BOS, *row, EOS, 7] for row in rows]) == list(map(lower, TEXTS))


def test_the_names_of_special_tokens_in_a_text_are_text(from_json):
    kind, model, _ = from_json
    (row,) = model.encode([NAMES])
    assert row.dtype == np.int32 and len(row) and not np.isin(row, [PAD, BOS, EOS]).any()
    if kind == "bpe":
        assert model.decode([row]) == [NAMES]


def test_a_pickled_tokenizer_json_gives_the_same_ids(from_json):
    _, model, _ = from_json
    texts = [*TEXTS, NAMES, ""]
    again = pickle.loads(pickle.dumps(model))
    rows, others = model.encode(texts), again.encode(texts, threads=1)
    assert [row.tolist() for row in rows] == [row.tolist() for row in others]
    assert model.fingerprint == again.fingerprint and model.made_by("source") == model.fingerprint


def test_pieces_have_their_spaces(from_json):
    kind, model, _ = from_json
    (row,) = model.encode(["tor eis"])
    shown = model.pieces(row)
    assert {"bpe": "tor eis", "wordpiece": "toreis", "unigram": " tor eis"}[kind] == "".join(
        piece.removeprefix("##") for piece in shown
    )
    assert model.pieces([EOS]) == model.vocabulary_of("source")[EOS : EOS + 1]


def test_without_the_library_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    load = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError(name)
        return load(name, *arguments, **options)

    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError) as caught:
        tokenizer.load(tmp_path / "tokenizer.json")
    assert str(caught.value) == (
        "config.data.tokenizer: 'huggingface' needs the extra: pip install "
        "'flaxformer_lite[huggingface]'."
    )
