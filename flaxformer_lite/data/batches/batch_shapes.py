"""Shapes of batches, from the config alone, so that a step can be compiled before data is read."""

import jax
import numpy as np

from flaxformer_lite.config import Config
from flaxformer_lite.data.batches.batching import bucket_rows


def possible(config: Config) -> list[tuple[int, int]]:
    """Returns the (rows, length) of all buckets of `config.data`.

    With packing, or with `num_buckets` chosen from the data, only the longest bucket is known.
    """
    data = config.data
    buckets = data.buckets if data.num_buckets is None and not data.packing else data.buckets[-1:]
    rows = bucket_rows(
        buckets, tokens_per_batch=data.tokens_per_batch, rows_multiple=data.rows_multiple
    )
    return list(zip(rows, buckets, strict=True))


def struct(config: Config, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and types of a batch of `loader.Batches`."""
    names = {
        "encoder_decoder": ["source", "target"],
        "encoder_classifier": ["source"],
        "decoder_lm": ["target"],
    }[config.model.architecture]
    if config.data.packing:
        names += [f"{name}_segment" for name in names]
    batch = {name: jax.ShapeDtypeStruct((rows, length), np.int32) for name in names}
    by_row = ("row", "label") if config.model.architecture == "encoder_classifier" else ("row",)
    return batch | {name: jax.ShapeDtypeStruct((rows,), np.int32) for name in by_row}
