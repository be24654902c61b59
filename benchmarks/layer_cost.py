"""Table 1 of the paper, measured: the cost of one layer of each type over length and width.

Self-attention is the package's `dot_product_attention` without projections, in heads of 64, on one
row. Restricted self-attention is the same function on a band of blocks (the package's `blockwise`
skips blocks outside its window too, but visits all n^2 of them). LSTM, GRU and the convolution are
those of Flax.

FLOPs      of the matrix products and convolutions in the jaxpr; a multiply-add counts as 2, and the
           body of a loop as often as it runs
Sequential iterations of loops that wait for one another
Path       layers, times sequential operations, until the derivative of the last output by the first
           token is not 0
Memory     of the compiled function besides inputs and outputs; only for gradients, since XLA may
           run forward attention as one kernel of a CPU library, whose scores this count omits
Time       median of the repeats, and their range; all points are compiled first and then alternate,
           so that other load on the machine affects all of them
Gradients  the value, and its gradients by parameters and input
Exponents  slopes of logarithms: of FLOPs over all lengths or widths, of time and memory over the
           last 3 doublings of the length, or over the widths from 512. The length grows at width 64
           for attention, and at 512 for the other layers

    python -m benchmarks.layer_cost --output=runs/layer_cost.png
    python -m benchmarks.layer_cost --lengths 64 128 256 512 --widths 64 512 1024     # fewer points
"""

import argparse
import dataclasses
import functools
import itertools
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import figures
from flaxformer_lite.model import masks
from flaxformer_lite.model.attention import dot_product_attention
from flaxformer_lite.plotting import plots
from flaxformer_lite.system import runtime, storage

D_HEAD = 64
WINDOW, KERNEL = (
    32,
    3,
)  # tokens on either side in restricted attention (r = 65); the convolution's k
PATH_LENGTHS, PATH_WIDTH, PATH_WINDOW = (17, 33, 65), 8, 4
NARROW, WIDE = 64, 512  # the widths at which the length grows
DOUBLINGS = 3  # of the length, for exponents of time and memory
TOLERANCE = 0.15  # an exponent of time that differs more from the paper's has a note
SLICE = 0.02  # shortest turn, in seconds
Apply = Callable[[Any, jax.Array], jax.Array]  # (parameters, x_BLD) -> (B, L, D)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """A row of Table 1, and the sizes of its measurements."""

    name: str
    paper: str  # complexity per layer
    exponents: dict[str, int]  # the same, by variable: n, d, and r or k
    sequential: str
    path: str
    apply: Apply
    init: Callable[[int], Any] = lambda width: {}  # width -> parameters
    fit_width: int = NARROW  # for the exponent of time in n
    fit_length: int = 1024  # for the exponent of time in d
    resized: Callable[[int], "Layer"] | None = None  # r or k -> the layer with that size
    size: int | None = None  # r or k


def heads(x_BLD: jax.Array) -> jax.Array:
    """Returns `x_BLD` in heads of width 64, or in one narrower head: (B, L, H, K)."""
    B, L, D = x_BLD.shape
    return x_BLD.reshape(B, L, -1, min(D, D_HEAD))


def self_attention(params: Any, x_BLD: jax.Array) -> jax.Array:
    """Returns equation 1 with `x_BLD` as queries, keys and values: (B, L, D)."""
    x_BLHK = heads(x_BLD)
    return dot_product_attention(x_BLHK, x_BLHK, x_BLHK)[0].reshape(x_BLD.shape)


def banded_attention(
    query_BLHK: jax.Array, key_BLHK: jax.Array, value_BLHK: jax.Array, *, window: int
) -> jax.Array:
    """Returns equation 1 over keys at most `window` tokens from each query: (B, L, H, K).

    Compares each block of `window` queries with its own block of keys and the two adjacent ones:
    3 L `window` scores, not L^2.
    """
    B, L, H, K = query_BLHK.shape
    blocks = math.ceil(L / window)
    whole = ((0, 0), (0, blocks * window - L), (0, 0), (0, 0))
    around = ((0, 0), (window, blocks * window - L + window), (0, 0), (0, 0))

    def neighbours(x_BLHK: jax.Array) -> jax.Array:
        x_BNLHK = jnp.pad(x_BLHK, around).reshape(B, blocks + 2, window, H, K)
        three = [x_BNLHK[:, i : i + blocks] for i in range(3)]
        return jnp.concatenate(three, axis=2).reshape(B * blocks, 3 * window, H, K)

    query_NTHK = jnp.pad(query_BLHK, whole).reshape(B * blocks, window, H, K)
    first_N1 = window * jnp.arange(blocks)[:, None]
    query_NT = first_N1 + jnp.arange(window)[None]
    key_NS = first_N1 + jnp.arange(-window, 2 * window)[None]
    exists_NS = (key_NS >= 0) & (key_NS < L)
    mask_N1TS = masks.combine(masks.window(query_NT, key_NS, window), masks.padding(exists_NS))
    mask_N1TS = jnp.tile(mask_N1TS, (B, 1, 1, 1))
    mixed_NTHK, _ = dot_product_attention(
        query_NTHK, neighbours(key_BLHK), neighbours(value_BLHK), mask_N1TS
    )
    return mixed_NTHK.reshape(B, -1, H, K)[:, :L]


