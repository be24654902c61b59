"""Memory, arithmetic, communication and time of a training step, or decoding, on devices that are not here.

The program is compiled and not run. Where the accelerator's own compiler is installed (`topology.py`), it is compiled
for devices of that kind, and memory, collectives and kernels are those of the real program. Else it is compiled for as
many fake devices of a CPU, and all figures are estimates: an accelerator's compiler orders and fuses in other ways.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data.batches import batch_shapes
from flaxformer_lite.decoding.decoder import Decoder, padded_length
from flaxformer_lite.model import backends, parameters, transformer
from flaxformer_lite.system import memory
from flaxformer_lite.system.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.memory import ADVICE, Memory
from flaxformer_lite.training import flops, hlo, parallel, sharding, topology
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.hlo import RINGS, Collective

LEFT_OUT = "by the compiler's estimates, which leave out kernels and collectives"
UTILIZATION = 0.4
DECODING_ADVICE = (
    "To take less: a smaller decode.tokens_per_batch, decode.beam_size or data.buckets; model.dtype='bfloat16'; "
    "parallel.tensor, which splits the model."
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices, mesh and compiler of a plan."""

    name: str  # of the accelerator
    accelerator: Accelerator
    mesh: Mesh
    compiler: str | None  # None: it is compiled for a CPU
    why_not: str = ""  # why it is
    utilization: float = UTILIZATION  # of the peak, assumed of matrix products whose time no compiler estimates
    slices: int = 1

    @property
    def estimates(self) -> bool:
        """Whether the compiler estimates the cycles of a program; a GPU's does not."""
        return bool(self.compiler and self.accelerator.clock)

    @property
    def source(self) -> str:
        """Where times come from."""
        return (
            LEFT_OUT if self.estimates else f"at {self.utilization:.0%} of {self.accelerator.flops / 1e12:,.0f} TFLOP/s"
        )

    @property
    def origin(self) -> str:
        """Where the figures come from."""
        return f"compiled by {self.compiler}" if self.compiler else f"estimated on a CPU ({self.why_not})"

    @property
    def shape(self) -> str:
        """Of the mesh: '2 x 4 x 1'."""
        return " x ".join(map(str, self.mesh.devices.shape))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one program on one shape of batch; bytes, FLOPs and cycles are of each device."""

    rows: int
    length: int
    flops: float  # of matrix multiplications
    memory: Memory | None  # None: the compiler refused it for want of memory
    program: hlo.Program | None  # None: the same
    lack: str = ""  # the compiler's out-of-memory message

    @property
    def sent(self) -> dict[Collective, int]:
        """Bytes that each device sends."""
        return self.program.sent

    def computing(self, target: Target) -> float:
        """Seconds by the compiler's cycles; where it gives none, those of the arithmetic at the assumed utilization."""
        if target.estimates and self.program.cycles:
            return self.program.cycles / target.accelerator.clock
        return self.flops / (target.accelerator.flops * target.utilization)

    def sending(self, target: Target) -> float:
        """Seconds of all collectives, one after another."""
        return sum(size / speed(each, target.accelerator) for each, size in self.sent.items())

    def fits(self, target: Target) -> bool:
        """Whether a device has enough memory; a TPU's compiler itself refuses what does not fit."""
        if self.memory is None:
            return False
        by_compiler = target.compiler is not None and target.accelerator.platform == "tpu"
        return by_compiler or self.memory.total <= target.accelerator.memory

    def beyond(self, accelerator: Accelerator) -> int:
        """Bytes of collectives whose groups reach beyond the devices that the accelerator's own links join."""
        within = lambda each: all(map(accelerator.joins, each.groups))  # noqa: E731
        return sum(size for each, size in self.sent.items() if not within(each))


def speed(collective: Collective, accelerator: Accelerator) -> float:
    """Bytes a second of the slowest group."""
    return min(accelerator.speed(group, ring=collective.kind in RINGS) for group in collective.groups)


