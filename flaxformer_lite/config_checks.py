"""Refuses fields that contradict each other or have no effect: of model, data and decoding."""

import os
from collections.abc import Set

from flaxformer_lite.field_rules import (
    CHOICES,
    OWN_TEXT,
    PRODUCT_POSITIONS,
    READ_IF,
)
from flaxformer_lite.fields import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
)
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.vocabularies import check_vocabularies
from flaxformer_lite.window_checks import check_whole_files, check_windows


def check_contradictions(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of model, data or decoding contradict each other.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    check_model(config.model)
    check_method(config.model, config.decode)
    _check_ignored(config, given)
    _check_batches(config)
    check_vocabularies(config, given)
    _check_own_text(config, given)
    _check_normalization(config)
    _check_packing(config)
    check_windows(config, given)
    check_whole_files(config, given)


def check_model(model: ModelConfig) -> None:
    """Raises InputError if two fields of the model contradict each other."""
    if model.decoder == "masked" and model.architecture != "encoder_decoder":
        raise InputError(
            "config.model.decoder: 'masked' requires model.architecture='encoder_decoder', "
            f"whose encoder predicts the length; got {model.architecture!r}."
        )
    if model.decoder == "masked" and model.position == "none":
        raise InputError(
            "config.model.position: 'none' cannot distinguish the masked tokens of "
            "model.decoder='masked', which all have the same embedding; choose one of "
            f"{', '.join(each for each in CHOICES['model.position'] if each != 'none')}."
        )
    _check_heads(model)
    _check_attention(model)


def _check_heads(model: ModelConfig) -> None:
    """Raises InputError if the widths do not divide."""
    if model.d_head is None and model.d_model % model.num_heads:
        raise InputError(
            f"config.model.num_heads: {model.num_heads} heads do not divide d_model = "
            f"{model.d_model}; change one of the two, or set model.d_head."
        )
    d_head = model.d_head or model.d_model // model.num_heads
    paired = {"sinusoidal": ("d_model", model.d_model), "rotary": ("d_head", d_head)}
    field, width = paired.get(model.position, ("", 0))
    if width % 2:
        raise InputError(
            f"config.model.{field}: {model.position} positions pair a sine with a cosine and need "
            f"an even width, got {width}; make it even, or use another model.position."
        )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise InputError(
            f"config.model.num_kv_heads: {model.num_kv_heads} does not divide num_heads = "
            f"{model.num_heads}, so queries cannot share them evenly; 1 is multi-query attention."
        )


def _check_attention(model: ModelConfig) -> None:
    """Raises InputError if the position scheme or the backend does not support the attention."""
    if model.attention == "additive" and model.position in PRODUCT_POSITIONS:
        raise InputError(
            f"config.model.attention: {model.position!r} positions act through the product of "
            "query and key, which additive attention does not compute; use another "
            "model.position, or attention='dot_product'."
        )
    needs_weights = {
        "attention = additive": model.attention == "additive",
        f"attention_dropout = {model.attention_dropout}": model.attention_dropout > 0,
        "relative_values = True": model.position == "relative" and model.relative_values,
    }
    if model.backend not in ("auto", "reference") and any(needs_weights.values()):
        setting = next(name for name, is_set in needs_weights.items() if is_set)
        raise InputError(
            f"config.model.backend: {model.backend!r} does not support model.{setting}; use "
            "'reference' or 'auto'."
        )


def check_method(model: ModelConfig, decode: DecodeConfig) -> None:
    """Raises InputError if the model does not support the decoding method or its options."""
    if model.decoder == "masked" and decode.method != "mask_predict":
        raise InputError(
            f"config.decode.method: {decode.method!r} generates token by token, and a model with "
            "model.decoder='masked' is not trained for that; use decode.method='mask_predict'."
        )
    if model.decoder != "masked" and decode.method == "mask_predict":
        raise InputError(
            "config.decode.method: 'mask_predict' fills in masked tokens, and a model with "
            "model.decoder='causal' is not trained for that; use model.decoder='masked', or "
            "another decode.method."
        )
    if decode.top_p is not None and decode.top_p > 1:
        raise InputError(f"config.decode.top_p: expected a share of at most 1, got {decode.top_p}.")
    if decode.no_repeat_ngram is not None and decode.method == "mask_predict":
        raise InputError(
            "config.decode.no_repeat_ngram: 'mask_predict' predicts all tokens at once, so it "
            "cannot exclude one by those before it; leave it unset."
        )


def _check_ignored(config: Config, given: Set[str]) -> None:
    """Raises InputError if a given field has no effect."""
    for name in sorted(given & READ_IF.keys()):
        other, wanted = READ_IF[name]
        if _value(config, other) not in wanted:
            default = _value(Config(), name)
            is_default = _value(config, name) == default
            this = "leave this unset" if is_default else f"this to {default!r}"
            needed = " or ".join(f"{other}={value!r}" for value in wanted)
            if wanted == CHOICES.get(other):  # any value
                needed = other
            raise InputError(f"config.{name}: requires {needed}; set that, or {this}.")
    if config.model.architecture == "encoder_classifier":
        for name in sorted(given):
            if name.startswith(("decode.", "model.output_bias", "model.tie_embeddings")):
                raise InputError(
                    f"config.{name}: a classifier generates no text and ignores this; leave it "
                    "unset."
                )


def _value(config: Config, name: str) -> object:
    """Returns the value of 'section.field'."""
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


def _check_batches(config: Config) -> None:
    """Raises InputError if buckets, rows and microbatches do not fit together."""
    data, accumulate = config.data, config.optim.accumulate_steps
    lengths = data.row_lengths
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 1:
        raise InputError(
            f"config.data.buckets: expected increasing positive lengths, got {data.buckets}."
        )
    if data.windows is None and data.buckets[-1] > config.model.max_length:
        raise InputError(
            f"config.data.buckets: the longest, {data.buckets[-1]}, is over model.max_length = "
            f"{config.model.max_length}; shorten the bucket or raise model.max_length."
        )
    longest = lengths[-1]
    of_rows = "the longest bucket" if data.windows is None else "data.windows"
    if data.tokens_per_batch < longest * data.rows_multiple:
        raise InputError(
            f"config.data.tokens_per_batch: {data.tokens_per_batch} is too small for "
            f"data.rows_multiple = {data.rows_multiple} rows of "
            f"{of_rows}, {longest}; it must be at least {longest * data.rows_multiple}."
        )
    if data.rows_multiple % accumulate:
        raise InputError(
            f"config.optim.accumulate_steps: {accumulate} does not divide data.rows_multiple "
            f"= {data.rows_multiple}, so a batch cannot be split into equal microbatches; change "
            "one of the two."
        )


def _check_own_text(config: Config, given: Set[str]) -> None:
    """Raises InputError if a dataset lacks files or cannot read them."""
    data = config.data
    datasets = {
        "train": data.dataset,
        "validation": data.validation_dataset or data.dataset,
        "test": data.test_dataset or data.dataset,
    }
    for split, dataset in datasets.items():
        files = getattr(data, f"{split}_files")
        if files and dataset not in OWN_TEXT:
            raise InputError(
                f"config.data.{split}_files: {dataset} reads no files; leave them out, or choose "
                f"one of {', '.join(OWN_TEXT)} as the dataset."
            )
        needed = split == "train" or dataset != data.dataset
        if not files and dataset in OWN_TEXT and needed:
            example = ("a.en", "a.de") if dataset == "parallel_text" else ("a.tsv",)
            raise InputError(
                f"config.data.{split}_files: required by {dataset}, for example {example}."
            )
    for name in ("faults", "longest_line"):
        if f"data.{name}" in given and not set(OWN_TEXT) & set(datasets.values()):
            raise InputError(
                f"config.data.{name}: applies only to custom text: {', '.join(OWN_TEXT)}; leave "
                "it unset."
            )
    _check_tables(data)
    if data.languages and (len(data.languages) != 2 or data.languages[0] == data.languages[1]):
        raise InputError(
            f"config.data.languages: expected two different names, or (), got {data.languages}."
        )


def _check_tables(data: DataConfig) -> None:
    """Raises InputError if no file can have the header or the quotes of the config."""
    files = (*data.train_files, *data.validation_files, *data.test_files)
    suffixes = [os.path.basename(without_suffix(name)).rpartition(".")[2].lower() for name in files]
    forms = ("tsv",) if data.quoted is False else ("tsv", "csv")
    for name in ("header", "quoted"):
        is_possible = any(each in forms or set("*?[") & set(each) for each in suffixes)
        if getattr(data, name) and not is_possible:
            raise InputError(
                f"config.data.{name}: applies only to custom text in {' and '.join(forms)} files; "
                "leave it unset."
            )


def _check_normalization(config: Config) -> None:
    """Raises InputError if the config normalises texts whose every character counts."""
    if config.data.normalization in (None, "none"):
        return
    if config.model.architecture == "decoder_lm":
        raise InputError(
            "config.data.normalization: changes sources, and a language model has none; leave it "
            "unset."
        )
    if config.data.tokenizer == "marian":
        raise InputError(
            "config.data.normalization: an imported tokenizer normalises by its own rules; leave "
            "it unset."
        )


def _check_packing(config: Config) -> None:
    if not config.data.packing:
        return
    if config.model.architecture == "encoder_classifier":
        raise InputError(
            "config.data.packing: model.architecture='encoder_classifier' needs one text a row; "
            "leave it unset."
        )
    if config.model.decoder == "masked":
        raise InputError(
            "config.data.packing: model.decoder='masked' learns the length of one target a row; "
            "leave it unset."
        )
