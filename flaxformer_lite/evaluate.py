"""How good a model is on a split: loss per label, and what each shape is judged by.

Translations are compared with the references, a language model's bits are counted per byte of text, and a
classifier's mistakes are laid out in a table.
"""

import dataclasses
import functools
import json
import math
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

from flaxformer_lite import scoring, trained
from flaxformer_lite.config import Config, DecodeConfig
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.batches import batch_shapes
from flaxformer_lite.data.batches.loader import stream
from flaxformer_lite.data.pipeline import Split
from flaxformer_lite.data.sources import own_text
from flaxformer_lite.data.sources.datasets import Dataset
from flaxformer_lite.data.tokens.tokenizer import Tokenizer
from flaxformer_lite.model import parameters
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute, make_folder, why_unwritable, write_whole
from flaxformer_lite.training import metrics, parallel, run_report, step

SCORES = ".scores.json"  # what the names of files with scores end in
SAMPLES = 8  # texts that a language model writes at an evaluation


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was found out about a model on a split."""

    values: dict[str, float]
    samples: str = ""  # what the model wrote, for a person to read
    note: str = ""  # what belongs to the values: sacreBLEU's signatures, a classifier's table of mistakes
    hypotheses: Sequence[str] = ()  # the translations that were scored
    scores: scoring.Scores | None = None  # of them
    too_long: int = 0  # of their sources, more than the model takes: these translations are empty


def by_kind(hypotheses: Sequence[str], references: Sequence[Sequence[str]], kinds: Sequence[str]) -> dict[str, float]:
    """Exact match of each kind of phrase, as 'exact_match/<kind>'."""
    hit, kind = scoring.exact_matches(hypotheses, references), np.array(kinds)
    return {f"exact_match/{name}": float(hit[kind == name].mean()) for name in sorted(set(kinds))}


class Evaluator:
    """Measures parameters on examples; compiles once for each batch shape, and is then used again and again."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        mode: parallel.MeshMode | parallel.PmapMode,
        tokenizer: Tokenizer,
        *,
        label_names: Sequence[str] | None = None,
        compile_with: Callable[[Callable], Callable] = lambda compile: compile(),
        between_batches: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          label_names: of a classifier's classes.
          compile_with: runs a compilation, so that a caller can do it elsewhere and wait.
          between_batches: called after each batch; what it raises ends the measurement.
        """
        self._config, self._mode, self._tokenizer, self._label_names = config, mode, tokenizer, label_names
        self._compile_with, self._between_batches = compile_with, between_batches
        self._param_shapes = parameters.shapes(model)
        options = {"model": model, "axis_name": mode.axis_name}
        self._steps = {
            "eval": functools.partial(step.eval_step, row_shards=mode.row_shards, **options),
            "confusion": functools.partial(step.confusion_step, **options),
        }
        self._compiled: dict[tuple[str, tuple[int, int]], Callable] = {}
        if config.model.architecture != "encoder_classifier":
            self._decoder = trained.make_decoder(model, config, mode.mesh, compile_with=compile_with)

    def measure(
        self,
        params: dict,
        whole_params: dict,
        split: Split,
        *,
        decode: int | None = None,
        references: Sequence[Sequence[str]] | None = None,
        bootstrap: int = 0,
        seed: int = scoring.SEED,
    ) -> Measurement:
        """What there is to know about parameters on a split.

        Args:
          params, whole_params: the same, as the mode holds them and whole on each device.
          decode: so many of the first examples are decoded; None: all.
          references: what translations are compared with, each a text for every example; None: the split's own.
          bootstrap, seed: so many resamples tell how sure the scores of translations are; 0: none do.
        """
        sums = self._sum_over(split, params, "eval")
        values = metrics.divide(sums)
        architecture = self._config.model.architecture
        if architecture == "encoder_classifier":
            counts_CC = self._sum_over(split, params, "confusion") if decode is None else None
            note = "" if counts_CC is None else run_report.confusion(np.asarray(counts_CC), self._label_names)
            return Measurement(values, samples=note, note=note)
        values = metrics.with_perplexity(values)
        if architecture == "decoder_lm":
            values["bits_per_byte"] = float(sums["loss"][0]) / math.log(2) / split.text_bytes
            return Measurement(values, samples="\n".join(self._write(whole_params)) if decode != 0 else "")
        count = len(split.texts) if decode is None else min(decode, len(split.texts))
        if not count:
            return Measurement(values)
        hypotheses = self._translate(whole_params, split.tokens.source[:count])
        references = [texts[:count] for texts in references or [split.texts.target]]
        tokenized = self._config.data.pretokenized
        if bootstrap:
            (scores,) = scoring.resample([hypotheses], references, bootstrap=bootstrap, seed=seed, tokenized=tokenized)
        else:
            scores = scoring.score(hypotheses, references, tokenized=tokenized)
        known = decode is None and split.texts.kind is not None
        kinds = by_kind(hypotheses, references, split.texts.kind) if known else {}
        too_long = sum(not self._fits(ids) for ids in split.tokens.source[:count])
        notes = run_report.signatures(scores), run_report.untranslated(too_long, count, self._decoder.max_length)
        samples, note = run_report.translations(split.texts, hypotheses), "\n".join(filter(None, notes))
        return Measurement({**values, **scores.values, **kinds}, samples, note, hypotheses, scores, too_long)

    def _sum_over(self, split: Split, params: dict, name: str) -> metrics.Sums | jax.Array:
        """What the step `name` returns, added over all batches of `split`; `params` as the mode holds them."""
        sums = None
        batches = pipeline.batches(split, part=parallel.rows_of_process(self._mode.mesh))
        for number, batch in enumerate(stream(batches, self._mode.put_batch)):
            shape = split.plan.shape(number)
            if (name, shape) not in self._compiled:
                struct = batch_shapes.struct(self._config, *shape)
                options = self._steps[name], self._param_shapes, struct
                self._compiled[name, shape] = self._compile_with(
                    functools.partial(self._mode.compile, *options, donate=False)
                )
            sums = metrics.add(sums, self._mode.read(self._compiled[name, shape](params, batch)))
            self._between_batches()
        return sums

    def _translate(self, params: dict, sources: Sequence[np.ndarray]) -> list[str]:
        """The text of each source's translation, empty for one that the model cannot take; `params` whole."""
        fits = [ids if self._fits(ids) else ids[:0] for ids in sources]
        return self._tokenizer.decode(self._decoder(params, fits, between_batches=self._between_batches))

    def _fits(self, ids: np.ndarray) -> bool:
        return len(ids) < self._decoder.max_length  # the end symbol takes a place

    def _write(self, params: dict) -> list[str]:
        """Texts that the language model makes of nothing, one if it always makes the same; `params` whole."""
        prompts = [np.empty(0, np.int32)] * (SAMPLES if self._config.decode.method == "sample" else 1)
        return self._tokenizer.decode(self._decoder(params, prompts, between_batches=self._between_batches))


