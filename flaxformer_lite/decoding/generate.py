"""Greedy decoding: a model, its cache and the rule that the likeliest token comes next, in one jitted loop."""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_lite.data.tokenizer import BOS, EOS, PAD, cut_at_end, pad_rows


def greedy(
    model: nn.Module, params: dict, source_BS: jax.Array, *, max_extra_length: int, max_length: int
) -> jax.Array:
    """The likeliest token at each step, fed back until every row has ended: (B, T) ids, then padding.

    Args:
      source_BS: ids that end with the end symbol and then padding. A row of padding alone gives an empty row.
      max_extra_length: a row stops this many tokens after its source's length; section 6.1.
      max_length: T, at which every row stops.
    """
    batch, variables = source_BS.shape[0], {"params": params}
    limit_B = (source_BS != PAD).sum(axis=1) + max_extra_length
    memory_BSD = model.apply(variables, source_BS, method="encode")
    cache = model.apply(variables, memory_BSD, max_length, method="start_cache")

    def unfinished(state: tuple) -> jax.Array:
        index, _, ended_B, _, _ = state
        return (index < max_length) & ~ended_B.all()

    def one_token(state: tuple) -> tuple:
        index, token_B, ended_B, output_BT, cache = state
        logits_BV, cache = model.apply(variables, token_B, cache, index, source_BS, method="decode_step")
        token_B = jnp.where(ended_B, PAD, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32))
        output_BT = jax.lax.dynamic_update_slice_in_dim(output_BT, token_B[:, None], index, axis=1)
        ended_B = ended_B | (token_B == EOS) | (index + 1 >= limit_B)
        return index + 1, token_B, ended_B, output_BT, cache

    start_B = jnp.full((batch,), BOS, jnp.int32)
    empty_BT = jnp.full((batch, max_length), PAD, jnp.int32)
    ended_B = (source_BS == PAD).all(axis=1)
    return jax.lax.while_loop(unfinished, one_token, (jnp.int32(0), start_B, ended_B, empty_BT, cache))[3]


class Decoder:
    """Decodes any number of sources with one model, in batches of like length; compiles once a batch shape."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_extra_length: int,
        rows: int = 64,
        sharding: tuple[jax.sharding.Sharding, jax.sharding.Sharding] | None = None,
        compile_with: Callable[[Callable], Callable] = lambda compile: compile(),
    ):
        """
        Args:
          rows: sources decoded at once.
          sharding: of a batch of sources, and of the outputs (whole in every process); None: on one device.
          compile_with: runs a compilation, so that a caller can do it elsewhere and wait.
        """
        self._model, self._rows, self._sharding = model, rows, sharding
        self.max_length, self._max_extra_length = model.config.max_length, max_extra_length
        self._compile_with = compile_with
        self._compiled: dict[int, Callable] = {}

    def __call__(
        self,
        params: dict,
        sources: Sequence[np.ndarray],
        *,
        between_batches: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """The output ids of each source, in the order of `sources`; an empty source gives an empty output.

        Raises:
          ValueError: a source does not fit into the model's `max_length` tokens with its end symbol.
        """
        for number, ids in enumerate(sources):
            if len(ids) >= self.max_length:
                raise ValueError(
                    f"source {number}: {len(ids)} tokens, the model takes at most {self.max_length - 1}; "
                    "split it into shorter sentences."
                )
        outputs: list[np.ndarray] = [np.empty(0, np.int32)] * len(sources)
        order = sorted((i for i in range(len(sources)) if len(sources[i])), key=lambda i: len(sources[i]))
        for first in range(0, len(order), self._rows):
            part = order[first : first + self._rows]
            length = self._padded_length(len(sources[part[-1]]) + 1)
            unused = [np.empty(0, np.int32)] * (self._rows - len(part))
            source_BS = self._put(pad_rows([sources[i] for i in part] + unused, length))
            decoded_BT = np.asarray(self._compiled_for(params, source_BS)(params, source_BS))
            for i, row in zip(part, decoded_BT, strict=False):
                outputs[i] = cut_at_end(row)
            between_batches()
        return outputs

    def _padded_length(self, length: int) -> int:
        """The next of 16, 32, 64, ...: few lengths, so few compilations."""
        return min(self.max_length, max(16, 1 << (length - 1).bit_length()))

    def _put(self, source_BS: np.ndarray) -> jax.Array:
        if self._sharding is None:
            return jnp.asarray(source_BS)
        return jax.make_array_from_callback(source_BS.shape, self._sharding[0], lambda index: source_BS[index])

    def _compiled_for(self, params: dict, source_BS: jax.Array) -> Callable:
        length = source_BS.shape[1]
        if length not in self._compiled:
            longest = min(self.max_length, length + self._max_extra_length)
            options = {"max_extra_length": self._max_extra_length, "max_length": longest}
            decode = functools.partial(greedy, self._model, **options)
            jitted = jax.jit(decode, out_shardings=self._sharding and self._sharding[1])
            self._compiled[length] = self._compile_with(lambda: jitted.lower(params, source_BS).compile())
        return self._compiled[length]
