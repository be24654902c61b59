"""What a run tells the user, as text: what was resolved, samples, the closing table."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from flaxformer_lite.config import Config
from flaxformer_lite.data.batches.loader import Batches
from flaxformer_lite.data.pipeline import Data, Split
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.scoring import Scores
from flaxformer_lite.training import flops, progress

RESAMPLED = "95 % of resamples"
# What to do with a trained model of each shape.
NEXT = {
    "encoder_decoder": "Translate with: flaxformer-lite translate --workdir={}",
    "encoder_classifier": "Classify with: flaxformer-lite classify --workdir={}",
    "decoder_lm": "Let it write with: flaxformer-lite generate --workdir={}",
}


def say(text: str) -> None:
    """A line on standard error, from one process only."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def resolved(config: Config, data: Data, mesh: jax.sharding.Mesh, params: dict) -> str:
    """What will be trained, on what, and on which devices."""
    plan = data.train.plan
    shapes = " ".join(f"{rows}x{length}" for rows, length in sorted(plan.shapes()))
    rows, length = plan.shapes()[0]
    sides = [name for name in ("source", "target") if name in data.train.tokens.sides()]
    padding = " and ".join(f"{share:.0%} of {name}" for name, share in zip(sides, plan.padding_shares(), strict=True))
    tokens = f"{plan.tokens[-1] / plan.steps_per_epoch:,.0f} {sides[-1]} tokens a step"
    tokens += ", head room for subword sampling included" if data.train.drawing else ""
    work = flops.train_step(config, rows, length)
    return (
        f"{config.data.dataset}: {len(data.train.tokens):,} examples to train on{left_out(data.train)}, "
        f"{len(data.validation.tokens):,} to validate{left_out(data.validation)}; "
        f"vocabulary {config.model.vocab_size:,}; {sum(x.size for x in jax.tree.leaves(params)):,} parameters; "
        f"{config.parallel.mode} over {over(mesh)}; "
        f"batches {shapes}, padding {padding}; {tokens}; {plan.steps_per_epoch} steps an epoch; "
        f"{work / 1e9:,.3g} GFLOPs a step of {rows}x{length}"
    )


def over(mesh: jax.sharding.Mesh) -> str:
    """'8 x cpu', or '2 data x 4 fsdp x cpu' where devices do not all do the same."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if sizes.keys() <= {"data"}:
        return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    return " x ".join([f"{size} {axis}" for axis, size in sizes.items()] + [mesh.devices.flat[0].device_kind])


def left_out(split: Split) -> str:
    """' (3 too long and 0 empty left out)', or nothing where all are used."""
    plan, lacking = split.plan, split.texts.incomplete if split.texts else 0
    also = f", {lacking} without one of the languages" if lacking else ""
    told = f" ({plan.too_long} too long and {plan.empty} empty left out{also})"
    return told if plan.too_long + plan.empty + lacking else ""


def say_left_out(name: str, split: Split) -> None:
    """What of a split that is measured its loss and accuracy are not of."""
    if told := left_out(split):
        say(f"{name} split: of loss and accuracy{told}")


def drawn(batches: Batches) -> str:
    """How many texts stood with their usual ids, although others were drawn for them."""
    return (
        f"subword sampling: {batches.drawn:,} texts cut anew; {batches.not_fitting / batches.drawn:.1%} of them stood "
        "as they always do, since the row would not have held what was drawn"
    )


def translations(texts: Examples, hypotheses: Sequence[str]) -> str:
    """Source, translation and reference of each, one below the other."""
    rows = zip(texts.source, hypotheses, texts.target, strict=False)
    return "".join(f"source       {s}\ntranslation  {h}\nreference    {r}\n\n" for s, h, r in rows)


def confusion(counts_CC: np.ndarray, names: Sequence[str]) -> str:
    """How many texts of each class (a row) were taken for each (a column), and the share that was right."""
    cells = [["is \\ taken for", *names, "right"]]
    for name, counts_C, right in zip(names, counts_CC, np.diagonal(counts_CC), strict=True):
        share = f"{100 * right / counts_C.sum():.1f} %" if counts_C.sum() else "-"
        cells.append([name, *(f"{count:.0f}" if count else "." for count in counts_C), share])
    return progress.table(cells)


def table(values: Mapping[str, float | None], intervals: Mapping[str, tuple[float, float]] | None = None) -> str:
    """Metrics, one a line; shares of tokens or examples as percentages, and a dash for what was not finite.

    Args:
      intervals: of resampling, shown in a column beside the values that have one.
    """
    if not intervals:
        return progress.table([[name, _cell(name, value)] for name, value in values.items()])
    rows = [[name, _cell(name, value), _interval(name, intervals)] for name, value in values.items()]
    return progress.table([["", "", RESAMPLED], *rows])


def comparison(baseline: Scores, system: Scores) -> str:
    """The scores of two systems with their intervals, and how likely chance alone makes so large a difference."""
    rows = [
        [
            name,
            *(
                cell
                for each in (baseline, system)
                for cell in (_cell(name, each.values[name]), _interval(name, each.intervals))
            ),
            f"{system.p_values[name]:.4f}",
        ]
        for name in system.values
    ]
    return progress.table([["", "baseline", RESAMPLED, "system", RESAMPLED, "p"], *rows])


def signatures(scores: Scores) -> str:
    """sacreBLEU's signature of each score, one a line."""
    return "\n".join(f"{name}: sacreBLEU signature {signature}" for name, signature in scores.signatures.items())


def untranslated(too_long: int, count: int, longest: int) -> str:
    """A line on the sources that the model cannot take, if there are any."""
    if not too_long:
        return ""
    return (
        f"sources of {longest:,} tokens or more, too many for the model: {too_long:,} of {count:,}; their "
        "translations are empty here; flaxformer-lite translate --long=split makes some in segments, for score"
    )


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if name.startswith(("accuracy", "exact_match", "length_accuracy")) else f"{value:.4g}"


def _interval(name: str, intervals: Mapping[str, tuple[float, float]]) -> str:
    if name not in intervals:
        return ""
    shown = "{:.2%}" if name.startswith("exact_match") else "{:.2f}"
    return " ± ".join(shown.format(number).replace("%", " %") for number in intervals[name])


def closing_table(path: Path) -> str:
    """The metrics of the last test line of a `metrics.jsonl`."""
    record = [line for line in metrics_log.read_metrics(path) if line["split"] == "test"][-1]
    values = {name: value for name, value in record.items() if name not in ("step", "seconds", "split", "parameters")}
    measured = record.get("parameters", f"best step {record['step']}")
    return f"test split, {measured}\n{table(values)}"


def written(paths: Workdir, config: Config, seconds: float, goodput: float) -> str:
    """Where everything is, and what to do with it."""
    return (
        f"{seconds / 60:.1f} minutes; {goodput:.0%} of the time of all starts went into training steps.\n"
        f"Written to {paths.path}: config.json, metrics.jsonl, events.* for TensorBoard, tokenizer.model, "
        "checkpoints/, samples/\n" + NEXT[config.model.architecture].format(paths.path)
    )
