"""Rules by parameter name: which mesh axis splits which dimension of each array of the state.

The axes of the mesh:

    data    splits the rows; each device along it has a copy of the state
    fsdp    splits the rows and the state; each device stores a part of the state and gathers the
            rest where it is used (Rajbhandari 2020, section 5.3, stage 3)
    tensor  splits heads, inner width and vocabulary; the devices along it compute the same rows
            (Shoeybi 2019, section 3)

The compiler partitions the computation accordingly.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.system.errors import InputError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec((DATA, FSDP))  # the rows of a batch
WHOLE = PartitionSpec()  # replicated

# The end of a parameter's name, and the mesh axis of each dimension. Every parameter matches one
# rule. V: vocabulary, D: model width, H: heads, G: heads of keys and values, K: head size, F: inner
# width.
RULES = {
    r"embedding/embedding": (TENSOR, FSDP),  # (V, D)
    r"output/kernel": (TENSOR, FSDP),  # (V, D)
    r"output/bias": (TENSOR,),  # (V,)
    r"learned/embedding": (None, FSDP),  # (length, D)
    r"position_bias/embedding": (None, TENSOR),  # (buckets, H)
    r"relative/(key|value)": (None, None),  # (distances, K)
    r"(query|key|value)/kernel": (FSDP, TENSOR, None),  # (D, H, K) or (D, G, K)
    r"(query|key|value)/bias": (TENSOR, None),  # (H, K) or (G, K)
    r"attention/score_vector": (TENSOR, None),  # (H, K)
    r"out/kernel": (TENSOR, None, FSDP),  # (H, K, D)
    r"(inner|gate)/kernel": (FSDP, TENSOR),  # (D, F)
    r"(inner|gate)/bias": (TENSOR,),  # (F,)
    r"outer/kernel": (TENSOR, FSDP),  # (F, D)
    r"(out|outer)/bias": (None,),  # (D,)
    r"(norm|final_norm)/(scale|bias)": (None,),  # (D,)
    r"(length|classes)/kernel": (FSDP, None),  # (D, length) or (D, classes)
    r"(length|classes)/bias": (None,),
}

Tree = Any


def rules_for(name: str) -> list[str]:
    """Returns the rules that match an array's name."""
    return [rule for rule in RULES if matches(rule, name)]


def matches(rule: str, name: str) -> bool:
    """Whether a regular expression matches the end of a name, in whole words between slashes."""
    return re.search(rf"(^|/|_)(?:{rule})$", name) is not None


def of(tree: Tree, mesh: Mesh) -> Tree:
    """Returns the sharding of each array of `tree` on `mesh`; arrays without a rule are replicated.

    The optimizer's moments and the moving average of a parameter have its sharding, as their names
    end with its name. A factored moment has the sharding of the axes that it keeps; for that,
    `tree` contains the parameters.
    """
    params = {
        name.rpartition("params/")[2]: x
        for name, x in ((name_of(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree))
        if "params/" in name
    }

    def sharding(path: tuple[Any, ...], x: jax.Array) -> NamedSharding:
        name = name_of(path)
        axes: list[str | None] = [axis for rule in rules_for(name)[:1] for axis in RULES[rule]]
        if factored := re.search(r"(?:^|/)(v_row|v_col)/(.+)", name):
            kind, of_parameter = factored.groups()
            axes = _kept_axes(kind, axes, params[of_parameter].shape, x.shape)
        return NamedSharding(mesh, PartitionSpec(*axes) if len(axes) == x.ndim else WHOLE)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _kept_axes(
    kind: str, axes: list[str | None], of_parameter: tuple[int, ...], shape: tuple[int, ...]
) -> list[str | None]:
    """Returns the mesh axes of a moment of Adafactor, the mean of squares over one dimension.

    Args:
      kind: 'v_row', the mean over the longest dimension, or 'v_col', over the second longest. Of
        equal dimensions the last is the longest, as in `optax.scale_by_factored_rms`.
      axes: the mesh axis of each dimension of the parameter.
      of_parameter: the shape of the parameter.
      shape: the shape of the moment. If the parameter is not factored, it is (1,): no mesh axis.
    """
    if len(of_parameter) < 2:
        return []
    dropped = int(np.argsort(of_parameter, stable=True)[-1 if kind == "v_row" else -2])
    if shape != of_parameter[:dropped] + of_parameter[dropped + 1 :]:
        return []
    return axes[:dropped] + axes[dropped + 1 :]


def check(params: Tree, mesh: Mesh, *, section: str = "config.parallel.") -> None:
    """Checks that the mesh axes divide every parameter evenly.

    Args:
      params: arrays, or their shapes.
      section: prefix of an axis name in error messages, as the user sets its size there.

    Raises:
      InputError: an axis does not divide a dimension, or a parameter does not match exactly one
        rule.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = name_of(path)
        rules = rules_for(name)
        if len(rules) != 1:
            matches = " and ".join(rules) or "none"
            raise InputError(
                f"sharding.RULES: expected one rule for the parameter {name}, it matches "
                f"{matches}; fix the rules."
            )
        axes = RULES[rules[0]]
        if len(axes) != x.ndim:
            raise InputError(
                f"sharding.RULES: {rules[0]} names {len(axes)} dimensions, and {name} has "
                f"{x.ndim}; fix the rule."
            )
        for axis, size in zip(axes, x.shape, strict=True):
            if axis and size % mesh.shape[axis]:
                raise InputError(
                    f"{section}{axis}: {mesh.shape[axis]} devices cannot share the parameter "
                    f"{name} of shape {x.shape} evenly: they do not divide {size}; choose a "
                    "divisor, or change the model."
                )


def name_of(path: tuple[Any, ...]) -> str:
    """Returns the path of an array in its tree as 'encoder/layers_0/.../kernel'."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path
    )
