"""How good a model is on a split: loss per token, and its translations against the references."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import flax.linen as nn
import numpy as np
import sacrebleu

from flaxformer_lite import translate
from flaxformer_lite.config import Config
from flaxformer_lite.data import pipeline
from flaxformer_lite.data.datasets import Dataset, TextPairs
from flaxformer_lite.data.loader import stream
from flaxformer_lite.data.pipeline import Split
from flaxformer_lite.data.tokenizer import Tokenizer
from flaxformer_lite.training import metrics, parallel, report, step


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


def by_kind(hypotheses: Sequence[str], texts: TextPairs) -> dict[str, float]:
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
        *,
        compile_with: Callable[[Callable], Callable] = lambda compile: compile(),
        between_batches: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          compile_with: runs a compilation, so that a caller can do it elsewhere and wait.
          between_batches: called after each batch; what it raises ends the measurement.
        """
        self._model, self._config, self._mode = model, config, mode
        self._compile_with, self._between_batches = compile_with, between_batches
        self._decoder = translate.make_decoder(model, config, mode.mesh, compile_with=compile_with)
        self._param_shapes = step.param_shapes(model)
        self._compiled: dict[tuple[int, int], Callable] = {}

    def token_metrics(self, params: dict, split: Split) -> dict[str, float]:
        """Loss, token accuracy and perplexity over all target tokens; `params` as the mode holds them."""
        run = functools.partial(step.eval_step, model=self._model, axis_name=self._mode.axis_name)
        sums = None
        for number, batch in enumerate(stream(pipeline.batches(split), self._mode.put_batch)):
            shape = split.plan.shape(number)
            if shape not in self._compiled:
                compile_step = functools.partial(self._mode.compile, run, self._param_shapes, shape, donate=False)
                self._compiled[shape] = self._compile_with(compile_step)
            sums = metrics.add(sums, self._mode.read(self._compiled[shape](params, batch)))
            self._between_batches()
        return metrics.with_perplexity(metrics.divide(sums))

    def measure(
        self, params: dict, whole_params: dict, tokenizer: Tokenizer, split: Split
    ) -> tuple[dict[str, float], list[str], str]:
        """Everything there is to know about parameters on a split.

        Args:
          params, whole_params: the same, as the mode holds them and whole on each device.

        Returns:
          {name: value} of token metrics, translation scores and exact match by kind; the translations; and
          sacreBLEU's signature.
        """
        values = self.token_metrics(params, split)
        hypotheses = self.translate(whole_params, tokenizer, split.pairs.source)
        scores, signature = score_texts(hypotheses, split.texts.target)
        return {**values, **scores, **by_kind(hypotheses, split.texts)}, hypotheses, signature

    def translate(self, params: dict, tokenizer: Tokenizer, sources: Sequence[np.ndarray]) -> list[str]:
        """The text of each source's translation, empty for one that the model cannot take; `params` whole."""
        fits = [ids if len(ids) < self._decoder.max_length else ids[:0] for ids in sources]
        return tokenizer.decode(self._decoder(params, fits, between_batches=self._between_batches))


def evaluate(workdir: str | Path, split: str) -> tuple[dict[str, float], str]:
    """All metrics of the best model in `workdir` on `split` ('train', 'validation', 'test' or a TFDS split).

    Returns:
      {name: value} and sacreBLEU's signature.

    Raises:
      ValueError: there is no such run, checkpoint or split.
    """
    translator = translate.load(workdir)
    config, data = translator.config, translator.config.data
    dataset = Dataset(data.dataset, source_language=data.source_language)
    dataset.prepare()
    named = {"train": data.train_split, "validation": data.validation_split, "test": data.test_split}
    examples = pipeline.read_split(dataset, named.get(split, split), translator.tokenizer, config)
    if note := report.left_out(examples):
        report.say(f"{split} split: of loss and accuracy{note}")
    evaluator = Evaluator(translator.model, config, parallel.MeshMode(translator.mesh))
    params = translator.params
    values, _, signature = evaluator.measure(params, params, translator.tokenizer, examples)
    return values, signature
