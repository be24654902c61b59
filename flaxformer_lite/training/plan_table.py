"""Plans as text: the figures of each step, and how a step scales with the number of devices."""

from flaxformer_lite.system.memory import ADVICE
from flaxformer_lite.training.planned import Plan, Target

BY_CYCLES = "by the compiler's estimates, which leave out kernels and collectives"
DECODING_ADVICE = (
    "To take less: a smaller decode.tokens_per_batch, decode.beam_size or data.buckets; "
    "model.dtype='bfloat16'; parallel.tensor, which splits the model."
)


def table(plans: list[Plan], target: Target, *, decode: bool = False) -> str:
    """Returns the plans as text: the compiler; then memory, FLOPs, communication and time of each.

    Args:
      decode: whether the plans are of decoding, and not of a training step.
    """
    mesh = f"{target.mesh.size} x {target.name}, mesh {target.mesh_shape} (data, fsdp, tensor)"
    lines = [f"{_origin(target)}, for {mesh}", *([target.assumed] if target.assumed else [])]
    for plan in plans:
        lines += _lines(plan, target, decode=decode)
    return "\n".join(lines)


def scaling_table(plans: list[tuple[Plan, Target]]) -> str:
    """Returns a table with a line for each plan, of the same model on more and more devices."""
    target = plans[0][1]
    accelerator = target.accelerator
    on_gpu = accelerator.platform == "gpu"
    joined = "the GPUs of a machine" if on_gpu else "the chips of a slice"
    lines = [
        f"{_origin(target)}, for {target.name}; time {_time_source(target)}; "
        f"{accelerator.link / 1e9:.4g} GB/s a device among {joined}, "
        f"{accelerator.network / 1e9:.4g} beyond",
        "| Devices | Mesh (data, fsdp, tensor) | Batch | GB a device: peak (state) "
        "| MB sent, of it beyond links | Efficiency, one after another | hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_scaling_row(*each) for each in plans]
    return "\n".join([*lines, *([target.assumed] if target.assumed else [])])


def _origin(target: Target) -> str:
    """Returns how the figures have been obtained."""
    if target.compiler:
        return f"compiled by {target.compiler}"
    return f"estimated on a CPU ({target.no_compiler})"


def _time_source(target: Target) -> str:
    """Returns how times have been obtained."""
    if target.estimates_cycles:
        return BY_CYCLES
    return f"at {target.utilization:.0%} of {target.accelerator.flops / 1e12:,.0f} TFLOP/s"


def _lines(plan: Plan, target: Target, *, decode: bool) -> list[str]:
    name, advice = ("decoding", DECODING_ADVICE) if decode else ("a training step", ADVICE)
    batch = f"{plan.rows} x {plan.length}"
    lines = [f"{name}, global batch of {batch}; each of {target.mesh.size} devices:"]
    available = f"{target.accelerator.memory / 1e9:.4g} GB a device"
    if plan.memory is None:
        lines.append(f"  more than {available}: does not fit: {plan.shortage}")
        return [*lines, f"  {advice}"]
    code = f" (and {_figure(plan.memory.code / 1e9)} GB of program)" if plan.memory.code else ""
    fits = "fits" if plan.fits(target) else "does not fit"
    lines.append(f"  peak {_figure(plan.memory.peak / 1e9)} GB of {available}: {fits}{code}")
    if not plan.fits(target):
        lines.append(f"  {advice}")
    lines.append(f"  memory      {plan.memory}")
    lines.append(f"  arithmetic  {_figure(plan.flops / 1e9)} GFLOPs of matrix products")
    return lines + _communication(plan, target) + _time(plan, target, decode=decode)


def _communication(plan: Plan, target: Target) -> list[str]:
    of_kind = plan.compiled.bytes_by_kind()
    kinds = [f"{kind} {_figure(size / 1e6)}" for kind, size in of_kind.most_common()]
    total = _figure(sum(of_kind.values()) / 1e6)
    lines = [f"  sends       {total} MB: {', '.join(kinds) or 'nothing'}"]
    if beyond := plan.bytes_beyond_links(target.accelerator):
        joined = f"the {target.accelerator.linked} that links join"
        lines.append(f"              {_figure(beyond / 1e6)} MB of it beyond {joined}")
    kernels = [f"{count} x {name}" for name, count in plan.compiled.kernels.items()]
    return [*lines, f"  kernels     {', '.join(kernels) or 'none'}"]


def _time(plan: Plan, target: Target, *, decode: bool) -> list[str]:
    if decode:  # memory bandwidth bounds its steps, and FLOPs do not reflect that
        clock = target.accelerator.clock
        if not target.estimates_cycles or not clock or not plan.compiled.loop_cycles:
            return []
        milliseconds = plan.compiled.loop_cycles / clock * 1e3
        return [f"  a step      {_figure(milliseconds)} ms for {plan.rows} inputs, {BY_CYCLES}"]
    compute, send = plan.compute_seconds(target), plan.send_seconds(target)
    seconds, hidden, positions = compute + send, max(compute, send), plan.rows * plan.length
    # the estimates leave out the time of kernels
    most = "at most " if target.estimates_cycles and plan.compiled.kernels else ""
    peak = target.accelerator.flops
    return [
        f"  computes    {_figure(compute * 1e3)} ms, {_time_source(target)}",
        f"  collectives {_figure(send * 1e3)} ms at the speed of the links, one after another",
        f"  speed       {most}{positions / seconds:,.0f} target positions a second, "
        f"{positions / hidden:,.0f} if collectives hide behind arithmetic",
        f"  of the peak {most}{plan.flops / (seconds * peak):.0%}, "
        f"{plan.flops / (hidden * peak):.0%} if they hide",
    ]


def _scaling_row(plan: Plan, target: Target) -> str:
    first = f"| {target.mesh.size} | {target.mesh_shape} | {plan.rows} x {plan.length} |"
    if plan.memory is None:
        return f"{first} does not fit | | | |"
    compute, send = plan.compute_seconds(target), plan.send_seconds(target)
    peak, state = _figure(plan.memory.peak / 1e9), _figure(plan.memory.state / 1e9)
    fits = "" if plan.fits(target) else ", does not fit"
    sent = _figure(sum(plan.sent.values()) / 1e6)
    beyond = _figure(plan.bytes_beyond_links(target.accelerator) / 1e6)
    return (
        f"{first} {peak} ({state}){fits} | {sent}, {beyond} "
        f"| {compute / (compute + send):.0%} | {compute / max(compute, send):.0%} |"
    )


def _figure(number: float) -> str:
    """Returns 3 significant digits: '3,040', '0.0425'."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:g}"
