"""Flags of `rescore`."""

from collections.abc import Sequence

from absl import flags

from flaxformer_lite.cli import parser
from flaxformer_lite.cli.rescore_request import FORMATS, RescoreRequest
from flaxformer_lite.cli.run_flags import define_job, job_given, required_workdir
from flaxformer_lite.cli.score_flags import place_or_none
from flaxformer_lite.cli.shared_flags import (
    alignments_given,
    define_alignments,
    define_in,
    define_model,
    define_together,
    model_given,
)
from flaxformer_lite.system.errors import InputError

SCORING = ("alpha", "penalty", "stride", "tokens_per_batch", "reverse")


def parse_rescore(arguments: Sequence[str]) -> RescoreRequest:
    """Parses the flags of `rescore`.

    Raises:
      InputError: a flag has no effect with the others.
    """

    def define(values: flags.FlagValues) -> None:
        flag = define_in(values)
        define_job(values)
        flag.string("target", None, "file of targets, a line for each source of --input")
        flag.enum("format", "tsv", FORMATS, "columns with tabs, or a JSON object a line")
        flag.boolean("tokens", False, "write each token with its log-probability too")
        surprisal = "a row for each word: its surprisal in bits, tokens, and characters"
        flag.boolean("surprisal", False, surprisal)
        total = "language models: the sums over the file as one line of JSON, no lines"
        flag.boolean("total", False, total)
        long = "lines that are too long for the model: refuse, or skip: their score is nan"
        flag.enum("long", "refuse", ["refuse", "skip"], long)
        flag.string("reverse", None, "run of the other direction; adds its score of the source")
        flag.float("alpha", None, "exponent of the length penalty; default: 0, no penalty")
        penalty = "form of the length penalty, as of translate: wu or power"
        flag.string("penalty", None, penalty)
        stride = "tokens that each window of a text adds, with data.windows; default: all of it"
        flag.integer("stride", None, stride, lower_bound=1)
        batch = "target positions scored at once, padding counted; default: data.tokens_per_batch"
        flag.integer("tokens_per_batch", None, batch, lower_bound=1)
        define_alignments(values)
        define_model(values)
        define_together(values)

    usage = (
        "usage: rescore --workdir=W [--input=PAIRS.tsv] [--output=F] [--tokens] [--reverse=W2]\n"
        "               [--alignments]\n"
        "       rescore --workdir=W --input=SOURCES --target=TARGETS\n"
        "       rescore --workdir=LM [--input=TEXTS] [--total] [--surprisal]"
    )
    values = parser.parse(arguments, define, usage=usage)
    given = frozenset(name for name in values if values[name].present)
    _check_together(values, given)
    job = job_given(values)._replace(target=place_or_none(values.target))
    if job.target is not None and job.input is None:
        raise InputError("--target: requires --input=FILE, the file of the sources; add it.")
    scoring = {name: values[name].value for name in SCORING if values[name].value is not None}
    return RescoreRequest(
        required_workdir(values),
        job,
        model_given(values) | scoring,
        values.format,
        values.tokens,
        values.long,
        values.total,
        values.surprisal,
        alignments_given(values).get("alignments"),
        given,
    )


def _check_together(values: flags.FlagValues, given: frozenset[str]) -> None:
    """Raises InputError if a flag has no effect with another one."""
    of_lines = ("tokens", "alignments", "format", "reverse", "alpha", "penalty")
    without = {
        "total": ("surprisal", *of_lines, "restart"),
        "surprisal": of_lines,
    }
    for flag, others in without.items():
        if values[flag].value and (found := [name for name in others if name in given]):
            raise InputError(f"--{found[0]}: has no effect with --{flag}; leave one of them out.")