def evaluate(workdir: str | Path, split: str, **options: object) -> Measurement:
    """All metrics of the best model in `workdir` on `split` ('train', 'validation', 'test' or a TFDS split).

    Args:
      options: `average`, `parameters` and `ensemble`, as `trained.load` takes them.

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
) -> Measurement:
    """`evaluate` of a model that is loaded.

    Args:
      references: what translations are compared with, by a name, in place of the split's own.
      bootstrap, seed: as `Evaluator.measure` takes them.

    Raises:
      InputError: there is no such split, it has not as many examples as references, or the model translates nothing.
        Or files of one's own text are not those that the run was trained with.
    """
    config, data = run.config, run.config.data
    if (references or bootstrap) and config.model.architecture != "encoder_decoder":
        flag = "--references" if references else "--bootstrap"
        raise InputError(f"{flag}: goes with translations, and a {config.model.architecture!r} makes none.")
    dataset = _dataset_of(run)
    named = {"train": data.train_split, "validation": data.validation_split, "test": data.test_split}
    examples = pipeline.read_split(dataset.part(split), named.get(split, split), run.tokenizer, config)
    if references:
        counts = {name: len(texts) for name, texts in references.items()}
        scoring.check_counts({f"the {split} split": len(examples.texts), **counts})
    run_report.say_left_out(split, examples)
    evaluator = Evaluator(run.model, config, parallel.MeshMode(run.mesh), run.tokenizer, label_names=run.label_names)
    texts = list(references.values()) if references else None
    return evaluator.measure(run.params, run.params, examples, references=texts, bootstrap=bootstrap, seed=seed)


def _dataset_of(run: trained.Trained) -> Dataset:
    """The dataset of a run, prepared; InputError if its files or labels are not those that it was trained with."""
    dataset = pipeline.open_dataset(run.config)
    if changed := own_text.changed(run.record.get("files") or dataset.contents, dataset.contents):
        raise InputError(
            f"{', '.join(changed)}: not what the run was trained with; put the old text back, or measure other text "
            "with flaxformer-lite translate, and score."
        )
    dataset.prepare()
    if run.label_names is not None and dataset.label_names != run.label_names:
        raise InputError(
            f"config.data: the labels of {dataset.name} are {', '.join(dataset.label_names)}, and this run "
            f"learnt {', '.join(run.label_names)}; put the data back that it was trained on."
        )
    return dataset


def check_folder(folder: Path) -> None:
    """Raises InputError if `save` could not write there, before anything is measured."""
    if reason := why_unwritable(folder):
        raise InputError(f"--output={folder}: cannot be written to: {reason}; name another folder.")


def check_unused(folder: Path, *, run: Path, split: str, config: Config, origin: trained.Origin) -> None:
    """Raises InputError if `save` would write over what it wrote of another run."""
    name = _name(split, config, origin)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(f"{name}.") and path.name.endswith(SCORES):
            try:
                other = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (ValueError, KeyError, TypeError):  # of before runs were named, or of something else
                continue
            if other != str(absolute(run)):
                raise InputError(f"--output={folder}: {path.name} there is of the run {other}; name another folder.")


def check_references(
    folder: Path, references: Sequence[str], *, split: str, config: Config, origin: trained.Origin
) -> None:
    """Raises InputError if `save` would write over scores against other references, which have the same names."""
    path = folder / _scores_name(split, config, origin, references)
    try:
        others = json.loads(path.read_text(encoding="utf-8"))["references"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is something else
        return
    if references and others != list(references):
        raise InputError(
            f"{path}: there are scores against {', '.join(others)}; name another folder with --output, or move them."
        )


def save(
    measured: Measurement,
    folder: Path,
    *,
    run: Path,
    split: str,
    config: Config,
    origin: trained.Origin,
    references: Sequence[str] = (),
) -> list[Path]:
    """Writes translations, one a line, and beside them their scores with all that they are of; returns the paths.

    The names tell the split, the step and how it was decoded. A line end in a translation is written as a space.

    Args:
      run: its folder.
      references: names of those in place of the split's own.

    Raises:
      InputError: the folder cannot be written to.
    """
    if measured.scores is None:
        return []
    name = _name(split, config, origin)
    texts, scores = folder / f"{name}.hypotheses.txt", folder / _scores_name(split, config, origin, references)
    intervals = measured.scores.intervals
    facts = {
        "run": str(absolute(run)),
        "hypotheses": texts.name,
        "references": list(references) or "the split's own",
        "sentences": len(measured.hypotheses),
        "too_long": measured.too_long,
        "data": dataclasses.asdict(config.data),
        "split": split,
        "steps": origin.steps,
        "average": origin.average,
        "parameters": origin.kind,
        "ensemble": list(origin.others),
        "decode": dataclasses.asdict(config.decode),
        "scores": {name: value if math.isfinite(value) else None for name, value in measured.values.items()},
        "signatures": measured.scores.signatures,
        "resampled": {name: {"mean": mean, "plus_minus": half} for name, (mean, half) in intervals.items()},
    }
    lines = (text.replace("\r", " ").replace("\n", " ") for text in measured.hypotheses)
    try:
        make_folder(folder)
        write_whole(texts, "".join(f"{line}\n" for line in lines))
        write_whole(scores, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(f"--output={folder}: cannot be written to: {error.strerror}; name another folder.") from error
    return [texts, scores]


def _name(split: str, config: Config, origin: trained.Origin) -> str:
    """What the names of files begin with that tell of a measurement."""
    return f"{urllib.parse.quote(split, safe='[]:%+')}.{origin.label}.{_method(config.decode)}"


def _scores_name(split: str, config: Config, origin: trained.Origin, references: Sequence[str]) -> str:
    against = "".join(f".{urllib.parse.quote(Path(each).name, safe='')}" for each in references)
    return f"{_name(split, config, origin)}{against}{SCORES}"


def _method(decode: DecodeConfig) -> str:
    """'greedy', or 'sample-temperature=0.8': the method, and what differs from the defaults and changes texts."""
    defaults, fields = dataclasses.asdict(DecodeConfig()), dataclasses.asdict(decode)
    unnamed = ("method", "tokens_per_batch")
    changed = (f"{name}={value}" for name, value in fields.items() if name not in unnamed and value != defaults[name])
    return "-".join([decode.method, *changed])
