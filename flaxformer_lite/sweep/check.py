"""Whether a config could be trained at all, found out before it is: its step, traced for its longest batch."""

import dataclasses
import functools
from collections.abc import Sequence

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data.batches import batch_shapes
from flaxformer_lite.model import backends, parameters, transformer
from flaxformer_lite.sweep.space import Point, Settings, refuse
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import step as step_lib


def check_all(points: Sequence[Point], settings: Settings, where: str) -> None:
    """Traces the step of every point; of those that differ in numbers alone, such as a learning rate, one.

    Raises:
      InputError: steps that cannot be computed; the first five are named.
    """
    found = [(number, point, fault(point.config, settings)) for number, point in enumerate(points)]
    refuse([f"point {number} ({point.label}): {what}" for number, point, what in found if what], where)


def parameter_count(config: Config) -> int:
    """How many numbers the model of a run learns, whose config knows all sizes."""
    shapes = parameters.shapes(transformer.build_model(_sized(config).model))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def fault(config: Config, settings: Settings) -> str | None:
    """Why a config cannot be trained, or the objective not measured, in one line; None if all is well."""
    try:
        _check_objective(config, settings.objective)
    except InputError as error:
        return str(error)
    return _fault_of_step(_of_shape(config))


@functools.cache
def _fault_of_step(config: Config) -> str | None:
    """Why the step cannot be computed."""
    try:
        config = _sized(config)
        train_step, initial_state = step_lib.of_config(config)
        state = jax.eval_shape(initial_state)
        jax.eval_shape(train_step, state, batch_shapes.struct(config, *batch_shapes.possible(config)[-1]))
    except (ValueError, TypeError) as error:
        return ([*str(error).strip().splitlines(), type(error).__name__])[0]
    return None


def _check_objective(config: Config, objective: str) -> None:
    architecture = config.model.architecture
    if (objective == "bits_per_byte" and architecture != "decoder_lm") or (
        objective == "perplexity" and architecture == "encoder_classifier"
    ):
        raise InputError(f"SWEEP['objective']: {objective!r} is not measured for model.architecture={architecture!r}.")
    if objective in config_lib.CHOICES["train.best_metric"]:
        train = dataclasses.replace(config.train, best_metric=objective)  # what says which metrics a config has
        config_lib.resolve(config_lib.to_dict(dataclasses.replace(config, train=train)))


def _sized(config: Config) -> Config:
    """The config with the sizes that only the data tells: the vocabulary asked for, and two classes."""
    config = with_vocabulary(config, config.data.vocab_size)
    if config.model.architecture == "encoder_classifier" and config.model.num_classes is None:
        config = config_lib.with_classes(config, ["", ""])
    return config


def _of_shape(config: Config) -> Config:
    """The config with one layer, as all are alike, and with numbers that no shape depends on set to 0.5: what stands
    for many others, and is quickly traced."""
    optim = dataclasses.replace(config.optim, learning_rate=0.5, warmup_steps=1, b1=0.5, b2=0.5, eps=0.5)
    smoothed = 0.5 if config.train.label_smoothing else 0.0
    train = dataclasses.replace(config.train, num_steps=1, label_smoothing=smoothed, eval_every=1, checkpoint_every=1)
    model = dataclasses.replace(config.model, num_encoder_layers=1, num_decoder_layers=1)
    model = dataclasses.replace(model, dropout=0.5 if model.dropout else 0.0)
    model = dataclasses.replace(model, backend=backends.stand_in(model.backend))
    return dataclasses.replace(config, optim=optim, train=train, model=model)
