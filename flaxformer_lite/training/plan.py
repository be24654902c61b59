"""Memory, FLOPs, communication and time of a training step or of decoding, on absent devices.

The step is compiled but not run. If the accelerator's own compiler is installed (`topology.py`), it
compiles for devices of that kind: memory, collectives and kernels are those of the real program.
Otherwise the step is compiled for fake CPU devices, and all figures are estimates, as an
accelerator's compiler schedules and fuses in other ways.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flaxformer_lite.checks.vocabularies import (
    expected_vocabularies,
    follows_tokenizer,
    of_side,
    sides_of,
)
from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.data.batches import loader
from flaxformer_lite.decoding.decoder import Decoder, padded_length
from flaxformer_lite.fields import Config
from flaxformer_lite.model import backends, parameters, transformer
from flaxformer_lite.system import memory
from flaxformer_lite.system.accelerators import ACCELERATORS
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import flops, hlo, meshes, parallel, plan_table, sharding, topology
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.plan_table import table
from flaxformer_lite.training.planned import UTILIZATION, Plan, Target, speed

__all__ = [  # all that other modules need, from one place
    "Plan",
    "Target",
    "decoding",
    "plan",
    "scaling_table",
    "speed",
    "table",
    "target",
    "train_step",
]


def target(
    config: Config,
    name: str,
    count: int,
    *,
    slices: int | None = None,
    utilization: float | None = None,
    decode: bool = False,
) -> Target:
    """Returns `count` devices of an accelerator in the config's mesh.

    They are fake CPU devices if the accelerator's compiler is not installed.

    Args:
      slices: number of TPU slices that the devices are spread over; None: 1.
      utilization: share of the peak that matrix products reach, if no compiler estimates times;
        None: 40 %.
      decode: for decoding. Then each device has the whole model, or shares it over
        `parallel.tensor`.

    Raises:
      InputError: the number of devices does not exist, or does not fit the mesh; or a flag has no
        effect.
    """
    _check_flags(config, name, slices=slices, utilization=utilization, decode=decode)
    sizes, slices = config.parallel, slices or 1
    linked = topology.joined(name, count, slices=slices)
    if sizes.tensor > 0 and linked % sizes.tensor:
        raise InputError(
            f"config.parallel.tensor: {sizes.tensor} devices that work on the same rows would "
            f"not share one slice, or machine, of {linked}; choose a divisor of that."
        )
    try:
        compiler, no_compiler = topology.compiler(name), ""
        devices = topology.devices(name, count, slices=slices)
    except topology.NoCompiler as error:
        compiler, no_compiler, devices = None, str(error), jax.devices()[:count]
    # in decoding, devices that do not share the model decode different rows
    data = -1 if decode else sizes.data
    mesh = meshes.make_mesh(data, sizes.fsdp, sizes.tensor, devices=devices)
    if mesh.size != count:
        raise InputError(
            f"config.parallel: makes {mesh.size} of {count} devices; set one of its sizes to -1."
        )
    accelerator = dataclasses.replace(ACCELERATORS[name], linked=linked)
    found = Target(
        name, accelerator, mesh, compiler, no_compiler, utilization or UTILIZATION, slices
    )
    found = dataclasses.replace(found, assumed=_assumed_vocabulary(config))
    if utilization is not None and found.estimates_cycles:
        raise InputError(
            f"--utilization: the compiler of {name} estimates times itself; leave it out."
        )
    return found


def _assumed_vocabulary(config: Config) -> str:
    """Returns a note if the texts may have a smaller vocabulary than the plan; '' if not."""
    notes = []
    for side in sides_of(config):
        own, prefix = of_side(config, side), "" if side == "source" else "target_"
        size = own.data.vocab_size
        if size is not None and own.model.vocab_size is None and follows_tokenizer(own):
            notes.append(
                f"a vocabulary of {size:,}, the limit data.{prefix}vocab_size; if the texts have a "
                f"smaller one, set model.{prefix}vocab_size to its size"
            )
    return "\n".join(notes)


def _check_flags(
    config: Config, name: str, *, slices: int | None, utilization: float | None, decode: bool
) -> None:
    """Raises InputError if a flag has no effect, or the config's mesh cannot decode."""
    if slices is not None and ACCELERATORS[name].platform != "tpu":
        raise InputError(
            f"--slices={slices}: applies only to TPUs, and {name} is a GPU; leave it out."
        )
    if decode and utilization is not None:
        raise InputError("--utilization: has no effect with --decode; leave it out.")
    sizes = config.parallel
    if decode and (sizes.fsdp != 1 or sizes.tensor < 1):
        raise InputError(
            "--decode: expected config.parallel.fsdp=1 and a number for config.parallel.tensor, "
            f"got {sizes.fsdp} and {sizes.tensor}; a device decodes with the whole model, or "
            "shares it over tensor."
        )


