"""The training step and the evaluation step, as pure functions of a state and a batch.

`train_step` calls `gradient_sums`, which calls `loss_sums`, which calls `predictions`. That module
describes the batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.fields import Config
from flaxformer_lite.model import embeddings, parameters, transformer
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import (
    guided_alignment,
    loss_in_parts,
    losses,
    metrics,
    optim,
    parameter_groups,
    predictions,
    r_drop,
    schedule_free,
    spikes,
)
from flaxformer_lite.training.predictions import Batch, Predicted
from flaxformer_lite.training.state import TrainState, init_state


def of_config(
    config: Config, *, axis_name: str | None = None, row_shards: int = 1
) -> tuple[
    Callable[[TrainState, Batch], tuple[TrainState, metrics.Sums]], Callable[[], TrainState]
]:
    """Returns `train_step` for a config, and a function that makes the initial state.

    Args:
      config: with the vocabulary size of the model.

    Raises:
      InputError: the rules of `optim.freeze` and `optim.groups` do not fit the model.
    """
    train, model = config.train, transformer.build_model(config.model)
    if config.optim.freeze or config.optim.groups:
        parameter_groups.check(parameters.shapes(model), config.optim)
    optimizer = optim.make_optimizer(
        config.optim, d_model=config.model.d_model, num_steps=train.num_steps
    )
    gradient_point = None
    if config.optim.optimizer == "schedule_free":
        gradient_point = functools.partial(schedule_free.gradient_point, b1=config.optim.b1)
    step = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        gradient_point=gradient_point,
        freeze=config.optim.freeze,
        label_smoothing=train.label_smoothing,
        r_drop_weight=train.r_drop,
        z_loss_weight=train.z_loss,
        guided=guided_alignment.of_config(config),
        ema_decay=train.ema_decay,
        microbatches=config.optim.accumulate_steps,
        axis_name=axis_name,
        row_shards=row_shards,
    )
    return step, functools.partial(
        init_state,
        model,
        optimizer,
        seed=train.seed,
        ema=train.ema_decay is not None,
        freeze=config.optim.freeze,
    )


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    gradient_point: Callable[[Params, optax.OptState], Params] | None = None,
    freeze: tuple[str, ...] = (),
    ema_decay: float | None = None,
    axis_name: str | None = None,
    **options: Any,
) -> tuple[TrainState, metrics.Sums]:
    """Returns the state after one update by the mean gradient over the labels of the global batch.

    Args:
      gradient_point: returns the point where the gradient is computed, given parameters and state
        of the optimizer; None: at the parameters.
      freeze: rules of the parameters that stay as they are. They have no gradient and no state of
        the optimizer: `trained` has None in their place.
      ema_decay: decay of the moving average; None if the state has none.
      axis_name: the mapped axis that the batch is split over, under `pmap` and `shard_map`.
      options: `label_smoothing`, `r_drop_weight`, `z_loss_weight`, `guided`, `microbatches` and
        `row_shards`, as in `gradient_sums`.

    Returns:
      The next state, and sums with `loss`, `accuracy` and `grad_norm` (before clipping); and
      `spikes.counts` if the optimizer skips updates.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
    trained = point = parameter_groups.trained(state.params, freeze)
    if gradient_point is not None:
        point = gradient_point(trained, state.opt_state)
    local = gradient_sums(
        point, batch, all_params=state.params, model=model, dropout_key=key, **options
    )
    gradients, sums = local if axis_name is None else jax.lax.psum(local, axis_name)
    per_label = 1 / jnp.maximum(sums["loss"][1], 1)
    gradients = jax.tree.map(lambda g: g * per_label, gradients)
    with jax.named_scope("optimizer"):
        update = optax.with_extra_args_support(optimizer).update
        loss, _ = sums["loss"]
        updates, opt_state = update(gradients, state.opt_state, trained, value=loss)
        trained = optax.apply_updates(trained, updates)
    params = parameter_groups.merged(trained, state.params)
    sums["grad_norm"] = (optax.tree.norm(gradients), jnp.ones(()))
    sums |= spikes.counts(opt_state)
    ema = None
    if ema_decay is not None:
        assert state.ema is not None, "init_state makes it"
        average = parameter_groups.trained(state.ema, freeze)
        average = update_average(average, trained, state.step, decay=ema_decay)
        ema = parameter_groups.merged(average, state.ema)
    return (
        dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state, ema=ema
        ),
        sums,
    )


