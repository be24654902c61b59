"""The command `score`: reads files of translations and references, and prints their scores."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flaxformer_lite import scoring
from flaxformer_lite.cli.score_flags import AlignmentRequest, ScoreRequest
from flaxformer_lite.lines import whole_files
from flaxformer_lite.scores import alignment_error, word_links
from flaxformer_lite.scoring import Scores
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report

TOO_LOW = (
    "p, bootstrap: of the paired bootstrap, which is too low: for 2 equal systems it is below 0.05 "
    "in about 10 % of all cases"
)


class _Files(NamedTuple):
    """The lines of the files of a request."""

    systems: dict[str, list[str]]  # of --hypotheses, by the path of their file
    baseline: list[str] | None
    references: list[list[str]]
    groups: list[str] | str | None


def print_scores(request: ScoreRequest) -> None:
    """Prints the scores of files of translations, and of their groups; writes those of each line.

    Raises:
      InputError: a file cannot be read or written, or the numbers of lines differ.
    """
    whole_files.check_output(request.segments, flag="--segments")
    files = _read(request)
    settings: dict[str, Any] = dict(request.settings)
    if not settings["tokenized"]:
        settings["tokenizer"] = request.tokenizer or scoring.tokenizer_for(request.language)
        if settings["tokenizer"] == scoring.DEFAULT_TOKENIZER != request.tokenizer:
            scoring.warn_if_unspaced(files.references[0])
    print(
        f"{', '.join(map(str, request.hypotheses))}, {len(files.references[0]):,} lines, against "
        f"{', '.join(map(str, request.references))}"
    )
    systems = {**_baseline(f"{request.baseline} (baseline)", files), **files.systems}
    found = _scores(systems, files.references, request.resampling, settings)
    *_, last = found.values()
    if len(found) > 1:
        print(run_report.comparison(found))
    else:
        print(run_report.table(last.values, last.intervals))
    if last.bootstrap_p_values:
        print(TOO_LOW)
    if files.groups is not None:
        for path, texts in files.systems.items():
            by_group = scoring.scores_by_group(texts, files.references, files.groups, **settings)
            title = f"{path}\n" if len(files.systems) > 1 else ""
            print(f"\n{title}{run_report.group_table(by_group)}\n")
    print(run_report.signatures(last))
    if request.segments is not None:
        lines = _segments(files, settings)
        whole_files.write_lines(request.segments, lines, flag="--segments")
        print(f"{request.segments}: scores of each line")


def _read(request: ScoreRequest) -> _Files:
    """Reads all files; raises InputError if one cannot be read, or its number of lines differs."""
    names = [str(path) for path in request.hypotheses]
    if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InputError(
            f"--hypotheses: expected a file of each system, got {doubled[0]} 2 times; leave 1 out."
        )
    flagged = [("--hypotheses", path) for path in request.hypotheses]
    flagged += [("--references", path) for path in request.references]
    flagged += [("--baseline", request.baseline)] if request.baseline else []
    if request.segments in [path for _, path in flagged]:
        raise InputError(
            f"--segments={request.segments}: expected a new file, got one that is read; name "
            "another."
        )
    texts = [whole_files.read_lines(path, flag=flag) for flag, path in flagged]
    counts = {
        f"{flag}={path}": len(lines) for (flag, path), lines in zip(flagged, texts, strict=True)
    }
    groups = read_groups(request.groups)
    if isinstance(request.groups, Path) and groups is not None:
        counts[f"--groups={request.groups}"] = len(groups)
    scoring.check_counts(counts)
    baseline = texts.pop() if request.baseline else None
    systems = dict(zip(names, texts, strict=False))
    return _Files(systems, baseline, texts[len(names) :], groups)


def _baseline(name: str, files: _Files) -> dict[str, list[str]]:
    """Returns the baseline by its name, if there is one."""
    return {} if files.baseline is None else {name: files.baseline}


def _scores(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[Sequence[str]],
    resampling: Mapping[str, int],
    settings: dict[str, Any],
) -> dict[str, Scores]:
    """Returns the scores of each system, with intervals if there are resamples."""
    texts = list(systems.values())
    if not resampling:
        found = [scoring.score(each, references, **settings) for each in texts]
    else:
        found = scoring.resample(
            texts,
            references,
            bootstrap=resampling["bootstrap"],
            seed=resampling.get("seed", scoring.SEED),
            **settings,
        )
    return dict(zip(systems, found, strict=True))


def _segments(files: _Files, settings: dict[str, Any]) -> list[str]:
    """Returns a JSON object for each line: its number from 1, and the scores of each system."""
    systems = [*_baseline("", files).values(), *files.systems.values()]
    found = [scoring.score_segments(each, files.references, **settings) for each in systems]
    baseline = found.pop(0) if files.baseline is not None else None
    lines = []
    for index, row in enumerate(zip(*found, strict=True)):
        facts: dict[str, Any] = {"line": index + 1}
        facts |= {"baseline": baseline[index]} if baseline else {}
        facts |= {"scores": dict(zip(files.systems, row, strict=True))}
        # A path that is not UTF-8 has lone surrogates, for which JSON has escapes.
        lines.append(json.dumps(facts))
    return lines


def read_groups(groups: Path | str | None) -> list[str] | str | None:
    """Returns the lines of a file of names of groups; other values as they are.

    Raises:
      InputError: the file cannot be read.
    """
    if isinstance(groups, Path):
        return whole_files.read_lines(groups, flag="--groups")
    return groups


def print_alignment_scores(request: AlignmentRequest) -> None:
    """Prints AER, precision and recall of a file of alignments.

    Raises:
      InputError: a file cannot be read, a line is malformed, or the numbers of lines differ.
    """
    named = {
        "--alignments": request.alignments,
        "--reference_alignments": request.references,
    }
    lines = {
        f"{flag}={path}": whole_files.read_lines(path, flag=flag) for flag, path in named.items()
    }
    scoring.check_counts({name: len(each) for name, each in lines.items()})
    hypotheses, references = lines.values()
    found = alignment_error.alignment_scores(
        word_links.all_links(hypotheses, name=str(request.alignments)),
        word_links.references(references, name=str(request.references)),
    )
    print(
        f"{request.alignments}, {len(hypotheses):,} lines, {found.links:,} links, against "
        f"{request.references}, {found.sure:,} sure links and {found.possible:,} possible ones"
    )
    for name in ("aer", "precision", "recall"):
        value = getattr(found, name)
        print(f"{name:<10} {'none' if value is None else f'{100 * value:6.2f} %'}")
