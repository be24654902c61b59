"""Settings: the defaults of the paper, the checks of `resolve`, and the shipped configs."""

import ast
import dataclasses
import itertools
import json
import re
import typing

import jax
import pytest
from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.config import (
    MAY_DIFFER_ON_RESUME,
    Config,
    ModelConfig,
    default_config,
    differences,
    resolve,
    to_config_dict,
    to_dict,
    with_classes,
    with_vocabulary,
)
from flaxformer_lite.field_rules import ERROR_RATES, EXTERNAL
from flaxformer_lite.model.parameters import shapes as param_shapes
from flaxformer_lite.model.transformer import build_model
from flaxformer_lite.system.errors import InputError

SECTIONS = typing.get_type_hints(Config)
FIELDS = [
    (section, field.name) for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)
]
OPTIONAL = {
    "model.vocab_size": 37000,
    "model.target_vocab_size": 97,
    "data.target_tokenizer": "bpe",
    "data.target_vocab_size": 97,
    "data.target_tokenizer_file": "a.model",
    "model.num_kv_heads": 2,
    "model.d_head": 67,
    "model.attention_window": 11,
    "model.embedding_dropout": 0.2,
    "model.num_classes": 5,
    "train.alignment_layer": 1,
    "data.header": True,
    "data.quoted": True,
    "data.source_language": "de",
    "data.validation_dataset": "wmt13_translate/de-en",
    "data.test_dataset": "wmt15_translate/de-en",
    "data.text_features": "premise,hypothesis",
    "data.num_buckets": 3,
    "data.windows": 67,
    "data.character_coverage": 0.99,
    "data.normalization": "nfc",
    "data.bleu_tokenizer": "char",
    "optim.decay_steps": 17,
    "optim.momentum": 0.5,
    "optim.clip_norm": 0.5,
    "optim.skip_spikes": 6.0,
    "train.average": "last:2",
    "train.ema_decay": 0.99,
    "train.patience": 3,
    "train.metric_command": "a {hypotheses}",
    "decode.top_k": 7,
    "decode.top_p": 0.9,
    "decode.no_repeat_ngram": 3,
    "data.tokenizer_file": "a.model",
    "init.run": "runs/a",
    "init.average": "last:3",
    "init.parameters": "raw",
}


SYMBOLS = {"data.tokenizer": "spaces", "data.vocab_size": None}
MASKED = dict(model__decoder="masked", decode__method="mask_predict")


def in_effect(name, value):
    """Returns a config in which the field has an effect.

    {'decode': {'top_k': 7, 'method': 'sample'}} for 'decode.top_k' and 7.
    """
    fields = {name: value}
    if value == "bleu_tokenized":
        fields["data.pretokenized"] = True
    if value in ERROR_RATES:
        fields |= SYMBOLS
    if value in EXTERNAL or name.startswith("train.metric_"):
        fields = {"train.metric_command": "a {hypotheses}"} | fields
        fields |= {"train.metric_name": value} if value in EXTERNAL else {}
    if name in config_lib.READ_IF:
        other, wanted = config_lib.READ_IF[name]
        fields[other] = wanted[0]
    if "mask_predict" in fields.values() or value == "masked":
        fields |= {"model.decoder": "masked", "decode.method": "mask_predict"}
    if fields.get("data.target_tokenizer") in ("unigram", "bpe"):
        fields.setdefault("data.target_vocab_size", fields.get("model.target_vocab_size", 97))
    of_target = "target_" if name == "data.target_tokenizer" else ""
    if value == "byte":
        fields[f"data.{of_target}vocab_size"] = None
    if value in ("sentencepiece", "huggingface"):
        fields[f"data.{of_target}tokenizer_file"] = "a.model"
    if value == "schedule_free":
        fields["optim.schedule"] = "constant"
    if name in ("data.faults", "data.longest_line", "data.whole_files"):
        fields |= {"data.dataset": "plain_text", "data.train_files": ("a.txt",)}
    if name in ("data.header", "data.quoted"):
        fields |= {"data.dataset": "parallel_text", "data.train_files": ("a.tsv",)}
    if name == "train.alignment_layer":
        fields["train.guided_alignment"] = 0.05
    if name.startswith("init."):
        fields = {"init.run": "A", "model.output_bias": name == "init.new_bias"} | fields
    return nested(**{field.replace(".", "__"): value for field, value in fields.items()})


def attribute(config, name):
    """Returns the value of 'section.field'."""
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def nested(**fields):
    """Returns {'model': {'d_model': 2}} for model__d_model=2."""
    result = {}
    for name, value in fields.items():
        section, field = name.split("__")
        result.setdefault(section, {})[field] = value
    return result


