"""What a compiled step takes of a device's memory, told before the run and when there is not enough."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

ADVICE = (
    "To take less: model.remat='dots', or 'full'; optim.accumulate_steps=2, or more; a smaller data.tokens_per_batch; "
    "model.dtype='bfloat16'; over several devices parallel.fsdp, which splits the state too."
)


class OutOfMemory(Exception):
    """A device has not as much memory as the run needs."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device, as the compiler plans them."""

    state: int  # of parameters, moments, averages and the batch
    temporary: int  # of what lives within the step, at its peak

    @property
    def total(self) -> int:
        """At the peak."""
        return self.state + self.temporary


def of_program(compiled: Any) -> Memory | None:
    """Of a compiled step that gives its state away; None: what compiled it does not tell."""
    if not hasattr(compiled, "memory_analysis") or (found := compiled.memory_analysis()) is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(held, found.temp_size_in_bytes)


def table(of_shape: Mapping[tuple[int, int], Memory], device: jax.Device) -> str:
    """The memory of a device that steps on each shape of batch take, a line each, the most first."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    has = f", which has {limit / 1e9:,.3g} GB" if limit else ""
    lines = [f"memory of a device ({device.device_kind}{has}), by the compiler, in GB:"]
    for (rows, length), memory in sorted(of_shape.items(), key=lambda item: -item[1].total):
        parts = f"state and batch {memory.state / 1e9:,.3g}, within the step {memory.temporary / 1e9:,.3g}"
        lines.append(f"  batch of {rows} x {length}: {memory.total / 1e9:,.3g}: {parts}")
    return "\n".join(lines)


def is_lack_of(error: Exception) -> bool:
    """Whether a device, or the host, had no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
