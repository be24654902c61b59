"""One training step and one evaluation step as pure functions: state and batch in, state and sums out.

`train_step` calls `gradient_sums`, which calls `loss_sums`, which calls `predictions`. Batches are described there.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.config import Config
from flaxformer_lite.fields import PAD
from flaxformer_lite.model import embeddings, transformer
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.training import loss_in_parts, losses, metrics, optim, predictions, r_drop
from flaxformer_lite.training.predictions import Batch, Predicted
from flaxformer_lite.training.state import TrainState, init_state


def of_config(
    config: Config, *, axis_name: str | None = None, row_shards: int = 1
) -> tuple[Callable[[TrainState, Batch], tuple[TrainState, metrics.Sums]], Callable[[], TrainState]]:
    """Returns `train_step` for a config with its vocabulary size, and a function that makes the first state."""
    train, model = config.train, transformer.build_model(config.model)
    optimizer = optim.make_optimizer(config.optim, d_model=config.model.d_model, num_steps=train.num_steps)
    step = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        label_smoothing=train.label_smoothing,
        r_drop_weight=train.r_drop,
        ema_decay=train.ema_decay,
        microbatches=config.optim.accumulate_steps,
        axis_name=axis_name,
        row_shards=row_shards,
    )
    return step, functools.partial(init_state, model, optimizer, seed=train.seed, ema=train.ema_decay is not None)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    ema_decay: float | None = None,
    axis_name: str | None = None,
    **options: float,
) -> tuple[TrainState, metrics.Sums]:
    """One update by the mean gradient over the labels of the global batch.

    Args:
      ema_decay: of the moving average, if the state keeps one.
      axis_name: the axis whose devices each hold a part of the batch, under `pmap` and `shard_map`.
      options: `label_smoothing`, `r_drop_weight`, `microbatches` and `row_shards`, of `gradient_sums`.

    Returns:
      The next state, and sums with `loss`, `accuracy` and `grad_norm` (before clipping).
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
    sums = gradient_sums(state.params, batch, model=model, dropout_key=key, **options)
    gradients, sums = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    per_label = 1 / jnp.maximum(sums["loss"][1], 1)
    gradients = jax.tree.map(lambda g: g * per_label, gradients)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    sums["grad_norm"] = (optax.tree.norm(gradients), jnp.ones(()))
    ema = None if ema_decay is None else update_average(state.ema, params, state.step, decay=ema_decay)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema), sums


def gradient_sums(params: dict, batch: Batch, *, microbatches: int = 1, **options) -> tuple[dict, metrics.Sums]:
    """Returns the gradients of the summed loss, and the metrics' sums, over `microbatches` parts one after another.

    Part m takes every `microbatches`-th row, so that the parts of a batch sharded over devices stay sharded.
    """
    gradient = jax.grad(loss_sums, has_aux=True)
    if microbatches == 1:
        return gradient(params, batch, **options)

    def add_part(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(params, part, **options)), None

    parts = loss_in_parts.split_rows(batch, microbatches)
    first = gradient(params, jax.tree.map(lambda x: x[0], parts), **options)
    sums, _ = jax.lax.scan(add_part, first, jax.tree.map(lambda x: x[1:], parts))
    return sums


def loss_sums(
    params: dict,
    batch: Batch,
    *,
    model: nn.Module,
    label_smoothing: float = 0.0,
    r_drop_weight: float = 0.0,
    dropout_key: jax.Array | None = None,
    row_shards: int = 1,
) -> tuple[jax.Array, metrics.Sums]:
    """Returns what training minimises, summed over labels, and the metrics' sums.

    Args:
      r_drop_weight: weight of the disagreement of two passes; `r_drop_weight` / 4 of it is added to the mean loss of
        the two, half of the loss of Liang 2021, section 2.1. Only with a dropout key.
      dropout_key: None: no dropout, in evaluation.
      row_shards: how many devices the compiler spreads the rows over.
    """
    two_passes = r_drop_weight > 0 and dropout_key is not None
    batch = r_drop.repeated(batch) if two_passes else batch
    mode = {"deterministic": dropout_key is None, "row_B": batch["row"]}
    if dropout_key is not None:
        mode["rngs"] = {"dropout": dropout_key}

    def sums(predicted: Predicted) -> tuple[jax.Array, metrics.Sums]:
        """What is minimised and the metrics, of logits."""
        objective, _ = losses.cross_entropy(*predicted, label_smoothing=label_smoothing)
        if two_passes:
            objective += r_drop_weight / 2 * r_drop.disagreement(predicted.x, predicted.weights_BT)
        return objective, {"loss": losses.cross_entropy(*predicted), "accuracy": metrics.correct_tokens(*predicted)}

    if model.config.architecture == "encoder_classifier":
        predicted = predictions.of_classes(params, batch, model=model, **mode)
        return sums(r_drop.paired(predicted) if two_passes else predicted)
    lengths = None
    if model.config.decoder == "masked":
        predicted, lengths = predictions.of_masked_tokens(params, batch, model=model, step_key=dropout_key, **mode)
    else:
        predicted = predictions.of_tokens(params, batch, model=model, **mode)
    predicted = r_drop.paired(predicted) if two_passes else predicted
    objective, measured = _project_and_sum(params, predicted, sums, model=model, row_shards=row_shards)
    if lengths is None:
        return objective, measured
    length_loss = losses.cross_entropy(*lengths)  # each length counts as one more token: Ghazvininejad 2019, 2.3
    extra = {"length_loss": length_loss, "length_accuracy": metrics.correct_tokens(*lengths)}
    return objective + length_loss[0], measured | extra


