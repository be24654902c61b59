"""The messages and tables of a run, as text."""

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from flaxformer_lite.checks.vocabularies import SIDES, Sizes, of_side, sides_of
from flaxformer_lite.data.batches.loader import Batches
from flaxformer_lite.data.sources.examples import Examples
from flaxformer_lite.data.split import Data, Split
from flaxformer_lite.data.tokens.any_tokenizer import AnyTokenizer
from flaxformer_lite.data.tokens.ragged import Ragged
from flaxformer_lite.data.tokens.two_vocabularies import TwoVocabularies, tokenizer_of
from flaxformer_lite.field_rules import ERROR_RATES, EXTERNAL, SUBWORDS
from flaxformer_lite.fields import BOS, UNK, Config, ModelConfig
from flaxformer_lite.model.parameters import Params
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.scores.groups import GroupScores, macro_mean
from flaxformer_lite.scoring import Scores
from flaxformer_lite.training import flops, parameter_groups

MOST_CLASSES = 40  # of a confusion matrix; of more, the most frequent confusions are listed
CONFUSIONS = 10
HAVE_NO_UNKNOWN = (*SUBWORDS, "byte")  # kinds of tokenizers that have ids for every text
UNITS = {"char": "characters", "word": "words", "spaces": "symbols"}  # one token each
READ_AT_ONCE = 1 << 24  # ids
RESAMPLED = "95 % of resamples"
# The command for a trained model of each architecture.
NEXT_COMMANDS = {
    "encoder_decoder": "Translate with: flaxformer-lite translate {}",
    "encoder_classifier": "Classify with: flaxformer-lite classify {}",
    "decoder_lm": "Generate with: flaxformer-lite generate {}",
}


def say(text: str) -> None:
    """Prints to standard error, in process 0 only."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def resolved(config: Config, data: Data, mesh: jax.sharding.Mesh, params: Params) -> str:
    """Returns the sizes of the data, the model, the batches and the devices of a training."""
    plan = data.train.plan
    shapes = " ".join(f"{rows}x{length}" for rows, length in sorted(plan.shapes()))
    rows, length = plan.shapes()[0]
    sides = [name for name in ("source", "target") if name in data.train.tokens.sides()]
    padding = " and ".join(
        f"{share:.0%} of {name}" for name, share in zip(sides, plan.padding_shares(), strict=True)
    )
    tokens = f"{plan.tokens[-1] / plan.steps_per_epoch:,.0f} {sides[-1]} tokens a step"
    tokens += ", spare capacity for subword sampling included" if data.train.drawing else ""
    work = flops.train_step(config, rows, length)
    return (
        f"{config.data.dataset}: {len(data.train.tokens):,} examples to train on"
        f"{left_out(data.train)}, "
        f"{len(data.validation.tokens):,} to validate{left_out(data.validation)}; "
        f"{vocabulary(config.model)}; "
        f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters; "
        f"{config.parallel.mode} over {over(mesh)}; "
        f"batches {shapes}, padding {padding}; {tokens}; {plan.steps_per_epoch} steps an epoch; "
        f"{work / 1e9:,.3g} GFLOPs a step of {rows}x{length}"
    )


def vocabulary(model: ModelConfig) -> str:
    """Returns 'vocabulary 37,000', or 'vocabularies 97 and 47' of source and target."""
    if model.target_vocab_size is None:
        return f"vocabulary {model.vocab_size:,}"
    return f"vocabularies {model.vocab_size:,} and {model.target_vocab_size:,}"


def smaller_vocabularies(config: Config, sizes: Sizes) -> Iterator[str]:
    """Yields a line about each vocabulary that has fewer pieces than a soft limit."""
    for side, size in zip(sides_of(config), sizes, strict=False):
        own = of_side(config, side)
        most, is_soft = own.data.vocab_size, own.data.vocab_limit == "soft"
        if is_soft and own.data.tokenizer in SUBWORDS and most and size and size < most:
            field = "data.vocab_size" if side == "source" else "data.target_vocab_size"
            yield (
                f"vocabulary: this text has {size:,} pieces, fewer than {field} = {most:,}; "
                "the model has these (data.vocab_limit='soft')"
            )


def groups(config: Config, params: Params) -> str:
    """Returns a table of the optimizer of each group of parameters; '' if all are treated alike."""
    rows = parameter_groups.table(params, config.optim)
    return columns(rows) if len(rows) > 2 else ""


def first_parameters(table: str, config: Config, paths: Workdir) -> str:
    """Returns the groups of `init.txt`: for each start of a name, what becomes of its arrays."""
    groups: dict[tuple[str, str], int] = {}
    notes = []
    for line in table.splitlines():
        kind, _, name = line.partition("  ")
        if line.startswith("note: "):
            notes.append(line)
        else:
            start = "/".join(name.split()[0].split("/")[:2])
            groups[kind.strip(), start] = groups.get((kind.strip(), start), 0) + 1
    rows = [f"  {kind:<8}  {start} ({count} arrays)" for (kind, start), count in groups.items()]
    head = f"the first parameters, from {config.init.run}; all of them are in {paths.init_table}:"
    return "\n".join([head, *notes, *rows])


def over(mesh: jax.sharding.Mesh) -> str:
    """Returns '8 x cpu' for data parallelism, else such as '2 data x 4 fsdp x cpu'."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if sizes.keys() <= {"data"}:
        return f"{mesh.size} x {mesh.devices.flat[0].device_kind}"
    return " x ".join(
        [f"{size} {axis}" for axis, size in sizes.items()] + [mesh.devices.flat[0].device_kind]
    )


