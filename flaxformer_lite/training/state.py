"""The training state: parameters, optimizer, step and dropout key; its parts in a checkpoint."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.model import parameters
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import parameter_groups


@flax.struct.dataclass
class TrainState:
    """The inputs of a training step, besides its batch."""

    step: jax.Array  # updates done so far, int32
    params: Params  # float32
    opt_state: optax.OptState
    key_data: jax.Array  # of the run's dropout key; the key itself never changes
    ema: Params | None = None  # moving average of `params`, float32, if the run keeps one

    @property
    def measured(self) -> Params:
        """The parameters that are evaluated: the moving average if the run keeps one."""
        return self.params if self.ema is None else self.ema


@flax.struct.dataclass
class Progress:
    """The part of a checkpoint beside parameters; its format is the names and order of fields."""

    step: jax.Array
    params: None = None  # unused since the first version; part of the format
    opt_state: optax.OptState | None = None
    key_data: jax.Array | None = None


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    length: int = 8,
    ema: bool = False,
    freeze: tuple[str, ...] = (),
    params: Params | None = None,
) -> TrainState:
    """Returns the state before the first step, a function of `seed`.

    Args:
      ema: whether the state has a moving average.
      freeze: rules of the parameters that the optimizer has no state of.
      params: the parameters; None: random ones.
    """
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    if params is None:
        params = parameters.initial(model, params_key, length=length)
    else:  # copies: an argument of a jitted function would share its buffer with the result
        params = jax.tree.map(jnp.copy, params)
    # The average needs buffers of its own, as a step donates its input.
    average = jax.tree.map(jnp.copy, params) if ema else None
    key_data = jax.random.key_data(dropout_key)
    opt_state = optimizer.init(parameter_groups.trained(params, freeze))
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, key_data, average)


def to_parts(state: TrainState) -> dict[str, Any]:
    """Returns the parts of a checkpoint. Decoding reads only `params`, or `ema` if there is one."""
    progress = Progress(state.step, opt_state=state.opt_state, key_data=state.key_data)
    parts = {"params": state.params, "progress": progress}
    return parts if state.ema is None else {**parts, "ema": state.ema}


def from_parts(parts: dict[str, Any]) -> TrainState:
    """Returns the state of the parts from `to_parts`."""
    progress = parts["progress"]
    return TrainState(
        progress.step, parts["params"], progress.opt_state, progress.key_data, ema=parts.get("ema")
    )
