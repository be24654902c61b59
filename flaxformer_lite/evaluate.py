"""Evaluates a trained run on a split, and saves its translations and their scores."""

import dataclasses
import json
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxformer_lite import scoring, trained
from flaxformer_lite.config import Config, DecodeConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import own_text
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.evaluator import Evaluation, Evaluator
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute, make_folder, why_unwritable, write_whole
from flaxformer_lite.training import parallel, run_report
from flaxformer_lite.training.origin import Origin

SCORES = ".scores.json"  # the suffix of files of scores


def evaluate(workdir: str | Path, split: str, **options: object) -> Evaluation:
    """Returns all metrics of the best model in `workdir` on `split`.

    Args:
      split: 'train', 'validation', 'test' or a TFDS split.
      options: `average`, `parameters` and `ensemble`, as in `trained.load`.

    Raises:
      InputError: there is no such run, checkpoint or split.
    """
    return evaluate_run(trained.load(workdir, **options), split)


def evaluate_run(
    run: trained.Trained,
    split: str,
    *,
    references: Mapping[str, Sequence[str]] | None = None,
    bootstrap: int = 0,
    seed: int = scoring.SEED,
) -> Evaluation:
    """Returns all metrics of a loaded model on a split; see `evaluate`.

    Args:
      references: texts by name, to compare translations with in place of the targets of the split.
      bootstrap, seed: as in `Evaluator.evaluate`.

    Raises:
      InputError: the split does not exist; the numbers of its examples and of references differ;
        or there are references, but the model does not translate; or the files of a custom text
        have changed since the run was trained.
    """
    config, data = run.config, run.config.data
    if (references or bootstrap) and config.model.architecture != "encoder_decoder":
        flag = "--references" if references else "--bootstrap"
        raise InputError(
            f"{flag}: applies only to translations, and a {config.model.architecture!r} makes none."
        )
    dataset = _dataset_of(run)
    named = {
        "train": data.train_split,
        "validation": data.validation_split,
        "test": data.test_split,
    }
    examples = pipeline.read_split(
        dataset.part(split), named.get(split, split), run.tokenizer, config
    )
    if references:
        counts = {name: len(texts) for name, texts in references.items()}
        scoring.check_counts({f"the {split} split": len(examples.texts), **counts})
    run_report.say_left_out(split, examples)
    evaluator = Evaluator(
        run.model, config, parallel.MeshMode(run.mesh), run.tokenizer, label_names=run.label_names
    )
    texts = list(references.values()) if references else None
    return evaluator.evaluate(
        run.params, run.params, examples, references=texts, bootstrap=bootstrap, seed=seed
    )


def _dataset_of(run: trained.Trained) -> Dataset:
    """Returns the prepared dataset of a run.

    Raises:
      InputError: its files or labels have changed since the run was trained.
    """
    dataset = pipeline.open_dataset(run.config)
    if changed := own_text.changed(run.record.get("files") or dataset.contents, dataset.contents):
        raise InputError(
            f"{', '.join(changed)}: not what the run was trained with; put the old text back, or "
            "evaluate other text with flaxformer-lite translate and score."
        )
    dataset.prepare()
    if run.label_names is not None and dataset.label_names != run.label_names:
        raise InputError(
            f"config.data: the labels of {dataset.name} are {', '.join(dataset.label_names)}, "
            f"and this run learnt {', '.join(run.label_names)}; put the data back that it was "
            "trained on."
        )
    return dataset


def check_folder(folder: Path) -> None:
    """Raises InputError if `save` could not write to `folder`."""
    if reason := why_unwritable(folder):
        raise InputError(f"--output={folder}: cannot be written to: {reason}; name another folder.")