def target(
    config: Config,
    name: str,
    count: int,
    *,
    slices: int | None = None,
    utilization: float | None = None,
    decode: bool = False,
) -> Target:
    """`count` devices of an accelerator, in the config's mesh; fake ones where its compiler is not installed.

    Args:
      slices: of TPUs, that the devices are spread over; None: one.
      utilization: the share of the peak that matrix products reach; None: 40 %, where no compiler estimates times.
      decode: for decoding, whose devices share a model over `parallel.tensor` or have a copy each.

    Raises:
      InputError: there is no such number of them, they make no such mesh, or a compiler estimates times itself.
    """
    sizes = config.parallel
    if slices is not None and ACCELERATORS[name].platform != "tpu":
        raise InputError(f"--slices={slices}: applies only to TPUs, and {name} is a GPU; leave it out.")
    if decode and utilization is not None:
        raise InputError("--utilization: has no effect with --decode; leave it out.")
    slices = slices or 1
    accelerator = dataclasses.replace(ACCELERATORS[name], linked=topology.joined(name, count, slices=slices))
    if sizes.tensor > 0 and accelerator.linked % sizes.tensor:
        raise InputError(
            f"config.parallel.tensor: {sizes.tensor} devices that work on the same rows would not share one slice, or "
            f"machine, of {accelerator.linked}; choose a divisor of that."
        )
    if decode and (sizes.fsdp != 1 or sizes.tensor < 1):
        raise InputError(
            f"--decode: expected config.parallel.fsdp=1 and a number for config.parallel.tensor, got {sizes.fsdp} and "
            f"{sizes.tensor}; a device decodes with the whole model, or shares it over tensor."
        )
    try:
        compiler, why_not = topology.compiler(name), ""
        devices = topology.devices(name, count, slices=slices)
    except topology.NoCompiler as error:
        compiler, why_not, devices = None, str(error), jax.devices()[:count]
    data = -1 if decode else sizes.data  # devices that do not share the model each decode rows of their own
    mesh = parallel.make_mesh(data, sizes.fsdp, sizes.tensor, devices=devices)
    if mesh.size != count:
        raise InputError(f"config.parallel: makes {mesh.size} of {count} devices; set one of its sizes to -1.")
    found = Target(name, accelerator, mesh, compiler, why_not, utilization or UTILIZATION, slices)
    if utilization is not None and found.estimates:
        raise InputError(f"--utilization: the compiler of {name} estimates times itself; leave it out.")
    return found


def plan(config: Config, target: Target, *, every_shape: bool = False) -> list[Plan]:
    """One plan of the training step for the longest shape of batch that the config allows, or for each, longest first.

    Raises:
      InputError: the devices cannot share the rows, or a parameter; or the config's backend cannot be used.
    """
    shapes = batch_shapes.possible(config)[::-1]
    return [train_step(config, target, *shape) for shape in (shapes if every_shape else shapes[:1])]


def train_step(config: Config, target: Target, rows: int, length: int) -> Plan:
    """The plan of a training step on a batch of this shape."""
    config, mesh = _configured(config, target), target.mesh
    accumulate = config.optim.accumulate_steps
    parallel.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    mode = parallel.MODES[config.parallel.mode](mesh)
    options = {"axis_name": mode.axis_name, "row_shards": mode.row_shards}
    step, initial_state = step_lib.of_config(config, **options)
    state = jax.eval_shape(initial_state)
    sharding.check(state.params, mesh)
    batch = batch_shapes.struct(config, rows, length)
    work = flops.train_step(config, rows, length) / mesh.size
    return _planned(lambda: mode.compile(step, state, batch, donate=True), target, rows, length, work)


def decoding(config: Config, target: Target) -> Plan:
    """The plan of decoding one full batch of inputs as long as the longest bucket, as `translate` and `generate` do.

    Raises:
      InputError: the model is a classifier, or the devices cannot share the rows, or a parameter.
    """
    if config.model.architecture == "encoder_classifier":
        raise InputError("--decode: requires a model that generates text, and this one is a classifier; leave it out.")
    model = dataclasses.replace(config.model, backend="auto")  # as in every run that was trained
    config, mesh = _configured(dataclasses.replace(config, model=model), target), target.mesh
    parallel.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=1)
    model = transformer.build_model(config.model)
    params = parameters.shapes(model)
    sharding.check(params, mesh)
    decoder = Decoder(model, config.decode, rows_multiple=mesh.size, sharding=parallel.decoding_shardings(mesh))
    length = padded_length(max(config.data.buckets), config.model.max_length)
    rows = decoder.rows(length)
    steps = min(length + config.decode.max_extra_length, config.model.max_length)
    work = flops.decoding(config, rows, length, steps) / mesh.size
    params = parallel.MeshMode(mesh).abstract(params)
    return _planned(lambda: decoder.compile(params, rows, length), target, rows, length, work)


def _configured(config: Config, target: Target) -> Config:
    config = with_vocabulary(config, config.data.vocab_size)
    if target.compiler:
        return config
    model = dataclasses.replace(config.model, backend=backends.stand_in(config.model.backend))
    return dataclasses.replace(config, model=model)


def _planned(compile: Any, target: Target, rows: int, length: int, work: float) -> Plan:
    try:
        compiled = compile()
    except jax.errors.JaxRuntimeError as error:
        if not memory.is_lack_of(error):
            raise
        return Plan(rows, length, work, None, None, memory.lack(error))
    program = hlo.read(compiled.as_text(), target.mesh.size, slices=target.slices)
    platform = target.accelerator.platform if target.compiler else "cpu"
    return Plan(rows, length, work, memory.of_program(compiled, platform), program)


def table(plans: list[Plan], target: Target, *, decode: bool = False) -> str:
    """The plans as text: how it was compiled, and of each whether it fits, its memory, arithmetic, sending and time."""
    mesh = f"{target.mesh.size} x {target.name}, mesh {target.shape} (data, fsdp, tensor)"
    lines = [f"{target.origin}, for {mesh}"]
    for each in plans:
        lines += _lines(each, target, decode=decode)
    return "\n".join(lines)


