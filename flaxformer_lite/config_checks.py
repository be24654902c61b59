"""Fields of a config that contradict each other, or that would be ignored: each is refused by its name."""

import math
from collections.abc import Mapping
from typing import Any

from flaxformer_lite.fields import (
    CHOICES,
    OWN_TEXT,
    PRODUCT_POSITIONS,
    READ_IF,
    Config,
    DecodeConfig,
    ModelConfig,
    TrainConfig,
)
from flaxformer_lite.system.errors import InputError


def check_contradictions(config: Config, changed: Mapping[str, Any]) -> None:
    """Raises InputError if two fields contradict each other.

    Args:
      changed: names of the fields that differ from their defaults, as 'section.field', and the defaults.
    """
    check_model(config.model)
    check_method(config.model, config.decode)
    _check_ignored(config, changed)
    _check_batches(config)
    _check_own_text(config, changed)
    _check_packing(config)
    _check_training(config)
    _check_parallel(config)
    _check_best_metric(config)


def check_model(model: ModelConfig) -> None:
    """Raises InputError where two fields of the model contradict each other."""
    if model.decoder == "masked" and model.architecture != "encoder_decoder":
        raise InputError(
            "config.model.decoder: 'masked' goes with model.architecture='encoder_decoder' only, which tells the "
            f"length; got {model.architecture!r}."
        )
    if model.decoder == "masked" and model.position == "none":
        raise InputError(
            "config.model.position: 'none' cannot tell the masked tokens of model.decoder='masked' apart, which are "
            f"all alike; choose one of {', '.join(CHOICES['model.position'][:-1])}."
        )
    if model.d_head is None and model.d_model % model.num_heads:
        raise InputError(
            f"config.model.num_heads: {model.num_heads} heads do not divide d_model = {model.d_model}; "
            "change one of the two, or set model.d_head."
        )
    d_head = model.d_head or model.d_model // model.num_heads
    for scheme, field, width in (("sinusoidal", "d_model", model.d_model), ("rotary", "d_head", d_head)):
        if model.position == scheme and width % 2:
            raise InputError(
                f"config.model.{field}: {scheme} positions pair a sine with a cosine and need an even width, got "
                f"{width}; make it even, or use another model.position."
            )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise InputError(
            f"config.model.num_kv_heads: {model.num_kv_heads} does not divide num_heads = {model.num_heads}, so "
            "queries cannot share them evenly; 1 is multi-query attention."
        )
    if model.attention == "additive" and model.position in PRODUCT_POSITIONS:
        raise InputError(
            f"config.model.attention: {model.position!r} positions act through the product of query and key, which "
            "additive attention has not; use another model.position, or attention='dot_product'."
        )
    on_weights = {
        "attention = additive": model.attention == "additive",
        f"attention_dropout = {model.attention_dropout}": model.attention_dropout > 0,
        "relative_values = True": model.position == "relative" and model.relative_values,
    }
    if model.backend not in ("auto", "reference") and any(on_weights.values()):
        what = next(name for name, wanted in on_weights.items() if wanted)
        raise InputError(f"config.model.backend: {model.backend!r} cannot do model.{what}; use 'reference' or 'auto'.")


def check_method(model: ModelConfig, decode: DecodeConfig) -> None:
    """Raises InputError where the decoder cannot write by the method, or the method cannot do what else is asked."""
    if model.decoder == "masked" and decode.method != "mask_predict":
        raise InputError(
            f"config.decode.method: {decode.method!r} writes token by token, and model.decoder='masked' has not "
            "learned to; use decode.method='mask_predict'."
        )
    if model.decoder != "masked" and decode.method == "mask_predict":
        raise InputError(
            "config.decode.method: 'mask_predict' fills in masked tokens, and model.decoder='causal' has not learned "
            "to; use model.decoder='masked', or another decode.method."
        )
    if decode.no_repeat_ngram is not None and decode.method == "mask_predict":
        raise InputError(
            "config.decode.no_repeat_ngram: 'mask_predict' writes all tokens at once, so none comes after another; "
            "leave it out."
        )


