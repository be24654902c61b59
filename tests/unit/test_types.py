"""Types for users: the marker file, keyword arguments that mirror configs, mypy on a program."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import flaxformer_lite
from flaxformer_lite import scoring, trained
from flaxformer_lite.fields import DecodeConfig

USER = """
import flaxformer_lite
from flaxformer_lite import translate

translator = translate.load("runs/first", method="beam", beam_size=8)
reveal_type(translator(["a"]))
reveal_type(translator.n_best(["a"], 3))
reveal_type(translate.load)
reveal_type(flaxformer_lite.__version__)
"""
MISTAKES = """
from flaxformer_lite import translate

translator = translate.load("runs/first")
translate.load("runs/first", beam_sise=8)
translate.load("runs/first", beam_size="8")
translator(3)
"""


def test_the_package_is_marked_as_typed():
    assert (Path(flaxformer_lite.__file__).parent / "py.typed").read_bytes() == b""


@pytest.mark.parametrize(
    ("given", "config"),
    [(trained.DecodeOptions, DecodeConfig), (scoring.SettingsGiven, scoring.Settings)],
)
def test_keyword_arguments_have_the_names_and_types_of_the_config(given, config):
    assert typing.get_type_hints(given) == typing.get_type_hints(config)
    assert not given.__required_keys__


def test_the_options_of_a_run_are_those_of_load():
    hints = typing.get_type_hints(trained.load)
    others = {"workdir", "command", "architecture", "return"}
    assert typing.get_type_hints(trained.LoadOptions) == {
        name: hint for name, hint in hints.items() if name not in others
    }
    assert inspect.signature(trained.load).parameters["tensor"].default == 1


@pytest.mark.slow
def test_a_user_sees_real_types_and_every_mistake(tmp_path):
    pytest.importorskip("mypy", reason="the extra `types` is not installed")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mistakes.py").write_text(MISTAKES)

    def mypy(file: str) -> list[str]:
        command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir=cache", file]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return (done.stdout + done.stderr).splitlines()

    *revealed, last = mypy("user.py")
    assert last.startswith("Success"), revealed
    types = [line.partition("Revealed type is ")[2].replace("builtins.", "") for line in revealed]
    assert types[0] == '"list[str]"'
    assert types[1] == '"list[list[tuple[str, float]]]"'
    assert "'beam_size'?: int" in types[2] and types[2].endswith('translate.Translator"')
    assert types[3] == '"str"'

    errors = [line for line in mypy("mistakes.py") if ": error: " in line]
    assert [line.split(":")[1] for line in errors] == ["5", "6", "7"], errors
