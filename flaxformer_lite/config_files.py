"""Finds, runs and overrides config files: `--config=X --config.section.field=value`."""

import ast
import contextlib
import functools
import glob
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags
from ml_collections import config_dict, config_flags

from flaxformer_lite.system.errors import InputError, did_you_mean
from flaxformer_lite.system.storage import expanded

PACKAGE = Path(__file__).parent


def shipped_configs(kind: str = ".") -> dict[str, Path]:
    """Returns name to file of the configs that are shipped with the package.

    A wheel has the folder `configs` inside the package, a checkout has it beside the package. The
    name of a config of a benchmark has its folder, as 'benchmarks/scan'.

    Args:
      kind: the folder below `configs/`, as 'sweeps'.
    """
    folders = [
        folder / kind
        for folder in (PACKAGE / "configs", PACKAGE.parent / "configs")
        if folder.is_dir()
    ]
    return {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in folders
        for file in sorted([*folder.glob("*.py"), *folder.glob("benchmarks/*.py")])
        if file.stem != "__init__"
    }


def find_config(name: str, *, flag: str = "--config", kind: str = ".") -> Path:
    """Returns the file of `--config=name`, where `name` is a path or the name of a shipped config.

    The name of a shipped config is that config, also if there is a file of this name.

    Raises:
      InputError: `name` is neither.
    """
    shipped, path = shipped_configs(kind), expanded(name)
    if path.is_file() and name in shipped:
        print(
            f"note: {flag}={name} is the shipped config; the file here is {flag}=./{name}",
            file=sys.stderr,
        )
    elif path.is_file():
        return path
    if name not in shipped:
        raise InputError(
            f"{flag}={name}: no such file and no shipped config{did_you_mean(name, shipped)}"
        )
    return shipped[name]


def load_config(file: Path) -> config_dict.ConfigDict:
    """Returns the result of `get_config()` of a config file.

    Raises:
      InputError: the file fails, as in `load_module` and `config_of`.
    """
    return config_of(load_module(file), file)


def find_beside(config: config_dict.ConfigDict, folder: Path) -> None:
    """Changes relative paths of data files that exist only relative to `folder`, of the config."""
    data = config.get("data", {})
    for field in ("train_files", "validation_files", "test_files", "train_alignments"):
        paths = data.get(field) or ()
        if isinstance(paths, tuple) and all(isinstance(path, str) for path in paths):
            found = tuple(map(functools.partial(_here_or_in, folder), paths))
            if found != paths:
                data[field] = found


def _here_or_in(folder: Path, path: str) -> str:
    beside = folder / path

    def matches(each: Path) -> bool:
        return bool(glob.glob(os.fspath(each), recursive=True))

    return str(beside) if not matches(expanded(path)) and matches(beside) else path


class Uncached(importlib.machinery.SourceFileLoader):
    """Compiles a Python file at each import; neither reads nor writes its `__pycache__`."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Returns the compiled file."""
        return self.source_to_code(self.get_data(self.path), self.path)


def load_module(file: Path) -> types.ModuleType:
    """Returns the module of a Python file. Raises InputError, with the line, if it fails."""
    if file.suffix != ".py":
        raise InputError(f"{file}: expected a Python file that defines get_config().")
    name = f"config_{file.stem}"
    spec = importlib.util.spec_from_file_location(
        name, file, loader=Uncached(name, str(file.absolute()))
    )
    assert spec is not None and spec.loader is not None, "it has the loader above"
    module = importlib.util.module_from_spec(spec)
    with blamed_on(file):
        spec.loader.exec_module(module)
    return module


def config_of(module: types.ModuleType, file: Path) -> config_dict.ConfigDict:
    """Returns the result of `get_config()` of a module.

    Raises:
      InputError: it fails or returns another type; the message names `file`.
    """
    with blamed_on(file):
        config = module.get_config()
    if not isinstance(config, config_dict.ConfigDict):
        raise InputError(
            f"{file}: get_config() returned {type(config).__name__}, expected a ConfigDict."
        )
    return config


@contextlib.contextmanager
def blamed_on(file: Path) -> Iterator[None]:
    """Converts any error of a user's `file` in the block to an InputError that names its line."""
    try:
        yield
    except Exception as error:
        line = _line_in(error, file)
        raise InputError(f"{file}{line}: {type(error).__name__}: {first_line(error)}") from error


def override(config: config_dict.ConfigDict, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Sets each `--config.section.field=value` in `config`, and returns it; 'None' is None.

    Raises:
      InputError: there is no such field, or the value has another type.
    """
    for argument in overrides:
        name, value = argument.lstrip("-").split("=", 1)
        _check_field(config, name)
        try:
            if value == "None":
                _, section, field = name.split(".")
                config[section][field] = None
                continue
            _set_field(
                config,
                f"--{name}={_quoted(value)}" if _field_type(config, name) == "tuple" else argument,
            )
        except (flags.Error, ValueError, TypeError) as error:
            none = "; None is written None" if value.lower() in ("none", "null") else ""
            raise InputError(
                f"{name}: expected {_field_type(config, name)}, got {value!r}{none}."
            ) from error
    return config


def _quoted(value: str) -> str:
    """Returns "('a.en', 'a.de')", the syntax of config_flags, for 'a.en,a.de'.

    Returns other values unchanged.
    """
    try:
        ast.literal_eval(value)
        return value
    except (ValueError, SyntaxError):
        if value.lstrip().startswith(("(", "[", "'", '"')):
            return value  # not closed: config_flags reports that
        return repr(tuple(part.strip() for part in value.split(",") if part.strip()))


def texts_of(value: str) -> tuple[str, ...]:
    """Returns ('a.en', 'a.de') for 'a.en,a.de' or "('a.en', 'a.de')"; raises ValueError."""
    found = ast.literal_eval(_quoted(value))
    found = (found,) if isinstance(found, str) else found
    if not isinstance(found, tuple | list) or not all(isinstance(each, str) for each in found):
        raise ValueError(value)
    return tuple(found)


def _set_field(config: config_dict.ConfigDict, argument: str) -> None:
    """Lets config_flags parse one override; it reads overrides from `sys.argv` only."""
    values, given = flags.FlagValues(), sys.argv
    try:
        sys.argv = ["program", argument]
        config_flags.DEFINE_config_dict("config", config, flag_values=values)
        values(sys.argv)
    finally:
        sys.argv = given


def _check_field(config: config_dict.ConfigDict, name: str) -> None:
    node, path = config, "config"
    for part in name.split(".")[1:]:
        if not isinstance(node, config_dict.ConfigDict):
            raise InputError(
                f"{path}.{part}: there is no such field; {path} has none, its value is {node!r}."
            )
        if part not in node:
            raise InputError(
                f"{path}.{part}: there is no such field{did_you_mean(part, node.keys())}"
            )
        node, path = node[part], f"{path}.{part}"


def _field_type(config: config_dict.ConfigDict, name: str) -> str:
    *sections, field = name.split(".")[1:]
    for section in sections:
        config = config[section]
    kind = config.get_type(field)
    is_section = issubclass(kind, config_dict.ConfigDict)
    return "a section with fields" if is_section else kind.__name__


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _line_in(error: BaseException, file: Path) -> str:
    """Returns ':12' for the last line of `file` in the traceback of `error`, or ''."""
    if isinstance(error, SyntaxError) and error.filename == str(file.absolute()):
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file.absolute())]
    return f":{lines[-1]}" if lines else ""