def check_unused(folder: Path, *, run: Path, split: str, config: Config, origin: Origin) -> None:
    """Raises InputError if `save` would overwrite files of another run."""
    name = _name(split, config, origin)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(f"{name}.") and path.name.endswith(SCORES):
            try:
                other = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (ValueError, KeyError, TypeError):
                continue  # an older version without the run, or another file
            if other != str(absolute(run)):
                raise InputError(
                    f"--output={folder}: {path.name} there is of the run {other}; "
                    "name another folder."
                )


def check_references(
    folder: Path, references: Sequence[str], *, split: str, config: Config, origin: Origin
) -> None:
    """Raises InputError if `save` would overwrite scores against references of the same names."""
    path = folder / _scores_name(split, config, origin, references)
    try:
        others = json.loads(path.read_text(encoding="utf-8"))["references"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no file, or not one of scores
    if references and others != list(references):
        raise InputError(
            f"{path}: there are scores against {', '.join(others)}; name another folder with "
            "--output, or move them."
        )


def save(
    evaluation: Evaluation,
    folder: Path,
    *,
    run: Path,
    split: str,
    config: Config,
    origin: Origin,
    references: Sequence[str] = (),
) -> list[Path]:
    """Writes the translations, one a line, and a JSON file of their scores; returns both paths.

    The file names contain the split, the step and the decoding method. A line end in a translation
    becomes a space. Without translations nothing is written.

    Args:
      run: the workdir.
      references: the names of the references; empty: the targets of the split.

    Raises:
      InputError: the folder cannot be written to.
    """
    if evaluation.scores is None:
        return []
    texts = folder / f"{_name(split, config, origin)}.hypotheses.txt"
    scores = folder / _scores_name(split, config, origin, references)
    facts = {
        "run": str(absolute(run)),
        "hypotheses": texts.name,
        "references": list(references) or "the split's own",
        "sentences": len(evaluation.hypotheses),
        "too_long": evaluation.too_long,
        "data": dataclasses.asdict(config.data),
        "split": split,
        **_facts_of_origin(origin),
        "decode": dataclasses.asdict(config.decode),
        **_facts_of_scores(evaluation),
    }
    lines = (text.replace("\r", " ").replace("\n", " ") for text in evaluation.hypotheses)
    try:
        make_folder(folder)
        write_whole(texts, "".join(f"{line}\n" for line in lines))
        write_whole(scores, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(
            f"--output={folder}: cannot be written to: {error.strerror}; name another folder."
        ) from error
    return [texts, scores]


def _facts_of_origin(origin: Origin) -> dict[str, object]:
    return {
        "steps": origin.steps,
        "average": origin.average,
        "parameters": origin.kind,
        "ensemble": list(origin.others),
    }


def _facts_of_scores(evaluation: Evaluation) -> dict[str, object]:
    values, intervals = evaluation.values, evaluation.scores.intervals
    return {
        "scores": {name: value if math.isfinite(value) else None for name, value in values.items()},
        "signatures": evaluation.scores.signatures,
        "resampled": {
            name: {"mean": mean, "plus_minus": half} for name, (mean, half) in intervals.items()
        },
    }


def _name(split: str, config: Config, origin: Origin) -> str:
    """Returns the common prefix of the file names of an evaluation."""
    return f"{urllib.parse.quote(split, safe='[]:%+')}.{origin.label}.{_method(config.decode)}"


def _scores_name(split: str, config: Config, origin: Origin, references: Sequence[str]) -> str:
    against = "".join(f".{urllib.parse.quote(Path(each).name, safe='')}" for each in references)
    return f"{_name(split, config, origin)}{against}{SCORES}"


def _method(decode: DecodeConfig) -> str:
    """Returns the method and the fields that change texts, such as 'sample-temperature=0.8'."""
    defaults, fields = dataclasses.asdict(DecodeConfig()), dataclasses.asdict(decode)
    unnamed = ("method", "tokens_per_batch")
    changed = (
        f"{name}={value}"
        for name, value in fields.items()
        if name not in unnamed and value != defaults[name]
    )
    return "-".join([decode.method, *changed])
