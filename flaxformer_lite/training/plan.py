"""What a training step would take of devices that are not here: memory, arithmetic, and what they send each other.

The step is compiled for as many fake devices as are asked for; nothing is computed and no state exists. Memory is what
the compiler of a CPU plans, so for an accelerator it is an estimate: its own compiler orders and fuses in other ways.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data import batch_shapes
from flaxformer_lite.model import backends
from flaxformer_lite.training import flops, parallel, sharding
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.training.memory import Memory, of_program


class Message(NamedTuple):
    """A kind of message, and the groups of devices each of which exchanges it among its own."""

    kind: str
    groups: tuple[tuple[int, ...], ...]

    def speed(self, accelerator: Accelerator) -> float:
        """Bytes a second of the slowest group."""
        return min(accelerator.speed(group, ring=self.kind in RINGS) for group in self.groups)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one step on one shape of batch; bytes and FLOPs are of each device."""

    rows: int
    length: int
    memory: Memory  # as a CPU's compiler plans it
    flops: float  # of matrix multiplications
    sent: dict[Message, int]  # bytes

    def seconds(self, accelerator: Accelerator, utilization: float) -> tuple[float, float]:
        """Of arithmetic at this share of the peak, and of sending; a step takes both, or less where they overlap."""
        sending = sum(size / message.speed(accelerator) for message, size in self.sent.items())
        return self.flops / (accelerator.flops * utilization), sending

    def beyond(self, accelerator: Accelerator) -> int:
        """Bytes of messages of which a group reaches beyond the devices that the accelerator's own links join."""
        within = lambda message: all(map(accelerator.joins, message.groups))  # noqa: E731
        return sum(size for message, size in self.sent.items() if not within(message))


def plan(config: Config, mesh: jax.sharding.Mesh) -> list[Plan]:
    """One plan for each shape of batch that the config allows, the longest last.

    Attention is computed as on a CPU, by blocks where the config names an accelerator's kernel.

    Raises:
      ValueError: the devices cannot share the rows, or a parameter.
    """
    return [_of_shape(config, mesh, *shape) for shape in batch_shapes.possible(config)]


def _of_shape(config: Config, mesh: jax.sharding.Mesh, rows: int, length: int) -> Plan:
    config = with_vocabulary(config, config.data.vocab_size)
    model = dataclasses.replace(config.model, backend=backends.stand_in(config.model.backend))
    config = dataclasses.replace(config, model=model)
    accumulate = config.optim.accumulate_steps
    parallel.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    mode = parallel.MODES[config.parallel.mode](mesh)
    options = {"axis_name": mode.axis_name, "row_shards": mode.row_shards}
    train_step, initial_state = step_lib.of_config(config, **options)
    state = jax.eval_shape(initial_state)
    sharding.check(state.params, mesh)
    compiled = mode.compile(train_step, state, batch_shapes.struct(config, rows, length), donate=True)
    work = flops.train_step(config, rows, length) / mesh.size
    return Plan(rows, length, of_program(compiled), work, messages(compiled.as_text(), mesh.size))


def table(plans: list[Plan], mesh: jax.sharding.Mesh, name: str, utilization: float) -> str:
    """The plans as text: a line each for memory, arithmetic, messages and the speed that they allow."""
    accelerator, lines = ACCELERATORS[name], []
    for each in plans:
        computing, sending = each.seconds(accelerator, utilization)
        seconds = computing + sending
        of_kind = {kind: sum(n for message, n in each.sent.items() if message.kind == kind) for kind in SENT}
        parts = ", ".join(f"{kind} {_figure(count / 1e6)}" for kind, count in of_kind.items() if count) or "none"
        memory = each.memory
        share = f"{memory.total / accelerator.memory:.0%} of {name}'s {accelerator.memory / 1e9:.0f} GB"
        lines += [
            f"batch of {each.rows} x {each.length}, a step, each of {mesh.size} devices:",
            f"  memory     {_figure(memory.total / 1e9)} GB, {share}: state and batch {_figure(memory.state / 1e9)}, "
            f"within the step {_figure(memory.temporary / 1e9)} (estimate of the CPU compiler)",
            f"  arithmetic {_figure(each.flops / 1e9)} GFLOPs of matrix products",
            f"  sends      {_figure(sum(each.sent.values()) / 1e6)} MB: {parts}; "
            f"{_figure(each.beyond(accelerator) / 1e6)} MB in messages beyond the {accelerator.linked} that links join",
            f"  speed      {each.rows * each.length / seconds:,.0f} target positions a second, at {utilization:.0%} of "
            f"{accelerator.flops / 1e12:.0f} TFLOP/s and messages one after another",
            f"  scaling    {computing / seconds:.0%} of as many devices that need not send; "
            f"{computing / max(computing, sending):.0%} if messages hide behind arithmetic",
        ]
    return "\n".join(lines)


def scaled(config: Config, times: int) -> Config:
    """The config for `times` as many devices, with as many rows for each of them."""
    data, grown = config.data, {}
    for field in ("tokens_per_batch", "rows_multiple"):
        grown[field] = getattr(data, field) * times
    return dataclasses.replace(config, data=dataclasses.replace(data, **grown))