# The paper's sections 3, 5 and 6.1.
@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "model",
            dict(d_model=512, num_heads=8, d_ff=2048, num_encoder_layers=6, num_decoder_layers=6),
        ),
        (
            "model",
            dict(position="sinusoidal", norm_placement="post", tie_embeddings=True, dropout=0.1),
        ),
        (
            "model",
            dict(
                architecture="encoder_decoder",
                attention="dot_product",
                norm="layer_norm",
                activation="relu",
            ),
        ),
        ("model", dict(use_bias=True, output_bias=False, num_kv_heads=None, attention_window=None)),
        ("data", dict(vocab_size=37000, tokens_per_batch=25000)),
        (
            "optim",
            dict(schedule="paper", learning_rate=1.0, warmup_steps=4000, b1=0.9, b2=0.98, eps=1e-9),
        ),
        ("train", dict(num_steps=100_000, label_smoothing=0.1)),
        ("decode", dict(beam_size=4, alpha=0.6, penalty="wu", max_extra_length=50)),
    ],
)
def test_the_defaults_are_the_base_model_of_the_paper(section, expected):
    defaults = to_dict(Config())[section]
    assert {name: defaults[name] for name in expected} == expected


def test_an_empty_config_has_all_defaults():
    assert resolve({}) == resolve(default_config()) == Config()


@pytest.mark.parametrize("given", [None, 5, [], "model"])
def test_a_value_that_is_not_a_config_is_refused(given):
    with pytest.raises(ValueError, match=r"^config"):
        resolve(given)


@pytest.mark.parametrize("given", [None, 5, "d_model"])
def test_a_section_without_fields_is_refused_by_name(given):
    with pytest.raises(ValueError, match=r"^config\.model: expected a section with fields, got"):
        resolve({"model": given})


