"""The optimizers: Optax transformations, composed from the config. Section 5.3 uses Adam.

`make_optimizer` composes, in this order: clipping, the direction of the optimizer, weight decay,
the factors of the groups, and the learning rate. Schedule-free averaging is around all but
clipping. Skipped updates are around everything.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from flaxformer_lite.field_rules import MOMENTUM
from flaxformer_lite.fields import OptimConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import parameter_groups, schedule_free, spikes
from flaxformer_lite.training.schedules import learning_rate
from flaxformer_lite.training.sharding import name_of

# Muon: root mean square of an update, about that of AdamW's updates, so that both have the same
# learning rate and weight decay (Liu 2025, section 2.2).
MUON_RMS = 0.2
# Adafactor: second moments are factored over the 2 largest axes if both have this size. Heads of
# 32 or more are factored; smaller arrays need little memory.
SMALLEST_FACTORED = 32
# Adafactor: the largest root mean square of an update (Shazeer 2018, section 6).
ADAFACTOR_CLIP = 1.0


def make_optimizer(
    config: OptimConfig, *, d_model: int, num_steps: int
) -> optax.GradientTransformation:
    """Returns the optimizer with its schedule, after clipping by global norm if it is set."""

    def rate(updates_so_far: jax.Array) -> jax.Array:
        return learning_rate(updates_so_far + 1, config, d_model=d_model, num_steps=num_steps)

    clip = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    options = []
    if config.weight_decay:
        mask = functools.partial(_decayed, config=config)
        options.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    if config.groups:
        options.append(optax.stateless(functools.partial(_scale_by_group, config=config)))
    update = optax.chain(direction(config), *options, optax.scale_by_learning_rate(rate))
    if config.optimizer == "schedule_free":
        update = schedule_free.averaged(update, rate, b1=config.b1)
    return spikes.guarded(optax.chain(*clip, update), config)


def direction(config: OptimConfig) -> optax.GradientTransformation:
    """Returns the optimizer of the config without rate and decay: gradients to directions."""
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    momentum = MOMENTUM.get(config.optimizer) if config.momentum is None else config.momentum
    match config.optimizer:
        case "lion":
            return optax.scale_by_lion(b1=config.b1, b2=config.b2)
        case "sgd":
            return optax.trace(momentum) if momentum else optax.identity()
        case "adafactor":
            return optax.chain(
                optax.scale_by_factored_rms(min_dim_size_to_factor=SMALLEST_FACTORED),
                optax.clip_by_block_rms(ADAFACTOR_CLIP),
            )
        case "muon":
            return optax.partition({"muon": muon(momentum), "adamw": adam}, _muon_labels)
        case "schedule_free":
            # Adam with b1=0 would store a first moment that is the gradient.
            return optax.scale_by_rms(
                decay=config.b2, eps=config.eps, eps_in_sqrt=False, bias_correction=True
            )
    return adam  # of 'adam' and 'adamw'


def _decayed(params: Params, *, config: OptimConfig) -> Params:
    """Returns whether each parameter has weight decay."""
    return parameter_groups.map_names(
        functools.partial(parameter_groups.decays, config=config), params
    )


def _scale_by_group(updates: Params, params: Params | None, *, config: OptimConfig) -> Params:
    """Returns the updates times the rate factors of their groups."""
    del params

    def scaled(path: tuple[jax.tree_util.KeyEntry, ...], x: jax.Array) -> jax.Array:
        return x * parameter_groups.group_of(name_of(path), config).rate

    return jax.tree_util.tree_map_with_path(scaled, updates)


def muon(momentum: float | None) -> optax.GradientTransformation:
    """Returns the orthogonalised momentum of matrices (Jordan 2024), scaled to `MUON_RMS`.

    5 Newton-Schulz iterations after Nesterov momentum. A kernel with 3 axes is one matrix: (D, HK)
    for queries, keys and values, (HK, D) for the output of attention.
    """
    return optax.chain(
        optax.contrib.scale_by_muon(beta=momentum, weight_dimension_numbers=_dimension_numbers),
        optax.stateless(_scale_by_shape),
    )


def _scale_by_shape(updates: Params, params: Params | None) -> Params:
    """Returns orthogonal matrices times MUON_RMS * max(rows, columns)^0.5 (Liu 2025, equation 4).

    The root mean square of a matrix with orthonormal rows or columns is max(rows, columns)^-0.5.
    """
    del params

    def scaled(path: tuple[jax.tree_util.KeyEntry, ...], x: jax.Array) -> jax.Array:
        rows, columns = (
            math.prod(x.shape[axis] for axis in axes)
            for axes in parameter_groups.matrix_axes(name_of(path), x.ndim)
        )
        return x * jnp.asarray(MUON_RMS * max(rows, columns) ** 0.5, x.dtype)

    return jax.tree_util.tree_map_with_path(scaled, updates)


def _muon_labels(params: Params) -> Params:
    """Returns 'muon' for each hidden matrix, 'adamw' for all other parameters."""
    return parameter_groups.map_names(
        lambda name: "muon" if parameter_groups.is_hidden_matrix(name) else "adamw", params
    )


def _dimension_numbers(params: Params) -> Params:
    """Returns the input and output axes of each hidden matrix, as Optax names them."""

    def axes(path: tuple[jax.tree_util.KeyEntry, ...], x: jax.Array) -> object:
        name = name_of(path)
        return optax.contrib.MuonDimensionNumbers(*parameter_groups.matrix_axes(name, x.ndim))

    return jax.tree_util.tree_map_with_path(axes, params)
