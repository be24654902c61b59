"""Flags of `train` and `plan`."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from flaxformer_lite import config as config_lib
from flaxformer_lite import config_files
from flaxformer_lite.cli import init_flags, parser
from flaxformer_lite.cli.shared_flags import define_in
from flaxformer_lite.runs import workdir as workdir_lib
from flaxformer_lite.system.accelerators import ACCELERATORS, FORMER_NAMES
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place

PROGRAM = "config.train.metric_command"  # its value runs
MOST_DEVICES = 16_384  # of `plan`


class TrainRequest(NamedTuple):
    """Arguments of `train`."""

    config: config_lib.Config
    workdir: Path | None
    new_workdir: Path  # used if `workdir` is None
    processes: tuple[str | None, int | None, int | None]  # coordinator, count, index of this one


class PlanRequest(NamedTuple):
    """Arguments of `plan`."""

    config: config_lib.Config
    devices: list[int]  # several: the batch grows in proportion
    accelerator: str
    decode: bool  # plan decoding, not a training step
    all: bool  # plan every batch shape, not only the longest
    options: dict[str, Any]  # `slices` and `utilization`, if they are given


def parse_train(arguments: Sequence[str]) -> TrainRequest:
    """Parses the flags of `train`.

    Without --config, the config is that of the run in the workdir, or else that of --init with its
    own tokenizer, or else `default`.

    Raises:
      InputError: the config or an override is wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        config = (
            "config file, or the name of one in the package; default: the workdir's, that of "
            "--init, or default"
        )
        flag.string("config", None, config)
        flag.string("workdir", None, "folder of the run; default: a new one under runs/")
        init_flags.define(values)
        flag.string("coordinator_address", None, "HOST:PORT of process 0, for several processes")
        processes = "number of processes of this run; 1: do not wait for others"
        flag.integer("num_processes", None, processes)
        flag.integer("process_id", None, "index of this process, from 0")

    usage = (
        "usage: train [--config=X] [--workdir=W] [--init=RUN ...] [--config.section.field=value "
        "...]"
    )
    values, config, name = _parse_config(arguments, define, usage)
    workdir = place(values.workdir) if values.workdir else None
    return TrainRequest(
        config,
        workdir,
        workdir_lib.new_path(name),
        (values.coordinator_address, values.num_processes, values.process_id),
    )


def parse_plan(arguments: Sequence[str]) -> PlanRequest:
    """Parses the flags of `plan`: a config as for `train`, and the devices to plan for.

    Raises:
      InputError: the config, an override, or the devices are wrong.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        config = "config file, or the name of one in the package; default: default"
        flag.string("config", None, config)
        flag.string("workdir", None, "folder of a run, to plan its config")
        flag.list(
            "devices", ["8"], "number of devices; several, as 8,16,32, show how a step scales"
        )
        names = [*sorted(ACCELERATORS), *FORMER_NAMES]
        flag.enum("accelerator", "h100", names, "type of the devices")
        flag.integer("slices", None, "TPU slices of the devices; default: 1", lower_bound=1)
        flag.boolean(
            "decode", False, "plan decoding with the method of the config instead of training"
        )
        flag.boolean("all", False, "plan every batch shape, not only the longest")
        share = "assumed share of peak FLOP/s without a compiler; default: 0.4"
        flag.float("utilization", None, share, lower_bound=0.01, upper_bound=1)

    usage = (
        "usage: plan [--config=X | --workdir=W] [--devices=8] [--accelerator=h100] [--slices=1]\n"
        "       [--all] [--decode] [--config.section.field=value ...]"
    )
    values, config, _ = _parse_config(arguments, define, usage)
    if values.workdir and values.config is not None:
        raise InputError(f"--workdir={values.workdir}: expected this or --config, got both.")
    if values.workdir and not workdir_lib.has_run(values.workdir):
        raise InputError(
            f"--workdir={values.workdir}: expected the workdir of a run, but it has no config.json."
        )
    if not values.devices or not all(
        count.isdecimal() and len(count) < 10 and 0 < int(count) <= MOST_DEVICES
        for count in values.devices
    ):
        raise InputError(
            f"--devices: expected a number from 1 to {MOST_DEVICES:,}, or several with commas, "
            f"got {values.devices}."
        )
    if values.all and (values.decode or len(values.devices) > 1):
        raise InputError(
            "--all: applies only to a training step on one number of --devices; leave it out."
        )
    if values.decode and len(values.devices) > 1:
        raise InputError("--decode: requires one number of --devices; choose one.")
    name = FORMER_NAMES.get(values.accelerator, values.accelerator)
    if name != values.accelerator:
        print(f"warning: --accelerator={values.accelerator}: renamed to {name}", file=sys.stderr)
    given = {
        each: values[each].value
        for each in ("slices", "utilization")
        if values[each].value is not None
    }
    return PlanRequest(
        config, list(map(int, values.devices)), name, values.decode, values.all, given
    )


def _check_program(command: str, overrides: Sequence[str]) -> None:
    """Raises InputError if only the config of a run, which may be of others, names a program."""
    if not any(each.lstrip("-").startswith(f"{PROGRAM}=") for each in overrides):
        raise InputError(
            f"{PROGRAM}: the config of the run names the program {command!r}, and programs run "
            "only if the command line or a config file names them; add --config=FILE, or "
            f"{shlex.quote(f'--{PROGRAM}={command}')}."
        )


def _parse_config(
    arguments: Sequence[str], define: Callable[[flags.FlagValues], None], usage: str
) -> tuple[flags.FlagValues, config_lib.Config, str]:
    """Returns the flags, their config with overrides, and the name of the config."""
    overrides, others = parser.split_overrides(arguments)
    values = parser.parse(others, define, usage=usage)
    name = "default"
    if values.config is None and values.workdir and workdir_lib.has_run(values.workdir):
        user_config = config_lib.to_config_dict(workdir_lib.read_config(place(values.workdir)))
    elif values.config is None and "init" in values and values.init:
        name, user_config = init_flags.inherited_config(values.init)
    else:
        file = config_files.find_config(values.config or name)
        name, user_config = file.stem, config_files.load_config(file)
        config_files.find_beside(user_config, file.parent)
    if "init" in values and values.config is None and user_config.train.metric_command:
        _check_program(user_config.train.metric_command, overrides)
    overrides = [*init_flags.overrides(values), *overrides]
    return values, config_lib.resolve(config_files.override(user_config, overrides)), name
