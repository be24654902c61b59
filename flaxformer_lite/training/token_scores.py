"""Log-probabilities of given token ids: one pass of the model for all tokens of a text.

Decoding computes one token after another, and keeps no probabilities. This pass computes those of
any text, also one that the model would never generate.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from flaxformer_lite.data.tokens.tokenizer import pad_rows
from flaxformer_lite.decoding.decoder import EMPTY, padded_length, rows_for
from flaxformer_lite.fields import BOS, PAD
from flaxformer_lite.model.devices import compiled_for
from flaxformer_lite.model.embeddings import project
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import loss_in_parts, losses, parallel, predictions
from flaxformer_lite.training.meshes import row_shards
from flaxformer_lite.training.predictions import Batch
from flaxformer_lite.training.sharding import DATA, FSDP, ROWS, WHOLE

IN_FLIGHT = 2  # batches that the devices compute while the host prepares others


@dataclasses.dataclass(frozen=True)
class TokenScores:
    """The counted tokens of a text and their natural log-probabilities, the end symbol included."""

    pieces: tuple[str, ...]  # in the notation of the vocabulary, such as '▁the' and '</s>'
    log_probs: tuple[float, ...]

    @classmethod
    def of(cls, ids: np.ndarray, log_probs: np.ndarray, vocabulary: Sequence[str]) -> "TokenScores":
        """Returns the scores of ids; `vocabulary`: the piece of each id."""
        return cls(tuple(vocabulary[i] for i in ids.tolist()), tuple(log_probs.tolist()))

    @property
    def log_prob(self) -> float:
        """The sum of the log-probabilities."""
        return math.fsum(self.log_probs)

    @property
    def perplexity(self) -> float:
        """exp(-log_prob / tokens); nan without a token."""
        if not self.log_probs:
            return math.nan
        try:
            return math.exp(-self.log_prob / len(self.log_probs))
        except OverflowError:
            return math.inf


def token_log_probs(
    params: Params, batch: Batch, *, model: nn.Module, row_shards: int = 1
) -> jax.Array:
    """Returns the log-probability of each label of a batch, (B, T) float32; 0 for padding.

    The logits are computed in parts of the rows, as all of them may not fit in memory.

    Args:
      batch: as in `predictions`, not packed.
      model: a causal model with a decoder, or an ensemble of such models.
      row_shards: how many devices the compiler splits the rows over.
    """
    labels_BT = batch["target"]
    logits_of_row = labels_BT.shape[1] * (model.config.output_vocab_size or 0)
    split = functools.partial(losses.parts_of, len(labels_BT), row_shards=row_shards)
    if isinstance(model, Ensemble):

        def of_batch(batch: Batch) -> jax.Array:
            inputs, _ = predictions.decoder_inputs(batch, model=model)
            return _of_labels(predictions.apply(model, params, *inputs), batch["target"])

        return _in_parts(of_batch, batch, parts=split(len(model.configs) * logits_of_row))
    x_BTD, *_ = predictions.of_tokens(params, batch, model=model)
    weights = predictions.apply(model, params, method="output_weights")

    def of_features(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_BTD, labels_BT = rows
        return _of_labels(project(x_BTD, weights, model.config), labels_BT)

    return _in_parts(of_features, (x_BTD, labels_BT), parts=split(logits_of_row))


def _in_parts(function: Callable[[Any], jax.Array], rows: Any, *, parts: int) -> jax.Array:
    """Returns `function(rows)`, computed in `parts` parts of the rows."""
    if parts == 1:
        return function(rows)
    of_parts = jax.lax.map(function, loss_in_parts.split_rows(rows, parts))
    return loss_in_parts.join_rows(of_parts)


def _of_labels(logits_BTV: jax.Array, labels_BT: jax.Array) -> jax.Array:
    """Returns the log-probability of each label, (B, T) float32; 0 for padding."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    label_BT = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)[..., 0]
    log_prob_BT = label_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
    return jnp.where(labels_BT == PAD, 0.0, log_prob_BT)