def _lines(each: Plan, target: Target, *, decode: bool) -> list[str]:
    accelerator = target.accelerator
    what, advice = ("decoding", DECODING_ADVICE) if decode else ("a training step", ADVICE)
    has = f"{accelerator.memory / 1e9:.4g} GB a device"
    lines = [f"{what}, global batch of {each.rows} x {each.length}; each of {target.mesh.size} devices:"]
    if each.memory is None:
        return [*lines, f"  more than {has}: does not fit: {each.lack}", f"  {advice}"]
    fits, found = each.fits(target), each.memory
    program = f" (and {_figure(found.code / 1e9)} GB of program)" if found.code else ""
    lines.append(f"  peak {_figure(found.peak / 1e9)} GB of {has}: {'fits' if fits else 'does not fit'}{program}")
    if not fits:
        lines.append(f"  {advice}")
    lines.append(f"  memory      {found}")
    lines.append(f"  arithmetic  {_figure(each.flops / 1e9)} GFLOPs of matrix products")
    of_kind = each.program.bytes_by_kind()
    sent = ", ".join(f"{kind} {_figure(size / 1e6)}" for kind, size in of_kind.most_common()) or "nothing"
    lines.append(f"  sends       {_figure(sum(of_kind.values()) / 1e6)} MB: {sent}")
    if beyond := each.beyond(accelerator):
        lines.append(f"              {_figure(beyond / 1e6)} MB of it beyond the {accelerator.linked} that links join")
    kernels = ", ".join(f"{count} x {name}" for name, count in each.program.kernels.items()) or "none"
    lines.append(f"  kernels     {kernels}")
    return lines + _time(each, target, decode=decode)


def _time(each: Plan, target: Target, *, decode: bool) -> list[str]:
    computing, sending = each.computing(target), each.sending(target)
    if decode:  # memory bandwidth bounds its steps, and FLOPs do not reflect that
        if not target.estimates or not each.program.loop_cycles:
            return []
        milliseconds = each.program.loop_cycles / target.accelerator.clock * 1e3
        return [f"  a step      {_figure(milliseconds)} ms for {each.rows} inputs, {LEFT_OUT}"]
    lines = [f"  computes    {_figure(computing * 1e3)} ms, {target.source}"]
    most = "at most " if target.estimates and each.program.kernels else ""  # the time of kernels comes on top
    seconds, positions = computing + sending, each.rows * each.length
    hidden = max(computing, sending)
    return [
        *lines,
        f"  collectives {_figure(sending * 1e3)} ms at the speed of the links, one after another",
        f"  speed       {most}{positions / seconds:,.0f} target positions a second, {positions / hidden:,.0f} if "
        "collectives hide behind arithmetic",
        f"  of the peak {most}{each.flops / (seconds * target.accelerator.flops):.0%}, "
        f"{each.flops / (hidden * target.accelerator.flops):.0%} if they hide",
    ]


def scaled(config: Config, times: int) -> Config:
    """The config for `times` as many devices, with as many rows for each of them."""
    data, grown = config.data, {}
    for field in ("tokens_per_batch", "rows_multiple"):
        grown[field] = getattr(data, field) * times
    return dataclasses.replace(config, data=dataclasses.replace(data, **grown))


def scaling_table(
    config: Config, counts: Sequence[int], name: str, *, slices: int | None = None, utilization: float | None = None
) -> str:
    """Weak scaling: a line for each number of devices, the batch of the first growing with them; the longest bucket.

    Raises:
      InputError: as `plan`; or a number of devices is no multiple of the first.
    """
    if odd := [count for count in counts if count % counts[0]]:
        raise InputError(f"--devices: {odd[0]} is no multiple of {counts[0]}, whose batch grows with the devices.")
    lines = []
    for count in counts:
        found = target(config, name, count, slices=slices, utilization=utilization)
        accelerator = found.accelerator
        joined = "the GPUs of a machine" if accelerator.platform == "gpu" else "the chips of a slice"
        lines = lines or [
            f"{found.origin}, for {name}; time {found.source}; {accelerator.link / 1e9:.4g} GB/s a device among "
            f"{joined}, {accelerator.network / 1e9:.4g} beyond",
            "| Devices | Mesh (data, fsdp, tensor) | Batch | GB a device: peak (state) | MB sent, of it beyond links "
            "| Efficiency, one after another | hidden |",
            "|---|---|---|---|---|---|---|",
        ]
        larger = scaled(config, count // counts[0])
        lines.append(_scaling_row(train_step(larger, found, *batch_shapes.possible(larger)[-1]), found))
    return "\n".join(lines)


def _scaling_row(each: Plan, target: Target) -> str:
    first = f"| {target.mesh.size} | {target.shape} | {each.rows} x {each.length} |"
    if each.memory is None:
        return f"{first} does not fit | | | |"
    computing, sending = each.computing(target), each.sending(target)
    fits = "" if each.fits(target) else ", does not fit"
    return (
        f"{first} {_figure(each.memory.peak / 1e9)} ({_figure(each.memory.state / 1e9)}){fits} "
        f"| {_figure(sum(each.sent.values()) / 1e6)}, {_figure(each.beyond(target.accelerator) / 1e6)} "
        f"| {computing / (computing + sending):.0%} | {computing / max(computing, sending):.0%} |"
    )


def _figure(number: float) -> str:
    """The first three digits: '3,040', '0.0425'."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"
