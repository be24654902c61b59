"""What a training step would take of devices that are not here: memory, arithmetic, and what they send each other.

The step is compiled for as many fake devices as are asked for; nothing is computed and no state exists. Memory is what
the compiler of a CPU plans, so for an accelerator it is an estimate: its own compiler orders and fuses in other ways.
"""

import dataclasses
import math
import re

import jax

from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data import pipeline
from flaxformer_lite.training import flops, parallel, sharding
from flaxformer_lite.training import step as step_lib
from flaxformer_lite.training.accelerators import ACCELERATORS, Accelerator
from flaxformer_lite.training.memory import Memory, of_program


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one step on one shape of batch; bytes and FLOPs are of each device."""

    rows: int
    length: int
    memory: Memory  # as a CPU's compiler plans it
    flops: float  # of matrix multiplications
    sent: dict[str, int]  # bytes by kind of message

    def seconds(self, accelerator: Accelerator, utilization: float) -> tuple[float, float]:
        """Of arithmetic at this share of the peak, and of sending; a step takes both, or less where they overlap."""
        return self.flops / (accelerator.flops * utilization), sum(self.sent.values()) / accelerator.link


def plan(config: Config, mesh: jax.sharding.Mesh) -> list[Plan]:
    """One plan for each shape of batch that the config allows, the longest last.

    Raises:
      ValueError: the devices cannot share the rows, or a parameter.
    """
    config = with_vocabulary(config, config.data.vocab_size)
    accumulate = config.optim.accumulate_steps
    parallel.check_rows(mesh, rows_multiple=config.data.rows_multiple, accumulate_steps=accumulate)
    mode = parallel.MODES[config.parallel.mode](mesh)
    train_step, initial_state = step_lib.of_config(config, axis_name=mode.axis_name, row_shards=mode.row_shards)
    state = jax.eval_shape(initial_state)
    sharding.check(state.params, mesh)
    plans = []
    for rows, length in pipeline.possible_shapes(config):
        compiled = mode.compile(train_step, state, pipeline.batch_struct(config, rows, length), donate=True)
        work = flops.train_step(config, rows, length) / mesh.size
        plans.append(Plan(rows, length, of_program(compiled), work, messages(compiled.as_text(), mesh.size)))
    return plans


def table(plans: list[Plan], mesh: jax.sharding.Mesh, name: str, utilization: float) -> str:
    """The plans as text: a line each for memory, arithmetic, messages and the speed that they allow."""
    accelerator, lines = ACCELERATORS[name], []
    for each in plans:
        computing, sending = each.seconds(accelerator, utilization)
        seconds = computing + sending
        parts = ", ".join(f"{kind} {count / 1e6:,.3g}" for kind, count in each.sent.items()) or "none"
        memory = each.memory
        share = f"{memory.total / accelerator.memory:.0%} of {name}'s {accelerator.memory / 1e9:.0f} GB"
        lines += [
            f"batch of {each.rows} x {each.length}, a step, each of {mesh.size} devices:",
            f"  memory     {memory.total / 1e9:,.3g} GB, {share}: state and batch {memory.state / 1e9:,.3g}, "
            f"within the step {memory.temporary / 1e9:,.3g} (estimate of the CPU compiler)",
            f"  arithmetic {each.flops / 1e9:,.3g} GFLOPs of matrix products",
            f"  sends      {sum(each.sent.values()) / 1e6:,.3g} MB: {parts}",
            f"  speed      {each.rows * each.length / seconds:,.0f} target positions a second, at {utilization:.0%} of "
            f"{accelerator.flops / 1e12:.0f} TFLOP/s and messages one after another",
            f"  scaling    {computing / seconds:.0%} of as many devices that need not send; "
            f"{computing / max(computing, sending):.0%} if messages hide behind arithmetic",
        ]
    return "\n".join(lines)


# The size of what each kind of message leaves on a device, times this, is what the device sends; n: how many take part.
SENT = {
    "all-gather": lambda n: (n - 1) / n,  # every device sends its part on around a ring
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,  # the one, and then the other
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
MESSAGE = re.compile(rf"= (.+?) ({'|'.join(SENT)})(?:-start)?\((.*)$")
CALLED = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)
TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def messages(program: str, devices: int) -> dict[str, int]:
    """Bytes that each device sends in a compiled program, by kind of message; loops as often as they run.

    Args:
      program: what `as_text` of a compiled function returns.
      devices: that it is compiled for.
    """
    starts = [(match.group(1), match.start(), match.end()) for match in COMPUTATION.finditer(program)]
    ends = [start for _, start, _ in starts[1:]] + [len(program)]
    bodies = {name: program[begin:end] for (name, _, begin), end in zip(starts, ends, strict=True)}
    entry = re.search(r"^ENTRY %?([\w.-]+)", program, re.MULTILINE).group(1)
    total = dict.fromkeys(SENT, 0)

    def add(name: str, times: int) -> None:
        for line in bodies[name].splitlines():
            if found := MESSAGE.search(line):
                what, kind, rest = found.groups()
                total[kind] += round(times * _bytes(what) * SENT[kind](_group_size(rest, devices)))
                continue  # what a reduction applies sends nothing
            repeated = TIMES.search(line) if " while(" in line else None
            for one, several in CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    add(called, times * int(repeated.group(1) if repeated else 1))

    add(entry, 1)
    return {kind: count for kind, count in total.items() if count}


def _bytes(shapes: str) -> int:
    """Of all arrays in 'f32[3,5]{1,0}' or a tuple of such."""
    total = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        total += math.prod(int(size) for size in sizes.split(",") if size) * BYTES[dtype]
    return total


def _group_size(attributes: str, devices: int) -> int:
    """How many devices exchange a message.

    'replica_groups=[4,2]<=[8]' are 4 groups of 2, '{{0,1},{2,3}}' 2 of 2, "mesh['a'=4,'b'=2] {'b'}" 4 of 2.
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found.group(1))
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return found.group(1).count(",") + 1
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*?\{('.*?)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found.group(1)))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found.group(2))  # an axis, or so many devices of one
        return math.prod(int(part or sizes[axis]) for axis, part in named)
    return devices
