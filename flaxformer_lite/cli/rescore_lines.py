"""The command `rescore`: reads texts, and writes their scores, their words, or sums over all."""

import sys
from collections.abc import Sequence
from typing import Any

from flaxformer_lite import rescore
from flaxformer_lite.alignments import Aligner, reading_of
from flaxformer_lite.cli.rescore_request import RescoreRequest
from flaxformer_lite.lines import line_job, whole_files
from flaxformer_lite.lines.line_windows import Answer, LineReader, Window
from flaxformer_lite.lines.paired_files import SEPARATOR
from flaxformer_lite.lines.score_lines import (
    Total,
    WordScore,
    jsonl,
    surprisal_rows,
    tsv,
    word_scores,
)
from flaxformer_lite.rescore import Pair, Rescorer, Scored
from flaxformer_lite.scores.word_links import line_of
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training.token_scores import TokenScores

NAN = float("nan")
WHOLE = "the model of this run reads the file as one text"


def run(request: RescoreRequest) -> None:
    """Writes the scores.

    Raises:
      InputError: a flag does not fit the model, or as `line_job.run`.
    """
    rescorer = rescore.load(request.workdir, **request.model)
    _check(request, rescorer)
    is_whole = rescorer.run.config.data.whole_files
    if request.total or (request.surprisal and is_whole):
        whole_files.check_output(request.job.output)
        lines = _whole_lines(rescorer, request) if is_whole else [_total(rescorer, request)]
        whole_files.write_lines(request.job.output, lines)
        return
    answer = LineRescorer(rescorer, request)
    skipped = line_job.run(
        request.job, answer, asked=lambda: {**request.settings, **rescorer.asked()}
    )
    _say_skipped(skipped)


class LineRescorer:
    """Returns the output lines of the command for a window of input lines."""

    def __init__(self, rescorer: Rescorer, request: RescoreRequest):
        """
        Args:
          request: the flags; the model is that of `rescorer`.
        """
        self._rescorer, self._request = rescorer, request
        self._has_files = request.job.target is not None
        self._as_line = jsonl if request.format == "jsonl" else tsv
        self._aligner: Aligner | None = None
        if request.alignments is not None:
            reading = reading_of(rescorer.run.config, **request.alignments)
            self._aligner = Aligner(rescorer.run, reading)

    def __call__(self, window: Window) -> Answer:
        """Raises InputError if a line is malformed, or too long."""
        pairs, scored, skipped = self.scored(window)
        if self._request.surprisal:
            rows = zip(window.numbers, pairs, scored, strict=True)
            return Answer(
                [row for line in rows for row in surprisal_rows(line[0], self._words(*line[1:]))],
                skipped,
            )
        values = [self._values(each) for each in scored]
        if self._aligner is not None:
            kept = [n for n, each in enumerate(scored) if each is not None]
            links = self._aligner([pairs[n] for n in kept])
            of_line = dict(zip(kept, map(line_of, links), strict=True))
            for n, columns in enumerate(values):
                columns["alignment"] = of_line.get(n, "").split()
        return Answer([self._as_line(columns) for columns in values], skipped)

    def scored(self, window: Window) -> tuple[list[Pair], list[Scored | None], int]:
        """Returns the pairs of a window, their scores, and the number of pairs without a score."""
        pairs = [
            self._pair(line, f"{window.name} {number}")
            for number, line in zip(window.numbers, window.lines, strict=True)
        ]
        skips = self._request.long == "skip"
        kept = [n for n, pair in enumerate(pairs) if not skips or self._rescorer.fits(pair)]
        found = self._rescorer.scored(
            [pairs[n] for n in kept],
            name=window.name,
            numbers=[window.numbers[n] for n in kept],
        )
        scored: list[Scored | None] = [None] * len(pairs)
        for n, each in zip(kept, found, strict=True):
            scored[n] = each
        return pairs, scored, len(pairs) - len(kept)

    def _pair(self, line: str, where: str) -> Pair:
        if not self._rescorer.has_source:
            return "", line
        source, *targets = line.split(SEPARATOR if self._has_files else "\t")
        if len(targets) != 1:
            raise InputError(
                f"{where}: expected a source, a tab and a target, got {len(targets)} tabs; correct "
                "the line, or name two files by --input and --target."
            )
        return source, targets[0]

    def _words(self, pair: Pair, scored: Scored | None) -> list[WordScore]:
        if scored is not None:
            return self._rescorer.words_of(pair[1], scored.tokens)
        return [each._replace(surprisal=NAN) for each in word_scores(pair[1], [], [])]

    def _values(self, scored: Scored | None) -> dict[str, Any]:
        """Returns the columns of a pair by their names."""
        has_reverse = self._rescorer.reverse is not None
        if scored is None:
            scored = Scored(NAN, TokenScores((), ()), NAN if has_reverse else None)
        values: dict[str, Any] = {"score": scored.score}
        if has_reverse:
            values |= {"forward": scored.forward, "backward": scored.backward}
        values["perplexity"] = scored.tokens.perplexity
        values["tokens"] = len(scored.tokens.log_probs)
        if self._request.tokens:
            values |= {"pieces": scored.tokens.pieces, "log_probs": scored.tokens.log_probs}
        return values


def _total(rescorer: Rescorer, request: RescoreRequest) -> str:
    """Returns the sums over all lines as JSON."""
    answer, total, skipped = LineRescorer(rescorer, request), Total(), 0
    with LineReader(request.job.input) as reader:
        for window in reader.windows(request.job.window):
            pairs, scored, of_window = answer.scored(window)
            skipped += of_window
            for (_, text), each in zip(pairs, scored, strict=True):
                if each is not None:
                    total.add(text, each.tokens.log_probs)
    _say_skipped(skipped)
    return jsonl(total.values())


def _whole_lines(rescorer: Rescorer, request: RescoreRequest) -> Sequence[str]:
    """Returns the sums over a file as JSON, or the rows of its words."""
    text, tokens, of_tokens = rescore.whole_file(rescorer, str(request.job.input or "/dev/stdin"))
    if request.total:
        total = Total()
        total.add(text, tokens.log_probs)
        return [jsonl(total.values())]
    rows, lines, start = list[str](), text.split("\n"), 0
    found = iter(word_scores(text, of_tokens, tokens.log_probs[: len(of_tokens)]))
    waiting = next(found, None)
    for number, line in enumerate(lines, start=1):
        of_line = list[WordScore]()
        while waiting is not None and waiting.start < start + len(line):
            of_line.append(waiting._replace(start=waiting.start - start, end=waiting.end - start))
            waiting = next(found, None)
        rows += surprisal_rows(number, of_line)
        start += len(line) + 1
    return rows


def _say_skipped(skipped: int) -> None:
    if skipped:
        print(f"note: lines without a score, too long for the model: {skipped:,}", file=sys.stderr)


def _check(request: RescoreRequest, rescorer: Rescorer) -> None:
    """Raises InputError if a flag does not fit the model."""
    data = rescorer.run.config.data
    if rescorer.has_source and request.total:
        raise InputError(
            "--total: applies only to language models, whose texts have no source; leave it out."
        )
    if not rescorer.has_source and request.job.target is not None:
        raise InputError("--target: a language model has no source; name the texts by --input.")
    if data.windows is not None and "long" in request.given:
        raise InputError(
            "--long: has no effect on a run with data.windows, whose texts have any length; leave "
            "it out."
        )
    if data.whole_files and (request.total or request.surprisal):
        for name in ("window", "restart", "progress"):
            if name in request.given:
                raise InputError(f"--{name}: has no effect, as {WHOLE}; leave it out.")