def _check_ignored(config: Config, changed: Mapping[str, Any]) -> None:
    """A field that was changed must have an effect."""
    for name in sorted(changed.keys() & READ_IF.keys()):
        other, wanted = READ_IF[name]
        section, field = other.split(".")
        if getattr(getattr(config, section), field) != wanted:
            raise InputError(
                f"config.{name}: goes with {other}={wanted!r} only; set that, or this to {changed[name]!r}."
            )
    if config.model.architecture == "encoder_classifier":
        for name in sorted(changed):
            if name.startswith(("decode.", "model.output_bias", "model.tie_embeddings")):
                raise InputError(f"config.{name}: a classifier writes no text, and would ignore it; leave it unset.")


def _check_batches(config: Config) -> None:
    """Buckets, rows and microbatches fit into each other."""
    data, accumulate = config.data, config.optim.accumulate_steps
    if not data.buckets or list(data.buckets) != sorted(set(data.buckets)) or data.buckets[0] < 1:
        raise InputError(f"config.data.buckets: expected increasing positive lengths, got {data.buckets}.")
    if data.buckets[-1] > config.model.max_length:
        raise InputError(
            f"config.data.buckets: the longest, {data.buckets[-1]}, is over model.max_length = "
            f"{config.model.max_length}; shorten the bucket or raise model.max_length."
        )
    if data.tokens_per_batch < data.buckets[-1] * data.rows_multiple:
        raise InputError(
            f"config.data.tokens_per_batch: {data.tokens_per_batch} does not hold data.rows_multiple = "
            f"{data.rows_multiple} rows of the longest bucket, {data.buckets[-1]}; it must be at least "
            f"{data.buckets[-1] * data.rows_multiple}."
        )
    if data.rows_multiple % accumulate:
        raise InputError(
            f"config.optim.accumulate_steps: {accumulate} does not divide data.rows_multiple "
            f"= {data.rows_multiple}, so a batch cannot be split into equal microbatches; change one of the two."
        )
    if config.model.vocab_size not in (None, data.vocab_size):
        raise InputError(
            f"config.model.vocab_size: {config.model.vocab_size} contradicts data.vocab_size = "
            f"{data.vocab_size}, what the tokenizer is trained to; leave model.vocab_size unset."
        )


def _check_own_text(config: Config, changed: Mapping[str, Any]) -> None:
    """Files go with a dataset that reads them, and what says how they are read goes with files."""
    data = config.data
    datasets = {"train": data.dataset, "validation": data.validation_dataset, "test": data.test_dataset}
    datasets = {split: dataset or data.dataset for split, dataset in datasets.items()}
    for split, dataset in datasets.items():
        files = getattr(data, f"{split}_files")
        if files and dataset not in OWN_TEXT:
            raise InputError(
                f"config.data.{split}_files: {dataset} reads no files; leave them out, or choose one of "
                f"{', '.join(OWN_TEXT)} as the dataset."
            )
        needed = split == "train" or dataset != data.dataset
        if not files and dataset in OWN_TEXT and needed:
            raise InputError(
                f"config.data.{split}_files: {dataset} needs them, for example "
                f"{('a.en', 'a.de') if dataset == 'parallel_text' else ('a.tsv',)}."
            )
    for name in ("faults", "longest_line"):
        if f"data.{name}" in changed and not set(OWN_TEXT) & set(datasets.values()):
            raise InputError(f"config.data.{name}: goes with text of your own only: {', '.join(OWN_TEXT)}.")
    if data.languages and (len(data.languages) != 2 or data.languages[0] == data.languages[1]):
        raise InputError(f"config.data.languages: expected two different names, or (), got {data.languages}.")


def _check_packing(config: Config) -> None:
    if not config.data.packing:
        return
    if config.model.architecture == "encoder_classifier":
        raise InputError(
            "config.data.packing: a text to classify has a row of its own; leave it unset with "
            "model.architecture='encoder_classifier'."
        )
    if config.model.decoder == "masked":
        raise InputError(
            "config.data.packing: a masked decoder learns the length of one target a row; leave it unset with "
            "model.decoder='masked'."
        )


