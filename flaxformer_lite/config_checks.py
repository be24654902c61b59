"""Refuses a config whose fields contradict each other or have no effect; names the field."""

import math
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
    TrainConfig,
)
from flaxformer_lite.init_checks import check_init
from flaxformer_lite.optim_checks import check_optim
from flaxformer_lite.regularization_checks import check_regularization
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError


def check_contradictions(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields contradict each other.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    check_model(config.model)
    check_method(config.model, config.decode)
    _check_ignored(config, given)
    _check_batches(config)
    _check_own_text(config, given)
    _check_normalization(config)
    _check_packing(config)
    check_regularization(config)
    _check_training(config)
    check_optim(config, given)
    _check_parallel(config)
    _check_best_metric(config)
    check_init(config, given)


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
    if not data.buckets or list(data.buckets) != sorted(set(data.buckets)) or data.buckets[0] < 1:
        raise InputError(
            f"config.data.buckets: expected increasing positive lengths, got {data.buckets}."
        )
    if data.buckets[-1] > config.model.max_length:
        raise InputError(
            f"config.data.buckets: the longest, {data.buckets[-1]}, is over model.max_length = "
            f"{config.model.max_length}; shorten the bucket or raise model.max_length."
        )
    if data.tokens_per_batch < data.buckets[-1] * data.rows_multiple:
        raise InputError(
            f"config.data.tokens_per_batch: {data.tokens_per_batch} is too small for "
            f"data.rows_multiple = {data.rows_multiple} rows of the longest bucket, "
            f"{data.buckets[-1]}; it must be at least {data.buckets[-1] * data.rows_multiple}."
        )
    if data.rows_multiple % accumulate:
        raise InputError(
            f"config.optim.accumulate_steps: {accumulate} does not divide data.rows_multiple "
            f"= {data.rows_multiple}, so a batch cannot be split into equal microbatches; change "
            "one of the two."
        )
    size = config.model.vocab_size or data.vocab_size
    if size > data.vocab_size or (size < data.vocab_size and data.vocab_limit == "hard"):
        raise InputError(
            f"config.model.vocab_size: {config.model.vocab_size} contradicts data.vocab_size = "
            f"{data.vocab_size}, the size of the tokenizer; leave model.vocab_size unset."
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


def _check_training(config: Config) -> None:
    if config.decode.top_p is not None and config.decode.top_p > 1:
        raise InputError(
            f"config.decode.top_p: expected a share of at most 1, got {config.decode.top_p}."
        )
    if config.train.average is not None:
        _check_average(config.train)


def parse_average(name: str, text: object) -> tuple[str, int]:
    """Returns ('last', 5) for 'last:5', and ('best', 5) for 'best:5'.

    Raises:
      InputError: `text` has another form; the message starts with `name`.
    """
    which, _, count = text.partition(":") if isinstance(text, str) else ("", "", "")
    is_number = count.isascii() and count.isdecimal() and len(count) < 10
    if which not in ("last", "best") or not (is_number and int(count)):
        raise InputError(f"{name}: expected last:N or best:N, such as last:5, got {text!r}.")
    return which, int(count)


def _check_average(train: TrainConfig) -> None:
    """Raises InputError if the run may end with fewer checkpoints than `train.average` needs."""
    which, count = parse_average("config.train.average", train.average)
    field = {"last": "keep_newest", "best": "keep_best"}[which]
    if getattr(train, field) < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and "
            f"train.{field} = {getattr(train, field)} keeps fewer; set train.{field} to {count}."
        )
    steps, made_every = train.num_steps, [train.eval_every]
    if train.patience is not None:
        steps = min(steps, (train.patience + 1) * train.eval_every)  # the earliest stop
    if which == "last":
        made_every.append(train.checkpoint_every)
    made = sum(steps // every for every in made_every) + all(steps % every for every in made_every)
    if which == "last":
        made -= steps // math.lcm(*made_every)  # counted under both
    if made < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and {steps} "
            f"steps make {made}; average fewer, train longer, or lower "
            f"train.{'eval_every' if which == 'best' else 'checkpoint_every'}."
        )


def _check_parallel(config: Config) -> None:
    """Raises InputError if the axes of the mesh contradict each other or the mode."""
    parallel = config.parallel
    sizes = {"data": parallel.data, "fsdp": parallel.fsdp, "tensor": parallel.tensor}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(
                f"config.parallel.{axis}: expected -1 (the rest of the devices) or at least 1, "
                f"got {size}."
            )
        if axis != "data" and size != 1 and parallel.mode == "pmap":
            raise InputError(
                f"config.parallel.{axis}: with parallel.mode='pmap' every device holds the whole "
                "model; leave it at 1, or use parallel.mode='mesh'."
            )
    if list(sizes.values()).count(-1) > 1:
        raise InputError(
            "config.parallel: -1 is all devices that the other two leave, so only one of data, "
            f"fsdp and tensor may be -1, got {parallel.data}, {parallel.fsdp} and "
            f"{parallel.tensor}; set the others."
        )


def _check_best_metric(config: Config) -> None:
    """Raises InputError if evaluations do not compute the metric of the best checkpoint."""
    metric, pretokenized = config.train.best_metric, config.data.pretokenized
    of_translations = metric in ("exact_match", "bleu", "chrf", "bleu_tokenized")
    if of_translations and config.model.architecture != "encoder_decoder":
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; choose 'loss' or "
            "'accuracy'."
        )
    if of_translations and config.train.decode_examples == 0:
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, but "
            "train.decode_examples is 0; raise it, or choose 'loss' or 'accuracy'."
        )
    if config.data.bleu_tokenizer is not None and pretokenized:
        raise InputError(
            "config.data.bleu_tokenizer: the texts of data.pretokenized=True are not tokenized "
            "again; leave it unset."
        )
    computed = {False: ("bleu", "chrf"), True: ("bleu_tokenized",)}  # by data.pretokenized
    if metric in computed[not pretokenized]:
        raise InputError(
            f"config.train.best_metric: {metric!r} is not computed if data.pretokenized is "
            f"{pretokenized}; choose {' or '.join(map(repr, computed[pretokenized]))}, or "
            "another metric."
        )
