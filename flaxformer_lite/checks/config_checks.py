"""Refuses fields that contradict each other or have no effect: of data, and of several sections."""

import os
from collections.abc import Set

from flaxformer_lite.checks.model_checks import check_method, check_model
from flaxformer_lite.checks.vocabularies import check_vocabularies
from flaxformer_lite.checks.window_checks import check_whole_files, check_windows
from flaxformer_lite.field_rules import CHOICES, OWN_TEXT, READ_IF
from flaxformer_lite.fields import Config, DataConfig
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError


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
