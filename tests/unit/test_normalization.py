"""Normalisation of sources: the characters that change, and the places that apply it."""

import dataclasses

import numpy as np
import pytest

from flaxformer_lite import config as config_lib
from flaxformer_lite.config import Config, DataConfig, ModelConfig
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.tokens import normalization, tokenizer
from flaxformer_lite.data.tokens.subwords import SubwordSampler
from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.system.errors import InputError

KINDS = CHOICES["data.normalization"]
PLAIN = "Monday, 5 May"
SAME = {  # texts that differ from PLAIN in characters that nobody sees
    "at the end": "Monday, 5 May ",
    "at the start": "\t Monday, 5 May",
    "two spaces": "Monday,  5 May",
    "no-break space": "Monday,\u00a05\u202fMay\u00a0",
    "tab": "Monday,\t5 May",
    "byte order mark": "\ufeffMonday, 5 May",
    "zero-width space": "Mon\u200bday, 5 May\u200b",
    "word joiner": "Monday,\u2060 5 May",
    "ideographic space": "Monday,\u30005 May",
    "line end": "Monday, 5 May\r\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
@pytest.mark.parametrize("kind", ["whitespace", "nfc", "nfkc"])
def test_texts_that_look_the_same_become_the_same(text, kind):
    assert normalization.normalized(text, kind) == PLAIN
    assert normalization.normalized(text, "none") == text != PLAIN


@pytest.mark.parametrize(
    ("text", "whitespace", "nfc", "nfkc"),
    [
        ("cafe\u0301", "cafe\u0301", "caf\u00e9", "caf\u00e9"),
        ("\ufb01ve \u2460", "\ufb01ve \u2460", "\ufb01ve \u2460", "five 1"),
        ("می\u200cخواهم", *["می\u200cخواهم"] * 3),  # a joiner that Persian needs
        ("\U0001f469\u200d\U0001f680", *["\U0001f469\u200d\U0001f680"] * 3),
        ("\u200b\ufeff \u00a0", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_each_kind_changes_no_more_than_its_form(text, whitespace, nfc, nfkc):
    found = [normalization.normalized(text, kind) for kind in KINDS]
    assert found == [text, whitespace, nfc, nfkc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*SAME.values(), "cafe\u0301 \ufb01ve"])
def test_the_code_of_the_cards_does_the_same_and_a_second_time_changes_nothing(text, kind):
    names = {"text": text}
    exec(normalization.normalizing_code(kind), names)
    assert names["text"] == normalization.normalized(text, kind)
    assert normalization.normalized(names["text"], kind) == names["text"]


@pytest.mark.parametrize(
    ("data", "architecture", "kind"),
    [
        ({}, "encoder_decoder", "none"),
        ({"dataset": "parallel_text"}, "encoder_decoder", "whitespace"),
        ({"dataset": "labelled_text"}, "encoder_classifier", "whitespace"),
        ({"dataset": "plain_text"}, "decoder_lm", "none"),
        ({"dataset": "parallel_text", "tokenizer": "marian"}, "encoder_decoder", "none"),
        ({"dataset": "parallel_text", "normalization": "none"}, "encoder_decoder", "none"),
        ({"normalization": "nfkc"}, "encoder_decoder", "nfkc"),
    ],
)
def test_only_sources_of_custom_text_are_normalised_by_default(data, architecture, kind):
    config = Config(model=ModelConfig(architecture=architecture), data=DataConfig(**data))
    assert config_lib.source_normalization(config) == kind


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("model", "architecture", "decoder_lm"), ("data", "tokenizer", "marian")],
)
def test_normalisation_without_a_source_or_of_imported_tokenizers_is_refused(section, field, value):
    config = config_lib.default_config()
    config[section][field] = value
    config.data.normalization = "nfc"
    with pytest.raises(InputError, match=r"^config\.data\.normalization: "):
        config_lib.resolve(config)
    config.data.normalization = "none"
    config_lib.resolve(config)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    texts = [f"{day}, {n} May" for day in ("Monday", "Friday") for n in range(1, 32)]
    tokenizer.train(texts, path, vocab_size=290, kind="bpe")
    return path


def test_a_tokenizer_normalises_sources_and_no_targets(model_file):
    plain, by_space = (tokenizer.load(model_file, kind) for kind in ("none", "whitespace"))
    (expected,) = plain.encode([PLAIN])
    for text in SAME.values():
        assert by_space.encode([text])[0].tolist() == expected.tolist()
        assert plain.encode([text])[0].tolist() != expected.tolist()
        (target,) = by_space.encode([text], side="target")
        assert target.tolist() == plain.encode([text], side="target")[0].tolist()
        assert by_space.decode([target]) == [text]


def test_stored_ids_of_another_normalisation_are_not_used(model_file):
    by = [tokenizer.load(model_file, kind) for kind in KINDS]
    assert len({each.made_by("source") for each in by}) == len(KINDS)
    assert (
        len({each.made_by("target") for each in by}) == len({each.fingerprint for each in by}) == 1
    )
    assert by[0].made_by("source") == by[0].fingerprint  # as before there was a choice


def test_sampled_subwords_are_of_the_normalised_source(model_file):
    texts = list(SAME.values())
    examples = Examples(source=texts, target=texts)
    by_space = tokenizer.load(model_file, "whitespace")
    sampler = SubwordSampler(lambda numbers: examples, by_space, kind="bpe", strength=0.3, seed=1)
    sampled = sampler(np.arange(len(texts)), epoch=0)
    assert set(by_space.decode(list(sampled["source"]))) == {PLAIN}
    assert by_space.decode(list(sampled["target"])) == texts


def test_members_of_an_ensemble_normalise_alike():
    from flaxformer_lite import trained

    one = Config(data=DataConfig(normalization="nfc"))
    other = dataclasses.replace(one, data=DataConfig(normalization="none"))
    kind = trained.COMMON["another data.normalization"]
    values = [kind(type("Run", (), {"config": each})) for each in (one, other)]
    assert values == ["nfc", "none"]
