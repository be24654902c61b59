"""Refuses settings of the optimizer that contradict each other or have no effect."""

import dataclasses
import math
import re
from collections.abc import Set

from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

GROUP_FORM = "'RULE: rate=0.1 decay=False', with one of rate and decay, or both"


@dataclasses.dataclass(frozen=True)
class Group:
    """A rule of `optim.groups`, and the settings of the parameters that it matches."""

    rule: str  # a regular expression for the end of a parameter's name
    rate: float = 1.0  # factor of the learning rate
    decay: bool | None = None  # whether there is weight decay; None: by default


def parse_group(text: str) -> Group:
    """Returns the group of such as 'encoder/.*: rate=0.1 decay=False'.

    Raises:
      InputError: the text has another form.
    """
    rule, _, given = text.rpartition(":")
    options = [option.partition("=")[::2] for option in given.split()]
    names = [name for name, _ in options]
    if not rule.strip() or not options or set(names) - {"rate", "decay"}:
        raise InputError(f"config.optim.groups: expected {GROUP_FORM}, got {text!r}.")
    if len(set(names)) < len(names):
        raise InputError(f"config.optim.groups: {text!r} sets an option 2 times; remove one.")
    settings: dict[str, float | bool] = {}
    for name, value in options:
        try:
            settings[name] = (
                {"True": True, "False": False}[value] if name == "decay" else float(value)
            )
        except (KeyError, ValueError):
            expected = "True or False" if name == "decay" else "a number"
            raise InputError(
                f"config.optim.groups: {text!r}: expected {expected} for {name}, got {value!r}."
            ) from None
    if not 0 < settings.get("rate", 1.0) < math.inf:
        raise InputError(
            f"config.optim.groups: {text!r}: expected a positive finite rate; to keep parameters "
            "as they are, use optim.freeze."
        )
    return Group(rule.strip(), **settings)  # type: ignore[arg-type]


def check_optim(config: Config, given: Set[str]) -> None:
    """Raises InputError if two fields of the optimizer contradict each other.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    optim = config.optim
    if "optim.weight_decay" in given and optim.optimizer == "adam":
        raise InputError(
            "config.optim.weight_decay: optim.optimizer='adam' has no weight decay; use "
            "optim.optimizer='adamw', or leave this unset."
        )
    if optim.optimizer == "schedule_free" and optim.schedule != "constant":
        others = ", ".join(name for name in CHOICES["optim.optimizer"] if name != "schedule_free")
        raise InputError(
            f"config.optim.schedule: {optim.schedule!r} decays, and optim.optimizer="
            "'schedule_free' averages iterates of a constant rate in place of a decay; set "
            f"optim.schedule='constant', or another optimizer: {others}."
        )
    _check_last_phase(config)
    _check_rules(config)


def _check_last_phase(config: Config) -> None:
    """Raises InputError if warmup and decay of 'wsd' are longer than the training."""
    optim, num_steps = config.optim, config.train.num_steps
    if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > num_steps:
        raise InputError(
            f"config.optim.decay_steps: {optim.warmup_steps:,} steps of optim.warmup_steps and "
            f"{optim.decay_steps:,} of decay are more than train.num_steps = {num_steps:,}; "
            "lower one of the two, or train longer."
        )


def _check_rules(config: Config) -> None:
    """Raises InputError if a rule is no regular expression, or a group's decay has no effect."""
    optim = config.optim
    groups = [(text, parse_group(text)) for text in optim.groups]
    rules = [("freeze", rule) for rule in optim.freeze]
    for field, rule in [*rules, *(("groups", group.rule) for _, group in groups)]:
        try:
            re.compile(rule)
        except re.error as error:
            raise InputError(
                f"config.optim.{field}: {rule!r} is no regular expression: {error}; correct it."
            ) from None
    for text, group in groups:
        if group.decay is not None and not optim.weight_decay:
            raise InputError(
                f"config.optim.groups: the decay of {text!r} has no effect with "
                "optim.weight_decay=0.0; raise that, or remove decay from the rule."
            )
