"""Parameters by name: which have weight decay, and which are hidden matrices."""

import re
from collections.abc import Callable
from typing import Any

import jax

from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training.sharding import name_of

HIDDEN_MATRIX = r"(query|key|value|out|inner|gate|outer)/kernel"


def map_names(function: Callable[[str], Any], params: Params) -> Params:
    """Returns `function(name)` in place of each array, by its name 'encoder/layers_0/.../bias'."""
    return jax.tree_util.tree_map_with_path(lambda path, _: function(name_of(path)), params)


def decayed(params: Params) -> Params:
    """Returns whether each parameter has weight decay by default: the kernels of dense layers.

    Biases, norms, embeddings and tables of positions have none.
    """
    return map_names(lambda name: matches(r"kernel", name), params)


def is_hidden_matrix(name: str) -> bool:
    """Whether a parameter maps activations to activations within a layer: Muon updates these."""
    return matches(HIDDEN_MATRIX, name)


def matrix_axes(name: str, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the input and the output axes of a kernel: the rows and the columns of its matrix.

    (D, H, K) of queries, keys and values is a matrix (D, HK), and (H, K, D) of the output (HK, D).
    """
    inputs = ndim - 1 if matches(r"out/kernel", name) else 1
    return tuple(range(inputs)), tuple(range(inputs, ndim))


def matches(rule: str, name: str) -> bool:
    """Whether a regular expression matches the end of a name, in whole words between slashes."""
    return re.search(rf"(^|/|_)(?:{rule})$", name) is not None
