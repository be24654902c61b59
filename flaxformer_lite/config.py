"""Converts a user's ConfigDict to the typed settings of `fields`, with strict checks.

A config file sets only the fields that differ from the defaults:

    from flaxformer_lite.config import default_config

    def get_config():
        config = default_config()
        config.model.d_model = 1024
        return config
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from flaxformer_lite.checks.config_checks import check_contradictions
from flaxformer_lite.checks.model_checks import check_method, check_model
from flaxformer_lite.checks.training_checks import check_training, parse_average
from flaxformer_lite.field_rules import (
    BELOW_ONE,
    CHOICES,
    HIGHEST,
    LOWEST,
    MAY_DIFFER_ON_RESUME,
    OWN_TEXT,
    POSITIVE,
    READ_IF,
)
from flaxformer_lite.fields import (
    Config,
    DataConfig,
    DecodeConfig,
    InitConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from flaxformer_lite.system.compressed import without_suffix
from flaxformer_lite.system.errors import InputError, did_you_mean

__all__ = [  # the names that users import
    "CHOICES",
    "MAY_DIFFER_ON_RESUME",
    "READ_IF",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "InitConfig",
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
    "source_language",
    "source_normalization",
    "target_language",
    "to_config_dict",
    "to_dict",
    "with_classes",
    "with_vocabulary",
]


class Section(config_dict.ConfigDict):
    """The fields of a section; remembers which were set to the value that they had already.

    Such a field was given although it changes nothing. `resolve` refuses it like any other value
    that would have no effect.
    """

    def __init__(self, *arguments: Any, **options: Any):
        object.__setattr__(self, "given", set())
        super().__init__(*arguments, **options)

    def __setitem__(self, name: str, value: Any) -> None:
        unchanged = name in self and self[name] == value
        super().__setitem__(name, value)
        (self.given.add if unchanged else self.given.discard)(name)


def default_config() -> config_dict.ConfigDict:
    """Returns all defaults as a ConfigDict.

    Fields that may be None are typed placeholders, so that flags can set them.
    """
    return to_config_dict(Config())


def to_config_dict(config: Config) -> config_dict.ConfigDict:
    """Returns the ConfigDict that `resolve` converts to `config`."""
    result = config_dict.ConfigDict()
    for section in dataclasses.fields(config):
        result[section.name] = Section()
        values, hints = getattr(config, section.name), typing.get_type_hints(section.type)
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if types.NoneType in typing.get_args(hints[field.name]):
                result[section.name][field.name] = config_dict.placeholder(
                    _plain_type(hints[field.name])
                )
            if value is not None:
                result[section.name][field.name] = value
    return result


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Returns a `Config` as plain nested dicts, ready for JSON."""
    return dataclasses.asdict(config)


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Returns the fields that differ: ('section.field', value in `old`, value in `new`)."""
    return [
        (f"{section}.{name}", value, to_dict(new)[section][name])
        for section, values in to_dict(old).items()
        for name, value in values.items()
        if value != to_dict(new)[section][name]
    ]


def resolve(
    user_config: Mapping[str, Any] | config_dict.ConfigDict, *, given: Collection[str] = ()
) -> Config:
    """Returns the `Config` of a ConfigDict or of nested dicts.

    Args:
      given: fields, 'section.field', that a user gave, even if the value is the default. Those that
        a config file or a flag set in `default_config()` are known.

    Raises:
      InputError: a section or field is unknown (the message suggests the nearest name), a value
        has the wrong type or is out of range, or two fields contradict each other. The message
        starts with the field's name.
    """
    sections = typing.get_type_hints(Config)
    if not isinstance(user_config, (Mapping, config_dict.ConfigDict)):
        raise InputError(
            f"config: expected the sections {', '.join(sections)}, got {user_config!r}."
        )
    _check_names("", user_config, sections)
    resolved = {}
    for section, section_class in sections.items():
        values, hints = user_config.get(section, {}), typing.get_type_hints(section_class)
        if not isinstance(values, (Mapping, config_dict.ConfigDict)):
            raise InputError(f"config.{section}: expected a section with fields, got {values!r}.")
        _check_names(f"{section}.", values, hints)
        checked = {
            name: _check_value(f"{section}.{name}", values[name], hints[name]) for name in values
        }
        resolved[section] = section_class(**checked)
    config = Config(**resolved)
    given = {*given, *_given_unchanged(user_config)}
    given |= {name for name, *_ in differences(Config(), config)}
    check_contradictions(config, given)
    check_training(config, given)
    return config


def _given_unchanged(user_config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the fields that were set to the value that they had already, see `Section`."""
    for section, values in user_config.items():
        yield from (f"{section}.{name}" for name in getattr(values, "given", ()))


