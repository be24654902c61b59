"""Writing token by token: a model, its cache and the rule that picks the next token, in one jitted loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_lite.config import DecodeConfig
from flaxformer_lite.data.tokenizer import BOS, EOS, PAD, UNK, cut_at_end, pad_rows
from flaxformer_lite.decoding import sampling

Pick = Callable[[jax.Array, jax.Array], jax.Array]  # (logits_BV, index) -> token_B


def write(
    next_logits: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
    cache: Any,
    pick: Pick,
    *,
    prompt_BP: jax.Array,
    limit_B: jax.Array,
    max_length: int,
) -> jax.Array:
    """Picks tokens one after another until every row has ended: (B, max_length) ids, then padding.

    Args:
      next_logits: (token_B, cache, index) -> (logits_BV, cache), for the token that stands at position `index`.
      prompt_BP: ids that a row begins with, then padding.
      limit_B: tokens at which a row ends without an end symbol; 0: an unused row.
    """

    def unfinished(state: tuple) -> jax.Array:
        index, _, ended_B, _, _ = state
        return (index < max_length) & ~ended_B.all()

    def one_token(state: tuple) -> tuple:
        index, token_B, ended_B, output_BT, cache = state
        logits_BV, cache = next_logits(token_B, cache, index)
        given_B = jax.lax.dynamic_index_in_dim(prompt_BT, index, axis=1, keepdims=False)
        token_B = jnp.where(given_B != PAD, given_B, pick(logits_BV, index))
        token_B = jnp.where(ended_B, PAD, token_B)
        output_BT = jax.lax.dynamic_update_slice_in_dim(output_BT, token_B[:, None], index, axis=1)
        ended_B = ended_B | (token_B == EOS) | (index + 1 >= limit_B)
        return index + 1, token_B, ended_B, output_BT, cache

    batch, prompt_length = prompt_BP.shape
    prompt_BT = jnp.pad(prompt_BP, ((0, 0), (0, max_length - prompt_length)), constant_values=PAD)
    start_B = jnp.full((batch,), BOS, jnp.int32)
    empty_BT = jnp.full((batch, max_length), PAD, jnp.int32)
    return jax.lax.while_loop(unfinished, one_token, (jnp.int32(0), start_B, limit_B <= 0, empty_BT, cache))[3]


def make_pick(config: DecodeConfig, row_B: jax.Array) -> Pick:
    """The rule of `config.method`; draws are a function of (config.seed, index of the token, row)."""
    if config.method == "greedy":
        return lambda logits_BV, index: sampling.greedy(logits_BV)
    options = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    key = jax.random.key(config.seed)

    def pick(logits_BV: jax.Array, index: jax.Array) -> jax.Array:
        logits_BV = logits_BV.at[:, np.array([PAD, BOS, UNK])].set(-jnp.inf)  # no text holds them
        return sampling.sample(logits_BV, jax.random.fold_in(key, index), row_B, **options)

    return pick


def translate(
    model: nn.Module, config: DecodeConfig, params: dict, source_BS: jax.Array, row_B: jax.Array, *, max_length: int
) -> jax.Array:
    """What an encoder-decoder writes for each source: (B, T) ids, then padding.

    Args:
      source_BS: ids that end with the end symbol and then padding. A row of padding alone gives an empty row.
      row_B: a number for each row, which its random draws depend on.
      max_length: T, at which every row stops, if not `config.max_extra_length` tokens after its source (section 6.1).
    """
    variables = {"params": params}
    length_B = (source_BS != PAD).sum(axis=1)
    return write(
        lambda token_B, cache, index: model.apply(variables, token_B, cache, index, source_BS, method="decode_step"),
        model.apply(variables, source_BS, max_length, method="start_cache"),
        make_pick(config, row_B),
        prompt_BP=jnp.zeros((source_BS.shape[0], 0), jnp.int32),
        limit_B=jnp.where(length_B > 0, length_B + config.max_extra_length, 0),
        max_length=max_length,
    )


def continue_text(
    model: nn.Module, config: DecodeConfig, params: dict, prompt_BP: jax.Array, row_B: jax.Array, *, max_length: int
) -> jax.Array:
    """What a language model writes after each prompt, the prompt included: (B, T) ids, then padding.

    Args:
      prompt_BP: ids and then padding; a row of padding alone begins from nothing.
      row_B: a number for each row, which its random draws depend on; -1 leaves the row empty.
      max_length: T, at which every row stops, if not `config.max_extra_length` tokens after its prompt.
    """
    variables = {"params": params}
    limit_B = (prompt_BP != PAD).sum(axis=1) + config.max_extra_length
    return write(
        lambda token_B, cache, index: model.apply(variables, token_B, cache, index, method="decode_step"),
        model.apply(variables, prompt_BP.shape[0], max_length, method="start_cache"),
        make_pick(config, row_B),
        prompt_BP=prompt_BP,
        limit_B=jnp.where(row_B >= 0, limit_B, 0),
        max_length=max_length,
    )


def padded_length(length: int, max_length: int) -> int:
    """The next of 16, 32, 64, ... up to `max_length`: few lengths, so few compilations."""
    return min(max_length, max(16, 1 << (length - 1).bit_length()))


class Decoder:
    """Decodes any number of inputs with one model, in batches of like length; compiles once a batch shape.

    Inputs are sources for an encoder-decoder, and prompts for a language model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DecodeConfig,
        *,
        rows: int = 64,
        sharding: tuple[jax.sharding.Sharding, jax.sharding.Sharding] | None = None,
        compile_with: Callable[[Callable], Callable] = lambda compile: compile(),
    ):
        """
        Args:
          rows: inputs decoded at once.
          sharding: of a batch of inputs, and of the outputs (whole in every process); None: on one device.
          compile_with: runs a compilation, so that a caller can do it elsewhere and wait.
        """
        self._model, self._config, self._rows, self._sharding = model, config, rows, sharding
        self._translates = model.config.architecture == "encoder_decoder"
        self.max_length = model.config.max_length
        self._compile_with = compile_with
        self._compiled: dict[int, Callable] = {}

    def __call__(
        self,
        params: dict,
        inputs: Sequence[np.ndarray],
        *,
        between_batches: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """The output ids of each input, in the order of `inputs`; an empty source gives an empty output.

        Raises:
          ValueError: an input does not fit into the model's `max_length` tokens with its end symbol.
        """
        for number, ids in enumerate(inputs):
            if len(ids) >= self.max_length:
                raise ValueError(
                    f"input {number}: {len(ids)} tokens, the model takes at most {self.max_length - 1}; "
                    "split it into shorter ones."
                )
        outputs: list[np.ndarray] = [np.empty(0, np.int32)] * len(inputs)
        wanted = [i for i in range(len(inputs)) if len(inputs[i]) or not self._translates]
        order = sorted(wanted, key=lambda i: len(inputs[i]))
        for first in range(0, len(order), self._rows):
            part = order[first : first + self._rows]
            length = padded_length(len(inputs[part[-1]]) + 1, self.max_length)
            unused = [np.empty(0, np.int32)] * (self._rows - len(part))
            ids_BL = pad_rows([inputs[i] for i in part] + unused, length, end=self._translates)
            row_B = np.array(part + [-1] * len(unused), np.int32)
            batch = self._put(ids_BL), self._put(row_B)
            decoded_BT = np.asarray(self._compiled_for(params, *batch)(params, *batch))
            for i, row in zip(part, decoded_BT, strict=False):
                outputs[i] = cut_at_end(row)
            between_batches()
        return outputs

    def _put(self, array: np.ndarray) -> jax.Array:
        if self._sharding is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, self._sharding[0], lambda index: array[index])

    def _compiled_for(self, params: dict, ids_BL: jax.Array, row_B: jax.Array) -> Callable:
        length = ids_BL.shape[1]
        if length not in self._compiled:
            longest = min(self.max_length, length + self._config.max_extra_length)
            method = translate if self._translates else continue_text
            decode = functools.partial(method, self._model, self._config, max_length=longest)
            jitted = jax.jit(decode, out_shardings=self._sharding and self._sharding[1])
            self._compiled[length] = self._compile_with(lambda: jitted.lower(params, ids_BL, row_B).compile())
        return self._compiled[length]
