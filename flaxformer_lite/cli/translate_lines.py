"""The command `translate`: reads lines, and writes the translation of each, or what flags add."""

import sys
from collections.abc import Callable
from typing import Any

from flaxformer_lite import translate
from flaxformer_lite.cli.run_flags import TranslateRequest
from flaxformer_lite.lines import line_job
from flaxformer_lite.lines.line_windows import Answer, Window
from flaxformer_lite.lines.score_lines import tsv
from flaxformer_lite.scores.word_links import line_of
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.translate import LineTranslator, Translator

Lines = Callable[[Window], Answer]


def run(request: TranslateRequest) -> None:
    """Writes the lines.

    Raises:
      InputError: flags exclude each other, or as `line_job.run`.
    """
    # The model loads before the command waits for standard input.
    translator = translate.load(request.workdir, **request.model, **request.decode)
    answer = lines_of(translator, **request.lines)
    split = line_job.run(
        request.job, answer, asked=lambda: {**request.settings, **translator.run.asked()}
    )
    if split:
        print(
            f"note: lines that were too long for the model and translated in segments: {split:,}",
            file=sys.stderr,
        )


def lines_of(
    translator: Translator,
    *,
    n_best: int | None = None,
    scores: bool = False,
    token_scores: bool = False,
    alignments: translate.ReadingOptions | None = None,
    mbr: int | None = None,
    utility: str = "chrf",
    long: str = "refuse",
    **options: Any,
) -> Lines:
    """Returns the function that maps a window of input lines to output lines.

    Args:
      n_best: the number of translations of a line, each a line with its number and score.
      scores: whether each line starts with the log-probability of its translation.
      token_scores: whether each line also has the pieces and their log-probabilities.
      alignments: the weights that are the alignment, which follows each translation; see
        `alignments.reading_of`. None: no alignment.
      mbr, utility: see `Translator.mbr`; None: no such choice.
      long, options: as of `LineTranslator`.

    Raises:
      InputError: options exclude each other, or have wrong values.
    """
    flags = {
        "--n_best": n_best is not None,
        "--token_scores": token_scores,
        "--scores": scores and not token_scores,
        "--alignments": alignments is not None,
    }
    chosen = [flag for flag, is_given in flags.items() if is_given]
    _check_together(translator, chosen, mbr=mbr, long=long)
    rule = None if mbr is None else translator.mbr_rule(mbr, utility)
    lines = LineTranslator(translator, long=long, rule=rule, **options)
    if n_best is not None:
        return _n_best_lines(translator, lines, n_best)
    if scores or token_scores:
        return _scored_lines(translator, lines, has_tokens=token_scores)
    if alignments is not None:
        return _aligned_lines(translator, lines, alignments)
    return lines


def _check_together(
    translator: Translator, chosen: list[str], *, mbr: int | None, long: str
) -> None:
    """Raises InputError if flags exclude each other.

    Args:
      chosen: those of --n_best, --scores, --token_scores and --alignments that are given.
    """
    others = [*chosen[1:], *(["--mbr"] if mbr is not None and chosen != ["--alignments"] else [])]
    if chosen and others:
        raise InputError(
            f"{chosen[0]}: its lines have no place for what {others[0]} writes; leave one of the "
            "two out."
        )
    if chosen and long == "split":
        raise InputError(
            f"--long=split: applies only to plain translations; leave out {chosen[0]}."
        )
    method = translator.run.config.decode.method
    if method == "mask_predict" and {"--scores", "--token_scores"} & {*chosen}:
        raise InputError(
            f"{chosen[0]}: decode.method='mask_predict' predicts all tokens at once, and its texts "
            "have no probability; leave it out."
        )


def _n_best_lines(translator: Translator, lines: LineTranslator, n: int) -> Lines:
    """Returns the function for the n best translations of each line."""
    translator.n_best([], n)  # raises if the number is too large

    def answer(window: Window) -> Answer:
        sources, prefixes = lines.encode(window)
        sampled_as = [number % 2**31 for number in range(window.first, window.first + len(sources))]
        found = translator.n_best_of_ids(sources, n, prefixes, sampled_as)
        numbered = zip(window.numbers, found, strict=True)
        return Answer(
            [f"{number}\t{score:.6f}\t{text}" for number, row in numbered for text, score in row]
        )

    return answer


def _scored_lines(translator: Translator, lines: LineTranslator, *, has_tokens: bool) -> Lines:
    """Returns the function for translations with their log-probabilities."""

    def answer(window: Window) -> Answer:
        sources, prefixes = lines.encode(window)
        numbers = [number % 2**31 for number in range(window.first, window.first + len(sources))]
        found = list[str]()
        for text, tokens in translator.scored_ids(sources, prefixes, numbers):
            shown = text.replace("\t", " ")  # a tab ends a column
            line = f"{tokens.log_prob:.6f}\t{shown}"
            if has_tokens:
                columns = {"pieces": tokens.pieces, "log_probs": tokens.log_probs}
                line += f"\t{tsv(columns)}"
            found.append(line)
        return Answer(found)

    return answer


def _aligned_lines(
    translator: Translator, lines: LineTranslator, reading: translate.ReadingOptions
) -> Lines:
    """Returns the function for translations with their alignments."""
    aligner = translate.aligner_of(translator.run, **reading)

    def answer(window: Window) -> Answer:
        found = lines(window).lines
        links = aligner.of_translations(window.lines, found)
        return Answer([f"{line}\t{line_of(each)}" for line, each in zip(found, links, strict=True)])

    return answer