def _project_and_sum(
    params: dict, predicted: Predicted, sums: Callable, *, model: nn.Module, row_shards: int
) -> tuple[jax.Array, metrics.Sums]:
    """`sums` of the logits, some rows after others if all logits at once would be too large."""
    weights = model.apply({"params": params}, method="output_weights")
    x_BTD, *labelled = predicted
    logits_of_row = x_BTD.shape[1] * weights["matrix"].shape[0]
    parts = losses.parts_of(x_BTD.shape[0], logits_of_row, row_shards=row_shards)

    def of_part(x_BTD: jax.Array, weights: dict, *labelled: jax.Array) -> tuple[jax.Array, metrics.Sums]:
        return sums(Predicted(embeddings.project(x_BTD, weights, model.config), *labelled))

    with jax.named_scope("loss"):
        return loss_in_parts.summed(of_part, x_BTD, weights, *labelled, parts=parts, row_shards=row_shards)


def update_average(average: dict, params: dict, step: jax.Array, *, decay: float) -> dict:
    """Returns the exponential moving average of parameters after update number `step`, counted from 0.

    The decay rises to its value, min(decay, (1 + step) / (10 + step)), so that the random start is soon forgotten:
    `num_updates` of TensorFlow's tf.train.ExponentialMovingAverage. Evaluating averages: Szegedy 2016, section 8.
    """
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, average, 1 - decay)


def eval_step(
    params: dict, batch: Batch, *, model: nn.Module, axis_name: str | None = None, row_shards: int = 1
) -> metrics.Sums:
    """Returns sums of `loss` and `accuracy` over the batch's labels, without dropout or smoothing."""
    if isinstance(model, Ensemble) and model.config.architecture != "encoder_classifier":
        sums = _ensemble_sums(params, batch, model=model, row_shards=row_shards)
    else:
        _, sums = loss_sums(params, batch, model=model, row_shards=row_shards)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def _ensemble_sums(params: dict, batch: Batch, *, model: Ensemble, row_shards: int) -> metrics.Sums:
    """The sums of an ensemble's mean probabilities, some rows after others if there are many logits."""

    def of_part(batch: Batch) -> metrics.Sums:
        inputs, segments = predictions.decoder_inputs(batch, model=model)
        log_prob_BTV = model.apply({"params": params}, *inputs, **segments)
        predicted = log_prob_BTV, batch["target"], (batch["target"] != PAD).astype(jnp.float32)
        return {"loss": losses.cross_entropy(*predicted), "accuracy": metrics.correct_tokens(*predicted)}

    rows, length = batch["target"].shape
    logits_of_row = len(model.configs) * length * model.config.vocab_size
    parts = losses.parts_of(rows, logits_of_row, row_shards=row_shards)
    sums = jax.lax.map(of_part, loss_in_parts.split_rows(batch, parts))
    return jax.tree.map(lambda sum_M: sum_M.sum(axis=0), sums)


def confusion_step(params: dict, batch: Batch, *, model: nn.Module, axis_name: str | None = None) -> jax.Array:
    """Returns how many texts of each class (row) were classified as each class (column): (C, C) float32."""
    logits_B1C, labels_B1, weights_B1 = predictions.of_classes(params, batch, model=model)
    classes = logits_B1C.shape[-1]
    true_BC = jax.nn.one_hot(labels_B1[:, 0], classes) * weights_B1
    counts_CC = jnp.einsum("BC,BD->CD", true_BC, jax.nn.one_hot(logits_B1C[:, 0].argmax(axis=-1), classes))
    return counts_CC if axis_name is None else jax.lax.psum(counts_CC, axis_name)
