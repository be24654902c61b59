"""One training step and one evaluation step as pure functions: state and batch in, state and sums out.

A batch is a dict: `source` (B, S) and `target` (B, T), int32 ids that end with the end symbol and then padding,
and `row` (B,), each row's number in the global batch.
"""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from flaxformer_lite.training import losses, metrics

PAD, BOS = 0, 1

Batch = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """All that the next step depends on, besides its batch."""

    step: jax.Array  # updates done so far, int32
    params: dict
    opt_state: optax.OptState
    key_data: jax.Array  # of the run's dropout key; the key itself never changes


def init_state(model: nn.Module, optimizer: optax.GradientTransformation, *, seed: int, length: int = 8) -> TrainState:
    """The state before the first step, a function of `seed` alone."""
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    ids = jnp.zeros((1, length), jnp.int32)
    params = model.init(params_key, ids, ids)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.random.key_data(dropout_key))


def param_shapes(model: nn.Module) -> dict:
    """Shapes and types of the model's parameters; nothing is computed."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]


def shift_right(labels_BT: jax.Array) -> jax.Array:
    """The decoder's input for `labels_BT`: the start symbol, then all but the last label. Figure 1."""
    return jnp.pad(labels_BT, ((0, 0), (1, 0)), constant_values=BOS)[:, :-1]


def loss_sums(
    params: dict,
    batch: Batch,
    *,
    model: nn.Module,
    label_smoothing: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, metrics.Sums]:
    """What training minimises, summed over target tokens, and the metrics' sums; dropout only with a key."""
    logits_BTV = model.apply(
        {"params": params},
        batch["source"],
        shift_right(batch["target"]),
        deterministic=dropout_key is None,
        row_B=batch["row"],
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )
    labels_BT = batch["target"]
    weights_BT = (labels_BT != PAD).astype(jnp.float32)
    objective, _ = losses.cross_entropy(logits_BTV, labels_BT, weights_BT, label_smoothing=label_smoothing)
    return objective, {
        "loss": losses.cross_entropy(logits_BTV, labels_BT, weights_BT),
        "accuracy": metrics.correct_tokens(logits_BTV, labels_BT, weights_BT),
    }


def gradient_sums(params: dict, batch: Batch, *, microbatches: int = 1, **options) -> tuple[dict, metrics.Sums]:
    """Gradients of the summed loss, and the metrics' sums, `microbatches` parts of the batch one after another.

    Part m takes every `microbatches`-th row, so that the parts of a batch sharded over devices stay sharded.
    """
    gradient = jax.grad(loss_sums, has_aux=True)
    if microbatches == 1:
        return gradient(params, batch, **options)

    def add_part(sums, part):
        return jax.tree.map(jnp.add, sums, gradient(params, part, **options)), None

    parts = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)
    first = gradient(params, jax.tree.map(lambda x: x[0], parts), **options)
    sums, _ = jax.lax.scan(add_part, first, jax.tree.map(lambda x: x[1:], parts))
    return sums


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    label_smoothing: float,
    microbatches: int = 1,
    axis_name: str | None = None,
) -> tuple[TrainState, metrics.Sums]:
    """One update by the mean gradient over the target tokens of the global batch.

    Args:
      axis_name: under `pmap`, the axis whose devices each hold a part of the batch.

    Returns:
      The next state, and sums with `loss`, `accuracy` and `grad_norm` (before clipping).
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
    sums = gradient_sums(
        state.params,
        batch,
        microbatches=microbatches,
        model=model,
        label_smoothing=label_smoothing,
        dropout_key=key,
    )
    gradients, sums = sums if axis_name is None else jax.lax.psum(sums, axis_name)
    tokens = jnp.maximum(sums["loss"][1], 1)
    gradients = jax.tree.map(lambda g: g / tokens, gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    sums["grad_norm"] = (optax.tree.norm(gradients), jnp.ones(()))
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), sums


def eval_step(params: dict, batch: Batch, *, model: nn.Module, axis_name: str | None = None) -> metrics.Sums:
    """Sums of `loss` and `accuracy` over the batch's target tokens, without dropout or smoothing."""
    _, sums = loss_sums(params, batch, model=model)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)
