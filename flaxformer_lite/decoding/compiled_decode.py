"""The function that decodes one batch, compiled for each shape of a batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxformer_lite.decoding import methods
from flaxformer_lite.decoding.constraints import Forbidden
from flaxformer_lite.decoding.mask_predict import decode_masked
from flaxformer_lite.decoding.task import Task, continuation, translation, with_whole_rows
from flaxformer_lite.field_rules import RANDOM
from flaxformer_lite.fields import DecodeConfig
from flaxformer_lite.model.devices import compiled_for
from flaxformer_lite.model.parameters import Params

Shardings = tuple[NamedSharding, NamedSharding, NamedSharding]
CompileWith = Callable[[Callable[[], Any]], Callable[..., Any]]
Arrays = Sequence[jax.Array | jax.ShapeDtypeStruct]


class CompiledDecode:
    """Compiles `decode(params, *batch)` of one model, once for each shape of a batch.

    A batch is arrays of ids (rows, length), and the number of each row, (rows,):
    [inputs, numbers] or [inputs, numbers, prefixes].
    """

    def __init__(
        self,
        model: nn.Module,
        config: DecodeConfig,
        *,
        sharding: Shardings | None,
        compile_with: CompileWith,
        forbidden: Forbidden = (),
    ):
        """See `Decoder` for the arguments."""
        self._forbidden = forbidden
        self._model, self._config, self._compile_with = model, config, compile_with
        shardings: Sequence[NamedSharding | None] = sharding or (None, None, None)
        self._batch_sharding, self._logits_sharding, self._output_sharding = shardings
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(
        self, params: Params, batch: Arrays, n: int | None, *, within_text: bool = False
    ) -> Callable[..., Any]:
        """Returns the compiled function for arrays, or abstract arrays, of these shapes.

        Its output is the ids of each row, (rows, length); with `n`, the n best ids,
        (rows, n, length), and their scores, (rows, n). `within_text`: as in `continuation`.
        """
        independent = self._devices_are_independent(params)
        key = (independent, n, within_text, *(array.shape for array in batch))
        if key not in self._compiled:
            sharding = None if independent else self._logits_sharding
            decode = self._decode_function(batch, n, sharding, within_text)
            if self._batch_sharding is not None:
                (rows, *_), mesh = self._batch_sharding.spec, self._batch_sharding.mesh
                assert isinstance(mesh, Mesh), "decoding has no abstract meshes"
                decode = compiled_for(decode, mesh, rows if isinstance(rows, tuple) else (rows,))
            if independent and self._batch_sharding is not None:
                each_device = _on_each_device(decode, len(batch), self._batch_sharding)
                jitted = jax.jit(each_device)
            else:
                jitted = jax.jit(decode, out_shardings=self._output_sharding)
            self._compiled[key] = self._compile_with(lambda: jitted.lower(params, *batch).compile())
        return self._compiled[key]

    def _decode_function(
        self,
        batch: Arrays,
        n: int | None,
        logits_sharding: NamedSharding | None,
        within_text: bool,
    ) -> Callable[..., Any]:
        """Returns `decode(params, *batch)` for batches of this shape."""
        model, config, forbidden = self._model, self._config, self._forbidden
        longest = max(array.shape[1] for array in batch if array.ndim == 2)
        most = min(longest + config.max_extra_length, model.config.max_length)
        if config.method == "mask_predict":
            return lambda params, source_BS, row_B: decode_masked(
                model, config, params, source_BS, max_length=most
            )
        # Most outputs are not longer than their inputs.
        capacities = (longest, most) if longest < most else (most,)
        translates = model.config.architecture == "encoder_decoder"
        continued = functools.partial(continuation, within_text=within_text)
        make_task: Callable[..., Task] = translation if translates else continued

        def decode(params: Params, *batch: jax.Array) -> Any:
            task = make_task(model, config, params, *batch)
            if config.method in RANDOM:
                task = with_whole_rows(task, logits_sharding)
            if n is None:
                return methods.decode(task, config, capacities=capacities, forbidden=forbidden)
            return methods.beam_search(
                task, config, n_best=n, capacities=capacities, forbidden=forbidden
            )

        return decode

    def _devices_are_independent(self, params: Params) -> bool:
        """Whether every device holds the whole model, and so decodes its rows by itself.

        Otherwise the compiler splits each step, and after each step the devices communicate whether
        there is another one.
        """
        arrays = [
            x for x in jax.tree.leaves(params) if isinstance(x, jax.Array | jax.ShapeDtypeStruct)
        ]
        return self._batch_sharding is not None and all(
            x.sharding.is_fully_replicated for x in arrays
        )


def _on_each_device(
    decode: Callable[..., Any], arrays: int, sharding: NamedSharding
) -> Callable[..., Any]:
    """Returns `decode(params, *arrays)` as a function that each device runs on its own rows."""
    return jax.shard_map(
        decode,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(), *[sharding.spec] * arrays),
        out_specs=sharding.spec,
        check_vma=False,  # it would require that the initial values of loops differ between devices
    )
