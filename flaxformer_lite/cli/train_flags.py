"""The flags of `train` and `plan`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.cli import parser
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.accelerators import ACCELERATORS, FORMER_NAMES
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

MOST_DEVICES = 16_384  # that are planned for


class TrainRequest(NamedTuple):
    """What `train` was asked to do."""

    config: config_lib.Config
    workdir: Path | None  # None: none was named
    new_workdir: Path  # the folder for a run without a name
    processes: tuple[str | None, int | None, int | None]  # coordinator address, number of processes, own number


class PlanRequest(NamedTuple):
    """What `plan` was asked to do."""

    config: config_lib.Config
    devices: list[int]  # several: the batch grows with them
    accelerator: str
    decode: bool  # in place of a training step
    all: bool  # shapes of batches, not the longest alone
    options: dict[str, object]  # `slices` and `utilization`, if they were given


def parse_train(arguments: Sequence[str]) -> TrainRequest:
    """Flags of `train`: the config is the named one, else that of the run in the workdir, else `default`.

    Raises:
      InputError: the config or an override is wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("config", None, "a config file, or the name of a shipped one", flag_values=values)
        flags.DEFINE_string("workdir", None, "folder of the run; default: a new one under runs/", flag_values=values)
        flags.DEFINE_string("coordinator_address", None, "HOST:PORT of process 0", flag_values=values)
        flags.DEFINE_integer(
            "num_processes", None, "processes of this run; 1 alone: it looks for no others", flag_values=values
        )
        flags.DEFINE_integer("process_id", None, "number of this process, from 0", flag_values=values)

    usage = "usage: train [--config=X] [--workdir=W] [--config.section.field=value ...]"
    values, config, name = _parse_config(arguments, define, usage)
    workdir = place(values.workdir) if values.workdir else None
    return TrainRequest(
        config,
        workdir,
        workdir_lib.new_path(name),
        (values.coordinator_address, values.num_processes, values.process_id),
    )


def parse_plan(arguments: Sequence[str]) -> PlanRequest:
    """Flags of `plan`: a config as `train` takes it, and what it is planned for.

    Raises:
      InputError: as `parse_train`.
    """

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("config", None, "a config file, or the name of a shipped one", flag_values=values)
        flags.DEFINE_string("workdir", None, "a run, whose config is planned", flag_values=values)
        flags.DEFINE_list("devices", ["8"], "how many there would be; several: how it scales", flag_values=values)
        names = [*sorted(ACCELERATORS), *FORMER_NAMES]
        flags.DEFINE_enum("accelerator", "h100", names, "kind of the devices", flag_values=values)
        slices = "how many slices of TPUs these devices would be; default: 1"
        flags.DEFINE_integer("slices", None, slices, lower_bound=1, flag_values=values)
        flags.DEFINE_bool("decode", False, "plan decoding, by the config's method", flag_values=values)
        flags.DEFINE_bool("all", False, "each shape of batch, not the longest alone", flag_values=values)
        share = "share of the peak that matrix products are assumed to reach where no compiler estimates; default: 0.4"
        flags.DEFINE_float("utilization", None, share, lower_bound=0.01, upper_bound=1, flag_values=values)

    usage = (
        "usage: plan [--config=X | --workdir=W] [--devices=8] [--accelerator=h100] [--slices=1] [--all] [--decode] "
        "[--config.section.field=value ...]"
    )
    values, config, _ = _parse_config(arguments, define, usage)
    if values.workdir and (values.config is not None or not workdir_lib.has_run(values.workdir)):
        expected = "a run, or a config" if values.config is not None else "the workdir of a run"
        raise InputError(f"--workdir={values.workdir}: expected {expected}; name one of them that is there.")
    if not values.devices or not all(count.isdecimal() and 0 < int(count) <= MOST_DEVICES for count in values.devices):
        raise InputError(
            f"--devices: expected a number from 1 to {MOST_DEVICES:,}, or several with commas, got {values.devices}."
        )
    if values.all and (values.decode or len(values.devices) > 1):
        raise InputError("--all: applies only to a training step on one number of --devices; leave it out.")
    if values.decode and len(values.devices) > 1:
        raise InputError("--decode: requires one number of --devices; choose one.")
    name = FORMER_NAMES.get(values.accelerator, values.accelerator)
    if name != values.accelerator:
        print(f"warning: --accelerator={values.accelerator}: renamed to {name}", file=sys.stderr)
    given = {each: values[each].value for each in ("slices", "utilization") if values[each].value is not None}
    return PlanRequest(config, list(map(int, values.devices)), name, values.decode, values.all, given)


def _parse_config(
    arguments: Sequence[str], define: Callable[[flags.FlagValues], None], usage: str
) -> tuple[flags.FlagValues, config_lib.Config, str]:
    """The flags, the config that they name with its overrides, and the name of its file."""
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage)
    name = "default"
    if values.config is None and values.workdir and workdir_lib.has_run(values.workdir):
        user_config = config_lib.to_config_dict(workdir_lib.read_config(place(values.workdir)))
    else:
        file = config_files.find_config(values.config or name)
        name, user_config = file.stem, config_files.load_config(file)
    return values, config_lib.resolve(config_files.override(user_config, overrides)), name
