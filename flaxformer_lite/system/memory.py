"""What a compiled step takes of a device's memory, told before the run and when there is not enough."""

import dataclasses
import re
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
    temporary: int  # of what lives within the step, which need not all be there at once
    code: int = 0  # of the program itself
    most: int | None = None  # of state and step together, at any time; None: the compiler does not report it

    @property
    def peak(self) -> int:
        """Of state and step, at their peak."""
        return self.state + self.temporary if self.most is None else self.most

    @property
    def total(self) -> int:
        """At the peak, with the program."""
        return self.peak + self.code

    def __str__(self) -> str:
        parts = f"state and batch {self.state / 1e9:,.3g}, within the step {(self.peak - self.state) / 1e9:,.3g}"
        return f"{parts}, the program {self.code / 1e9:,.3g}" if self.code else parts


def of_program(compiled: Any, platform: str) -> Memory | None:
    """Of a step compiled for a platform, which gives its state away; None: its compiler does not report memory."""
    if not hasattr(compiled, "memory_analysis") or (found := compiled.memory_analysis()) is None:
        return None
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    # A CPU's compiler leaves out of its peak what lives within the step.
    most = None if platform == "cpu" else getattr(found, "peak_memory_in_bytes", 0) or None
    return Memory(held, found.temp_size_in_bytes, found.generated_code_size_in_bytes, most)


def table(of_shape: Mapping[tuple[int, int], Memory], device: jax.Device) -> str:
    """The memory of a device that steps on each shape of batch take, a line each, the most first."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    has = f", which has {limit / 1e9:,.3g} GB" if limit else ""
    lines = [f"memory of a device ({device.device_kind}{has}), by the compiler, in GB:"]
    for (rows, length), memory in sorted(of_shape.items(), key=lambda item: -item[1].total):
        lines.append(f"  batch of {rows} x {length}: {memory.total / 1e9:,.3g}: {memory}")
    return "\n".join(lines)


def lack(error: Exception) -> str:
    """Returns how much memory is missing, from the error of a compiler; else its first line."""
    text = str(error)
    for pattern in (r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", r"Used ([\d.]+)G of ([\d.]+)G"):
        if found := re.search(pattern, text):
            needed, available = map(float, found.groups())
            return f"needs {needed:,.3g} GiB, {available:,.4g} GiB available, {needed - available:,.3g} GiB short"
    return text.splitlines()[0]


def is_lack_of(error: Exception) -> bool:
    """Whether a device, or the host, had no memory left."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
