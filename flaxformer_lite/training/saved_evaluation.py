"""The result of evaluating a run, and its files: the translations and their scores."""

import dataclasses
import hashlib
import json
import math
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

from flaxformer_lite import scoring
from flaxformer_lite.fields import Config, DecodeConfig
from flaxformer_lite.scores.groups import GroupScores, macro_mean
from flaxformer_lite.scoring import Scores
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import absolute, make_folder, why_unwritable, write_whole
from flaxformer_lite.training.origin import Origin

SCORES = ".scores.json"  # the suffix of files of scores
METRIC_FILES = "metric_command"  # the folder of the files for `train.metric_command`


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a model on a split."""

    values: dict[str, float]
    samples: str = ""  # generated texts, for a person to read
    note: str = ""  # sacreBLEU's signatures, or a classifier's confusion matrix
    hypotheses: Sequence[str] = ()  # the scored translations
    scores: scoring.Scores | None = None  # of the hypotheses
    too_long: int = 0  # sources that exceed the model's length; their translations are empty
    groups: Mapping[str, GroupScores] = dataclasses.field(default_factory=dict)  # scores of each
    program: str | None = None  # the `train.metric_command` that has computed a value


def check_folder(folder: Path) -> None:
    """Raises InputError if `save` could not write to `folder`."""
    if reason := why_unwritable(folder):
        raise InputError(f"--output={folder}: cannot be written to: {reason}; name another folder.")


def check_unused(folder: Path, *, run: Path, split: str, config: Config, origin: Origin) -> None:
    """Raises InputError if `save` would overwrite files of another run."""
    name = _name(split, config, origin)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith(f"{name}.") and path.name.endswith(SCORES):
            try:
                other = json.loads(path.read_text(encoding="utf-8"))["run"]
            except (ValueError, KeyError, TypeError):
                continue  # an older version without the run, or another file
            if other != str(absolute(run)):
                raise InputError(
                    f"--output={folder}: {path.name} there is of the run {other}; "
                    "name another folder."
                )


def check_references(
    folder: Path, references: Sequence[str], *, split: str, config: Config, origin: Origin
) -> None:
    """Raises InputError if `save` would overwrite scores against references of the same names."""
    path = folder / _scores_name(split, config, origin, references)
    try:
        others = json.loads(path.read_text(encoding="utf-8"))["references"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # no file, or not one of scores
    if references and others != list(references):
        raise InputError(
            f"{path}: there are scores against {', '.join(others)}; name another folder with "
            "--output, or move them."
        )


def save(
    evaluation: Evaluation,
    folder: Path,
    *,
    run: Path,
    split: str,
    config: Config,
    origin: Origin,
    references: Sequence[str] = (),
) -> list[Path]:
    """Writes the translations, one a line, and a JSON file of their scores; returns both paths.

    The file names contain the split, the step and the decoding method. A line end in a translation
    becomes a space. Without translations nothing is written.

    Args:
      run: the workdir.
      references: the names of the references; empty: the targets of the split.

    Raises:
      InputError: the folder cannot be written to.
    """
    if evaluation.scores is None:
        return []
    texts = folder / f"{_name(split, config, origin)}.hypotheses.txt"
    scores = folder / _scores_name(split, config, origin, references)
    facts = {
        "run": str(absolute(run)),
        "hypotheses": texts.name,
        "references": list(references) or "the split's own",
        "sentences": len(evaluation.hypotheses),
        "too_long": evaluation.too_long,
        "data": dataclasses.asdict(config.data),
        "split": split,
        **_facts_of_origin(origin),
        "decode": dataclasses.asdict(config.decode),
        **({"metric_command": evaluation.program} if evaluation.program else {}),
        **_facts_of_scores(evaluation.values, evaluation.scores),
        **_facts_of_groups(evaluation.groups),
    }
    # A path that is not UTF-8 has lone surrogates, for which JSON has escapes.
    content = json.dumps(facts, indent=2, ensure_ascii=False).encode(errors="backslashreplace")
    lines = (text.replace("\r", " ").replace("\n", " ") for text in evaluation.hypotheses)
    try:
        make_folder(folder)
        write_whole(texts, "".join(f"{line}\n" for line in lines))
        write_whole(scores, content + b"\n")
    except OSError as error:
        raise InputError(
            f"--output={folder}: cannot be written to: {error.strerror}; name another folder."
        ) from error
    return [texts, scores]


def _facts_of_origin(origin: Origin) -> dict[str, object]:
    return {
        "steps": origin.steps,
        "average": origin.average,
        "parameters": origin.kind,
        "ensemble": list(origin.others),
    }


def _facts_of_scores(values: Mapping[str, float], scores: Scores) -> dict[str, object]:
    return {
        "scores": _finite(values),
        "signatures": scores.signatures,
        "resampled": {
            name: {"mean": mean, "plus_minus": half}
            for name, (mean, half) in scores.intervals.items()
        },
    }


def _facts_of_groups(groups: Mapping[str, GroupScores]) -> dict[str, object]:
    if not groups:
        return {}
    return {
        "groups": {
            name: {"sentences": group.sentences, "scores": _finite(group.values)}
            for name, group in groups.items()
        },
        "mean_of_groups": _finite(macro_mean(groups)),
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Returns values for JSON, which has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _name(split: str, config: Config, origin: Origin) -> str:
    """Returns the common prefix of the file names of an evaluation."""
    return f"{_quoted(split, safe='[]:%+')}.{origin.label}.{_method(config.decode)}"


def _quoted(name: str, *, safe: str) -> str:
    return urllib.parse.quote(name, safe=safe, errors="surrogateescape")  # may not be UTF-8


def _scores_name(split: str, config: Config, origin: Origin, references: Sequence[str]) -> str:
    against = "".join(f".{_quoted(Path(each).name, safe='')}" for each in references)
    return f"{_name(split, config, origin)}{against}{SCORES}"


def _method(decode: DecodeConfig) -> str:
    """Returns the method and the fields that change texts, such as 'sample-temperature=0.8'."""
    defaults, fields = dataclasses.asdict(DecodeConfig()), dataclasses.asdict(decode)
    unnamed = ("method", "tokens_per_batch")
    if decode.forbidden:  # texts may have characters that no file name has
        digest = hashlib.sha256("\n".join(decode.forbidden).encode()).hexdigest()[:8]
        fields["forbidden"] = f"{len(decode.forbidden)}-{digest}"
    changed = (
        f"{name}={value}"
        for name, value in fields.items()
        if name not in unnamed and value != defaults[name]
    )
    return "-".join([decode.method, *changed])
