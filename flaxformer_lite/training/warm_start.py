"""The first parameters of a run from those of another: by name, by rules, and resized.

All functions are pure. Parameters are dicts from names such as 'encoder/layers_0/...' to arrays.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from flaxformer_lite.checks.training_checks import rules
from flaxformer_lite.field_rules import NOT_IN_WEIGHTS
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]
Arrays = Mapping[str, np.ndarray]

# The end of a name, and the axis of the vocabulary or of the positions.
OF_VOCABULARY = {r"embedding/embedding": 0, r"output/kernel": 0, r"output/bias": 0}
OF_POSITIONS = {r"learned/embedding": 0, r"length/kernel": 1, r"length/bias": 0}
FIRST = 3  # parameters that an error message names
NEW, LOADED, RESIZED = "new", "loaded", "resized"


@dataclasses.dataclass(frozen=True)
class Match:
    """Where a new parameter comes from."""

    old: str | None  # its name in the other run; None: it is initialised as in any other run
    kind: str  # NEW, LOADED or RESIZED
    axis: int | None = None  # RESIZED: the axis whose size may differ; None: no size may


def match(new: Shapes, old: Shapes, config: Config, other: Config) -> dict[str, Match]:
    """Returns the source of each new parameter, by its name.

    A rule of `init.map` gives the old name of the parameters whose names it matches, the first such
    rule counts; all others have the same name in both runs.

    Args:
      new, old: the shapes of the parameters of the run and of `init.run`.
      config, other: their configs.

    Raises:
      InputError: a rule matches nothing, a shape differs, or parameters are missing under
        `init.missing='refuse'`.
    """
    where, parsed = config.init.run, rules(config.init.map)
    used, loads = [0] * len(parsed), [0] * len(parsed)
    found: dict[str, Match] = {}
    missing = []
    for name, shape in new.items():
        source: str | None = name
        for number, (pattern, template) in enumerate(parsed):
            if matched := pattern.match(name):
                source = matched.expand(template) + name[matched.end() :] if template else None
                used[number] += 1
                loads[number] += source is None or source in old
                break
        if source is not None and source not in old:
            missing.append(name)
            source = None
        found[name] = Match(None, NEW) if source is None else _sized(name, shape, source, old)
    for rule, matched_names, loaded_names in zip(config.init.map, used, loads, strict=True):
        if not matched_names:
            raise InputError(
                f"config.init.map: {rule!r} matches no parameter of this model; their names start "
                f"with {', '.join(_starts(new))}."
            )
        if not loaded_names:
            raise InputError(
                f"config.init.map: {rule!r} leads to no parameter of {where}; their names start "
                f"with {', '.join(_starts(old))}."
            )
    if missing and config.init.missing == "refuse":
        raise InputError(
            f"config.init.missing: {where} lacks {_named(missing)}{_differing(config, other)}; "
            "initialise them as in any other run by init.missing='random', or take them from "
            "others by init.map."
        )
    _check_sizes(new, old, found, config, other)
    return found


def _sized(name: str, shape: tuple[int, ...], source: str, old: Shapes) -> Match:
    """Returns the match of two names, by their shapes."""
    if old[source] == shape:
        return Match(source, LOADED)
    for end, axis in {**OF_VOCABULARY, **OF_POSITIONS}.items():
        if re.search(rf"(^|/|_){end}$", name) and len(shape) == len(old[source]):
            return Match(source, RESIZED, axis)
    return Match(source, RESIZED)


def is_of_vocabulary(name: str) -> bool:
    """Whether a parameter has a row for each token id."""
    return any(re.search(rf"(^|/|_){end}$", name) for end in OF_VOCABULARY)


def _check_sizes(
    new: Shapes, old: Shapes, found: Mapping[str, Match], config: Config, other: Config
) -> None:
    """Raises InputError if a parameter cannot have the shape of the new one."""
    for name, each in found.items():
        if each.kind != RESIZED:
            continue
        assert each.old is not None, "a resized parameter has a source"
        to, since = new[name], old[each.old]
        what = f"{name} has shape {to} here, and {each.old} in {config.init.run} has {since}"
        others = [axis for axis in range(len(to)) if axis != each.axis]
        if each.axis is None or any(to[axis] != since[axis] for axis in others):
            raise _mismatch(name, each, what, config, other)
        if is_of_vocabulary(name):
            if config.init.vocabulary != "extend":
                of_source = config.model.target_vocab_size is None or name.startswith("source_")
                field = "data.vocab_size" if of_source else "data.target_vocab_size"
                raise InputError(
                    f"config.{field}: {what}; use {field}={since[each.axis]}, or "
                    "init.vocabulary='extend'."
                )
        elif to[each.axis] > since[each.axis] and config.init.missing == "refuse":
            raise InputError(
                f"config.model.max_length: {what}; leave it at {since[each.axis]} or less, or "
                "initialise the new positions as in any other run by init.missing='random'."
            )


def _mismatch(name: str, each: Match, what: str, config: Config, other: Config) -> InputError:
    """Returns the error about a parameter of another shape; it names the field to change."""
    if each.old == name and name.startswith("classes/"):
        return InputError(
            f"config.model.num_classes: {what}; for other classes, initialise the last layer as in "
            "any other run by init.map='classes='."
        )
    differing = _fields_that_differ(config, other)
    field = "init.map" if each.old != name or not differing else differing[0]
    return InputError(
        f"config.{field}: {what}{_differing(config, other)}; use the shape of that run, or leave "
        "the parameter out by a rule of init.map with nothing after its '='."
    )


def _starts(shapes: Shapes) -> list[str]:
    return sorted({name.split("/")[0] for name in shapes})


def _named(names: Sequence[str]) -> str:
    more = len(names) - FIRST
    return ", ".join(names[:FIRST]) + (f" and {more} more parameters" if more > 0 else "")


def _fields_that_differ(config: Config, other: Config) -> list[str]:
    """Returns the fields of the model, apart from those that no parameter depends on."""
    free = ("vocab_size", "target_vocab_size", *NOT_IN_WEIGHTS)
    return [
        f"model.{field.name}"
        for field in dataclasses.fields(config.model)
        if field.name not in free
        and getattr(config.model, field.name) != getattr(other.model, field.name)
    ]


def _differing(config: Config, other: Config) -> str:
    """Returns '; in that run model.d_model is 16, not 32' for the fields that differ."""
    parts = []
    for name in _fields_that_differ(config, other):
        field = name.removeprefix("model.")
        parts.append(
            f"{name} is {getattr(other.model, field)!r}, not {getattr(config.model, field)!r}"
        )
    return f"; in that run {', '.join(parts)}" if parts else ""


def merged(
    found: Mapping[str, Match],
    old: Arrays,
    fresh: Arrays,
    *,
    spellings: Sequence[np.ndarray] = (),
    new_embeddings: str = "mean",
    new_bias: float = 0.0,
) -> dict[str, np.ndarray]:
    """Returns the first parameters.

    Args:
      found: the result of `match`.
      old: the parameters of the other run.
      fresh: new parameters, initialised as in any other run; at least those that are NEW or
        RESIZED.
      spellings: the ids of the old pieces that spell each new piece.
      new_embeddings: as `init.new_embeddings`.
      new_bias: as `init.new_bias`.
    """
    result = {}
    for name, each in found.items():
        if each.old is None:
            result[name] = np.asarray(fresh[name])
        elif each.kind == LOADED:
            result[name] = np.asarray(old[each.old])
        elif is_of_vocabulary(name):
            rows = fresh[name][len(old[each.old]) :]
            if new_embeddings == "mean":
                rows = mean_rows(old[each.old], spellings)
            result[name] = np.concatenate([old[each.old], rows]).astype(np.float32)
        else:
            assert each.axis is not None, "`match` refuses others"
            result[name] = resized(old[each.old], fresh[name], each.axis)
        if new_bias and re.search(r"(^|/|_)output/bias$", name) and len(spellings):
            result[name] = result[name].copy()
            result[name][-len(spellings) :] += np.float32(new_bias)
    return result


def mean_rows(rows_VD: np.ndarray, spellings: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean row of each spelling, (spellings, ...): ids of `rows_VD`."""
    means = [rows_VD[ids].mean(axis=0, dtype=np.float64) for ids in spellings]
    return np.array(means, np.float32).reshape(len(means), *rows_VD.shape[1:])


