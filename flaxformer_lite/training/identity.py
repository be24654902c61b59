"""Fingerprints of the data and the tokenizer of a run, which must not change on resume."""

from collections.abc import Mapping
from typing import Any

from flaxformer_lite import scoring
from flaxformer_lite.data.sources import own_text
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.split import Data
from flaxformer_lite.data.tokens import two_vocabularies
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.fields import Config
from flaxformer_lite.runs import multihost
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import evaluations


def of(data: Data, dataset: Dataset, config: Config) -> dict[str, Any]:
    """Returns the fingerprints of tokenizer, data and files, and the settings that affect scores.

    Raises:
      InputError: the processes of the run have different data.
    """
    identity = {
        "tokenizer": data.tokenizer.fingerprint,
        "data": data.fingerprint,
        "files": dataset.contents,
    }
    fingerprints = {"tokenizer": data.tokenizer.fingerprint, "data": data.fingerprint}
    fingerprints |= dataset.contents
    multihost.check_same(fingerprints, "give every process the same files")
    return identity | {"measured": evaluations.decoding_settings(config)}


def check_tokenizer(tokenizer: AnyTokenizer, config: Config, paths: Workdir) -> None:
    """Raises InputError if the size of the workdir's tokenizer differs from the config's."""
    expected = config.model.vocab_size, config.model.target_vocab_size
    found = two_vocabularies.sizes(tokenizer)
    for field, size, own in zip(("vocab_size", "target_vocab_size"), expected, found, strict=True):
        if own != size:
            raise InputError(
                f"{paths.tokenizer}: expected a tokenizer of {size} pieces "
                f"(data.{field}), got {own}; put the run's own back, or use a new --workdir."
            )


def check_resumed(
    record: Mapping[str, Any],
    identity: Mapping[str, Any],
    paths: Workdir,
    config: Config,
    scores: dict[int, float],
) -> None:
    """Raises InputError if a checkpoint was made from other data than `identity`.

    While training continues, later scores must also be comparable with those in `scores`.

    Args:
      record: the JSON part of the checkpoint.
      identity: the result of `of` for this start.
    """
    continues = scores and not evaluations.has_ended(record["step"], config, scores)
    measured = record.get("measured", {})
    if config.train.best_metric == "bleu" and measured:  # an older version had one tokenizer
        measured = {"data.bleu_tokenizer": scoring.DEFAULT_TOKENIZER} | measured
    for name, old in measured.items() if continues else ():
        if (new := identity["measured"].get(name, old)) != old:
            raise InputError(
                f"config.{name}: up to step {record['step']} validation was measured with "
                f"{old!r}, and train.best_metric={config.train.best_metric!r} would be compared "
                f"with what {new!r} gives; leave it as it was until training has ended, or use a "
                "new --workdir."
            )
    changed = own_text.changed(record.get("files", {}), identity["files"])
    differs = {
        paths.tokenizer: record.get("tokenizer") != identity["tokenizer"],
        ", ".join(changed): bool(changed),
        "the dataset or its order": record.get("data") != identity["data"],
    }
    for subject, is_other in differs.items():
        if is_other:
            raise InputError(
                f"{subject}: not what the run in {paths.path} was trained with up to step "
                f"{record['step']}; put the old one back, or use a new --workdir."
            )
