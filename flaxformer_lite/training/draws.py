"""Random draws that are alike, made at once: the same numbers, by a program that is smaller and compiles sooner."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

THREEFRY = "key<fry>"  # the type of keys of JAX's default generator
AT_ONCE = 2**22  # bytes of numbers that are drawn together, which lie beside those of the result for a moment


def at_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, a function of nothing to arrays, with all that it draws in like manner, by keys of its own, batched.

    Each layer of a model draws its parameters as all others do, but for the key. XLA would compile each of these draws,
    long as it is, for numbers that are drawn once; mapped over the keys they are one, and the numbers are the same.
    Large arrays are drawn one by one, and so is whatever is not of threefry keys, JAX's default: the numbers of others
    are not those that each key gives by itself.
    """

    def made() -> Any:
        traced = jax.jit(make).trace()  # not anew, if its shapes have been asked for before
        closed = traced.jaxpr
        values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]  # noqa: E731
        for alike in _batches(closed.jaxpr):
            results = _evaluate(alike, [[read(atom) for atom in equation.invars] for equation in alike])
            for equation, result in zip(alike, results, strict=True):
                values.update(zip(equation.outvars, result, strict=True))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), [read(atom) for atom in closed.jaxpr.outvars])

    return made


def _batches(jaxpr: Jaxpr) -> Iterator[list[JaxprEqn]]:
    """The equations that the results need, each behind those that it needs; those that draw alike together."""
    needed, equations = set(_variables(jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(_variables(equation.invars))
            equations.append(equation)
    depth, batches = {}, collections.defaultdict(list)
    for number, equation in enumerate(reversed(equations)):
        level = 1 + max((depth.get(variable, 0) for variable in _variables(equation.invars)), default=0)
        depth |= dict.fromkeys(equation.outvars, level)
        batches[level, _manner(equation) if _draws(equation) else number].append(equation)
    for _, alike in sorted(batches.items(), key=lambda item: item[0][0]):
        together = max(1, AT_ONCE // sum(map(_bytes, alike[0].outvars)))
        yield from (alike[first : first + together] for first in range(0, len(alike), together))


def _variables(atoms: list) -> list:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _bytes(variable: Var) -> int:
    return variable.aval.size * variable.aval.dtype.itemsize


def _draws(equation: JaxprEqn) -> bool:
    """Whether it makes numbers, or another key, of a threefry key."""
    of_key = any(str(atom.aval.dtype) == THREEFRY for atom in equation.invars)
    return of_key and equation.primitive.name in ("random_fold_in", "jit", "pjit")


def _manner(equation: JaxprEqn) -> tuple:
    """What is equal for equations that may be batched; JAX keeps one jaxpr for all calls of a function."""
    return equation.primitive, frozenset(equation.params.items()), tuple(atom.aval for atom in equation.invars)


def _evaluate(alike: list[JaxprEqn], arguments: list[list[Any]]) -> list[list[Any]]:
    """The results of each equation, whose arguments are given."""

    def one(*arguments: Any) -> list[Any]:
        if "call_jaxpr" in alike[0].params:  # a function with a derivative of its own, of which there is no need
            return jaxpr_as_fun(alike[0].params["call_jaxpr"])(*arguments)
        result = alike[0].primitive.bind(*arguments, **alike[0].params)
        return result if alike[0].primitive.multiple_results else [result]

    if len(alike) == 1:
        return [one(*arguments[0])]
    stacked = [jnp.stack([jnp.asarray(value) for value in values]) for values in zip(*arguments, strict=True)]
    results = jax.vmap(one)(*stacked)
    return [[result[number] for result in results] for number in range(len(alike))]
