"""The flags of `import` and `export`."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import config_dict

from flaxformer_lite import config_files
from flaxformer_lite.cli import parser
from flaxformer_lite.cli.shared_flags import decode_given, define_decode, define_model, model_given
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import in_bucket, place

FORMATS = {"ctranslate2": "ctranslate2", "huggingface": "safetensors", "safetensors": "safetensors"}  # what each needs
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16")


class ImportRequest(NamedTuple):
    """What `import` was asked to do."""

    folder: Path
    workdir: Path
    config: config_dict.ConfigDict  # how the weights are to be trained
    overrides: list[str]  # '--config.section.field=value'


class ExportRequest(NamedTuple):
    """What `export` was asked to do."""

    kind: str
    workdir: Path
    output: Path
    quantization: str
    license: str | None
    model: dict[str, str]  # `average` and `parameters`, if they were given
    decode: dict[str, object]  # fields of DecodeConfig that were given


def parse_import(arguments: Sequence[str]) -> ImportRequest:
    """`import marian FOLDER` and its flags.

    Raises:
      InputError: a word or a flag is missing or wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run to make", flag_values=values)
        config = "how it is to be trained: a config file, or the name of a shipped one; its model is the imported one"
        flags.DEFINE_string("config", "finetune", config, flag_values=values)

    usage = "usage: import marian FOLDER --workdir=W [--config=finetune] [--config.section.field=value ...]"
    words: list[str] = []
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage, words=words)
    if len(words) != 2 or words[0] != "marian":
        raise InputError(f"import: expected 'marian' and a folder, got {' '.join(words) or 'nothing'!r}.")
    if values.workdir is None:
        raise InputError("--workdir: expected a folder for the run, got nothing; add --workdir=FOLDER.")
    _check_installed("import", "safetensors")
    config = config_files.load_config(config_files.find_config(values.config))
    return ImportRequest(_folder(words[1]), _folder(values.workdir), config, overrides)


def parse_export(arguments: Sequence[str]) -> ExportRequest:
    """`export FORMAT` and its flags.

    Raises:
      InputError: a word or a flag is missing or wrong, or what the format needs is not installed.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
        flags.DEFINE_string("output", None, "folder to make", flag_values=values)
        kinds = "ctranslate2: the type that weights are kept in"
        flags.DEFINE_enum("quantization", None, QUANTIZATIONS, kinds, flag_values=values)
        text = "what the card says of the licence; default: that of imported weights, or none"
        flags.DEFINE_string("license", None, text, flag_values=values)
        define_decode(values)
        define_model(values)

    usage = (
        "usage: export ctranslate2 --workdir=W --output=D [--quantization=int8] [--average=best:5] [--alpha=1 ...]\n"
        "       export huggingface --workdir=W --output=D\n"
        "       export safetensors --workdir=W --output=D"
    )
    words: list[str] = []
    values = parser.parse(arguments, define, usage=usage, words=words)
    kind = words[0] if len(words) == 1 else ""
    if kind not in FORMATS:
        raise InputError(f"export: expected one of {', '.join(FORMATS)}, got {' '.join(words) or 'nothing'!r}.")
    for name, what in (("workdir", "the folder of a run"), ("output", "a folder to make")):
        if values[name].value is None:
            raise InputError(f"--{name}: expected {what}, got nothing; add --{name}=FOLDER.")
    if values.quantization is not None and kind != "ctranslate2":
        raise InputError("--quantization: goes with export ctranslate2; the others keep weights in float32.")
    _check_installed("export", FORMATS[kind])
    quantization, chosen = values.quantization or "float32", (model_given(values), decode_given(values))
    return ExportRequest(kind, place(values.workdir), _folder(values.output), quantization, values.license, *chosen)


def _folder(name: str) -> Path:
    if in_bucket(name):
        raise InputError(f"{name}: expected a folder on disk; copy it by hand.")
    return Path(name)


def _check_installed(command: str, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        raise InputError(f"{command}: needs the extra for other formats: pip install 'flaxformer_lite[exchange]'.")