def gradient_sums(
    params: Params,
    batch: Batch,
    *,
    all_params: Params | None = None,
    microbatches: int = 1,
    **options: Any,
) -> tuple[dict[str, Any], metrics.Sums]:
    """Returns the gradients of the summed loss and the sums of the metrics.

    Args:
      params: the parameters to differentiate by; None in place of each frozen one.
      all_params: where the frozen parameters are read; None: no parameter is frozen.
      microbatches: how many parts of the batch are computed one after another. Part m has the rows
        m, m + `microbatches`, ..., so that the parts of a sharded batch stay sharded.
      options: as in `loss_sums`.
    """

    def objective(params: Params, batch: Batch, **options: Any) -> tuple[jax.Array, metrics.Sums]:
        if all_params is not None:
            params = parameter_groups.merged(params, all_params)
        return loss_sums(params, batch, **options)

    gradient = jax.grad(objective, has_aux=True)
    if microbatches == 1:
        return gradient(params, batch, **options)

    def add_part(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient(params, part, **options)), None

    parts = loss_in_parts.split_rows(batch, microbatches)
    first = gradient(params, jax.tree.map(lambda x: x[0], parts), **options)
    sums, _ = jax.lax.scan(add_part, first, jax.tree.map(lambda x: x[1:], parts))
    return sums


def loss_sums(
    params: Params,
    batch: Batch,
    *,
    model: nn.Module,
    label_smoothing: float = 0.0,
    r_drop_weight: float = 0.0,
    z_loss_weight: float = 0.0,
    guided: guided_alignment.GuidedHead | None = None,
    dropout_key: jax.Array | None = None,
    row_shards: int = 1,
) -> tuple[jax.Array, metrics.Sums]:
    """Returns the training objective, summed over the labels, and the sums of the metrics.

    Args:
      r_drop_weight: weight of R-Drop. The objective is the mean loss of 2 passes plus
        `r_drop_weight` / 4 times their disagreement: half of the loss of Liang 2021, section 2.1.
        It has no effect without a dropout key.
      z_loss_weight: weight of `losses.z_loss` of the tokens or classes.
      guided: the head of cross-attention that is guided to the alignments of the batch; None: none.
      dropout_key: None: no dropout, as in evaluation.
      row_shards: how many devices the compiler splits the rows over.
    """
    two_passes = r_drop_weight > 0 and dropout_key is not None
    batch = r_drop.repeated(batch) if two_passes else batch
    options = {"deterministic": dropout_key is None, "row_B": batch["row"]}
    if dropout_key is not None:
        options["rngs"] = {"dropout": dropout_key}

    def sums(predicted: Predicted) -> tuple[jax.Array, metrics.Sums]:
        """Returns the objective and the metrics of logits."""
        objective, _ = losses.cross_entropy(*predicted, label_smoothing=label_smoothing)
        if two_passes:
            objective += r_drop_weight / 2 * r_drop.disagreement(predicted.x, predicted.weights_BT)
        if z_loss_weight:
            objective += z_loss_weight * losses.z_loss(predicted.x, predicted.weights_BT)
        return objective, {
            "loss": losses.cross_entropy(*predicted),
            "accuracy": metrics.correct_tokens(*predicted),
        }

    if model.config.architecture == "encoder_classifier":
        predicted = predictions.of_classes(params, batch, model=model, **options)
        return sums(r_drop.paired(predicted) if two_passes else predicted)
    lengths = of_head = None
    if guided is not None:
        predicted, of_head = guided_alignment.of_tokens(
            params, batch, model=model, guided=guided, **options
        )
    elif model.config.decoder == "masked":
        predicted, lengths = predictions.of_masked_tokens(
            params, batch, model=model, step_key=dropout_key, **options
        )
    else:
        predicted = predictions.of_tokens(params, batch, model=model, **options)
    predicted = r_drop.paired(predicted) if two_passes else predicted
    objective, token_sums = _project_and_sum(
        params, predicted, sums, model=model, row_shards=row_shards
    )
    if guided is not None and of_head is not None:
        if two_passes:  # each has half the weight
            of_head = of_head[0] / 2, of_head[1] / 2
        return objective + guided.weight * of_head[0], token_sums | {"alignment_loss": of_head}
    if lengths is None:
        return objective, token_sums
    # each length has the weight of one token: Ghazvininejad 2019, section 2.3
    length_loss = losses.cross_entropy(*lengths)
    length_sums = {"length_loss": length_loss, "length_accuracy": metrics.correct_tokens(*lengths)}
    return objective + length_loss[0], token_sums | length_sums