def with_vocabulary(
    config: Config, vocab_size: int, target_vocab_size: int | None = None
) -> Config:
    """Returns `config` with the sizes of the vocabularies set to those of the tokenizer.

    Args:
      target_vocab_size: of the target, if it has a vocabulary of its own; None: both sides share
        one.

    Raises:
      InputError: `model.vocab_size` or `model.target_vocab_size` is set to another size.
    """
    config = _with_model_size(config, "vocab_size", vocab_size, whose="the tokenizer's size")
    shares = target_vocab_size is None
    whose = "as both sides share a tokenizer" if shares else "the size of the target's tokenizer"
    return _with_model_size(config, "target_vocab_size", target_vocab_size, whose=whose)


def with_classes(config: Config, label_names: list[str] | None) -> Config:
    """Returns `config` with `model.num_classes` set to the number of labels of the dataset.

    Raises:
      InputError: `model.num_classes` is set to another number.
    """
    count = None if label_names is None else len(label_names)
    return _with_model_size(
        config, "num_classes", count, whose="the number of classes of the dataset"
    )


def _with_model_size(config: Config, field: str, size: int | None, *, whose: str) -> Config:
    given = getattr(config.model, field)
    if given not in (None, size):
        raise InputError(f"config.model.{field}: expected {size}, {whose}, or unset; got {given}.")
    changed: dict[str, Any] = {field: size}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changed))


def _check_names(prefix: str, given: Iterable[str], valid: Iterable[str]) -> None:
    valid = list(valid)
    for name in given:
        if name not in valid:
            raise InputError(
                f"config.{prefix}{name}: there is no such field{did_you_mean(name, valid)}"
            )


def source_normalization(config: Config) -> str:
    """Returns `data.normalization`, or its default: 'whitespace' for sources of custom text."""
    data, architecture = config.data, config.model.architecture
    if data.normalization is not None:
        return data.normalization
    has_source = architecture != "decoder_lm" and data.tokenizer != "marian"
    return "whitespace" if has_source and data.dataset in OWN_TEXT else "none"


def source_language(config: Config) -> str | None:
    """Returns the source language of a run; None if it has none or is unknown."""
    data = config.data
    if config.model.architecture == "encoder_classifier":
        return None
    if data.source_language:
        return data.source_language
    return (_languages(data) or (None,))[0]


def target_language(config: Config) -> str | None:
    """Returns the target language of a run; None if it has none or is unknown."""
    languages = _languages(config.data)
    if config.model.architecture != "encoder_decoder" or len(languages) != 2:
        return None
    return languages[1] if languages[0] == source_language(config) else languages[0]


def _languages(data: DataConfig) -> tuple[str, ...]:
    """Returns the 2 languages, in the order of the config or the files; () if unknown."""
    if data.languages:
        return data.languages
    if data.dataset in OWN_TEXT:
        endings = [Path(without_suffix(path.rstrip("*"))).suffix[1:] for path in data.train_files]
        return tuple(endings) if len(set(endings)) == 2 and all(endings) else ()
    if data.tokenizer == "marian" and data.dataset == DataConfig().dataset:
        return ()  # imported weights, not trained yet
    first, _, second = data.dataset.rpartition("/")[2].partition(":")[0].partition("-")
    return (first, second) if second else ()


def _plain_type(hint: Any) -> type:
    """Returns int for `int | None`, and tuple for `tuple[int, ...]`."""
    for option in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if option is not types.NoneType:
            plain: type = typing.get_origin(option) or option
            return plain
    raise AssertionError(hint)


def _check_value(name: str, value: Any, hint: Any) -> Any:
    """Returns `value` as the field's type, or raises InputError.

    An int is converted to a float, and a list to a tuple; nothing else is converted.
    """
    plain = _plain_type(hint)
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        is_large = abs(value) > sys.float_info.max
        value = math.copysign(math.inf, value > 0 or -1) if is_large else float(value)
    if plain is tuple and isinstance(value, list):
        value = tuple(value)
    item_type = typing.get_args(hint)[0] if plain is tuple else None
    wrong_item = (
        plain is tuple
        and isinstance(value, tuple)
        and not all(type(item) is item_type for item in value)
    )
    kind = type(value)
    if kind is not plain or wrong_item:
        wanted = plain.__name__ if item_type is None else f"a tuple of {item_type.__name__}"
        raise InputError(f"config.{name}: expected {wanted}, got {value!r} ({kind.__name__}).")
    if name in CHOICES and value not in CHOICES[name]:
        raise InputError(
            f"config.{name}: {value!r} is not a choice{did_you_mean(value, CHOICES[name])}"
        )
    if name in LOWEST and not value >= LOWEST[name]:  # not `<`: NaN is refused too
        raise InputError(f"config.{name}: expected {LOWEST[name]} or more, got {value}.")
    if name in HIGHEST and value > HIGHEST[name]:
        raise InputError(f"config.{name}: expected {HIGHEST[name]} or less, got {value}.")
    if name in POSITIVE and not 0 < value < math.inf:
        raise InputError(f"config.{name}: expected a positive finite number, got {value}.")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise InputError(f"config.{name}: expected at least 0 and less than 1, got {value}.")
    return value