def scaling_table(config: Config, counts: Sequence[int], name: str, utilization: float) -> str:
    """Weak scaling: a line for each number of devices, the batch of the first growing with them; the longest bucket.

    Raises:
      ValueError: as `plan`; or a number of devices is no multiple of the first.
    """
    accelerator = ACCELERATORS[name]
    lines = [
        f"{name}, {utilization:.0%} of {accelerator.flops / 1e12:.0f} TFLOP/s; {accelerator.link / 1e9:.4g} GB/s among "
        f"{accelerator.linked} devices, {accelerator.network / 1e9:.4g} GB/s a device beyond",
        "| Devices | Mesh (data, fsdp, tensor) | Batch | GB a device: state + step | MB sent, in messages beyond links "
        "| Efficiency, one after another | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    if odd := [count for count in counts if count % counts[0]]:
        raise ValueError(f"--devices: {odd[0]} is no multiple of {counts[0]}, whose batch grows with the devices.")
    for count in counts:
        sizes = config.parallel
        mesh = parallel.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, devices=jax.devices()[:count])
        if mesh.size != count:
            raise ValueError(f"config.parallel: makes {mesh.size} of {count} devices; set one of its sizes to -1.")
        larger = scaled(config, count // counts[0])
        each = _of_shape(larger, mesh, *batch_shapes.possible(larger)[-1])
        computing, sending = each.seconds(accelerator, utilization)
        lines.append(
            f"| {count} | {' x '.join(map(str, mesh.devices.shape))} | {each.rows} x {each.length} "
            f"| {_figure(each.memory.state / 1e9)} + {_figure(each.memory.temporary / 1e9)} "
            f"| {_figure(sum(each.sent.values()) / 1e6)}, {_figure(each.beyond(accelerator) / 1e6)} "
            f"| {computing / (computing + sending):.0%} | {computing / max(computing, sending):.0%} |"
        )
    return "\n".join(lines)


def _figure(number: float) -> str:
    """The first three digits: '3,040', '0.0425'."""
    return f"{float(f'{number:.3g}'):,g}"


# The size of what each kind of message leaves on a device, times this, is what the device sends; n: how many take part.
SENT = {
    "all-gather": lambda n: (n - 1) / n,  # every device sends its part on around a ring
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,  # the one, and then the other
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
RINGS = ("all-gather", "reduce-scatter", "all-reduce")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
MESSAGE = re.compile(rf"= (.+?) ({'|'.join(SENT)})(?:-start)?\((.*)$")
CALLED = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)
TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def messages(program: str, devices: int) -> dict[Message, int]:
    """Bytes that each device sends in a compiled program, by message; loops as often as they run.

    Args:
      program: what `as_text` of a compiled function returns.
      devices: that it is compiled for.
    """
    starts = [(match.group(1), match.start(), match.end()) for match in COMPUTATION.finditer(program)]
    ends = [start for _, start, _ in starts[1:]] + [len(program)]
    bodies = {name: program[begin:end] for (name, _, begin), end in zip(starts, ends, strict=True)}
    entry = re.search(r"^ENTRY %?([\w.-]+)", program, re.MULTILINE).group(1)
    total = collections.Counter()

    def add(name: str, times: int) -> None:
        for line in bodies[name].splitlines():
            if found := MESSAGE.search(line):
                what, kind, rest = found.groups()
                message = Message(kind, _groups(rest, devices))
                total[message] += round(times * _bytes(what) * SENT[kind](len(message.groups[0])))
                continue  # what a reduction applies sends nothing
            repeated = TIMES.search(line) if " while(" in line else None
            for one, several in CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    add(called, times * int(repeated.group(1) if repeated else 1))

    add(entry, 1)
    return {message: count for message, count in total.items() if count}


def _bytes(shapes: str) -> int:
    """Of all arrays in 'f32[3,5]{1,0}' or a tuple of such."""
    total = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += math.prod(int(size) for size in sizes.split(",") if size) * BYTES[dtype]
    return total


def _groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that exchange a message among them; one of all devices where none are named.

    'replica_groups=[4,2]<=[2,4]T(1,0)' are 4 groups of 2, of the devices in that order; '{{0,1},{2,3}}' 2 of 2, as are
    pairs of a source and a target; "mesh['a'=4,'b'=2] {'b'}" 4 of 2, each along 'b'.
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\S+?),? ", attributes + " "):
        groups = _order(found.group(2)).reshape(-1, int(found.group(1)))
    elif found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", attributes):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found.group(1)))
    elif found := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\S+?)\))?\s*\{('.*?)\}", attributes):
        axes, order, named = found.groups()
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        parts = {axis: (1, size, 1) for axis, size in sizes.items()}  # along the middle one of each named axis
        chosen = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named)
        for axis, before, size in chosen:
            if size:
                parts[axis] = int(before), int(size), sizes[axis] // int(before) // int(size)
        ids = _order(order) if order else np.arange(math.prod(sizes.values()))
        ids = ids.reshape([size for part in parts.values() for size in part])
        along = [3 * number + 1 for number, axis in enumerate(sizes) if axis in {name for name, _, _ in chosen}]
        groups = np.moveaxis(ids, along, range(-len(along), 0))
        groups = groups.reshape(-1, math.prod(groups.shape[-len(along) :]))
    else:
        groups = np.arange(devices)[None]
    return tuple(map(tuple, groups.tolist()))


def _order(text: str) -> np.ndarray:
    """Device numbers of '[2,4]T(1,0)': 0 to 7 as rows of 4, its axes then in that order."""
    sizes, axes = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()
    sizes = list(map(int, sizes.split(",")))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(list(map(int, axes.split(","))) if axes else None)
