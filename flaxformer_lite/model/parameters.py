"""The parameters of a model: their shapes, and their initial values."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.model.ensemble import Ensemble


def initial(model: nn.Module, key: jax.Array, *, length: int = 8) -> dict:
    """Returns random parameters, float32, a function of `key` alone; `length` is that of an example input."""
    return _without_kernels(model).init(key, *_example_inputs(model, length))["params"]


def shapes(model: nn.Module) -> dict:
    """Returns the shapes and types of the parameters; nothing is computed."""
    return jax.eval_shape(lambda key: initial(model, key, length=1), jax.random.key(0))


def _without_kernels(model: nn.Module) -> nn.Module:
    """The same model with reference attention, which takes any shape on any devices; parameters are the same."""
    if isinstance(model, Ensemble):  # its members have backend 'auto', which takes no kernel for so few tokens
        return model
    return model.clone(config=dataclasses.replace(model.config, backend="reference"))


def _example_inputs(model: nn.Module, length: int) -> tuple[jax.Array, ...]:
    """Source and target, or the one of them that the model reads."""
    ids_1L = jnp.zeros((1, length), jnp.int32)
    return (ids_1L, ids_1L) if model.config.architecture == "encoder_decoder" else (ids_1L,)
