"""The command `score`: reads files of translations and references, and prints their scores."""

from pathlib import Path
from typing import Any

from flaxformer_lite import scoring
from flaxformer_lite.cli.score_flags import ScoreRequest
from flaxformer_lite.lines import whole_files
from flaxformer_lite.training import run_report


def print_scores(request: ScoreRequest) -> None:
    """Prints the scores of a file of translations, and of its groups.

    Raises:
      InputError: a file cannot be read, or the numbers of lines differ.
    """
    flagged = [
        ("--hypotheses", request.hypotheses),
        *(("--references", path) for path in request.references),
    ]
    if request.baseline:
        flagged.append(("--baseline", request.baseline))
    texts = {f"{flag}={path}": whole_files.read_lines(path, flag=flag) for flag, path in flagged}
    groups = read_groups(request.groups)
    counts = {name: len(lines) for name, lines in texts.items()}
    if isinstance(request.groups, Path) and groups is not None:
        counts[f"--groups={request.groups}"] = len(groups)
    scoring.check_counts(counts)
    hypotheses, *references = list(texts.values())
    baseline = [references.pop()] if request.baseline else []
    settings: dict[str, Any] = dict(request.settings)
    if not settings["tokenized"]:
        settings["tokenizer"] = request.tokenizer or scoring.tokenizer_for(request.language)
        if settings["tokenizer"] == scoring.DEFAULT_TOKENIZER != request.tokenizer:
            scoring.warn_if_unspaced(references[0])
    print(
        f"{request.hypotheses}, {len(hypotheses):,} lines, against "
        f"{', '.join(map(str, request.references))}"
    )
    if not request.resampling:
        scores = scoring.score(hypotheses, references, **settings)
        print(run_report.table(scores.values))
    else:
        *others, scores = scoring.resample(
            [*baseline, hypotheses], references, **settings, **request.resampling
        )
        print(
            run_report.comparison(others[0], scores)
            if others
            else run_report.table(scores.values, scores.intervals)
        )
    if groups is not None:
        found = scoring.scores_by_group(hypotheses, references, groups, **settings)
        print(f"\n{run_report.group_table(found)}\n")
    print(run_report.signatures(scores))


def read_groups(groups: Path | str | None) -> list[str] | str | None:
    """Returns the lines of a file of names of groups; other values as they are.

    Raises:
      InputError: the file cannot be read.
    """
    if isinstance(groups, Path):
        return whole_files.read_lines(groups, flag="--groups")
    return groups
