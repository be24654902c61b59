"""Checks of a sweep's configs before training: the step of each is traced for its longest batch."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.checks.vocabularies import expected_vocabularies
from flaxformer_lite.config import with_vocabulary
from flaxformer_lite.data.batches import loader
from flaxformer_lite.field_rules import DROPOUTS, OF_TEXT
from flaxformer_lite.fields import Config
from flaxformer_lite.model import backends, parameters, transformer
from flaxformer_lite.sweep.space import Point, Settings, raise_errors
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import parameter_groups
from flaxformer_lite.training import step as step_lib

ANY_VOCABULARY = 260  # for a trace, if the texts have the size


def check_all(points: Sequence[Point], settings: Settings, where: str) -> None:
    """Traces the step of every point; points that differ only in numbers are traced once.

    Raises:
      InputError: some steps cannot be computed; the message names the first five.
    """
    errors = []
    for number, point in enumerate(points):
        if error := config_error(point.config, settings):
            errors.append(f"point {number} ({point.label}): {error}")
    raise_errors(errors, where)


def parameter_count(config: Config) -> int:
    """Returns the number of parameters, frozen ones included; `config` has all sizes set."""
    shapes = parameters.shapes(transformer.build_model(_with_sizes(config).model))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def config_error(config: Config, settings: Settings) -> str | None:
    """Returns in one line why `config` cannot be trained, or its objective not computed.

    None if there is no error.
    """
    try:
        _check_objective(config, settings.objective)
        if config.optim.freeze or config.optim.groups:
            model = transformer.build_model(_with_sizes(config).model)
            parameter_groups.check(parameters.shapes(model), config.optim)
    except InputError as error:
        return str(error)
    return step_error(_representative(config))


@functools.cache
def step_error(config: Config) -> str | None:
    """Returns in one line why the training step of `config` cannot be computed; None if it can."""
    try:
        config = _with_sizes(config)
        train_step, initial_state = step_lib.of_config(config)
        state = jax.eval_shape(initial_state)
        longest = loader.possible_shapes(config)[-1]
        jax.eval_shape(train_step, state, loader.batch_struct(config, *longest, train=True))
    except (ValueError, TypeError) as error:
        return ([*str(error).strip().splitlines(), type(error).__name__])[0]
    return None


def _check_objective(config: Config, objective: str) -> None:
    architecture = config.model.architecture
    if (objective in OF_TEXT and architecture != "decoder_lm") or (
        objective == "perplexity" and architecture == "encoder_classifier"
    ):
        raise InputError(
            f"SWEEP['objective']: {objective!r} is not computed for "
            f"model.architecture={architecture!r}."
        )
    if objective in config_lib.CHOICES["train.best_metric"]:
        # `resolve` checks that the config has the metric.
        train = dataclasses.replace(config.train, best_metric=objective)
        config_lib.resolve(config_lib.to_dict(dataclasses.replace(config, train=train)))


def _with_sizes(config: Config) -> Config:
    """Sets the sizes that depend on the data: the expected vocabulary size, and two classes."""
    config = with_vocabulary(config, *expected_vocabularies(config, default=ANY_VOCABULARY))
    if config.model.architecture == "encoder_classifier" and config.model.num_classes is None:
        config = config_lib.with_classes(config, ["", ""])
    return config


def _representative(config: Config) -> Config:
    """Returns the config to trace in place of all configs with the same shapes.

    It has one layer, as all layers are the same, and 0.5 for numbers that no shape depends on. It
    has no rules for parameters, which may name layers.
    """
    optim = dataclasses.replace(
        config.optim,
        learning_rate=0.5,
        warmup_steps=1,
        decay_steps=None,
        final_rate=0.5,
        b1=0.5,
        b2=0.5,
        eps=0.5,
        momentum=0.5,
        weight_decay=0.5 if config.optim.weight_decay else 0.0,
        freeze=(),
        groups=(),
    )
    if optim.skip_spikes is not None:
        optim = dataclasses.replace(optim, skip_spikes=0.5)
    optim = dataclasses.replace(optim, nan_tolerance=min(1, optim.nan_tolerance))
    smoothing, z_loss = (
        0.5 if value else 0.0 for value in (config.train.label_smoothing, config.train.z_loss)
    )
    train = dataclasses.replace(config.train, label_smoothing=smoothing, z_loss=z_loss)
    train = dataclasses.replace(train, num_steps=1, eval_every=1, checkpoint_every=1)
    model = dataclasses.replace(config.model, num_encoder_layers=1, num_decoder_layers=1)
    rates: dict[str, Any] = {name: 0.5 for name in DROPOUTS if getattr(model, name)}
    model = dataclasses.replace(model, **rates)
    model = dataclasses.replace(model, backend=backends.stand_in(model.backend))
    return dataclasses.replace(config, optim=optim, train=train, model=model)
