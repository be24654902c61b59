"""The parameters of a model: initial values, and shapes."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = dict[str, Any]  # arrays in nested dicts, by the names of modules


def initial(model: nn.Module, key: jax.Array, *, length: int = 8) -> Params:
    """Returns random float32 parameters, a function of `key`; `length`: of the example input."""
    return _with_reference_attention(model).init(key, *_example_inputs(model, length))["params"]


def shapes(model: nn.Module) -> Params:
    """Returns the shapes and dtypes of the parameters, without computing them."""
    return jax.eval_shape(lambda key: initial(model, key, length=1), jax.random.key(0))


def _with_reference_attention(model: nn.Module) -> nn.Module:
    """Returns the model with reference attention, which accepts any shape on any device.

    The parameters are the same.
    """
    if hasattr(model, "configs"):  # an ensemble; its backend 'auto' uses no kernel for short inputs
        return model
    return model.clone(config=dataclasses.replace(model.config, backend="reference"))


def _example_inputs(model: nn.Module, length: int) -> tuple[jax.Array, ...]:
    """Returns source and target ids, or the one of them that the model has."""
    ids_1L = jnp.zeros((1, length), jnp.int32)
    return (ids_1L, ids_1L) if model.config.architecture == "encoder_decoder" else (ids_1L,)
