"""Flags that several commands share: decoding, parameters, ensembles and devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

from flaxformer_lite import config as config_lib
from flaxformer_lite.field_rules import CHOICES
from flaxformer_lite.lines import whole_files
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.system.storage import expanded, in_bucket, place

DECODE = {  # every field of DecodeConfig: its type and its help text
    "method": ("string", f"decoding method: {', '.join(CHOICES['decode.method'])}"),
    "beam_size": ("integer", "hypotheses of a beam, all groups together"),
    "alpha": (
        "float",
        "exponent of the length penalty of beam and diverse_beam; higher: longer texts",
    ),
    "penalty": (
        "string",
        "form of this penalty: wu, or power as in Hugging Face and CTranslate2",
    ),
    "beam_groups": ("integer", "diverse_beam: groups of hypotheses"),
    "diversity": ("float", "diverse_beam: penalty of a token for each use by earlier groups"),
    "iterations": ("integer", "mask_predict: passes over a text"),
    "length_candidates": ("integer", "mask_predict: lengths tried"),
    "temperature": ("float", "sample: divides the logits"),
    "top_k": ("integer", "sample: only the k most probable tokens"),
    "top_p": ("float", "sample: only the most probable tokens of this total probability"),
    "epsilon": ("float", "sample: only tokens of this probability or more"),
    "seed": ("integer", "seed of sample and stochastic_beam"),
    "max_extra_length": ("integer", "most tokens beyond the length of the source or prompt"),
    "min_length": ("integer", "tokens before the end symbol is allowed, prompt or prefix included"),
    "no_repeat_ngram": ("integer", "no n-gram of this length occurs twice in a text"),
    "forbidden": (
        "list",
        "words and phrases that no output contains, A,B; @F: the lines of a file",
    ),
    "tokens_per_batch": (
        "integer",
        "input positions decoded at once, padding and each beam counted",
    ),
}


class Define(NamedTuple):
    """The functions of absl that define a flag, bound to one set of flags."""

    string: Callable[..., object]
    strings: Callable[..., object]  # may be given several times
    list: Callable[..., object]  # separated by commas
    integer: Callable[..., object]
    float: Callable[..., object]
    boolean: Callable[..., object]
    enum: Callable[..., object]


def define_in(values: flags.FlagValues) -> Define:
    """Returns the functions that define flags in `values`."""
    kinds = (
        flags.DEFINE_string,
        flags.DEFINE_multi_string,
        flags.DEFINE_list,
        flags.DEFINE_integer,
        flags.DEFINE_float,
        flags.DEFINE_boolean,
        flags.DEFINE_enum,
    )
    return Define(*(functools.partial(kind, flag_values=values) for kind in kinds))


def define_decode(values: flags.FlagValues) -> None:
    """Defines a flag for each field of `DecodeConfig`."""
    define = define_in(values)._asdict()
    for name, (kind, text) in DECODE.items():
        define[kind](name, None, text)


def decode_given(values: flags.FlagValues) -> dict[str, Any]:
    """Returns the fields of `DecodeConfig` that are given.

    Raises:
      InputError: a file of --forbidden cannot be read.
    """
    given: dict[str, Any] = {
        name: values[name].value for name in DECODE if values[name].value is not None
    }
    if "forbidden" in given:
        given["forbidden"] = tuple(
            text for each in given["forbidden"] if each for text in _texts_of(each, "--forbidden")
        )
    return given


def _texts_of(given: str, flag: str) -> list[str]:
    """Returns the lines of the file F for '@F', without blank ones; else the text itself."""
    if not given.startswith("@"):
        return [given]
    lines = whole_files.read_lines(place(given[1:]), flag=flag)
    return [line for line in lines if line.strip()]


def define_alignments(values: flags.FlagValues) -> None:
    """Defines whether lines have an alignment, and which attention weights it is read from."""
    define = define_in(values)
    alignments = "add the alignment after a tab: links 0-0 1-2 of source and target words"
    define.boolean("alignments", False, alignments)
    layer = "--alignments: layer of the decoder, from 0; default: the mean of all layers"
    define.integer("alignment_layer", None, layer)
    head = "--alignments: head of this layer, from 0; default: the mean of all heads"
    define.integer("alignment_head", None, head)
    shift = "--alignments: step of a token: it predicts the token, or has it as its input"
    define.enum("alignment_shift", None, ["output", "input"], shift)


def alignments_given(values: flags.FlagValues) -> dict[str, Any]:
    """Returns `alignments`, the arguments of `alignments.reading_of`, if the flag is given.

    Raises:
      InputError: a flag about alignments has no effect.
    """
    names = {f"alignment_{name}": name for name in ("layer", "head", "shift")}
    found = {name: values[flag].value for flag, name in names.items() if values[flag].present}
    if found and not values.alignments:
        raise InputError(
            f"--alignment_{next(iter(found))}: requires --alignments, which it is about; add that."
        )
    return {"alignments": found} if values.alignments else {}


def define_model(values: flags.FlagValues) -> None:
    """Defines which parameters of a run are used."""
    define = define_in(values)
    average = "average of checkpoints: last:N, best:N or none; default: train.average"
    define.string("average", None, average)
    parameters = "parameters to use; default: ema, the moving average, if the run has one"
    define.enum("parameters", None, ["raw", "ema"], parameters)


def define_together(values: flags.FlagValues) -> None:
    """Defines an ensemble of runs, and how many devices share a model."""
    define = define_in(values)
    tensor = "devices that share one copy of the model; 1: each device has a copy"
    define.integer("tensor", None, tensor, lower_bound=1)
    ensemble = "folders of other runs, W2,W3: average their probabilities with this run's"
    define.strings("ensemble", None, ensemble)


def model_given(values: flags.FlagValues) -> dict[str, Any]:
    """Returns `average`, `parameters`, `ensemble` and `tensor`, if they are given.

    Raises:
      InputError: the average has another form, or the ensemble has an empty name.
    """
    if values.average not in (None, "none"):
        config_lib.parse_average("--average", values.average)
    names = [name for name in ("average", "parameters", "tensor") if name in values]
    given = {name: values[name].value for name in names if values[name].value is not None}
    if "ensemble" not in values or values.ensemble is None:
        return given
    others = listed(values.ensemble)
    if not all(others):
        raise InputError(
            f"--ensemble: expected folders of runs, W2,W3 and so on, got {','.join(others)!r}."
        )
    return given | {"ensemble": others}


def listed(given: Sequence[str]) -> list[str]:
    """Returns the values of a flag that may be given several times, each with commas.

    A value that names an existing file or folder is that one, commas included.
    """

    def is_file(value: str) -> bool:
        return not in_bucket(value) and expanded(value).exists()

    return [
        name
        for value in given
        for name in ([value] if "," in value and is_file(value) else value.split(","))
    ]
