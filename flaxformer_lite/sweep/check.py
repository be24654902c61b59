"""Whether a config could be trained at all, found out before it is: its step, traced for its longest batch."""

import dataclasses
from collections.abc import Sequence

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.config import Config, with_vocabulary
from flaxformer_lite.data import pipeline
from flaxformer_lite.model import transformer
from flaxformer_lite.sweep.space import Point, Settings, refuse
from flaxformer_lite.training import step as step_lib


def check_all(points: Sequence[Point], settings: Settings, where: str) -> None:
    """Traces the step of every point; of those that differ in numbers alone, such as a learning rate, one.

    Raises:
      ValueError: steps that cannot be computed; the first five are named.
    """
    faults: list[str] = []
    known: dict[Config, str | None] = {}
    for number, point in enumerate(points):
        shape = _of_shape(point.config)
        if shape not in known:
            known[shape] = _fault(shape, settings)
        if known[shape] is not None:
            faults.append(f"point {number} ({point.label}): {known[shape]}")
    refuse(faults, where)


def parameters(config: Config) -> int:
    """How many numbers the model of a run learns, whose config knows all sizes."""
    shapes = step_lib.param_shapes(transformer.build_model(_sized(config).model))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def _fault(config: Config, settings: Settings) -> str | None:
    try:
        if settings.objective in config_lib.CHOICES["train.best_metric"]:  # is it measured at all?
            train = dataclasses.replace(config.train, best_metric=settings.objective)
            config_lib.resolve(config_lib.to_dict(dataclasses.replace(config, train=train)))
        config = _sized(config)
        train_step, initial_state = step_lib.of_config(config)
        state = jax.eval_shape(initial_state)
        jax.eval_shape(train_step, state, pipeline.batch_struct(config, *pipeline.possible_shapes(config)[-1]))
    except (ValueError, TypeError) as error:
        return ([*str(error).strip().splitlines(), type(error).__name__])[0]
    return None


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
    return dataclasses.replace(config, optim=optim, train=train, model=model)
