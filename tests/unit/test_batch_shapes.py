"""Shapes of batches from the config alone; test_pipeline.py compares them with real batches."""

import numpy as np
import pytest

from flaxformer_lite.config import Config, DataConfig, ModelConfig
from flaxformer_lite.data.batches import loader


def config_of(architecture="encoder_decoder", **data):
    return Config(model=ModelConfig(architecture=architecture), data=DataConfig(**data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, [(17, 13), (4, 50)]),
        ({"rows_multiple": 4}, [(16, 13), (4, 50)]),
        ({"num_buckets": 3}, [(4, 50)]),  # the shorter ones are chosen from the data
        ({"packing": True}, [(4, 50)]),
    ],
)
def test_a_batch_has_the_most_rows_within_its_tokens(data, expected):
    options = {"buckets": (13, 50), "tokens_per_batch": 222, "rows_multiple": 1} | data
    assert loader.possible_shapes(config_of(**options)) == expected


@pytest.mark.parametrize(
    ("architecture", "packing", "names", "a_row"),
    [
        ("encoder_decoder", False, {"source", "target"}, {"row"}),
        (
            "encoder_decoder",
            True,
            {"source", "source_segment", "target", "target_segment"},
            {"row"},
        ),
        ("encoder_classifier", False, {"source"}, {"row", "label"}),
        ("decoder_lm", True, {"target", "target_segment"}, {"row"}),
    ],
)
def test_a_batch_has_the_arrays_of_its_model(architecture, packing, names, a_row):
    struct = loader.batch_struct(config_of(architecture, packing=packing), 7, 5)
    assert {name: x.shape for name, x in struct.items()} == dict.fromkeys(
        names, (7, 5)
    ) | dict.fromkeys(a_row, (7,))
    assert {x.dtype for x in struct.values()} == {np.dtype(np.int32)}
