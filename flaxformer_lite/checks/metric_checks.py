"""Refuses a malformed `train.metric_command`, and fields of its metric without effect."""

import re
import shlex
from collections.abc import Set

from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

PLACEHOLDERS = ("hypotheses", "references", "sources")


def check_metric_command(config: Config, given: Set[str]) -> None:
    """Raises InputError if the external metric has a malformed command, or fields without effect.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    train = config.train
    if train.metric_command is None:
        for name in ("metric_name", "metric_seconds"):
            if f"train.{name}" in given:
                raise InputError(
                    f"config.train.{name}: requires train.metric_command, the program that "
                    "computes the metric; set that, or leave this unset."
                )
        return
    if config.model.architecture != "encoder_decoder":
        raise InputError(
            "config.train.metric_command: needs translations, and "
            f"model.architecture={config.model.architecture!r} makes none; leave it unset."
        )
    metric_words(train.metric_command)


def metric_words(command: str, *, field: str = "config.train.metric_command") -> list[str]:
    """Returns the words of `train.metric_command`, split as by a shell, with their placeholders.

    Args:
      field: its name in error messages.

    Raises:
      InputError: a quote is not closed, or a placeholder is unknown, or there is none of the
        translations.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"{field}: {command!r}: {error}; correct the quotes.") from None
    found = re.findall(r"\{(\w*)\}", " ".join(words[1:]))
    if unknown := [name for name in found if name not in PLACEHOLDERS]:
        raise InputError(
            f"{field}: expected {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}, got "
            f"{{{unknown[0]}}}; correct the name."
        )
    if "hypotheses" not in found:
        raise InputError(
            f"{field}: expected a program and {{hypotheses}}, the file of the translations, got "
            f"{command!r}; add {{hypotheses}}."
        )
    return words
