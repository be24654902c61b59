"""The kind of the tokenizer and the fields that contradict it, or that it ignores."""

import given_tokenizers
import pytest

from flaxformer_lite.checks.vocabularies import (
    expected_vocabulary,
    follows_tokenizer,
    vocabulary_size,
)
from flaxformer_lite.config import Config, resolve
from flaxformer_lite.data.tokens import given_tokenizer, tokenizer
from flaxformer_lite.data.tokens.symbol_tokenizer import counted
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import plan

NEEDS = {
    "char": {},
    "word": {},
    "spaces": {},
    "byte": {"vocab_size": None},
    "sentencepiece": {"tokenizer_file": "a.model", "vocab_size": None},
    "huggingface": {"tokenizer_file": "tokenizer.json", "vocab_size": None},
}


def config_of(kind, model=None, init=None, **data):
    sections = {"data": {"tokenizer": kind, **NEEDS.get(kind, {}), **data}}
    return resolve(
        sections | ({"model": model} if model else {}) | ({"init": init} if init else {})
    )


@pytest.mark.parametrize("kind", NEEDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_limit", "soft"), ("vocabulary_sample", 17), ("character_coverage", 0.99),
     ("subword_sampling", 0.1)],
)  # fmt: skip
def test_a_field_about_subwords_is_refused_for_other_kinds(kind, field, value):
    assert config_of(kind).data.tokenizer == kind
    with pytest.raises(InputError, match=rf"^config\.data\.{field}: has no effect .*'{kind}'"):
        config_of(kind, **{field: value})


@pytest.mark.parametrize("kind", NEEDS)
def test_a_vocabulary_of_another_kind_cannot_be_extended(kind):
    init = {"run": "runs/a", "vocabulary": "extend"}
    with pytest.raises(InputError, match=r"^config\.init\.vocabulary: 'extend' requires"):
        config_of(kind, init=init, tokenizer_file=None)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "marian"])
def test_subwords_need_a_number(kind):
    with pytest.raises(InputError, match=r"^config\.data\.vocab_size: expected a number .* None"):
        config_of(kind, vocab_size=None)


def test_bytes_have_a_size_of_their_own():
    with pytest.raises(InputError, match=r"^config\.data\.vocab_size: .*260, got 37000; set"):
        config_of("byte", vocab_size=37000)
    assert config_of("byte", model={"vocab_size": 260}).model.vocab_size == 260
    with pytest.raises(InputError, match=r"^config\.model\.vocab_size: 259 contradicts 260"):
        config_of("byte", model={"vocab_size": 259})


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_kinds_from_a_file_need_the_file_or_a_run_to_start_from(kind):
    with pytest.raises(InputError, match=r"^config\.data\.tokenizer_file: required by"):
        config_of(kind, tokenizer_file=None)
    assert config_of(kind, tokenizer_file=None, init={"run": "runs/a"}).init.run == "runs/a"


@pytest.mark.parametrize(
    ("kind", "changes", "is_refused"),
    [("char", {"vocab_size": None}, False), ("char", {"vocab_size": 99}, True),
     ("char", {"vocab_size": None, "tokenizer_file": "a.model"}, True), ("byte", {}, False),
     ("huggingface", {}, True), ("sentencepiece", {}, True), ("unigram", {}, False)],
)  # fmt: skip
def test_a_masked_decoder_needs_targets_without_unknown_tokens(kind, changes, is_refused):
    sections = {
        "model": {"decoder": "masked"},
        "decode": {"method": "mask_predict"},
        "data": {"tokenizer": kind, **NEEDS.get(kind, {}), **changes},
    }
    if not is_refused:
        assert resolve(sections).model.decoder == "masked"
        return
    with pytest.raises(InputError, match=rf"^config\.model\.decoder: .*data\.tokenizer='{kind}'"):
        resolve(sections)


def test_the_model_has_the_size_of_the_tokenizer_unless_the_config_fixes_it():
    assert [vocabulary_size(config_of(kind), 71) for kind in NEEDS] == [71] * len(NEEDS)
    assert vocabulary_size(Config(), 71) == 37000 and not follows_tokenizer(Config())
    soft = resolve({"data": {"vocab_limit": "soft"}})
    assert vocabulary_size(soft, 71) == 71
    assert expected_vocabulary(config_of("byte")) == 260
    assert expected_vocabulary(config_of("char")) == 37000
    assert expected_vocabulary(config_of("char", vocab_size=None)) is None
    known = config_of("char", vocab_size=None, model={"vocab_size": 71})
    assert expected_vocabulary(known) == 71
    with pytest.raises(InputError, match=r"^config\.model\.vocab_size: 99 contradicts .* = 98"):
        config_of("char", vocab_size=98, model={"vocab_size": 99})


def test_a_plan_names_the_limit_that_it_assumes_or_the_size_that_it_needs():
    bounded = config_of("char", vocab_size=311)
    assert plan.target(bounded, "v5e", 1).assumed.startswith("a vocabulary of 311, the limit")
    for fixed in (Config(), config_of("char", model={"vocab_size": 71}), config_of("byte")):
        assert plan.target(fixed, "v5e", 1).assumed == ""
    unknown = config_of("word", vocab_size=None)
    with pytest.raises(InputError, match=r"^config\.model\.vocab_size: required by a plan"):
        plan.plan(unknown, plan.target(unknown, "v5e", 1))


def test_a_copied_tokenizer_fits_if_it_is_of_the_kind_and_within_the_limit(tmp_path):
    (tmp_path / "model").write_bytes(counted(["abcdefgh"], kind="char"))
    copied = tokenizer.load(tmp_path / "model")
    for size in (None, 12, 13):
        given_tokenizer.check(copied, config_of("char", vocab_size=size), source="x")
    with pytest.raises(InputError, match=r"^config\.data\.vocab_size: .* has 12 pieces, got 11"):
        given_tokenizer.check(copied, config_of("char", vocab_size=11), source="x")
    with pytest.raises(InputError, match=r"^config\.data\.tokenizer: .* is 'char', got 'word'"):
        given_tokenizer.check(copied, config_of("word"), source="x")


def test_a_given_file_has_its_exact_size(tmp_path):
    (tmp_path / "model").write_bytes(given_tokenizers.sentencepiece_model())
    size = tokenizer.load(tmp_path / "model").vocab_size
    for wanted in (None, size):
        config = config_of(
            "sentencepiece", vocab_size=wanted, tokenizer_file=str(tmp_path / "model")
        )
        assert given_tokenizer.of_file(config).vocab_size == size
    for wrong in (size - 1, size + 1):
        config = config_of(
            "sentencepiece", vocab_size=wrong, tokenizer_file=str(tmp_path / "model")
        )
        with pytest.raises(InputError, match=rf"has {size} pieces, got {wrong}; .*={size}\.$"):
            given_tokenizer.of_file(config)


def test_a_model_with_our_special_ids_is_accepted_as_a_sentencepiece_file(tmp_path):
    (tmp_path / "model").write_bytes(tokenizer.trained(["a b c"] * 9, vocab_size=265, kind="bpe"))
    file = str(tmp_path / "model")
    assert given_tokenizer.of_file(config_of("sentencepiece", tokenizer_file=file)).kind == "bpe"
    with pytest.raises(InputError, match=r"is 'bpe', got 'unigram'; set data\.tokenizer=bpe"):
        given_tokenizer.of_file(config_of("unigram", vocab_size=265, tokenizer_file=file))