def _check_training(config: Config) -> None:
    if config.train.r_drop and not (config.model.dropout or config.model.attention_dropout):
        raise InputError(
            "config.train.r_drop: it compares two passes with dropout, and model.dropout is 0; set that, or leave it "
            "out."
        )
    if config.decode.top_p is not None and config.decode.top_p > 1:
        raise InputError(f"config.decode.top_p: expected a share of at most 1, got {config.decode.top_p}.")
    if config.train.average is not None:
        _check_average(config.train)


def parse_average(name: str, text: str) -> tuple[str, int]:
    """('last', 5) for 'last:5'; raises InputError, about `name`, for what is neither that nor like 'best:5'."""
    which, _, count = text.partition(":")
    if which not in ("last", "best") or not (count.isascii() and count.isdecimal() and int(count)):
        raise InputError(f"{name}: expected last:N or best:N, such as last:5, got {text!r}.")
    return which, int(count)


def _check_average(train: TrainConfig) -> None:
    """Raises InputError if at the end there may be fewer checkpoints than `train.average` takes."""
    which, count = parse_average("config.train.average", train.average)
    field = {"last": "keep_newest", "best": "keep_best"}[which]
    if getattr(train, field) < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and train.{field} = "
            f"{getattr(train, field)} keeps fewer; set train.{field} to {count}."
        )
    steps, made_every = train.num_steps, (train.eval_every,)
    if train.patience is not None:
        steps = min(steps, (train.patience + 1) * train.eval_every)  # the earliest that it may stop at
    if which == "last":
        made_every += (train.checkpoint_every,)
    made = sum(steps // every for every in made_every) + all(steps % every for every in made_every)
    if which == "last":
        made -= steps // math.lcm(*made_every)  # counted twice
    if made < count:
        raise InputError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and {steps} steps make {made}; "
            f"average fewer, train longer, or lower train.{'eval_every' if which == 'best' else 'checkpoint_every'}."
        )


def _check_parallel(config: Config) -> None:
    """Sizes of the mesh: at most one is -1, the rest of the devices; with `pmap` there is `data` alone."""
    parallel = config.parallel
    sizes = {"data": parallel.data, "fsdp": parallel.fsdp, "tensor": parallel.tensor}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(
                f"config.parallel.{axis}: expected -1 (the rest of the devices) or at least 1, got {size}."
            )
        if axis != "data" and size != 1 and parallel.mode == "pmap":
            raise InputError(
                f"config.parallel.{axis}: with parallel.mode='pmap' every device holds the whole model; leave it at 1, "
                "or use parallel.mode='mesh'."
            )
    if list(sizes.values()).count(-1) > 1:
        raise InputError(
            "config.parallel: -1 is all devices that the other two leave, so only one of data, fsdp and tensor may be "
            f"-1, got {parallel.data}, {parallel.fsdp} and {parallel.tensor}; say how many for the others."
        )


def _check_best_metric(config: Config) -> None:
    """The metric that picks the best checkpoint is one that evaluations have."""
    metric, pretokenized = config.train.best_metric, config.data.pretokenized
    translated = metric in ("exact_match", "bleu", "chrf", "bleu_tokenized")
    if translated and config.model.architecture != "encoder_decoder":
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; choose 'loss' or 'accuracy'."
        )
    if translated and config.train.decode_examples == 0:
        raise InputError(
            f"config.train.best_metric: {metric!r} needs translations, but "
            "train.decode_examples is 0; raise it, or choose 'loss' or 'accuracy'."
        )
    measured = {False: ("bleu", "chrf"), True: ("bleu_tokenized",)}  # by data.pretokenized
    if metric in measured[not pretokenized]:
        raise InputError(
            f"config.train.best_metric: {metric!r} is not measured where data.pretokenized is "
            f"{pretokenized}; choose {' or '.join(map(repr, measured[pretokenized]))}, or another metric."
        )
