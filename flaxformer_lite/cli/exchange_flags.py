"""Flags of `import` and `export`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_dict

from flaxformer_lite import config_files
from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import (
    decode_given,
    define_decode,
    define_in,
    define_model,
    model_given,
)
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place

# format: the library that it needs
FORMATS = {"ctranslate2": "ctranslate2", "huggingface": "safetensors", "safetensors": "safetensors"}
QUANTIZATIONS = (
    "float32",
    "float16",
    "bfloat16",
    "int16",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
)


class ImportRequest(NamedTuple):
    """Arguments of `import`."""

    folder: Path
    workdir: Path
    config: config_dict.ConfigDict  # for further training
    overrides: list[str]  # '--config.section.field=value'


class ExportRequest(NamedTuple):
    """Arguments of `export`."""

    kind: str
    workdir: Path
    output: Path
    quantization: str
    license: str | None
    model: dict[str, Any]  # `average` and `parameters`, if they are given
    decode: dict[str, Any]  # fields of DecodeConfig that are given


def parse_import(arguments: Sequence[str]) -> ImportRequest:
    """Parses `import marian FOLDER` and its flags.

    Raises:
      InputError: a word or a flag is missing or wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("workdir", None, "folder of the new run")
        flag.string("config", "finetune", "config for further training, without its model section")

    usage = (
        "usage: import marian FOLDER --workdir=W [--config=finetune] "
        "[--config.section.field=value ...]"
    )
    words: list[str] = []
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage, words=words)
    if len(words) != 2 or words[0] != "marian":
        raise InputError(
            f"import: expected 'marian' and a folder, got {' '.join(words) or 'nothing'!r}."
        )
    if values.workdir is None:
        raise InputError(
            "--workdir: expected a folder for the run, got nothing; add --workdir=FOLDER."
        )
    _check_installed("import", "safetensors")
    config = config_files.load_config(config_files.find_config(values.config))
    return ImportRequest(_folder(words[1]), _folder(values.workdir), config, overrides)


def parse_export(arguments: Sequence[str]) -> ExportRequest:
    """Parses `export FORMAT` and its flags.

    Raises:
      InputError: a word or a flag is missing or wrong, or the format's library is not installed.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("workdir", None, "folder of the run")
        flag.string("output", None, "folder to create")
        flag.enum("quantization", None, QUANTIZATIONS, "ctranslate2: type of the stored weights")
        text = "licence for the model card; default: that of imported weights"
        flag.string("license", None, text)
        define_decode(values)
        define_model(values)

    usage = (
        "usage: export ctranslate2 --workdir=W --output=D [--quantization=int8] "
        "[--average=best:5] [--alpha=1 ...]\n"
        "       export huggingface --workdir=W --output=D\n"
        "       export safetensors --workdir=W --output=D"
    )
    words: list[str] = []
    values = parser.parse(arguments, define, usage=usage, words=words)
    kind = words[0] if len(words) == 1 else ""
    if kind not in FORMATS:
        raise InputError(
            f"export: expected one of {', '.join(FORMATS)}, got {' '.join(words) or 'nothing'!r}."
        )
    for name, expected in (("workdir", "the folder of a run"), ("output", "a folder to make")):
        if values[name].value is None:
            raise InputError(f"--{name}: expected {expected}, got nothing; add --{name}=FOLDER.")
    if values.quantization is not None and kind != "ctranslate2":
        raise InputError(
            "--quantization: applies only to export ctranslate2; the others keep weights in "
            "float32."
        )
    _check_installed("export", FORMATS[kind])
    return ExportRequest(
        kind=kind,
        workdir=place(values.workdir),
        output=_folder(values.output),
        quantization=values.quantization or "float32",
        license=values.license,
        model=model_given(values),
        decode=decode_given(values),
    )


def _folder(name: str) -> Path:
    if in_bucket(name):
        raise InputError(f"{name}: expected a folder on disk; copy it by hand.")
    return place(name)


def _check_installed(command: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise InputError(
            f"{command}: needs the extra for other formats: pip install "
            "'flaxformer_lite[exchange]'."
        )
