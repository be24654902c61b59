"""Skipped updates: after a spike of the gradient norm, or a loss or gradient that is not finite.

A skipped update leaves the parameters and the optimizer's moments as they are. The step number, the
data and the learning rate advance, so that the step is lost and not repeated.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.fields import OptimConfig
from flaxformer_lite.training import metrics
from flaxformer_lite.training.schedule_free import ScheduleFreeState

# Accepted steps before the first spike can be skipped. Their norms have equal weights in the mean
# and the variance; later the weights decay by 1 - 1 / WARMUP a step, so that the statistics follow
# the norm as it changes during training.
WARMUP = 50
# Spikes in a row that are skipped. More of them are accepted, until a norm is below the limit: a
# norm that stays high is a new level, and without this rule the parameters would never move again.
LONGEST = 10


class SkipState(NamedTuple):
    """The state of `skip_updates`: scalars, besides the state of the inner optimizer."""

    inner: optax.OptState
    accepted: jax.Array  # accepted steps, int32
    mean: jax.Array  # of the norms of recent accepted steps, float32
    variance: jax.Array  # of the same norms, float32
    skipped: jax.Array  # skipped steps of either kind, int32
    spikes: jax.Array  # spikes in a row, int32
    non_finite: jax.Array  # steps in a row whose loss or norm was not finite, int32


def guarded(
    optimizer: optax.GradientTransformation, config: OptimConfig
) -> optax.GradientTransformation:
    """Returns `optimizer` with the skipped updates of the config; unchanged if it has none."""
    if config.skip_spikes is None and not config.nan_tolerance:
        return optimizer
    return skip_updates(optimizer, deviations=config.skip_spikes)


def skip_updates(
    inner: optax.GradientTransformation, *, deviations: float | None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner`, which changes neither parameters nor its state in a skipped step.

    Its `update` takes the loss as `value`. A step is skipped

    - if `value` or the global norm of the gradients is not finite, or
    - if the norm is a spike, one of the first `LONGEST` in a row: more than `deviations` standard
      deviations above the mean of recent accepted steps, after `WARMUP` of them.

    Args:
      inner: a whole optimizer. The step numbers of its learning rate advance in a skipped step.
      deviations: None: only steps that are not finite are skipped.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SkipState:
        count, number = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return SkipState(inner.init(params), count, number, number, count, count, count)

    def update(
        gradients: optax.Updates,
        state: SkipState,
        params: optax.Params | None = None,
        *,
        value: jax.typing.ArrayLike = 0.0,
        **extra: Any,
    ) -> tuple[optax.Updates, SkipState]:
        # The gradients are the same on all devices, and so is what follows.
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(value)
        is_spike = _is_spike(norm, state, deviations)
        is_skipped = ~is_finite | (is_spike & (state.spikes < LONGEST))
        updates, inner_state = inner.update(gradients, state.inner, params, value=value, **extra)
        # x + -0.0 is x for every x; -0.0 + 0.0 would be 0.0
        updates = jax.tree.map(lambda u: jnp.where(is_skipped, jnp.full_like(u, -0.0), u), updates)
        mean, variance = _statistics(norm, state)
        return updates, SkipState(
            inner=_unless(is_skipped, inner_state, state.inner),
            accepted=state.accepted + ~is_skipped,
            mean=jnp.where(is_skipped, state.mean, mean),
            variance=jnp.where(is_skipped, state.variance, variance),
            skipped=state.skipped + is_skipped,
            spikes=jnp.where(is_finite, jnp.where(is_spike, state.spikes + 1, 0), state.spikes),
            non_finite=jnp.where(is_finite, 0, state.non_finite + 1),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _unless(is_skipped: jax.Array, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """Returns the state `new`, or `old` with the step numbers of the learning rate of `new`."""

    def counts_steps(state: Any) -> bool:
        return isinstance(state, optax.ScaleByScheduleState | ScheduleFreeState)

    def chosen(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if isinstance(new, ScheduleFreeState):
            kept = _unless(is_skipped, tuple(new), tuple(old))
            return ScheduleFreeState(*kept)._replace(updates=new.updates)
        return jnp.where(is_skipped, old, new)

    return jax.tree.map(chosen, new, old, is_leaf=counts_steps)


def _is_spike(norm: jax.Array, state: SkipState, deviations: float | None) -> jax.Array:
    """Returns whether a norm is a spike; bool."""
    if deviations is None:
        return jnp.zeros((), bool)
    limit = state.mean + deviations * jnp.sqrt(state.variance)
    return (norm > limit) & (state.accepted >= WARMUP)


def _statistics(norm: jax.Array, state: SkipState) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of the norms of recent steps, `norm` included."""
    weight = 1 / jnp.minimum(state.accepted + 1, WARMUP).astype(jnp.float32)
    difference = norm - state.mean
    variance = (1 - weight) * (state.variance + weight * difference**2)
    return state.mean + weight * difference, variance


def counts(opt_state: optax.OptState) -> metrics.Sums:
    """Returns `skipped` and `non_finite` of an optimizer with `skip_updates`; {} of any other."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, SkipState))
    return {
        name: (getattr(state, name).astype(jnp.float32), jnp.ones(()))
        for state in states
        if isinstance(state, SkipState)
        for name in ("skipped", "non_finite")
    }
