"""The device memory of a compiled step, as the compiler reports it, and out-of-memory errors."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

ADVICE = (
    "To take less: model.remat='dots', or 'full'; optim.accumulate_steps=2, or more; a smaller "
    "data.tokens_per_batch; model.dtype='bfloat16'; over several devices parallel.fsdp, which "
    "splits the state too."
)


class OutOfMemory(Exception):
    """The run needs more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device, as reported by the compiler."""

    state: int  # parameters, moments, averages and the batch
    temporary: int  # buffers within the step, which need not all exist at the same time
    code: int = 0  # the compiled program itself
    most: int | None = None  # peak of state and buffers; None: the compiler does not report it

    @property
    def peak(self) -> int:
        """The peak of the state and the buffers together."""
        return self.state + self.temporary if self.most is None else self.most

    @property
    def total(self) -> int:
        """The peak, with the compiled program."""
        return self.peak + self.code

    def __str__(self) -> str:
        within = (self.peak - self.state) / 1e9
        parts = f"state and batch {self.state / 1e9:,.3g}, within the step {within:,.3g}"
        return f"{parts}, the program {self.code / 1e9:,.3g}" if self.code else parts


def of_program(compiled: Any, platform: str) -> Memory | None:
    """Returns the memory of a compiled step that donates its state; None if it is not reported."""
    if not hasattr(compiled, "memory_analysis") or (found := compiled.memory_analysis()) is None:
        return None
    state = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    # The CPU compiler's peak does not include the buffers within the step.
    most = None if platform == "cpu" else getattr(found, "peak_memory_in_bytes", 0) or None
    return Memory(state, found.temp_size_in_bytes, found.generated_code_size_in_bytes, most)


def table(of_shape: Mapping[tuple[int, int], Memory], device: jax.Device) -> str:
    """Returns a table of the device memory for each batch shape, sorted from most to least."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    has = f", which has {limit / 1e9:,.3g} GB" if limit else ""
    lines = [f"memory of a device ({device.device_kind}{has}), by the compiler, in GB:"]
    for (rows, length), memory in sorted(of_shape.items(), key=lambda item: -item[1].total):
        lines.append(f"  batch of {rows} x {length}: {memory.total / 1e9:,.3g}: {memory}")
    return "\n".join(lines)


def shortage(error: Exception) -> str:
    """Returns the missing memory, parsed from a compiler's error; else the error's first line."""
    text = str(error)
    for pattern in (
        r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)",
        r"Used ([\d.]+)G of ([\d.]+)G",
    ):
        if found := re.search(pattern, text):
            needed, available = map(float, found.groups())
            missing = needed - available
            return (
                f"needs {needed:,.3g} GiB, {available:,.4g} GiB available, {missing:,.3g} GiB short"
            )
    return text.splitlines()[0]


def is_lack_of(error: Exception) -> bool:
    """Whether the error is that a device, or the host, is out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
