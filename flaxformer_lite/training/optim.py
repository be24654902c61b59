"""The learning-rate schedules and the optimizer. Section 5.3."""

import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.config import OptimConfig


def paper_schedule(
    step: jax.typing.ArrayLike, *, d_model: int, warmup_steps: int, factor: float = 1.0
) -> jax.Array:
    """Returns factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), equation 3.

    Args:
      step: number of the update, from 1.
    """
    step = jnp.asarray(step, jnp.float32)
    return factor * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)


def inverse_sqrt_schedule(
    step: jax.typing.ArrayLike, *, peak: float, warmup_steps: int
) -> jax.Array:
    """Returns the paper's schedule, scaled to reach the rate `peak` at `warmup_steps`."""
    return paper_schedule(
        step, d_model=1, warmup_steps=warmup_steps, factor=peak * warmup_steps**0.5
    )


def linear_schedule(
    step: jax.typing.ArrayLike, *, peak: float, warmup_steps: int, num_steps: int
) -> jax.Array:
    """Returns a linear warmup to `peak` at `warmup_steps`, then a linear decay to 0.

    The rate is 0 from step `num_steps` + 1 on.
    """
    step = jnp.asarray(step, jnp.float32)
    left = (num_steps + 1 - step) / max(1, num_steps + 1 - warmup_steps)
    return peak * jnp.clip(jnp.minimum(step / warmup_steps, left), 0, 1)


def learning_rate(
    step: jax.typing.ArrayLike, config: OptimConfig, *, d_model: int, num_steps: int
) -> jax.Array:
    """Returns the rate of update number `step`, from 1, under `config.schedule`."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "paper":
        return paper_schedule(step, d_model=d_model, warmup_steps=warmup, factor=peak)
    if config.schedule == "inverse_sqrt":
        return inverse_sqrt_schedule(step, peak=peak, warmup_steps=warmup)
    return linear_schedule(step, peak=peak, warmup_steps=warmup, num_steps=num_steps)


def make_optimizer(
    config: OptimConfig, *, d_model: int, num_steps: int
) -> optax.GradientTransformation:
    """Returns Adam with the schedule, after clipping by global norm if the config sets it."""

    def rate(updates_so_far: jax.Array) -> jax.Array:
        return learning_rate(updates_so_far + 1, config, d_model=d_model, num_steps=num_steps)

    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    return optax.chain(*clip, optax.chain(adam, optax.scale_by_learning_rate(rate)))
