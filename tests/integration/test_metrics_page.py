"""docs/reference/metrics.md has the keys that runs log, and no others."""

import json
import re

import jax
import pytest

from flaxformer_lite.config import default_config, resolve, with_vocabulary
from flaxformer_lite.data.batches import loader
from flaxformer_lite.field_rules import ERROR_RATES, EXTERNAL
from flaxformer_lite.training import step

# Keys that need another config than those of the runs below.
GUIDED = {"alignment_loss"}
OF_OTHER_CONFIGS = {"bleu_tokenized", "length_loss", "length_accuracy", *ERROR_RATES, *EXTERNAL}


@pytest.fixture(scope="module")
def documented(repo_root) -> dict[str, set[str]]:
    """Returns the keys of each section of the page."""
    page = (repo_root / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    return {
        section.splitlines()[0]: set(re.findall(r"^\| `([\w/]+)` \|", section, re.MULTILINE))
        for section in sections
    }


def logged(workdir) -> dict[str, set[str]]:
    """Returns the keys of the lines of each split; the kinds of phrases are one key."""
    keys: dict[str, set[str]] = {}
    for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        names = {re.sub(r"^exact_match/.+", "exact_match/KIND", name) for name in record}
        keys.setdefault(record["split"], set()).update(names)
    return keys


def test_the_page_has_the_keys_that_runs_of_each_shape_log(
    documented, finished_run, finished_classifier, finished_language_model
):
    runs = [logged(run) for run in (finished_run, finished_classifier, finished_language_model)]
    train, scored = (
        set().union(*(run[split] for run in runs for split in splits))
        for splits in (("train",), ("validation", "test"))
    )
    every, of_train, of_scores = (
        documented[name] for name in ("Every line", "Train", "Validation and test")
    )
    assert train - every == of_train - GUIDED
    assert scored - every == of_scores - OF_OTHER_CONFIGS
    assert every <= train | scored


def keys_of_a_step(config) -> set[str]:
    """Returns the keys of a step of a small model with the settings of `config`, but not shared."""
    config.model.update(d_model=8, num_heads=2, d_ff=8, max_length=16)
    config.model.update(num_encoder_layers=1, num_decoder_layers=1)
    config.data.update(vocab_size=32, buckets=(16,))
    config = with_vocabulary(resolve(config), 32)
    train_step, initial_state = step.of_config(config)
    state = jax.eval_shape(initial_state)
    _, sums = jax.eval_shape(train_step, state, loader.batch_struct(config, 8, 16, train=True))
    return sums.keys() - {"loss", "accuracy", "grad_norm"}


@pytest.mark.parametrize("fields", [{"skip_spikes": 6.0}, {"nan_tolerance": 1}], ids=str)
def test_the_page_has_the_keys_of_skipped_steps(documented, fields):
    config = default_config()
    config.optim.update(fields)
    not_logged = {"non_finite"}  # the loop reads it
    assert keys_of_a_step(config) - not_logged == documented["Skipped steps"]


def test_the_page_has_the_key_of_a_guided_head(documented):
    config = default_config()
    config.train.guided_alignment = 0.05
    config.data.update(dataset="parallel_text", train_files=("a", "b"), train_alignments=("c",))
    config.data.update(validation_files=("d", "e"), test_files=("f", "g"))
    assert keys_of_a_step(config) == GUIDED <= documented["Train"]


def test_the_page_has_the_keys_of_a_masked_decoder(documented):
    config = default_config()
    config.model.decoder, config.decode.method = "masked", "mask_predict"
    assert keys_of_a_step(config) == documented["Masked decoders"]
    assert documented["Masked decoders"] <= OF_OTHER_CONFIGS
