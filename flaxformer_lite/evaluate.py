"""Evaluates a trained run on a split of its data."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from flaxformer_lite import scoring, trained
from flaxformer_lite.checks.metric_checks import metric_words
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.sources import own_text
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.evaluator import Evaluator
from flaxformer_lite.fields import Config
from flaxformer_lite.scores.symbols import LENGTH
from flaxformer_lite.system import given
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import parallel, run_report
from flaxformer_lite.training.saved_evaluation import Evaluation

OWN = "own"  # in place of a command: that of the run


def evaluate(workdir: str | Path, split: str, **options: Unpack[trained.LoadOptions]) -> Evaluation:
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
    symbols: bool = False,
    groups: Sequence[str] | None = None,
    files: Mapping[str, Sequence[str]] | None = None,
    metric_command: str | None = None,
    metric_name: str | None = None,
    metric_files: Path | None = None,
) -> Evaluation:
    """Returns all metrics of a loaded model on a split; see `evaluate`.

    Args:
      files: for custom text, where the files of 'train', 'validation' or 'test' are now; they are
        known by their contents.
      references: texts by name, to compare translations with in place of the targets of the split.
      bootstrap, seed, symbols, groups, metric_files: as in `Evaluator.evaluate`.
      metric_command, metric_name: as the fields of `train`. A command 'own' is that of the run,
        None: no program runs, as the config of a run from others must not run code.

    Raises:
      InputError: the split does not exist; the numbers of its examples and of references differ;
        or there are references, but the model does not translate; or the files of a custom text
        have changed since the run was trained.
    """
    if not isinstance(run, trained.Trained):
        raise InputError(f"run: expected the result of trained.load, got {type(run).__name__}.")
    if not isinstance(split, str):
        raise InputError(f"split: expected the name of a split (str), got {split!r}.")
    references = given.text_lists({} if references is None else references, name="references")
    files = given.text_lists({} if files is None else files, name="files")
    if unknown := files.keys() - set(pipeline.ROLES):
        raise InputError(
            f"files: expected files of {', '.join(pipeline.ROLES)}, got {min(unknown)!r}."
        )
    bootstrap = given.whole_number(bootstrap, name="bootstrap", least=0)
    seed = given.whole_number(seed, name="seed", least=0)
    if groups is not None and groups != LENGTH:
        groups = given.texts(groups, name="groups", item="group")
    config, data = _with_program(run.config, metric_command, metric_name), run.config.data
    wanted = {"references": references, "bootstrap": bootstrap, "symbols": symbols}
    wanted |= {"metric_command": metric_command}
    flags = [f"--{name}" for name, value in {**wanted, "groups": groups}.items() if value]
    if flags and config.model.architecture != "encoder_decoder":
        raise InputError(
            f"{flags[0]}: applies only to translations, and a {config.model.architecture!r} makes "
            "none."
        )
    named = {
        "train": data.train_split,
        "validation": data.validation_split,
        "test": data.test_split,
    }
    name = named.get(split, split)
    dataset = _dataset_of(run, name, files)
    examples = pipeline.read_split(dataset.part(split), name, run.tokenizer, config)
    named_groups = {} if groups in (None, LENGTH) else {"the groups": groups}
    if references or named_groups:
        counts = {name: len(texts) for name, texts in {**references, **named_groups}.items()}
        scoring.check_counts({f"the {split} split": len(examples.texts or ()), **counts})
    run_report.say_left_out(split, examples)
    run_report.say_unknown({split: examples}, run.tokenizer)
    evaluator = Evaluator(
        run.model, config, parallel.MeshMode(run.mesh), run.tokenizer, label_names=run.label_names
    )
    texts = list(references.values()) if references else None
    return evaluator.evaluate(
        run.params,
        run.params,
        examples,
        references=texts,
        bootstrap=bootstrap,
        seed=seed,
        symbols=symbols,
        groups=groups,
        metric_files=metric_files,
    )


def _with_program(config: Config, command: str | None, name: str | None) -> Config:
    """Returns the config with this `train.metric_command`, and the name of its number.

    Raises:
      InputError: the command is malformed, or 'own' and the run has none; or there is only a name.
    """
    own = config.train
    if command is None and name is not None:
        raise InputError("--metric_name: requires --metric_command, the program; add it.")
    if command is None and own.metric_command is not None:
        run_report.say(
            "note: the program of this run, train.metric_command, runs with --metric_command=own"
        )
    if command == OWN:
        command = own.metric_command
        if command is None:
            raise InputError(
                "--metric_command=own: this run has no train.metric_command; name a program."
            )
    if command is not None:
        metric_words(command, field="--metric_command")
    train = dataclasses.replace(
        own, metric_command=command, metric_name=own.metric_name if name is None else name
    )
    return dataclasses.replace(config, train=train)


def _dataset_of(run: trained.Trained, split: str, files: Mapping[str, Sequence[str]]) -> Dataset:
    """Returns the prepared dataset of a run, or the part of it that `split` needs if files lack.

    Raises:
      InputError: its files or labels have changed since the run was trained.
    """
    paths: dict[str, Any] = {f"{role}_files": tuple(paths) for role, paths in files.items()}
    data = dataclasses.replace(run.config.data, **paths)
    config, some = dataclasses.replace(run.config, data=data), False
    try:
        dataset = pipeline.open_dataset(config, beside=run.folder)
    except own_text.MissingFile:
        roles = [word for word in re.findall(r"\w+", split) if word in pipeline.ROLES]
        some = True
        dataset = pipeline.open_dataset(
            config, beside=run.folder, roles=roles, label_names=run.label_names
        )
    then = run.record.get("files") or dataset.contents
    if changed := own_text.changed(then, dataset.contents, some=some):
        raise InputError(
            f"{', '.join(changed)}: not what the run was trained with; put the old text back, or "
            "evaluate other text with flaxformer-lite translate and score."
        )
    dataset.prepare()
    names = dataset.label_names or []
    if run.label_names is not None and names != run.label_names:
        raise InputError(
            f"config.data: the labels of {dataset.name} are {', '.join(names)}, "
            f"and this run learnt {', '.join(run.label_names)}; put the data back that it was "
            "trained on."
        )
    return dataset
