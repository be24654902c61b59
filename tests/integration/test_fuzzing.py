"""Random inputs of each kind end as they should; `tests/support/fuzzing.py` tries more."""

import fuzzing
import pytest
import tensorflow_datasets as tfds


@pytest.mark.slow
def test_random_inputs_end_with_one_message_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path / "tfds"))
    tried, wrong = fuzzing.fuzz(fuzzing.Fuzzer(tmp_path), fuzzing.shares(100), seed=0)
    assert all(tried[kind] for kind in fuzzing.KINDS)
    assert not wrong, "\n\n".join(wrong)
