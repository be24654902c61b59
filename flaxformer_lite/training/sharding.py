"""Which dimension of which array of a run's state is split over which axis of the device mesh: rules by name.

    data    copies of the model, each with rows of its own
    fsdp    devices that split the rows too, and the state: each holds a part, and has the rest sent where it is used
            (Rajbhandari 2020, section 5.3, stage 3)
    tensor  devices that split heads, inner width and vocabulary, and work on the same rows (Shoeybi 2019, section 3)

The compiler splits the model's computation as parameters and rows are split.
"""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.system.errors import InputError

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec((DATA, FSDP))  # of a batch
WHOLE = PartitionSpec()

# How the name of a parameter ends, and the axis of each of its dimensions. Every parameter matches one rule.
# V vocabulary, D width of the model, H heads, G heads of keys and values, K size of a head, F inner width.
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
    """The rules that the name of an array ends with, as whole words between slashes."""
    return [rule for rule in RULES if re.search(rf"(^|/|_){rule}$", name)]


def of(tree: Tree, mesh: Mesh) -> Tree:
    """How each array of `tree` lies on `mesh`: what is named as a parameter as that is, all else whole everywhere.

    So moments and averages of a parameter, which end with its name, lie where it does.
    """

    def sharding(path: tuple, x: jax.Array) -> NamedSharding:
        rules = rules_for(_name(path))
        return NamedSharding(mesh, PartitionSpec(*RULES[rules[0]]) if rules and x.ndim else WHOLE)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def check(params: Tree, mesh: Mesh, *, section: str = "config.parallel.") -> None:
    """Raises InputError unless every parameter has one rule, and the axes of `mesh` divide it evenly.

    Args:
      params: arrays, or their shapes.
      section: what stands before the name of an axis where a user sets its size.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = _name(path)
        rules = rules_for(name)
        if len(rules) != 1:
            what = f"matches {' and '.join(rules)}" if rules else "matches none"
            raise InputError(f"sharding.RULES: expected one rule for the parameter {name}, it {what}; mend the rules.")
        axes = RULES[rules[0]]
        if len(axes) != x.ndim:
            raise InputError(
                f"sharding.RULES: {rules[0]} names {len(axes)} dimensions, and {name} has {x.ndim}; mend the rule."
            )
        for axis, size in zip(axes, x.shape, strict=True):
            if axis and size % mesh.shape[axis]:
                raise InputError(
                    f"{section}{axis}: {mesh.shape[axis]} devices cannot share the parameter {name} of shape "
                    f"{x.shape} evenly: they do not divide {size}; choose a divisor, or change the model."
                )


def _name(path: tuple) -> str:
    """'encoder/layers_0/.../kernel'."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)
