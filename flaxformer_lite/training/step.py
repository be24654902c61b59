"""One training step and one evaluation step as pure functions: state and batch in, state and sums out.

A batch is a dict of int32 arrays: `row` (B,), each row's number in the global batch, and what the model's shape reads:

    encoder_decoder      `source` (B, S) and `target` (B, T): ids that end with the end symbol and then padding
    encoder_classifier   `source`, and `label` (B,), -1 in a row without a text
    decoder_lm           `target`

Rows that hold several texts, or pairs, have `target_segment` (B, T) too, and `source_segment` (B, S) if there is a
source: the number of each token's text, or pair, from 1; 0 = padding.

A masked decoder (`model.decoder`) learns to predict the tokens of the target that are masked, and its length; its
`loss` and `accuracy` are of those tokens alone, given the others, and so no match for those of a causal decoder.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.config import Config
from flaxformer_lite.model import embeddings, transformer
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.training import losses, masking, metrics, optim

PAD, BOS = 0, 1
MASKING = 1  # which of the step's random numbers say what is masked; dropout takes others

Batch = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """All that the next step depends on, besides its batch."""

    step: jax.Array  # updates done so far, int32
    params: dict
    opt_state: optax.OptState
    key_data: jax.Array  # of the run's dropout key; the key itself never changes
    ema: dict | None = None  # the moving average of `params`, where one is kept; float32 as they are

    @property
    def measured(self) -> dict:
        """The parameters that evaluations are of: the moving average where there is one."""
        return self.params if self.ema is None else self.ema


@flax.struct.dataclass
class Progress:
    """What a checkpoint holds beside parameters; the names and the order of the fields are its format."""

    step: jax.Array
    params: None = None  # an empty place, since the first version
    opt_state: optax.OptState = None
    key_data: jax.Array = None


def init_state(
    model: nn.Module, optimizer: optax.GradientTransformation, *, seed: int, length: int = 8, ema: bool = False
) -> TrainState:
    """The state before the first step, a function of `seed` alone; with `ema` it keeps a moving average."""
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    params = _without_kernels(model).init(params_key, *_example_inputs(model, length))["params"]
    average = jax.tree.map(jnp.copy, params) if ema else None  # memory of its own: steps give theirs away
    key_data = jax.random.key_data(dropout_key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key_data, average)


def of_config(
    config: Config, *, axis_name: str | None = None, row_shards: int = 1
) -> tuple[Callable[[TrainState, Batch], tuple[TrainState, metrics.Sums]], Callable[[], TrainState]]:
    """`train_step` of a run, whose model knows its vocabulary, and what makes the state before the first."""
    train, model = config.train, transformer.build_model(config.model)
    optimizer = optim.make_optimizer(config.optim, d_model=config.model.d_model, num_steps=train.num_steps)
    options = {"label_smoothing": train.label_smoothing, "r_drop": train.r_drop, "ema_decay": train.ema_decay}
    options |= {"microbatches": config.optim.accumulate_steps, "axis_name": axis_name}
    options |= {"row_shards": row_shards}
    step = functools.partial(train_step, model=model, optimizer=optimizer, **options)
    return step, functools.partial(init_state, model, optimizer, seed=train.seed, ema=train.ema_decay is not None)


def param_shapes(model: nn.Module) -> dict:
    """Shapes and types of the model's parameters; nothing is computed."""
    init = _without_kernels(model).init
    return jax.eval_shape(init, jax.random.key(0), *_example_inputs(model, 1))["params"]


def _without_kernels(model: nn.Module) -> nn.Module:
    """The same parameters; attention by the reference, which takes any shape on any devices."""
    if isinstance(model, Ensemble):  # of members that take 'auto', which takes no kernel for so few tokens
        return model
    return model.clone(config=dataclasses.replace(model.config, backend="reference"))


def _example_inputs(model: nn.Module, length: int) -> tuple[jax.Array, ...]:
    """Source and target, or the one of them that the model reads."""
    ids_1L = jnp.zeros((1, length), jnp.int32)
    return (ids_1L, ids_1L) if model.config.architecture == "encoder_decoder" else (ids_1L,)


def shift_right(labels_BT: jax.Array, segment_BT: jax.Array | None = None) -> jax.Array:
    """The decoder's input for `labels_BT`: the start symbol, then all but the last label, in each text. Figure 1."""
    shifted_BT = jnp.pad(labels_BT, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1]
    if segment_BT is None:
        return shifted_BT
    begins_BT = jnp.pad(segment_BT[:, 1:] != segment_BT[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(begins_BT, BOS, shifted_BT)


def classify(params: dict, batch: Batch, *, model: nn.Module, **mode) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A classifier's logits (B, 1, C), the labels (B, 1) and their weights, 0 for an empty row: as if for one token."""
    logits_BC = model.apply({"params": params}, batch["source"], **mode)
    labels_B1 = batch["label"][:, None]
    return logits_BC[:, None], jnp.maximum(labels_B1, 0), (labels_B1 >= 0).astype(jnp.float32)


def decoder_inputs(batch: Batch, *, model: nn.Module) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array | None]]:
    """The ids that a decoder reads, behind those of the source if there is an encoder, and their segments by name."""
    segment_BT = batch.get("target_segment")
    inputs_BT = shift_right(batch["target"], segment_BT)
    if model.config.architecture == "decoder_lm":
        return (inputs_BT,), {"segment_BT": segment_BT}
    if segment_BT is None:
        return (batch["source"], inputs_BT), {}
    return (batch["source"], inputs_BT), {"source_segment_BS": batch["source_segment"], "target_segment_BT": segment_BT}


