"""The learning-rate schedules: pure functions of the number of the update. Section 5.3."""

import jax
import jax.numpy as jnp

from flaxformer_lite.fields import OptimConfig


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


def constant_schedule(step: jax.typing.ArrayLike, *, peak: float, warmup_steps: int) -> jax.Array:
    """Returns a linear warmup to `peak` at `warmup_steps`, and `peak` after it."""
    return peak * jnp.minimum(jnp.asarray(step, jnp.float32) / warmup_steps, 1)


def cosine_schedule(
    step: jax.typing.ArrayLike,
    *,
    peak: float,
    warmup_steps: int,
    num_steps: int,
    final_rate: float = 0.0,
) -> jax.Array:
    """Returns a linear warmup to `peak`, then half a cosine (Loshchilov 2017, equation 5).

    The rate is `final_rate` * `peak` at step `num_steps`, and after it.
    """
    step = jnp.asarray(step, jnp.float32)
    progress = jnp.clip((step - warmup_steps) / max(1, num_steps - warmup_steps), 0, 1)
    left = final_rate + (1 - final_rate) * (1 + jnp.cos(jnp.pi * progress)) / 2
    return peak * jnp.minimum(step / warmup_steps, left)


def wsd_schedule(
    step: jax.typing.ArrayLike,
    *,
    peak: float,
    warmup_steps: int,
    decay_steps: int,
    num_steps: int,
    final_rate: float = 0.0,
) -> jax.Array:
    """Returns warmup, a stable phase and a decay, all linear (Hu 2024, section 4.2).

    The rate is `peak` up to step `num_steps` - `decay_steps`, and `final_rate` * `peak` at step
    `num_steps` and after it. The decay is linear as in Hägele 2024, section 3.
    """
    step = jnp.asarray(step, jnp.float32)
    progress = jnp.clip((step - (num_steps - decay_steps)) / decay_steps, 0, 1)
    return peak * jnp.minimum(step / warmup_steps, 1 - (1 - final_rate) * progress)


def learning_rate(
    step: jax.typing.ArrayLike, config: OptimConfig, *, d_model: int, num_steps: int
) -> jax.Array:
    """Returns the rate of update number `step`, from 1, under `config.schedule`."""
    peak, warmup = config.learning_rate, config.warmup_steps
    match config.schedule:
        case "paper":
            return paper_schedule(step, d_model=d_model, warmup_steps=warmup, factor=peak)
        case "inverse_sqrt":
            return inverse_sqrt_schedule(step, peak=peak, warmup_steps=warmup)
        case "constant":
            return constant_schedule(step, peak=peak, warmup_steps=warmup)
        case "cosine":
            return cosine_schedule(
                step,
                peak=peak,
                warmup_steps=warmup,
                num_steps=num_steps,
                final_rate=config.final_rate,
            )
        case "wsd":
            return wsd_schedule(
                step,
                peak=peak,
                warmup_steps=warmup,
                decay_steps=config.last_phase(num_steps),
                num_steps=num_steps,
                final_rate=config.final_rate,
            )
    return linear_schedule(step, peak=peak, warmup_steps=warmup, num_steps=num_steps)