class TokenScorer:
    """Returns the log-probabilities of given ids, in batches of similar length.

    It compiles once for each shape of a batch. A text is padded to a length that depends on this
    text alone, so its scores do not depend on the texts beside it.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, tokens_per_batch: int):
        """
        Args:
          model: a causal model with a decoder, or an ensemble of such models.
          tokens_per_batch: target positions of a batch, padding included.
        """
        self._model, self._mesh = model, mesh
        self._has_source = model.config.architecture == "encoder_decoder"
        self._max_length: int = model.config.max_length
        self._tokens = tokens_per_batch
        self._rows_sharding, *_ = parallel.decoding_shardings(mesh)
        self._compiled: dict[tuple[int, int], Any] = {}

    def __call__(
        self,
        params: Params,
        labels: Sequence[np.ndarray],
        *,
        sources: Sequence[np.ndarray] | None = None,
        before: Sequence[int] | None = None,
    ) -> list[np.ndarray]:
        """Returns the log-probability of each label, float32 arrays.

        Args:
          labels: ids to predict, with the end symbol where it counts; at most `max_length`.
          sources: for an encoder-decoder, the ids of each source without the end symbol; at most
            `max_length` - 1, and at least 1.
          before: for a language model, the token before each first label; None: the start symbol.
        """
        found = [np.zeros(0, np.float32)] * len(labels)
        waiting = collections.deque[tuple[list[int], jax.Array]]()

        def read() -> None:
            chosen, log_prob_BT = waiting.popleft()
            for i, row_T in zip(chosen, np.asarray(log_prob_BT), strict=False):
                found[i] = row_T[: len(labels[i])]

        for length, chosen, rows in self._groups(labels, sources):
            batch = self._batch(labels, sources, before, chosen, shape=(rows, length))
            waiting.append((chosen, self._run(params, batch)))
            if len(waiting) > IN_FLIGHT:
                read()
        while waiting:
            read()
        return found

    def in_windows(
        self, params: Params, labels: Sequence[np.ndarray], *, windows: int, stride: int
    ) -> list[np.ndarray]:
        """Returns the log-probabilities of texts of any length, by a language model of windows.

        Args:
          labels: as when called, of any length.
          windows, stride: as in `text_blocks`.
        """
        blocks = [text_blocks(len(ids), windows=windows, stride=stride) for ids in labels]
        cut = [(ids, block) for ids, found in zip(labels, blocks, strict=True) for block in found]
        log_probs = self(
            params,
            [ids[first:stop] for ids, (first, _, stop) in cut],
            before=[BOS if first == 0 else int(ids[first - 1]) for ids, (first, *_) in cut],
        )
        counted = iter(
            scores[start - first :]
            for (_, (first, start, _)), scores in zip(cut, log_probs, strict=True)
        )
        empty = np.zeros(0, np.float32)
        return [np.concatenate([empty, *(next(counted) for _ in found)]) for found in blocks]

    def _groups(
        self, labels: Sequence[np.ndarray], sources: Sequence[np.ndarray] | None
    ) -> Iterator[tuple[int, list[int], int]]:
        """Yields the padded length of each batch, the indices of its texts, and its rows."""
        of_length = collections.defaultdict[int, list[int]](list)
        for i, ids in enumerate(labels):
            if len(ids):
                longest = max(len(ids), len(sources[i]) + 1 if sources is not None else 0)
                of_length[padded_length(longest, self._max_length)].append(i)
        options = {"tokens": self._tokens, "multiple": self._mesh.size}
        for length, indices in sorted(of_length.items(), reverse=True):
            while indices:
                rows = rows_for(length, **options, waiting=len(indices))
                if rows > len(indices):  # several small batches, and not one that is nearly empty
                    rows = rows_for(length, **options, waiting=1)
                yield length, indices[:rows], rows
                indices = indices[rows:]

    def _batch(
        self,
        labels: Sequence[np.ndarray],
        sources: Sequence[np.ndarray] | None,
        before: Sequence[int] | None,
        chosen: list[int],
        *,
        shape: tuple[int, int],
    ) -> dict[str, np.ndarray]:
        """Returns the batch of the chosen texts, and then unused rows."""
        rows, length = shape
        target_BT = np.full(shape, PAD, np.int32)
        for row_T, i in zip(target_BT, chosen, strict=False):
            row_T[: len(labels[i])] = labels[i]
        if sources is not None:
            texts = [sources[i] for i in chosen] + [EMPTY] * (rows - len(chosen))
            return {"source": pad_rows(texts, length), "target": target_BT}
        before_B = np.full(rows, BOS, np.int32)
        if before is not None:
            before_B[: len(chosen)] = [before[i] for i in chosen]
        return {"before": before_B, "target": target_BT}

    def _run(self, params: Params, batch: dict[str, np.ndarray]) -> jax.Array:
        """Returns the log-probabilities of a batch, (rows, length), without waiting for them."""
        arrays = parallel.shard_rows(batch, self._mesh)
        shape = batch["target"].shape
        if shape not in self._compiled:
            self._compiled[shape] = self._compile(params, arrays)
        return self._compiled[shape](params, arrays)

    def _compile(self, params: Params, batch: Batch) -> Any:
        """Returns the compiled pass for batches of this shape."""
        is_whole = all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))
        on_each_device = is_whole and self._mesh.size > 1
        shards = 1 if on_each_device else row_shards(self._mesh)
        compute: Any = functools.partial(token_log_probs, model=self._model, row_shards=shards)
        if on_each_device:
            compute = jax.shard_map(
                compute,
                mesh=self._mesh,
                in_specs=(WHOLE, ROWS),
                out_specs=ROWS,
                check_vma=False,  # the output of a kernel has no varying axes in its type
            )
        compute = compiled_for(compute, self._mesh, (DATA, FSDP), keeps_rows=True)
        jitted = jax.jit(compute, out_shardings=self._rows_sharding)
        options = parallel.compiler_options(self._mesh)
        return jitted.lower(params, batch).compile(compiler_options=options)


def text_blocks(length: int, *, windows: int, stride: int) -> list[tuple[int, int, int]]:
    """Returns the blocks of a text of `length` tokens: (first, first that counts, stop) each.

    The first block counts all its tokens, each further one its last `stride`. The tokens before
    them are context only.
    """
    found = [(0, 0, min(windows, length))] if length else []
    while found and (start := found[-1][2]) < length:
        stop = min(start + stride, length)
        found.append((max(0, stop - windows) if stride < windows else start, start, stop))
    return found