def resized(old: np.ndarray, fresh: np.ndarray, axis: int) -> np.ndarray:
    """Returns the first rows of `old` along `axis`, then those of `fresh` that it lacks."""
    size = fresh.shape[axis]
    first, last = np.split(fresh, [min(size, old.shape[axis])], axis=axis)
    kept = np.take(old, np.arange(first.shape[axis]), axis=axis)
    return np.concatenate([kept, last], axis=axis).astype(fresh.dtype)


def table(
    found: Mapping[str, Match], new: Shapes, old: Shapes, config: Config, other: Config
) -> str:
    """Returns the table of `init.txt`: each parameter, and what becomes of it."""
    rows = []
    for name, each in found.items():
        source = "" if each.old in (None, name) else f" from {each.old}"
        if each.kind == RESIZED:
            assert each.old is not None, "a resized parameter has a source"
            source += f" of shape {old[each.old]}"
        rows.append((each.kind, f"{name} {new[name]}{source}"))
    used = {each.old for each in found.values()}
    rows += [("left out", f"{name} {shape}") for name, shape in old.items() if name not in used]
    lines = [f"{kind:<8}  {text}" for kind, text in rows]
    differing = _differing(config, other)
    note = [f"note: {differing.removeprefix('; ')}"] if differing else []
    return "\n".join([*note, *lines]) + "\n"
