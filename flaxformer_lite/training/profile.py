"""A trace of a few steps, and a table of their costliest operations by their path in the model."""

import collections
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

WARM = 5  # steps before the traced ones
TRACED = 5
SHOWN = 10  # operations in the table

INSTRUCTION = re.compile(
    r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', re.MULTILINE
)
# Parts of an operation's name that are not modules, named scopes or primitives.
AROUND = re.compile(r"(?:jvp|vmap|transpose)\((.*)\)")
WRAPPING = re.compile(
    r"jit\(.*|checkpoint|rematted_computation|closed_call|while|body|train_step|\w+\.\w+|"
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """All runs of the operations of a path, of all layers together."""

    place: str  # such as 'decoder/layers_*/feed_forward/inner/dot_general (backward)'
    seconds: float  # of all runs on all devices
    runs: int


def traced(
    batches: Iterable[Any],
    folder: Path,
    *,
    programs: Callable[[], Iterable[Future[Any]]],
    wait: Callable[[], None],
    show: Callable[[str], None],
) -> Iterator[Any]:
    """Yields `batches`, and traces `TRACED` steps into `folder`, for TensorBoard and XProf.

    The traced steps follow `WARM` others and the last compilation.

    Args:
      programs: returns the futures of compiled steps; their text contains the paths of operations.
      wait: waits until all steps are computed.
      show: shows the table of the costliest operations, or the reason why there is none.
    """
    steps = -1  # number of traced steps; -1: tracing has not started
    running = False
    try:
        for number, batch in enumerate(batches):
            if steps == TRACED and running:
                running = False
                _end(folder, steps, programs, wait, show)
            if steps == -1 and number >= WARM and all(program.done() for program in programs()):
                wait()
                jax.profiler.start_trace(str(folder))
                steps, running = 0, True
            steps += running
            yield batch
        if running:
            running = False
            _end(folder, steps, programs, wait, show)
        if steps == -1:
            show(
                "train.profile: no step was traced: the run ended before all shapes of batches "
                "were compiled"
            )
    finally:
        if running:  # the run has been stopped
            jax.profiler.stop_trace()


def _end(
    folder: Path,
    steps: int,
    programs: Callable[..., Any],
    wait: Callable[[], None],
    show: Callable[[str], None],
) -> None:
    """Stops the trace and shows its table."""
    wait()
    jax.profiler.stop_trace()
    texts = [each.result().as_text() for each in programs() if hasattr(each.result(), "as_text")]
    show(f"traced {steps} steps into {folder}\n" + table(operations(folder, texts), steps))


def table(found: Sequence[Operation], steps: int) -> str:
    """Returns the costliest operations: share of time, ms and runs a step, path; one a line."""
    total = sum(each.seconds for each in found) or 1.0
    lines = [f"{'share':>6} {'ms a step':>10} {'runs':>6}  operation"]
    lines += [
        f"{each.seconds / total:6.1%} {1e3 * each.seconds / steps:10.2f} "
        f"{each.runs / steps:6.0f}  {each.place}"
        for each in found[:SHOWN]
    ]
    rest = sum(each.seconds for each in found[SHOWN:])
    lines.append(
        f"{rest / total:6.1%} {1e3 * rest / steps:10.2f} {'':6}  "
        f"{max(0, len(found) - SHOWN)} others"
    )
    return "\n".join(lines)


def operations(folder: Path, programs: Sequence[str]) -> list[Operation]:
    """Returns the operations of `programs` in the newest trace below `folder`, costliest first."""
    files = sorted(Path(folder).glob("plugins/profile/*/*.xplane.pb"))
    places = [dict(INSTRUCTION.findall(program)) for program in programs]
    seconds: dict[str, float] = collections.defaultdict(float)
    runs: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        # On Python 3.13 a type of jaxlib warns on creation; if warnings are errors, that aborts the
        # process.
        warnings.simplefilter("ignore")
        by_program = _by_program(jax.profiler.ProfileData.from_file(str(files[-1])))
    for names in by_program.values():
        known = max(places, key=lambda of: len(of.keys() & names.keys()), default={})
        for name, durations in names.items():
            where = place(known.get(name, name))
            seconds[where] += sum(durations)
            runs[where] += len(durations)
    costliest = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return [Operation(where, spent, runs[where]) for where, spent in costliest]


def _by_program(trace: "jax.profiler.ProfileData") -> dict[Any, dict[str, list[float]]]:
    """Returns program to instruction to the seconds of each run, without nested instructions."""
    found: dict[Any, dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for plane in trace.planes:
        for line in plane.lines:
            events = []
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    program = stats.get("program_id", stats.get("hlo_module"))
                    events.append((event.start_ns, -event.duration_ns, program, stats["hlo_op"]))
            for (program, name), own in own_times(sorted(events, key=lambda event: event[:2])):
                found[program][name].append(own * 1e-9)
    return found


def own_times(
    events: Sequence[tuple[float, float, Any, str]],
) -> Iterator[tuple[tuple[Any, str], float]]:
    """Yields the rest of each event, and its duration without nested events.

    Args:
      events: (start, minus duration, ...rest), sorted.
    """
    open_events: list[list[Any]] = []  # [end, own duration, rest], each nested in the one before
    for start, minus_duration, *rest in events:
        while open_events and open_events[-1][0] <= start:
            _, own, names = open_events.pop()
            yield names, own
        if open_events:
            open_events[-1][1] += minus_duration
        open_events.append([start - minus_duration, -minus_duration, tuple(rest)])
    for _, own, names in reversed(open_events):
        yield names, own


def place(name: str) -> str:
    """Returns the path of an operation in the model from its name in JAX.

    All layers have the same path. A suffix marks operations that run backward or again.
    """
    name = name.split(";")[0]  # of fused operations the first
    parts = [part for part in map(_within, name.split("/")) if not WRAPPING.fullmatch(part)]
    path = re.sub(r"layers_\d+", "layers_*", "/".join(parts)) or name
    if "rematted_computation" in name:
        return f"{path} (again)"
    return f"{path} (backward)" if "transpose(" in name else re.sub(r"\.\d+$", "", path)


def _within(part: str) -> str:
    """Returns 'loss' for 'transpose(jvp(loss))', and '' for 'jvp(EncoderClassifier)', the model."""
    inner = part
    while found := AROUND.fullmatch(inner):
        inner = found.group(1)
    return "" if inner != part and inner[:1].isupper() else inner
