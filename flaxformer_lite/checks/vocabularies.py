"""The vocabularies of a config: one for source and target, or with `data.target_tokenizer` two.

The settings of one side of two are those of a run with one tokenizer, see `of_side`. So whatever
holds for a tokenizer is written once.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Set
from typing import Any

from flaxformer_lite.field_rules import BYTE_VOCABULARY, COUNTED, FROM_FILE, SUBWORDS
from flaxformer_lite.fields import Config
from flaxformer_lite.system.errors import InputError

# Kinds that ignore the fields about training subwords, and the reason.
WHY = {
    **dict.fromkeys(COUNTED, "which has the symbols of all training texts"),
    "byte": "which has the 256 bytes",
    **dict.fromkeys(FROM_FILE, "which is read from a file"),
}
OF_SUBWORDS = ("vocab_limit", "vocabulary_sample", "character_coverage", "subword_sampling")
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


# One tokenizer.


def check_tokenizer(config: Config, given: Set[str]) -> None:
    """Raises InputError if a field contradicts the kind of the tokenizer, or is ignored by it.

    Args:
      given: 'section.field' of each field that differs from its default, or was given.
    """
    data = config.data
    kind, why = data.tokenizer, WHY.get(data.tokenizer)
    for name in OF_SUBWORDS:
        if why is not None and f"data.{name}" in given:
            raise InputError(
                f"config.data.{name}: has no effect with data.tokenizer={kind!r}, {why}; leave it "
                "unset, or set data.tokenizer to 'unigram' or 'bpe'."
            )
    if kind in FROM_FILE and data.tokenizer_file is None and config.init.run is None:
        file = "a SentencePiece model" if kind == "sentencepiece" else "a tokenizer.json"
        raise InputError(
            f"config.data.tokenizer_file: required by data.tokenizer={kind!r}; set it to the path "
            f"of {file}."
        )
    if why is not None and config.init.vocabulary == "extend":
        raise InputError(
            "config.init.vocabulary: 'extend' requires data.tokenizer='unigram' or 'bpe', got "
            f"{kind!r}; leave it unset."
        )
    _check_size(config)
    _check_mask(config)


def _check_size(config: Config) -> None:
    """Raises InputError if the kind needs a size, has its own, or the model has another one."""
    data, of_model = config.data, config.model.vocab_size
    if data.vocab_size is None and data.tokenizer not in WHY:
        raise InputError(
            "config.data.vocab_size: expected a number of pieces for data.tokenizer="
            f"{data.tokenizer!r}, got None; set it, for example to 8000."
        )
    if data.tokenizer == "byte" and data.vocab_size is not None:
        raise InputError(
            f"config.data.vocab_size: data.tokenizer='byte' has its own size, {BYTE_VOCABULARY}, "
            f"got {data.vocab_size}; set --config.data.vocab_size=None."
        )
    most = BYTE_VOCABULARY if data.tokenizer == "byte" else data.vocab_size
    if of_model is None or most is None:
        return
    has_one_size = data.tokenizer == "byte" or not follows_tokenizer(config)
    if of_model > most or (of_model < most and has_one_size):
        field = "" if data.vocab_size is None else "data.vocab_size = "
        raise InputError(
            f"config.model.vocab_size: {of_model} contradicts {field}{most}, the size of the "
            "tokenizer; leave model.vocab_size unset."
        )


def _check_mask(config: Config) -> None:
    """Raises InputError if a target may contain the unknown token, and that is the mask symbol."""
    data = config.data
    is_copied = data.tokenizer_file is not None or config.init.run is not None
    is_bounded = data.tokenizer in COUNTED and (is_copied or data.vocab_size is not None)
    if config.model.decoder != "masked" or not (is_bounded or data.tokenizer in FROM_FILE):
        return
    counts_all = (
        " all symbols of the training texts (data.vocab_size=None, no copied tokenizer), or"
    )
    raise InputError(
        "config.model.decoder: 'masked' uses the unknown token as its mask symbol, and targets of "
        f"data.tokenizer={data.tokenizer!r} may contain it; use"
        f"{counts_all if is_bounded else ''} data.tokenizer='unigram', 'bpe' or 'byte'."
    )


def follows_tokenizer(config: Config) -> bool:
    """Whether the model has the size of the tokenizer, which `data.vocab_size` may only bound."""
    return config.data.tokenizer in WHY or config.data.vocab_limit == "soft"


def vocabulary_size(config: Config, of_tokenizer: int) -> int:
    """Returns the size of the model's vocabulary, for a tokenizer of this size."""
    size = config.data.vocab_size
    return of_tokenizer if size is None or follows_tokenizer(config) else size


def expected_vocabulary(config: Config) -> int | None:
    """Returns the size of the vocabulary by the config, or its limit; None: the data has it."""
    if config.data.tokenizer == "byte":
        return BYTE_VOCABULARY
    return config.model.vocab_size or config.data.vocab_size
