"""Schedule-free learning (Defazio 2024): an average of the iterates in place of a decaying rate.

Three points, section 2: z, the iterate of the base optimizer; x, the weighted average of all z; and
y, between the two, for gradients. The parameters of a run are x, so that evaluations, checkpoints
and exports use x without a special case. Optax's version keeps y in their place.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.model.parameters import Params


class ScheduleFreeState(NamedTuple):
    """The state of `averaged`; `z` has the names and shapes of the parameters."""

    updates: jax.Array  # number of updates so far, int32
    weight_sum: jax.Array  # of the weights of all z
    z: Params
    base: optax.OptState


def averaged(
    base: optax.GradientTransformation, rate: Callable[[jax.Array], jax.Array], *, b1: float
) -> optax.GradientTransformation:
    """Returns the schedule-free form of an optimizer without momentum (Defazio 2024, section 2).

    Its `update` expects gradients at `gradient_point`.

    Args:
      rate: the learning rate of `base`, given the updates so far. A point z has the weight rate^2
        (section 3.2), so that those of the warmup count less.
      b1: share of x in y.
    """

    def init(params: Params) -> ScheduleFreeState:
        # a step donates its input, so z needs its own buffers
        z = jax.tree.map(jnp.copy, params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), jnp.zeros(()), z, base.init(params))

    def update(
        gradients: Params, state: ScheduleFreeState, params: Params | None = None
    ) -> tuple[Params, ScheduleFreeState]:
        assert params is not None, "an average needs its last value"
        y = between(params, state.z, b1=b1)  # weight decay uses y, as algorithm 1 does
        updates, base_state = base.update(gradients, state.base, y)
        z = optax.apply_updates(state.z, updates)
        weight = rate(state.updates) ** 2
        weight_sum = state.weight_sum + weight
        share = weight / weight_sum
        updates = jax.tree.map(lambda x, z: share * (z - x), params, z)
        return updates, ScheduleFreeState(state.updates + 1, weight_sum, z, base_state)

    return optax.GradientTransformation(init, update)


def between(x: Params, z: Params, *, b1: float) -> Params:
    """Returns y = (1 - b1) z + b1 x."""
    return jax.tree.map(lambda x, z: (1 - b1) * z + b1 * x, x, z)


def gradient_point(params: Params, opt_state: optax.OptState, *, b1: float) -> Params:
    """Returns y, given x and the state of an optimizer that contains `averaged`."""
    (state,) = filter(_is_ours, jax.tree.leaves(opt_state, is_leaf=_is_ours))
    return between(params, state.z, b1=b1)


def _is_ours(state: object) -> bool:
    return isinstance(state, ScheduleFreeState)
