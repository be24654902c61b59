"""Flags that several commands share: which parameters of a run are used, where they lie, and how texts are written."""

from collections.abc import Sequence

from absl import flags

from flaxformer_lite import config as config_lib
from flaxformer_lite.system.errors import InputError

DECODE = {  # every field of DecodeConfig: how its flag is defined, and what --help says
    "method": (flags.DEFINE_string, "greedy, sample, beam or mask_predict"),
    "beam_size": (flags.DEFINE_integer, "beam: hypotheses that are kept"),
    "alpha": (flags.DEFINE_float, "beam: of the length penalty; higher: longer texts"),
    "penalty": (flags.DEFINE_string, "beam: wu, or power as Hugging Face and CTranslate2 have it"),
    "iterations": (flags.DEFINE_integer, "mask_predict: how often tokens are predicted"),
    "length_candidates": (flags.DEFINE_integer, "mask_predict: lengths that are tried"),
    "temperature": (flags.DEFINE_float, "sample: what logits are divided by"),
    "top_k": (flags.DEFINE_integer, "sample: only the k likeliest tokens"),
    "top_p": (flags.DEFINE_float, "sample: only the likeliest tokens of this share"),
    "seed": (flags.DEFINE_integer, "sample: of the draws"),
    "max_extra_length": (flags.DEFINE_integer, "most tokens beyond those of the source or prompt"),
    "min_length": (flags.DEFINE_integer, "fewest tokens of a text"),
    "no_repeat_ngram": (flags.DEFINE_integer, "n: no n tokens in a row occur twice in a text"),
    "tokens_per_batch": (flags.DEFINE_integer, "input tokens decoded at once, with padding and for each beam"),
}


def define_decode(values: flags.FlagValues) -> None:
    """A flag for each field of `DecodeConfig`."""
    for name, (define, text) in DECODE.items():
        define(name, None, text, flag_values=values)


def decode_given(values: flags.FlagValues) -> dict[str, object]:
    """The fields that were given."""
    return {name: values[name].value for name in DECODE if values[name].value is not None}


def define_model(values: flags.FlagValues) -> None:
    """Which parameters of a run are used."""
    average = "of checkpoints: last:N, best:N, or none; default: as the run's train.average"
    flags.DEFINE_string("average", None, average, flag_values=values)
    kinds = "raw, or ema: their moving average; default: ema where the run keeps one"
    flags.DEFINE_enum("parameters", None, ["raw", "ema"], kinds, flag_values=values)


def define_together(values: flags.FlagValues) -> None:
    """Which runs decide together, and how many devices hold each of their models together."""
    devices = "devices that hold a model between them, each a part; 1: each holds all, and has texts of its own"
    flags.DEFINE_integer("tensor", None, devices, lower_bound=1, flag_values=values)
    others = "folders of other runs, whose models decide together with this one's: the mean of their probabilities"
    flags.DEFINE_multi_string("ensemble", None, others, flag_values=values)


def model_given(values: flags.FlagValues) -> dict[str, object]:
    """`average`, `parameters`, `ensemble` and `tensor`, if they were given.

    Raises:
      InputError: an average that is none, or an ensemble of nothing.
    """
    if values.average not in (None, "none"):
        config_lib.parse_average("--average", values.average)
    names = [name for name in ("average", "parameters", "tensor") if name in values]
    given = {name: values[name].value for name in names if values[name].value is not None}
    if "ensemble" not in values or values.ensemble is None:
        return given
    others = listed(values.ensemble)
    if not all(others):
        raise InputError(f"--ensemble: expected folders of runs, W2,W3 and so on, got {','.join(others)!r}.")
    return given | {"ensemble": others}


def listed(given: Sequence[str]) -> list[str]:
    """What a flag lists, with commas or given several times."""
    return [name for names in given for name in names.split(",")]