@pytest.mark.parametrize(
    ("given", "field", "near"),
    [
        ({"modle": {}}, "config.modle", "model"),
        ({"optimizer": {}}, "config.optimizer", "optim"),
        ({"model": {"num_head": 4}}, "config.model.num_head", "num_heads"),
        ({"train": {"n_steps": 4}}, "config.train.n_steps", "num_steps"),
        ({"optim": {"warmup": 4}}, "config.optim.warmup", "warmup_steps"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_valid_one(given, field, near):
    with pytest.raises(ValueError) as caught:
        resolve(given)
    assert str(caught.value) == f"{field}: there is no such field; did you mean {near!r}?"


def test_a_name_without_a_similar_one_is_refused_with_all_valid_ones():
    with pytest.raises(ValueError) as caught:
        resolve({"parallel": {"qqq": 1}})
    assert (
        str(caught.value)
        == "config.parallel.qqq: there is no such field; valid are data, fsdp, mode, tensor."
    )


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("model.d_model", "512", "int"),
        ("model.d_model", 512.0, "int"),
        ("model.d_model", True, "int"),
        ("model.d_model", None, "int"),
        ("model.vocab_size", "37000", "int"),
        ("model.tie_embeddings", 1, "bool"),
        ("model.dropout", "0.1", "float"),
        ("model.dropout", True, "float"),
        ("model.dtype", 32, "str"),
        ("data.buckets", 32, "a tuple of int"),
        ("data.buckets", (32, 64.0), "a tuple of int"),
        ("data.buckets", (True, 64), "a tuple of int"),
        ("data.train_files", "a.tsv", "a tuple of str"),
        ("data.train_files", ("a.en", 7), "a tuple of str"),
        ("data.languages", (b"en", "de"), "a tuple of str"),
        ("optim.clip_norm", "1", "float"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_expected_type(name, value, wanted):
    section, field = name.split(".")
    with pytest.raises(ValueError) as caught:
        resolve({section: {field: value}})
    assert (
        str(caught.value)
        == f"config.{name}: expected {wanted}, got {value!r} ({type(value).__name__})."
    )


def test_an_int_is_accepted_for_a_float_and_a_list_for_a_tuple():
    config = resolve(nested(optim__learning_rate=2, optim__clip_norm=3, data__buckets=[7, 11]))
    assert (config.optim.learning_rate, config.optim.clip_norm) == (2.0, 3.0)
    assert isinstance(config.optim.learning_rate, float) and isinstance(
        config.optim.clip_norm, float
    )
    assert config.data.buckets == (7, 11)


@pytest.mark.parametrize("name", sorted(config_lib.CHOICES))
def test_only_the_choices_of_a_field_are_accepted(name):
    section, field = name.split(".")
    for choice in config_lib.CHOICES[name]:
        assert getattr(getattr(resolve(in_effect(name, choice)), section), field) == choice
    wrong = config_lib.CHOICES[name][0] + "x"
    with pytest.raises(ValueError) as caught:
        resolve({section: {field: wrong}})
    near = config_lib.CHOICES[name][0]
    assert str(caught.value) == f"config.{name}: {wrong!r} is not a choice; did you mean {near!r}?"


@pytest.mark.parametrize(("name", "value"), [
    ("model.relative_clip", 3), ("model.relative_values", True), ("model.rope_base", 7.0),
    ("model.pooling", "first"), ("data.pretokenized", True), ("data.num_buckets", 3),
    ("data.bleu_tokenizer", "char"), ("model.target_vocab_size", 7),
    ("data.target_vocab_size", 7), ("data.target_tokenizer_file", "a.model"),
    ("data.target_tokenizer", "bpe"),
    ("data.windows", 67),
    ("train.r_drop", 5.0), ("decode.temperature", 0.5), ("decode.top_k", 3), ("decode.top_p", 0.5),
    ("decode.epsilon", 0.5), ("decode.seed", 3), ("decode.beam_size", 3), ("decode.alpha", 0.5),
    ("decode.iterations", 3), ("decode.length_candidates", 3), ("decode.penalty", "power"),
    ("decode.beam_groups", 2), ("decode.diversity", 0.25),
    ("optim.decay_steps", 3), ("optim.final_rate", 0.5), ("optim.b1", 0.5), ("optim.b2", 0.5),
    ("optim.eps", 0.5), ("optim.momentum", 0.5), ("init.new_embeddings", "random"),
    ("init.new_bias", -3.0),
])  # fmt: skip
def test_a_field_without_effect_is_refused_with_the_field_that_it_requires(name, value):
    section, field = name.split(".")
    other, wanted = config_lib.READ_IF[name]
    assert getattr(getattr(resolve(in_effect(name, value)), section), field) == value
    elsewhere = {}
    if attribute(Config(), other) in wanted:
        elsewhere = {
            other: next(
                choice for choice in config_lib.CHOICES.get(other, (True,)) if choice not in wanted
            )
        }
        elsewhere |= {"decode.method": "mask_predict"} if other == "model.decoder" else {}
    with pytest.raises(ValueError) as caught:
        resolve(
            nested(
                **{key.replace(".", "__"): each for key, each in {name: value, **elsewhere}.items()}
            )
        )
    needed = " or ".join(f"{other}={each!r}" for each in wanted)
    needed = other if other == "data.target_tokenizer" else needed  # any value
    assert str(caught.value).startswith(f"config.{name}: requires {needed}; set that, or")


@pytest.mark.parametrize("name", ["decode.beam_size", "model.rope_base", "train.r_drop"])
def test_a_field_that_was_given_is_refused_also_if_its_value_is_the_default(name):
    section, field = name.split(".")
    other, wanted = config_lib.READ_IF[name]
    config, default = default_config(), attribute(Config(), name)
    if name == "train.r_drop":
        config.update(nested(model__decoder="masked", decode__method="mask_predict"))
    resolve(config)
    config[section][field] = default
    with pytest.raises(InputError) as caught:
        resolve(config)
    needed = " or ".join(f"{other}={each!r}" for each in wanted)
    message = f"config.{name}: requires {needed}; set that, or leave this unset."
    assert str(caught.value) == message
    config = default_config()
    config[section][field] = value = type(default)(2)
    config[section][field] = default  # the default again
    assert attribute(resolve(config), name) == default != value


def test_the_test_above_has_every_field_of_read_if():
    assert len(config_lib.READ_IF) == 33


@pytest.mark.parametrize("name", sorted(config_lib.HIGHEST))
def test_a_number_above_the_highest_is_refused_by_name(name):
    section, field = name.split(".")
    highest = config_lib.HIGHEST[name]
    assert getattr(getattr(resolve(in_effect(name, highest)), section), field) == highest
    with pytest.raises(
        ValueError, match=rf"^config\.{section}\.{field}: expected {highest} or less"
    ):
        resolve(in_effect(name, highest + 1))


@pytest.mark.parametrize("name", sorted(config_lib.LOWEST))
def test_a_number_below_the_lowest_is_refused_by_name(name):
    section, field = name.split(".")
    lowest = config_lib.LOWEST[name]
    with pytest.raises(
        ValueError, match=rf"^config\.{name}: expected {lowest} or more, got {lowest - 1}\.$"
    ):
        resolve({section: {field: lowest - 1}})
    try:
        resolve({section: {field: lowest}})
    except ValueError as error:  # alone it may contradict another field, but it is in range
        assert "or more" not in str(error)


@pytest.mark.parametrize("name", config_lib.POSITIVE)
@pytest.mark.parametrize("value", [0.0, -1e-3, float("inf"), float("nan"), 10**400, -(10**400)])
def test_a_field_that_must_be_positive_and_finite_is_refused_by_name_if_it_is_not(name, value):
    section, field = name.split(".")
    with pytest.raises(
        ValueError, match=rf"^config\.{name}: expected a positive finite number, got"
    ):
        resolve({section: {field: value}})


@pytest.mark.parametrize("name", config_lib.BELOW_ONE)
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_share_outside_of_0_to_1_is_refused_by_name(name, value):
    section, field = name.split(".")
    with pytest.raises(
        ValueError, match=rf"^config\.{name}: expected at least 0 and less than 1, got"
    ):
        resolve({section: {field: value}})


@pytest.mark.parametrize(
    "names", [config_lib.LOWEST, config_lib.POSITIVE, config_lib.BELOW_ONE, config_lib.CHOICES]
)
def test_every_field_with_a_rule_exists(names):
    assert {tuple(name.split(".")) for name in names} <= set(FIELDS)


@pytest.mark.parametrize(
    ("fields", "name", "says"),
    [
        (dict(model__num_heads=7), "model.num_heads", "7 heads do not divide d_model = 512"),
        (
            dict(model__d_model=511, model__d_head=64),
            "model.d_model",
            "need an even width, got 511",
        ),
        (
            dict(model__position="rotary", model__d_head=67),
            "model.d_head",
            "need an even width, got 67",
        ),
        (
            dict(model__position="rotary", model__d_model=40),
            "model.d_head",
            "need an even width, got 5",
        ),
        (dict(model__num_kv_heads=3), "model.num_kv_heads", "3 does not divide num_heads = 8"),
        (dict(model__num_kv_heads=16), "model.num_kv_heads", "16 does not divide num_heads = 8"),
        (dict(data__buckets=()), "data.buckets", "increasing positive lengths"),
        (dict(data__buckets=(64, 32)), "data.buckets", "increasing positive lengths"),
        (dict(data__buckets=(32, 32)), "data.buckets", "increasing positive lengths"),
        (dict(data__buckets=(0, 32)), "data.buckets", "increasing positive lengths"),
        (dict(data__buckets=(32, 257)), "data.buckets", "257, is over model.max_length = 256"),
        (dict(data__tokens_per_batch=2047), "data.tokens_per_batch", "must be at least 2048"),
        (
            dict(optim__accumulate_steps=3),
            "optim.accumulate_steps",
            "3 does not divide data.rows_multiple = 8",
        ),
        (
            dict(model__vocab_size=36999),
            "model.vocab_size",
            "36999 contradicts data.vocab_size = 37000",
        ),
        (
            dict(parallel__data=0),
            "parallel.data",
            "expected -1 (the rest of the devices) or at least 1, got 0",
        ),
        (
            dict(parallel__data=-2),
            "parallel.data",
            "expected -1 (the rest of the devices) or at least 1, got -2",
        ),
        (
            dict(parallel__tensor=0),
            "parallel.tensor",
            "expected -1 (the rest of the devices) or at least 1, got 0",
        ),
        (
            dict(parallel__fsdp=-1),
            "parallel",
            "only one of data, fsdp and tensor may be -1, got -1, -1 and 1",
        ),
        (
            dict(parallel__fsdp=2, parallel__mode="pmap"),
            "parallel.fsdp",
            "every device holds the whole model",
        ),
        (
            dict(train__best_metric="bleu", train__decode_examples=0),
            "train.best_metric",
            "needs translations",
        ),
        (
            dict(train__best_metric="bleu", data__pretokenized=True),
            "train.best_metric",
            "choose 'bleu_tokenized'",
        ),
        (
            dict(train__best_metric="chrf", data__pretokenized=True),
            "train.best_metric",
            "choose 'bleu_tokenized'",
        ),
        (dict(train__best_metric="bleu_tokenized"), "train.best_metric", "choose 'bleu' or 'chrf'"),
        (
            dict(train__best_metric="symbol_error_rate", data__tokenizer="char"),
            "train.best_metric",
            "data.tokenizer='char' has other tokens; set data.tokenizer to 'spaces' or 'word'",
        ),
        (
            dict(
                train__best_metric="sequence_error_rate",
                data__tokenizer="spaces",
                data__target_tokenizer="char",
            ),
            "train.best_metric",
            "data.target_tokenizer='char' has other tokens; set data.target_tokenizer to 'spaces'",
        ),
        (
            dict(model__architecture="encoder_classifier", data__packing=True),
            "data.packing",
            "one text a row",
        ),
        (
            dict(model__architecture="encoder_classifier", decode__method="beam"),
            "decode.method",
            "generates no text",
        ),
        (
            dict(model__architecture="encoder_classifier", model__output_bias=True),
            "model.output_bias",
            "generates no text",
        ),
        (dict(data__num_buckets=3, data__packing=True), "data.num_buckets", "data.packing=False"),
        (dict(model__decoder="masked"), "decode.method", "'greedy' generates token by token"),
        (
            dict(**MASKED, model__architecture="decoder_lm"),
            "model.decoder",
            "encoder_decoder', whose encoder predicts the length",
        ),
        (
            dict(**MASKED, model__position="none"),
            "model.position",
            "cannot distinguish the masked tokens",
        ),
        (
            dict(decode__method="mask_predict"),
            "decode.method",
            "model.decoder='causal' is not trained for that",
        ),
        (
            dict(**MASKED, train__r_drop=5.0),
            "train.r_drop",
            "requires model.decoder='causal'",
        ),
        (
            dict(train__r_drop=5.0, model__dropout=0.0),
            "train.r_drop",
            "model.dropout is 0; set that",
        ),
        (dict(**MASKED, data__packing=True), "data.packing", "the length of one target a row"),
        (
            dict(**MASKED, decode__no_repeat_ngram=2),
            "decode.no_repeat_ngram",
            "predicts all tokens at once",
        ),
        (
            dict(decode__method="sample", decode__top_p=1.01),
            "decode.top_p",
            "a share of at most 1, got 1.01",
        ),
        (
            dict(data__train_files=("a.tsv",)),
            "data.train_files",
            "cldr_translate/en-de reads no files; leave them out",
        ),
        (
            dict(
                data__dataset="parallel_text",
                data__train_files=("a.tsv",),
                data__test_dataset="x",
                data__test_files=("b",),
            ),
            "data.test_files",
            "x reads no files",
        ),
        (
            dict(data__dataset="parallel_text"),
            "data.train_files",
            "required by parallel_text, for example ('a.en', 'a.de')",
        ),
        (
            dict(data__dataset="plain_text"),
            "data.train_files",
            "required by plain_text, for example ('a.tsv',)",
        ),
        (
            dict(data__validation_dataset="parallel_text"),
            "data.validation_files",
            "required by parallel_text",
        ),
        (
            dict(data__faults="drop"),
            "data.faults",
            "applies only to custom text: parallel_text, plain_text",
        ),
        (
            dict(data__longest_line=7),
            "data.longest_line",
            "applies only to custom text: parallel_text",
        ),
        (
            dict(data__header=True),
            "data.header",
            "applies only to custom text in tsv and csv files",
        ),
        (
            dict(
                data__dataset="parallel_text",
                data__train_files=("a.csv.gz",),
                data__header=True,
                data__quoted=False,
            ),
            "data.header",
            "applies only to custom text in tsv files",
        ),
        (
            dict(data__dataset="plain_text", data__train_files=("csv/a.*/b.tsv.en",))
            | dict(data__quoted=True),
            "data.quoted",
            "applies only to custom text in tsv and csv files",
        ),
        (
            dict(data__languages=("en",)),
            "data.languages",
            "expected two different names, or (), got ('en',)",
        ),
        (
            dict(data__languages=("en", "en")),
            "data.languages",
            "expected two different names, or ()",
        ),
        (
            dict(data__languages=("en", "de", "fr")),
            "data.languages",
            "expected two different names, or ()",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused_with_the_name_of_one(fields, name, says):
    with pytest.raises(ValueError) as caught:
        resolve(nested(**fields))
    assert str(caught.value).startswith(f"config.{name}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(model__num_heads=7, model__d_head=64),
        dict(model__d_model=511, model__d_head=64, model__position="learned"),
        dict(data__tokens_per_batch=2048),
        dict(optim__accumulate_steps=4),
        dict(model__vocab_size=37000),
        dict(parallel__data=-1),
        dict(train__best_metric="accuracy", train__decode_examples=0),
        dict(
            train__best_metric="symbol_error_rate",
            data__tokenizer="char",
            data__target_tokenizer="spaces",
            data__vocab_size=None,
        ),
        dict(train__best_metric="bleu_tokenized", data__pretokenized=True),
        dict(model__position="rotary", model__d_head=66),
        dict(model__num_kv_heads=2),
        dict(model__num_kv_heads=8),
        dict(model__attention="additive", model__position="t5_bias"),
        dict(model__architecture="decoder_lm", data__packing=True),
        dict(model__architecture="encoder_decoder", data__packing=True),
        dict(decode__method="sample", decode__top_p=1.0),
        dict(**MASKED, decode__min_length=3, decode__max_extra_length=7),
        dict(
            data__dataset="parallel_text",
            data__train_files=("a.tsv",),
            data__faults="drop",
            data__longest_line=7,
        ),
        dict(
            data__test_dataset="parallel_text",
            data__test_files=("a.en", "a.de"),
            data__faults="drop",
        ),
        dict(data__languages=("de", "en")),
        dict(
            data__dataset="parallel_text",
            data__train_files=("a.csv.gz",),
            data__header=True,
            data__quoted=True,
        ),
        dict(data__dataset="plain_text", data__train_files=("a/*",), data__header=True),
    ],
)
def test_fields_that_do_not_contradict_each_other_are_accepted(fields):
    config = to_dict(resolve(nested(**fields)))
    for name, value in fields.items():
        section, field = name.split("__")
        assert config[section][field] == value


@pytest.mark.parametrize("position", ["rotary", "relative"])
def test_additive_attention_is_refused_with_positions_that_act_through_a_product(position):
    assert resolve(nested(model__position=position)).model.attention == "dot_product"
    with pytest.raises(
        ValueError,
        match=rf"^config\.model\.attention: '{position}' positions act through the product",
    ):
        resolve(nested(model__attention="additive", model__position=position))


@pytest.mark.parametrize("backend", config_lib.CHOICES["model.backend"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("attention", "additive"), ("attention_dropout", 0.1), ("relative_values", True)],
)
def test_a_backend_without_weights_is_refused_with_a_field_that_needs_them(name, value, backend):
    fields = nested(model__backend=backend, model__position="relative", **{f"model__{name}": value})
    if name == "attention":
        fields = nested(model__backend=backend, model__attention=value)
    if backend in ("auto", "reference"):
        assert resolve(fields).model.backend == backend
    else:
        with pytest.raises(
            ValueError,
            match=rf"^config\.model\.backend: '{backend}' does not support model\.{name} = {value}",
        ):
            resolve(fields)


@pytest.mark.parametrize("architecture", config_lib.CHOICES["model.architecture"])
@pytest.mark.parametrize("metric", config_lib.CHOICES["train.best_metric"])
def test_a_metric_of_translations_is_refused_if_the_model_makes_none(metric, architecture):
    tokenized = metric == "bleu_tokenized" and architecture == "encoder_decoder"
    fields = nested(
        model__architecture=architecture, train__best_metric=metric, data__pretokenized=tokenized
    )
    if metric in ERROR_RATES:
        fields["data"] |= {"tokenizer": "spaces", "vocab_size": None}
    if metric in EXTERNAL and architecture == "encoder_decoder":
        fields["train"] |= {"metric_command": "a {hypotheses}", "metric_name": metric}
    if architecture == "encoder_decoder" or metric in ("loss", "accuracy"):
        assert resolve(fields).train.best_metric == metric
    else:
        with pytest.raises(
            ValueError,
            match=rf"^config\.train\.best_metric: '{metric}' needs translations.*{architecture}",
        ):
            resolve(fields)


@pytest.mark.parametrize(
    "text",
    [
        *("5", "last", "last:", "last:0", "last:-1", "last:5.0", "newest:5", "last:²", "none"),
        f"last:{'9' * 5000}",  # more digits than Python converts
    ],
    ids=lambda text: text[:12],
)
def test_an_average_that_is_not_last_n_or_best_n_is_refused(text):
    with pytest.raises(ValueError) as caught:
        resolve(nested(train__average=text))
    assert (
        str(caught.value)
        == f"config.train.average: expected last:N or best:N, such as last:5, got {text!r}."
    )


@pytest.mark.parametrize(("which", "field"), [("last", "keep_newest"), ("best", "keep_best")])
def test_an_average_of_more_checkpoints_than_are_kept_is_refused_with_the_field_to_raise(
    which, field
):
    fields = {"train__average": f"{which}:7"}
    assert resolve(nested(**fields, **{f"train__{field}": 7})).train.average == f"{which}:7"
    with pytest.raises(
        ValueError, match=rf"train\.{field} = 6 keeps fewer; set train\.{field} to 7\."
    ):
        resolve(nested(**fields, **{f"train__{field}": 6}))


@pytest.mark.parametrize(
    "num_steps",
    [pytest.param(n, marks=[] if n in (1, 6, 7, 12) else pytest.mark.slow) for n in range(1, 14)],
)
@pytest.mark.parametrize(
    ("each", "between", "patience"),
    [(4, 3, None), (3, 7, None), (4, 2, None), (3, 2, 1), (2, 5, 2)],
)
def test_an_average_of_more_checkpoints_than_a_run_makes_is_refused(
    num_steps, each, between, patience
):
    """Checkpoints are counted one by one; with patience, up to the earliest stop."""
    end = num_steps if patience is None else min(num_steps, (patience + 1) * each)
    evaluated = {step for step in range(1, end + 1) if step % each == 0 or step == end}
    saved = evaluated | {step for step in range(1, end + 1) if step % between == 0}
    train = dict(num_steps=num_steps, eval_every=each, checkpoint_every=between, patience=patience)
    for which, steps in (("last", saved), ("best", evaluated)):
        enough = {
            "train": {
                **train,
                "average": f"{which}:{len(steps)}",
                "keep_newest": 99,
                "keep_best": 99,
            }
        }
        assert resolve(enough).train.average == f"{which}:{len(steps)}"
        more = {"train": {**enough["train"], "average": f"{which}:{len(steps) + 1}"}}
        with pytest.raises(
            ValueError,
            match=rf"needs {len(steps) + 1} checkpoints, and {end} steps make {len(steps)};",
        ):
            resolve(more)


def test_a_config_is_unchanged_after_conversion_to_a_configdict_or_json_and_back():
    config = resolve(
        nested(
            model__d_head=67,
            model__dtype="bfloat16",
            data__buckets=(7, 11),
            optim__clip_norm=0.5,
            train__patience=3,
        )
        | nested(
            data__dataset="parallel_text", data__train_files=("a.en", "a.de"), data__buckets=(7, 11)
        )
    )
    assert config != Config()
    assert resolve(to_config_dict(config)) == config
    assert resolve(json.loads(json.dumps(to_dict(config)))) == config


def test_the_optional_fields_are_these():
    hints = {f"{s}.{f}": typing.get_type_hints(SECTIONS[s])[f] for s, f in FIELDS}
    assert {
        name for name, hint in hints.items() if type(None) in typing.get_args(hint)
    } == OPTIONAL.keys() | {"data.vocab_size"}  # whose default is a number


@pytest.mark.parametrize(("name", "value"), OPTIONAL.items())
def test_an_optional_field_can_be_set_in_the_configdict_and_only_to_its_type(name, value):
    section, field = name.split(".")
    config = default_config()
    assert config[section][field] is None
    with pytest.raises(TypeError):
        config[section][field] = ["a list"]
    config.update(in_effect(name, value))
    assert getattr(getattr(resolve(config), section), field) == value


def test_a_new_name_in_the_configdict_is_refused_when_it_is_resolved():
    config = default_config()
    config.model.num_experts = 3
    with pytest.raises(ValueError, match=r"^config\.model\.num_experts: there is no such field"):
        resolve(config)


def test_differences_name_the_field_with_both_values():
    new = resolve(nested(model__d_ff=1031, train__patience=3))
    assert differences(Config(), Config()) == []
    assert differences(Config(), new) == [("model.d_ff", 2048, 1031), ("train.patience", None, 3)]
    assert differences(new, Config()) == [("model.d_ff", 1031, 2048), ("train.patience", 3, None)]


def test_on_resume_only_these_fields_may_differ():
    free = {f"{s}.{f}" for s, f in FIELDS if f"{s}.{f}".startswith(MAY_DIFFER_ON_RESUME)}
    train = (
        "num_steps log_every eval_every checkpoint_every keep_newest keep_best average patience "
        "decode_examples profile metric_command metric_name metric_seconds"
    )
    expected = {f"train.{name}" for name in train.split()} | {
        f"{s}.{f}" for s, f in FIELDS if s in ("parallel", "decode")
    }
    files = {f"data.{role}_files" for role in ("train", "validation", "test")}  # by contents
    files |= {
        "data.train_alignments",
        "data.tokenizer_file",
        "data.target_tokenizer_file",
        "init.run",
    }
    expected |= {"model.backend", "model.remat", "data.bleu_tokenizer"}  # with the same results
    assert free == expected | files


def test_the_vocabulary_of_the_model_is_that_of_the_tokenizer():
    config = with_vocabulary(Config(), 1009)
    assert config.model == dataclasses.replace(ModelConfig(), vocab_size=1009)
    assert with_vocabulary(config, 1009) == config
    with pytest.raises(
        ValueError, match=r"^config\.model\.vocab_size: expected 1013, .* got 1009\.$"
    ):
        with_vocabulary(config, 1013)


def test_the_classes_of_the_model_are_those_of_the_dataset():
    labels = ["negative", "neutral", "positive"]
    config = with_classes(Config(), labels)
    assert config.model == dataclasses.replace(ModelConfig(), num_classes=3)
    assert with_classes(config, labels) == config
    assert with_classes(Config(), None) == Config()  # a dataset without labels
    with pytest.raises(
        ValueError,
        match=r"^config\.model\.num_classes: expected 2, the number of classes .* got 3\.$",
    ):
        with_classes(config, labels[:2])


def fields_read(source):
    """Returns the (section, field) pairs that `source` reads.

    It reads them as `config.model.d_model`, `model.d_model` or `self.config.d_model`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = getattr(node.value, "attr", getattr(node.value, "id", None))
            sections = SECTIONS if owner in ("config", "c") else [owner]
            found |= {(section, node.attr) for section in sections}
    return found


@pytest.fixture(scope="module")
def read_in_the_package(repo_root):
    files = [
        file
        for file in (repo_root / "flaxformer_lite").rglob("*.py")
        if file.name not in ("fields.py", "config.py")
    ]
    return set().union(*(fields_read(file.read_text(encoding="utf-8")) for file in files))


@pytest.mark.parametrize(("section", "field"), FIELDS)
def test_every_field_is_read_somewhere_in_the_package(section, field, read_in_the_package):
    assert (section, field) in read_in_the_package


def test_fields_read_does_not_return_fields_that_are_only_set():
    found = fields_read("x = config.optim.eps + c.d_ff\nconfig.train.patience = 3\nother.seed")
    assert ("optim", "eps") in found and ("model", "d_ff") in found
    assert ("train", "patience") not in found and ("train", "seed") not in found


def comments(source):
    """Returns the comment above each annotated class field: {(class, field): text}, '' if none."""
    lines = source.splitlines()
    fields = {
        (cls.name, node.target.id): node.lineno - 1  # index of its line
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    }
    return {
        name: " ".join(
            line.strip()
            for line in reversed(list(itertools.takewhile(is_comment, reversed(lines[:index]))))
        )
        for name, index in fields.items()
    }


def is_comment(line):
    return line.strip().startswith("#")


def names_a_source(comment):
    """Whether a comment names a section, appendix, table or equation, or an author and a year."""
    return bool(
        re.search(
            r"\b(section \d|Table \d|appendix [A-Z]|equation \d|[A-Z][a-z]+ (19|20)\d\d\b)", comment
        )
    )


def test_every_field_has_a_comment_and_every_field_of_the_model_a_source(repo_root):
    found = comments((repo_root / "flaxformer_lite" / "fields.py").read_text(encoding="utf-8"))
    assert found.keys() == {(SECTIONS[s].__name__, f) for s, f in FIELDS} | {
        ("Config", s) for s in SECTIONS
    }
    assert not [name for name, comment in found.items() if not comment and name[0] != "Config"]
    assert not [
        name
        for name, comment in found.items()
        if name[0] == "ModelConfig" and not names_a_source(comment)
    ]


def test_a_field_without_a_comment_or_a_source_is_noticed():
    source = (
        "class A:\n    b: int = 2\n    # why (Ba 2016)\n    c: int = 3\n"
        "    # one\n    # section 3\n    d: str = (\n        'x'\n    )\n"
    )
    assert comments(source) == {
        ("A", "b"): "",
        ("A", "c"): "# why (Ba 2016)",
        ("A", "d"): "# one # section 3",
    }
    assert all(map(names_a_source, ("# heads (Ba 2016)", "# section 3.1", "# Table 3, row (E)")))
    assert not any(map(names_a_source, ("# of 2016", "# the section of it", "# a table")))


def test_sections_and_fields_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.d_model = 7


def shipped(slow=()):
    return [
        pytest.param(name, file, marks=pytest.mark.slow if name in slow else [], id=name)
        for name, file in sorted(config_files.shipped_configs().items())
    ]


def fields_set(source):
    """Returns the (section, field) pairs that a config file sets.

    It sets them by `config.section.update(field=...)` or by assignment.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
            found += [(node.func.value.attr, keyword.arg) for keyword in node.keywords]
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            if isinstance(target, ast.Attribute):
                found.append((target.value.attr, target.attr))
    return found


def test_the_default_and_the_smoke_config_are_shipped():
    assert {"default", "smoke"} <= config_files.shipped_configs().keys()


# One config of each architecture is in the plain suite.
@pytest.mark.parametrize(
    ("name", "file"), shipped(slow="base big finetune multi30k multi30k_tok smoke".split())
)
def test_a_shipped_config_resolves_and_its_model_can_be_built(name, file):
    user_config = config_files.load_config(file)
    assert isinstance(user_config, config_dict.ConfigDict)
    config = resolve(user_config)
    if config.model.architecture == "encoder_classifier":
        config = with_classes(config, ["no", "yes"])
    size = config.data.vocab_size or 29  # None: that of the training texts
    params = param_shapes(build_model(with_vocabulary(config, size).model))
    assert (size, config.model.d_model) in {leaf.shape for leaf in jax.tree.leaves(params)}


@pytest.mark.parametrize(("name", "file"), shipped())
def test_a_shipped_config_sets_only_fields_that_differ_from_the_defaults_and_each_once(name, file):
    changed = [
        tuple(field.split("."))
        for field, _, _ in differences(Config(), resolve(config_files.load_config(file)))
    ]
    assert sorted(fields_set(file.read_text(encoding="utf-8"))) == sorted(changed)


def test_fields_set_returns_fields_set_by_assignment_or_by_update():
    source = "config.model.d_model = 7\nconfig.data.update(seed=1, buckets=(3,))\nconfig = f()"
    assert sorted(fields_set(source)) == [
        ("data", "buckets"),
        ("data", "seed"),
        ("model", "d_model"),
    ]


@pytest.mark.parametrize(("name", "file"), shipped())
def test_the_docstring_of_a_shipped_config_has_its_command(name, file):
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    others = {"default": "python train.py", "finetune": "flaxformer-lite import marian FOLDER"}
    command = others.get(name, f"python train.py --config={name}")
    assert docstring and f"Command   {command}" in docstring
