"""The one crossing from a user's ConfigDict to the typed settings of `fields`, strict.

A config file only states what differs from the defaults:

    from flaxformer_lite.config import default_config

    def get_config():
        config = default_config()
        config.model.d_model = 1024
        return config
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ml_collections import config_dict

from flaxformer_lite.fields import (
    BELOW_ONE,
    CHOICES,
    HIGHEST,
    LOWEST,
    MAY_DIFFER_ON_RESUME,
    OWN_TEXT,
    POSITIVE,
    PRODUCT_POSITIONS,
    READ_IF,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)

__all__ = [  # what users need, from one place
    "CHOICES",
    "MAY_DIFFER_ON_RESUME",
    "READ_IF",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "check_method",
    "check_model",
    "default_config",
    "did_you_mean",
    "differences",
    "parse_average",
    "resolve",
    "to_config_dict",
    "to_dict",
    "with_classes",
    "with_vocabulary",
]


def default_config() -> config_dict.ConfigDict:
    """All defaults as a ConfigDict; fields that may be None are typed placeholders, so flags can set them."""
    return to_config_dict(Config())


def to_config_dict(config: Config) -> config_dict.ConfigDict:
    """A `Config` as the ConfigDict that `resolve` turns into the same `Config`."""
    result = config_dict.ConfigDict()
    for section in dataclasses.fields(config):
        result[section.name] = config_dict.ConfigDict()
        values, hints = getattr(config, section.name), typing.get_type_hints(section.type)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if types.NoneType in typing.get_args(hints[field.name]):
                result[section.name][field.name] = config_dict.placeholder(_plain_type(hints[field.name]))
            if value is not None:
                result[section.name][field.name] = value
    return result


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """A `Config` as plain nested dicts, ready for JSON."""
    return dataclasses.asdict(config)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Fields that differ: (name, value in `old`, value in `new`), names as 'section.field'."""
    return [
        (f"{section}.{name}", value, to_dict(new)[section][name])
        for section, values in to_dict(old).items()
        for name, value in values.items()
        if value != to_dict(new)[section][name]
    ]


def resolve(user_config: Mapping[str, Any]) -> Config:
    """The strict crossing from a ConfigDict (or nested dicts) to a `Config`.

    Raises:
      ValueError: an unknown section or field (the nearest valid name is given), a value of the wrong type or
        out of range, or two fields that contradict each other. The message starts with the field's name.
    """
    sections = typing.get_type_hints(Config)
    if not isinstance(user_config, (Mapping, config_dict.ConfigDict)):
        raise ValueError(f"config: expected the sections {', '.join(sections)}, got {user_config!r}.")
    _check_names("", user_config, sections)
    resolved = {}
    for section, section_class in sections.items():
        values, hints = user_config.get(section, {}), typing.get_type_hints(section_class)
        if not isinstance(values, (Mapping, config_dict.ConfigDict)):
            raise ValueError(f"config.{section}: expected a section with fields, got {values!r}.")
        _check_names(f"{section}.", values, hints)
        checked = {name: _check_value(f"{section}.{name}", values[name], hints[name]) for name in values}
        resolved[section] = section_class(**checked)
    config = Config(**resolved)
    _check_contradictions(config)
    return config


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """`config` with `model.vocab_size` set to what the tokenizer has or will have; ValueError if it was another."""
    return _with_model_size(config, "vocab_size", vocab_size, whose="the tokenizer's size")


def with_classes(config: Config, label_names: list[str] | None) -> Config:
    """`config` with `model.num_classes` set to how many labels the dataset has; ValueError if it was another."""
    count = None if label_names is None else len(label_names)
    return _with_model_size(config, "num_classes", count, whose="what the dataset has")


def _with_model_size(config: Config, field: str, size: int | None, *, whose: str) -> Config:
    given = getattr(config.model, field)
    if given not in (None, size):
        raise ValueError(f"config.model.{field}: expected {size}, {whose}, or unset; got {given}.")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{field: size}))


