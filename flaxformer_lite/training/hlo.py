"""Collectives, attention kernels and estimated cycles, parsed from the HLO text of a program."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

# Bytes sent by a device in a collective of n devices, as a multiple of the bytes of the result.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,  # each part is passed around a ring
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,  # reduce-scatter, then all-gather
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
RINGS = ("all-gather", "reduce-scatter", "all-reduce")
# Custom-call targets of attention kernels, and the `model.backend` of each.
KERNELS = {
    "tpu_custom_call": "flash",
    "__cudnn$fmhaSoftmax": "cudnn",
    "__cudnn$fmhaSoftmaxBackward": "cudnn",
}

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", re.MULTILINE)
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\((.*)$")
CALLED = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)"
    r"|branch_computations=\{(.*?)\}"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
BOUND = re.compile(r" = [su]32\[\]\S* constant\((\d+)\)")
CYCLES = re.compile(r'"estimated_cycles":"(-?\d+)"')
KERNEL = re.compile(r'custom_call_target="([^"]+)"')
MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((\S+?)\))?\s*\{('.*?)\}")
UNKNOWN = 2**62  # cycles; values from here on mean: no estimate
# Between TPU slices the hosts send the data of a collective. The compiler marks the `send`.
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


class Collective(NamedTuple):
    """A kind of collective, and the device groups that each run it."""

    kind: str
    dtype: str  # of the array, in XLA's notation: 'f32', 'bf16'
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """The totals of one run of a compiled program.

    A loop with a constant trip count is multiplied by it. A loop whose trip count depends on data
    counts once.
    """

    sent: dict[Collective, int]  # bytes that each device sends
    kernels: dict[str, int]  # calls of attention kernels, by `model.backend`
    cycles: int  # the compiler's estimate; 0 if it has none
    loop_cycles: int  # of one iteration of the longest loop with a data-dependent trip count

    def bytes_by_kind(self) -> collections.Counter[str]:
        """Returns the bytes sent by kind and type: 'all-reduce (f32)'."""
        total: collections.Counter[str] = collections.Counter()
        for collective, size in self.sent.items():
            total[f"{collective.kind} ({collective.dtype})"] += size
        return total


def read(text: str, devices: int, *, slices: int = 1) -> Program:
    """Returns the collectives, kernels and cycles of a program.

    Args:
      text: the result of `as_text` of a compiled function.
      devices: how many devices it is compiled for, ordered by slice.
    """
    return _Reader(text, devices, slices).program()


class _Reader:
    """Adds up collectives, kernels and cycles over the computations that the entry calls."""

    def __init__(self, text: str, devices: int, slices: int):
        self._devices, self._slices = devices, slices
        starts = [
            (match.group(1), match.start(), match.end()) for match in COMPUTATION.finditer(text)
        ]
        ends = [start for _, start, _ in starts[1:]] + [len(text)]
        self._bodies = {
            name: text[start:end] for (name, _, start), end in zip(starts, ends, strict=True)
        }
        self._entry = _found(r"(?m)^ENTRY %?([\w.-]+)", text).group(1)
        self._sent: collections.Counter[Collective] = collections.Counter()
        self._kernels: collections.Counter[str] = collections.Counter()
        self._loop_cycles = 0
        self._fused: set[str] = set()  # channel ids of collectives in fusions

    def program(self) -> Program:
        """Returns the totals of the program."""
        cycles = self._add(self._entry, 1)
        sent = {collective: size for collective, size in self._sent.items() if size}
        return Program(sent, dict(self._kernels), cycles, self._loop_cycles)

    def _add(self, name: str, times: int, *, fused: bool = False) -> int:
        """Adds the collectives and kernels of `times` runs of a computation.

        Returns:
          The cycles of one run.
        """
        cycles = 0
        for line in self._bodies[name].splitlines():
            if not (found := INSTRUCTION.match(line)):
                continue
            shapes, op, rest = found.groups()
            kind = op.removesuffix("-start")
            if kind in SENT:
                if fused and self._is_repeated(rest):
                    continue
                self._send(kind, shapes, rest, times, started=kind != op)
                continue  # the computation that a reduction applies sends nothing
            if op == "send" and (found := BETWEEN_SLICES.search(rest)):
                self._send_between_slices(found.group(1).lower().replace("_", "-"), shapes, times)
            if op == "custom-call" and (backend := KERNELS.get(_found(KERNEL, rest).group(1))):
                self._kernels[backend] += times
            estimate = CYCLES.search(rest)
            estimated = int(estimate.group(1)) if estimate else UNKNOWN
            trips = self._trip_count(rest) if op == "while" else 1
            called = [
                self._add(each, times * (trips or 1), fused=fused or op == "fusion")
                for one, several in CALLED.findall(rest)
                for each in ([one] if one else re.findall(r"[\w.-]+", several))
            ]
            if op == "while":
                cycles += (trips or 1) * sum(called)
                self._loop_cycles = max(self._loop_cycles, 0 if trips else sum(called))
            elif 0 <= estimated < UNKNOWN:  # includes the computations that the instruction calls
                cycles += estimated
            elif op in ("call", "async-start"):
                cycles += sum(called)
            elif op == "conditional":
                cycles += max(called, default=0)
        return cycles

    def _is_repeated(self, attributes: str) -> bool:
        """Whether a collective is already counted: on TPUs several fusions contain the same one."""
        if (found := re.search(r"channel_id=(\d+)", attributes)) is None:
            return False
        repeated = found.group(1) in self._fused
        self._fused.add(found.group(1))
        return repeated

    def _trip_count(self, rest: str) -> int | None:
        """Returns how often a loop runs; None if that depends on data.

        CPU and GPU programs contain the number. TPU programs do not: there the loop counts from 0,
        and its condition compares the counter with a constant.
        """
        if found := TRIPS.search(rest):
            return int(found.group(1))
        condition = self._bodies[_found(r"condition=%?([\w.-]+)", rest).group(1)]
        condition += "".join(
            self._bodies[called] for called in re.findall(r"calls=%?([\w.-]+)", condition)
        )
        bounds = BOUND.findall(condition)
        simple = "direction=LT" in condition and not re.search(r" (?:and|or|not)\(", condition)
        return int(bounds[0]) if simple and len(bounds) == 1 else None

    def _send(self, kind: str, shapes: str, attributes: str, times: int, *, started: bool) -> None:
        groups = groups_of(attributes, self._devices)
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        # the result of a `-start` is a tuple of operands, results and some numbers
        if started and kind != "all-reduce":
            arrays = [each for each in arrays if each[1] or kind != "collective-permute"]
            arrays = arrays[len(arrays) // 2 :]
        for dtype, sizes in arrays:
            sent = times * _bytes(dtype, sizes) * SENT[kind](len(groups[0]))
            self._sent[Collective(kind, dtype, groups)] += round(sent)

    def _send_between_slices(self, kind: str, shapes: str, times: int) -> None:
        """Adds a collective of the devices at the same position in each slice.

        The first of `shapes` is its operand.
        """
        n, of_slice = self._slices, self._devices // self._slices
        groups = tuple(tuple(range(first, self._devices, of_slice)) for first in range(of_slice))
        kind = kind if kind in SENT else "collective-permute"
        dtype, sizes = _found(r"(\w+)\[([\d,]*)\]", shapes).groups()
        result = {"all-gather": n, "reduce-scatter": 1 / n}.get(kind, 1) * _bytes(dtype, sizes)
        self._sent[Collective(kind, dtype, groups)] += round(times * result * SENT[kind](n))


def _found(pattern: str | re.Pattern[str], text: str) -> re.Match[str]:
    """Returns the first match of a pattern that the text of a program always has."""
    match = re.search(pattern, text)
    assert match is not None, f"{pattern} is not in {text[:200]!r}"
    return match


def _bytes(dtype: str, sizes: str) -> float:
    """Returns the bytes of an array such as 'f32[3,5]', 'pred[7]' or 'f8e4m3fn[2]'.

    The first number of a type is its number of bits.
    """
    bits = int(_found(r"\d+", dtype).group()) if dtype != "pred" else 8
    return math.prod(int(size) for size in sizes.split(",") if size) * bits / 8


def groups_of(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the device groups of a collective; one group of all devices if the text has none.

    The notations are
      'replica_groups=[4,2]<=[2,4]T(1,0)': 4 groups of 2, of the devices in that order;
      'replica_groups={{0,1},{2,3}}', and pairs of source and target: 2 groups of 2;
      "replica_groups=mesh['a'=4,'b'=2] {'b'}": 4 groups of 2, each along the axis 'b'.
    """
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=(\S+?),? ", attributes + " "):
        groups = _device_order(found.group(2)).reshape(-1, int(found.group(1)))
    elif found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", attributes):
        return tuple(
            tuple(map(int, group.split(",")))
            for group in re.findall(r"\{([\d,]+)\}", found.group(1))
        )
    elif found := MESH_GROUPS.search(attributes):
        groups = _mesh_groups(*found.groups())
    else:
        groups = np.arange(devices)[None]
    return tuple(map(tuple, groups.tolist()))


