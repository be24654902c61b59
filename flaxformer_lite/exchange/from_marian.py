"""The import of a Marian model of Hugging Face: a new workdir, whose run is at step 0."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.data.tokens.tokenizer import MarianTokenizer
from flaxformer_lite.exchange.marian_folder import MarianFolder, read_folder
from flaxformer_lite.field_rules import FIXED_BY_WEIGHTS, NOT_IN_WEIGHTS, READ_IF
from flaxformer_lite.fields import Config, DecodeConfig, ModelConfig
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import new_folder, write_whole
from flaxformer_lite.training.checkpoint import Checkpoints


def import_run(
    folder: Path, workdir: Path, user_config: config_dict.ConfigDict, overrides: Sequence[str]
) -> ModelConfig:
    """Creates a workdir from a folder with a Marian model; returns the config of the model.

    Args:
      user_config: the settings to train with.
      overrides: `--config.section.field=value` arguments.

    Raises:
      InputError: as `read_folder`, `check` and `write`.
    """
    source = read_folder(folder)
    if any(override.lstrip("-").startswith("config.decode.method=") for override in overrides):
        source = dataclasses.replace(source, decode=of_any_method(source.decode))
    config = config_lib.resolve(config_files.override(with_weights(user_config, source), overrides))
    check(config, source)
    write(source, workdir, config)
    return source.model


def with_weights(config: config_dict.ConfigDict, source: MarianFolder) -> config_dict.ConfigDict:
    """Returns `config` with the model, tokenizer and decoding method of the folder.

    Other settings of `config` stay.
    """
    changes = _changes(ModelConfig(), config.model, NOT_IN_WEIGHTS)
    model = dataclasses.replace(source.model, vocab_size=None, **changes)
    config.model = config_lib.to_config_dict(Config(model=model)).model
    config.data.update(tokenizer="marian", vocab_size=source.model.vocab_size)
    longest = source.model.max_length
    buckets = tuple(length for length in config.data.buckets if length <= longest)
    config.data.buckets = buckets or (longest,)
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    changes = of_any_method(_changes(DecodeConfig(), config.decode, names))
    decode = DecodeConfig(**{**source.decode, **changes})
    config.decode = config_lib.to_config_dict(Config(decode=decode)).decode
    return config


def of_any_method(decode: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of some fields of `DecodeConfig` that do not depend on the method."""
    return {
        name: value
        for name, value in decode.items()
        if name != "method" and f"decode.{name}" not in READ_IF
    }


def _changes(default: Any, section: config_dict.ConfigDict, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of a section that differ from the default."""
    return {
        name: getattr(section, name)
        for name in names
        if getattr(section, name) != getattr(default, name)
    }


def check(config: Config, source: MarianFolder) -> None:
    """Raises InputError about a field of `config` that differs from the model in the folder."""
    expected = {f"model.{name}": value for name, value in dataclasses.asdict(source.model).items()}
    expected |= {
        "model.vocab_size": None,
        "data.tokenizer": "marian",
        "data.target_tokenizer": None,
        "data.vocab_size": source.model.vocab_size,
        "data.vocab_limit": "hard",
    }
    for name in FIXED_BY_WEIGHTS:
        section, field = name.split(".")
        if (value := getattr(getattr(config, section), field)) != expected[name]:
            raise InputError(
                f"config.{name}: the model in {source.path} has {expected[name]!r}, "
                f"got {value!r}; leave it out."
            )


def write(source: MarianFolder, workdir: Path, config: Config) -> None:
    """Creates the workdir of a run at step 0 with these weights, completely or not at all.

    Raises:
      InputError: the folder exists already, or cannot be written.
    """
    if workdir_lib.has_run(workdir):
        raise InputError(f"--workdir={workdir}: holds a run already; choose another folder.")
    with new_folder(workdir) as folder:
        paths = Workdir(folder)
        MarianTokenizer.pack(paths.tokenizer, source.tokenizer, source.special)
        tokenizer = MarianTokenizer(paths.tokenizer)
        record = {"step": 0, "tokenizer": tokenizer.fingerprint, "scores": {}}
        try:
            checkpoints = Checkpoints(paths.checkpoints)
            checkpoints.save(0, {"params": source.params}, record)
            checkpoints.close()
        except Exception as error:  # a full disk raises errors of several types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(
                f"--workdir={workdir}: the weights cannot be written: {reason:.200}."
            ) from error
        imported = {
            "format": "Marian",
            "folder": source.path.absolute().name,
            "files": {
                file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in source.files
            },
            "license": source.license,
        }
        write_whole(paths.imported, json.dumps(imported, indent=2) + "\n")
        workdir_lib.create(folder, config)