def left_out(split: Split) -> str:
    """Returns such as ' (3 too long and 0 empty left out)'; '' if all examples are used."""
    plan, incomplete = split.plan, split.texts.incomplete if split.texts else 0
    also = f", {incomplete} without one of the languages" if incomplete else ""
    message = f" ({plan.too_long} too long and {plan.empty} empty left out{also})"
    return message if plan.too_long + plan.empty + incomplete else ""


def say_left_out(name: str, split: Split) -> None:
    """Prints how many examples of a split its loss and accuracy leave out."""
    if message := left_out(split):
        say(f"{name} split: of loss and accuracy{message}")


def say_unknown(splits: Mapping[str, Split], tokenizer: AnyTokenizer) -> None:
    """Prints how many tokens of each split are unknown to the tokenizer, if any are."""
    if jax.process_index() != 0:
        return
    groups: dict[str, tuple[AnyTokenizer, Sequence[str]]] = {"": (tokenizer, SIDES)}
    if isinstance(tokenizer, TwoVocabularies):
        groups = {f" of the {side}s": (tokenizer_of(tokenizer, side), (side,)) for side in SIDES}
    for of_what, (own, sides) in groups.items():
        parts = [] if own.kind in HAVE_NO_UNKNOWN else _unknown(splits, sides)
        if parts:
            say(f"unknown {UNITS.get(own.kind, 'pieces')}{of_what}: {', '.join(parts)}")


def _unknown(splits: Mapping[str, Split], sides: Sequence[str]) -> list[str]:
    """Returns '3 of 1,009 in train (0.30%)' for each split with unknown tokens on `sides`."""
    parts = []
    for name, split in splits.items():
        own = [ids for side, ids in split.tokens.sides().items() if side in sides]
        unknown, total = np.sum([_counts(ids) for ids in own], axis=0)
        if unknown:
            parts.append(f"{unknown:,} of {total:,} in {name} ({unknown / total:.2%})")
    return parts


def _counts(ids: Ragged) -> np.ndarray:
    """Returns the numbers of unknown tokens, and of all without the start symbols of texts.

    It reads memory-mapped ids part by part.
    """
    counts = np.zeros(2, np.int64)
    for first in range(0, len(ids.values), READ_AT_ONCE):
        part = ids.values[first : first + READ_AT_ONCE]
        counts += np.count_nonzero(part == UNK), np.count_nonzero(part != BOS)
    return counts


def subword_sampling(batches: Batches) -> str:
    """Returns how many texts were sampled, and the share whose sampled ids did not fit."""
    return (
        f"subword sampling: {batches.sampled:,} texts sampled; "
        f"{batches.not_fitting / batches.sampled:.1%} of them kept their usual ids, since the "
        "sampled ones did not fit into the row"
    )


def translations(texts: Examples, hypotheses: Sequence[str]) -> str:
    """Returns the source, translation and reference of each example, below each other."""
    rows = zip(texts.source or (), hypotheses, texts.target or (), strict=False)
    return "".join(f"source       {s}\ntranslation  {h}\nreference    {r}\n\n" for s, h, r in rows)


def confusion(counts_CC: np.ndarray, names: Sequence[str]) -> str:
    """Returns the confusion matrix: a row for each class, a column for each predicted class.

    With more than MOST_CLASSES classes, returns the most frequent confusions, one a line.
    """
    if len(names) > MOST_CLASSES:
        return _most_confused(counts_CC, names)
    cells = [["is \\ predicted", *names, "right"]]
    for name, counts_C, right in zip(names, counts_CC, np.diagonal(counts_CC), strict=True):
        share = f"{100 * right / counts_C.sum():.1f} %" if counts_C.sum() else "-"
        cells.append([name, *(f"{count:.0f}" if count else "." for count in counts_C), share])
    return columns(cells)


def _most_confused(counts_CC: np.ndarray, names: Sequence[str]) -> str:
    wrong_CC = counts_CC * (1 - np.eye(len(names)))
    order = np.argsort(-wrong_CC, axis=None, kind="stable")[:CONFUSIONS]
    pairs = [np.unravel_index(index, wrong_CC.shape) for index in order]
    cells = [
        [names[true], names[predicted], f"{wrong_CC[true, predicted]:.0f}"]
        for true, predicted in pairs
        if wrong_CC[true, predicted]
    ]
    return (
        columns([["is", "predicted", "texts"], *cells])
        if cells
        else "no class is confused with another"
    )


