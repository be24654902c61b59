"""Collectives, attention kernels and estimated cycles of a compiled program, read from its text."""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

# Bytes that a device sends in a collective, as a multiple of the bytes of its result; n: devices that take part.
SENT = {
    "all-gather": lambda n: (n - 1) / n,  # every device sends its part on around a ring
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,  # reduce-scatter, then all-gather
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
RINGS = ("all-gather", "reduce-scatter", "all-reduce")
# The names of attention kernels in a program, and the `model.backend` of each.
KERNELS = {"tpu_custom_call": "flash", "__cudnn$fmhaSoftmax": "cudnn", "__cudnn$fmhaSoftmaxBackward": "cudnn"}

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\((.*)$")
CALLED = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{(.*?)\}"
)
TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BOUND = re.compile(r" = [su]32\[\]\S* constant\((\d+)\)")
CYCLES = re.compile(r'"estimated_cycles":"(-?\d+)"')
KERNEL = re.compile(r'custom_call_target="([^"]+)"')
UNKNOWN = 2**62  # cycles; larger values mean: no estimate
# Between slices of TPUs the hosts send, for each collective that their compiler splits so.
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


class Collective(NamedTuple):
    """A kind of collective, and the device groups; each group runs its own."""

    kind: str
    dtype: str  # of the array, as XLA writes it: 'f32', 'bf16'
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What one run of a compiled program does; a loop counts as often as it runs, once where that depends on data."""

    sent: dict[Collective, int]  # bytes that each device sends
    kernels: dict[str, int]  # calls of attention kernels, by `model.backend`
    cycles: int  # by the compiler's estimates; 0 where it has none
    loop_cycles: int  # of one pass of the longest loop whose length depends on data; 0 if there is none

    def bytes_by_kind(self) -> collections.Counter:
        """Bytes sent, by kind and type: 'all-reduce (f32)'."""
        total = collections.Counter()
        for each, size in self.sent.items():
            total[f"{each.kind} ({each.dtype})"] += size
        return total


def read(text: str, devices: int, *, slices: int = 1) -> Program:
    """Returns the collectives, kernels and cycles of a program.

    Args:
      text: what `as_text` of a compiled function returns.
      devices: that it is compiled for, those of one slice after another.
    """
    return _Reader(text, devices, slices).program()


class _Reader:
    """Adds up the collectives, kernels and cycles of a program's computations, from its entry on."""

    def __init__(self, text: str, devices: int, slices: int):
        self._devices, self._slices = devices, slices
        starts = [(match.group(1), match.start(), match.end()) for match in COMPUTATION.finditer(text)]
        ends = [start for _, start, _ in starts[1:]] + [len(text)]
        self._bodies = {name: text[begin:end] for (name, _, begin), end in zip(starts, ends, strict=True)}
        self._entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE).group(1)
        self._sent, self._kernels = collections.Counter(), collections.Counter()
        self._loop_cycles = 0
        self._fused = set()  # numbers of collectives in fusions

    def program(self) -> Program:
        cycles = self._add(self._entry, 1)
        sent = {collective: size for collective, size in self._sent.items() if size}
        return Program(sent, dict(self._kernels), cycles, self._loop_cycles)

    def _add(self, name: str, times: int, *, fused: bool = False) -> int:
        """Counts the collectives and kernels of `times` runs of a computation; returns the cycles of one run."""
        cycles = 0
        for line in self._bodies[name].splitlines():
            if not (found := INSTRUCTION.match(line)):
                continue
            shapes, op, rest = found.groups()
            kind = op.removesuffix("-start")
            if kind in SENT:
                if fused and self._is_known(rest):
                    continue
                self._send(kind, shapes, rest, times, started=kind != op)
                continue  # the function that a reduction applies sends nothing
            if op == "send" and (found := BETWEEN_SLICES.search(rest)):
                self._send_between_slices(found.group(1).lower().replace("_", "-"), shapes, times)
            if op == "custom-call" and (backend := KERNELS.get(KERNEL.search(rest).group(1))):
                self._kernels[backend] += times
            estimate = CYCLES.search(rest)
            known = estimate is not None and 0 <= int(estimate.group(1)) < UNKNOWN
            repeated = self._repeated(rest) if op == "while" else 1
            called = [
                self._add(each, times * (repeated or 1), fused=fused or op == "fusion")
                for one, several in CALLED.findall(rest)
                for each in ([one] if one else re.findall(r"[\w.-]+", several))
            ]
            if op == "while":
                cycles += (repeated or 1) * sum(called)
                self._loop_cycles = max(self._loop_cycles, 0 if repeated else sum(called))
            elif known:  # it includes the computations that the instruction calls
                cycles += int(estimate.group(1))
            elif op in ("call", "async-start"):
                cycles += sum(called)
            elif op == "conditional":
                cycles += max(called, default=0)
        return cycles

    def _is_known(self, attributes: str) -> bool:
        """Whether a collective is already counted: on TPUs several fusions contain the same one."""
        if (found := re.search(r"channel_id=(\d+)", attributes)) is None:
            return False
        known = found.group(1) in self._fused
        self._fused.add(found.group(1))
        return known

    def _repeated(self, rest: str) -> int | None:
        """How often a loop runs; None: that depends on data.

        CPU and GPU programs state it. A TPU's does not: there the loop counts from 0 and ends at a constant.
        """
        if found := TIMES.search(rest):
            return int(found.group(1))
        condition = self._bodies[re.search(r"condition=%?([\w.-]+)", rest).group(1)]
        condition += "".join(self._bodies[called] for called in re.findall(r"calls=%?([\w.-]+)", condition))
        bounds = BOUND.findall(condition)
        simple = "direction=LT" in condition and not re.search(r" (?:and|or|not)\(", condition)
        return int(bounds[0]) if simple and len(bounds) == 1 else None

    def _send(self, kind: str, shapes: str, attributes: str, times: int, *, started: bool) -> None:
        groups = groups_of(attributes, self._devices)
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        if started and kind != "all-reduce":  # the result is a pair: operands, results; and some numbers
            arrays = [each for each in arrays if each[1] or kind != "collective-permute"]
            arrays = arrays[len(arrays) // 2 :]
        for dtype, sizes in arrays:
            sent = times * _bytes(dtype, sizes) * SENT[kind](len(groups[0]))
            self._sent[Collective(kind, dtype, groups)] += round(sent)

    def _send_between_slices(self, kind: str, shapes: str, times: int) -> None:
        """Counts a collective of the devices at the same place of each slice; the first of `shapes` is its operand."""
        n, place = self._slices, self._devices // self._slices
        groups = tuple(tuple(range(first, self._devices, place)) for first in range(place))
        kind = kind if kind in SENT else "collective-permute"
        dtype, sizes = re.search(r"(\w+)\[([\d,]*)\]", shapes).groups()
        result = {"all-gather": n, "reduce-scatter": 1 / n}.get(kind, 1) * _bytes(dtype, sizes)
        self._sent[Collective(kind, dtype, groups)] += round(times * result * SENT[kind](n))


def _bytes(dtype: str, sizes: str) -> float:
    """Of an array 'f32[3,5]', 'pred[7]' or 'f8e4m3fn[2]': the first number of a type is its bits."""
    bits = int(re.search(r"\d+", dtype).group()) if dtype != "pred" else 8
    return math.prod(int(size) for size in sizes.split(",") if size) * bits / 8


def groups_of(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The device groups of a collective, one of all devices where the text names none.

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
