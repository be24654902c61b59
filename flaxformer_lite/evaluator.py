"""The evaluator: loss, accuracy and the scores of each architecture, for parameters on a split.

Translations are compared with references. A language model's loss is also counted per byte and per
character of text. A classifier's predictions are counted in a confusion matrix.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np

from flaxformer_lite import scoring, trained
from flaxformer_lite.data.batches import loader
from flaxformer_lite.data.batches.loader import stream
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.split import Split
from flaxformer_lite.data.tokens.tokenizer import AnyTokenizer
from flaxformer_lite.decoding.compiled_decode import CompileWith
from flaxformer_lite.field_rules import RANDOM
from flaxformer_lite.fields import Config
from flaxformer_lite.model import parameters
from flaxformer_lite.model.ensemble import Ensemble
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.training import (
    ensemble_step,
    evaluations,
    meshes,
    metrics,
    parallel,
    run_report,
    step,
)
from flaxformer_lite.training.saved_evaluation import Evaluation

SAMPLES = 8  # texts that a language model generates at an evaluation


def by_kind(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], kinds: Sequence[str]
) -> dict[str, float]:
    """Returns the exact match of each kind of phrase, as 'exact_match/<kind>'."""
    hit, kind = scoring.exact_matches(hypotheses, references), np.array(kinds)
    return {f"exact_match/{name}": float(hit[kind == name].mean()) for name in sorted(set(kinds))}


class Evaluator:
    """Evaluates parameters on splits; compiles once for each batch shape."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        mode: parallel.MeshMode | parallel.PmapMode,
        tokenizer: AnyTokenizer,
        *,
        label_names: Sequence[str] | None = None,
        compile_with: CompileWith = lambda compile: compile(),
        between_batches: Callable[[], None] = lambda: None,
    ):
        """
        Args:
          label_names: the names of a classifier's classes.
          compile_with: runs a compilation, so that a caller can run it elsewhere and wait.
          between_batches: is called after each batch; its exceptions end the evaluation.
        """
        self._config, self._mode, self._tokenizer = config, mode, tokenizer
        self._label_names = label_names
        self._compile_with, self._between_batches = compile_with, between_batches
        self._param_shapes = parameters.shapes(model)
        decodes = config.model.architecture != "encoder_classifier"
        is_ensemble = decodes and isinstance(model, Ensemble)
        eval_step: Callable[..., Any] = ensemble_step.eval_step if is_ensemble else step.eval_step
        axis_name, row_shards = mode.axis_name, mode.row_shards
        self._steps: dict[str, Callable[..., Any]] = {
            "eval": functools.partial(
                eval_step, model=model, axis_name=axis_name, row_shards=row_shards
            ),
            "confusion": functools.partial(step.confusion_step, model=model, axis_name=axis_name),
        }
        self._compiled: dict[tuple[str, tuple[int, int]], Callable[..., Any]] = {}
        if decodes:
            self._decoder = trained.make_decoder(
                model, config, mode.mesh, tokenizer, compile_with=compile_with
            )

    def evaluate(
        self,
        params: Params,
        whole_params: Params,
        split: Split,
        *,
        decode: int | None = None,
        references: Sequence[Sequence[str]] | None = None,
        bootstrap: int = 0,
        seed: int = scoring.SEED,
        symbols: bool = False,
        groups: Sequence[str] | None = None,
        metric_files: Path | None = None,
    ) -> Evaluation:
        """Evaluates parameters on a split.

        Args:
          params: the parameters, sharded or replicated as the mode requires.
          whole_params: the same parameters, whole on each device.
          decode: the number of examples to decode, from the first; None: all.
          references: the references of translations, each with a text for every example; None: the
            targets of the split.
          bootstrap: the number of resamples for confidence intervals of the scores; 0: no
            intervals.
          seed: the seed of resampling.
          symbols: whether the error rates of symbols are computed even if the tokenizer of the
            targets has other tokens.
          groups: the name of each translation's group, for scores by group; 'length': ranges of
            the reference's length.
          metric_files: the folder of the files for `train.metric_command`; None: a temporary one.
        """
        sums = self._sum_over(split, params, "eval")
        values = metrics.divide(sums)
        architecture = self._config.model.architecture
        if architecture == "encoder_classifier":
            table = self._confusion(params, split) if decode is None else ""
            return Evaluation(values, samples=table, note=table)
        values = metrics.with_perplexity(values)
        if architecture == "decoder_lm":
            nats = float(sums["loss"][0])
            values["bits_per_byte"] = nats / math.log(2) / split.text_bytes
            values["nats_per_character"] = nats / split.text_characters
            values["bits_per_character"] = nats / math.log(2) / split.text_characters
            samples = "\n".join(self._generate(whole_params)) if decode != 0 else ""
            return Evaluation(values, samples=samples)
        texts, sources = split.texts, split.tokens.source
        assert texts is not None and texts.target is not None and sources is not None, (
            "a translator's split has texts"
        )
        count = len(texts) if decode is None else min(decode, len(texts))
        if not count:
            return Evaluation(values)
        hypotheses = self._translate(whole_params, sources[:count])
        references = [each[:count] for each in references or [texts.target]]
        settings = self._settings(symbols)
        scores = self._score(hypotheses, references, settings, bootstrap=bootstrap, seed=seed)
        by_group = {}
        if groups is not None:
            by_group = scoring.scores_by_group(hypotheses, references, groups, **settings)
        if decode is None and texts.kind is not None:
            values |= scores.values | by_kind(hypotheses, references, texts.kind)
        else:
            values |= scores.values
        if self._config.train.metric_command is not None:
            values |= self._external(texts, hypotheses, references, metric_files)
        too_long = sum(not self._fits(ids) for ids in sources[:count])
        notes = (
            run_report.signatures(scores),
            run_report.untranslated(too_long, count, self._decoder.max_length),
        )
        return Evaluation(
            values,
            samples=run_report.translations(texts, hypotheses),
            note="\n".join(filter(None, notes)),
            hypotheses=hypotheses,
            scores=scores,
            too_long=too_long,
            groups=by_group,
            program=self._config.train.metric_command,
        )

    def _confusion(self, params: Params, split: Split) -> str:
        """Returns the confusion matrix of a classifier, as a table."""
        counts_CC = self._sum_over(split, params, "confusion")
        return run_report.confusion(np.asarray(counts_CC), self._label_names or ())

    def _external(
        self,
        texts: Examples,
        hypotheses: Sequence[str],
        references: Sequence[Sequence[str]],
        folder: Path | None,
    ) -> dict[str, float]:
        """Returns the number of `train.metric_command`, which runs in process 0, by its name."""
        from flaxformer_lite.training import external_metric

        value = external_metric.measure_together(
            self._config.train,
            sources=list(texts.source or ())[: len(hypotheses)],
            hypotheses=hypotheses,
            references=references,
            folder=folder,
            between=self._between_batches,
        )
        return {self._config.train.metric_name: value}

    def _settings(self, symbols: bool) -> scoring.SettingsGiven:
        """Returns how translations are scored, by the config."""
        data = self._config.data
        symbols = symbols or data.has_symbols
        if data.pretokenized:
            return {"tokenized": True, "symbols": symbols}
        return {"tokenizer": evaluations.bleu_tokenizer(self._config), "symbols": symbols}

    def _score(
        self,
        hypotheses: Sequence[str],
        references: Sequence[Sequence[str]],
        settings: scoring.SettingsGiven,
        *,
        bootstrap: int,
        seed: int,
    ) -> scoring.Scores:
        if not bootstrap:
            return scoring.score(hypotheses, references, **settings)
        return scoring.resample(
            [hypotheses], references, bootstrap=bootstrap, seed=seed, **settings
        )[0]

    def _sum_over(self, split: Split, params: Params, name: str) -> Any:
        """Returns the sum of the results of the step `name` over all batches of `split`."""
        sums = None
        batches = split.batches(part=meshes.rows_of_process(self._mode.mesh))
        for number, batch in enumerate(stream(batches, self._mode.put_batch)):
            run_step = self._compiled_step(name, split.plan.shape(number))
            sums = metrics.add(sums, self._mode.read(run_step(params, batch)))
            self._between_batches()
        return sums

    def _compiled_step(self, name: str, shape: tuple[int, int]) -> Callable[..., Any]:
        if (name, shape) not in self._compiled:
            struct = loader.batch_struct(self._config, *shape)
            self._compiled[name, shape] = self._compile_with(
                lambda: self._mode.compile(
                    self._steps[name], self._param_shapes, struct, donate=False
                )
            )
        return self._compiled[name, shape]

    def _translate(self, params: Params, sources: Sequence[np.ndarray]) -> list[str]:
        """Returns the translation of each source; empty if the source is too long."""
        return self._decode(params, [ids if self._fits(ids) else ids[:0] for ids in sources])

    def _fits(self, ids: np.ndarray) -> bool:
        return len(ids) < self._decoder.max_length  # 1 position is for the end symbol

    def _generate(self, params: Params) -> list[str]:
        """Returns texts that the language model generates from an empty prompt.

        A single one, unless the method samples: all others would be the same.
        """
        count = SAMPLES if self._config.decode.method in RANDOM else 1
        return self._decode(params, [np.empty(0, np.int32)] * count)

    def _decode(self, params: Params, inputs: Sequence[np.ndarray]) -> list[str]:
        """Returns the decoded texts; `params` are whole on each device."""
        rows = self._decoder(params, inputs, between_batches=self._between_batches)
        return self._tokenizer.decode(rows)