def _project_and_sum(
    params: Params,
    predicted: Predicted,
    sums: Callable[..., Any],
    *,
    model: nn.Module,
    row_shards: int,
) -> tuple[jax.Array, metrics.Sums]:
    """Returns `sums` of the logits, computed in parts of the rows if all do not fit in memory."""
    weights = predictions.apply(model, params, method="output_weights")
    x_BTD, *labelled = predicted
    logits_of_row = x_BTD.shape[1] * weights["matrix"].shape[0]
    parts = losses.parts_of(x_BTD.shape[0], logits_of_row, row_shards=row_shards)

    def of_part(
        x_BTD: jax.Array, weights: dict[str, Any], *labelled: jax.Array
    ) -> tuple[jax.Array, metrics.Sums]:
        return sums(Predicted(embeddings.project(x_BTD, weights, model.config), *labelled))

    with jax.named_scope("loss"):
        return loss_in_parts.summed(
            of_part, x_BTD, weights, *labelled, parts=parts, row_shards=row_shards
        )


def update_average(average: Params, params: Params, step: jax.Array, *, decay: float) -> Params:
    """Returns the exponential moving average of the parameters after an update.

    The decay is min(`decay`, (1 + step) / (10 + step)), so that the weight of the random initial
    parameters falls quickly: `num_updates` of tf.train.ExponentialMovingAverage in TensorFlow. The
    average is what is evaluated: Szegedy 2016, section 8.

    Args:
      step: number of the update, from 0.
    """
    kept = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, average, 1 - kept)


def eval_step(
    params: Params,
    batch: Batch,
    *,
    model: nn.Module,
    axis_name: str | None = None,
    row_shards: int = 1,
) -> metrics.Sums:
    """Returns the sums of `loss` and `accuracy` over the labels, without dropout and smoothing."""
    _, sums = loss_sums(params, batch, model=model, row_shards=row_shards)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def confusion_step(
    params: Params, batch: Batch, *, model: nn.Module, axis_name: str | None = None
) -> jax.Array:
    """Returns the confusion matrix, (C, C) float32: rows are labels, columns predicted classes."""
    logits_B1C, labels_B1, weights_B1 = predictions.of_classes(params, batch, model=model)
    classes = logits_B1C.shape[-1]
    true_BC = jax.nn.one_hot(labels_B1[:, 0], classes) * weights_B1
    counts_CC = jnp.einsum(
        "BC,BD->CD", true_BC, jax.nn.one_hot(logits_B1C[:, 0].argmax(axis=-1), classes)
    )
    return counts_CC if axis_name is None else jax.lax.psum(counts_CC, axis_name)
