"""The card of an exported model, README.md: its use, its training data, scores and config."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.field_rules import ERROR_RATES, OF_TEXT
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.trained import Trained

UNKNOWN = "unknown"  # licence, if none is given
SIGNED = ("bleu", "bleu_tokenized", "chrf")  # listed only with their sacreBLEU signature
SCORES = (*SIGNED, *ERROR_RATES, "exact_match", "accuracy", "loss", "perplexity", *OF_TEXT)


def card(run: Trained, paths: Workdir, *, kind: str, usage: str, license: str | None) -> str:
    """Returns the text of README.md, with the metadata of model hubs between --- at its top.

    Args:
      kind: the name of the format.
      usage: a section on how to use the model, in Markdown.
      license: None: that of imported weights, also if the run started from a run with them, or
        'unknown'.
    """
    imported, init = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        for file in (paths.imported, paths.init)
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    architecture = run.config.model.architecture
    license = license or imported.get("license") or init.get("license") or UNKNOWN
    parts = [
        f"---\nlicense: {license}\nlibrary_name: {kind.lower()}\n---",
        f"# {paths.path.absolute().name}",
        f"A Transformer ({architecture}, {parameters:,} parameters) in the format of {kind}: the "
        f"parameters of {run.origin} of a run of flaxformer_lite. Their SHA-256 is "
        f"`{run.fingerprint()}`.",
        f"## Use\n\n{usage}",
        f"## Data\n\n{_data(run, imported, init)}",
        f"## Scores\n\n{_scores(run, paths)}",
        f"## Config\n\n```json\n{json.dumps(config_lib.to_dict(run.config), indent=1)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _data(run: Trained, imported: Mapping[str, Any], init: Mapping[str, Any]) -> str:
    lines = []
    if init:
        steps = ", ".join(map(str, init.get("steps", [])))
        kind = f"step {steps} of the run" if steps else "the export"
        lines.append(f"The first parameters are those of {kind} {init['run']}. SHA-256 of")
        names = {"parameters": "its parameters", "tokenizer": "its tokenizer"}
        names |= {"data": "its training ids and their order"} if init.get("data") else {}
        lines += ["", *(f"- {text}: `{init[name]}`" for name, text in names.items()), ""]
    if imported:
        lines.append(
            f"The weights of step 0 are those of {imported['folder']}, "
            f"a {imported['format']} model. SHA-256 of"
        )
        lines += ["", *(f"- {name}: `{digest}`" for name, digest in imported["files"].items()), ""]
    if "data" not in run.record:  # imported weights before the first step
        return "\n".join(lines)
    lines.append(
        f"Trained on `{run.config.data.dataset}`, split `{run.config.data.train_split}`. SHA-256 of"
    )
    lines.append("")
    lines.append(f"- the training ids and their order: `{run.record['data']}`")
    lines.append(f"- the tokenizer: `{run.record['tokenizer']}`")
    lines += [f"- {name}: `{digest}`" for name, digest in run.record.get("files", {}).items()]
    return "\n".join(lines)


def _scores(run: Trained, paths: Workdir) -> str:
    """Returns a table of the run's scores of these parameters."""
    rows = [["split", "score", "value", "signature"], ["---", "---", "---", "---"]]
    for line in _evaluations(run, paths):
        values = {**line, **line.get("scores", {})}
        signatures = line.get("signatures", {})
        for name in SCORES:
            if isinstance(values.get(name), float) and (name in signatures or name not in SIGNED):
                signature = signatures.get(name, "").replace("|", "\\|")  # | ends a cell
                rows.append([line["split"], name, f"{values[name]:.4g}", signature])
    if len(rows) == 2:
        return "None was measured."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _evaluations(run: Trained, paths: Workdir) -> Iterator[Mapping[str, Any]]:
    """Yields the evaluations of these parameters, from the log and from *.scores.json files."""
    origin, last = run.origin, {}
    for line in metrics_log.read_metrics(paths.metrics):
        if (
            line["split"] == "validation"
            and line["step"] == origin.step
            and line.get("parameters") == origin.remark
        ):
            last[line["split"]] = line
    yield from last.values()
    for file in sorted(paths.samples.glob("*.scores.json")) if paths.samples.exists() else ():
        scores = json.loads(file.read_text(encoding="utf-8"))
        evaluated = scores["steps"], scores["average"], scores["parameters"]
        same = evaluated == ([*origin.steps], origin.average, origin.kind)
        if same and scores.get("ensemble", []) == []:
            yield {**scores, "split": f"{scores['split']}, {scores['decode']['method']}"}
