"""The vocabularies of a config: one for source and target, or with `data.target_tokenizer` two.

The settings of one side of two are those of a run with one tokenizer, see `of_side`. So whatever
holds for a tokenizer is written once.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Set
from typing import Any

from flaxformer_lite.field_rules import SUBWORDS
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.tokenizer_checks import (
    OF_SUBWORDS,
    check_tokenizer,
    expected_vocabulary,
    follows_tokenizer,
    vocabulary_size,
)

SIDES = ("source", "target")
# The fields of `data` and `model` that each side has: `data.tokenizer`, `data.target_tokenizer`.
OF_DATA, OF_MODEL = ("tokenizer", "tokenizer_file", "vocab_size"), ("vocab_size",)
FIELDS = [*(f"data.{name}" for name in OF_DATA), *(f"model.{name}" for name in OF_MODEL)]
Sizes = tuple[int, int | None]  # of source and target; None: both sides share one vocabulary


def sides_of(config: Config) -> tuple[str, ...]:
    """Returns the sides with a tokenizer of their own: 'source' alone if both share one."""
    return SIDES if config.data.target_tokenizer is not None else SIDES[:1]


def target_name(name: str) -> str:
    """Returns 'data.target_tokenizer' for 'data.tokenizer'."""
    section, field = name.split(".")
    return f"{section}.target_{field}"


def of_side(config: Config, side: str) -> Config:
    """Returns the config of a run whose one tokenizer is that of 'source' or 'target'."""

    def replaced(section: object, names: tuple[str, ...]) -> dict[str, Any]:
        own = {name: getattr(section, f"target_{name}") for name in names}
        unset = dict.fromkeys(f"target_{name}" for name in names)
        return {**own, **unset} if side == "target" else {**unset}

    data = dataclasses.replace(config.data, **replaced(config.data, OF_DATA))
    model = dataclasses.replace(config.model, **replaced(config.model, OF_MODEL))
    return dataclasses.replace(config, data=data, model=model)


@contextlib.contextmanager
def named_for(side: str) -> Iterator[None]:
    """Names the fields of the target in an error of this block, which is about a side's config."""
    try:
        yield
    except InputError as error:
        if side == "source":
            raise
        raise InputError(_of_target(error.what), where=_of_target(error.where)) from error


def _of_target(message: str) -> str:
    names = "|".join(sorted(map(re.escape, FIELDS), key=len, reverse=True))
    return re.sub(rf"\b({names})\b", lambda found: target_name(found[1]), message)


def check_vocabularies(config: Config, given: Set[str]) -> None:
    """Raises InputError if a field contradicts a tokenizer, or the two tokenizers each other.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    if config.data.target_tokenizer is None:
        check_tokenizer(config, given)
        return
    _check_pair(config)
    kinds = config.data.tokenizer, config.data.target_tokenizer
    for side, other_kind in zip(SIDES, reversed(kinds), strict=True):
        own = of_side(config, side)
        if side == "source":  # a target must not contain the mask symbol; a source may
            own = dataclasses.replace(own, model=dataclasses.replace(own.model, decoder="causal"))
        of_one = {name for name in FIELDS if _name(name, side) in given}
        # A field has an effect if it has one on either side.
        others = {f"data.{name}" for name in OF_SUBWORDS if other_kind in SUBWORDS}
        with named_for(side):
            check_tokenizer(own, (given - set(FIELDS) - others) | of_one)


def _name(name: str, side: str) -> str:
    return target_name(name) if side == "target" else name


def _check_pair(config: Config) -> None:
    """Raises InputError if a setting needs one vocabulary, or tokenizers of one kind."""
    data, init = config.data, config.init
    if data.tokenizer == "marian":
        raise InputError(
            "config.data.target_tokenizer: an imported tokenizer has the models of both sides; "
            "leave it unset."
        )
    if init.vocabulary == "extend":
        raise InputError(
            "config.init.vocabulary: 'extend' requires one vocabulary for both sides, and "
            f"data.target_tokenizer={data.target_tokenizer!r} has another one; leave it unset."
        )
    kinds = data.tokenizer, data.target_tokenizer
    if data.subword_sampling and (kinds[0] != kinds[1] or kinds[0] not in SUBWORDS):
        raise InputError(
            "config.data.subword_sampling: requires 2 tokenizers of one kind, 'unigram' or 'bpe', "
            f"got data.tokenizer={kinds[0]!r} and data.target_tokenizer={kinds[1]!r}; leave it "
            "unset."
        )
    if data.target_tokenizer_file is not None and init.run is not None:
        raise InputError(
            "config.data.target_tokenizer_file: the tokenizers are those of init.run, to whose "
            "pieces its embeddings belong; leave this unset."
        )
    if data.target_tokenizer_file is not None and not data.target_tokenizer_file.strip():
        raise InputError(
            "config.data.target_tokenizer_file: expected a path, got "
            f"{data.target_tokenizer_file!r}; leave it unset."
        )


def copied_from(config: Config) -> list[str]:
    """Returns the run or the files of copied tokenizers; [] if one is trained, or extended."""
    if config.init.vocabulary == "extend":
        return []
    if config.init.run is not None:
        return [config.init.run]
    files = [of_side(config, side).data.tokenizer_file for side in sides_of(config)]
    return [] if None in files else [name for name in files if name is not None]


def follow_tokenizers(config: Config) -> bool:
    """Whether the size of a vocabulary of the model is known only from its tokenizer."""
    return any(follows_tokenizer(of_side(config, side)) for side in sides_of(config))


def vocabulary_sizes(config: Config, of_tokenizer: Sizes) -> Sizes:
    """Returns the arguments of `with_vocabulary` for a tokenizer with vocabularies of these sizes.

    Raises:
      InputError: the tokenizer has two vocabularies and the config one, or the reverse.
    """
    source, target = of_tokenizer
    if (target is None) != (config.data.target_tokenizer is None):
        has = "one vocabulary for both sides" if target is None else "a vocabulary for each side"
        raise InputError(
            f"config.data.target_tokenizer: the tokenizer of the run has {has}, got "
            f"{config.data.target_tokenizer!r}; put the run's own config.json and tokenizer.model "
            "back."
        )
    of_source = vocabulary_size(of_side(config, "source"), source)
    return of_source, None if target is None else vocabulary_size(of_side(config, "target"), target)


def expected_vocabularies(config: Config, default: int | None = None) -> Sizes:
    """Returns the arguments of `with_vocabulary` by the config alone, see `expected_vocabulary`.

    Args:
      default: the size of a vocabulary that only the data have; None: there is none.

    Raises:
      InputError: only the data have a size, and there is no default.
    """
    found: list[int] = []
    for side in sides_of(config):
        size = expected_vocabulary(of_side(config, side)) or default
        if size is None:
            prefix = "" if side == "source" else "target_"
            raise InputError(
                f"config.model.{prefix}vocab_size: required by a plan, which reads no texts, "
                f"because data.{prefix}vocab_size is None; set it to the number of symbols, or to "
                "an estimate."
            )
        found.append(size)
    return found[0], found[1] if len(found) > 1 else None