def plan(config: Config, target: Target, *, every_shape: bool = False) -> list[Plan]:
    """Returns the plan of the training step for the longest batch shape of the config.

    Args:
      every_shape: one plan for each batch shape instead, longest first.

    Raises:
      InputError: the devices cannot divide the rows, or a parameter; or the config's backend cannot
        be used.
    """
    shapes = loader.possible_shapes(config)[::-1]
    return [train_step(config, target, *shape) for shape in (shapes if every_shape else shapes[:1])]


def train_step(config: Config, target: Target, rows: int, length: int) -> Plan:
    """Returns the plan of a training step on a batch of `rows` x `length`."""
    config, mesh = _resolved(config, target), target.mesh
    accumulate = config.optim.accumulate_steps
    meshes.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    mode = parallel.MODES[config.parallel.mode](mesh)
    step, initial_state = step_lib.of_config(
        config, axis_name=mode.axis_name, row_shards=mode.row_shards
    )
    state = jax.eval_shape(initial_state)
    sharding.check(state.params, mesh)
    batch = loader.batch_struct(config, rows, length, train=True)
    work = flops.train_step(config, rows, length) / mesh.size
    return _planned(
        lambda: mode.compile(step, state, batch, donate=True), target, rows, length, work
    )


def decoding(config: Config, target: Target) -> Plan:
    """Returns the plan of decoding a full batch of inputs as long as the longest bucket.

    Raises:
      InputError: the model is a classifier, or the devices cannot divide the rows, or a parameter.
    """
    if config.model.architecture == "encoder_classifier":
        raise InputError(
            "--decode: requires a model that generates text, and this one is a "
            "classifier; leave it out."
        )
    of_runs = dataclasses.replace(config.model, backend="auto")  # as in every trained run
    config, mesh = _resolved(dataclasses.replace(config, model=of_runs), target), target.mesh
    meshes.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=1)
    model = transformer.build_model(config.model)
    params = parameters.shapes(model)
    sharding.check(params, mesh)
    decoder = Decoder(
        model, config.decode, rows_multiple=mesh.size, sharding=parallel.decoding_shardings(mesh)
    )
    length = padded_length(max(config.data.row_lengths), config.model.max_length)
    rows = decoder.rows(length)
    steps = min(length + config.decode.max_extra_length, config.model.max_length)
    work = flops.decoding(config, rows, length, steps) / mesh.size
    params = parallel.MeshMode(mesh).abstract(params)
    return _planned(lambda: decoder.compile(params, rows, length), target, rows, length, work)


def _resolved(config: Config, target: Target) -> Config:
    """Returns the config with its vocabulary size, and on a CPU with a backend that compiles."""
    config = with_vocabulary(config, *expected_vocabularies(config))
    if target.compiler:
        return config
    model = dataclasses.replace(config.model, backend=backends.stand_in(config.model.backend))
    return dataclasses.replace(config, model=model)


def _planned(
    compile: Callable[[], Any], target: Target, rows: int, length: int, work: float
) -> Plan:
    """Returns the plan of a compiled step; `work` is its FLOPs a device."""
    try:
        compiled = compile()
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_lack_of(error):
            raise
        return Plan(rows, length, work, None, None, memory.shortage(error))
    program = hlo.read(compiled.as_text(), target.mesh.size, slices=target.slices)
    platform = target.accelerator.platform if target.compiler else "cpu"
    return Plan(rows, length, work, memory.of_program(compiled, platform), program)


def scaling_table(
    config: Config,
    counts: Sequence[int],
    name: str,
    *,
    slices: int | None = None,
    utilization: float | None = None,
) -> str:
    """Returns a table of weak scaling: the batch grows with the devices.

    It has one line for each number of devices. The config's batch is that of the first number. The
    batch shape is the longest.

    Raises:
      InputError: as in `plan`; or a number of devices is no multiple of the first.
    """
    if odd := [count for count in counts if count % counts[0]]:
        raise InputError(
            f"--devices: {odd[0]} is no multiple of {counts[0]}, whose batch grows "
            "with the devices."
        )
    plans = []
    for count in counts:
        found = target(config, name, count, slices=slices, utilization=utilization)
        larger = _scaled(config, count // counts[0])
        shape = loader.possible_shapes(larger)[-1]
        plans.append((train_step(larger, found, *shape), found))
    return plan_table.scaling_table(plans)


def _scaled(config: Config, times: int) -> Config:
    """Returns the config for `times` as many devices, with the same rows per device."""
    data = config.data
    larger = dataclasses.replace(
        data,
        tokens_per_batch=data.tokens_per_batch * times,
        rows_multiple=data.rows_multiple * times,
    )
    return dataclasses.replace(config, data=larger)