def table(
    values: Mapping[str, float | None], intervals: Mapping[str, tuple[float, float]] | None = None
) -> str:
    """Returns metrics, one a line; shares as percentages, and a dash for None.

    Args:
      intervals: confidence intervals of some of the values, for another column.
    """
    if not intervals:
        return columns([[name, _cell(name, value)] for name, value in values.items()])
    rows = [
        [name, _cell(name, value), _interval(name, intervals)] for name, value in values.items()
    ]
    return columns([["", "", RESAMPLED], *rows])


def comparison(systems: Mapping[str, Scores]) -> str:
    """Returns the scores of systems by their names, one a line, the first system first.

    Intervals and p-values against the first system are more columns, if there are any.
    """
    last = list(systems.values())[-1]
    width = max(map(len, last.values))
    rows = []
    for score in last.values:
        for name, found in systems.items():
            row = [f"{score:<{width}}  {name}", _cell(score, found.values[score])]
            if found.intervals:
                row.append(_interval(score, found.intervals))
            if last.p_values:
                tests = (found.p_values, found.bootstrap_p_values)
                row += [f"{each[score]:.4f}" if each else "" for each in tests]
            rows.append(row)
    head = ["", "", RESAMPLED, "p, randomisation", "p, bootstrap"][: len(rows[0])]
    return columns([head, *rows] if any(head) else rows)


def group_table(found: Mapping[str, GroupScores]) -> str:
    """Returns a line for each group with its number of sentences and its scores, and their mean."""
    mean = macro_mean(found)
    rows = [["group", "n", *mean]]
    for name, group in found.items():
        cells = [_cell(score, value) for score, value in group.values.items()]
        rows.append([name, f"{group.sentences:,}", *cells])
    last = [_cell(score, value) for score, value in mean.items()]
    return columns([*rows, [f"mean of {len(found):,} groups", "", *last]])


def signatures(scores: Scores) -> str:
    """Returns sacreBLEU's signature of each score, one a line."""
    return "\n".join(
        f"{name}: sacreBLEU signature {signature}" for name, signature in scores.signatures.items()
    )


def without_best(config: Config) -> str:
    """Returns a line on a run whose evaluations all lack the metric of the best checkpoint."""
    return (
        f"warning: no evaluation has the value of train.best_metric={config.train.best_metric!r}, "
        "so the newest checkpoint is used as the best"
    )


def untranslated(too_long: int, count: int, longest: int) -> str:
    """Returns a line on the sources that are too long for the model; '' if there are none."""
    if not too_long:
        return ""
    return (
        f"sources of {longest:,} tokens or more, too many for the model: {too_long:,} of "
        f"{count:,}; their translations are empty here; flaxformer-lite translate --long=split "
        "translates them in segments, for score"
    )


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if math.isnan(value) and name in (*ERROR_RATES, *EXTERNAL):
        return "-"
    if name in ERROR_RATES:
        return f"{value:.2f} %"
    return (
        f"{100 * value:.2f} %"
        if name.startswith(("accuracy", "exact_match", "length_accuracy"))
        else f"{value:.4g}"
    )


def _interval(name: str, intervals: Mapping[str, tuple[float, float]]) -> str:
    if name not in intervals:
        return ""
    shown = "{:.2%}" if name.startswith("exact_match") else "{:.2f}"
    shown += "%" if name in ERROR_RATES else ""
    return " ± ".join(shown.format(number).replace("%", " %") for number in intervals[name])


def closing_table(path: Path) -> str:
    """Returns the metrics of the last test line of a `metrics.jsonl`."""
    record = [line for line in metrics_log.read_metrics(path) if line["split"] == "test"][-1]
    values = {
        name: value
        for name, value in record.items()
        if name not in ("step", "seconds", "split", "parameters")
    }
    origin = record.get("parameters", f"best step {record['step']}")
    return f"test split, {origin}\n{table(values)}"


def written(paths: Workdir, config: Config, seconds: float, goodput: float) -> str:
    """Returns the time and the files of a finished run, and the command to use its model."""
    return (
        f"{seconds / 60:.1f} minutes; {goodput:.0%} of the time of all starts went into training "
        "steps.\n"
        f"Written to {paths.path}: config.json, metrics.jsonl, events.* for TensorBoard, "
        "tokenizer.model, checkpoints/, samples/\n"
        + NEXT_COMMANDS[config.model.architecture].format(shlex.quote(f"--workdir={paths.path}"))
    )


def columns(rows: list[list[str]]) -> str:
    """Returns rows of text in columns: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in rows)


def _aligned(row: list[str], widths: list[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.rjust(width) if i else cell.ljust(width)
