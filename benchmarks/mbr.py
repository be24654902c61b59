"""Minimum Bayes risk (MBR) beside beam search: chrF and BLEU of a run, with intervals.

Without `--workdir` the run is the config `multi30k` from English to French, seed 0; a finished one
is not trained again. The kind of candidates is chosen on validation, for each utility by its own
metric. The test split is then scored once: greedy, beam 5 with alpha 1, and MBR with the choice for
each utility. The p-values compare with beam search, by approximate randomisation.

    python -m benchmarks.mbr --data=data/multi30k
    python -m benchmarks.mbr --workdir=runs/mine
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, multi30k, public_data, train_config
from flaxformer_lite import scoring, translate
from flaxformer_lite.data import pipeline
from flaxformer_lite.system import runtime
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import write_whole
from flaxformer_lite.training import evaluations, run_report

GREEDY: dict[str, Any] = {"method": "greedy"}
BEAM: dict[str, Any] = {"method": "beam", "beam_size": 5, "alpha": 1.0}
UTILITIES = ("chrf", "bleu")
RESAMPLES = 1000


def candidates(count: int) -> dict[str, dict[str, Any]]:
    """Returns the decoding of each kind of candidates, by its name."""
    return {
        f"{count} samples": {"method": "sample"},
        f"{count} samples, epsilon 0.02": {"method": "sample", "epsilon": 0.02},
        f"{count} of a stochastic beam": {"method": "stochastic_beam", "beam_size": count},
        f"{count} best of a beam": {"method": "beam", "beam_size": count, "alpha": 1.0},
    }


class Run:
    """A finished run; translations are kept in its folder, for a stopped command."""

    def __init__(self, workdir: Path, *, parts: Sequence[str], limit: int | None):
        """
        Args:
          parts: the splits to read, 'validation' and 'test'.
          limit: texts of each split; None: all.

        Raises:
          InputError: the texts are tokenised, and have no sacreBLEU.
        """
        self._workdir, self._folder = workdir, workdir / "benchmark" / "mbr"
        self._folder.mkdir(parents=True, exist_ok=True)
        config = translate.load(workdir).run.config
        if config.data.pretokenized:
            raise InputError(
                f"{workdir}: expected a run on raw text, got data.pretokenized=True; name another."
            )
        self._tokenizer = evaluations.bleu_tokenizer(config)
        dataset = pipeline.open_dataset(config, beside=workdir, roles=parts)
        dataset.prepare()
        named = {"validation": config.data.validation_split, "test": config.data.test_split}
        self._source: dict[str, Sequence[str]] = {}
        self._target: dict[str, Sequence[str]] = {}
        for part in parts:
            texts = dataset.read(named[part])
            self._source[part], self._target[part] = texts.source[:limit], texts.target[:limit]

    def texts(
        self, part: str, decode: Mapping[str, Any], *, count: int = 0, utility: str | None = None
    ) -> tuple[list[str], float]:
        """Returns the translations of a split, by MBR if a utility is given, and the seconds."""
        source = self._source[part]
        options = [f"{name}={value}" for name, value in decode.items()]
        setting = "-".join([part, str(len(source)), *options])
        file = self._folder / f"{setting}-{utility or 'plain'}-{count}.json"
        if not file.exists():
            translator = translate.load(self._workdir, **decode)
            run: Callable[..., list[str]] = translator
            if utility:
                run = functools.partial(translator.mbr, samples=count, utility=utility)
            started = time.perf_counter()
            found = run(source)
            seconds = time.perf_counter() - started
            write_whole(file, json.dumps([found, seconds], ensure_ascii=False))
        found, seconds = json.loads(file.read_text(encoding="utf-8"))
        return found, seconds

    def scores(self, part: str, systems: Sequence[list[str]]) -> list[scoring.Scores]:
        """Returns the scores of each system with intervals; p-values are against the first."""
        return scoring.resample(
            systems, [self._target[part]], bootstrap=RESAMPLES, tokenizer=self._tokenizer
        )

    def score(self, part: str, texts: list[str]) -> scoring.Scores:
        """Returns the scores of one system."""
        return scoring.score(texts, [self._target[part]], tokenizer=self._tokenizer)


def chosen(run: Run, count: int) -> tuple[dict[str, str], dict[str, float]]:
    """Returns the kind of candidates for each utility, and all scores on validation."""
    choice, measured = {}, {}
    for utility in UTILITIES:
        found = {}
        for name, decode in candidates(count).items():
            texts, _ = run.texts("validation", decode, count=count, utility=utility)
            scores = run.score("validation", texts)
            found[name] = scores.values[utility]
            for metric in UTILITIES:
                value = scores.values[metric]
                measured[f"validation {metric}, MBR by {utility}, {name}"] = value
        choice[utility] = max(found, key=lambda name: found[name])
    return choice, measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the scores on validation, and a table of those on test."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    public_data.add_flag(parser, "multi30k")
    parser.add_argument("--workdir", type=Path, help="of a finished run, in place of that one")
    parser.add_argument("--candidates", type=int, default=16, help="of each text")
    parser.add_argument("--limit", type=int, help="texts of each split; default: all")
    figures.add_flag(parser)
    options = parser.parse_args(arguments)
    workdir = options.workdir
    if workdir is None:
        try:
            flags = multi30k.flags_of(options.data, "en-fr", "raw")
        except InputError as error:
            parser.error(str(error))
        workdir = train_config.train("multi30k", 0, figures.OUTPUT / "multi30k/en-fr-raw", flags)
    runtime.start()
    try:
        run = Run(workdir, parts=("validation", "test"), limit=options.limit)
    except InputError as error:
        parser.error(str(error))
    count = options.candidates
    choice, measured = chosen(run, count)
    for name, value in measured.items():
        print(f"{name:60} {value:.2f}")
    systems, seconds = {}, {}
    for name, decode in (("beam 5", BEAM), ("greedy", GREEDY)):
        systems[name], seconds[name] = run.texts("test", decode)
    for utility, kind in choice.items():
        name = f"MBR by {utility}, {kind}"
        decode = candidates(count)[kind]
        systems[name], seconds[name] = run.texts("test", decode, count=count, utility=utility)
    scores = run.scores("test", list(systems.values()))
    table = dict(zip(systems, scores, strict=True))
    print(run_report.comparison(table))
    print(run_report.signatures(scores[0]))
    for name, found in table.items():
        for metric in UTILITIES:
            mean, half = found.intervals[metric]
            value = {"value": found.values[metric], "low": mean - half, "high": mean + half}
            measured[f"test {metric}, {name}"] = value | {"n": RESAMPLES}
            if found.p_values:
                measured[f"test {metric}, {name}, p"] = found.p_values[metric]
        measured[f"{name}, seconds"] = seconds[name]
        print(f"{name:60} {seconds[name]:8.1f} s")
    figures.write(options.json, measured)


if __name__ == "__main__":
    main()
