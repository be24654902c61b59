"""The card of an exported model: what it is, how to use it, what it learned from, and what was measured of it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from flaxformer_lite import config as config_lib
from flaxformer_lite.runs import metrics_log
from flaxformer_lite.runs.workdir import Workdir
from flaxformer_lite.trained import Trained

UNKNOWN = "unknown"  # a licence that nobody has named
SIGNED = ("bleu", "bleu_tokenized", "chrf")  # told only with what says how they were computed
MEASURED = (*SIGNED, "exact_match", "accuracy", "loss", "perplexity", "bits_per_byte")


def card(run: Trained, paths: Workdir, *, kind: str, usage: str, license: str | None) -> str:
    """README.md, with the fields that model hubs read between the lines of --- at its top.

    Args:
      kind: the format, in words.
      usage: how to use it, Markdown.
      license: None: that of imported weights, or unknown.
    """
    imported = json.loads(paths.imported.read_text(encoding="utf-8")) if paths.imported.exists() else {}
    numbers = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    model = run.config.model
    parts = [
        f"---\nlicense: {license or imported.get('license') or UNKNOWN}\nlibrary_name: {kind.lower()}\n---",
        f"# {paths.path.absolute().name}",
        f"A Transformer ({model.architecture}, {numbers:,} parameters) in the format of {kind}: the parameters of "
        f"{run.origin} of a run of flaxformer_lite. Their SHA-256 is `{run.fingerprint()}`.",
        f"## Use\n\n{usage}",
        f"## Data\n\n{_data(run, imported)}",
        f"## Scores\n\n{_scores(run, paths)}",
        f"## Config\n\n```json\n{json.dumps(config_lib.to_dict(run.config), indent=1)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _data(run: Trained, imported: Mapping[str, Any]) -> str:
    lines = []
    if imported:
        lines.append(
            f"The weights of step 0 are those of {imported['folder']}, a {imported['format']} model. SHA-256 of"
        )
        lines += ["", *(f"- {name}: `{digest}`" for name, digest in imported["files"].items()), ""]
    if "data" not in run.record:  # weights that no step has changed
        return "\n".join(lines)
    lines.append(f"Trained on `{run.config.data.dataset}`, split `{run.config.data.train_split}`. SHA-256 of")
    lines.append("")
    lines.append(f"- the training ids and their order: `{run.record['data']}`")
    lines.append(f"- the tokenizer: `{run.record['tokenizer']}`")
    lines += [f"- {name}: `{digest}`" for name, digest in run.record.get("files", {}).items()]
    return "\n".join(lines)


def _scores(run: Trained, paths: Workdir) -> str:
    """What the run has measured of these parameters."""
    rows = [["split", "score", "value", "signature"], ["---", "---", "---", "---"]]
    for line in _measured(run, paths):
        values = {**line, **line.get("scores", {})}
        signatures = line.get("signatures", {})
        for name in MEASURED:
            if isinstance(values.get(name), float) and (name in signatures or name not in SIGNED):
                signature = signatures.get(name, "").replace("|", "\\|")  # which would be the end of a cell
                rows.append([line["split"], name, f"{values[name]:.4g}", signature])
    if len(rows) == 2:
        return "None was measured."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _measured(run: Trained, paths: Workdir) -> Iterator[Mapping[str, Any]]:
    """Lines of the log, and the files that evaluations have left."""
    origin, last = run.origin, {}
    for line in metrics_log.read_metrics(paths.metrics):
        if line["split"] == "validation" and line["step"] == origin.step and line.get("parameters") == origin.remark:
            last[line["split"]] = line
    yield from last.values()
    for file in sorted(paths.samples.glob("*.scores.json")) if paths.samples.exists() else ():
        facts = json.loads(file.read_text(encoding="utf-8"))
        measured = facts["steps"], facts["average"], facts["parameters"], facts.get("ensemble", [])
        if measured == ([*origin.steps], origin.average, origin.kind, []):
            yield {**facts, "split": f"{facts['split']}, {facts['decode']['method']}"}
