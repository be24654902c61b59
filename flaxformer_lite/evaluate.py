"""How good a model is on a split: loss per label, and what each shape is judged by.

Translations are compared with the references, a language model's bits are counted per byte of text, and a
classifier's mistakes are laid out in a table.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import sacrebleu

from flaxformer_lite import trained
from flaxformer_lite.config import Config
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.examples import Examples
from flaxformer_lite.data.loader import stream
from flaxformer_lite.data.pipeline import Split
from flaxformer_lite.data.tokenizer import Tokenizer
from flaxformer_lite.training import metrics, parallel, report, step

SAMPLES = 8  # texts that a language model writes at an evaluation


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was found out about a model on a split."""

    values: dict[str, float]
    samples: str = ""  # what the model wrote, for a person to read
    note: str = ""  # what belongs to the values: sacreBLEU's signature, a classifier's table of mistakes


def exact_matches(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """1.0 for each translation that equals its reference, character by character; else 0.0."""
    return np.array([h == r for h, r in zip(hypotheses, references, strict=True)], np.float64)


def score_texts(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    """Exact match (0 to 1), sacreBLEU and chrF (0 to 100) of raw texts, and sacreBLEU's signature."""
    bleu = sacrebleu.BLEU()
    values = {
        "exact_match": float(exact_matches(hypotheses, references).mean()),
        "bleu": bleu.corpus_score(list(hypotheses), [list(references)]).score,
        "chrf": sacrebleu.CHRF().corpus_score(list(hypotheses), [list(references)]).score,
    }
    return values, str(bleu.get_signature())


def by_kind(hypotheses: Sequence[str], texts: Examples) -> dict[str, float]:
    """Exact match of each kind of phrase, as 'exact_match/<kind>'; empty where kinds are not known."""
    if texts.kind is None:
        return {}
    hit, kind = exact_matches(hypotheses, texts.target), np.array(texts.kind)
    return {f"exact_match/{name}": float(hit[kind == name].mean()) for name in sorted(set(texts.kind))}


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
        self._param_shapes = step.param_shapes(model)
        self._steps = {
            name: functools.partial(function, model=model, axis_name=mode.axis_name)
            for name, function in (("eval", step.eval_step), ("confusion", step.confusion_step))
        }
        self._compiled: dict[tuple[str, tuple[int, int]], Callable] = {}
        if config.model.architecture != "encoder_classifier":
            self._decoder = trained.make_decoder(model, config, mode.mesh, compile_with=compile_with)

    def measure(self, params: dict, whole_params: dict, split: Split, *, decode: int | None = None) -> Measurement:
        """What there is to know about parameters on a split.

        Args:
          params, whole_params: the same, as the mode holds them and whole on each device.
          decode: so many of the first examples are decoded; None: all.
        """
        sums = self._sum_over(split, params, "eval")
        values = metrics.divide(sums)
        architecture = self._config.model.architecture
        if architecture == "encoder_classifier":
            counts_CC = self._sum_over(split, params, "confusion") if decode is None else None
            note = "" if counts_CC is None else report.confusion(np.asarray(counts_CC), self._label_names)
            return Measurement(values, samples=note, note=note)
        values = metrics.with_perplexity(values)
        if architecture == "decoder_lm":
            values["bits_per_byte"] = float(sums["loss"][0]) / math.log(2) / split.text_bytes()
            return Measurement(values, samples="\n".join(self._write(whole_params)) if decode != 0 else "")
        count = len(split.texts) if decode is None else min(decode, len(split.texts))
        if not count:
            return Measurement(values)
        hypotheses = self._translate(whole_params, split.tokens.source[:count])
        scores, signature = score_texts(hypotheses, split.texts.target[:count])
        kinds = by_kind(hypotheses, split.texts) if decode is None else {}
        samples = report.translations(split.texts, hypotheses)
        return Measurement({**values, **scores, **kinds}, samples, f"sacreBLEU signature {signature}")

    def _sum_over(self, split: Split, params: dict, name: str) -> metrics.Sums | jax.Array:
        """What the step `name` returns, added over all batches of `split`; `params` as the mode holds them."""
        sums = None
        for number, batch in enumerate(stream(pipeline.batches(split), self._mode.put_batch)):
            shape = split.plan.shape(number)
            if (name, shape) not in self._compiled:
                struct = pipeline.batch_struct(self._config, *shape)
                options = self._steps[name], self._param_shapes, struct
                self._compiled[name, shape] = self._compile_with(
                    functools.partial(self._mode.compile, *options, donate=False)
                )
            sums = metrics.add(sums, self._mode.read(self._compiled[name, shape](params, batch)))
            self._between_batches()
        return sums

    def _translate(self, params: dict, sources: Sequence[np.ndarray]) -> list[str]:
        """The text of each source's translation, empty for one that the model cannot take; `params` whole."""
        fits = [ids if len(ids) < self._decoder.max_length else ids[:0] for ids in sources]
        return self._tokenizer.decode(self._decoder(params, fits, between_batches=self._between_batches))

    def _write(self, params: dict) -> list[str]:
        """Texts that the language model makes of nothing, one if it always makes the same; `params` whole."""
        prompts = [np.empty(0, np.int32)] * (1 if self._config.decode.method == "greedy" else SAMPLES)
        return self._tokenizer.decode(self._decoder(params, prompts, between_batches=self._between_batches))


def evaluate(workdir: str | Path, split: str) -> Measurement:
    """All metrics of the best model in `workdir` on `split` ('train', 'validation', 'test' or a TFDS split).

    Raises:
      ValueError: there is no such run, checkpoint or split.
    """
    run = trained.load(workdir)
    config, data = run.config, run.config.data
    dataset = pipeline.open_dataset(config)
    dataset.prepare()
    named = {"train": data.train_split, "validation": data.validation_split, "test": data.test_split}
    examples = pipeline.read_split(dataset, named.get(split, split), run.tokenizer, config)
    if note := report.left_out(examples):
        report.say(f"{split} split: of loss and accuracy{note}")
    mode = parallel.MeshMode(run.mesh)
    evaluator = Evaluator(run.model, config, mode, run.tokenizer, label_names=run.label_names)
    return evaluator.measure(run.params, run.params, examples)