def _check_names(prefix: str, given: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    for name in given:
        if name not in valid:
            raise ValueError(f"config.{prefix}{name}: there is no such field{did_you_mean(name, valid)}")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """How a message about a wrong `name` ends: "; did you mean 'x'?", or all that is valid if nothing is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; valid are {', '.join(valid)}."


def _plain_type(hint: Any) -> type:
    """int for `int | None`, tuple for `tuple[int, ...]`."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if option is not types.NoneType:
            return typing.get_origin(option) or option
    raise AssertionError(hint)


def _check_value(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type, or ValueError; an int is accepted for a float, nothing else is converted."""
    plain = _plain_type(hint)
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if plain is tuple and isinstance(value, list):
        value = tuple(value)
    item_type = typing.get_args(hint)[0] if plain is tuple else None
    wrong_item = plain is tuple and isinstance(value, tuple) and not all(type(item) is item_type for item in value)
    if type(value) is not plain or wrong_item:
        wanted = f"a tuple of {item_type.__name__}" if plain is tuple else plain.__name__
        raise ValueError(f"config.{name}: expected {wanted}, got {value!r} ({type(value).__name__}).")
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"config.{name}: {value!r} is not a choice{did_you_mean(value, CHOICES[name])}")
    if name in LOWEST and not value >= LOWEST[name]:  # NaN is neither
        raise ValueError(f"config.{name}: expected {LOWEST[name]} or more, got {value}.")
    if name in HIGHEST and value > HIGHEST[name]:
        raise ValueError(f"config.{name}: expected {HIGHEST[name]} or less, got {value}.")
    if name in POSITIVE and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"config.{name}: expected a positive finite number, got {value}.")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise ValueError(f"config.{name}: expected at least 0 and less than 1, got {value}.")
    return value


def check_model(model: ModelConfig) -> None:
    """Raises ValueError where two fields of the model contradict each other."""
    if model.decoder == "masked" and model.architecture != "encoder_decoder":
        raise ValueError(
            "config.model.decoder: 'masked' goes with model.architecture='encoder_decoder' only, which tells the "
            f"length; got {model.architecture!r}."
        )
    if model.decoder == "masked" and model.position == "none":
        raise ValueError(
            "config.model.position: 'none' cannot tell the masked tokens of model.decoder='masked' apart, which are "
            f"all alike; choose one of {', '.join(CHOICES['model.position'][:-1])}."
        )
    if model.d_head is None and model.d_model % model.num_heads:
        raise ValueError(
            f"config.model.num_heads: {model.num_heads} heads do not divide d_model = {model.d_model}; "
            "change one of the two, or set model.d_head."
        )
    d_head = model.d_head or model.d_model // model.num_heads
    for scheme, field, width in (("sinusoidal", "d_model", model.d_model), ("rotary", "d_head", d_head)):
        if model.position == scheme and width % 2:
            raise ValueError(
                f"config.model.{field}: {scheme} positions pair a sine with a cosine and need an even width, got "
                f"{width}; make it even, or use another model.position."
            )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise ValueError(
            f"config.model.num_kv_heads: {model.num_kv_heads} does not divide num_heads = {model.num_heads}, so "
            "queries cannot share them evenly; 1 is multi-query attention."
        )
    if model.attention == "additive" and model.position in PRODUCT_POSITIONS:
        raise ValueError(
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
        raise ValueError(f"config.model.backend: {model.backend!r} cannot do model.{what}; use 'reference' or 'auto'.")


def check_method(model: ModelConfig, decode: DecodeConfig) -> None:
    """Raises ValueError where the decoder cannot write by the method, or the method cannot do what else is asked."""
    if model.decoder == "masked" and decode.method != "mask_predict":
        raise ValueError(
            f"config.decode.method: {decode.method!r} writes token by token, and model.decoder='masked' has not "
            "learned to; use decode.method='mask_predict'."
        )
    if model.decoder != "masked" and decode.method == "mask_predict":
        raise ValueError(
            "config.decode.method: 'mask_predict' fills in masked tokens, and model.decoder='causal' has not learned "
            "to; use model.decoder='masked', or another decode.method."
        )
    if decode.no_repeat_ngram is not None and decode.method == "mask_predict":
        raise ValueError(
            "config.decode.no_repeat_ngram: 'mask_predict' writes all tokens at once, so none comes after another; "
            "leave it out."
        )


def parse_average(name: str, text: str) -> tuple[str, int]:
    """('last', 5) for 'last:5'; raises ValueError, about `name`, for what is neither that nor like 'best:5'."""
    which, _, count = text.partition(":")
    if which not in ("last", "best") or not (count.isascii() and count.isdecimal() and int(count)):
        raise ValueError(f"{name}: expected last:N or best:N, such as last:5, got {text!r}.")
    return which, int(count)


def _check_average(train: TrainConfig) -> None:
    """Raises ValueError if at the end there may be fewer checkpoints than `train.average` takes."""
    which, count = parse_average("config.train.average", train.average)
    field = {"last": "keep_newest", "best": "keep_best"}[which]
    if getattr(train, field) < count:
        raise ValueError(
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
        raise ValueError(
            f"config.train.average: {train.average!r} needs {count} checkpoints, and {steps} steps make {made}; "
            f"average fewer, train longer, or lower train.{'eval_every' if which == 'best' else 'checkpoint_every'}."
        )


def _check_contradictions(config: Config) -> None:
    check_model(config.model)
    check_method(config.model, config.decode)
    data, parallel = config.data, config.parallel
    changed = {name: default for name, default, _ in differences(Config(), config)}
    for name in sorted(changed.keys() & READ_IF.keys()):
        other, wanted = READ_IF[name]
        if getattr(getattr(config, other.split(".")[0]), other.split(".")[1]) != wanted:
            raise ValueError(
                f"config.{name}: goes with {other}={wanted!r} only; set that, or this to {changed[name]!r}."
            )
    for name in sorted(changed) if config.model.architecture == "encoder_classifier" else ():
        if name.startswith(("decode.", "model.output_bias", "model.tie_embeddings")):
            raise ValueError(f"config.{name}: a classifier writes no text, and would ignore it; leave it unset.")
    if not data.buckets or list(data.buckets) != sorted(set(data.buckets)) or data.buckets[0] < 1:
        raise ValueError(f"config.data.buckets: expected increasing positive lengths, got {data.buckets}.")
    if data.buckets[-1] > config.model.max_length:
        raise ValueError(
            f"config.data.buckets: the longest, {data.buckets[-1]}, is over model.max_length = "
            f"{config.model.max_length}; shorten the bucket or raise model.max_length."
        )
    if data.tokens_per_batch < data.buckets[-1] * data.rows_multiple:
        raise ValueError(
            f"config.data.tokens_per_batch: {data.tokens_per_batch} does not hold data.rows_multiple = "
            f"{data.rows_multiple} rows of the longest bucket, {data.buckets[-1]}; it must be at least "
            f"{data.buckets[-1] * data.rows_multiple}."
        )
    if data.rows_multiple % config.optim.accumulate_steps:
        raise ValueError(
            f"config.optim.accumulate_steps: {config.optim.accumulate_steps} does not divide data.rows_multiple "
            f"= {data.rows_multiple}, so a batch cannot be split into equal microbatches; change one of the two."
        )
    if config.model.vocab_size is not None and config.model.vocab_size != data.vocab_size:
        raise ValueError(
            f"config.model.vocab_size: {config.model.vocab_size} contradicts data.vocab_size = "
            f"{data.vocab_size}, what the tokenizer is trained to; leave model.vocab_size unset."
        )
    _check_own_text(data, changed)
    if data.packing and config.model.architecture == "encoder_classifier":
        raise ValueError(
            "config.data.packing: a text to classify has a row of its own; leave it unset with "
            "model.architecture='encoder_classifier'."
        )
    if data.packing and config.model.decoder == "masked":
        raise ValueError(
            "config.data.packing: a masked decoder learns the length of one target a row; leave it unset with "
            "model.decoder='masked'."
        )
    if config.train.r_drop and not (config.model.dropout or config.model.attention_dropout):
        raise ValueError(
            "config.train.r_drop: it compares two draws of dropout, and model.dropout is 0; set that, or leave it out."
        )
    if config.decode.top_p is not None and config.decode.top_p > 1:
        raise ValueError(f"config.decode.top_p: expected a share of at most 1, got {config.decode.top_p}.")
    for axis in ("data", "fsdp", "tensor"):
        if (size := getattr(parallel, axis)) != -1 and size < 1:
            raise ValueError(
                f"config.parallel.{axis}: expected -1 (the rest of the devices) or at least 1, got {size}."
            )
        if axis != "data" and size != 1 and parallel.mode == "pmap":
            raise ValueError(
                f"config.parallel.{axis}: with parallel.mode='pmap' every device holds the whole model; leave it at 1, "
                "or use parallel.mode='mesh'."
            )
    if [parallel.data, parallel.fsdp, parallel.tensor].count(-1) > 1:
        raise ValueError(
            "config.parallel: -1 is all devices that the other two leave, so only one of data, fsdp and tensor may be "
            f"-1, got {parallel.data}, {parallel.fsdp} and {parallel.tensor}; say how many for the others."
        )
    if config.train.average is not None:
        _check_average(config.train)
    translated = config.train.best_metric in ("exact_match", "bleu", "chrf", "bleu_tokenized")
    if translated and config.model.architecture != "encoder_decoder":
        raise ValueError(
            f"config.train.best_metric: {config.train.best_metric!r} needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; choose 'loss' or 'accuracy'."
        )
    if translated and config.train.decode_examples == 0:
        raise ValueError(
            f"config.train.best_metric: {config.train.best_metric!r} needs translations, but "
            "train.decode_examples is 0; raise it, or choose 'loss' or 'accuracy'."
        )
    measured = {False: ("bleu", "chrf"), True: ("bleu_tokenized",)}  # by data.pretokenized
    if config.train.best_metric in measured[not data.pretokenized]:
        raise ValueError(
            f"config.train.best_metric: {config.train.best_metric!r} is not measured where data.pretokenized is "
            f"{data.pretokenized}; choose {' or '.join(map(repr, measured[data.pretokenized]))}, or another metric."
        )


def _check_own_text(data: DataConfig, changed: Collection[str]) -> None:
    """Files go with a dataset that reads them, and what says how they are read goes with files."""
    datasets = {"train": data.dataset, "validation": data.validation_dataset, "test": data.test_dataset}
    datasets = {split: dataset or data.dataset for split, dataset in datasets.items()}
    for split, dataset in datasets.items():
        files = getattr(data, f"{split}_files")
        if files and dataset not in OWN_TEXT:
            raise ValueError(
                f"config.data.{split}_files: {dataset} reads no files; leave them out, or choose one of "
                f"{', '.join(OWN_TEXT)} as the dataset."
            )
        needed = split == "train" or dataset != data.dataset
        if not files and dataset in OWN_TEXT and needed:
            raise ValueError(
                f"config.data.{split}_files: {dataset} needs them, for example "
                f"{('a.en', 'a.de') if dataset == 'parallel_text' else ('a.tsv',)}."
            )
    for name in ("faults", "longest_line"):
        if f"data.{name}" in changed and not set(OWN_TEXT) & set(datasets.values()):
            raise ValueError(f"config.data.{name}: goes with text of your own only: {', '.join(OWN_TEXT)}.")
    if data.languages and (len(data.languages) != 2 or data.languages[0] == data.languages[1]):
        raise ValueError(f"config.data.languages: expected two different names, or (), got {data.languages}.")