def features(params: dict, batch: Batch, *, model: nn.Module, **mode) -> jax.Array:
    """What a decoder makes of each token of the batch, (B, T, D)."""
    inputs, segments = decoder_inputs(batch, model=model)
    return model.apply({"params": params}, *inputs, method="features", **segments, **mode)


def predictions(
    params: dict, batch: Batch, *, model: nn.Module, step_key: jax.Array | None, **mode
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], metrics.Sums]:
    """What a decoder makes of each token, (B, T, D), the labels and their weights, and sums of what else it predicts.

    What is masked for a masked decoder is in training a function of the step's key and the row; in evaluation of the
    text alone, so that each evaluation measures the same, whatever shares the batch.
    """
    if model.config.decoder == "causal":
        labels_BT = batch["target"]
        x_BTD = features(params, batch, model=model, **mode)
        return x_BTD, (labels_BT, (labels_BT != PAD).astype(jnp.float32)), {}
    if step_key is None:
        drawn_by = jax.random.key(0), masking.number_of_text(batch["target"])
    else:
        drawn_by = jax.random.fold_in(step_key, MASKING), batch["row"]
    masked = masking.mask_targets(*drawn_by, batch["target"])
    inputs = batch["source"], masked.inputs_BT
    x_BTD, length_logits_BL = model.apply({"params": params}, *inputs, method="features_and_lengths", **mode)
    return x_BTD, (masked.labels_BT, masked.weights_BT), length_sums(length_logits_BL, masked.length_B)


def length_sums(logits_BL: jax.Array, length_B: jax.Array) -> metrics.Sums:
    """Loss and accuracy of predicted lengths, an empty row left out. Ghazvininejad 2019, section 2.3."""
    predicted = logits_BL[:, None], length_B[:, None], (length_B[:, None] > 0).astype(jnp.float32)
    return {"length_loss": losses.cross_entropy(*predicted), "length_accuracy": metrics.correct_tokens(*predicted)}


def twice(batch: Batch) -> Batch:
    """Each row and below it the same again, under a number that no row has: so dropout draws anew for it."""
    row_2B = jnp.stack([batch["row"], ~batch["row"]], axis=1).ravel()
    return {name: jnp.repeat(x, 2, axis=0) for name, x in batch.items()} | {"row": row_2B}


