"""Decoding of many inputs: in batches of similar length, each shape of which is compiled once."""

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxformer_lite.config import DecodeConfig, check_method
from flaxformer_lite.data.tokens.tokenizer import cut_at_end, pad_rows
from flaxformer_lite.decoding import beam, methods
from flaxformer_lite.decoding.masked import decode_masked
from flaxformer_lite.decoding.task import continuation, translation, with_whole_rows
from flaxformer_lite.model.devices import compiled_for
from flaxformer_lite.system.errors import InputError


def padded_length(length: int, max_length: int) -> int:
    """Returns the next of 16, 24, 32, 48, 64, 96, ... up to `max_length`: few lengths, so few compilations."""
    power = max(16, 1 << (length - 1).bit_length())
    three_quarters = power // 4 * 3
    return min(max_length, three_quarters if max(16, length) <= three_quarters else power)


def rows_for(length: int, *, tokens: int, multiple: int, waiting: int) -> int:
    """Returns the rows of a batch of this padded length: a multiple of `multiple` within `tokens` positions, or one.

    If few inputs are `waiting`, an eighth of that: one sentence need not pay for hundreds of empty rows. So each length
    has at most two shapes.
    """
    most, few = (max(multiple, rows // multiple * multiple) for rows in (tokens // length, tokens // length // 8))
    return few if waiting <= few else most


class Decoder:
    """Decodes any number of inputs with one model, in batches of similar length; compiles once a batch shape.

    Inputs are sources for an encoder-decoder, and prompts for a language model.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DecodeConfig,
        *,
        rows: int | None = None,
        rows_multiple: int = 1,
        sharding: tuple[NamedSharding, NamedSharding, NamedSharding] | None = None,
        compile_with: Callable[[Callable], Callable] = lambda compile: compile(),
    ):
        """
        Args:
          rows: inputs decoded at once; None: what `config.tokens_per_batch` holds, see `rows_for`.
          rows_multiple: the rows of a batch are a multiple of this, so that devices can share them.
          sharding: of a batch of inputs; of logits to sample from, where devices share the model; of the outputs,
            whole in every process. None: on one device.
          compile_with: runs a compilation, so that a caller can do it elsewhere and wait.
        """
        check_method(model.config, config)
        self._model, self._config = model, config
        self._batch_sharding, self._logits_sharding, self._output_sharding = sharding or (None, None, None)
        hypotheses = {"beam": config.beam_size, "mask_predict": config.length_candidates}.get(config.method, 1)
        options = {"tokens": config.tokens_per_batch // hypotheses, "multiple": rows_multiple}
        self._rows_for = functools.partial(rows_for, **options) if rows is None else lambda length, *, waiting: rows
        self._gather = jax.jit(lambda output: output, out_shardings=self._output_sharding)
        self._translates = model.config.architecture == "encoder_decoder"
        self.max_length = model.config.max_length
        self._compile_with = compile_with
        self._compiled: dict[tuple, Callable] = {}

    def __call__(
        self,
        params: dict,
        inputs: Sequence[np.ndarray],
        *,
        prefixes: Sequence[np.ndarray] | None = None,
        numbers: Sequence[int] | None = None,
        between_batches: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """Returns the output ids of each input, in the order of `inputs`; an empty source has an empty output.

        Args:
          prefixes: of an encoder-decoder, what the output of each input begins with.
          numbers: what the random samples of each input depend on, 0 or more; None: 0, 1, 2, ...

        Raises:
          InputError: an input, or a prefix, does not fit into the model's `max_length` tokens with its end symbol.
        """
        outputs: list[np.ndarray] = [np.empty(0, np.int32)] * len(inputs)
        for part, decoded_BT in self._batches(params, inputs, prefixes, numbers=numbers):
            for i, row in zip(part, np.asarray(decoded_BT), strict=False):
                outputs[i] = cut_at_end(row)
            between_batches()
        return outputs

    def n_best(
        self, params: dict, inputs: Sequence[np.ndarray], n: int, *, prefixes: Sequence[np.ndarray] | None = None
    ) -> list[list[tuple[np.ndarray, float]]]:
        """Returns the n best outputs of each input with their scores, best first, by beam search; or all there are.

        An empty source has one output, the empty one, with the score 0.

        Raises:
          InputError: as when called; or the method is not 'beam', or the beam holds fewer than n.
        """
        if self._config.method != "beam":
            raise InputError(
                f"n_best: goes with decode.method='beam' only, and it is {self._config.method!r}; set that."
            )
        if not 1 <= n <= self._config.beam_size:
            raise InputError(
                f"n_best: expected 1 to {self._config.beam_size} (decode.beam_size), got {n}; widen the beam for more."
            )
        outputs = [[(np.empty(0, np.int32), 0.0)] for _ in inputs]
        for part, (decoded_BNT, score_BN) in self._batches(params, inputs, prefixes, n):
            for i, rows, scores in zip(part, np.asarray(decoded_BNT), np.asarray(score_BN), strict=False):
                exist = scores > beam.NONE
                outputs[i] = [(cut_at_end(row), float(s)) for row, s in zip(rows[exist], scores[exist], strict=True)]
        return outputs

    def _batches(
        self,
        params: dict,
        inputs: Sequence[np.ndarray],
        prefixes: Sequence[np.ndarray] | None,
        n: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[int], Any]]:
        """Batch by batch, the longest inputs first: the numbers of its inputs, and their outputs."""
        if prefixes is not None and self._config.method == "mask_predict":
            raise InputError("prefixes: decode.method='mask_predict' writes all tokens at once; leave them out.")
        numbers = range(len(inputs)) if numbers is None else numbers
        self._check("input", inputs, "split it into shorter ones")
        self._check("prefix", prefixes or (), "shorten it")
        wanted = [i for i in range(len(inputs)) if len(inputs[i]) or not self._translates]
        order = sorted(wanted, key=lambda i: len(inputs[i]), reverse=True)
        while order:
            rows = self._rows_for(padded_length(len(inputs[order[0]]) + 1, self.max_length), waiting=len(order))
            part, order = order[:rows], order[rows:]
            unused = [np.empty(0, np.int32)] * (rows - len(part))
            batch = [self._padded([inputs[i] for i in part] + unused, end=self._translates)]
            batch.append(np.array([numbers[i] for i in part] + [-1] * len(unused), np.int32))
            if prefixes is not None:
                batch.append(self._padded([prefixes[i] for i in part] + unused, end=False))
            # Distributed one by one over the devices, so that each has as many long ones as the others.
            dealt = np.arange(rows).reshape(self._rows_of_device(rows), -1).T.ravel()
            batch = [self._put(array[dealt]) for array in batch]
            output = self._on_host(self._program(params, batch, n)(params, *batch))
            yield part, jax.tree.map(operator.itemgetter(np.argsort(dealt)), output)

    def _check(self, name: str, rows: Sequence[np.ndarray], advice: str) -> None:
        for number, ids in enumerate(rows):
            if len(ids) >= self.max_length:
                raise InputError(
                    f"{name} {number}: {len(ids)} tokens, the model takes at most {self.max_length - 1}; {advice}."
                )

    def _padded(self, rows: list[np.ndarray], *, end: bool) -> np.ndarray:
        longest = max(len(ids) for ids in rows)
        return pad_rows(rows, padded_length(longest + 1, self.max_length), end=end)

    def _put(self, array: np.ndarray) -> jax.Array:
        if self._batch_sharding is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, self._batch_sharding, lambda index: array[index])

    def _rows_of_device(self, rows: int) -> int:
        return rows if self._batch_sharding is None else self._batch_sharding.shard_shape((rows,))[0]

    def _on_host(self, output: Any) -> Any:
        """All rows, in every process.

        They are gathered once all devices have finished: a gather gives up after a minute of waiting.
        """
        if jax.process_count() > 1:
            output = self._gather(jax.block_until_ready(output))
        return jax.device_get(output)

    def rows(self, length: int) -> int:
        """Returns the inputs of a full batch that is padded to `length`."""
        return self._rows_for(length, waiting=sys.maxsize)

    def compile(self, params: dict, rows: int, length: int) -> Callable:
        """Returns the program for batches of `rows` inputs padded to `length`.

        `params`: shapes with their shardings.
        """
        shapes = [(rows, length), (rows,)]
        batch = [jax.ShapeDtypeStruct(shape, np.int32, sharding=self._batch_sharding) for shape in shapes]
        return self._program(params, batch, None)

    def _program(self, params: dict, batch: list[jax.Array], n: int | None) -> Callable:
        """The program for batches of this shape: the best ids of each row, or with n the n best and their scores."""
        independent = self._devices_are_independent(params)
        key = (independent, n, *(array.shape for array in batch))
        if key not in self._compiled:
            decode = self._decode_function(batch, n, None if independent else self._logits_sharding)
            if self._batch_sharding is not None:
                (rows, *_), mesh = self._batch_sharding.spec, self._batch_sharding.mesh
                decode = compiled_for(decode, mesh, rows if isinstance(rows, tuple) else (rows,))
            if independent:
                jitted = jax.jit(self._by_devices(decode, batch))
            else:
                jitted = jax.jit(decode, out_shardings=self._output_sharding)
            self._compiled[key] = self._compile_with(lambda: jitted.lower(params, *batch).compile())
        return self._compiled[key]

    def _decode_function(
        self, batch: list[jax.Array], n: int | None, logits_sharding: NamedSharding | None
    ) -> Callable:
        """`decode(params, *batch)` for batches of this shape."""
        model, config = self._model, self._config
        longest = max(array.shape[1] for array in batch if array.ndim == 2)
        most = min(longest + config.max_extra_length, self.max_length)
        if config.method == "mask_predict":
            return lambda params, source_BS, row_B: decode_masked(model, config, params, source_BS, max_length=most)
        capacities = (longest, most) if longest < most else (most,)  # most outputs are not longer than their inputs
        make_task = translation if self._translates else continuation

        def decode(params: dict, *batch: jax.Array) -> Any:
            task = make_task(model, config, params, *batch)
            if config.method == "sample":
                task = with_whole_rows(task, logits_sharding)
            if n is None:
                return methods.decode(task, config, capacities=capacities)
            return methods.beam_search(task, config, n_best=n, capacities=capacities)

        return decode

    def _devices_are_independent(self, params: dict) -> bool:
        """Whether every device has the whole model: then each decodes its own rows, without communication.

        Else the compiler splits each step, and the devices agree after each whether there is another.
        """
        arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
        return self._batch_sharding is not None and all(x.sharding.is_fully_replicated for x in arrays)

    def _by_devices(self, decode: Callable, batch: list[jax.Array]) -> Callable:
        """`decode(params, *batch)`, run by each device on its own rows."""
        mesh, rows = self._batch_sharding.mesh, self._batch_sharding.spec
        specs = {"in_specs": (PartitionSpec(), *[rows] * len(batch)), "out_specs": rows}
        # The check would ask that initial values differ between devices, and they are the same on all.
        return jax.shard_map(decode, mesh=mesh, **specs, check_vma=False)