def _mesh_groups(axes: str, order: str | None, along: str) -> np.ndarray:
    """Returns the groups (number, size) along some axes of a mesh.

    Args:
      axes: "'a'=4,'b'=2".
      order: of the devices, '[2,4]T(1,0)'; None: by number.
      along: "'b'", or "'a':(2)2" for a part of an axis: its size before it, and its own.
    """
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    # each axis is split into 3 parts; the groups are along the middle part
    parts = {axis: (1, size, 1) for axis, size in sizes.items()}
    grouped = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", along)
    for axis, before, size in grouped:
        if size:
            parts[axis] = int(before), int(size), sizes[axis] // int(before) // int(size)
    ids = _device_order(order) if order else np.arange(math.prod(sizes.values()))
    ids = ids.reshape([size for part in parts.values() for size in part])
    names = {axis for axis, _, _ in grouped}
    middle = [3 * number + 1 for number, axis in enumerate(sizes) if axis in names]
    groups = np.moveaxis(ids, middle, range(-len(middle), 0))
    return groups.reshape(-1, math.prod(groups.shape[-len(middle) :]))


def _device_order(text: str) -> np.ndarray:
    """Returns the device numbers of '[2,4]T(1,0)': 0 to 7 as 2 rows of 4, then transposed."""
    shape, axes = _found(r"^\[([\d,]+)\](?:T\(([\d,]+)\))?$", text).groups()
    sizes = list(map(int, shape.split(",")))
    return (
        np.arange(math.prod(sizes))
        .reshape(sizes)
        .transpose(list(map(int, axes.split(","))) if axes else None)
    )
