"""The command `rerank`: chooses from n-best lists by a weighted sum of scores."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.score_flags import place_or_none
from flaxformer_lite.cli.shared_flags import define_in, listed
from flaxformer_lite.lines import whole_files
from flaxformer_lite.scores.reranking import rerank
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import place


class RerankRequest(NamedTuple):
    """Arguments of `rerank`."""

    n_best: Path
    scores: list[Path]
    weights: list[float] | None  # of the n-best score, then of each file of scores; None: all 1
    output: Path | None  # None: standard output


def parse_rerank(arguments: Sequence[str]) -> RerankRequest:
    """Parses the flags of `rerank`.

    Raises:
      InputError: a file is not named, or the weights are not one number for each score.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        flag.string("n_best", None, "file of translate --n_best: number, score, translation")
        scores = "files of more scores, S1,S2, one number for each line of --n_best"
        flag.strings("scores", [], scores)
        weights = "weights of the score in --n_best, and of each file in --scores; default: 1"
        flag.list("weights", None, weights)
        flag.string("output", None, "file to write, one line per text; default: standard output")

    usage = "usage: rerank --n_best=F --scores=S1[,S2,...] [--weights=1,0.5] [--output=F]"
    values = parser.parse(arguments, define, usage=usage)
    if not values.n_best:
        raise InputError("--n_best: expected a file of n-best lists, got nothing; add --n_best=F.")
    names = listed(values.scores or [])
    if not names or not all(names):
        raise InputError(
            f"--scores: expected files, S1,S2 and so on, got {','.join(names)!r}; without other "
            "scores the first translation of each line is the best."
        )
    return RerankRequest(
        place(values.n_best),
        [place(name) for name in names],
        None if values.weights is None else _weights(values.weights, 1 + len(names)),
        place_or_none(values.output),
    )


def _weights(given: Sequence[str], count: int) -> list[float]:
    """Returns the weights; raises InputError unless there are `count` finite numbers."""
    try:
        weights = [float(weight) for weight in given]
    except ValueError:
        weights = []
    if len(weights) != count or not all(map(math.isfinite, weights)):
        raise InputError(
            f"--weights: expected {count} numbers, for the score in --n_best and for each file in "
            f"--scores, got {','.join(given)!r}."
        )
    return weights


def write_reranked(request: RerankRequest) -> None:
    """Writes the best translation of each input line.

    Raises:
      InputError: a file cannot be read or written, or a line is not as expected.
    """
    whole_files.check_output(request.output)
    n_best = whole_files.read_lines(request.n_best, flag="--n_best")
    scores = [_numbers(path, len(n_best)) for path in request.scores]
    whole_files.write_lines(request.output, rerank(n_best, scores, request.weights))


def _numbers(path: Path, count: int) -> list[float]:
    """Returns the numbers of a file, one a line; raises InputError unless there are `count`."""
    lines = whole_files.read_lines(path, flag="--scores")
    if len(lines) != count:
        raise InputError(
            f"--scores={path}: expected {count:,} lines, as many as --n_best has, got "
            f"{len(lines):,}."
        )
    return [_number(line, f"--scores={path}, line {n}") for n, line in enumerate(lines, start=1)]


def _number(line: str, where: str) -> float:
    try:
        value = float(line)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{where}: expected a number, got {line[:40]!r}.")
    return value
