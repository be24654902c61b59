"""Parameters by name: which are frozen, their rate and weight decay, and which are matrices.

The rules of `optim.freeze` and `optim.groups` are regular expressions, matched as those of
`sharding`: in whole words at the end of a name such as 'encoder/layers_0/feed_forward/inner/bias'.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax

from flaxformer_lite.checks.training_checks import Group, parse_group
from flaxformer_lite.fields import OptimConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.sharding import matches, name_of

HIDDEN_MATRIX = r"(query|key|value|out|inner|gate|outer)/kernel"


def map_names(function: Callable[[str], Any], params: Params) -> Params:
    """Returns `function(name)` in place of each array."""
    return jax.tree_util.tree_map_with_path(lambda path, _: function(name_of(path)), params)


def group_of(name: str, config: OptimConfig) -> Group:
    """Returns the group of a parameter; one without a rule has the rule '' and the defaults."""
    for text in config.groups:
        group = parse_group(text)
        if matches(group.rule, name):
            return group
    return Group("")


def is_frozen(name: str, freeze: tuple[str, ...]) -> bool:
    """Whether a parameter keeps its initial value, by the rules of `optim.freeze`."""
    return any(matches(rule, name) for rule in freeze)


def decays(name: str, config: OptimConfig) -> bool:
    """Whether a parameter has weight decay: by default each kernel of a dense layer.

    Biases, norms, embeddings and tables of positions have none by default.
    """
    by_group = group_of(name, config).decay
    return bool(config.weight_decay) and (matches("kernel", name) if by_group is None else by_group)


def trained(params: Params, freeze: tuple[str, ...]) -> Params:
    """Returns the tree with None in place of each frozen array, which JAX treats as no array."""
    if not freeze:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: None if is_frozen(name_of(path), freeze) else x, params
    )


def merged(trained: Params, params: Params) -> Params:
    """Returns `trained` with the arrays of `params` in place of None."""
    return jax.tree.map(
        lambda new, old: old if new is None else new, trained, params, is_leaf=lambda x: x is None
    )


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter maps activations to activations within a layer: Muon updates these."""
    return matches(HIDDEN_MATRIX, name)


def matrix_axes(name: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the input and the output axes of a kernel: the rows and the columns of its matrix.

    (D, H, K) of queries, keys and values is a matrix (D, HK), and (H, K, D) of the output (HK, D).
    """
    inputs = ndim - 1 if matches(r"out/kernel", name) else 1
    return tuple(range(inputs)), tuple(range(inputs, ndim))


def check(params: Params, config: OptimConfig) -> None:
    """Checks the rules of `optim.freeze` and `optim.groups` against the parameters of a model.

    Args:
      params: arrays, or their shapes.

    Raises:
      InputError: a rule matches no parameter, a parameter matches 2 rules, or all are frozen.
    """
    rules = [("freeze", rule) for rule in config.freeze]
    rules += [("groups", parse_group(text).rule) for text in config.groups]
    names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for field, rule in rules:
        if not any(matches(rule, name) for name in names):
            raise InputError(
                f"config.optim.{field}: {rule!r} matches no parameter; expected a regular "
                f"expression for the end of names such as {names[0]!r} and {names[-1]!r}, in "
                "whole words between slashes; change the rule, or remove it."
            )
    for name in names:
        matching = [(field, rule) for field, rule in rules if matches(rule, name)]
        if len(matching) > 1:
            (field, rule), (other, again) = matching[:2]
            raise InputError(
                f"config.optim.{other}: the parameter {name} matches {again!r}, and {rule!r} of "
                f"optim.{field}; expected at most one rule for each; narrow one of the two."
            )
    if all(is_frozen(name, config.freeze) for name in names):
        raise InputError(
            "config.optim.freeze: the rules match every parameter, so that nothing is trained; "
            "leave some parameters out."
        )


def table(params: Params, config: OptimConfig) -> list[list[str]]:
    """Returns the rows of a table of all parameters by rule, optimizer and weight decay.

    The first row has the names of the columns. One more row: all parameters are treated alike.
    """
    counts: dict[tuple[str, ...], int] = collections.Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        counts[_kind(name_of(path), config)] += x.size
    rows = [[rule, f"{count:,}", *others] for (rule, *others), count in sorted(counts.items())]
    return [["group", "parameters", "optimizer", "rate", "weight decay"], *rows]


def _kind(name: str, config: OptimConfig) -> tuple[str, ...]:
    """Returns the rule, optimizer, rate factor and weight decay of a parameter, as text."""
    for rule in config.freeze:
        if matches(rule, name):
            return rule, "frozen", "-", "-"
    group, optimizer = group_of(name, config), config.optimizer
    if optimizer == "muon" and not is_hidden_matrix(name):
        optimizer = "adamw"
    decay = f"{config.weight_decay:g}" if decays(name, config) else "none"
    return group.rule or "(no rule)", optimizer, f"x {group.rate:g}", decay
