"""The attention weights of a model for given texts, and the source token of each decoder step."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from flaxformer_lite.data.tokens.tokenizer import pad_rows
from flaxformer_lite.decoding.decoder import padded_length, rows_for
from flaxformer_lite.fields import BOS, EOS, PAD, ModelConfig
from flaxformer_lite.model import transformer
from flaxformer_lite.model.parameters import Params

KINDS = {
    "encoder self-attention": r"encoder.*self_attention",
    "decoder self-attention": r"decoder.*self_attention",
    "cross-attention": r"decoder.*cross_attention",
}


class Heads(NamedTuple):
    """Which weights are read: one head of a layer, or a mean. Both are counted from 0."""

    layer: int | None  # None: the mean of all layers
    head: int | None  # None: the mean of all heads


def attention_weights(
    config: ModelConfig, params: Params, *inputs: jax.Array
) -> dict[str, list[jax.Array]]:
    """Returns the attention weights (B, H, T, S) of each layer, for each of KINDS in the model.

    Args:
      inputs: of the model: int32 ids, (B, L) each.
    """
    # Only the reference backend returns weights; all backends compute the same.
    model = transformer.build_model(dataclasses.replace(config, backend="reference", remat="none"))
    _, kept = model.apply({"params": params}, *inputs, mutable=["intermediates"])
    leaves = jax.tree_util.tree_leaves_with_path(kept)
    weights = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    found = {}
    for name, pattern in KINDS.items():
        paths = sorted((path for path in weights if re.search(pattern, path)), key=_layer)
        if paths:
            found[name] = [weights[path] for path in paths]
    return found


def _layer(path: str) -> int:
    (number,) = re.findall(r"layers_(\d+)", path)
    return int(number)


def weights_of(layers_BHTS: Sequence[jax.Array], heads: Heads) -> jax.Array:
    """Returns the chosen weights, (B, T, S), of those of all layers."""
    chosen = layers_BHTS if heads.layer is None else [layers_BHTS[heads.layer]]
    per_layer = [
        each_BHTS.mean(axis=1) if heads.head is None else each_BHTS[:, heads.head]
        for each_BHTS in chosen
    ]
    return functools.reduce(jnp.add, per_layer) / len(per_layer)


def most_attended(weights_BTS: jax.Array, counts_BS: jax.Array) -> jax.Array:
    """Returns the source token with the largest weight, (B, T) int32; of equal weights the first.

    `counts_BS`: bool, False for tokens that no token is aligned to.
    """
    return jnp.where(counts_BS[:, None], weights_BTS, -1.0).argmax(axis=-1).astype(jnp.int32)


class CrossAttention:
    """Computes the source token that each decoder step of given pairs attends to most.

    It compiles once for each shape of a batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokens_per_batch: int,
        ignored_V: np.ndarray | None = None,
        rows_multiple: int = 1,
        sharding: NamedSharding | None = None,
    ):
        """
        Args:
          config: of an encoder-decoder.
          tokens_per_batch: positions of a batch on one side, padding included.
          ignored_V: bool, True for source ids that no token is aligned to, beside padding and the
            end symbol; None: no others.
          rows_multiple, sharding: of the rows of a batch, so that devices can share them.
        """
        self._config, self._sharding, self._ignored_V = config, sharding, ignored_V
        self._rows = functools.partial(rows_for, tokens=tokens_per_batch, multiple=rows_multiple)
        self._compiled = jax.jit(self._positions, static_argnames="chosen")

    def __call__(
        self,
        params: Params,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        chosen: tuple[Heads, ...],
    ) -> list[np.ndarray]:
        """Returns the source token of each decoder step of each pair, int32 (C, steps).

        C counts the `chosen` weights. The input of a causal decoder starts with the start symbol:
        step t predicts token t, and has token t - 1 as its input. There are as many steps as tokens
        and one more, as far as the model's `max_length` allows. Step t of a masked decoder has
        token t as its input and predicts it.

        Args:
          sources, targets: ids without end symbols, at most `max_length` of them; none is empty.
        """
        shifted = self._config.decoder == "causal"
        longest = self._config.max_length
        inputs = [np.array([BOS, *ids] if shifted else ids, np.int32)[:longest] for ids in targets]
        need = [max(len(source) + 1, len(ids)) for source, ids in zip(sources, inputs, strict=True)]
        waiting = sorted(range(len(need)), key=need.__getitem__, reverse=True)
        found: dict[int, np.ndarray] = {}
        while waiting:
            length = padded_length(need[waiting[0]], longest)
            rows = self._rows(length, waiting=len(waiting))
            batch, waiting = waiting[:rows], waiting[rows:]
            empty = [np.empty(0, np.int32)] * (rows - len(batch))
            source_BS = pad_rows([sources[i] for i in batch] + empty, length)
            target_BT = np.full((rows, length), PAD, np.int32)
            for row, i in zip(target_BT, batch, strict=False):
                row[: len(inputs[i])] = inputs[i]
            arrays = (jax.device_put(array, self._sharding) for array in (source_BS, target_BT))
            position_CBT = np.asarray(self._compiled(params, *arrays, chosen=chosen))
            found |= {i: position_CBT[:, b, : len(inputs[i])] for b, i in enumerate(batch)}
        return [found[i] for i in range(len(need))]

    def _positions(
        self,
        params: Params,
        source_BS: jax.Array,
        target_BT: jax.Array,
        *,
        chosen: tuple[Heads, ...],
    ) -> jax.Array:
        layers = attention_weights(self._config, params, source_BS, target_BT)["cross-attention"]
        counts_BS = (source_BS != PAD) & (source_BS != EOS)
        if self._ignored_V is not None:
            counts_BS &= ~jnp.asarray(self._ignored_V)[source_BS]
        each = [most_attended(weights_of(layers, heads), counts_BS) for heads in chosen]
        return jnp.stack(each)
