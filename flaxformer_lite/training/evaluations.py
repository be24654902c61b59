"""The evaluations of a run: when they are due, their scores, and early stopping."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flaxformer_lite import scoring
from flaxformer_lite.config import target_language
from flaxformer_lite.field_rules import EXTERNAL
from flaxformer_lite.fields import Config
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.training import checkpoint, metrics


def is_due(step: int, config: Config) -> bool:
    """Whether a run is evaluated after `step` updates: every `eval_every` steps, and at the end."""
    return step > 0 and (step % config.train.eval_every == 0 or step == config.train.num_steps)


def known_scores(record: Mapping[str, Any], paths: Workdir, metric: str) -> dict[int, float]:
    """Returns step to score, higher is better, of all evaluations up to a checkpoint.

    Args:
      record: the JSON part of the checkpoint. Its scores are completed by those that were logged
        after it was saved.
      metric: `train.best_metric`.
    """
    logged = metrics_log.validation_scores(
        paths.metrics, lambda values: metrics.score(values, metric)
    )
    saved = {int(step): score for step, score in record["scores"].items()}
    return saved | {step: score for step, score in logged.items() if step <= record["step"]}


def early_stop(scores: dict[int, float], patience: int | None) -> bool:
    """Whether `patience` evaluations have passed since the best one."""
    if patience is None or not scores:
        return False
    best = checkpoint.best_first(list(scores), scores)[0]
    return sum(step > best for step in scores) >= patience


def has_ended(step: int, config: Config, scores: dict[int, float]) -> bool:
    """Whether training ends after `step` updates."""
    return step >= config.train.num_steps or early_stop(scores, config.train.patience)


def bleu_tokenizer(config: Config) -> str:
    """Returns the tokenizer of BLEU: that of the config, or the one for the target language."""
    return config.data.bleu_tokenizer or scoring.tokenizer_for(target_language(config))


def decoding_settings(config: Config) -> dict[str, Any]:
    """Returns the settings that the scores of checkpoints depend on.

    Empty if `train.best_metric` does not depend on translations.
    """
    if config.train.best_metric in ("loss", "accuracy"):
        return {}
    of_bleu = {"data.bleu_tokenizer": bleu_tokenizer(config)}
    of_program = {"train.metric_command": config.train.metric_command}
    decode = json.loads(json.dumps(dataclasses.asdict(config.decode)))  # as checkpoints record it
    return {f"decode.{name}": value for name, value in decode.items()} | {
        "decode.tokens_per_batch": None,
        "train.decode_examples": config.train.decode_examples,
        **(of_bleu if config.train.best_metric == "bleu" else {}),
        **(of_program if config.train.best_metric in EXTERNAL else {}),
    }
