"""Decoding of any number of inputs, in batches of similar length."""

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from flaxformer_lite.checks.model_checks import check_method
from flaxformer_lite.data.tokens.tokenizer import cut_at_end, pad_rows
from flaxformer_lite.decoding import beam
from flaxformer_lite.decoding.compiled_decode import CompiledDecode, CompileWith, Shardings
from flaxformer_lite.decoding.constraints import Forbidden
from flaxformer_lite.field_rules import BEAMS
from flaxformer_lite.fields import EOS, DecodeConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.system.errors import InputError

EMPTY = np.empty(0, np.int32)


def padded_length(length: int, max_length: int) -> int:
    """Returns the next of 16, 24, 32, 48, 64, 96, ... up to `max_length`.

    There are few padded lengths, so few compilations.
    """
    power = max(16, 1 << (length - 1).bit_length())
    three_quarters = power // 4 * 3
    return min(max_length, three_quarters if max(16, length) <= three_quarters else power)


def rows_for(length: int, *, tokens: int, multiple: int, waiting: int) -> int:
    """Returns the rows of a batch padded to `length`: at most `tokens` positions.

    The rows are a multiple of `multiple`, and at least that. If only few inputs are `waiting`, a
    batch has an eighth of the positions, so that one sentence does not pay for hundreds of empty
    rows. So there are at most 2 shapes for each length.
    """
    most, few = (
        max(multiple, rows // multiple * multiple)
        for rows in (tokens // length, tokens // length // 8)
    )
    return few if waiting <= few else most


class Decoder:
    """Decodes any number of inputs with one model; compiles once for each shape of a batch.

    Inputs are sources for an encoder-decoder, and prompts for a language model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DecodeConfig,
        *,
        rows: int | None = None,
        rows_multiple: int = 1,
        sharding: Shardings | None = None,
        compile_with: CompileWith = lambda compile: compile(),
        within_texts: bool = False,
        forbidden: Forbidden = (),
    ):
        """
        Args:
          rows: inputs of each batch; None: by `config.tokens_per_batch`, see `rows_for`.
          rows_multiple: the rows of a batch are a multiple of this, so that devices can share them.
          sharding: of a batch of inputs; of logits to sample from, if devices share the model; of
            the outputs, whole in every process. None: one device.
          compile_with: runs a compilation, so that a caller can run it elsewhere and wait.
          within_texts: whether prompts of 1 token or more continue without a start symbol, see
            `continuation`.
          forbidden: sequences of ids that no output contains: those of `config.forbidden`.

        Raises:
          InputError: the model cannot decode by `config.method`.
        """
        check_method(model.config, config)
        self._config, self._within_texts = config, within_texts
        self._decodes_sources = model.config.architecture == "encoder_decoder"
        self.max_length: int = model.config.max_length
        self._rows_for = self._rule_of_rows(rows, rows_multiple)
        shardings: Sequence[NamedSharding | None] = sharding or (None, None, None)
        self._batch_sharding, _, output_sharding = shardings
        self._gather = jax.jit(lambda output: output, out_shardings=output_sharding)
        self._compiled = CompiledDecode(
            model, config, sharding=sharding, compile_with=compile_with, forbidden=forbidden
        )

    def __call__(
        self,
        params: Params,
        inputs: Sequence[np.ndarray],
        *,
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
        between_batches: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """Returns the output ids of each input, in the order of `inputs`.

        An empty source has an empty output.

        Args:
          prefixes: for an encoder-decoder, the first ids of each output.
          numbers: 0 or more; the random samples of each input depend on its number. None: 0, 1, ...
          between_batches: called after each batch.

        Raises:
          InputError: an input, or a prefix, does not fit into the model's `max_length` tokens with
            its end symbol; or there are prefixes, and the method is 'mask_predict'.
        """
        outputs = [EMPTY] * len(inputs)
        for chosen, decoded_BT in self._batches(params, inputs, prefixes, numbers=numbers):
            for i, row in zip(chosen, decoded_BT, strict=False):
                outputs[i] = cut_at_end(row)
            between_batches()
        return outputs

    def with_ends(
        self,
        params: Params,
        inputs: Sequence[np.ndarray],
        *,
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[tuple[np.ndarray, bool]]:
        """Returns the output ids of each input, and whether the end symbol followed them.

        An output that was cut at the limit of its length has none, and neither has the empty output
        of an empty source. Arguments as when called.
        """
        outputs = [(EMPTY, False)] * len(inputs)
        for chosen, decoded_BT in self._batches(params, inputs, prefixes, numbers=numbers):
            for i, row in zip(chosen, decoded_BT, strict=False):
                outputs[i] = cut_at_end(row), bool((row == EOS).any())
        return outputs

    def n_best(
        self,
        params: Params,
        inputs: Sequence[np.ndarray],
        n: int,
        *,
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> list[list[tuple[np.ndarray, float]]]:
        """Returns the n best outputs of each input with their scores, best first, by beam search.

        There may be fewer than n. An empty source has one output, the empty one, with score 0. See
        `methods.beam_search` for the scores. Arguments as when called.

        Raises:
          InputError: as when called; or the method is no beam search, or the beam is smaller than
            n.
        """
        if self._config.method not in BEAMS:
            needed = " or ".join(f"decode.method={method!r}" for method in BEAMS)
            raise InputError(
                f"n_best: requires {needed}, and it is {self._config.method!r}; set one of them."
            )
        if not 1 <= n <= self._config.beam_size:
            raise InputError(
                f"n_best: expected 1 to {self._config.beam_size} (decode.beam_size), got {n}; "
                "widen the beam for more."
            )
        outputs = [[(EMPTY, 0.0)] for _ in inputs]
        for chosen, (decoded_BNT, score_BN) in self._batches(
            params, inputs, prefixes, numbers=numbers, n=n
        ):
            for i, texts, scores in zip(chosen, decoded_BNT, score_BN, strict=False):
                outputs[i] = [
                    (cut_at_end(text), float(score))
                    for text, score in zip(texts, scores, strict=True)
                    if score > beam.NONE
                ]
        return outputs

    def rows(self, length: int) -> int:
        """Returns the inputs of a full batch that is padded to `length`."""
        return self._rows_for(length, waiting=sys.maxsize)

    def compile(self, params: Params, rows: int, length: int) -> Callable[..., Any]:
        """Returns the compiled function for batches of `rows` inputs padded to `length`.

        `params`: abstract arrays with their shardings.
        """
        batch = [
            jax.ShapeDtypeStruct(shape, np.int32, sharding=self._batch_sharding)
            for shape in ((rows, length), (rows,))
        ]
        return self._compiled(params, batch, None)

    def _rule_of_rows(self, rows: int | None, multiple: int) -> Callable[..., int]:
        """Returns the function that maps a padded length to the rows of a batch."""
        if rows is not None:
            return lambda length, *, waiting: rows
        config = self._config
        sizes = dict.fromkeys(BEAMS, config.beam_size) | {"mask_predict": config.length_candidates}
        tokens = config.tokens_per_batch // sizes.get(config.method, 1)
        return functools.partial(rows_for, tokens=tokens, multiple=multiple)

    def _batches(
        self,
        params: Params,
        inputs: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None,
        *,
        numbers: Sequence[int] | None = None,
        n: int | None = None,
    ) -> Iterator[tuple[list[int], Any]]:
        """Yields the indices of the inputs of each batch, and the output of `CompiledDecode`."""
        self._check(inputs, prefixes)
        numbers = range(len(inputs)) if numbers is None else numbers
        for chosen, rows in self._groups(inputs):
            batch = [
                self._padded(inputs, chosen, rows, end=self._decodes_sources),
                np.array([numbers[i] for i in chosen] + [-1] * (rows - len(chosen)), np.int32),
            ]
            if prefixes is not None:
                batch.append(self._padded(prefixes, chosen, rows, end=False))
            within_text = self._within_texts and len(inputs[chosen[0]]) > 0
            yield chosen, self._run(params, batch, n, within_text)

    def _check(self, inputs: Sequence[np.ndarray], prefixes: Sequence[np.ndarray] | None) -> None:
        if prefixes is not None and self._config.method == "mask_predict":
            raise InputError(
                "prefixes: decode.method='mask_predict' predicts all tokens at once; "
                "leave them out."
            )
        advice = {"input": "split it into shorter ones", "prefix": "shorten it"}
        for name, rows in (("input", inputs), ("prefix", prefixes or ())):
            for number, ids in enumerate(rows):
                if len(ids) >= self.max_length:
                    raise InputError(
                        f"{name} {number}: {len(ids)} tokens, the model takes at most "
                        f"{self.max_length - 1}; {advice[name]}."
                    )

    def _groups(self, inputs: Sequence[np.ndarray]) -> Iterator[tuple[list[int], int]]:
        """Yields the indices of the inputs of each batch, longest inputs first, and its rows.

        Prompts within texts are not in a batch with empty prompts, which start texts.
        """
        indices = [i for i in range(len(inputs)) if len(inputs[i]) or not self._decodes_sources]
        indices.sort(key=lambda i: len(inputs[i]), reverse=True)
        while indices:
            length = padded_length(len(inputs[indices[0]]) + 1, self.max_length)
            rows = self._rows_for(length, waiting=len(indices))
            chosen = indices[:rows]
            if self._within_texts and len(inputs[chosen[0]]):
                chosen = [i for i in chosen if len(inputs[i])]
            yield chosen, rows
            indices = indices[len(chosen) :]

    def _padded(
        self, texts: Sequence[np.ndarray], chosen: list[int], rows: int, *, end: bool
    ) -> np.ndarray:
        """Returns the ids of the chosen texts, (rows, length), and then unused rows."""
        texts = [texts[i] for i in chosen] + [EMPTY] * (rows - len(chosen))
        return pad_rows(texts, padded_length(max(map(len, texts)) + 1, self.max_length), end=end)

    def _run(
        self, params: Params, batch: list[np.ndarray], n: int | None, within_text: bool
    ) -> Any:
        """Returns the outputs of a batch, on the host and in the order of its rows."""
        rows = len(batch[0])
        device_rows = rows
        if self._batch_sharding is not None:
            (device_rows,) = self._batch_sharding.shard_shape((rows,))
        # Devices take turns, longest input first, so that all devices get similar lengths.
        order = np.arange(rows).reshape(device_rows, -1).T.ravel()
        arrays = [self._on_devices(array[order]) for array in batch]
        run = self._compiled(params, arrays, n, within_text=within_text)
        output = run(params, *arrays)
        if jax.process_count() > 1:
            # A gather that waits for 1 minute fails, so it starts when all devices have finished.
            output = self._gather(jax.block_until_ready(output))
        return jax.tree.map(operator.itemgetter(np.argsort(order)), jax.device_get(output))

    def _on_devices(self, array: np.ndarray) -> jax.Array:
        if self._batch_sharding is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(
            array.shape, self._batch_sharding, lambda index: array[index]
        )