def side_by_side(*predicted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What was predicted for the rows of `twice`, those of one row beside each other: (2B, T, ...) to (B, 2T, ...).

    Each token counts half.
    """
    x_BTD, labels_BT, weights_BT = (x.reshape(-1, 2 * x.shape[1], *x.shape[2:]) for x in predicted)
    return x_BTD, labels_BT, weights_BT / 2


def loss_sums(
    params: dict,
    batch: Batch,
    *,
    model: nn.Module,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    dropout_key: jax.Array | None = None,
    row_shards: int = 1,
) -> tuple[jax.Array, metrics.Sums]:
    """What training minimises, summed over labels, and the metrics' sums; dropout only with a key.

    With `r_drop` each row passes through the model twice, dropout drawn anew: loss and metrics are means of the two,
    and `r_drop` / 4 times how far they disagree is minimised too, in all half the loss of Liang 2021, section 2.1.
    A masked decoder's loss of lengths is added, each as if it were of one more token. Ghazvininejad 2019, section 2.3.
    `row_shards`: how many devices the compiler spreads the rows over.
    """
    in_pairs = r_drop > 0 and dropout_key is not None
    batch, paired = (twice(batch), side_by_side) if in_pairs else (batch, lambda *predicted: predicted)
    mode = {"deterministic": dropout_key is None, "row_B": batch["row"]}
    if dropout_key is not None:
        mode["rngs"] = {"dropout": dropout_key}

    def sums(*predicted: jax.Array) -> tuple[jax.Array, metrics.Sums]:
        objective, _ = losses.cross_entropy(*predicted, label_smoothing=label_smoothing)
        if in_pairs:
            logits, _, weights = predicted
            objective += r_drop / 2 * losses.disagreement(logits, weights)
        return objective, {"loss": losses.cross_entropy(*predicted), "accuracy": metrics.correct_tokens(*predicted)}

    if model.config.architecture == "encoder_classifier":
        return sums(*paired(*classify(params, batch, model=model, **mode)))
    x_BTD, labelled, extra = predictions(params, batch, model=model, step_key=dropout_key, **mode)
    x_BTD, *labelled = paired(x_BTD, *labelled)
    weights = model.apply({"params": params}, method="output_weights")
    logits_of_row = x_BTD.shape[1] * weights["matrix"].shape[0]
    parts = losses.parts_of(x_BTD.shape[0], logits_of_row, row_shards=row_shards)
    with jax.named_scope("loss"):
        objective, measured = losses.summed_over_parts(
            lambda x_BTD, weights, *labelled: sums(embeddings.project(x_BTD, weights, model.config), *labelled),
            x_BTD,
            weights,
            *labelled,
            parts=parts,
            row_shards=row_shards,
        )
    return (objective + extra["length_loss"][0] if extra else objective), measured | extra


def ensemble_sums(params: dict, batch: Batch, *, model: Ensemble, row_shards: int = 1) -> metrics.Sums:
    """Sums of `loss` and `accuracy` of models that write together, some rows after others if there are many logits."""

    def sums(batch: Batch) -> metrics.Sums:
        inputs, segments = decoder_inputs(batch, model=model)
        log_prob_BTV = model.apply({"params": params}, *inputs, **segments)
        predicted = log_prob_BTV, batch["target"], (batch["target"] != PAD).astype(jnp.float32)
        return {"loss": losses.cross_entropy(*predicted), "accuracy": metrics.correct_tokens(*predicted)}

    rows, length = batch["target"].shape
    logits_of_row = len(model.configs) * length * model.config.vocab_size
    parts = in_parts(batch, losses.parts_of(rows, logits_of_row, row_shards=row_shards))
    return jax.tree.map(lambda sum_M: sum_M.sum(axis=0), jax.lax.map(sums, parts))


def in_parts(batch: Batch, parts: int) -> Batch:
    """The batch in so many parts, along a new leading axis; part m has every `parts`-th row."""
    return jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)


def gradient_sums(params: dict, batch: Batch, *, microbatches: int = 1, **options) -> tuple[dict, metrics.Sums]:
    """Gradients of the summed loss, and the metrics' sums, `microbatches` parts of the batch one after another.

    Part m takes every `microbatches`-th row, so that the parts of a batch sharded over devices stay sharded.
    """
    gradient = jax.grad(loss_sums, has_aux=True)
    if microbatches == 1:
        return gradient(params, batch, **options)

    def add_part(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(params, part, **options)), None

    parts = in_parts(batch, microbatches)
    first = gradient(params, jax.tree.map(lambda x: x[0], parts), **options)
    sums, _ = jax.lax.scan(add_part, first, jax.tree.map(lambda x: x[1:], parts))
    return sums


def update_average(average: dict, params: dict, step: jax.Array, *, decay: float) -> dict:
    """The exponential moving average of parameters after update number `step`, counted from 0.

    The decay rises to its value, min(decay, (1 + step) / (10 + step)), so that at first it is an average of few steps
    and the random start is soon forgotten: `num_updates` of TensorFlow's tf.train.ExponentialMovingAverage. Averages
    of parameters as what is evaluated: Szegedy 2016, section 8.
    """
    decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return optax.incremental_update(params, average, 1 - decay)


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
      ema_decay: of the moving average, where the state keeps one.
      axis_name: under `pmap` and over copies of the state, the axis whose devices each hold a part of the batch.
      options: `label_smoothing`, `r_drop`, `microbatches` and `row_shards`, of `gradient_sums`.

    Returns:
      The next state, and sums with `loss`, `accuracy` and `grad_norm` (before clipping).
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
    sums = gradient_sums(state.params, batch, model=model, dropout_key=key, **options)
    gradients, sums = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    share = 1 / jnp.maximum(sums["loss"][1], 1)  # of a token: a factor takes less of the program than a divisor
    gradients = jax.tree.map(lambda g: g * share, gradients)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
    sums["grad_norm"] = (optax.tree.norm(gradients), jnp.ones(()))
    ema = None if ema_decay is None else update_average(state.ema, params, state.step, decay=ema_decay)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema), sums


def eval_step(
    params: dict, batch: Batch, *, model: nn.Module, axis_name: str | None = None, row_shards: int = 1
) -> metrics.Sums:
    """Sums of `loss` and `accuracy` over the batch's labels, without dropout or smoothing."""
    if isinstance(model, Ensemble) and model.config.architecture != "encoder_classifier":
        sums = ensemble_sums(params, batch, model=model, row_shards=row_shards)
    else:
        _, sums = loss_sums(params, batch, model=model, row_shards=row_shards)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def confusion_step(params: dict, batch: Batch, *, model: nn.Module, axis_name: str | None = None) -> jax.Array:
    """How many texts of each class (row) were taken for each class (column): (C, C) float32."""
    logits_B1C, labels_B1, weights_B1 = classify(params, batch, model=model)
    classes = logits_B1C.shape[-1]
    true_BC = jax.nn.one_hot(labels_B1[:, 0], classes) * weights_B1
    counts_CC = jnp.einsum("BC,BD->CD", true_BC, jax.nn.one_hot(logits_B1C[:, 0].argmax(axis=-1), classes))
    return counts_CC if axis_name is None else jax.lax.psum(counts_CC, axis_name)
