"""Refuses settings of the optimizer that contradict each other or have no effect."""

from collections.abc import Set

from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError


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


def _check_last_phase(config: Config) -> None:
    """Raises InputError if warmup and decay of 'wsd' are longer than the training."""
    optim, num_steps = config.optim, config.train.num_steps
    if optim.decay_steps is not None and optim.warmup_steps + optim.decay_steps > num_steps:
        raise InputError(
            f"config.optim.decay_steps: {optim.warmup_steps:,} steps of optim.warmup_steps and "
            f"{optim.decay_steps:,} of decay are more than train.num_steps = {num_steps:,}; "
            "lower one of the two, or train longer."
        )
