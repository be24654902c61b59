"""Fields that contradict windows and whole files, or have no effect there, are refused by name."""

import pytest

from flaxformer_lite.config import default_config, resolve
from flaxformer_lite.system.errors import InputError

LM = {"model.architecture": "decoder_lm"}
WINDOWS = {**LM, "data.windows": 67}
WHOLE = {
    **LM,
    "data.dataset": "plain_text",
    "data.train_files": ("a.txt",),
    "data.whole_files": True,
}


def resolved(fields):
    config = default_config()
    for name, value in fields.items():
        section, field = name.split(".")
        config[section][field] = value
    return resolve(config)


def test_windows_set_the_length_of_rows_in_place_of_the_buckets():
    """The default buckets are longer than this model, and have no effect."""
    config = resolved({**WINDOWS, "model.max_length": 67, "data.tokens_per_batch": 67 * 8})
    assert config.data.row_lengths == (67,)
    assert resolved({**WINDOWS, "data.buckets": (), "data.num_buckets": None}).data.buckets == ()
    assert resolved(LM).data.row_lengths == resolved(LM).data.buckets != (67,)


@pytest.mark.parametrize(("changes", "message"), [
    ({"model.max_length": 66}, "config.data.windows: 67 tokens are over model.max_length = 66"),
    ({"data.packing": True}, "config.data.packing: a row of data.windows is filled"),
    ({"data.buckets": (64,)}, "config.data.buckets: every row has data.windows = 67 tokens"),
    ({"data.buckets": (32, 64, 128, 256)}, "config.data.buckets: every row has data.windows"),
    ({"data.num_buckets": 2}, "config.data.num_buckets: every row has data.windows = 67"),
    ({"data.subword_sampling": 0.1}, "config.data.subword_sampling: changes the number of tokens"),
    ({"data.tokens_per_batch": 67 * 8 - 1}, "config.data.tokens_per_batch: 535 is too small for "
     "data.rows_multiple = 8 rows of data.windows, 67; it must be at least 536."),
    ({"model.architecture": "encoder_decoder"},
     "config.data.windows: requires model.architecture='decoder_lm'"),
])  # fmt: skip
def test_a_field_that_contradicts_windows_is_refused(changes, message):
    resolved(WINDOWS)
    with pytest.raises(InputError) as caught:
        resolved({**WINDOWS, **changes})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("changes", "message"), [
    ({"data.dataset": "lm1b", "data.train_files": ()},
     "config.data.whole_files: applies only to data.dataset='plain_text'"),
    ({"data.longest_line": 100_000}, "config.data.longest_line: is about single lines"),
    ({"data.faults": "drop"}, "config.data.faults: is about single lines"),
    ({"data.train_files": ("a.csv",), "data.header": True},
     "config.data.header: is about single lines"),
    ({"data.subword_sampling": 0.1}, "config.data.subword_sampling: samples the ids of whole"),
])  # fmt: skip
def test_a_field_that_contradicts_whole_files_is_refused(changes, message):
    resolved(WHOLE)
    with pytest.raises(InputError) as caught:
        resolved({**WHOLE, **changes})
    assert str(caught.value).startswith(message)


def test_whole_files_are_refused_by_name_elsewhere_also_if_they_are_off():
    with pytest.raises(InputError, match=r"^config\.data\.whole_files: applies only to"):
        resolved({**LM, "data.whole_files": False})