def restricted(window: int) -> Layer:
    """Self-attention to a neighbourhood of r = 2 `window` + 1 tokens. Section 4."""

    def apply(params: Any, x_BLD: jax.Array) -> jax.Array:
        x_BLHK = heads(x_BLD)
        return banded_attention(x_BLHK, x_BLHK, x_BLHK, window=window).reshape(x_BLD.shape)

    return Layer(
        name=f"restricted self-attention, r = {2 * window + 1}",
        paper="r n d",
        exponents={"n": 1, "d": 1, "r": 1},
        sequential="1",
        path="n / r",
        apply=apply,
        size=2 * window + 1,
        resized=lambda size: restricted((size - 1) // 2),
    )


def recurrent(name: str, cell: type[nn.RNNCellBase]) -> Layer:
    """A recurrent cell of Flax over the text, from left to right."""

    def apply(params: Any, x_BLD: jax.Array) -> jax.Array:
        return nn.RNN(cell(x_BLD.shape[-1])).apply({"params": params}, x_BLD)

    def init(width: int) -> Any:
        return nn.RNN(cell(width)).init(jax.random.key(0), jnp.zeros((1, 1, width)))["params"]

    exponents = {"n": 1, "d": 2}
    return Layer(name, "n d^2", exponents, "n", "n", apply, init, fit_width=WIDE, fit_length=64)


def convolution(kernel: int, dilation: int = 1) -> Layer:
    """A causal convolution over `kernel` tokens, `dilation` apart.

    If it were not causal, some paths of a dilated one would lead beyond the ends of the text.
    """

    def module(width: int) -> nn.Conv:
        return nn.Conv(width, (kernel,), kernel_dilation=(dilation,), padding="CAUSAL")

    def init(width: int) -> Any:
        return module(width).init(jax.random.key(0), jnp.zeros((1, 1, width)))["params"]

    apply = lambda params, x_BLD: module(x_BLD.shape[-1]).apply({"params": params}, x_BLD)  # noqa: E731
    return Layer(
        name=f"convolution, k = {kernel}",
        paper="k n d^2",
        exponents={"n": 1, "d": 2, "k": 1},
        sequential="1",
        path="n / k",
        apply=apply,
        init=init,
        fit_width=WIDE,
        fit_length=256,
        size=kernel,
        resized=convolution,
    )


LAYERS = (
    Layer("self-attention", "n^2 d", {"n": 2, "d": 1}, "1", "1", self_attention),
    restricted(WINDOW),
    recurrent("LSTM", nn.OptimizedLSTMCell),
    recurrent("GRU", nn.GRUCell),
    convolution(KERNEL),
)


def with_gradients(apply: Apply) -> Callable:
    """Returns (parameters, x_BLD, cotangent_BLD) -> (value, gradients by parameters and `x_BLD`).

    The cotangent is an input, since the compiler would simplify constant ones.
    """

    def run(params: Any, x_BLD: jax.Array, cotangent_BLD: jax.Array) -> tuple:
        y_BLD, back = jax.vjp(apply, params, x_BLD)
        return y_BLD, back(cotangent_BLD)

    return run


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation of a jaxpr calls."""
    for parameter in equation.params.values():
        for each in parameter if isinstance(parameter, tuple | list) else [parameter]:
            inner = getattr(each, "jaxpr", each)
            if hasattr(inner, "eqns"):
                yield inner


def flops(jaxpr: Any) -> int:
    """Returns the FLOPs of the matrix products and convolutions in `jaxpr`.

    A multiply-add counts as 2, the body of a scan as often as it runs, a cond as its most expensive
    branch. A convolution includes the zeros of its padding.

    Raises:
      ValueError: a while loop, which has no fixed length, contains products.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, [flops(each) for each in inner_jaxprs(equation)]
        if name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            outputs = math.prod(equation.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(left[axis] for axis in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            channel, *_ = equation.params["dimension_numbers"].rhs_spec
            outputs = math.prod(equation.outvars[0].aval.shape)
            total += 2 * outputs * math.prod(kernel) // kernel[channel]
        elif name == "while" and any(inner):
            raise ValueError("there are matrix products in a while loop, whose length is unknown.")
        elif name == "cond":
            total += max(inner)
        else:
            total += equation.params.get("length", 1) * sum(inner) if name == "scan" else sum(inner)
    return total


def sequential_operations(jaxpr: Any) -> int:
    """Returns the longest chain of dependent loop iterations in `jaxpr`; 0 without a loop."""
    waited, longest = {}, 0  # keys are the ids of variables, since literals are not hashable
    for equation in jaxpr.eqns:
        before = max((waited.get(id(variable), 0) for variable in equation.invars), default=0)
        inside = max((sequential_operations(each) for each in inner_jaxprs(equation)), default=0)
        if equation.primitive.name == "scan":
            inside = equation.params["length"] * max(1, inside)
        longest = max(longest, before + inside)
        waited.update((id(variable), before + inside) for variable in equation.outvars)
    return longest


@functools.partial(jax.jit, static_argnums=0)
def push(
    layer: Callable[[jax.Array], jax.Array], x_BLD: jax.Array, tangent_BLD: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `layer(x_BLD)`, and its derivative in the direction of the tangent."""
    return jax.jvp(layer, (x_BLD,), (tangent_BLD,))


def path_layers(layers: Iterable[Callable[[jax.Array], jax.Array]], x_BLD: jax.Array) -> int:
    """Returns the number of stacked `layers` until the last output depends on the first token.

    It depends on it if its derivative by the first token of `x_BLD` is not 0.

    Raises:
      ValueError: the derivative is still 0 after as many layers as tokens.
    """
    tangent_BLD = jnp.zeros_like(x_BLD).at[:, 0].set(1)
    for number, layer in enumerate(itertools.islice(layers, x_BLD.shape[1]), 1):
        x_BLD, tangent_BLD = push(layer, x_BLD, tangent_BLD)
        if jnp.any(tangent_BLD[:, -1] != 0):
            return number
    raise ValueError("the first token does not reach the last output.")


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Returns the exponent p of `costs` = c `sizes`^p, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


@functools.lru_cache
def jaxpr_of(layer: Layer, length: int, width: int, gradients: bool) -> Any:
    """Returns the jaxpr of one point."""
    params = jax.eval_shape(functools.partial(layer.init, width))
    x_BLD = jax.ShapeDtypeStruct((1, length, width), jnp.float32)
    if gradients:
        return jax.make_jaxpr(with_gradients(layer.apply))(params, x_BLD, x_BLD).jaxpr
    return jax.make_jaxpr(layer.apply)(params, x_BLD).jaxpr


@dataclasses.dataclass(eq=False)
class Point:
    """One layer at one size, forward or with gradients, with its measurements."""

    layer: Layer
    length: int
    width: int
    gradients: bool
    run: Callable[[], Any]
    temporary: int  # bytes
    calls: int = 1  # a turn
    seconds: list[float] = dataclasses.field(default_factory=list)  # a call, one for each turn
    fresh: list[float] = dataclasses.field(default_factory=list)  # bytes of new pages a call
    system: list[float] = dataclasses.field(default_factory=list)  # share of CPU time in the system

    def turn(self) -> float:
        """Returns the mean seconds of `calls` calls."""
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(self.calls):
            jax.block_until_ready(self.run())
        taken, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
        self.fresh.append(
            (after.ru_minflt - before.ru_minflt) * resource.getpagesize() / self.calls
        )
        self.system.append(system / max(1e-9, system + user))
        return taken / self.calls


@functools.lru_cache
def arrays(layer: Layer, length: int, width: int) -> tuple:
    """Returns parameters, x_BLD and cotangent_BLD."""
    x_BLD, cotangent_BLD = (
        np.random.default_rng(0).normal(size=(2, 1, length, width)).astype(np.float32)
    )
    return params_of(layer, width), jnp.asarray(x_BLD), jnp.asarray(cotangent_BLD)


@functools.lru_cache
def params_of(layer: Layer, width: int) -> Any:
    """Returns random parameters, which are cheaper than Flax's orthogonal matrices."""
    rng, shapes = np.random.default_rng(1), jax.eval_shape(functools.partial(layer.init, width))
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape, scale=width**-0.5), x.dtype), shapes
    )


def compile_point(layer: Layer, length: int, width: int, gradients: bool) -> Point:
    """Returns the compiled point, without measurements."""
    inputs = arrays(layer, length, width)[: None if gradients else 2]
    compiled = (
        jax.jit(with_gradients(layer.apply) if gradients else layer.apply).lower(*inputs).compile()
    )
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Point(layer, length, width, gradients, lambda: compiled(*inputs), temporary)


def sizes(layer: Layer, lengths: Sequence[int], widths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the (length, width) of a layer: all lengths at 2 widths, all widths at 1 length."""
    yield from dict.fromkeys(
        [*itertools.product(lengths, (NARROW, WIDE)), *((layer.fit_length, w) for w in widths)]
    )


def measure(
    lengths: Sequence[int], widths: Sequence[int], *, repeats: int, limit_bytes: float
) -> list[Point]:
    """Returns all points, except sizes whose gradients need more memory than the limit."""
    points = []
    for layer in LAYERS:
        for length, width in sizes(layer, lengths, widths):
            both = [compile_point(layer, length, width, gradients) for gradients in (False, True)]
            points += both if both[1].temporary <= limit_bytes else []
    for point in points:
        if point.turn() < SLICE:  # the first turn touches new memory pages: the second is timed
            point.calls = math.ceil(SLICE / point.turn())
        point.fresh.clear()
        point.system.clear()
    for _ in range(repeats):
        for point in points:
            point.seconds.append(point.turn())
    return points


def flops_exponents(
    layer: Layer, lengths: Sequence[int], widths: Sequence[int]
) -> dict[str, float]:
    """Returns the exponent of the forward FLOPs by each variable of the paper's formula."""
    count = lambda layer, length, width: flops(jaxpr_of(layer, length, width, False))  # noqa: E731
    found = {
        "n": slope(lengths, [count(layer, length, layer.fit_width) for length in lengths]),
        "d": slope(widths, [count(layer, layer.fit_length, width) for width in widths]),
    }
    for variable in layer.exponents.keys() - {"n", "d"}:
        others = [layer.size, 2 * layer.size - 1, 4 * layer.size - 3]
        found[variable] = slope(
            others, [count(layer.resized(size), 1024, NARROW) for size in others]
        )
    return found


def fitted(
    points: Iterable[Point], layer: Layer, variable: str, gradients: bool, among: Sequence[int]
) -> list[Point]:
    """Returns the points for an exponent of time or memory, whose lengths or widths are `among`."""
    own = [point for point in points if point.layer is layer and point.gradients == gradients]
    if variable == "n":
        return [point for point in own if point.width == layer.fit_width and point.length in among]
    return [point for point in own if point.length == layer.fit_length and point.width in among]


def exponent(points: Sequence[Point], variable: str, cost: Callable[[Point], float]) -> float:
    """Returns the exponent of `cost` by n or d; NaN for fewer than 2 points."""
    by = [point.length if variable == "n" else point.width for point in points]
    return slope(by, [cost(point) for point in points]) if len(points) > 1 else math.nan


def median_seconds(point: Point) -> float:
    """Returns the median over the turns."""
    return statistics.median(point.seconds)


def path_lengths(layer: Layer, stack: Callable[[int], Layer]) -> list[int]:
    """Returns the sequential operations from the first token to the last output.

    One for each of PATH_LENGTHS. Layer i is stack(i); all have the parameters of `layer`.
    """
    found = []
    for length in PATH_LENGTHS:
        params, x_BLD, _ = arrays(layer, length, PATH_WIDTH)
        bound = functools.lru_cache(lambda apply, params=params: functools.partial(apply, params))
        layers = (bound(stack(i).apply) for i in itertools.count())
        within = sequential_operations(jaxpr_of(layer, length, PATH_WIDTH, False))
        found.append(path_layers(layers, x_BLD) * max(1, within))
    return found


def paths(layer: Layer) -> str:
    """Returns a cell of the table: the lengths of the path, and the paper's."""
    stacks = {layer.path: lambda i: layer}
    if layer.path == "n / r":
        near = restricted(PATH_WINDOW)
        stacks = {f"n / r, r = {near.size}": lambda i: near}
    if layer.path == "n / k":
        stacks["log_k n, dilated"] = lambda i: convolution(KERNEL, KERNEL**i)
    return "; ".join(
        f"{', '.join(map(str, path_lengths(layer, stack)))} ({path})"
        for path, stack in stacks.items()
    )


def power(exponents: dict[str, float], paper: dict[str, int] | None = None) -> str:
    """Returns 'n^1.98 d^1.03', with a star at exponents that differ by more than TOLERANCE."""
    far = {v for v, p in exponents.items() if paper is not None and abs(p - paper[v]) > TOLERANCE}
    return " ".join(f"{v}^{p:.2f}{'*' * (v in far)}" for v, p in exponents.items())


def exponents_table(
    points: Sequence[Point], lengths: Sequence[int], widths: Sequence[int]
) -> Iterator[str]:
    """Yields Markdown: a row for each layer, notes on exponents that differ from the paper's."""
    at = ", ".join(map(str, PATH_LENGTHS))
    yield "| layer | FLOPs (paper) | time, forward | time, gradients | memory, gradients "
    yield f"| sequential, n = {lengths[-1]:,} (paper) | path, n = {at} (paper) |\n|{' --- |' * 7}\n"
    notes = []
    among = {"n": lengths[-DOUBLINGS - 1 :], "d": [width for width in widths if width >= WIDE]}
    for layer in LAYERS:
        cells = [layer.name, f"{power(flops_exponents(layer, lengths, widths))} ({layer.paper})"]
        for gradients in (False, True):
            chosen = {v: fitted(points, layer, v, gradients, some) for v, some in among.items()}
            cells.append(
                power(
                    {v: exponent(some, v, median_seconds) for v, some in chosen.items()},
                    layer.exponents,
                )
            )
            notes += [rate_note(some, v) for v, some in chosen.items()]
        cells.append(
            power({"n": exponent(chosen["n"], "n", lambda point: max(1, point.temporary))})
        )
        steps = max(1, sequential_operations(jaxpr_of(layer, lengths[-1], layer.fit_width, False)))
        yield f"| {' | '.join([*cells, f'{steps:,} ({layer.sequential})', paths(layer)])} |\n"
    yield from ["\n", *filter(None, notes)]


def exponent_figures(
    points: Sequence[Point], lengths: Sequence[int], widths: Sequence[int]
) -> dict[str, Any]:
    """Returns exponents, sequential operations and the time of each point, by name."""
    found = {}
    for p in points:
        mode = "gradients" if p.gradients else "forward"
        at = f"{p.layer.name}; {mode} ms, n = {p.length}, d = {p.width}"
        found[at] = figures.middle([1e3 * each for each in p.seconds])
    among = {"n": lengths[-DOUBLINGS - 1 :], "d": [width for width in widths if width >= WIDE]}
    for layer in LAYERS:
        for variable, power_of in flops_exponents(layer, lengths, widths).items():
            found[f"{layer.name}; FLOPs {variable}"] = power_of
        for gradients, mode in ((False, "forward"), (True, "gradients")):
            for variable, some in among.items():
                chosen = fitted(points, layer, variable, gradients, some)
                found[f"{layer.name}; {mode} {variable}"] = exponent(
                    chosen, variable, median_seconds
                )
        chosen = fitted(points, layer, "n", True, among["n"])
        memory = exponent(chosen, "n", lambda point: max(1, point.temporary))
        found[f"{layer.name}; memory n"] = memory
        jaxpr = jaxpr_of(layer, lengths[-1], layer.fit_width, False)
        found[f"{layer.name}; sequential"] = max(1, sequential_operations(jaxpr))
    return {name: value for name, value in found.items() if value == value}  # without NaN


def rate_note(points: Sequence[Point], variable: str) -> str:
    """Returns a note on an exponent of time that differs from the paper's, or ''.

    It lists the FLOP/s and other quantities at each point. New memory is that of pages which a call
    touches first: the system clears them, and that time is not the layer's.
    """
    found = exponent(points, variable, median_seconds)
    if not points or not abs(found - points[0].layer.exponents[variable]) > TOLERANCE:
        return ""
    rates, fresh, system, weights = [], [], [], []
    for p in points:
        work = flops(jaxpr_of(p.layer, p.length, p.width, p.gradients))
        rates.append(f"{work / median_seconds(p) / 1e9:.1f}")
        fresh.append(f"{statistics.median(p.fresh) / 2**20:.0f}")
        system.append(f"{statistics.median(p.system):.0%}")
        weights.append(
            f"{sum(x.nbytes for x in jax.tree.leaves(params_of(p.layer, p.width))) / 2**20:.0f}"
        )
    mode = "gradients" if points[0].gradients else "forward"
    by_n = f"n = {points[0].length:,} to {points[-1].length:,}"
    by = by_n if variable == "n" else f"d = {WIDE} on"
    note = f"\\* {points[0].layer.name}, {mode}, {variable}^{found:.2f}: "
    note += f"{', '.join(rates)} GFLOP/s at {by}; "
    if points[0].layer.sequential == "n" and variable == "d":
        note += f"each step reads its weights, {', '.join(weights)} MiB; "
    return (
        note + f"new memory {', '.join(fresh)} MiB a call, {', '.join(system)} of the time in the "
        "system\n"
    )


def times_table(points: Sequence[Point], gradients: bool) -> Iterator[str]:
    """Yields Markdown: a row for each size, a column for each layer."""
    names = [layer.name for layer in LAYERS]
    yield f"| d | n | {' | '.join(names)} |\n| ---: | ---: |{' --- |' * len(names)}\n"
    chosen = {(p.width, p.length, p.layer.name): p for p in points if p.gradients == gradients}
    for width, length in sorted({key[:2] for key in chosen}):
        cells = []
        for name in names:
            point = chosen.get((width, length, name))
            cells.append("-" if point is None else cost(point))
        yield f"| {width} | {length:,} | {' | '.join(cells)} |\n"


def cost(point: Point) -> str:
    """Returns '12.3 (11.9 to 12.8) ms', with gradients also the memory, '0.5 MiB'."""
    median, low, high = (1e3 * of(point.seconds) for of in (statistics.median, min, max))
    memory = f", {point.temporary / 2**20:,.1f} MiB" if point.gradients else ""
    return f"{median:.3g} ({low:.3g} to {high:.3g}) ms{memory}"


def figure_of(points: Sequence[Point]) -> Any:
    """Returns the figure: FLOPs and times over the length, at both widths."""
    panels: dict[str, dict[str, dict]] = {}
    for width in (NARROW, WIDE):
        modes = {
            False: f"seconds, forward, d = {width}",
            True: f"seconds, with gradients, d = {width}",
        }
        counts, *times = (
            panels.setdefault(name, {})
            for name in (f"FLOPs, forward, d = {width}", *modes.values())
        )
        for p in (p for p in points if p.width == width):
            counts.setdefault(p.layer.name, {})[p.length] = [
                flops(jaxpr_of(p.layer, p.length, width, False))
            ]
            times[p.gradients].setdefault(p.layer.name, {})[p.length] = p.seconds
    return plots.costs_over_length(panels)


def main() -> None:
    """Prints the tables and writes the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=figures.OUTPUT / "layer_cost.png", help="figure"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[2**i for i in range(6, 14)],
        help="lengths n, in tokens",
    )
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[2**i for i in range(6, 12)], help="widths d"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each point")
    parser.add_argument(
        "--memory-limit", type=float, default=2.0, help="GiB; points that need more are not run"
    )
    figures.add_flag(parser)
    arguments = parser.parse_args()
    runtime.start()  # keeps freed memory for reuse, as in training
    lengths, widths = sorted(arguments.lengths), sorted(arguments.widths)
    points = measure(
        lengths, widths, repeats=arguments.repeats, limit_bytes=arguments.memory_limit * 2**30
    )
    print(*exponents_table(points, lengths, widths), sep="")
    for gradients, mode in ((False, "Forward"), (True, "With gradients")):
        print(f"{mode}, median (lowest to highest):\n\n", *times_table(points, gradients), sep="")
    with tempfile.TemporaryDirectory() as folder:
        png, _ = plots.save(figure_of(points), folder, "layer_cost")
        storage.make_folder(arguments.output.parent)
        storage.write_whole(arguments.output, png.read_bytes())
    print(arguments.output)
    figures.write(arguments.json, exponent_figures(points, lengths, widths))


if __name__ == "__main__":
    main()
